"""A batch of remote shards in chunks loads what it misses with one call, even if the disk fails."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import DatasetError, DiskCache, FetchError, IndexChangedError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import DenseColumn
from penstock.readers.formats import ChunkShard
from penstock.readers.index import Index
from tests.readers.formats import blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode
    from penstock.readers.formats import OpenShard

MODES: tuple[ReadMode, ...] = ("copy", "pread", "mmap")
UNITS = tuple((7, 5) for _ in range(6))
ROWS = 72


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from blocks.install(monkeypatch)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    place = f"/chunks-{tmp_path.name}"
    memory = blocks.upload(blocks.write(tmp_path / "sent", UNITS), place)
    yield place
    if memory.exists(place):
        memory.rm(place, recursive=True)


def opened(place: str, tmp_path: Path, *, max_bytes: int | None = None, **more: Any) -> Dataset:
    cache = DiskCache(tmp_path / "cache", max_bytes=max_bytes or 2**24)
    dataset = Dataset(f"memory:/{place}", cache=cache, **more)
    dataset.open()
    return dataset


def rows_of(dataset: Dataset, ids: Sequence[int] | None = None) -> NDArray[np.int64]:
    order = np.random.default_rng(5).permutation(ROWS) if ids is None else np.array(ids)
    return dataset.contents.rows(order)


def check(dataset: Dataset, rows: NDArray[np.int64], *, mode: ReadMode = "copy") -> None:
    batch = dataset.read(rows, mode=mode)
    ids = batch.ids.tolist()
    x, y = batch.columns["x"], batch.columns["y"]
    assert isinstance(x, DenseColumn)
    assert isinstance(y, DenseColumn)
    assert x.values.tolist() == [blocks.value("x", i) for i in ids]
    assert y.values.tolist() == [blocks.value("y", i) for i in ids]


def count_fetches(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of ranges of each call to the fetcher."""
    assert dataset.remote is not None
    fetcher, calls = dataset.remote.fetcher, list[int]()
    whole = fetcher.fetch

    def fetch(ranges: Sequence[Any], *arguments: Any, **more: Any) -> None:
        calls.append(len(ranges))
        whole(ranges, *arguments, **more)

    monkeypatch.setattr(fetcher, "fetch", fetch)
    return calls


@pytest.mark.parametrize("reader", [blocks.Reader, blocks.ByParts])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_bytes", [2**24, 1])
def test_a_cold_batch_over_many_shards_is_one_call(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reader: type,
    mode: ReadMode,
    max_bytes: int,
) -> None:
    monkeypatch.setattr(blocks.Blocks, "reader_class", reader)
    with opened(place, tmp_path, max_bytes=max_bytes) as dataset:
        wanted = int(dataset.index.shard_bytes.sum())
        calls, before = count_fetches(dataset, monkeypatch), dataset.bytes_fetched
        check(dataset, rows_of(dataset), mode=mode)
        assert len(calls) == 1
        assert dataset.bytes_fetched - before == wanted
        calls.clear()
        check(dataset, rows_of(dataset), mode=mode)
        assert len(calls) == (max_bytes == 1)
        # Fields whose chunks are kept, together with others.
        dataset.release(range(len(UNITS)))
    with opened(place, tmp_path, max_bytes=max_bytes, fields=("y",)) as dataset:
        calls = count_fetches(dataset, monkeypatch)
        batch = dataset.read(rows_of(dataset), fields=("t", "y"), mode=mode)
        assert len(calls) == 1
        assert [batch.columns["t"].sample(n).tolist() for n in range(ROWS)] == [
            blocks.value("t", i) for i in batch.ids.tolist()
        ]


def test_a_few_samples_without_units_are_fetched_alone(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks.Blocks, "reader_class", blocks.ByParts)
    with opened(place, tmp_path, max_bytes=1, fields=("x",)) as dataset:
        calls, before = count_fetches(dataset, monkeypatch), dataset.bytes_fetched
        batch = dataset.read(rows_of(dataset, [1, 2, 3, 13, 60]))
        assert batch.columns["x"].values.tolist() == [
            blocks.value("x", i) for i in (1, 2, 3, 13, 60)
        ]
        assert calls == [3]  # three of them are adjacent
        assert dataset.bytes_fetched - before == 5 * blocks.X_BYTES


def fill_then_damage(place: str, tmp_path: Path) -> None:
    """Fill the cache, then flip a bit in the blob of shard 1."""
    with opened(place, tmp_path) as dataset:
        check(dataset, rows_of(dataset))
        keys = dataset.index.keys
    with (tmp_path / "cache" / "blobs" / keys[1]).open("r+b") as file:
        head = file.read(1)
        file.seek(0)
        file.write(bytes([head[0] ^ 1]))


@pytest.mark.parametrize("mode", MODES)
def test_a_cached_blob_that_the_disk_damaged_is_fetched_again(
    place: str, tmp_path: Path, mode: ReadMode
) -> None:
    fill_then_damage(place, tmp_path)
    with opened(place, tmp_path) as dataset:
        check(dataset, rows_of(dataset), mode=mode)
        assert dataset.traffic().refetched == 1
        check(dataset, rows_of(dataset), mode=mode)
        assert dataset.traffic().refetched == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_blob_that_another_thread_drops_before_it_is_checked_is_fetched_again(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: ReadMode
) -> None:
    fill_then_damage(place, tmp_path)
    real, dropped = Index.open, list[int]()

    def open_then_drop(index: Index, shard: int) -> OpenShard:
        found = real(index, shard)
        if shard == 1 and not dropped:
            dropped.append(shard)
            index.drop(shard)
        return found

    monkeypatch.setattr(Index, "open", open_then_drop)
    with opened(place, tmp_path) as dataset:
        check(dataset, rows_of(dataset), mode=mode)
    assert dropped


def test_a_cached_blob_that_was_truncated_under_a_reader_is_fetched_again_with_pread(
    place: str, tmp_path: Path
) -> None:
    with opened(place, tmp_path) as dataset:
        check(dataset, rows_of(dataset))
        os.truncate(tmp_path / "cache" / "blobs" / dataset.index.keys[2], 10)
        check(dataset, rows_of(dataset), mode="pread")


@pytest.mark.parametrize("mode", MODES)
def test_local_extents_are_views_of_a_map_unless_the_mode_is_pread(
    tmp_path: Path, mode: ReadMode
) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    with Dataset(root) as dataset:
        check(dataset, rows_of(dataset), mode=mode)
        shard = dataset.index.open(1)
        assert isinstance(shard, ChunkShard)
        data = shard.data.in_mode(mode)
        extents = list(range(2 * len(blocks.FIELDS)))
        read, views = data.read(extents), [data.view(extent) for extent in extents]
        assert [view is None for view in views] == [mode == "pread"] * len(extents)
        whole = (root / "1.blocks").read_bytes()
        recorded = dataset.index._sidecars.read(1).extents
        assert recorded is not None
        for extent, (one, view) in enumerate(zip(read, views, strict=True)):
            start = int(recorded.starts[extent])
            assert one.tobytes() == whole[start : start + int(recorded.sizes[extent])]
            assert not one.flags.writeable
            if view is not None:
                assert view.tobytes() == one.tobytes()
                assert not view.flags.writeable
        parts = data.read_parts([0, 5, 0, 0], [0, 2, 24, 12], [12, 2, 36, 24])
        assert [len(part) for part in parts] == [12, 0, 12, 12]
        assert b"".join(parts[i].tobytes() for i in (0, 3, 2)) == read[0][:36].tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_truncated_local_file_is_named(tmp_path: Path, mode: ReadMode) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    with Dataset(root) as dataset:
        rows = rows_of(dataset)
        os.truncate(root / "3.blocks", 40)
        with pytest.raises(IndexChangedError, match=r"3\.blocks"):
            dataset.read(rows, mode=mode)


def test_a_missing_local_file_is_named(tmp_path: Path) -> None:
    root = blocks.write(tmp_path / "set", UNITS)
    with Dataset(root) as dataset:
        dataset.open()
        (root / "2.blocks").unlink()
        with pytest.raises(IndexChangedError, match=r"2\.blocks"):
            dataset.read(rows_of(dataset))


def test_a_missing_object_is_named(place: str, tmp_path: Path) -> None:
    import fsspec

    with opened(place, tmp_path) as dataset:
        fsspec.filesystem("memory").rm(f"{place}/2.blocks")
        with pytest.raises(FetchError, match=r"2\.blocks"):
            dataset.read(rows_of(dataset))


def test_decoded_chunks_arent_fetched_again_without_a_cache(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(place, tmp_path, max_bytes=1, fields=("t", "y")) as dataset:
        wanted, before = int(dataset.index.shard_bytes.sum()), dataset.bytes_fetched
        rows = rows_of(dataset)
        calls = count_fetches(dataset, monkeypatch)
        for start in range(0, ROWS, 6):
            batch = dataset.read(rows[start : start + 6])
            assert batch.columns["y"].values.tolist() == [i / 4 for i in batch.ids.tolist()]
        assert dataset.bytes_fetched - before == wanted
        assert len(calls) < ROWS // 6


@pytest.mark.parametrize("fault", ["a shard's needs", "the fetch"])
def test_what_a_failed_batch_claimed_is_fetched_by_the_next(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with opened(place, tmp_path, max_bytes=1) as dataset:
        rows = rows_of(dataset)
        dataset.open()
        assert dataset.remote is not None
        with monkeypatch.context() as patch:
            calls: list[int] = []

            def fail(*_: Any, **__: Any) -> Any:
                calls.append(1)
                raise FetchError("planted", uri="x")

            if fault == "the fetch":
                patch.setattr(dataset.remote.fetcher, "fetch", fail)
            else:
                needs = blocks.Reader.needs

                def fail_later(self: Any, *arguments: Any) -> Any:
                    return fail() if self._first else needs(self, *arguments)

                patch.setattr(blocks.Reader, "needs", fail_later)
            with pytest.raises(FetchError, match="planted"):
                dataset.read(rows)
            assert calls
        check(dataset, rows)  # doesn't wait for the failed batch


def test_what_a_format_raises_for_a_damaged_file_names_the_dataset(tmp_path: Path) -> None:
    blocks.write(tmp_path / "set", UNITS)
    (damaged := sorted((tmp_path / "set").iterdir())[0]).write_bytes(b"no footer")
    wanted = rf"{re.escape(str(tmp_path / 'set'))}: a file isn't valid blocks data"
    with pytest.raises(DatasetError, match=wanted):
        Dataset(str(damaged.parent)).open()
