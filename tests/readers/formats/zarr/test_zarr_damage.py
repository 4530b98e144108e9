"""Damaged and hostile hierarchies, and missing codecs: one error each, which names the cause."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
from crc32c import crc32c

from penstock.cache import (
    ConfigError,
    CorruptSampleError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    IndexChangedError,
    MissingDependencyError,
)
from penstock.readers import Dataset
from penstock.readers.fieldtypes import MAX_FIELDS
from penstock.readers.formats import Sampling
from tests.readers.formats.zarr.hierarchies import bad_of, opened, read_all, values, write_group

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = values((8, 3, 8, 8))

pytestmark = pytest.mark.filterwarnings("ignore::penstock.cache.errors.PenstockWarning")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": (2, 3, 8, 8)})


def change(path: Path, **values: Any) -> None:
    """Replace values of a document."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def grid(*shape: int) -> dict[str, Any]:
    return {"name": "regular", "configuration": {"chunk_shape": list(shape)}}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"chunk_grid": grid(2**20, 3, 1024, 1024)}, "bytes each when decoded"),
        ({"shape": [2**61, 3, 8, 8]}, "more than 2\\^62 bytes"),
        ({"shape": [2**40, 3, 8, 8], "chunk_grid": grid(1, 1, 1, 1)}, "samples, expected at most"),
        ({"shape": [2**30, 3, 8, 8], "chunk_grid": grid(1, 1, 1, 1)}, "too small for its size"),
        ({"shape": [2, 2**20, 2**20, 2**10], "chunk_grid": grid(1, 1, 1, 1)}, "a sample of 'x'"),
        ({"chunk_grid": grid(0, 3, 8, 8)}, "chunk shape"),
        ({"codecs": [{"name": "bytes"}, {"name": "zstd"}] * 20}, "codecs"),
    ],
)
def test_claims_of_metadata_are_bounded(values: Any, why: str, root: Path) -> None:
    change(root / "x/zarr.json", **values)
    with pytest.raises(DatasetError, match=why):
        Dataset(root).open()


def test_files_that_arent_documents_are_rejected(root: Path) -> None:
    (root / "x/zarr.json").write_bytes(b"{" * 100)
    with pytest.raises(DatasetError, match="isn't a JSON"):
        Dataset(root).open()
    (root / "x/zarr.json").write_bytes(b" " * 5_000_000)
    with pytest.raises(DatasetError, match="at most"):
        Dataset(root).open()
    (root / "zarr.json").unlink()
    with pytest.raises(DatasetNotFoundError, match="no Zarr hierarchy"):
        Dataset(root, format="zarr").open()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("damage", [truncate, flip])
def test_a_damaged_chunk_marks_its_samples(damage: Callable[[Path], None], tmp_path: Path) -> None:
    from zarr.codecs import BytesCodec, Crc32cCodec, ZstdCodec

    root = tmp_path / "set.zarr"
    array = zarr.create_array(
        root,
        shape=X.shape,
        chunks=(2, 3, 8, 8),
        dtype=X.dtype,
        serializer=BytesCodec(),
        compressors=[ZstdCodec(), Crc32cCodec()],
    )
    array[...] = X
    damage(root / "c/1/0/0/0")
    with Dataset(root) as dataset:
        batch, bad = bad_of(dataset)
        assert sorted(bad) == [2, 3]
        assert all("array: a chunk is damaged" in reason for reason in bad.values())
        good = np.array([0, 1, 4, 5, 6, 7])
        assert (batch.columns["array"].values[good] == X[good]).all()
        with pytest.raises(CorruptSampleError, match=r"array\[2\]"):
            dataset.read(dataset.contents.rows(np.arange(8)))


def test_a_sample_that_is_a_damaged_chunk_is_bad(tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": (1, 3, 8, 8)})
    truncate(root / "x/c/5/0/0/0")
    with Dataset(root) as dataset:
        assert sorted(bad_of(dataset)[1]) == [5]


def test_a_chunk_that_changed_after_indexing_raises(root: Path) -> None:
    with Dataset(root) as dataset:
        dataset.open()
        truncate(root / "x/c/1/0/0/0")
        with pytest.raises(IndexChangedError, match="x/c/1/0/0/0"):
            dataset.read(dataset.contents.rows(np.arange(8)))


def sharded(root: Path) -> Path:
    array = zarr.create_array(
        root, shape=X.shape, chunks=(1, 3, 8, 8), shards=(4, 3, 8, 8), dtype=X.dtype
    )
    array[...] = X
    return root / "c/0/0/0/0"


def rewrite_index(path: Path, entries: dict[int, tuple[int, int]], *, seal: bool = True) -> None:
    data = path.read_bytes()
    body, index = data[:-68], bytearray(data[-68:-4])
    for place, pair in entries.items():
        index[16 * place : 16 * place + 16] = np.array(pair, "<u8").tobytes()
    check = crc32c(bytes(index)) if seal else 0
    path.write_bytes(body + bytes(index) + check.to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({1: (10**12, 5)}, "points outside"),
        ({1: (2**64 - 2, 2**63)}, "points outside"),
        ({1: (0, 5), 2: (2, 5)}, "same bytes"),
        ({}, "CRC-32C"),
    ],
)
def test_a_damaged_index_of_a_shard_is_rejected(entries: Any, why: str, tmp_path: Path) -> None:
    path = sharded(tmp_path / "set.zarr")
    rewrite_index(path, entries, seal=bool(entries))
    with pytest.raises(DatasetError, match=f"c/0/0/0/0.*{why}"):
        Dataset(tmp_path / "set.zarr").open()


def test_a_shard_that_is_too_short_is_rejected(tmp_path: Path) -> None:
    path = sharded(tmp_path / "set.zarr")
    path.write_bytes(b"short")
    with pytest.raises(DatasetError, match="its index alone takes"):
        Dataset(tmp_path / "set.zarr").open()


def test_a_missing_codec_is_named_and_other_fields_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X, "y": np.arange(8)}, compressors={"y": None})

    monkeypatch.setitem(sys.modules, "numcodecs.zstd", None)
    with Dataset(root) as dataset:
        with pytest.raises(MissingDependencyError, match=r"zstd.*penstock.zarr"):
            dataset.read(dataset.contents.rows(np.arange(8)))
        assert (read_all(dataset.select("y"))["y"] == np.arange(8)).all()


def test_an_array_that_cant_be_a_tensor_is_left_out_and_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X}, version=2)
    document = json.loads((root / "x/.zarray").read_text())
    (root / "names").mkdir()
    changes = {"dtype": "|O", "shape": [8], "chunks": [8], "filters": [{"id": "pickle"}]}
    (root / "names/.zarray").write_text(json.dumps(document | changes))
    with caplog.at_level("INFO", logger="penstock"), Dataset(root) as dataset:
        assert dataset.fields == ("x",)
        assert (read_all(dataset)["x"] == X).all()
    assert "names isn't a field: its data type '|O'" in caplog.text
    with pytest.raises(DatasetError, match="'names' can't be read: its data type"):
        Dataset(root, fields={"names": "names"}).open()
    (root / "x/.zarray").unlink()
    with pytest.raises(DatasetError, match=r"no arrays that can be fields \(names: its data type"):
        Dataset(root).open()


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//x"])
def test_paths_that_lead_out_of_the_hierarchy_are_rejected(name: str, tmp_path: Path) -> None:
    root = write_group(tmp_path / "set.zarr", {"x": X})
    document = json.loads((root / "x/zarr.json").read_text())
    changes = {"kind": "inline", "must_understand": False, "metadata": {name: document}}
    change(root / "zarr.json", consolidated_metadata=changes)
    with pytest.raises(DatasetError, match="names a node"):
        Dataset(root).open()


def test_a_link_that_leads_out_of_the_hierarchy_is_rejected(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (root / "x/c/1").rename(outside)
    (root / "x/c/1").symlink_to(outside)
    with Dataset(root) as dataset, pytest.raises(DatasetError, match="leads out"):
        dataset.read(dataset.contents.rows(np.arange(8)))


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_file_removed_after_indexing_is_named(where: str, tmp_path: Path) -> None:
    import fsspec

    options = {"chunks": {"x": (2, 3, 8, 8)}, "fill_value": {"x": 9}}
    root = write_group(tmp_path / "set.zarr", {"x": X}, **options)
    with opened(root, where, tmp_path) as dataset:
        dataset.open()
        if where == "remote":
            fsspec.filesystem("memory").rm(f"{dataset.url}/x/c/2/0/0/0")
        else:
            (root / "x/c/2/0/0/0").unlink()
        with pytest.raises((IndexChangedError, FetchError), match="x/c/2/0/0/0"):
            read_all(dataset)


def test_a_failed_open_leaks_no_file_descriptor(tmp_path: Path) -> None:
    import os

    root = write_group(tmp_path / "set.zarr", {"x": X}, chunks={"x": (1, 3, 8, 8)})
    with Dataset(root) as dataset:
        dataset.open()
        path = root / "x/c/2/0/0/0"
        path.unlink()
        path.symlink_to("nowhere")
        rows = dataset.contents.rows(np.arange(8))
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(IndexChangedError, match="x/c/2/0/0/0"):
            dataset.read(rows)
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("steps", "lost"), [(1, [1]), (2, [2, 3])])
@pytest.mark.parametrize("where", ["local", "remote"])
def test_an_empty_chunk_file_is_damage_and_not_fill_values(
    where: str, steps: int, lost: list[int], tmp_path: Path
) -> None:
    options = {"chunks": {"x": (steps, 3, 8, 8)}, "fill_value": {"x": 9}}
    root = write_group(tmp_path / "set.zarr", {"x": X}, **options)
    (root / "x/c/1/0/0/0").write_bytes(b"")
    with opened(root, where, tmp_path) as dataset:
        _, bad = bad_of(dataset)
        assert sorted(bad) == lost
        assert all("it has no bytes" in reason for reason in bad.values())


def test_too_many_axes_or_fields_are_rejected(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"5 axes, but the arrays of .* have at most 4"):
        Dataset(root, sample=(1, 1, 1, 1, 1)).open()
    shapes = {str(number): (1,) for number in range(MAX_FIELDS + 1)}
    with pytest.raises(DatasetError, match="arrays that can be fields, expected at most"):
        Sampling().check_arrays(shapes, {}, url="set.zarr")
