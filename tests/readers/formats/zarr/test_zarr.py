"""Test Zarr hierarchies as datasets: fields, windows, crops, missing chunks, local and remote."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import zarr

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, IndexChangedError
from penstock.readers import Dataset, pack
from penstock.readers.fieldtypes import Array, ClassLabel, ColumnCrop, Value
from penstock.readers.formats.zarr import zarr_format
from tests.readers.formats.zarr.hierarchies import (
    PLACES,
    Requests,
    opened,
    read_all,
    values,
    windows,
    write_group,
)

X, Y = values((23, 3, 8, 8)), np.arange(23) * 3


pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


def group(root: Path, version: int = 3, **options: Any) -> Path:
    chunks = {"chunks": {"x": (5, 3, 8, 8), "y": (9,)}}
    return write_group(root, {"x": X, "y": Y}, version=version, **(chunks | options))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("version", [2, 3])
def test_arrays_of_a_group_are_fields(version: int, place: str, tmp_path: Path) -> None:
    root = group(tmp_path / "set.zarr", version)
    for _ in range(2):  # the second time from the cache
        with opened(root, place, tmp_path) as dataset:
            assert dataset.open().format.name == "zarr"
            assert dict(dataset.schema) == {"x": Array("uint8", (3, 8, 8)), "y": Value("int64")}
            assert [units.tolist() for units in dataset.contents.units] == [[5, 5, 5, 5, 3]]
            assert dataset.names([7]) == ["x[7]"]
            found = read_all(dataset)
            assert (found["x"] == X).all()
            assert (found["y"] == Y).all()


@pytest.mark.parametrize("place", PLACES)
def test_shards_of_inner_chunks(place: str, tmp_path: Path) -> None:
    root = group(
        tmp_path / "set.zarr",
        chunks={"x": (2, 3, 4, 8), "y": (1,)},
        shards={"x": (8, 3, 8, 8), "y": (4,)},
    )
    with opened(root, place, tmp_path) as dataset:
        found = read_all(dataset)
        assert (found["x"] == X).all()
        assert (found["y"] == Y).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("window", "stride"),
    [
        ((1,), None),
        ((4, None, 5, 3), None),
        ((4, None, 5, 3), (1, 1, 3, 2)),
        ((23,), None),
        ((3, 1, None, 6), (2, None, None, 2)),
    ],
)
def test_windows_cross_the_borders_of_chunks(
    window: Any, stride: Any, place: str, tmp_path: Path
) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": (5, 2, 3, 8)})
    wanted = windows(X, window, stride or ())
    with opened(root, place, tmp_path, sample=window, stride=stride) as dataset:
        assert len(dataset) == len(wanted)
        found = read_all(dataset)["x"]
        assert (found == np.stack(wanted)).all()


def test_shards_are_cut_between_chunks_and_have_all_chunks_of_their_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_format, "PART_BYTES", 800)
    options = {"compressors": {"x": None, "y": None}}
    root = group(tmp_path / "set.zarr", **options)
    with Dataset(root) as dataset:
        assert dataset.contents.sizes.tolist() == [5, 5, 5, 5, 3]
        assert (read_all(dataset)["x"] == X).all()
    with Dataset(root, sample={"x": (6,)}, stride={"x": (2,)}, fields={"x": "x"}) as dataset:
        assert len(dataset.contents.sizes) > 1
        assert (read_all(dataset)["x"] == np.stack(windows(X, (6,), (2,)))).all()


@pytest.mark.parametrize("place", PLACES)
def test_missing_chunks_are_fill_values(place: str, tmp_path: Path) -> None:
    root = tmp_path / "set.zarr"
    array = zarr.create_array(root, shape=(12, 4), chunks=(2, 2), dtype="i2", fill_value=-7)
    array[4:9] = values((5, 4), "i2")
    wanted = np.full((12, 4), -7, "i2")
    wanted[4:9] = values((5, 4), "i2")
    with opened(root, place, tmp_path) as dataset:
        assert dataset.fields == ("array",)
        assert (read_all(dataset)["array"] == wanted).all()
    shutil.rmtree(root / "c")
    with opened(root, place, tmp_path / "other") as dataset:
        assert (read_all(dataset)["array"] == -7).all()


def test_a_sharded_array_may_lack_inner_chunks(tmp_path: Path) -> None:
    root = tmp_path / "set.zarr"
    array = zarr.create_array(root, shape=(10, 4), chunks=(1, 4), shards=(4, 4), dtype="f4")
    array[2] = 5
    array[9] = 6
    wanted = np.zeros((10, 4), "f4")
    wanted[2], wanted[9] = 5, 6
    with Dataset(root) as dataset:
        assert not len(dataset.contents.units or ())
        assert (read_all(dataset)["array"] == wanted).all()


@pytest.mark.parametrize("is_consolidated", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_nested_groups_and_names_by_path(
    version: int, is_consolidated: bool, tmp_path: Path
) -> None:
    root = write_group(tmp_path / "set.zarr", {"a/x": X, "a/deep/y": Y, "z": Y}, version=version)
    if is_consolidated:
        with pytest.warns(UserWarning, match="onsolidated") if version == 3 else nullcontext():
            zarr.consolidate_metadata(root)
    with Dataset(root) as dataset:
        assert set(dataset.fields) == {"a.x", "a.deep.y", "z"}
        assert (read_all(dataset)["a.deep.y"] == Y).all()
    with Dataset(root, fields={"image": "a/x", "label": "/z/"}) as dataset:
        assert dataset.fields == ("image", "label")
        assert (read_all(dataset)["image"] == X).all()
    with Dataset(root / "a") as dataset:
        assert set(dataset.fields) == {"x", "deep.y"}
    with pytest.raises(ConfigError, match=r"has no such array.*'a/deep/y', 'a/x', 'z'"):
        Dataset(root, fields={"image": "a/nothing"}).open()
    with pytest.raises(ConfigError, match="an array's path"):
        Dataset(root, fields={"image": "../set.zarr/z"}).open()


def test_an_array_and_a_nested_array_may_share_a_field_name(tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"a.b": Y, "a/b": Y + 1, "a/c": Y + 2})
    for _ in range(2):
        with Dataset(root) as dataset:
            found = read_all(dataset)
        assert {name: column.tolist()[0] for name, column in found.items()} == {
            "a.b": 0,
            "a['b']": 1,
            "a.c": 2,
        }


def test_types_that_users_give(tmp_path: Path) -> None:
    root = group(tmp_path / "set.zarr")
    schema = {
        "y": ClassLabel(tuple(f"class {n}" for n in range(1000))),
        "x": Array("float32", (3, 8, 8)),
    }
    with Dataset(root, schema=schema) as dataset:
        found = read_all(dataset)
        assert found["x"].dtype == np.float32
        assert (found["x"] == X).all()
        assert dataset.schema["y"] == schema["y"]
    with pytest.raises(ConfigError, match=r"samples of .* are"):
        Dataset(root, schema={"x": Array("uint8", (3, 8))}).open()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [">f4", "<i2", "bool", "complex64", "float16", "uint64"])
def test_dtypes_and_orders_of_version_2(dtype: str, order: Any, tmp_path: Path) -> None:
    root, wanted = tmp_path / "set.zarr", values((7, 5, 3), dtype)
    array = zarr.create_array(
        root, shape=wanted.shape, chunks=(3, 2, 3), dtype=dtype, zarr_format=2, order=order
    )
    array[...] = wanted
    with Dataset(root) as dataset:
        found = read_all(dataset)["array"]
        assert found.dtype == wanted.dtype.newbyteorder("=")
        assert (found == wanted).all()


def test_an_ome_image_is_read_at_its_finest_level(tmp_path: Path) -> None:
    fine, coarse = values((2, 3, 4, 16, 16)), values((2, 3, 4, 8, 8))
    root = write_group(tmp_path / "image.zarr", {"0": fine, "1": coarse, "labels/cells/0": fine})
    image = zarr.open_group(root)
    levels = [{"path": "0"}, {"path": "1"}]
    image.attrs["ome"] = {"version": "0.5", "multiscales": [{"datasets": levels}]}
    with Dataset(root, sample=(1, None, 1, 8, 8)) as dataset:
        assert dataset.fields == ("image",)
        assert (read_all(dataset)["image"] == np.stack(windows(fine, (1, None, 1, 8, 8)))).all()
    with Dataset(root, fields={"image": "1", "mask": "labels/cells/0"}) as dataset:
        found = read_all(dataset)
        assert (found["image"] == coarse).all()
        assert (found["mask"] == fine).all()


@pytest.mark.parametrize("version", [2, 3])
def test_coordinates_that_follow_the_samples_are_fields(
    version: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "weather.zarr"
    arrays = {
        "t2m": (values((6, 4, 8), "f4"), ("time", "lat", "lon")),
        "time": (np.arange(6) * 3600, ("time",)),
        "lat": (np.linspace(-90, 90, 4), ("lat",)),
        "lon": (np.linspace(0, 359, 8), ("lon",)),
        "number": (np.array(4), ()),
    }
    made = zarr.open_group(root, mode="w", zarr_format=version)
    for name, (data, dimensions) in arrays.items():
        names = {"dimension_names": dimensions} if version == 3 else {}
        array = made.create_array(name, shape=data.shape, dtype=data.dtype, **names)
        array[...] = data
        if version == 2:
            array.attrs["_ARRAY_DIMENSIONS"] = list(dimensions)
    with caplog.at_level("INFO", logger="penstock"), Dataset(root) as dataset:
        assert set(dataset.fields) == {"t2m", "time"}
        assert (read_all(dataset)["time"] == arrays["time"][0]).all()
    assert "lat isn't a field: its first axis is 'lat'" in caplog.text
    assert "number isn't a field" in caplog.text
    with Dataset(root, sample=(2, None, 4)) as dataset:
        found = read_all(dataset)
        assert found["t2m"].shape == (6, 2, 4, 4)
        assert found["time"].tolist() == np.repeat(arrays["time"][0].reshape(3, 2), 2, 0).tolist()
    with Dataset(root, fields={"lat": "lat"}) as dataset:
        assert len(dataset) == 4


def test_arrays_of_different_lengths_are_rejected(tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X, "y": Y[:-1]})
    with pytest.raises(DatasetError, match=r"'x' has 23 samples and 'y' has 22"):
        Dataset(root).open()
    with Dataset(root, fields={"y": "y"}) as dataset:
        assert len(dataset) == 22


def test_missing_hierarchies_arrays_and_samples_raise(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetNotFoundError, match="no Zarr hierarchy"):
        Dataset(tmp_path / "empty", format="zarr").open()
    root = write_group(tmp_path / "none.zarr", {"x": X[:0]}, chunks={"x": (1, 3, 8, 8)})
    with pytest.raises(DatasetNotFoundError, match="no samples"):
        Dataset(root).open()
    root = write_group(tmp_path / "group.zarr", {})
    with pytest.raises(DatasetNotFoundError, match="no arrays"):
        Dataset(root).open()
    root = group(tmp_path / "set.zarr")
    with pytest.raises(ConfigError, match="no such window fits"):
        Dataset(root, sample=(24,)).open()
    with pytest.raises(ConfigError, match="names 'z'"):
        Dataset(root, sample={"z": (4,)}).open()


def test_changed_data_is_indexed_again(tmp_path: Path) -> None:
    root = group(tmp_path / "set.zarr")
    with Dataset(root) as dataset:
        first = dataset.open().fingerprint
    with Dataset(root) as dataset:
        assert dataset.open().fingerprint == first
    zarr.open_group(root)["x"][3] = 9
    changed = X.copy()
    changed[3] = 9
    with Dataset(root) as dataset:
        assert (read_all(dataset)["x"] == changed).all()
    zarr.open_group(root)["y"].append(np.arange(2))
    zarr.open_group(root)["x"].append(X[:2])
    with Dataset(root) as dataset:
        assert len(dataset) == 25


def test_a_hierarchy_is_opened_by_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = group(tmp_path / "set.zarr", chunks={"x": (1, 1, 2, 2), "y": (1,)})
    with pytest.warns(UserWarning, match="onsolidated"):
        zarr.consolidate_metadata(root)
    chunks = sum(path.is_file() for path in root.rglob("*"))
    assert chunks > 1000
    with opened(root, "remote", tmp_path) as dataset:
        requests = Requests.watch(monkeypatch)
        dataset.open()
        assert [kind for kind, _ in requests].count("find") == 2  # an array each
        assert len(requests) < 20
        requests.clear()
        dataset.read(dataset.contents.rows(np.arange(1)))
        # The chunks of one sample, and those that are filled in the background.
        assert len(requests) < chunks / 2


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_large_samples_of_chunks_without_codecs(
    is_sharded: bool, chunk: int, place: str, tmp_path: Path
) -> None:
    large = values((12, 3, 80, 80))
    more: dict[str, Any] = {"shards": {"x": (10, 3, 80, 80)}} if is_sharded else {}
    options = {"chunks": {"x": (chunk, 3, 80, 80)}, "compressors": {"x": None}, **more}
    root = write_group(tmp_path / "set.zarr", {"x": large}, **options)
    with opened(root, place, tmp_path) as dataset:
        assert (read_all(dataset, batch=4)["x"] == large).all()
    with opened(root, place, tmp_path / "other", schema={"x": Array("int16")}) as dataset:
        assert (read_all(dataset, batch=4)["x"] == large).all()
    if is_sharded or place == "remote":
        return
    with Dataset(root) as dataset:
        dataset.open()
        shutil.rmtree(root / "x/c/1")
        with pytest.raises(IndexChangedError, match=r"x/c/1/0/0/0.* it is gone"):
            read_all(dataset, batch=4)
    wanted = large.copy()
    wanted[chunk : 2 * chunk] = 0
    with Dataset(root) as dataset:
        assert (read_all(dataset, batch=4)["x"] == wanted).all()


@pytest.mark.parametrize("place", PLACES)
def test_a_hierarchy_is_packed(place: str, tmp_path: Path) -> None:
    root = group(tmp_path / "set.zarr")
    with opened(root, place, tmp_path) as dataset:
        pack(dataset.url, tmp_path / "pack", shuffle=False)
    with Dataset(tmp_path / "pack") as packed:
        found = read_all(packed)
        assert (found["x"] == X).all()
        assert (found["y"] == Y).all()
        assert packed.names([7]) == ["x[7]"]


CUBE = values((9, 4, 12, 16))


def corners(rows: int, whole: tuple[int, ...], part: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(5)
    room = np.array(whole) - np.array(part)
    return rng.integers(0, room + 1, (rows, len(whole)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("chunks", [(1, 4, 12, 16), (2, 2, 5, 4), (1, 4, 4, 4)])
def test_crops_equal_those_of_whole_samples(
    chunks: tuple[int, ...], place: str, tmp_path: Path
) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": CUBE}, chunks={"x": chunks})
    part = (2, 5, 6)
    with opened(root, place, tmp_path) as dataset:
        rows = dataset.contents.rows(np.random.default_rng(1).permutation(len(dataset)))
        at = corners(len(rows), CUBE.shape[1:], part)
        found = dataset.read(rows, crops={"x": ColumnCrop(at, part)})
        for id, corner, sample in zip(
            found.ids.tolist(), at.tolist(), found.columns["x"].values, strict=True
        ):
            where = tuple(slice(a, a + b) for a, b in zip(corner, part, strict=True))
            assert (sample == CUBE[id][where]).all()


def test_crops_of_windows(tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": CUBE}, chunks={"x": (2, 2, 5, 4)})
    part = (2, 2, 5, 6)
    with Dataset(root, sample=(3,), stride=(2,)) as dataset:
        rows = dataset.contents.rows(np.arange(len(dataset)))
        at = corners(len(rows), (3, *CUBE.shape[1:]), part)
        found = dataset.read(rows, crops={"x": ColumnCrop(at, part)}).columns["x"].values
        for number, (corner, sample) in enumerate(zip(at.tolist(), found, strict=True)):
            window = CUBE[2 * number : 2 * number + 3]
            where = tuple(slice(a, a + b) for a, b in zip(corner, part, strict=True))
            assert (sample == window[where]).all()


def test_only_the_chunks_of_crops_are_needed(tmp_path: Path) -> None:
    options = {"chunks": {"x": (1, 4, 4, 4)}, "compressors": {"x": None}}
    root = write_group(tmp_path / "set.zarr", {"x": CUBE}, **options)
    with Dataset(root) as dataset:
        assert len(dataset.contents.sizes) == 1

        def share(*corner: int) -> float:
            def draw(rows: np.ndarray) -> dict[str, ColumnCrop]:
                return {"x": ColumnCrop(np.tile(np.array(corner), (len(rows), 1)), (4, 4, 4))}

            return dataset.index.wanted_share(0, ("x",), draw)

        assert share(0, 0, 0) == 1 / 12
        assert share(0, 1, 1) == 4 / 12
        assert dataset.index.wanted_share(0, ("x",), lambda _: {}) == 1


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("others")
    ZipFile(Path(__file__).with_name("others.zip")).extractall(root)
    return root


@pytest.mark.parametrize("place", PLACES)
def test_zarr_python_2(place: str, others: Path, tmp_path: Path) -> None:
    x = values((7, 3, 8, 6))
    sparse = np.full((7, 4), 5, "u2")
    sparse[2:4] = 1
    with opened(others / "zarr2.zarr", place, tmp_path) as dataset:
        found = read_all(dataset)
    assert set(found) == {"blosc", "order", "delta", "big", "bare", "sparse", "when"}
    for name in ("blosc", "order", "delta", "big", "bare"):
        assert (found[name] == x).all(), name
    assert found["big"].dtype == np.float64
    assert (found["sparse"] == sparse).all()
    assert found["when"].tolist() == list(range(7))
    with pytest.raises(DatasetError, match="'names' can't be read: its data type"):
        Dataset(others / "zarr2.zarr", fields={"names": "names"}).open()


def test_xarray(others: Path) -> None:
    t2m = values((6, 4, 8), "f4")
    with Dataset(others / "xarray.zarr") as dataset:
        assert set(dataset.fields) == {"t2m", "time"}
        found = read_all(dataset)
        assert (found["t2m"] == t2m).all()
        assert found["time"].tolist() == list(range(6))
    with Dataset(others / "xarray.zarr", sample=(3,), stride=(1,)) as dataset:
        found = read_all(dataset)
        assert (found["t2m"] == np.stack(windows(t2m, (3,), (1,)))).all()
        assert found["time"].tolist() == [[i, i + 1, i + 2] for i in range(4)]


@pytest.mark.parametrize("place", PLACES)
def test_tensorstore(place: str, others: Path, tmp_path: Path) -> None:
    x = values((9, 3, 8, 8), "u2")
    root = others / "tensorstore.zarr"
    fields: Any = {name: name for name in ("ts2", "ts3", "shards")}
    with opened(root, place, tmp_path, fields=fields) as dataset:
        found = read_all(dataset)
        assert all((found[name] == x).all() for name in fields)
    window = (2, None, 5, 3)
    with opened(root, place, tmp_path, fields=fields, sample=window) as dataset:
        found = read_all(dataset)
        assert all((found[name] == np.stack(windows(x, window))).all() for name in fields)
