"""The values of one column of one unit, in the form in which rows are taken from them.

It is an Arrow table, so that it can be kept and mapped: "values" are numbers (bools as bytes),
lists of numbers of one length (dense arrays) or any (ragged ones), or bytes, null where a sample
lacks the field; "shapes" are there where samples differ in more than the first length, "wrong"
where some can't be samples: why.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.fields.arrays import array_form, number_dtype
from penstock.readers.fields.field_types import ClassLabel
from penstock.readers.formats.arrow.types import is_text, stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.arrays import ArrayForm
    from penstock.readers.fields.field_types import FieldType

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]

VALUES, SHAPES, WRONG = "values", "shapes", "wrong"


def values_table(type: FieldType, column: Any, parts: Sequence[str]) -> Any:
    """A column's table. column: an Arrow array or chunked one; parts: names of the structs' parts
    inside of which the values lie. Raises ValueError where the types don't fit."""
    array = _inside(column, parts)
    dtype, form = number_dtype(type), array_form(type)
    if dtype is not None:
        return _numbers(type, array, dtype)
    if form is not None:
        return _arrays(array, form)
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
    if isinstance(array, pa.FixedShapeTensorArray):
        return pa.FixedSizeListArray.from_arrays(array.storage.values, math.prod(array.type.shape))
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_run_end_encoded(array.type):
        return pa.compute.run_end_decode(array)
    return array


def _whole(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return column.combine_chunks() if column.num_chunks else pa.array([], column.type)


def _numbers(type: FieldType, array: Any, dtype: np.dtype[Any]) -> Any:
    wrong: dict[int, str] = {}
    if isinstance(type, ClassLabel) and is_text(stored(array.type)):
        array, wrong = _class_numbers(array, type.names)
    numbers = _plain(array)
    if isinstance(type, ClassLabel):
        found = numbers.to_numpy(zero_copy_only=not numbers.null_count)
        limit = len(type.names) or 2**63
        for row in np.flatnonzero((found < 0) | (found >= limit)).tolist():
            wrong[row] = f"class {found[row]}, and there are {limit:,}"
    return _table(_cast(numbers, dtype), wrong)


def _class_numbers(array: Any, names: Sequence[str]) -> tuple[Any, dict[int, str]]:
    """Classes by number, of their names."""
    numbers = {name: number for number, name in enumerate(names)}
    texts = array.to_pylist()
    wrong = {
        row: f"{text!r:.80} is no class"
        for row, text in enumerate(texts)
        if text is not None and text not in numbers
    }
    return pa.array([None if t is None else numbers.get(t, 0) for t in texts], pa.int64()), wrong


def _plain(array: Any) -> Any:
    """Numbers as an array of numpy's types: bools as bytes, times as integers."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if pa.types.is_temporal(kind):
        return array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return array


def _cast(array: Any, dtype: np.dtype[Any]) -> Any:
    wanted = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    if array.type == wanted:
        return array
    if dtype.kind == "b" or not (pa.types.is_integer(array.type) or _is_float(array.type)):
        raise ValueError(f"it holds {array.type}, and {dtype} was indexed")
    return array.cast(wanted, safe=_is_integer(wanted))


def _is_float(arrow: Any) -> bool:
    return bool(pa.types.is_floating(arrow))


def _is_integer(arrow: Any) -> bool:
    return bool(pa.types.is_integer(arrow))


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
        return pa.DictionaryArray.from_arrays(array.indices, values)
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


def _arrays(array: Any, form: ArrayForm) -> Any:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    depth, present = len(form.shape), _present(array)
    lists = _Lists(array, depth)
    flat = _cast(_plain(lists.values), form.dtype)
    lists.note_nulls(_present(flat))
    numbers = _view(flat.fill_null(0) if flat.null_count else flat)
    wrong = _misfits(lists, form, present)
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


class _Lists:
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
            if axis:
                self.note_nulls(_present(array))
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

    def note_nulls(self, present: Bools) -> None:
        """Mark the rows that have a null among the elements where they are now."""
        if present.all():
            return
        before = np.concatenate(([0], np.cumsum(~present)))
        self.nulls |= before[self.ends] > before[self.starts]


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
        return _opened(array.cast(pa.large_list(kind.value_type)))
    else:
        raise ValueError(f"it holds {kind} where lists were")
    present = _present(array)
    return starts, np.where(present, ends, starts), inside


def _misfits(lists: _Lists, form: ArrayForm, present: Bools) -> dict[int, str]:
    """Rows that can't be samples of a form, and why."""
    wanted = np.array([-1 if length is None else length for length in form.shape])
    differ = ((lists.shapes != wanted) & (wanted >= 0)).any(axis=1)
    if form.is_ragged:  # an empty list has no lengths inside
        differ &= ~((lists.shapes[:, 0] == 0) & (wanted[0] <= 0))
    wrong: dict[int, str] = {}
    for row in np.flatnonzero((differ | lists.odd | lists.nulls) & present).tolist():
        if lists.nulls[row]:
            wrong[row] = "it has a null inside"
        elif lists.odd[row]:
            wrong[row] = "its lists differ in length, so it is no array"
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
