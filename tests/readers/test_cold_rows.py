"""A cold batch of rows of one shape from a remote pack fetches little more than its rows."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import pack
from penstock.cache.disk import DiskCache
from penstock.readers import Dataset
from tests.files import upload
from tests.readers.remote_sets import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

SAMPLES, ROW_BYTES = 300, 20_000


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.uint8]]:
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(1)
    data = random.integers(0, 256, (SAMPLES, ROW_BYTES), dtype=np.uint8)
    np.save(folder / "data.npy", data)
    pack(str(folder / "data.npy"), str(folder / "pack"), shard_bytes=2**21, seed=1)
    return folder / "pack", data


class Reads:
    """A remote pack, and the ranges that are read of its shards."""

    def __init__(self, dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset.open()
        assert dataset.remote is not None
        self.dataset, self.spans = dataset, list[tuple[str, int, int]]()
        store = dataset.remote.fetcher.store
        read = store.read

        def watched(path: str, span: Any = None, **rest: Any) -> Any:
            answer = read(path, span, **rest)
            if span is not None:
                self.spans.append((path, *span))
            return answer

        monkeypatch.setattr(store, "read", watched)
        # Open shards first, so that heads and tails aren't counted.
        dataset.read(self.rows(1))
        self.spans.clear()

    def rows(self, each: int) -> NDArray[np.int64]:
        """Return rows of each shard, from different positions."""
        rows = rows_of(self.dataset)
        found = [rows[rows[:, 0] == shard] for shard in np.unique(rows[:, 0])]
        return np.concatenate([some[:: max(1, len(some) // each)][:each] for some in found])

    @property
    def bytes(self) -> int:
        return sum(end - start for _, start, end in self.spans)


@pytest.fixture
def reads(
    packed: tuple[Path, Any], memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Reads]:
    import fsspec

    upload(packed[0], fsspec.filesystem("memory"), memory)
    cache = DiskCache(tmp_path / "cache", max_bytes="64MiB")
    with Dataset(f"memory://{memory}", cache=cache, fields=("array",)) as dataset:
        yield Reads(dataset, monkeypatch)


def check(reads: Reads, data: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
    batch = reads.dataset.read(rows)
    values: Any = batch.columns["array"]
    wanted = {row.tobytes() for row in data}
    assert {row.tobytes() for row in values.values} <= wanted
    assert len({row.tobytes() for row in values.values}) == len(rows)


def test_a_cold_batch_fetches_its_rows_of_all_shards_by_one_call(
    reads: Reads, packed: tuple[Path, NDArray[np.uint8]], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote, calls = reads.dataset.remote, list[int]()
    assert remote is not None
    fetch = remote.upstream.fetch

    def counted(ranges: Any, *rest: Any, **more: Any) -> None:
        calls.append(len(ranges))
        fetch(ranges, *rest, **more)

    monkeypatch.setattr(remote.upstream, "fetch", counted)
    before, rows = reads.dataset.traffic(), reads.rows(3)
    check(reads, packed[1], rows)
    assert reads.bytes <= len(rows) * (ROW_BYTES + 2 * 4096)
    assert len(calls) == 1
    check(reads, packed[1], rows)
    assert len(calls) == 1
    traffic = reads.dataset.traffic()
    # One row of each shard was cached.
    shards = len(np.unique(rows[:, 0]))
    assert (traffic.misses - before.misses, traffic.hits - before.hits) == (
        len(rows) - shards,
        len(rows) + shards,
    )


def test_a_fill_after_rows_fetches_only_the_gaps(
    reads: Reads, packed: tuple[Path, NDArray[np.uint8]]
) -> None:
    remote, index = reads.dataset.remote, reads.dataset.index
    assert remote is not None
    check(reads, packed[1], reads.rows(3))
    for shard in range(len(index.sizes)):
        remote.fill(index.source(shard))
    for path in {path for path, *_ in reads.spans}:
        spans = sorted((start, end) for one, start, end in reads.spans if one == path)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    check(reads, packed[1], reads.rows(10))


def test_a_row_of_wrong_bytes_is_fetched_again(
    reads: Reads, packed: tuple[Path, NDArray[np.uint8]], tmp_path: Path
) -> None:
    rows = reads.rows(1)
    check(reads, packed[1], rows)
    (fill, *_) = (tmp_path / "cache").rglob("*.part")
    data = np.memmap(fill, np.uint8, "r+")
    data[:] = np.where(data != 0, data ^ 1, 0)
    data.flush()
    check(reads, packed[1], rows)
