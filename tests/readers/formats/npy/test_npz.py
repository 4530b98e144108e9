"""Archives of arrays: rows of members, files as samples, and hostile archives."""

from __future__ import annotations

import io
import os
import resource
import struct
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from penstock.cache import ConfigError, CorruptSampleError, DatasetError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, ClassLabel, Value
from penstock.readers.formats.npy import npy_fields, npy_format
from tests.files import npy
from tests.readers.formats.npy.arrays import check_rows, dense, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Opened = Callable[..., Dataset]

RNG = np.random.default_rng(2)
X = RNG.normal(size=(60, 4, 5)).astype("f4")
Y = RNG.integers(0, 9, 60)
SAVES = {"stored": np.savez, "compressed": np.savez_compressed}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy_format, "PART_BYTES", 1000)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("how", SAVES)
def test_members_are_fields(root: Path, opened: Opened, how: str) -> None:
    for number in range(3):
        part = slice(number * 20, number * 20 + 20)
        SAVES[how](root / f"{number}.npz", x=X[part], y=Y[part])
    for _ in range(2):
        dataset = opened(again=True, schema={"y": ClassLabel()})
        assert dict(dataset.index.schema) == {"x": Array("float32", (4, 5)), "y": ClassLabel()}
        assert (dataset.contents.units is None) == (how == "stored")
        check_rows(dataset, {"x": X, "y": Y})
        assert dataset.names([23]) == ["1.npz[3]"]


def test_members_without_names_and_mixed_ones(root: Path, opened: Opened) -> None:
    np.savez(root / "x.npz", X, Y)
    check_rows(opened("x.npz"), {"arr_0": X, "arr_1": Y})
    with zipfile.ZipFile(root / "m.npz", "w") as file:
        file.writestr("x.npy", npy(X), zipfile.ZIP_DEFLATED)
        file.writestr("y.npy", npy(Y), zipfile.ZIP_STORED)
        file.writestr("deep/er/z.npy", npy(Y), zipfile.ZIP_STORED)
        file.writestr("read.me", b"text")
        file.writestr("o.npy", b"\x93NUMPY")
        file.writestr("b.npy", npy(Y), zipfile.ZIP_BZIP2)
        file.writestr("more.npz", b"PK")
    check_rows(opened("m.npz"), {"x": X, "y": Y})
    check_rows(opened("m.npz", fields={"z": "deep/er/z", "x": "x.npy"}), {"z": Y, "x": X})
    for name, why in {
        "o": "version",
        "b": "np.savez",
        "read.me": "no array",
        "more.npz": "",
    }.items():
        with pytest.raises(DatasetError, match=f"{name}.*can't be read.*{why}"):
            opened("m.npz", fields={"it": name}).open()
    with pytest.raises(ConfigError, match="no such array"):
        opened("m.npz", fields={"it": "nothing"}).open()


class Stream(io.RawIOBase):
    """A file without seek: zipfile writes sizes behind the members."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += data
        return len(data)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_archives_written_as_streams_and_as_zip64(root: Path, opened: Opened, method: int) -> None:
    stream = Stream()
    with zipfile.ZipFile(stream, "w", method) as file:
        for name, array in {"x": X, "y": Y}.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(npy(array))
    (root / "x.npz").write_bytes(bytes(stream.data))
    check_rows(opened("x.npz"), {"x": X, "y": Y})
    (root / "y.npz").write_bytes(b"in front " * 9 + bytes(stream.data))
    check_rows(opened("y.npz"), {"x": X, "y": Y})


def test_a_long_header_and_a_large_directory(root: Path, opened: Opened) -> None:
    shape = (3, *(1,) * 15)
    with zipfile.ZipFile(root / "x.npz", "w") as file:
        file.comment = b"c" * 65_535
        for number in range(700):
            file.writestr(f"{'n' * 60}{number}.npy", npy(np.full(shape, number, "i2")))
    dataset = opened("x.npz")
    assert len(dataset.index.schema) == 700
    check_rows(dataset, {f"{'n' * 60}699": np.full((3, *shape[1:]), 699, "i2")})


@pytest.mark.parametrize("how", SAVES)
def test_each_file_is_one_sample(root: Path, opened: Opened, how: str) -> None:
    for number in range(20):
        SAVES[how](root / f"case_{number:05}.npz", x=X[: number + 1], y=Y[:2], z=number)
    for _ in range(2):
        dataset = opened(again=True)
        assert dict(dataset.index.schema) == {
            "x": Array("float32", (None, 4, 5)),
            "y": Array("int64", (2,)),
            "z": Value("int64"),
        }
        assert dataset.contents.units is None
        ids, rows = shuffled(dataset)
        batch = dataset.read(rows)
        x: Any = batch.columns["x"]
        for place, id in enumerate(ids.tolist()):
            np.testing.assert_array_equal(x.sample(place), X[: id + 1])
        np.testing.assert_array_equal(dense(dataset, "z", rows), ids)
        np.testing.assert_array_equal(dense(dataset, "y", rows), np.tile(Y[:2], (20, 1)))
        assert dataset.names([3]) == ["case_00003.npz"]
    with pytest.raises(DatasetError, match="samples"):
        opened(sample="row", fields={"x": "x", "y": "y"}).open()


def test_single_numbers_make_files_samples(root: Path, opened: Opened) -> None:
    np.savez(root / "0.npz", x=X[:3], scale=0.5)
    assert list(opened("0.npz").index.schema) == ["x"]
    assert len(opened("0.npz")) == 3
    np.savez(root / "1.npz", x=X[:4], scale=0.25)
    dataset = opened()
    assert dict(dataset.index.schema) == {
        "x": Array("float32", (None, 4, 5)),
        "scale": Value("float64"),
    }
    assert len(opened(sample="row")) == 7


def test_compressed_arrays_in_fortran_order(root: Path, opened: Opened) -> None:
    np.savez_compressed(root / "x.npz", x=np.asfortranarray(X), y=Y)
    check_rows(opened("x.npz"), {"x": X, "y": Y})


def test_a_member_is_decoded_once(root: Path, opened: Opened) -> None:
    np.savez_compressed(root / "x.npz", x=X, y=Y)
    dataset = opened("x.npz")
    _, rows = shuffled(dataset)
    for first in range(0, 60, 7):
        dataset.read(rows[first : first + 7])
    counts = dataset.index.chunks.counts() if hasattr(dataset.index, "chunks") else None
    assert counts is None or counts.chunks == 2


def test_archives_that_differ_are_named(root: Path, opened: Opened) -> None:
    np.savez(root / "a.npz", x=X, y=Y)
    np.savez(root / "b.npz", x=X)
    with pytest.raises(DatasetError, match=r"b.npz.*\['x'\].*a.npz.*\['x', 'y'\]"):
        opened().open()
    check_rows(opened(fields={"x": "x"}), {"x": np.concatenate([X, X])})
    np.savez(root / "b.npz", y=Y, x=X)  # another order
    check_rows(opened(), {"x": np.concatenate([X, X]), "y": np.concatenate([Y, Y])})


def saved(how: str = "compressed") -> bytearray:
    file = io.BytesIO()
    SAVES[how](file, x=X, y=Y)
    return bytearray(file.getvalue())


def bomb() -> bytes:
    """Return an archive whose members share the same compressed bytes."""
    kernel = io.BytesIO()
    with zipfile.ZipFile(kernel, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", npy(np.zeros(10**6)))
    data = kernel.getvalue()
    at = data.index(b"PK\1\2")
    central, end = data[at : data.index(b"PK\5\6")], data[data.index(b"PK\5\6") :]
    many = b"".join(central.replace(b"x.npy", f"{n:05}".encode()) for n in range(10, 60))
    many += b"".join(central.replace(b"x.npy", bytes([n]) + b".npy") for n in range(97, 123))
    return data[:at] + many + end[:8] + struct.pack("<HHL", 76, 76, len(many)) + end[16:]


def patched(offset: int, value: bytes, *, mark: bytes = b"PK\1\2") -> bytes:
    """Return an archive with other bytes in its first directory entry."""
    data = saved()
    at = data.index(mark) + offset
    data[at : at + len(value)] = value
    return bytes(data)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "text": lambda: b"this is no archive" * 10,
    "an .npy": lambda: npy(X),
    "truncated": lambda: bytes(saved()[:-30]),
    "half": lambda: bytes(saved()[: len(saved()) // 2]),
    "without its beginning": lambda: bytes(saved()[200:]),
    "another header": lambda: patched(0, b"PK\7\x08", mark=b"PK\3\4"),
    "a terabyte": lambda: patched(24, struct.pack("<L", 2**32 - 2)),
    "compressed terabyte": lambda: patched(20, struct.pack("<L", 2**32 - 2)),
    "an offset outside": lambda: patched(42, struct.pack("<L", 2**31)),
    "an offset inside": lambda: patched(42, struct.pack("<L", 77)),
    "a directory outside": lambda: patched(16, struct.pack("<L", 2**31), mark=b"PK\5\6"),
    "a huge directory": lambda: patched(12, struct.pack("<L", 2**31), mark=b"PK\5\6"),
    "encrypted": lambda: encrypted(),
    "overlapping": bomb,
    "nested": lambda: nested(),
    "twice": lambda: twice(),
    "a member's header": lambda: damaged_header(),
    "another name": lambda: patched(46, b"z"),
    "objects": lambda: objects(),
}


def damaged_header() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=X, y=Y)
    return file.getvalue().replace(b"'descr'", b"'desCr'", 1)


def encrypted() -> bytes:
    data = saved()
    while (at := data.find(b"PK\1\2")) >= 0:
        data[at : at + 4] = b"pk\1\2"
        data[at + 8] |= 1
    return bytes(data.replace(b"pk\1\2", b"PK\1\2"))


def nested() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("inner.npz", bytes(saved()))
        made.writestr("inner.npy", bytes(saved()))
    return file.getvalue()


def twice() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("x.npy", npy(X))
        made.writestr("y.npy", npy(X))
    return file.getvalue().replace(b"y.npy", b"x.npy")


def objects() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.array([{}, {}]), s=np.array(["a", "b"]))
    return file.getvalue()


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_raises_an_error_that_names_it(
    root: Path, opened: Opened, what: str
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (root / "x.npz").write_bytes(HOSTILE[what]())
    np.savez(root / "w.npz", x=X, y=Y)
    for url in ("x.npz", ""):
        with pytest.raises(DatasetError, match=r"x\.npz"):
            opened(url).open()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_large_compressed_member_is_refused(
    root: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npy_fields, "MAX_CHUNK_BYTES", 1000)
    np.savez_compressed(root / "x.npz", x=X)
    with pytest.raises(DatasetError, match=r"x.npz.*decoded as a whole.*np.savez"):
        opened("x.npz").open()


@pytest.mark.parametrize("how", ["a flip", "a shorter stream"])
def test_damage_found_by_decoding_makes_samples_bad(root: Path, how: str) -> None:
    data = saved()
    for number in range(2):
        (root / f"{number}.npz").write_bytes(bytes(data))
    stat = (root / "0.npz").stat()
    with Dataset(root) as dataset:
        rows = dataset.rows(np.arange(120))
        dataset.open()
        at = data.index(b"x.npy") + 1500
        data[at] ^= 255
        (root / "0.npz").write_bytes(
            bytes(data) if how == "a flip" else bytes(data[:1000]) + b"\0" * (len(data) - 1000)
        )
        os.utime(root / "0.npz", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        bad: dict[int, str] = {}
        batch = dataset.read(rows, bad=bad, fields=("x",))
        assert sorted(bad) == list(range(60))
        assert "damaged" in bad[0]
        np.testing.assert_array_equal(batch.columns["x"].values[60:], X)
        with pytest.raises(CorruptSampleError, match=r"0\.npz"):
            dataset.read(rows[:3], fields=("x",))


def test_a_damaged_file_of_ragged_samples_is_a_bad_sample(root: Path) -> None:
    for number in range(4):
        np.savez_compressed(root / f"{number}.npz", x=X[: number + 1])
    data = bytearray((root / "2.npz").read_bytes())
    data[data.index(b"PK\1\2") + 16] ^= 255  # a byte of its CRC-32
    (root / "2.npz").write_bytes(bytes(data))
    with Dataset(root, sample="file") as dataset:
        bad: dict[int, str] = {}
        batch = dataset.read(dataset.rows(np.arange(4)), bad=bad)
        x: Any = batch.columns["x"]
        assert list(bad) == [2]
        for place, length in enumerate((1, 2, 0, 4)):
            np.testing.assert_array_equal(x.sample(place), X[:length])


def outcome(path: Path, index: Path) -> str:
    """Read all of an archive; return the error, or "" if there is none."""
    try:
        with Dataset(path, index=index) as dataset:
            bad: dict[int, str] = {}
            dataset.read(dataset.rows(np.arange(len(dataset))), bad=bad)
    except (DatasetError, ConfigError) as error:
        return str(error)
    return ""


def test_any_flipped_bit_gives_samples_or_an_error_that_names_the_file(root: Path) -> None:
    data = saved()
    rng = np.random.default_rng(5)
    for at in rng.integers(0, len(data), 60).tolist() + list(range(len(data) - 120, len(data))):
        flipped = bytearray(data)
        flipped[at] ^= 1 << int(rng.integers(8))
        (root / "x.npz").write_bytes(bytes(flipped))
        error = outcome(root / "x.npz", root / "index")
        assert not error or "x.npz" in error
