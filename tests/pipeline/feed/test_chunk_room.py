"""A loader decodes each chunk once if there is room, and otherwise reports that."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

from penstock.cache import DiskCache
from penstock.pipeline import DataLoader, Order
from penstock.pipeline.plan import World
from penstock.pipeline.report import diagnose
from penstock.readers import Dataset, concat
from penstock.readers.formats import chunk_files
from tests.readers.formats import blocks
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

UNITS = [[6, 6, 6, 6], [5, 7, 6], [6] * 5, [4, 8, 6]] * 2
SAMPLES = sum(map(sum, UNITS))
CHUNKS = 2 * sum(map(len, UNITS))
"""Chunks that are decoded: two of three fields of each unit."""


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from blocks.install(monkeypatch)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return blocks.write(tmp_path / "set", UNITS)


def loader(dataset: Any, **more: Any) -> DataLoader:
    asked: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 7, "as_dict": True}
    return DataLoader(dataset, **asked | more)


def epoch(found: DataLoader) -> list[int]:
    """The samples of an epoch, checked."""
    seen: list[int] = []
    for batch in found:
        rows = (batch["y"].numpy() * 4).astype(np.int64).tolist()
        assert batch["x"][:, 0].tolist() == rows
        seen += rows
    return seen


def needed() -> int:
    """Decodings where each chunk is decoded once and used up: batches are read ahead, of the next
    epoch too."""
    return sum(-(-taken // rows) for (_, _, rows), taken in blocks.TAKEN.items())


@pytest.mark.parametrize("window", [None, 2, 5])
def test_each_chunk_is_decoded_once_an_epoch(root: Path, window: int | None) -> None:
    with (
        Dataset(root) as dataset,
        loader(dataset, order=Order(window=window), drop_last=False) as found,
    ):
        for _ in range(3):
            assert sorted(epoch(found)) == [*range(SAMPLES)]
        counts = found.statistics()
        found.close()
        assert len(set(blocks.DECODED)) == CHUNKS
        assert len(blocks.DECODED) <= needed()
        assert counts.chunks_again == 0
        assert counts.decoded_bytes < 1.5 * counts.delivered_bytes  # some are being read
        assert counts.chunks_disk_bytes == 0
        assert 0 < counts.chunks_memory_bytes < counts.decoded_bytes
        assert "decoded (0 again), " in str(counts)


def test_an_epoch_that_drops_its_end_decodes_hardly_more(root: Path) -> None:
    with Dataset(root) as dataset, loader(dataset, batch_size=20, drop_last=True) as found:
        for _ in range(8):
            epoch(found)
        found.close()
        assert len(blocks.DECODED) <= 1.05 * needed()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_decode_what_they_read(root: Path, size: int) -> None:
    seen: list[int] = []
    for rank in range(size):
        blocks.DECODED.clear()
        blocks.TAKEN.clear()
        with (
            Dataset(root) as dataset,
            loader(
                dataset, world=World(rank, size), drop_last=True, order=Order(lanes=size)
            ) as found,
        ):
            mine = epoch(found)
        seen += mine
        # A unit is of one rank, or of two where their lanes meet in it.
        assert len(blocks.DECODED) <= needed() + 2 * size
        assert len(set(blocks.DECODED)) < CHUNKS
    assert len(set(seen)) == len(seen)


def test_what_memory_has_no_room_for_is_kept_in_the_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_files, "LEAST_BYTES", 1)
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with (
        Dataset(root, cache=cache, decoded_bytes=400) as dataset,
        loader(dataset, order=Order(window=64), drop_last=False) as found,
    ):
        for _ in range(2):
            epoch(found)
        counts = found.statistics()
        found.close()
        assert len(blocks.DECODED) <= needed()
        assert counts.chunks_again == 0
        assert counts.chunks_disk_bytes > 0
        assert counts.facts.chunks is not None
        assert counts.facts.chunks.file_bytes == 32 * 2**20
        assert "in the cache folder." in str(counts)
    left = cache.use(lambda shelf: shelf.catalogue.group_bytes("private"))
    assert left == 0
    cache.close()


def test_without_room_it_is_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "penstock"),
        Dataset(root, decoded_bytes=300) as dataset,
        loader(dataset, order=Order(window=64), drop_last=False) as found,
    ):
        assert sorted(epoch(found)) == [*range(SAMPLES)]
        counts = found.statistics()
    assert counts.chunks_decoded > 2 * CHUNKS
    assert counts.chunks_again > 0.4 * counts.chunks_decoded
    assert counts.decoded_bytes > 1.5 * counts.delivered_bytes
    assert counts.chunks_memory_bytes < 600
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 2
    assert f"mix {CHUNKS // 2} decode units" in said[0]
    assert "memory keeps up to 300 B, and the cache folder up to 0 B" in said[0]
    assert "some are decoded again" in said[1]


def test_the_verdict_names_chunks_that_are_decoded_again(root: Path) -> None:
    with (
        Dataset(root, decoded_bytes=300) as dataset,
        loader(dataset, order=Order(window=64), drop_last=False) as found,
    ):
        epoch(found)
        facts = found.statistics().facts
    told = diagnose(replace(facts, step_s=1.0, wait_s=9.0, wait_read_s=9.0, gil_late=0.0))
    assert (told.limit, told.cause) == ("disk", "decoded-again")
    assert " bytes were decoded: this rank's windows have 30 chunks of " in told.verdict
    assert 'Dataset(decoded_bytes="1MiB"), a cache=DiskCache(...)' in told.verdict
    assert "window=" in told.advice


def test_bounds_are_shared(root: Path, tmp_path: Path) -> None:
    other = blocks.write(tmp_path / "other", UNITS)
    with Dataset(root) as one, Dataset(other) as two:
        both = concat([one, two])
        whole = one.chunks[0].default_bytes() if one.open() else 0
        two.open()
        with loader(both, world=World(0, 1)) as found:
            epoch(found)
            assert len(both.chunks) == 2
            shared = [store.counts().max_bytes for store in both.chunks]
    assert all(2 * each < 1.5 * whole for each in shared)


@pytest.mark.parametrize("compression", ["uncompressed", "zstd"])
def test_tables_that_look_into_their_file_take_no_memory(tmp_path: Path, compression: str) -> None:
    table = pa.table({"x": np.arange(4000, dtype=np.int64)})
    feather.write_feather(table, str(tmp_path / "a.arrow"), compression=compression, chunksize=500)
    with Dataset(tmp_path, format="arrow", decoded_bytes=8000) as dataset, loader(dataset) as found:
        assert sorted(int(x) for batch in found for x in batch["x"]) == [*range(4000)]
        counts = found.statistics()
    is_mapped = compression == "uncompressed"
    assert (counts.chunks_decoded == 0) == is_mapped
    assert (counts.chunks_memory_bytes == 0) == is_mapped
    assert (counts.chunks_again == 0) == is_mapped


def test_threads_decode_at_a_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches beside one another need the same chunks, and yet both threads decode."""
    at_work, both, decode = list[int](), threading.Event(), blocks.Reader._decode

    def counted(self: blocks.Reader, data: Any, extent: int) -> Any:
        at_work.append(extent)
        if len(at_work) == 2:
            both.set()
        assert both.wait(PATIENCE_S)
        return decode(self, data, extent)

    monkeypatch.setattr(blocks.Reader, "_decode", counted)
    monkeypatch.setattr("penstock.pipeline.feed.runner.usable_cores", lambda: 2)
    with Dataset(root) as dataset, loader(dataset, drop_last=False, num_workers=2) as found:
        epoch(found)
    assert len(blocks.DECODED) <= needed()
