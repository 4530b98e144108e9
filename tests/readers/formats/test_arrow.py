"""Arrow IPC files, streams and Feather files, compared with the tables that were written."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest

from penstock.cache import DatasetError
from penstock.readers import Dataset
from penstock.readers.fieldtypes import Array, ClassLabel, EncodedColumn, Image, Text, Value
from tests.readers.formats.tables import check, features, jpeg, many_types, plain

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Any, table: Any, *, kind: str = "file", rows: int = 40) -> None:
    """kind: "stream", or a codec of a file's buffers, or "file"."""
    codec = kind if kind in ("lz4", "zstd") else None
    make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        for batch in table.to_batches(max_chunksize=rows):
            writer.write_batch(batch)


KINDS = ("file", "lz4", "zstd", "stream")


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_comes_back_as_it_was_written(root: Path, kind: str) -> None:
    table = many_types(230)
    write(root / "a.arrow", table.slice(0, 115), kind=kind)
    write(root / "b.arrow", table.slice(115), kind=kind)
    with Dataset(root) as dataset:
        schema = dataset.index.schema
        check(dataset, table, list(schema))
        assert schema["label"] == ClassLabel()
        assert schema["category"] == schema["point.name"] == Text()
        assert schema["grid"] == Array("int16", (3, 2))
        assert schema["when"] == Value("int64")
        assert dataset.contents.units is not None
        assert [units.tolist() for units in dataset.contents.units] == [[40, 40, 35] * 2]
        assert dataset.names([0, 229]) == ["a.arrow, row 0", "b.arrow, row 114"]


@pytest.mark.parametrize("compression", ["lz4", "uncompressed"])
def test_feather_files_are_read(root: Path, compression: str) -> None:
    table = many_types(90)
    pa.feather.write_feather(table, root / "a.feather", compression=compression, chunksize=30)
    with Dataset(root) as dataset:
        check(dataset, table, list(dataset.index.schema))
    (root / "a.feather").write_bytes(b"FEA1" + bytes(64) + b"FEA1")
    with Dataset(root) as dataset, pytest.raises(DatasetError, match=r"a\.feather.*version 1"):
        dataset.open()


def test_views_and_sliced_and_nested_dictionaries(root: Path) -> None:
    texts = [f"a text that is long enough for a buffer {k}" if k % 2 else f"{k}" for k in range(50)]
    table = pa.table(
        {
            "view": pa.array(texts, pa.string_view()),
            "short": pa.array([f"{k}" for k in range(50)], pa.string_view()),
            "inner": pa.StructArray.from_arrays(
                [pa.array([f"c{k % 4}" for k in range(50)]).dictionary_encode()], ["category"]
            ),
            "numbers": pa.array([k % 3 for k in range(50)]).dictionary_encode(),
        }
    ).slice(7, 40)
    write(root / "a.arrow", table, rows=11)
    with Dataset(root) as dataset:
        assert dataset.index.schema["numbers"] == Value("int64")
        check(dataset, table, ["view", "short", "inner.category", "numbers"])


def test_pictures_with_features_and_nulls(root: Path) -> None:
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures = [jpeg(i, height=10 + i, width=9) for i in range(6)]
    table = pa.table(
        {"image": pa.array([{"bytes": p, "path": f"{p[:1]!r}.jpg"} for p in pictures], picture)}
    ).replace_schema_metadata(features(image={"_type": "Image"}))
    write(root / "data-00000-of-00001.arrow", table, kind="stream", rows=4)
    (root / "state.json").write_text("{}")
    with Dataset(root) as dataset:
        assert dict(dataset.index.schema) == {"image": Image()}
        column = dataset.read(dataset.rows(np.array([5, 0, 3]))).columns["image"]
        assert isinstance(column, EncodedColumn)
        assert plain(column) == [pictures[5], pictures[0], pictures[3]]
        assert column.dims is not None
        assert column.dims.tolist() == [[15, 9], [10, 9], [13, 9]]


@pytest.mark.parametrize("kind", KINDS)
def test_remote_files_are_read_through_the_cache(tmp_path: Path, kind: str) -> None:
    memory, place = fsspec.filesystem("memory"), f"/arrow-{kind}-{tmp_path.name}"
    table = many_types(200)
    for number in range(2):
        file = io.BytesIO()
        write(file, table.slice(100 * number, 100), kind=kind)
        memory.pipe(f"{place}/{number}.arrow", file.getvalue())
    try:
        with Dataset(f"memory:/{place}", cache=tmp_path / "cache") as dataset:
            check(dataset, table, ["int8", "text", "category", "ragged", "fixed", "point.x"])
    finally:
        memory.rm(place, recursive=True)
