"""Arrays are read directly into their slots, from files, archives, packs and the cache."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock import Array, Dataset, DiskCache, pack
from penstock.cache import CorruptSampleError, IndexChangedError
from penstock.readers import byte_source
from penstock.readers.fieldtypes import DenseColumn, RaggedColumn
from penstock.readers.reading import direct_arrays, row_reading
from tests.servers.faulty import serving
from tests.tars import archive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N = 12


@pytest.fixture(params=["whole", "in parts"], autouse=True)
def sizes(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat arrays of a few KB as if they had megabytes."""
    if request.param == "in parts":
        monkeypatch.setattr(direct_arrays, "SHARED_BYTES", 100)
        monkeypatch.setattr(direct_arrays, "STEP_BYTES", 256)
        monkeypatch.setattr(byte_source, "STEP_BYTES", 256)


def dense(kind: str = "<f4") -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 200, (9, 50)).astype(kind) for _ in range(N)]


def ragged() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 200, (i % 5 * 40, 3)).astype("<i2") for i in range(N)]


def shaped() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.random((i % 3 + 1, 30 - i)) for i in range(N)]


def mixed() -> list[np.ndarray]:
    """Return arrays of which some are big-endian and some have columns first."""
    arrays = dense()
    arrays[3] = arrays[3].astype(">f4")
    arrays[7] = np.asfortranarray(arrays[7])
    return arrays


SETS = {"dense": dense, "ragged": ragged, "shaped": shaped, "mixed": mixed}


def folder_of(arrays: list[np.ndarray], where: Path) -> Path:
    where.mkdir()
    with (where / "metadata.jsonl").open("w") as lines:
        for number, array in enumerate(arrays):
            np.save(where / f"{number:03d}.npy", array)
            lines.write(json.dumps({"file_name": f"{number:03d}.npy", "label": number}) + "\n")
    return where


def tar_of(arrays: list[np.ndarray], where: Path) -> Path:
    source = folder_of(arrays, where.with_name("source"))
    members = [(p.name, p.read_bytes()) for p in sorted(source.glob("*.npy"))]
    where.write_bytes(archive(members))
    return where


@contextlib.contextmanager
def opened(kind: str, arrays: list[np.ndarray], tmp: Path) -> Iterator[Dataset]:
    if kind == "folder":
        place: Any = folder_of(arrays, tmp / "set")
    elif kind == "tar":
        place = tar_of(arrays, tmp / "set.tar")
    elif kind == "pack":
        place = tmp / "pack"
        pack(folder_of(arrays, tmp / "set"), place, shuffle=False)
    else:
        tar_of(arrays, tmp / "set.tar")
        with (
            serving(tmp) as server,
            contextlib.closing(DiskCache(tmp / "cache", max_bytes="64MiB")) as cache,
            Dataset(f"{server.url}/set.tar", cache=cache, fields=("array",)) as dataset,
        ):
            yield dataset
        return
    with Dataset(place, fields=("array",)) as dataset:
        yield dataset


def check(column: Any, wanted: list[np.ndarray]) -> None:
    for row, array in enumerate(wanted):
        got = column.sample(row) if isinstance(column, RaggedColumn) else column.values[row]
        assert got.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(got, array)


@pytest.mark.parametrize("kind", ["folder", "tar", "pack", "cached"])
@pytest.mark.parametrize("what", SETS)
def test_arrays_are_read_in_any_order_from_any_container(
    what: str, kind: str, tmp_path: Path
) -> None:
    arrays = SETS[what]()
    with opened(kind, arrays, tmp_path) as dataset:
        for ids in ([*range(N)], [5, 3, 3, 11, 0, 7], [2], []):
            rows = dataset.rows(np.array(ids, np.int64))
            for mode in ("copy", "pread", "mmap"):
                column = dataset.read(rows, mode=mode).columns["array"]
                assert len(column) == len(ids)
                check(column, [arrays[i] for i in ids])
                assert column.values.flags.writeable


@pytest.mark.parametrize("kind", ["folder", "tar", "pack"])
@pytest.mark.parametrize("what", ["dense", "ragged", "shaped"])
def test_a_flipped_bit_is_found_and_the_sample_is_emptied(
    what: str, kind: str, tmp_path: Path
) -> None:
    arrays = SETS[what]()
    with opened(kind, arrays, tmp_path) as dataset:
        rows = dataset.rows(np.arange(N))
        place = {"folder": "set/008.npy", "tar": "set.tar", "pack": "pack/shard-000000.arrow"}[kind]
        data = bytearray((tmp_path / place).read_bytes())
        at = data.find(arrays[8].tobytes()) + arrays[8].nbytes - 3
        data[at] ^= 1
        with (tmp_path / place).open("r+b") as file:  # the same inode: it is mapped
            file.write(data)
        bad: dict[int, str] = {}
        column = dataset.read(rows[::-1].copy(), bad=bad).columns["array"]
        damaged = {N - 1 - place for place in bad}
        assert 8 in damaged
        assert damaged == {8} or kind == "pack"  # whose dense rows are checked in blocks
        for row, array in enumerate(reversed(arrays)):
            if row in bad:
                nothing = column.sample(row) if isinstance(column, RaggedColumn) else None
                if nothing is not None:
                    assert nothing.size == 0
                elif kind != "pack":
                    assert isinstance(column, DenseColumn)
                    assert not column.values[row].any()
            else:
                got = column.sample(row) if isinstance(column, RaggedColumn) else column.values[row]
                assert np.array_equal(got, array)
        with pytest.raises((IndexChangedError, CorruptSampleError), match=r"008|8|shard"):
            dataset.read(rows)


def test_files_that_are_missing_or_have_another_size_are_named(tmp_path: Path) -> None:
    arrays = dense()
    with opened("folder", arrays, tmp_path) as dataset:
        rows = dataset.rows(np.arange(N))
        whole = (tmp_path / "set" / "001.npy").read_bytes()
        (tmp_path / "set" / "001.npy").write_bytes(whole[:-1])
        (tmp_path / "set" / "004.npy").write_bytes(whole + b"\0")
        (tmp_path / "set" / "009.npy").unlink()
        bad: dict[int, str] = {}
        column = dataset.read(rows, bad=bad).columns["array"]
        assert sorted(bad) == [1, 4, 9]
        assert "001.npy: changed" in bad[1]
        assert "has more" in bad[4]
        assert "it is gone" in bad[9]
        assert isinstance(column, DenseColumn)
        assert not column.values[[1, 4, 9]].any()
        kept = [i for i in range(N) if i not in bad]
        assert np.array_equal(column.values[kept], np.stack([arrays[i] for i in kept]))
        with pytest.raises(IndexChangedError, match=r"00[149]\.npy: changed"):
            dataset.read(rows)


def test_arrays_are_read_together_with_texts_and_if_some_samples_lack_them(tmp_path: Path) -> None:
    arrays = dense()
    members: list[tuple[str, bytes]] = []
    folder_of(arrays, tmp_path / "set")
    for i in range(N):
        members.append((f"{i:03d}.txt", f"text {i}".encode()))
        if i % 4:
            members.append((f"{i:03d}.npy", (tmp_path / "set" / f"{i:03d}.npy").read_bytes()))
    (tmp_path / "set.tar").write_bytes(archive(members))
    types = {"array": Array("float32", (9, 50))}
    with Dataset(
        tmp_path / "set.tar", fields=("array", "array.present", "caption"), schema=types
    ) as dataset:
        ids = np.array([7, 0, 2, 4, 11])
        batch = dataset.read(dataset.rows(ids))
    assert batch.present["array"].tolist() == [True, False, True, False, True]
    texts = [bytes(each).decode() for each in batch.columns["caption"].samples]
    assert texts == [f"text {i}" for i in ids]
    wanted = [arrays[i] if i % 4 else np.zeros_like(arrays[i]) for i in ids]
    check(batch.columns["array"], wanted)


def test_large_rows_of_a_pack_are_divided_between_threads_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reading, "LARGE_BATCH_BYTES", 100)
    monkeypatch.setattr(row_reading, "LARGE_ROW_BYTES", 100)
    arrays = dense()
    pack(folder_of(arrays, tmp_path / "set"), tmp_path / "pack", shuffle=False, shard_bytes=5000)
    with Dataset(tmp_path / "pack", fields=("array",)) as dataset:
        assert len(dataset.index.sizes) > 3
        ids = np.array([5, 3, 3, 11, 0, 7])
        check(dataset.read(dataset.rows(ids)).columns["array"], [arrays[i] for i in ids])
    with Dataset(tmp_path / "pack", fields=("array",)) as dataset:
        (place,) = (
            path
            for path in (tmp_path / "pack").glob("*.arrow")
            if arrays[3].tobytes() in path.read_bytes()
        )
        data = bytearray(place.read_bytes())
        data[data.find(arrays[3].tobytes()) + 5] ^= 1
        with place.open("r+b") as file:
            file.write(data)
        bad: dict[int, str] = {}
        column = dataset.read(dataset.rows(ids), bad=bad).columns["array"]
        assert {1, 2} <= set(bad)
        for row in set(range(len(ids))) - set(bad):
            assert np.array_equal(column.values[row], arrays[ids[row]])
        with pytest.raises(CorruptSampleError):
            dataset.read(dataset.rows(ids))
