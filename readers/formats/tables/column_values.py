"""Convert one column of one unit to the table in which its values are kept, and take rows from it.

The form is an Arrow table, so that it can be kept and mapped: "values" are numbers (bools as
bytes), lists of numbers of one length (dense arrays) or any (ragged ones), or bytes, null where a
sample lacks the field; "shapes" are there where samples differ in more than the first length,
"wrong" where some can't be samples: why. Rows go from there into columns of a batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.fields import (
    ClassLabel,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    array_form,
    mismatch,
    number_dtype,
    unfit_numbers,
)
from penstock.readers.formats.tables.column_types import is_text, value_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import ArrayForm, Column, FieldType
    from penstock.readers.formats.tables.column_types import Tensor
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

VALUES, SHAPES, WRONG = "values", "shapes", "wrong"
NULL_INSIDE = "it has a null inside"
RAGGED_INSIDE = "its lists differ in length, so it is no array"


def values_table(
    type: FieldType, column: Any, parts: Sequence[str], tensor: Tensor | None = None
) -> Any:
    """A column's table. column: an Arrow array or chunked one; parts: names of the structs' parts
    inside of which the values lie; tensor: how its tensors are stored. Raises ValueError where the
    types don't fit."""
    array = _inside(column, parts)
    dtype, form = number_dtype(type), array_form(type)
    if dtype is not None:
        return _numbers(type, array, dtype)
    if form is not None:
        return _arrays(type, array, form, tensor)
    return pa.table({VALUES: _bytes(array)})


def _inside(column: Any, parts: Sequence[str]) -> Any:
    """The array inside of structs, null where one of these is."""
    array = _whole(column)
    for part in parts:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if not pa.types.is_struct(array.type):
            raise ValueError(f"it holds {array.type} where a struct was")
        array = array.flatten()[array.type.get_field_index(part)]
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return _places_of_runs(array) if pa.types.is_run_end_encoded(array.type) else array


def _places_of_runs(array: Any) -> Any:
    """A run-end encoded array as places in a dictionary of its values. Raises ValueError."""
    rows = np.arange(array.offset, array.offset + len(array))
    places = np.searchsorted(array.run_ends.to_numpy(), rows, side="right")
    if len(places) and int(places[-1]) >= len(array.values):
        raise ValueError("its runs end before its rows do")
    return pa.DictionaryArray.from_arrays(pa.array(places, pa.int64()), array.values)


def _in_dictionary(array: Any) -> Any:
    """The places that a dictionary array has in its dictionary, null where the value is."""
    values = array.dictionary
    if not values.null_count:
        return array.indices
    places, there = raw_numbers(array.indices).astype(np.int64), _present(array.indices)
    there[there] = _present(values)[places[there]]
    return pa.array(np.where(there, places, 0), mask=~there)


def _whole(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)


def _numbers(type: FieldType, array: Any, dtype: np.dtype[Any]) -> Any:
    wrong: dict[int, str] = {}
    if isinstance(type, ClassLabel) and is_text(value_type(array.type)):
        array, wrong = _class_numbers(array, type.names)
    numbers = _plain(array)
    found, unfit = _cast(numbers, dtype)
    if isinstance(type, ClassLabel):
        limit = len(type.names) or 2**63
        raw = raw_numbers(numbers)
        unfit = ((raw < 0) | (raw >= limit)) & _present(numbers)
    for row in [] if unfit is None else np.flatnonzero(unfit).tolist():
        wrong[row] = f"{numbers[row].as_py()!r:.80} {mismatch(type)}"
    return _table(found, wrong)


def _class_numbers(array: Any, names: Sequence[str]) -> tuple[Any, dict[int, str]]:
    """Classes by number, of their names."""
    numbers = {name: number for number, name in enumerate(names)}
    texts = array.to_pylist()
    wrong = {
        row: f"{text!r:.80} {mismatch(ClassLabel(tuple(names)))}"
        for row, text in enumerate(texts)
        if text is not None and text not in numbers
    }
    return pa.array([None if t is None else numbers.get(t, 0) for t in texts], pa.int64()), wrong


def _plain(array: Any) -> Any:
    """Numbers as an array of numpy's types: bools as bytes, times as integers, decimals as the
    nearest fractions."""
    array = _decoded(array)
    kind = array.type
    if pa.types.is_decimal(kind):  # pyarrow's own cast gives other numbers: 1.2000000000000002
        floats = [None if each is None else float(each) for each in array.to_pylist()]
        return pa.array(floats, pa.float64())
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if pa.types.is_temporal(kind):
        return array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return array


def _decoded(array: Any) -> Any:
    """The values of a dictionary where they are used; any other array as it is."""
    if not pa.types.is_dictionary(array.type):
        return array
    return array.dictionary.take(_in_dictionary(array))


def _cast(array: Any, dtype: np.dtype[Any]) -> tuple[Any, Bools | None]:
    """Numbers as a dtype, 0 where they don't fit it, and where that is; None where all do."""
    wanted = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    if array.type == wanted:
        return array, None
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if dtype.kind == "b" or not is_number:
        raise ValueError(f"it holds {array.type}, and {dtype} was indexed")
    found, present = raw_numbers(array), _present(array)
    unfit = unfit_numbers(dtype, found)
    with np.errstate(all="ignore"):
        found = np.where(unfit | ~present, found.dtype.type(0), found).astype(dtype)
    return pa.array(found, mask=None if present.all() else ~present), unfit & present


def raw_numbers(array: Any) -> NDArray[Any]:
    """The numbers of a primitive array, anything where one is null."""
    dtype = np.dtype(array.type.to_pandas_dtype())
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array), dtype)
    return np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)


def _table(values: Any, wrong: dict[int, str], shapes: Any | None = None) -> Any:
    columns = {VALUES: values}
    if shapes is not None:
        columns[SHAPES] = shapes
    if wrong:
        reasons = [wrong.get(row) for row in range(len(values))]
        columns[WRONG] = pa.array(reasons, pa.string())
    return pa.table(columns)


def _bytes(array: Any) -> Any:
    """Bytes whose values lie behind one another, or where views say, or those of a dictionary."""
    if pa.types.is_dictionary(array.type):
        values = _bytes(array.dictionary)
        return pa.DictionaryArray.from_arrays(_in_dictionary(array), values)
    kind = array.type
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind) or kind == pa.binary_view():
        return array
    if pa.types.is_large_string(kind):
        return array.view(pa.large_binary())
    if pa.types.is_string(kind):
        return array.view(pa.binary())
    if kind == pa.string_view():
        return array.view(pa.binary_view())
    raise ValueError(f"it holds {kind} where bytes were")


def _arrays(type: FieldType, array: Any, form: ArrayForm, tensor: Tensor | None) -> Any:
    array = _decoded(array)
    depth, present = len(form.shape), _present(array)
    lists = _NestedLists(array, depth if tensor is None else 1)
    if tensor is not None:
        lists.shape_tensors(tensor, present)
    plain = _plain(lists.values)
    flat, unfit = _cast(plain, form.dtype)
    if flat.null_count:
        lists.nulls |= lists.rows_with(~_present(flat))
    numbers = _view(flat.fill_null(0) if flat.null_count else flat)
    wrong = _misfits(lists, form, present)
    unfit_rows = present & False if unfit is None else lists.rows_with(unfit) & present
    for row in np.flatnonzero(unfit_rows).tolist():
        assert unfit is not None
        start = int(lists.starts[row])
        value = plain[start + int(np.argmax(unfit[start : lists.ends[row]]))].as_py()
        wrong.setdefault(row, f"{value!r} {mismatch(type)}")
    good = present.copy()
    good[list(wrong)] = False
    starts, ends = lists.starts, lists.ends
    if form.is_ragged:
        starts, ends = np.where(good, starts, 0), np.where(good, ends, 0)
    if not form.is_ragged:
        mask = pa.array(~present) if not present.all() else None
        size = math.prod(form.fixed_shape)
        dense = _dense(numbers, starts, good, size)
        values = pa.FixedSizeListArray.from_arrays(_arrow(dense), size, mask=mask)
        return _table(values, wrong)
    # A list that is null is an empty one: what files tell of their nulls doesn't part the two.
    joined, offsets = _joined(numbers, starts, ends)
    values = pa.LargeListArray.from_arrays(pa.array(offsets), _arrow(joined))
    shapes = None
    if form.rest is None or form.shape[0] is not None:
        lengths = np.where(good[:, None], lists.shapes, 0)
        shapes = pa.FixedSizeListArray.from_arrays(pa.array(lengths.reshape(-1)), depth)
    return _table(values, wrong, shapes)


class _NestedLists:
    """Nested lists, taken apart.

    values: the numbers inside. starts, ends: of each row in them; shapes: of each row, int64,
    shape (rows, depth); odd: rows whose lists differ in length, or that have a null inside.
    """

    def __init__(self, array: Any, depth: int) -> None:
        count = len(array)
        self.shapes = np.zeros((count, depth), np.int64)
        self.odd, self.nulls = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.starts = np.arange(count, dtype=np.int64)
        self.ends = self.starts + 1
        for axis in range(depth):
            if axis and array.null_count:
                self.nulls |= self.rows_with(~_present(array))
            starts, ends, array = _opened(array)
            lengths = ends - starts
            if axis == 0:
                self.shapes[:, 0] = lengths
                self.starts, self.ends = starts, ends
                continue
            some = self.ends > self.starts
            if not some.any():
                self.starts, self.ends = np.zeros_like(self.starts), np.zeros_like(self.ends)
                continue
            first = np.where(some, lengths[np.where(some, self.starts, 0)], 0)
            # Rows lie behind one another: how many elements differ from their row's first one.
            row = np.repeat(np.arange(count), self.ends - self.starts)
            places = _spread(self.starts, self.ends)
            differs = lengths[places] != first[row]
            self.odd |= np.bincount(row[differs], minlength=count).astype(np.bool_)
            self.shapes[:, axis] = first
            last = np.where(some, self.ends - 1, 0)
            self.starts = np.where(some, starts[np.where(some, self.starts, 0)], 0)
            self.ends = np.where(some, ends[last], 0)
        if pa.types.is_fixed_size_list(array.type) or hasattr(array, "offsets"):
            raise ValueError(f"it holds lists of {array.type} where numbers were")
        self.values = array

    def rows_with(self, marks: Bools) -> Bools:
        """The rows that have a mark among the elements where they are now."""
        if not marks.any():
            return np.zeros(len(self.starts), np.bool_)
        before = np.concatenate(([0], np.cumsum(marks)))
        found: Bools = before[self.ends] > before[self.starts]
        return found

    def shape_tensors(self, tensor: Tensor, present: Bools) -> None:
        """Give flat lists the shape of a sample's tensor, its axes in their order."""
        stored_shape, axes = tensor
        size = math.prod(stored_shape)
        whole = present & (self.shapes[:, 0] == size)
        self.odd = present & ~whole
        shape = [stored_shape[axis] for axis in axes]
        self.shapes = np.where(whole[:, None], np.array(shape, np.int64), 0)
        if list(axes) == sorted(axes):
            return
        places = np.arange(size, dtype=np.int64).reshape(stored_shape).transpose(axes).reshape(-1)
        self.values = self.values.take(pa.array((self.starts[whole, None] + places).reshape(-1)))
        self.starts = np.where(whole, (np.cumsum(whole) - 1) * size, 0)
        self.ends = np.where(whole, self.starts + size, 0)


def _spread(starts: Ints, ends: Ints) -> Ints:
    """All places in [start, end) of each row, behind one another."""
    counts = ends - starts
    total = int(counts.sum())
    first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    places: Ints = first + np.arange(total)
    return places


def _opened(array: Any) -> tuple[Ints, Ints, Any]:
    """Where each list begins and ends in what they hold, and that; nulls are empty."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind, count = array.type, len(array)
    if pa.types.is_fixed_size_binary(kind):
        flat = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        starts = (np.arange(count, dtype=np.int64) + array.offset) * kind.byte_width
        ends, inside = starts + kind.byte_width, pa.array(flat)
    elif pa.types.is_fixed_size_list(kind):
        starts = (np.arange(count, dtype=np.int64) + array.offset) * kind.list_size
        ends, inside = starts + kind.list_size, array.values
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        offsets = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
        starts, ends, inside = offsets[:-1], offsets[1:], array.values
    elif pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        starts = array.offsets.to_numpy().astype(np.int64, copy=False)
        ends, inside = starts + array.sizes.to_numpy(), array.values
        ends = np.where(_present(array), ends, starts)
        counts = ends - starts
        if not np.array_equal(starts[1:], ends[:-1]):  # lists go on where the one before ends
            inside = inside.take(pa.array(_spread(starts, ends)))
            ends = np.cumsum(counts)
            starts = ends - counts
        return starts, ends, inside
    else:
        raise ValueError(f"it holds {kind} where lists were")
    present = _present(array)
    return starts, np.where(present, ends, starts), inside


def _misfits(lists: _NestedLists, form: ArrayForm, present: Bools) -> dict[int, str]:
    """Rows that can't be samples of a form, and why."""
    wanted = np.array([-1 if length is None else length for length in form.shape])
    differ = ((lists.shapes != wanted) & (wanted >= 0)).any(axis=1)
    if form.is_ragged:  # an empty list has no lengths inside
        differ &= ~((lists.shapes[:, 0] == 0) & (wanted[0] <= 0))
    wrong: dict[int, str] = {}
    for row in np.flatnonzero((differ | lists.odd | lists.nulls) & present).tolist():
        if lists.nulls[row]:
            wrong[row] = NULL_INSIDE
        elif lists.odd[row]:
            wrong[row] = RAGGED_INSIDE
        else:
            wrong[row] = f"its shape is {tuple(lists.shapes[row].tolist())}, not {form.shape}"
    return wrong


def _dense(numbers: NDArray[Any], starts: Ints, good: Bools, size: int) -> NDArray[Any]:
    """The numbers of rows of one size, behind one another; zeros where a row isn't good."""
    count = len(starts)
    if count and good.all() and int(starts[-1] - starts[0]) == (count - 1) * size:
        return numbers[int(starts[0]) : int(starts[0]) + count * size]
    found = np.zeros((count, size), numbers.dtype)
    for row in np.flatnonzero(good).tolist():
        found[row] = numbers[starts[row] : starts[row] + size]
    return found.reshape(-1)


def _joined(numbers: NDArray[Any], starts: Ints, ends: Ints) -> tuple[NDArray[Any], Ints]:
    """Rows behind one another, and where each begins."""
    counts = ends - starts
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    some = np.flatnonzero(counts)
    if not len(some):
        return numbers[:0], offsets
    first = int(starts[some[0]])
    if np.array_equal(starts[some], first + offsets[some]):
        return numbers[first : first + int(offsets[-1])], offsets
    return numbers[_spread(starts, ends)], offsets


def _arrow(numbers: NDArray[Any]) -> Any:
    """Numbers as an Arrow array, without a copy."""
    return pa.array(numbers)


def _view(array: Any) -> NDArray[Any]:
    found: NDArray[Any] = array.to_numpy(zero_copy_only=True)
    return found


def _present(array: Any) -> Bools:
    """Which values aren't null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    rows = np.arange(array.offset, array.offset + len(array))
    found: Bools = ((bits[rows >> 3] >> (rows & 7)) & 1).astype(np.bool_)
    return found


def present_rows(array: Any, rows: Ints) -> Bools | None:
    """Which of some rows aren't null; None for all."""
    if not array.null_count:
        return None
    at = rows + array.offset
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    found: Bools = ((bits[at >> 3] >> (at & 7)) & 1).astype(np.bool_)
    return None if found.all() else found


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


def missing_column(type: FieldType, count: int) -> Column:
    """A column of samples that all lack the field."""
    dtype, form = number_dtype(type), array_form(type)
    if dtype is not None:
        return DenseColumn(np.zeros(count, dtype))
    if form is not None and not form.is_ragged:
        return DenseColumn(np.zeros((count, *form.fixed_shape), form.dtype))
    return collector(type, count).column()
