"""Test that rows copied from maps by several threads equal those gathered shard by shard."""

from __future__ import annotations

import json
import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ClosedError
from penstock.readers import Blocks, Dataset, Source, concat
from penstock.readers.fieldtypes import DenseColumn
from penstock.readers.formats.tokens import token_format
from penstock.readers.packing import pack
from penstock.readers.reading import (
    MOST_COPY_THREADS,
    BatchRows,
    CopyThreads,
    OpenShards,
    open_shards,
    plain_rows,
)
from penstock.readers.reading import parallel_copies as module

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


SETTINGS: dict[str, Any] = {"format": "tokens", "dtype": "uint16", "sample": (9,), "stride": (8,)}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(token_format, "PART_BYTES", 500)
    folder = tmp_path / "set"
    folder.mkdir()
    for number, size in enumerate((900, 300, 1600)):
        tokens = np.random.default_rng(number).integers(0, 60_000, size, np.uint16)
        tokens.tofile(folder / f"{number}.bin")
    return folder


def rows_of(dataset: Source) -> NDArray[np.int64]:
    return dataset.rows(np.random.default_rng(1).permutation(len(dataset)))


def values(column: Any) -> list[list[int]]:
    assert isinstance(column, DenseColumn)
    assert column.values.dtype == np.int64
    return [list(map(int, row)) for row in column.values]


@pytest.mark.parametrize("maps", [4096, 3])
def test_rows_of_many_shards_equal_gathered_ones(
    root: Path, maps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain_rows, "MAX_MAPS", maps)
    with Dataset(root, **SETTINGS) as dataset:
        rows = rows_of(dataset)
        wanted = values(dataset.read(rows, mode="pread").columns["tokens"])
        for start in range(0, len(rows), 37):
            batch = dataset.read(rows[start : start + 37])
            assert values(batch.columns["tokens"]) == wanted[start : start + 37]
            assert batch.ids.tolist() == dataset.ids(rows[start : start + 37]).tolist()
            assert batch.bytes_read == 18 * len(batch)
        bounds = [0, 10, 50, len(rows)]
        parts = dataset.read(rows).parts(bounds)
        found = [row for part in parts for row in values(part.columns["tokens"])]
        assert found == wanted
        assert [len(part) for part in parts] == [10, 40, len(rows) - 50]
        assert dataset.traffic().bytes_disk > 0


@pytest.mark.parametrize("maps", [4096, 3])
def test_rows_of_several_datasets_are_copied_together(
    root: Path, tmp_path: Path, maps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the maps of one have to end for those of the other, and after one is closed."""
    monkeypatch.setattr(plain_rows, "MAX_MAPS", maps)
    np.arange(2000, dtype=np.uint16).tofile(tmp_path / "other.bin")
    with Dataset(root, **SETTINGS) as one, Dataset(tmp_path / "other.bin", **SETTINGS) as other:
        both, blocks = concat([one, other]), Blocks()
        rows = rows_of(both)
        wanted = values(both.read(rows, mode="pread").columns["tokens"])
        reads = list[int]()
        real = Dataset.read

        def counted(self: Dataset, *arguments: Any, **more: Any) -> Any:
            reads.append(1)
            return real(self, *arguments, **more)

        monkeypatch.setattr(Dataset, "read", counted)
        for _ in range(2):
            for start in range(0, len(rows), 37):
                batch = both.read(rows[start : start + 37], blocks=blocks)
                assert values(batch.columns["tokens"]) == wanted[start : start + 37]
                assert batch.ids.tolist() == both.ids(rows[start : start + 37]).tolist()
                assert batch.bytes_read == 18 * len(batch)
        assert not reads
        traffic = one.traffic().bytes_disk, other.traffic().bytes_disk
        assert min(traffic) > 0
        other.close()
        with pytest.raises(ClosedError):
            both.read(rows, blocks=blocks)


def test_the_open_shards_of_a_process_are_bounded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_shards, "PROCESS_SHARDS", 8)
    np.arange(4000, dtype=np.uint16).tofile(tmp_path / "other.bin")
    with Dataset(root, **SETTINGS) as one, Dataset(tmp_path / "other.bin", **SETTINGS) as other:
        readers = [dataset._open() for dataset in (one, other)]
        for _ in range(3):
            for dataset, reader in zip((one, other), readers, strict=True):
                for shard in range(len(dataset.index.sizes)):
                    reader.shards.get([shard])
                assert sum(len(each.shards) for each in readers) <= 16


def test_parts_are_disjoint_and_writable(root: Path) -> None:
    with Dataset(root, **SETTINGS) as dataset:
        first, second = dataset.read(rows_of(dataset)[:8], blocks=Blocks()).parts([0, 4, 8])
    one, other = first.columns["tokens"], second.columns["tokens"]
    assert isinstance(one, DenseColumn)
    assert isinstance(other, DenseColumn)
    assert not np.shares_memory(one.values, other.values)
    assert one.values.flags.writeable


def test_files_of_several_dtypes_are_gathered(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(80, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(80, dtype=">i4"))
    with Dataset(tmp_path, format="tokens", sample=(8,)) as dataset:
        rows = dataset.rows(np.arange(20))
        for _ in range(2):
            found = values(dataset.read(rows).columns["tokens"])
            assert found == [list(range(i, i + 8)) for i in range(0, 80, 8)] * 2


def test_a_map_that_another_thread_reads_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may open a shard at the same time; both use the first map."""
    get, inner, calls = OpenShards.get, list[Any](), list[int]()

    def get_during_another(self: OpenShards, numbers: Sequence[int]) -> list[Any]:
        calls.append(len(numbers))
        if len(calls) > 1:
            return get(self, numbers)
        inner.append(dataset.read(rows))  # the other thread's whole read, inside this one's
        return [dataset.index.open(number) for number in numbers]

    with Dataset(root, **SETTINGS) as dataset:
        rows = rows_of(dataset)
        wanted = values(dataset.read(rows, mode="pread").columns["tokens"])
    with Dataset(root, **SETTINGS) as dataset:
        monkeypatch.setattr(OpenShards, "get", get_during_another)
        maps = list[Any]()
        add_shards = plain_rows.PlainRows.add_shards

        def record_maps(self: Any, *arguments: Any) -> Any:
            known = add_shards(self, *arguments)
            maps.append(dict(known.kept))
            return known

        monkeypatch.setattr(plain_rows.PlainRows, "add_shards", record_maps)
        batch = dataset.read(rows)
        assert values(batch.columns["tokens"]) == wanted == values(inner[0].columns["tokens"])
        first, last = maps
        assert all(last[shard] is first[shard] for shard in first)


@pytest.mark.parametrize(("shape", "shard_bytes"), [((4, 3), 1024), ((96, 96), 400_000)])
def test_rows_of_packs_are_plain_once_they_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], shard_bytes: int
) -> None:
    source, count = tmp_path / "source", 60
    source.mkdir()
    with (source / "metadata.jsonl").open("w") as lines:
        for number in range(count):
            np.save(source / f"{number}.npy", np.full(shape, number, np.float32))
            lines.write(json.dumps({"file_name": f"{number}.npy", "label": number % 7}) + "\n")
    pack(source, tmp_path / "pack", shard_bytes=shard_bytes)
    by_shard = list[int]()
    of = BatchRows.of

    def counted(rows: Any, *arguments: Any, **more: Any) -> BatchRows:
        by_shard.append(len(rows))
        return of(rows, *arguments, **more)

    monkeypatch.setattr(BatchRows, "of", counted)
    with Dataset(tmp_path / "pack", fields=("array", "label")) as dataset:
        assert len(dataset.index.sizes) > 1
        rows = rows_of(dataset)
        wanted: Any = dataset.read(rows, mode="pread").columns
        for _ in range(3):
            found: Any = dataset.read(rows)
            for name in ("array", "label"):
                assert found.columns[name].values.dtype == wanted[name].values.dtype
                np.testing.assert_array_equal(found.columns[name].values, wanted[name].values)
            assert found.bytes_read == 4 * math.prod(shape) * count
        assert len(by_shard) == 1  # blocks that were read once are checked


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> CopyThreads:
    monkeypatch.setattr(module, "usable_cores", lambda: 64)
    return CopyThreads()


def test_each_part_is_worked_on_once_and_several_threads_do_it(threads: CopyThreads) -> None:
    together, done, names = threading.Barrier(MOST_COPY_THREADS), list[int](), set[str]()

    def work(part: int) -> None:
        if part < MOST_COPY_THREADS:
            together.wait(60)  # no thread continues before all have started
        names.add(threading.current_thread().name)
        done.append(part)

    threads.run(work, range(40))
    threads.close()
    assert sorted(done) == list(range(40))
    assert len(names) == MOST_COPY_THREADS
    assert (
        len([name for name in names if name.startswith("penstock-move")]) == MOST_COPY_THREADS - 1
    )


def test_the_error_of_one_part_is_raised_and_the_rest_is_skipped(threads: CopyThreads) -> None:
    begun = []

    def work(part: int) -> None:
        begun.append(part)
        raise OSError(f"part {part}")

    with pytest.raises(OSError, match="part"):
        threads.run(work, range(1000))
    assert len(begun) <= MOST_COPY_THREADS
    threads.run(begun.append, [7])
    assert begun[-1] == 7
    threads.close()


def test_closed_threads_leave_the_work_to_the_caller(threads: CopyThreads) -> None:
    threads.close()
    threads.close()
    done: list[int] = []
    threads.run(done.append, range(10))
    assert done == list(range(10))


def test_a_machine_of_one_core_has_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 1)
    threads, names = CopyThreads(), set()
    threads.run(lambda _: names.add(threading.current_thread().name), range(10))
    assert names == {threading.current_thread().name}
    threads.close()
