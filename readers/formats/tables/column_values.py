"""Convert one column of one unit to a table of values, and take rows of a batch from it.

It is an Arrow table, so that the cache of decoded chunks can store and map it. Its column "values"
holds numbers (bools as bytes), lists of numbers of one length (dense arrays) or any (ragged ones),
or bytes, and is null if a sample lacks the field. A column "shapes" holds the samples' shapes if
they are ragged in several dimensions, and a column "wrong" the reason of each bad sample.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.readers.formats.tables.column_fields import BINARY, TEXT, Tensor, is_listed
from penstock.readers.formats.unit_reader import UnitValues
from penstock.readers.types import Bools, Encoded, Ints, Numbers, offsets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.readers.fieldtypes import ArrayForm, FieldType


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
    array, form = inside_structs(column, parts), type.stored
    if form is None:
        return pa.table({VALUES: _bytes(array)})
    if pa.types.is_dictionary(array.type):
        array = array.dictionary.take(array.indices)
    wrong: dict[int, str] = {}
    if array.type in TEXT:
        array, wrong = _parsed(type, array, form)
    if form.shape:
        return _arrays(type, array, form, tensor, wrong)
    numbers = _plain(array)
    found, unfit = _cast(numbers, type, form.dtype)
    for row in np.flatnonzero(unfit).tolist():
        wrong[row] = f"{numbers[row].as_py()!r:.80} {type.mismatch()}"
    return _table(found, wrong)


def inside_structs(column: Any, parts: Sequence[str]) -> Any:
    """Return the array inside structs, which is null if one of these is."""
    array = _combined(column) if isinstance(column, pa.ChunkedArray) else column
    for part in parts:
        array = _storage(array)
        if not pa.types.is_struct(array.type):
            raise ValueError(f"it holds {array.type}, and the index expects a struct")
        array = array.flatten()[array.type.get_field_index(part)]
    array = _storage(array)
    return _runs_as_dictionary(array) if pa.types.is_run_end_encoded(array.type) else array


def _storage(array: Any) -> Any:
    """Return an array without its extension type."""
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array


def _runs_as_dictionary(array: Any) -> Any:
    """Return a run-end encoded array as a dictionary array of its values. Raises ValueError."""
    rows = np.arange(array.offset, array.offset + len(array))
    indices = np.searchsorted(array.run_ends.to_numpy(), rows, side="right")
    if len(indices) and int(indices[-1]) >= len(array.values):
        raise ValueError("its runs end before its rows")
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int64()), array.values)


def _parsed(type: FieldType, texts: Any, form: ArrayForm) -> tuple[Any, dict[int, str]]:
    """Return the numbers, or lists of them, that texts stand for, and the reasons of other texts by
    row."""
    read, wrong = type.cell_reader(is_text=False), dict[int, str]()
    values: list[Any] = []
    for row, text in enumerate(texts.to_pylist()):
        value = None
        try:
            value = None if text is None else read(text)
        except ValueError as error:
            reason = type.mismatch() if type.is_class else f"isn't a value: {error}"
            wrong[row], value = f"{text!r:.80} {reason}", form.empty.tolist()
        values.append(value.tolist() if isinstance(value, np.ndarray) else value)
    kind = pa.from_numpy_dtype(form.dtype)
    for _ in form.shape:
        kind = pa.list_(kind)
    return pa.array(values, kind), wrong


def _plain(array: Any) -> Any:
    """Return numbers in types that NumPy has: bools as bytes, times as integers, decimals as the
    nearest floats."""
    kind = array.type
    if pa.types.is_decimal(kind):  # pyarrow's own cast gives other numbers: 1.2000000000000002
        floats = [None if each is None else float(each) for each in array.to_pylist()]
        return pa.array(floats, pa.float64())
    if pa.types.is_boolean(kind):
        return array.cast(pa.uint8())
    if pa.types.is_temporal(kind):
        return array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return array


def _cast(array: Any, type: FieldType, dtype: np.dtype[Any]) -> tuple[Any, Bools]:
    """Return numbers as a dtype, 0 if they don't fit the type, and which of them don't."""
    wanted = pa.uint8() if dtype.kind == "b" else pa.from_numpy_dtype(dtype)
    if array.type == wanted and not type.may_not_fit(dtype):
        return array, np.zeros(len(array), np.bool_)
    is_number = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    if dtype.kind == "b" or not is_number:
        raise ValueError(f"it holds {array.type}, and the index expects {dtype}")
    found, present = raw_numbers(array), _present(array)
    unfit = type.unfit(found, dtype)
    with np.errstate(all="ignore"):
        found = np.where(unfit | ~present, found.dtype.type(0), found).astype(dtype)
    return pa.array(found, mask=None if present.all() else ~present), unfit & present


def raw_numbers(array: Any) -> Numbers:
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
        columns[WRONG] = pa.array([wrong.get(row) for row in range(len(values))], pa.string())
    return pa.table(columns)


def _bytes(array: Any) -> Any:
    """Return texts and bytes as an array of bytes, or of a dictionary of bytes."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        values, indices = _bytes(array.dictionary), array.indices
        if values.null_count:
            is_valid = values.is_valid().take(indices).fill_null(False)
            mask = ~is_valid.to_numpy(zero_copy_only=False)
            indices = pa.array(raw_numbers(indices), mask=mask)
        return pa.DictionaryArray.from_arrays(indices, values)  # checks the indices
    if is_listed(kind):  # as JSON; a null list counts as an empty one
        lists = (json.dumps(each or [], ensure_ascii=False) for each in array.to_pylist())
        return pa.array([text.encode() for text in lists], pa.large_binary())
    if kind not in TEXT + BINARY:
        raise ValueError(f"it holds {kind}, and the index expects bytes")
    if kind in (pa.string_view(), pa.binary_view()):
        return array.cast(pa.large_binary())
    is_large = kind in (pa.large_string(), pa.large_binary())
    return array.view(pa.large_binary() if is_large else pa.binary())


def _arrays(
    type: FieldType, array: Any, form: ArrayForm, tensor: Tensor | None, wrong: dict[int, str]
) -> Any:
    """Return the table of samples that are arrays. wrong: the reasons of rows that are bad
    already."""
    present = _present(array)
    lists = _NestedLists(array, len(form.shape) if tensor is None else 1, wrong)
    plain = _plain(lists.values)
    flat, unfit = _cast(plain, type, form.dtype)
    if flat.null_count:
        lists.mark(~_present(flat), NULL_INSIDE)
        flat = flat.fill_null(0)
    numbers = flat.to_numpy(zero_copy_only=True)
    if tensor is not None:
        shape, axes = tensor
        if not np.isin(lists.shapes, (0, math.prod(shape))).all():
            raise ValueError(f"its tensors don't have the shape {shape}")
        numbers = numbers.reshape(-1, *shape).transpose(0, *(1 + axis for axis in axes)).reshape(-1)
        lists.shapes = np.where(lists.shapes, [shape[axis] for axis in axes], 0)
    for row in np.flatnonzero(_other_shapes(lists.shapes, form) & present).tolist():
        wrong.setdefault(row, f"its shape is {tuple(lists.shapes[row].tolist())}, not {form.shape}")
    for row in np.flatnonzero(lists.rows_with(unfit)).tolist():
        start, end = lists.offsets[row : row + 2].tolist()
        value = plain[start + int(np.argmax(unfit[start:end]))].as_py()
        wrong.setdefault(row, f"{value!r} {type.mismatch()}")
    good = present.copy()
    good[list(wrong)] = False
    if not good.all():  # without the numbers of bad rows and of null lists
        counts = np.diff(lists.offsets)
        numbers = numbers[np.repeat(good, counts)]
        lists.shapes[~good] = 0
        lists.offsets = offsets_of(np.where(good, counts, 0))
    if not form.is_ragged:
        size = math.prod(form.fixed_shape)
        if not good.all():
            dense = np.zeros((len(good), size), numbers.dtype)
            dense[good] = numbers.reshape(-1, size)
            numbers = dense.reshape(-1)
        mask = None if present.all() else pa.array(~present)
        return _table(pa.FixedSizeListArray.from_arrays(pa.array(numbers), size, mask=mask), wrong)
    # A null list counts as an empty one, because the statistics of files don't distinguish them.
    values = pa.LargeListArray.from_arrays(pa.array(lists.offsets), pa.array(numbers))
    depth, lengths = len(form.shape), pa.array(lists.shapes.reshape(-1))
    shapes = pa.FixedSizeListArray.from_arrays(lengths, depth) if depth > 1 else None
    return _table(values, wrong, shapes)


class _NestedLists:
    """Nested lists as flat numbers, with the place and the shape of each row.

    values: the numbers of all rows. offsets: the place of each row in them, int64, shape
    (rows + 1,). shapes: of each row, int64, shape (rows, depth).
    """

    def __init__(self, array: Any, depth: int, wrong: dict[int, str]) -> None:
        """wrong: receives the reason of each bad row."""
        count, self._wrong = len(array), wrong
        self.shapes = np.zeros((count, depth), np.int64)
        self.offsets = np.arange(count + 1, dtype=np.int64)
        for axis in range(depth):
            if axis and array.null_count:
                self.mark(~_present(array), NULL_INSIDE)
            lengths, array = _elements(array)
            if axis:
                counts = np.diff(self.offsets)
                filled = counts > 0
                self.shapes[filled, axis] = first = lengths[self.offsets[:-1][filled]]
                # A row is uneven if the length of a list differs from that of its first one.
                self.mark(lengths != np.repeat(first, counts[filled]), RAGGED_INSIDE)
            else:
                self.shapes[:, 0] = lengths
            self.offsets = offsets_of(lengths)[self.offsets]
        if is_listed(array.type):
            raise ValueError(f"it holds lists of {array.type}, and the index expects numbers")
        self.values = array

    def mark(self, marks: Bools, reason: str) -> None:
        """Give a reason to the rows that `rows_with` returns."""
        for row in np.flatnonzero(self.rows_with(marks)).tolist():
            self._wrong.setdefault(row, reason)

    def rows_with(self, marks: Bools) -> Bools:
        """Return the rows that have a mark among their elements. marks: of each element at the
        depth that `offsets` has reached, bool."""
        if not marks.any():
            return np.zeros(len(self.offsets) - 1, np.bool_)
        before = offsets_of(marks)[self.offsets]
        return before[1:] > before[:-1]


def _elements(array: Any) -> tuple[Ints, Any]:
    """Return the lengths of lists, and the elements of all of them, one list after the other. A
    null list is empty."""
    array = _storage(array)
    if pa.types.is_fixed_size_binary(array.type):
        data = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        start, width = array.offset, array.type.byte_width
        data = data[start * width : (start + len(array)) * width]
        mask = array.is_null() if array.null_count else None
        array = pa.FixedSizeListArray.from_arrays(pa.array(data), width, mask=mask)
    if not is_listed(array.type):
        raise ValueError(f"it holds {array.type}, and the index expects lists")
    lengths = array.value_lengths().fill_null(0)
    return lengths.to_numpy().astype(np.int64, copy=False), array.flatten()


def _other_shapes(shapes: Ints, form: ArrayForm) -> Bools:
    """Return which shapes samples of a form can't have."""
    wanted = np.array([-1 if length is None else length for length in form.shape])
    differ: Bools = ((shapes != wanted) & (wanted >= 0)).any(axis=1)
    if form.is_ragged:  # an empty list has no inner lists
        differ &= ~((shapes[:, 0] == 0) & (wanted[0] <= 0))
    return differ


def _present(array: Any) -> Bools:
    """Return which values aren't null."""
    found: Bools = array.is_valid().to_numpy(zero_copy_only=False)
    return found


def _combined(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


_EMPTY = np.empty(0, np.uint8)
_EMPTY.flags.writeable = False
_VIEWED_SHARE = 4
"""Samples are views of a unit's bytes, which stay in memory, if they make up at least one byte in
so many; else they are copies."""


class TableValues(UnitValues):
    """The values of a table that `values_table` returned."""

    def __init__(self, table: Any) -> None:
        self._table, self.array = table, _combined(table.column(VALUES))

    def present(self, rows: Ints) -> Bools | None:
        """Return which of some rows aren't null; None if all are."""
        if not self.array.null_count:
            return None
        at = rows + self.array.offset
        bits = np.frombuffer(self.array.buffers()[0], np.uint8)
        found: Bools = ((bits[at >> 3] >> (at & 7)) & 1).astype(np.bool_)
        return None if found.all() else found

    def reasons(self, rows: Ints) -> Iterable[tuple[int, str]]:
        """Return the places among rows of bad samples, and the reasons."""
        if self._table.num_columns == 1 or WRONG not in self._table.column_names:
            return ()
        found = self._table.column(WRONG).take(pa.array(rows)).to_pylist()
        return [(place, reason) for place, reason in enumerate(found) if reason is not None]

    def dense(self, form: ArrayForm) -> Numbers:
        """Return samples of one shape as a view."""
        array, shape = self.array, form.fixed_shape
        if not shape:
            return raw_numbers(array).view(form.dtype)
        size = math.prod(shape)
        numbers = raw_numbers(array.values).view(form.dtype)[array.offset * size :]
        return numbers[: len(array) * size].reshape(-1, *shape)

    def put(self, samples: list[Encoded], here: Ints, rows: Ints, form: ArrayForm | None) -> None:
        """Put ragged or encoded samples into a list, without those of nulls if they are encoded."""
        if form is not None:
            self._put_ragged(samples, here, rows, form)
            return
        array, present = self.array, self.present(rows)
        if present is not None:
            rows, here = rows[present], here[present]
        if isinstance(array, pa.DictionaryArray):
            rows = raw_numbers(array.indices)[rows].astype(np.int64)
            array = array.dictionary
        parts, size = _slices(array, rows)
        if _VIEWED_SHARE * sum(map(len, parts)) < size:
            joined = np.concatenate([_EMPTY, *parts])
            joined.flags.writeable = False
            bounds = offsets_of(np.array([len(part) for part in parts])).tolist()
            parts = [joined[start:end] for start, end in pairwise(bounds)]
        for place, part in zip(here.tolist(), parts, strict=True):
            samples[place] = part

    def _put_ragged(self, samples: list[Numbers], here: Ints, rows: Ints, form: ArrayForm) -> None:
        offsets = np.frombuffer(self.array.buffers()[1], np.int64)[self.array.offset :]
        numbers = raw_numbers(self.array.values).view(form.dtype)
        shapes: Sequence[Any] = ()
        if len(form.shape) > 1:
            stored = _combined(self._table.column(SHAPES))
            lengths = raw_numbers(stored.values).reshape(-1, len(form.shape))
            shapes = lengths[stored.offset + rows].tolist()
        places = zip(here.tolist(), offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
        for number, (place, start, end) in enumerate(places):
            if end > start:
                sample = numbers[start:end]
                samples[place] = sample.reshape(shapes[number]) if shapes else sample


def _slices(array: Any, rows: Ints) -> tuple[list[Encoded], int]:
    """Return values of an array of bytes as views, and the bytes that these keep."""
    _, offsets, data = array.buffers()
    dtype = np.int64 if pa.types.is_large_binary(array.type) else np.int32
    at: Numbers = np.frombuffer(offsets or bytes(16), dtype)[array.offset :]
    bytes_ = np.frombuffer(b"" if data is None else data, np.uint8)
    bytes_.flags.writeable = False
    starts, ends = at[rows].tolist(), at[rows + 1].tolist()
    return [bytes_[a:b] for a, b in zip(starts, ends, strict=True)], len(bytes_)
