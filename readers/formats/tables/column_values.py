"""Convert one column of one unit to a table of values, and take rows of a batch from it.

It is an Arrow table, so that the cache of decoded chunks can store and map it. Its column "values"
holds numbers (bools as bytes), lists of numbers of one length (dense arrays) or any (ragged ones),
or bytes, and is null if a sample lacks the field. A column "shapes" holds the samples' shapes if
these differ in more than the first length, and a column "wrong" the reason of each bad sample.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.fieldtypes import (
    ClassLabel,
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

    from penstock.readers.fieldtypes import ArrayForm, FieldType
    from penstock.readers.formats.tables.column_types import Tensor
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

VALUES, SHAPES, WRONG = "values", "shapes", "wrong"
NULL_INSIDE = "it has a null inside"
RAGGED_INSIDE = "its lists differ in length, so it isn't an array"


def values_table(
    type: FieldType, column: Any, parts: Sequence[str], tensor: Tensor | None = None
) -> Any:
    """Return the table of a column's values.

    column: an Arrow array or chunked array. parts: the names that lead through structs to the
    values. tensor: how its tensors are stored. Raises ValueError if the types don't fit.
    """
    array = _inside(column, parts)
    dtype, form = number_dtype(type), array_form(type)
    if dtype is not None:
        return _numbers(type, array, dtype)
    if form is not None:
        return _arrays(type, array, form, tensor)
    return pa.table({VALUES: _bytes(array)})


def _inside(column: Any, parts: Sequence[str]) -> Any:
    """Return the array inside structs, which is null if one of these is."""
    array = _combined(column) if isinstance(column, pa.ChunkedArray) else column
    for part in parts:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if not pa.types.is_struct(array.type):
            raise ValueError(f"it holds {array.type}, and the index expects a struct")
        array = array.flatten()[array.type.get_field_index(part)]
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return _runs_as_dictionary(array) if pa.types.is_run_end_encoded(array.type) else array


def _runs_as_dictionary(array: Any) -> Any:
    """Return a run-end encoded array as a dictionary array of its values. Raises ValueError."""
    rows = np.arange(array.offset, array.offset + len(array))
    indices = np.searchsorted(array.run_ends.to_numpy(), rows, side="right")
    if len(indices) and int(indices[-1]) >= len(array.values):
        raise ValueError("its runs end before its rows")
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int64()), array.values)


def _dictionary_indices(array: Any) -> Any:
    """Return the indices of a dictionary array, null if the index or its value is."""
    values = array.dictionary
    if not values.null_count:
        return array.indices
    indices, present = raw_numbers(array.indices).astype(np.int64), _present(array.indices)
    present[present] = _present(values)[indices[present]]
    return pa.array(np.where(present, indices, 0), mask=~present)


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
    """Return the numbers of classes from their names, and the reasons of unknown names by row."""
    numbers = {name: number for number, name in enumerate(names)}
    texts = array.to_pylist()
    wrong = {
        row: f"{text!r:.80} {mismatch(ClassLabel(tuple(names)))}"
        for row, text in enumerate(texts)
        if text is not None and text not in numbers
    }
    return pa.array([None if t is None else numbers.get(t, 0) for t in texts], pa.int64()), wrong


def _plain(array: Any) -> Any:
    """Return numbers in types that NumPy has: bools as bytes, times as integers, decimals as the
    nearest floats."""
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
    """Return a dictionary array's values, one per row; any other array unchanged."""
    if not pa.types.is_dictionary(array.type):
        return array
    return array.dictionary.take(_dictionary_indices(array))


def _cast(array: Any, dtype: np.dtype[Any]) -> tuple[Any, Bools | None]:
    """Return numbers as a dtype, 0 if they don't fit it, and which don't (None: all fit)."""
    wanted = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    if array.type == wanted:
        return array, None
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if dtype.kind == "b" or not is_number:
        raise ValueError(f"it holds {array.type}, and the index expects {dtype}")
    found, present = raw_numbers(array), _present(array)
    unfit = unfit_numbers(dtype, found)
    with np.errstate(all="ignore"):
        found = np.where(unfit | ~present, found.dtype.type(0), found).astype(dtype)
    return pa.array(found, mask=None if present.all() else ~present), unfit & present


def raw_numbers(array: Any) -> NDArray[Any]:
    """Return the numbers of a primitive array; those of nulls are undefined."""
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
    """Return texts and bytes as an array of bytes, of views, or of a dictionary of these."""
    if pa.types.is_dictionary(array.type):
        values = _bytes(array.dictionary)
        return pa.DictionaryArray.from_arrays(_dictionary_indices(array), values)
    kind = array.type
    if pa.types.is_large_binary(kind) or pa.types.is_binary(kind) or kind == pa.binary_view():
        return array
    if pa.types.is_large_string(kind):
        return array.view(pa.large_binary())
    if pa.types.is_string(kind):
        return array.view(pa.binary())
    if kind == pa.string_view():
        return array.view(pa.binary_view())
    raise ValueError(f"it holds {kind}, and the index expects bytes")


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
    flat = flat.fill_null(0) if flat.null_count else flat
    numbers = flat.to_numpy(zero_copy_only=True)
    wrong = _misfits(lists, form, present)
    unfit_rows = present & False if unfit is None else lists.rows_with(unfit) & present
    for row in np.flatnonzero(unfit_rows).tolist():
        assert unfit is not None
        start = int(lists.starts[row])
        value = plain[start + int(np.argmax(unfit[start : lists.ends[row]]))].as_py()
        wrong.setdefault(row, f"{value!r} {mismatch(type)}")
    good = present.copy()
    good[list(wrong)] = False
    if not form.is_ragged:
        mask = pa.array(~present) if not present.all() else None
        size = math.prod(form.fixed_shape)
        dense = _dense(numbers, lists.starts, good, size)
        values = pa.FixedSizeListArray.from_arrays(pa.array(dense), size, mask=mask)
        return _table(values, wrong)
    # A null list counts as an empty one, because the statistics of files don't distinguish them.
    starts, ends = np.where(good, lists.starts, 0), np.where(good, lists.ends, 0)
    joined, offsets = _joined(numbers, starts, ends)
    values = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(joined))
    shapes = None
    if form.rest is None or form.shape[0] is not None:
        lengths = np.where(good[:, None], lists.shapes, 0)
        shapes = pa.FixedSizeListArray.from_arrays(pa.array(lengths.reshape(-1)), depth)
    return _table(values, wrong, shapes)


class _NestedLists:
    """Nested lists as flat numbers, with the place and the shape of each row.

    values: the numbers. starts, ends: each row's place in them, int64, shape (rows,). shapes: of
    each row, int64, shape (rows, depth). uneven: rows whose inner lists differ in length; nulls:
    rows with a null inside.
    """

    def __init__(self, array: Any, depth: int) -> None:
        count = len(array)
        self.shapes = np.zeros((count, depth), np.int64)
        self.uneven, self.nulls = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.starts = np.arange(count, dtype=np.int64)
        self.ends = self.starts + 1
        for axis in range(depth):
            if axis and array.null_count:
                self.nulls |= self.rows_with(~_present(array))
            starts, ends, array = _elements(array)
            lengths = ends - starts
            if axis == 0:
                self.shapes[:, 0] = lengths
                self.starts, self.ends = starts, ends
                continue
            filled = self.ends > self.starts
            if not filled.any():
                self.starts, self.ends = np.zeros_like(self.starts), np.zeros_like(self.ends)
                continue
            first = np.where(filled, lengths[np.where(filled, self.starts, 0)], 0)
            # A row is uneven if the length of a list differs from that of its first one.
            row = np.repeat(np.arange(count), self.ends - self.starts)
            places = _spread(self.starts, self.ends)
            differs = lengths[places] != first[row]
            self.uneven |= np.bincount(row[differs], minlength=count).astype(np.bool_)
            self.shapes[:, axis] = first
            last = np.where(filled, self.ends - 1, 0)
            self.starts = np.where(filled, starts[np.where(filled, self.starts, 0)], 0)
            self.ends = np.where(filled, ends[last], 0)
        if pa.types.is_fixed_size_list(array.type) or hasattr(array, "offsets"):
            raise ValueError(f"it holds lists of {array.type}, and the index expects numbers")
        self.values = array

    def rows_with(self, marks: Bools) -> Bools:
        """Return the rows that have a mark among their elements. marks: of each element at the
        depth that `starts` and `ends` have reached, bool."""
        if not marks.any():
            return np.zeros(len(self.starts), np.bool_)
        before = np.concatenate(([0], np.cumsum(marks)))
        found: Bools = before[self.ends] > before[self.starts]
        return found

    def shape_tensors(self, tensor: Tensor, present: Bools) -> None:
        """Give flat lists the shape of a sample's tensor, and reorder its axes."""
        stored_shape, axes = tensor
        size = math.prod(stored_shape)
        complete = present & (self.shapes[:, 0] == size)
        self.uneven = present & ~complete
        shape = [stored_shape[axis] for axis in axes]
        self.shapes = np.where(complete[:, None], np.array(shape, np.int64), 0)
        if list(axes) == sorted(axes):
            return
        places = np.arange(size, dtype=np.int64).reshape(stored_shape).transpose(axes).reshape(-1)
        self.values = self.values.take(pa.array((self.starts[complete, None] + places).reshape(-1)))
        self.starts = np.where(complete, (np.cumsum(complete) - 1) * size, 0)
        self.ends = np.where(complete, self.starts + size, 0)


def _spread(starts: Ints, ends: Ints) -> Ints:
    """Return all places in [start, end) of each row, one row after the other."""
    counts = ends - starts
    total = int(counts.sum())
    first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    places: Ints = first + np.arange(total)
    return places


def _elements(array: Any) -> tuple[Ints, Ints, Any]:
    """Return the start and the end of each list in the array of their elements, and that array. A
    null list is empty."""
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
        if not np.array_equal(starts[1:], ends[:-1]):  # make each list begin where the last ends
            inside = inside.take(pa.array(_spread(starts, ends)))
            ends = np.cumsum(counts)
            starts = ends - counts
        return starts, ends, inside
    else:
        raise ValueError(f"it holds {kind}, and the index expects lists")
    present = _present(array)
    return starts, np.where(present, ends, starts), inside


def _misfits(lists: _NestedLists, form: ArrayForm, present: Bools) -> dict[int, str]:
    """Return the rows that can't be samples of a form, and the reasons."""
    wanted = np.array([-1 if length is None else length for length in form.shape])
    differ = ((lists.shapes != wanted) & (wanted >= 0)).any(axis=1)
    if form.is_ragged:  # an empty list has no inner lists
        differ &= ~((lists.shapes[:, 0] == 0) & (wanted[0] <= 0))
    wrong: dict[int, str] = {}
    for row in np.flatnonzero((differ | lists.uneven | lists.nulls) & present).tolist():
        if lists.nulls[row]:
            wrong[row] = NULL_INSIDE
        elif lists.uneven[row]:
            wrong[row] = RAGGED_INSIDE
        else:
            wrong[row] = f"its shape is {tuple(lists.shapes[row].tolist())}, not {form.shape}"
    return wrong


def _dense(numbers: NDArray[Any], starts: Ints, good: Bools, size: int) -> NDArray[Any]:
    """Return the numbers of rows of one size, one row after the other; zeros for bad rows."""
    count = len(starts)
    if count and good.all() and int(starts[-1] - starts[0]) == (count - 1) * size:
        return numbers[int(starts[0]) : int(starts[0]) + count * size]
    found = np.zeros((count, size), numbers.dtype)
    for row in np.flatnonzero(good).tolist():
        found[row] = numbers[starts[row] : starts[row] + size]
    return found.reshape(-1)


def _joined(numbers: NDArray[Any], starts: Ints, ends: Ints) -> tuple[NDArray[Any], Ints]:
    """Return the numbers of rows, one row after the other, and the offset of each."""
    counts = ends - starts
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    filled = np.flatnonzero(counts)
    if not len(filled):
        return numbers[:0], offsets
    first = int(starts[filled[0]])
    if np.array_equal(starts[filled], first + offsets[filled]):
        return numbers[first : first + int(offsets[-1])], offsets
    return numbers[_spread(starts, ends)], offsets


def _present(array: Any) -> Bools:
    """Return which values aren't null."""
    found = present_rows(array, np.arange(len(array)))
    return np.ones(len(array), np.bool_) if found is None else found


def present_rows(array: Any, rows: Ints) -> Bools | None:
    """Return which of some rows aren't null, or None if none is null."""
    if not array.null_count:
        return None
    at = rows + array.offset
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    found: Bools = ((bits[at >> 3] >> (at & 7)) & 1).astype(np.bool_)
    return None if found.all() else found


_EMPTY = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False


_INLINE_BYTES = 12  # shorter values are inside their view
_VIEWED_SHARE = 4
"""Samples are views of a unit's bytes, which stay in memory, if they make up at least one byte in
so many; else they are copies."""


def values_of(table: Any) -> Any:
    """Return the values of a table as one array."""
    return _combined(table.column(VALUES))


def _combined(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def reasons(table: Any, rows: Ints) -> Iterator[tuple[int, str]]:
    """Yield the place in rows of each bad sample, and the reason."""
    if WRONG not in table.column_names:
        return
    column = table.column(WRONG)
    for place, row in enumerate(rows.tolist()):
        reason = column[row].as_py()
        if reason is not None:
            yield place, reason


def dense_values(table: Any, form: ArrayForm) -> NDArray[Any]:
    """Return the samples of a unit, which have one shape, as a view of shape (rows, *shape)."""
    array = values_of(table)
    if isinstance(array, pa.FixedSizeListArray):
        size = array.type.list_size
        flat = array.values.slice(array.offset * size, len(array) * size)
    else:
        flat = array
    numbers = raw_numbers(flat).reshape(len(array), *form.fixed_shape)
    return numbers.view(np.bool_) if form.dtype.kind == "b" else numbers


class EncodedRows:
    """Collects encoded samples, such as images and texts, in the order of a batch."""

    def __init__(self, count: int) -> None:
        self.samples: list[Encoded] = [_EMPTY] * count

    def add(self, table: Any, rows: Ints, places: Iterable[int]) -> None:
        """Add some rows of a table at their places. Raises ValueError for damage."""
        array = values_of(table)
        present = present_rows(array, rows)
        if isinstance(array, pa.DictionaryArray):
            indices = raw_numbers(array.indices)[rows].astype(np.int64)
            array = array.dictionary
            if present is not None:
                indices[~present] = 0
            if not len(array) and present is not None and not present.any():
                return
            if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
                raise ValueError("it has indices beyond its dictionary")
            rows = indices
        if array.type == pa.binary_view():
            self._add_views(array, rows, list(places), present)
            return
        wide = pa.types.is_large_binary(array.type)
        _, offsets, data = array.buffers()
        if data is None:
            return
        at: NDArray[Any] = np.frombuffer(offsets, np.int64 if wide else np.int32)[array.offset :]
        bytes_ = np.frombuffer(data, np.uint8)
        bytes_.flags.writeable = False
        samples = self.samples
        starts, ends = at[rows], at[rows + 1]
        if _VIEWED_SHARE * int((ends - starts).sum()) < len(bytes_):
            bytes_, starts, ends = _copied(bytes_, starts, ends)
        bounds = zip(places, starts.tolist(), ends.tolist(), strict=True)
        if present is None:
            for place, start, end in bounds:
                samples[place] = bytes_[start:end]
            return
        for (place, start, end), is_present in zip(bounds, present.tolist(), strict=True):
            if is_present:
                samples[place] = bytes_[start:end]

    def _add_views(self, array: Any, rows: Ints, places: list[int], present: Bools | None) -> None:
        _, buffer, *buffers = array.buffers()
        views = np.frombuffer(buffer, np.int32).reshape(-1, 4)[array.offset + rows]
        short = views.view(np.uint8).reshape(-1, 16)
        data = [np.frombuffer(buffer or b"", np.uint8) for buffer in buffers]
        total = sum(map(len, data))
        is_copied = _VIEWED_SHARE * int(views[:, 0].sum(dtype=np.int64)) < total
        for row, (length, _, number, start) in enumerate(views.tolist()):
            if present is not None and not present[row]:
                continue
            if length <= _INLINE_BYTES:
                sample = short[row, 4 : 4 + length].copy()
            else:
                sample = data[number][start : start + length]
                sample = sample.copy() if is_copied else sample
            sample.flags.writeable = False
            self.samples[places[row]] = sample

    def column(self) -> EncodedColumn:
        """Return the samples as a column."""
        return EncodedColumn(self.samples)


class RaggedRows:
    """Collects arrays that differ in shape, in the order of a batch."""

    def __init__(self, count: int, form: ArrayForm) -> None:
        self._form = form
        self._rest = form.rest if form.shape[0] is None else None
        self._shapes = np.zeros((count, len(form.shape)), np.int64)
        self._samples: list[NDArray[Any]] = [np.empty(0, form.dtype)] * count

    def add(self, table: Any, rows: Ints, places: Iterable[int]) -> None:
        """Add some rows of a table at their places."""
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
            shapes = table.column(SHAPES).combine_chunks()
            lengths = raw_numbers(shapes.values).reshape(-1, self._shapes.shape[1])
            self._shapes[places] = lengths[shapes.offset + rows]

    def column(self) -> RaggedColumn:
        """Return the samples as a column."""
        counts = [len(sample) for sample in self._samples]
        width = int(np.prod(self._rest or (), dtype=np.int64))
        flat = np.concatenate([np.empty(0, self._form.dtype), *self._samples])
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        if self._rest is None:
            return RaggedColumn(flat, offsets, self._shapes)
        return RaggedColumn(flat.reshape(-1, *self._rest), offsets // max(1, width))


def _copied(data: Encoded, starts: Ints, ends: Ints) -> tuple[Encoded, Ints, Ints]:
    """Copy some parts of a unit's bytes; return the copy, and where each part starts and ends."""
    parts = [data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    joined = np.concatenate([_EMPTY, *parts])
    joined.flags.writeable = False
    stops = np.cumsum(ends - starts, dtype=np.int64)
    return joined, stops - (ends - starts), stops


def collector(type: FieldType, count: int) -> EncodedRows | RaggedRows:
    """Return a collector for a field whose samples don't have one shape."""
    form = array_form(type)
    return EncodedRows(count) if form is None else RaggedRows(count, form)
