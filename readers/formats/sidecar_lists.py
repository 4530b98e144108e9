"""The lists that a sidecar is made of: their Arrow types, and columns to lists and back."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.fields.arrays import array_form, number_dtype
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, RaggedColumn
from penstock.readers.fields.field_types import is_encoded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.fields.arrays import ArrayForm
    from penstock.readers.fields.columns import Column
    from penstock.readers.files.ipc import Columns
    from penstock.readers.formats.layout import Layout
    from penstock.readers.types import Encoded

# A field's name has no slash, so none of these is a field's.
NAMES, ROWS, NOTES = "/names", "/rows", "/notes"
FILES = {
    "/files/name": pa.large_binary(),
    "/files/bytes": pa.int64(),
    "/files/mtime_ns": pa.int64(),
    "/files/version": pa.string(),
}
EXTENTS = {
    "/extents/file": pa.int32(),
    "/extents/start": pa.int64(),
    "/extents/bytes": pa.int64(),
    "/extents/field": pa.int16(),
}
UNITS = "/units"
SPAN = {
    "file": pa.int32(),
    "start": pa.int64(),
    "bytes": pa.int64(),
    "crc32c": pa.uint32(),
    "shape": pa.int64(),
    "codec": pa.string(),
}
"""What is noted of a span: its payload in a file, one number a sample, and its shape's lengths."""


def kinds_of(layout: Layout) -> dict[str, Any]:
    """The lists of a sidecar, by name and in order, with the Arrow types of their values."""
    kinds: dict[str, Any] = {
        NAMES: pa.large_binary(),
        ROWS: pa.int64(),
        NOTES: pa.large_binary(),
        **FILES,
    }
    if is_of_chunks(layout):
        kinds |= {**EXTENTS, UNITS: pa.int64()}
    for name in layout.schema:
        if layout.storage[name] == "chunks":
            continue
        if layout.storage[name] == "span":
            kinds |= {f"{name}/{what}": kind for what, kind in SPAN.items()}
        else:
            kinds |= {f"{name}/{what}": kind for what, kind in _noted_kinds(layout, name).items()}
            kinds[f"{name}/present"] = pa.bool_()
    return kinds


def is_of_chunks(layout: Layout) -> bool:
    """Whether samples lie in chunks, which metadata tell of."""
    return "chunks" in layout.storage.values()


def columns_of(layout: Layout) -> Columns:
    """The columns of a sidecar's one row, by name and in order."""
    return {name: str(pa.large_list(kind)) for name, kind in kinds_of(layout).items()}


def _noted_kinds(layout: Layout, name: str) -> dict[str, Any]:
    type = layout.schema[name]
    if is_encoded(type):
        return {"values": pa.large_binary()}
    dtype = number_dtype(type)
    if dtype is not None:
        return {"values": _arrow_type(dtype)}
    form = form_of(layout, name)
    kinds = {"values": _arrow_type(form.dtype)}
    if form.is_ragged:
        kinds["counts"] = pa.int64()
        if form.rest is None:
            kinds["shapes"] = pa.int64()
    return kinds


def form_of(layout: Layout, name: str) -> ArrayForm:
    """Dtype and shape of an array that is noted."""
    form = array_form(layout.schema[name])
    if form is None:
        raise TypeError(f"{name}: what is noted of {layout.schema[name]!r} isn't known")
    return form


def _arrow_type(dtype: np.dtype[Any]) -> Any:
    # Arrow has no complex numbers: two floats each.
    return pa.from_numpy_dtype(_real(dtype))


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


class Lists:
    """The lists of a sidecar that is read, by name. batch: its one row, checked to have the columns
    of `columns_of`. Raises ValueError for missing values inside."""

    def __init__(self, batch: Any) -> None:
        if batch.num_rows != 1:
            raise ValueError(f"{batch.num_rows} rows, wanted 1")
        self._batch = batch

    def arrow(self, name: str, *, length: int | None = None) -> Any:
        """A list as an Arrow array. length: what it must have."""
        lists = self._batch.column(name)
        # By hand: `flatten` imports pyarrow.compute, which takes longer than opening a dataset.
        start, end = lists.offsets.to_numpy().tolist()
        values = lists.values[start:end]
        if values.null_count:
            raise ValueError(f"{name} has missing values")
        if length is not None and len(values) != length:
            raise ValueError(f"{name} has {len(values):,} values, wanted {length:,}")
        return values

    def numbers(self, name: str, *, length: int | None = None) -> NDArray[Any]:
        """A list of numbers."""
        found: NDArray[Any] = self.arrow(name, length=length).to_numpy(zero_copy_only=False)
        return found


class ListsDraft:
    """The lists of a sidecar to be written."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._kinds = layout, kinds_of(layout)
        self._arrays: dict[str, Any] = {}

    def add(self, lists: Mapping[str, Any]) -> None:
        """Add lists by name."""
        for name, values in lists.items():
            self._arrays[name] = pa.array(values, self._kinds[name])

    def add_noted(self, name: str, column: Column, present: NDArray[np.bool_]) -> None:
        """Add a field whose values are noted."""
        for what in _noted_kinds(self._layout, name):
            self.add({f"{name}/{what}": _PARTS[what](column)})
        self.add({f"{name}/present": present})

    def batch(self, metadata: Mapping[str, str]) -> Any:
        """The record batch of one row."""
        columns = {
            name: pa.LargeListArray.from_arrays(
                pa.array([0, len(self._arrays[name])], pa.int64()), self._arrays[name]
            )
            for name in self._kinds
        }
        return pa.record_batch(columns).replace_schema_metadata(dict(metadata))


def _values(column: Column) -> Any:
    if isinstance(column, DenseColumn | RaggedColumn):
        flat = np.ascontiguousarray(column.values).reshape(-1)
        return flat.view(_real(flat.dtype))
    return [bytes(each) if isinstance(each, np.ndarray) else each for each in column.samples]


def _counts(column: Column) -> NDArray[np.int64]:
    assert isinstance(column, RaggedColumn)
    return np.diff(column.offsets)


def _shapes(column: Column) -> NDArray[np.int64]:
    assert isinstance(column, RaggedColumn)
    assert column.shapes is not None
    return column.shapes.reshape(-1)


_PARTS = {"values": _values, "counts": _counts, "shapes": _shapes}


def noted_column(lists: Lists, layout: Layout, name: str, *, samples: int) -> Column:
    """A field's values as they were noted. Raises ValueError for what can't be."""
    if is_encoded(layout.schema[name]):
        return _encoded(lists.arrow(f"{name}/values", length=samples))
    dtype = number_dtype(layout.schema[name])
    if dtype is not None:
        values = lists.numbers(f"{name}/values").view(dtype)
        if len(values) != samples:
            raise ValueError(f"{name} has {len(values):,} values, wanted {samples:,}")
        return DenseColumn(values)
    form = form_of(layout, name)
    flat = lists.numbers(f"{name}/values").view(form.dtype)
    if not form.is_ragged:
        return DenseColumn(flat.reshape(samples, *form.shape))
    counts = lists.numbers(f"{name}/counts", length=samples)
    offsets = _offsets(counts)
    if form.rest is not None:
        values = flat.reshape(-1, *form.rest) if all(form.rest) else flat.reshape(0, *form.rest)
        _check_end(name, offsets, len(values))
        return RaggedColumn(values, offsets)
    shapes = lists.numbers(f"{name}/shapes", length=samples * len(form.shape))
    shapes = shapes.reshape(samples, len(form.shape))
    if (shapes < 0).any() or (shapes.prod(axis=1) != counts).any():
        raise ValueError(f"{name} has shapes that don't fit its counts")
    _check_end(name, offsets, len(flat))
    return RaggedColumn(flat, offsets, shapes)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(counts) and (counts.min() < 0 or float(counts.sum(dtype=np.float64)) > 2**62):
        raise ValueError("counts that can't be")
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def _check_end(name: str, offsets: NDArray[np.int64], length: int) -> None:
    if offsets[-1] != length:
        raise ValueError(f"{name} has {length:,} values, and its counts say {offsets[-1]:,}")


def _encoded(values: Any) -> EncodedColumn:
    ends, data = _flat(values)
    return EncodedColumn([data[a:b] for a, b in pairwise(ends.tolist())])


def _flat(values: Any) -> tuple[NDArray[np.int64], Encoded]:
    """Where values of large_binary end, from the first one's start on, and all their bytes."""
    _, offsets, flat = values.buffers()
    if not len(values):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.empty(0, np.uint8) if flat is None else np.frombuffer(flat, np.uint8)
    return ends - ends[0], data[ends[0] : ends[-1]]


def own_copy(values: Any) -> Any:
    """Values of large_binary in memory of their own: who keeps them keeps no whole sidecar."""
    ends, data = _flat(values)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data.copy())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), buffers)
