"""Make tables of many types, and compare rows of a table with the samples of a batch."""

from __future__ import annotations

import datetime
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from PIL import Image as Pictures

from penstock.readers.fieldtypes import PRESENT, DenseColumn, EncodedColumn, RaggedColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers import Dataset
    from penstock.readers.fieldtypes import Column, SampleBatch

DAY = datetime.datetime(2024, 5, 6, 7, 8, 9, 1234)


def jpeg(seed: int, *, height: int = 24, width: int = 40, kind: str = "JPEG") -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Pictures.fromarray(noise).save(out, kind)
    return out.getvalue()


def many_types(count: int, first: int = 0) -> Any:
    """Return a table with a column of each type that is read, without nulls."""
    i = range(first, first + count)
    return pa.table(
        {
            "int8": pa.array([k % 100 for k in i], pa.int8()),
            "uint64": pa.array([2**63 + k for k in i], pa.uint64()),
            "float16": pa.array([np.float16(k % 7) for k in i], pa.float16()),
            "float64": pa.array([k / 3 for k in i], pa.float64()),
            "bool": pa.array([k % 3 == 0 for k in i], pa.bool_()),
            "label": pa.array([k % 5 for k in i], pa.int64()),
            "text": pa.array([f"text {k % 4} é" for k in i], pa.string()),
            "large_text": pa.array([f"row {k}" * (k % 3) for k in i], pa.large_string()),
            "bytes": pa.array([bytes([k % 256]) * (k % 9) for k in i], pa.binary()),
            "category": pa.array([f"c{k % 3}" for k in i]).dictionary_encode(),
            "digest": pa.array([k.to_bytes(4, "big") for k in i], pa.binary(4)),
            "ragged": pa.array([list(range(k % 5)) for k in i], pa.list_(pa.int32())),
            "input_ids": pa.array([list(range(k % 6)) for k in i], pa.large_list(pa.int64())),
            "fixed": pa.array([[k, k + 1, k + 2] for k in i], pa.list_(pa.float32(), 3)),
            "grid": pa.array(
                [[[k, 1], [2, 3], [4, 5]] for k in i], pa.list_(pa.list_(pa.int16(), 2), 3)
            ),
            "boxes": pa.array(
                [[[k, 1, 2, 3.5]] * (k % 3) for k in i], pa.list_(pa.list_(pa.float32(), 4))
            ),
            "matrix": pa.array(
                [[[k] * (k % 3 + 1)] * (k % 2) for k in i], pa.list_(pa.list_(pa.float64()))
            ),
            "when": pa.array([DAY + datetime.timedelta(seconds=k) for k in i], pa.timestamp("us")),
            "day": pa.array([DAY.date() + datetime.timedelta(days=k) for k in i], pa.date32()),
            "point": pa.array(
                [{"x": k / 2, "name": f"p{k}"} for k in i],
                pa.struct([("x", pa.float32()), ("name", pa.string())]),
            ),
        }
    )


def wanted(table: Any, name: str) -> list[Any]:
    """Return the values of a table that a field should have, as plain objects."""
    column, *parts = name.split(".")
    array = table.column(column)
    if pa.types.is_temporal(array.type):
        array = (
            array.cast(pa.int32()).cast(pa.int64())
            if array.type == pa.date32()
            else array.cast(pa.int64())
        )
    values: list[Any] = array.to_pylist()
    for part in parts:
        values = [None if value is None else value[part] for value in values]
    if pa.types.is_fixed_size_binary(array.type):
        values = [list(value) for value in values]
    return values


def plain(column: Column) -> list[Any]:
    """Return the samples of a batch's column as plain objects."""
    if isinstance(column, EncodedColumn):
        return [bytes(sample) for sample in column.samples]
    if isinstance(column, DenseColumn):
        return list(column.values.tolist())
    assert isinstance(column, RaggedColumn)
    return [column.sample(row).tolist() for row in range(len(column))]


def same(found: Any, value: Any) -> bool:
    """Return True if a sample equals a value of a table, whose texts are str."""
    if isinstance(value, str):
        return bool(found == value.encode())
    return bool(found == value)


def check(dataset: Dataset, table: Any, fields: Sequence[str], *, seed: int = 0) -> SampleBatch:
    """Compare all rows of some fields with a table, read in shuffled batches; return the last."""
    order = np.random.default_rng(seed).permutation(len(dataset))
    batch: Any = None
    for places in np.array_split(order, 3):
        rows = dataset.contents.rows(places)
        batch = dataset.read(rows, fields=list(fields))
        for name in fields:
            values = wanted(table, name)
            found = plain(batch.columns[name])
            there = batch.has(name)
            for place, row in enumerate(places.tolist()):
                if values[row] is None and name + PRESENT not in fields:
                    assert not there[place], (name, row)
                else:
                    assert same(found[place], values[row]), (name, row, found[place], values[row])
    found_last: SampleBatch = batch
    return found_last


def features(**columns: Any) -> dict[bytes, bytes]:
    """Return the metadata in which Hugging Face stores its features."""
    return {b"huggingface": json.dumps({"info": {"features": columns}}).encode()}
