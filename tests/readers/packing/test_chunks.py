"""Packs of data in chunks: each chunk is decoded once, samples are mixed, ids stay, damage is
quarantined."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.readers import Dataset, pack
from penstock.readers.packing import plan_samples
from penstock.testing import sample_values
from tests.properties import examples
from tests.readers.formats import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = tuple((7, 5, 8) for _ in range(5))
ROWS = 100


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "DECODED", [])
    yield from blocks.install(monkeypatch)


def samples_of(root: Path) -> tuple[list[int], list[str], list[dict[str, Any]]]:
    """Return the source rows of a pack's samples in its order, their names, and the samples."""
    with Dataset(root) as dataset:
        rows = dataset.contents.rows(np.arange(len(dataset)))
        names = dataset.names(range(len(dataset)))
        found = sample_values(dataset.read(rows), dataset.schema)
    return [int(name.removeprefix("row ")) for name in names], names, found


def assert_right(order: list[int], found: list[dict[str, Any]]) -> None:
    for row, sample in zip(order, found, strict=True):
        for field in blocks.FIELDS:
            assert np.array_equal(sample[field], blocks.value(field, row))


@pytest.mark.parametrize("where", ["local", "remote", "dataset"])
def test_a_shuffled_pack_mixes_and_decodes_each_chunk_once(tmp_path: Path, where: str) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    source: Any = root
    more: dict[str, Any] = {}
    if where == "remote":
        memory = blocks.upload(root, f"/pack-{tmp_path.name}")
        source, more = f"memory://pack-{tmp_path.name}", {"cache": tmp_path / "cache"}
    if where == "dataset":
        source = Dataset(root, fields=("x",))
    done = pack(source, tmp_path / "pack", shard_bytes=400, seed=3, **more)
    assert (done.samples, done.quarantined) == (ROWS, 0)
    assert done.shards > 4
    order, _, found = samples_of(tmp_path / "pack")
    assert sorted(order) == list(range(ROWS))
    assert order != sorted(order)
    assert_right(order, found)
    assert set(Counter(blocks.DECODED).values()) == {1}
    if where == "remote":
        memory.rm(f"/pack-{tmp_path.name}", recursive=True)
    if where == "dataset":
        source.close()


def test_an_unshuffled_pack_has_the_ids_of_its_source(tmp_path: Path) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    pack(root, tmp_path / "pack", shard_bytes=400, shuffle=False, fields=("t", "y"))
    with Dataset(tmp_path / "pack", fields=("t", "y", "id")) as dataset:
        assert dataset.index.schema.keys() == {"t", "y"}
        assert dataset.column("y").tolist() == [row / 4 for row in range(ROWS)]
        assert dataset.names([0, 17]) == ["row 0", "row 17"]


def test_ranks_and_killed_runs_make_the_same_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    monkeypatch.setattr("penstock.readers.packing.pack_sources.WINDOW_BYTES", 700)
    pack(root, tmp_path / "one", shard_bytes=400, seed=3)
    for rank in range(3):
        pack(root, tmp_path / "three", shard_bytes=400, seed=3, rank=rank, size=3)
    assert samples_of(tmp_path / "one")[0] == samples_of(tmp_path / "three")[0]


def test_rows_of_a_damaged_chunk_are_quarantined_by_name(tmp_path: Path) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    with Dataset(root) as dataset:
        dataset.open()
    with (root / "2.blocks").open("r+b") as file:
        file.seek(7 * blocks.X_BYTES)
        file.write(b"\0\0\0\0")
    done = pack(root, tmp_path / "pack", shard_bytes=400)
    assert (done.samples, done.quarantined) == (ROWS - 7, 7)
    order, _, found = samples_of(tmp_path / "pack")
    assert sorted(order) == [row for row in range(ROWS) if not 40 <= row < 47]
    assert_right(order, found)
    lines = (tmp_path / "pack" / "_penstock" / "quarantine.jsonl").read_text()
    assert '"row 40"' in lines


@examples(60)
@given(
    units=st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5).filter(
        lambda units: any(map(len, units))
    ),
    seed=st.integers(0, 99),
    window_bytes=st.integers(1, 500),
)
def test_windows_of_units_are_mixed_and_no_unit_is_in_two(
    units: list[list[int]], seed: int, window_bytes: int
) -> None:
    each = [np.array(mine, np.int64) for mine in units]
    rows = np.concatenate(each)
    sizes = np.random.default_rng(seed).integers(1, 20, int(rows.sum()))
    plan = plan_samples(
        sizes, units=each, shuffle=True, seed=seed, shard_bytes=50, window_bytes=window_bytes
    )
    order = np.concatenate(list(plan))
    assert sorted(order.tolist()) == list(range(len(sizes)))
    of_unit = np.repeat(np.arange(len(rows)), rows)
    unit_bytes = np.bincount(of_unit, sizes)
    # Behind the last sample of a unit it doesn't come again; what is open at a time is bounded.
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    first = np.array([places[of_unit == unit].min() for unit in range(len(rows))])
    last = np.array([places[of_unit == unit].max() for unit in range(len(rows))])
    for place in range(len(order)):
        is_open = (first <= place) & (place <= last)
        assert unit_bytes[is_open].sum() <= 2 * window_bytes + 2 * unit_bytes.max()
