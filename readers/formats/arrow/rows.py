"""Rows of a unit's column, taken from its table (`values.values_table`) into columns of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.fields.arrays import array_form, number_dtype
from penstock.readers.fields.columns import DenseColumn, EncodedColumn, RaggedColumn
from penstock.readers.formats.arrow.values import SHAPES, VALUES, WRONG, present_rows, raw_numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from penstock.readers.fields.arrays import ArrayForm
    from penstock.readers.fields.columns import Column
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

_EMPTY = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False


_INLINE_BYTES = 12  # values that short stand in their view
_VIEWED_SHARE = 4
"""Samples that make up at least one in so many bytes of a unit are views, which keep all of it in
memory; of others there are copies."""


def values_of(table: Any) -> Any:
    """The values of a table, as one array."""
    column = table.column(VALUES)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def is_there(table: Any, rows: Ints) -> Bools | None:
    """Which rows have the field; None for all."""
    return present_rows(values_of(table), rows)


def reasons(table: Any, rows: Ints) -> Iterator[tuple[int, str]]:
    """Rows that can't be samples: their place in rows, and why."""
    if WRONG not in table.column_names:
        return
    told = table.column(WRONG)
    for place, row in enumerate(rows.tolist()):
        reason = told[row].as_py()
        if reason is not None:
            yield place, reason


def dense_values(table: Any, form: ArrayForm) -> NDArray[Any]:
    """The samples of a unit where they have one shape: (rows, *shape), a view."""
    array = values_of(table)
    if isinstance(array, pa.FixedSizeListArray):
        size = array.type.list_size
        flat = array.values.slice(array.offset * size, len(array) * size)
    else:
        flat = array
    numbers = raw_numbers(flat).reshape(len(array), *form.fixed_shape)
    return numbers.view(np.bool_) if form.dtype.kind == "b" else numbers


class EncodedRows:
    """Collects encoded samples, texts among them, in the order of a batch."""

    def __init__(self, count: int) -> None:
        self.samples: list[Encoded] = [_EMPTY] * count

    def add(self, table: Any, rows: Ints, places: Iterable[int]) -> None:
        """Views of some rows' bytes, in their places."""
        array = values_of(table)
        there = present_rows(array, rows)
        if isinstance(array, pa.DictionaryArray):
            indices = raw_numbers(array.indices)[rows].astype(np.int64)
            array = array.dictionary
            if there is not None:
                indices[~there] = 0
            if not len(array) and there is not None and not there.any():
                return
            if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
                raise ValueError("it has places beyond its dictionary")
            rows = indices
        if array.type == pa.binary_view():
            self._add_views(array, rows, list(places), there)
            return
        wide = pa.types.is_large_binary(array.type)
        _, offsets, data = array.buffers()
        if data is None:
            return
        at: NDArray[Any] = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset :]
        bytes_ = np.frombuffer(data, np.uint8)
        bytes_.flags.writeable = False
        samples = self.samples
        begins, stops = at[rows], at[rows + 1]
        if _VIEWED_SHARE * int((stops - begins).sum()) < len(bytes_):
            bytes_, begins, stops = _copied(bytes_, begins, stops)
        starts, ends = begins.tolist(), stops.tolist()
        if there is None:
            for place, start, end in zip(places, starts, ends, strict=True):
                samples[place] = bytes_[start:end]
            return
        for place, start, end, is_here in zip(places, starts, ends, there.tolist(), strict=True):
            if is_here:
                samples[place] = bytes_[start:end]

    def _add_views(self, array: Any, rows: Ints, places: list[int], there: Bools | None) -> None:
        _, views, *buffers = array.buffers()
        told = np.frombuffer(views, np.int32).reshape(-1, 4)[array.offset + rows]
        short = told.view(np.uint8).reshape(-1, 16)
        data = [np.frombuffer(buffer or b"", np.uint8) for buffer in buffers]
        total = sum(map(len, data))
        is_copied = _VIEWED_SHARE * int(told[:, 0].sum(dtype=np.int64)) < total
        for row, (length, _, buffer, start) in enumerate(told.tolist()):
            if there is not None and not there[row]:
                continue
            if length <= _INLINE_BYTES:
                sample = short[row, 4 : 4 + length].copy()
            else:
                sample = data[buffer][start : start + length]
                sample = sample.copy() if is_copied else sample
            sample.flags.writeable = False
            self.samples[places[row]] = sample

    def column(self) -> EncodedColumn:
        """The samples."""
        return EncodedColumn(self.samples)


class RaggedRows:
    """Collects samples that differ in shape, in the order of a batch."""

    def __init__(self, count: int, form: ArrayForm) -> None:
        self._form = form
        self._rest = form.rest if form.shape[0] is None else None
        self._shapes = np.zeros((count, len(form.shape)), np.int64)
        self._samples: list[NDArray[Any]] = [np.empty(0, form.dtype)] * count

    def add(self, table: Any, rows: Ints, places: Iterable[int]) -> None:
        """Some rows, in their places."""
        array = values_of(table)
        numbers = raw_numbers(array.values)
        if self._form.dtype.kind == "b":
            numbers = numbers.view(np.bool_)
        offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset :]
        starts, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
        places = list(places)
        for place, start, end in zip(places, starts, ends, strict=True):
            self._samples[place] = numbers[start:end]
        if SHAPES in table.column_names:
            told = table.column(SHAPES).combine_chunks()
            lengths = raw_numbers(told.values).reshape(-1, self._shapes.shape[1])
            self._shapes[places] = lengths[told.offset + rows]

    def column(self) -> RaggedColumn:
        """The samples."""
        counts = [len(sample) for sample in self._samples]
        width = int(np.prod(self._rest or (), dtype=np.int64))
        flat = np.concatenate([np.empty(0, self._form.dtype), *self._samples])
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        if self._rest is None:
            return RaggedColumn(flat, offsets, self._shapes)
        return RaggedColumn(flat.reshape(-1, *self._rest), offsets // max(1, width))


def _copied(data: Encoded, starts: Ints, ends: Ints) -> tuple[Encoded, Ints, Ints]:
    """Some parts of a unit's bytes by themselves, and where they begin and end there."""
    parts = [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    joined = np.concatenate([_EMPTY, *parts])
    joined.flags.writeable = False
    stops = np.cumsum(ends - starts, dtype=np.int64)
    return joined, stops - (ends - starts), stops


def collector(type: FieldType, count: int) -> EncodedRows | RaggedRows:
    """What collects a field whose samples aren't of one shape."""
    form = array_form(type)
    return EncodedRows(count) if form is None else RaggedRows(count, form)


def nothing(type: FieldType, count: int) -> Column:
    """A column of samples that all lack the field."""
    dtype, form = number_dtype(type), array_form(type)
    if dtype is not None:
        return DenseColumn(np.zeros(count, dtype))
    if form is not None and not form.is_ragged:
        return DenseColumn(np.zeros((count, *form.fixed_shape), form.dtype))
    return collector(type, count).column()
