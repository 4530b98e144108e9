"""Arrays in .npy files: rows, windows and whole files, local and in a store."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import sliding_window_view

from penstock import DataLoader, RandomCrop
from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, ClassLabel, Value
from penstock.readers.formats.npy import npy_format
from tests.properties import examples
from tests.readers.formats.npy.arrays import check_rows, dense, shuffled

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Opened = Callable[..., Dataset]

RNG = np.random.default_rng(1)
X = RNG.normal(size=(101, 3, 5)).astype("f4")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy_format, "PART_BYTES", 1500)


def written(path: Path, array: Any, version: tuple[int, int] | None = None) -> None:
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.asanyarray(array), version=version)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.usefixtures("small_parts")
def test_rows_of_one_file(root: Path, opened: Opened, version: tuple[int, int]) -> None:
    written(root / "x.npy", X, version)
    for _ in range(2):  # the second time from the cache
        dataset = opened("x.npy", again=True)
        assert dict(dataset.index.schema) == {"array": Array("float32", (3, 5))}
        assert len(dataset.index.sizes) > 2
        assert dataset.contents.units is None
        check_rows(dataset, {"array": X})
        assert dataset.names([7]) == ["x.npy[7]"]


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "<u2", ">i4", "<i8", ">u8", "<f2", ">f4", "<f8", "<c8", ">c16"]
)
def test_dtypes(root: Path, opened: Opened, dtype: str) -> None:
    values = (RNG.normal(size=(17, 4)) * 100).astype("c16" if "c" in dtype else "f8").astype(dtype)
    np.save(root / "x.npy", values)
    check_rows(opened("x.npy"), {"array": values})
    np.save(root / "x.npy", values[:, 0])
    check_rows(opened("x.npy"), {"array": values[:, 0]})


@pytest.mark.usefixtures("small_parts")
def test_rows_of_several_files(root: Path, opened: Opened) -> None:
    cuts = [0, 1, 1, 40, 41, 101]
    for number in range(len(cuts) - 1):
        part = X[cuts[number] : cuts[number + 1]]
        np.save(root / f"{number}.npy", part.astype(">f4") if number % 2 else part)
    check_rows(opened(format="npy"), {"array": X})
    check_rows(opened(sample="row"), {"array": X})
    check_rows(opened("*.npy"), {"array": X})
    check_rows(opened("{2,4}.npy"), {"array": np.concatenate([X[1:40], X[41:]])})


def test_only_needed_bytes_are_fetched(root: Path, opened: Opened) -> None:
    for number in range(20):
        np.save(root / f"{number:02}.npy", RNG.normal(size=(500, 10)))
    dataset = opened("*.npy")
    assert len(dataset) == 10_000
    if dataset.remote is not None:
        assert dataset.bytes_fetched <= 20 * 4096
        dense(dataset, "array", dataset.rows(np.arange(5)))
        size = 20 * 500 * 80
        assert dataset.bytes_fetched <= 20 * 4096 + size


@pytest.mark.usefixtures("small_parts")
def test_fields_of_several_files(root: Path, opened: Opened) -> None:
    labels = RNG.integers(0, 7, 101)
    np.save(root / "x.npy", X)
    np.save(root / "y.npy", labels)
    with pytest.raises(DatasetError, match=r"y.npy.*int64.*x.npy.*fields="):
        opened("*.npy").open()
    dataset = opened(
        format="npy",
        fields={"image": "x.npy", "label": "y.npy"},
        schema={"label": ClassLabel(tuple("abcdefg"))},
    )
    check_rows(dataset, {"image": X, "label": labels})
    for part in (0, 1):
        np.save(root / f"a-{part}.npy", X[part * 60 : part * 60 + 60])
        np.save(root / f"b-{part}.npy", labels[part * 60 : part * 60 + 60])
    check_rows(opened(format="npy", fields={"b": "b-*", "a": "a-*"}), {"a": X, "b": labels})
    with pytest.raises(ConfigError, match="different numbers"):
        opened(format="npy", fields={"b": "b-*", "a": "x*"}).open()
    with pytest.raises(ConfigError, match="no file"):
        opened(format="npy", fields={"b": "c.npy"}).open()
    np.save(root / "y.npy", labels[:-1])
    with pytest.raises(DatasetError, match=r"101 samples.*100"):
        opened(format="npy", fields={"image": "x.npy", "label": "y.npy"}).open()


def windows(array: Any, window: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Return all windows, the first axis slowest."""
    found = sliding_window_view(array, window)[tuple(slice(None, None, s) for s in stride)]
    return found.reshape(-1, *window)


@pytest.mark.usefixtures("small_parts")
@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_windows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 9)] * data.draw(st.integers(1, 3))))
    files = data.draw(st.integers(1, 2))
    length = shape[0] * 5
    window = (data.draw(st.integers(1, length)), *(data.draw(st.integers(1, s)) for s in shape[1:]))
    stride = tuple(data.draw(st.integers(1, 6)) for _ in shape)
    arrays = [RNG.integers(0, 1000, (length, *shape[1:])) for _ in range(files)]
    root = tmp_path_factory.mktemp("windows")
    for number, array in enumerate(arrays):
        np.save(root / f"{number}.npy", array)
    wanted = np.concatenate([windows(array, window, stride) for array in arrays])
    with Dataset(root, sample=window, stride=stride, index=f"{root}-index") as dataset:
        check_rows(dataset, {"array": wanted})
        shard: Any = dataset.index.open(0)
        first = slice(0, dataset.index.sizes[0])
        low = [data.draw(st.integers(0, length - 1)) for length in window]
        size = [data.draw(st.integers(1, w - at)) for w, at in zip(window, low, strict=True)]
        rows = np.arange(dataset.index.sizes[0])
        out = np.zeros((len(rows), *size), "i8")
        corners = np.tile(np.array(low, np.int64), (len(rows), 1))
        wrong: dict[int, str] = {}
        shard.reader.gather(
            "array", rows, out, slice(0, len(rows)), data=shard.data, wrong=wrong, corners=corners
        )
        part = tuple(slice(at, at + s) for at, s in zip(low, size, strict=True))
        np.testing.assert_array_equal(out, wanted[first][(slice(None), *part)])


@pytest.mark.usefixtures("small_parts")
def test_windows_of_a_store(root: Path, opened: Opened) -> None:
    array = RNG.integers(0, 255, (40, 12, 9), dtype="u1")
    np.save(root / "x.npy", array)
    dataset = opened("x.npy", sample=(8, None, 4), stride=(3, None, 2))
    check_rows(dataset, {"array": windows(array, (8, 12, 4), (3, 12, 2))})
    assert dataset.names([1]) == ["x.npy[0:8, :, 2:6]"]
    check_rows(opened("x.npy", sample=(1,)), {"array": array[:, None]})
    check_rows(opened("x.npy", sample="row"), {"array": array})


def test_large_steps_are_read_as_separate_ranges(root: Path, opened: Opened) -> None:
    array = RNG.integers(0, 255, (4, 300, 1024), dtype="u1")
    np.save(root / "x.npy", array)
    dataset = opened("x.npy", sample=(2, 300, 8), stride=(2, 300, 512))
    check_rows(dataset, {"array": windows(array, (2, 300, 8), (2, 300, 512))})


@pytest.mark.usefixtures("small_parts")
def test_each_file_is_one_sample(root: Path, opened: Opened) -> None:
    volumes = [RNG.normal(size=(n % 4 + 1, 3, n % 3 + 2)).astype("f4") for n in range(30)]
    for number, volume in enumerate(volumes):
        np.save(root / f"{number:02}.npy", np.asfortranarray(volume) if number % 2 else volume)
    with pytest.raises(DatasetError, match='sample="file"'):
        opened("*.npy").open()
    for _ in range(2):
        dataset = opened(sample="file", again=True)
        assert dict(dataset.index.schema) == {"array": Array("float32", (None, 3, None))}
        ids, rows = shuffled(dataset)
        column = dataset.read(rows).columns["array"]
        for place, id in enumerate(ids.tolist()):
            np.testing.assert_array_equal(column.sample(place), volumes[id])
        assert dataset.names([3]) == ["03.npy"]


def test_samples_of_one_shape_and_numbers_in_files(root: Path, opened: Opened) -> None:
    for number in range(80):
        np.save(root / f"{number:03}.npy", X[number])
        np.save(root / f"y{number:03}.npy", number)
    with pytest.raises(DatasetError, match="single numbers"):
        opened("y*.npy").open()
    check_rows(opened("[0-9]*.npy", sample="file"), {"array": X[:80]})
    dataset = opened(format="npy", fields={"x": "0*", "y": "y*"}, sample="file")
    assert dataset.index.schema["y"] == Value("int64")
    check_rows(dataset, {"x": X[:80], "y": np.arange(80)})
    ragged = opened("[0-9]*.npy", sample="file", schema={"array": Array("float64", (3, 5))})
    check_rows(ragged, {"array": X[:80].astype("f8")})


def test_arrays_in_fortran_order(root: Path, opened: Opened) -> None:
    np.save(root / "x.npy", np.asfortranarray(X))
    with pytest.raises(DatasetError, match=r"x.npy.*Fortran.*ascontiguousarray"):
        opened("x.npy").open()
    check_rows(opened("x.npy", sample="file"), {"array": X[None]})
    np.save(root / "x.npy", np.asfortranarray(X[:, :1, :1]))  # both orders are equal
    check_rows(opened("x.npy"), {"array": X[:, :1, :1]})


BAD: dict[str, tuple[Any, str]] = {
    "structured": (np.zeros(3, [("a", "i4")]), "structured"),
    "objects": (np.array([{}, 1], object), "pickled"),
    "texts": (np.array(["a", "b"]), "dtype"),
    "times": (np.zeros(3, "M8[s]"), "dtype"),
    "longdouble": (np.zeros(3, "longdouble"), "dtype"),
    "empty": (np.zeros((0, 3)), "no samples"),
    "no numbers": (np.zeros((3, 0)), "empty"),
    "many axes": (np.zeros((1,) * 20), "20 axes"),
}


@pytest.mark.parametrize("what", BAD)
def test_arrays_that_cant_be_samples_are_rejected(root: Path, opened: Opened, what: str) -> None:
    array, reason = BAD[what]
    np.save(root / "x.npy", array)
    with pytest.raises((DatasetError, DatasetNotFoundError), match=f"(?s)x.npy.*{reason}"):
        opened("x.npy").open()


def head(descr: str = "'<f4'", shape: str = "(3,)", extra: str = "") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}{extra}}}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text


HOSTILE = {
    "nothing": (b"", "empty"),
    "other bytes": (b"hello world, this is no array at all", "not an .npy"),
    "magic alone": (b"\x93NUMPY", ""),
    "version": (b"\x93NUMPY\x09\0" + b"\0" * 100, "version"),
    "truncated": (head() + b"\0" * 11, "truncated"),
    "too long": (head() + b"\0" * 13, "truncated"),
    "huge shape": (head(shape="(1000000000000,)") + b"\0" * 12, "truncated"),
    "overflow": (head(shape="(4294967296, 4294967296, 4294967296)"), ""),
    "negative": (head(shape="(-3,)") + b"\0" * 12, "shape"),
    "huge and empty": (head(shape="(0, 9999999999999999)"), "shape"),
    "no shape": (head(shape="'x'") + b"\0" * 12, "header"),
    "code": (head(shape="__import__('os').getpid()") + b"\0" * 12, "header"),
    "deep": (head(shape="(" * 5000 + ")" * 5000), "header"),
    "long header": (b"\x93NUMPY\2\0" + struct.pack("<I", 2**31) + b" " * 2000, "header"),
    "more keys": (head(extra=", 'x': 1") + b"\0" * 12, "header"),
    "a pickle": (b"\x80\x04\x95\x00", ""),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_raises_an_error_that_names_it(
    root: Path, opened: Opened, what: str
) -> None:
    data, reason = HOSTILE[what]
    (root / "x.npy").write_bytes(data)
    np.save(root / "w.npy", X)
    for url in ("x.npy", "*.npy"):
        with pytest.raises(DatasetError, match=f"(?s)x.npy.*{reason}"):
            opened(url).open()


def test_files_that_differ_are_named(root: Path, opened: Opened) -> None:
    np.save(root / "a.npy", X)
    np.save(root / "b.npy", X.astype("f8"))
    with pytest.raises(DatasetError, match=r"b.npy.*float64.*float32.*a.npy"):
        opened("*.npy").open()
    with pytest.raises(DatasetError, match=r"b.npy.*float64.*float32.*a.npy"):
        opened(sample="file").open()
    np.save(root / "b.npy", X[:, :2])
    with pytest.raises(DatasetError, match=r"b.npy.*\(101, 2, 5\).*a.npy"):
        opened(format="npy").open()
    np.save(root / "b.npy", X[0])
    with pytest.raises(DatasetError, match=r"b.npy.*\(3, 5\).*a.npy"):
        opened(sample="file").open()


def test_invalid_arguments_are_rejected(root: Path, opened: Opened) -> None:
    np.save(root / "x.npy", X)
    with pytest.raises(ConfigError, match="names 'y'"):
        opened("x.npy", sample={"y": (2,)}).open()
    with pytest.raises(ConfigError, match="no such window"):
        opened("x.npy", sample=(2, 9)).open()
    with pytest.raises(DatasetNotFoundError, match="no samples"):
        opened("x.npy", sample=(200,)).open()
    with pytest.raises(ConfigError, match="schema"):
        opened("x.npy", schema={"array": ClassLabel()}).open()
    with pytest.raises(ConfigError, match="sample: got"):
        opened("x.npy", sample="sample")
    np.savez(root / "x.npz", x=X)
    with pytest.raises(ConfigError, match="of one kind"):
        opened(format="npy").open()


def test_a_folder_of_npy_files_is_one_sample_per_file(root: Path) -> None:
    for number in range(3):
        np.save(root / f"{number}.npy", X[number])
    with Dataset(root) as dataset:
        assert dataset.index.format.name == "folder"
        assert len(dataset) == 3
    with Dataset(root, sample="file") as dataset:
        assert dataset.index.format.name == "npy"
        check_rows(dataset, {"array": X[:3]})
    with pytest.raises(ConfigError, match="got 'file'"):
        Dataset(root, format="folder", sample="file").open()


def test_a_changed_file_is_indexed_again(root: Path) -> None:
    np.save(root / "x.npy", X)
    with Dataset(root / "x.npy") as dataset:
        assert len(dataset) == 101
    assert (root / "x.npy.penstock").is_dir()
    np.save(root / "x.npy", X[:50])
    with Dataset(root / "x.npy") as dataset:
        check_rows(dataset, {"array": X[:50]})


def test_crops_of_a_mapped_array(root: Path, opened: Opened) -> None:
    np.save(root / "x.npy", X)
    with (
        opened("x.npy") as dataset,
        DataLoader(dataset, 8, augment=[RandomCrop((2, 3), fields="array")], seed=1) as loader,
    ):
        crops = np.concatenate([batch[0].numpy() for batch in loader])
    assert crops.shape == (101, 2, 3)
    every = sliding_window_view(X, (2, 3), axis=(1, 2)).reshape(101, -1, 2, 3)
    assert (every == crops[:, None]).all(axis=(2, 3)).any(axis=1).all()


def test_arguments_of_other_formats_are_rejected(root: Path, opened: Opened) -> None:
    np.save(root / "x.npy", X)
    for options, why in (
        ({"dtype": "float32"}, "dtype: .*doesn't use it"),
        ({"documents": "across"}, "documents: "),
        ({"vocabulary": 5}, "vocabulary: "),
        ({"sample": (1, 1, 1, 1)}, "4 axes, but the arrays of .* have at most 3"),
    ):
        with pytest.raises(ConfigError, match=why):
            opened("x.npy", **options).open()
