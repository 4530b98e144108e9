"""Turn the columns of a table into fields: types, values, and the rows that don't fit.

Types follow from the values, in the same way for every table (`_infer_type`), unless a schema gives
them. A row that doesn't fit its schema is rejected. A column that holds two kinds of values needs a
schema, else it is an error, because either kind could be meant. Values are never converted to fit:
a fraction is no integer, and true is no number.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes.array_forms import fits
from penstock.readers.fieldtypes.arrays import Array
from penstock.readers.fieldtypes.cells import INT64, array_cell, number_of, shorten
from penstock.readers.fieldtypes.columns import EncodedColumn
from penstock.readers.fieldtypes.field_type import PRESENT, is_field_name, is_utf8
from penstock.readers.fieldtypes.labels import ClassLabel, Value
from penstock.readers.fieldtypes.schema import LABEL
from penstock.readers.fieldtypes.texts import Text
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.columns import Column
    from penstock.readers.fieldtypes.field_type import FieldType
    from penstock.readers.fieldtypes.text_tables import TextTable

_NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TableFields:
    """The fields of the n rows of a table.

    types: in the order of the columns, settled. values: one column per field. present: of the
    fields that some rows lack, bool, shape (n,). rejected: by row, the reason why it doesn't fit;
    its values are empty. left_out: by name, the reason why a column can't be a field. notes: the
    decisions that were made, a sentence each. doubts: those that may be wrong.
    """

    types: dict[str, FieldType] = field(default_factory=dict)
    values: dict[str, Column] = field(default_factory=dict)
    present: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def fields_of(
    table: TextTable, schema: Mapping[str, FieldType] | None = None, *, is_lenient: bool = False
) -> TableFields:
    """Convert the columns of a table to fields. schema: types of some columns. is_lenient: leave
    out a column that holds two kinds of values, unless it is the label.

    Raises DatasetError for a column that holds two kinds of values, and ConfigError for a type that
    no table can hold.
    """
    found = TableFields()
    for name, values in table.columns.items():
        given = (schema or {}).get(name)
        if given is not None and not given.in_tables:
            raise ConfigError(
                f'schema["{name}"]: got {given!r}, but that column of {table.source} holds values, '
                "not files. Wanted a type of values, such as Value, ClassLabel, Text or Array."
            )
        if not is_field_name(name) or name.endswith(PRESENT):
            found.left_out[name] = "no field can have this name"
            continue
        try:
            type = given or _infer_type(table, name, values, found)
        except DatasetError as error:
            if not is_lenient or name == LABEL:
                raise
            found.left_out[name] = str(error).rstrip(".")
            continue
        if type is not None:
            _add(found, table, name, values, type)
    return found


def _infer_type(
    table: TextTable, name: str, values: Sequence[Any], found: TableFields
) -> FieldType | None:
    """Infer the type of a column that the schema doesn't name; None leaves the column out. The
    cells of a CSV are numbers if all of them are, else text."""
    cells = values
    if table.is_text:
        parsed = [None if cell is None else number_of(cell) for cell in values]
        cells = [n if n is not None else c for n, c in zip(parsed, values, strict=True)]
    rows: dict[str, list[int]] = {}
    for row, cell in enumerate(cells):
        if cell is not None:
            rows.setdefault(_kind(cell), []).append(row)
    if not rows:
        found.left_out[name] = "no row has a value"
        return None
    if table.is_text and "text" in rows:
        texts, filled = rows["text"], sum(map(len, rows.values()))
        if 2 * len(texts) < filled:
            found.doubts.append(
                f'the column "{name}" of {table.source} is read as text: '
                f"{filled - len(texts):,} of {filled:,} cells are numbers, "
                f"{shorten(values[texts[0]])} in {table.place(texts[0])} isn't. For numbers pass "
                f'schema={{"{name}": Value("float32")}}: other rows are then left out.'
            )
        rows = {"text": texts}
    if "fractions" in rows and rows.keys() <= {"integers", "fractions"}:
        numbers = [cell for cell in cells if cell is not None]
        return Value(_float_of(np.array(numbers, np.float64), numbers))
    if len(rows) > 1:
        first, other = sorted(rows, key=lambda kind: (-len(rows[kind]), kind))[:2]
        a, b = rows[first][0], rows[other][0]
        raise DatasetError(
            f'{table.source}: the column "{name}" holds {first} ({shorten(values[a])}, '
            f"{table.place(a)}) and {other} ({shorten(values[b])}, {table.place(b)}). Correct the "
            f'values, or choose a type, such as schema={{"{name}": {_EXAMPLES[first]}}}: rows that '
            "don't fit are then left out, by name."
        )
    (kind,) = rows
    if kind == "integers" and not all(cells[row] in INT64 for row in rows[kind]):
        found.left_out[name] = "it has integers beyond 64 bits"
        return None
    if kind in ("text", "integers"):
        other_type = Text() if kind == "text" else Value("int64")
        return ClassLabel() if name == LABEL else other_type
    if kind == "lists":
        return _infer_from_lists(name, values, found)
    if kind == "objects":
        found.left_out[name] = "it holds objects without keys"
        return None
    return Value("bool")


_EXAMPLES = {
    "integers": 'Value("int64")',
    "fractions": 'Value("float32")',
    "true or false": 'Value("bool")',
    "text": "Text()",
    "lists": "Array()",
    "objects": "Text()",
}
_KINDS = {bool: "true or false", int: "integers", float: "fractions", str: "text", list: "lists"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "objects")


def _float_of(numbers: NDArray[np.float64], values: Sequence[Any]) -> str:
    """Return "float32", or "float64" if float32 would change an integer or make a number
    infinite."""
    large = [v for v in values if isinstance(v, int) and abs(v) > 2**24]
    exact = all(int(np.float32(v)) == v for v in large if abs(v) < 2**127)
    return "float32" if exact and fits(np.dtype(np.float32), numbers) else "float64"


def _infer_from_lists(name: str, values: Sequence[Any], found: TableFields) -> Array | None:
    arrays: list[NDArray[Any]] = []
    for value in values:
        if value is None:
            continue
        made = array_cell(value, None, None, is_text=False)
        if isinstance(made, Rejection):
            is_text = all(isinstance(each, str) for each in value)
            advice = f'; for classes pass schema={{"{name}": MultiLabel(names)}}' if is_text else ""
            found.left_out[name] = f"{made.reason}{advice}"
            return None
        arrays.append(made)
    if _odd_rows(arrays):
        found.left_out[name] = (
            "its lists differ in depth, or hold true or false in some rows and numbers in others"
        )
        return None
    return Array()


def _add(
    found: TableFields, table: TextTable, name: str, values: Sequence[Any], type: FieldType
) -> None:
    """Add a column as a field of a type, and reject the rows that don't fit."""
    is_numbered = type.is_class and not type.class_names
    if is_numbered and (names := _class_names(table, values, name, found)):
        type = ClassLabel(names)
    is_named = is_numbered and bool(type.class_names)
    read = type.cell_reader(is_text=table.is_text)
    cells: list[Any] = [None] * len(values)
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            made = read(value)
        except ValueError as error:
            made = Rejection(f"{shorten(value)}: {error}")
        if is_named and not isinstance(value, str):
            made = Rejection(f"{shorten(value)} is no class name, but other rows have names")
        if isinstance(made, Rejection):
            found.rejected.setdefault(row, f"{name}: {made.reason} ({table.place(row)})")
        else:
            cells[row] = made
    if not type.is_settled:
        for row in _odd_rows(cells):
            reason = f"{name}: {shorten(values[row])} differs in kind or depth from most rows"
            found.rejected.setdefault(row, f"{reason} ({table.place(row)})")
            cells[row] = None
        type = type.completed(*_dtype_and_shape([each for each in cells if each is not None]))
    found.types[name], found.values[name] = type, _column(type, cells)
    if any(value is None for value in values):
        found.present[name] = np.array([each is not None for each in cells], np.bool_)


def _odd_rows(cells: Sequence[NDArray[Any] | None]) -> list[int]:
    """Return the rows whose arrays differ from most in kind or depth."""
    kinds = [
        None if each is None or not each.size else (each.dtype.kind == "b", each.ndim)
        for each in cells
    ]
    counts = Counter(kind for kind in kinds if kind is not None)
    if len(counts) < 2:
        return []
    usual = counts.most_common(1)[0][0]
    return [row for row, kind in enumerate(kinds) if kind not in (None, usual)]


def _class_names(
    table: TextTable, values: Sequence[Any], name: str, found: TableFields
) -> tuple[str, ...]:
    """Return the sorted names of the classes, if the values are texts; empty for numbers."""
    texts = {value for value in values if isinstance(value, str)}
    if table.is_text and all(isinstance(number_of(text), int) for text in texts):
        return ()
    if table.is_text and None not in map(number_of, texts):
        row = next(i for i, v in enumerate(values) if v and not isinstance(number_of(v), int))
        raise DatasetError(
            f'{table.source}: the column "{name}" holds numbers, and {values[row]!r} '
            f"({table.place(row)}) is no integer: which class is that? Write integers or names; or "
            f'declare its type, schema={{"{name}": Value("float32")}}.'
        )
    names = sorted(filter(is_utf8, texts))
    if names:
        listed = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
        found.notes.append(
            f'{table.source}: "{name}" is {len(names):,} classes, numbered by sorted name '
            f"({listed})."
        )
    return tuple(names)


def _dtype_and_shape(arrays: Sequence[NDArray[Any]]) -> tuple[str, tuple[int | None, ...]]:
    """Return the dtype and the shape that all arrays have: float32 if it holds all floats, and None
    for lengths that differ."""
    full = [each for each in arrays if each.shape != (0,)] or arrays
    depth = max((each.ndim for each in full), default=1)
    lengths = [{each.shape[axis] for each in full if each.ndim == depth} for axis in range(depth)]
    if len(full) < len(arrays) or 0 in lengths[0]:
        lengths[0] = set()
    shape = tuple(each.pop() if len(each) == 1 else None for each in lengths)
    float32 = np.dtype(np.float32)
    dtype = np.result_type(*{each.dtype for each in full if each.size} or {float32})
    if dtype == np.float64 and all(fits(float32, each) for each in full):
        dtype = float32
    return dtype.name, shape


def _column(type: FieldType, cells: Sequence[Any]) -> Column:
    """Return the column of a settled type. cells: as its `cell` returns them; None for no value."""
    if type.is_encoded:
        ends = np.cumsum([0, *(len(each or b"") for each in cells)], dtype=np.int64).tolist()
        joined = np.frombuffer(b"".join(each or b"" for each in cells), np.uint8)
        return EncodedColumn([joined[a:b] for a, b in pairwise(ends)])
    form = type.stored
    assert form is not None, type
    empty = form.empty
    filled = [
        empty if each is None or (empty.ndim and not each.size and each.ndim < empty.ndim) else each
        for each in cells
    ]
    if form.is_ragged:
        filled = [each.astype(form.dtype, copy=False) for each in filled]
    return form.column(filled)
