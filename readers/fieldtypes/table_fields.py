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
from penstock.readers.fieldtypes.cells import INT64, number_of, shorten
from penstock.readers.fieldtypes.columns import EncodedColumn
from penstock.readers.fieldtypes.field_type import PRESENT, is_field_name
from penstock.readers.fieldtypes.labels import ClassLabel, Value
from penstock.readers.fieldtypes.schema import LABEL
from penstock.readers.fieldtypes.texts import Text

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
            is_inferred = given is None
            reason = type if isinstance(type, str) else _add(found, table, name, type, is_inferred)
        except DatasetError as error:
            if not is_lenient or name == LABEL:
                raise
            reason = str(error).rstrip(".")
        if reason is not None:
            found.left_out[name] = reason
    return found


_KINDS: dict[type, tuple[str, FieldType]] = {
    bool: ("true or false", Value("bool")),
    int: ("integers", Value("int64")),
    float: ("fractions", Value("float32")),
    str: ("text", Text()),
    list: ("lists", Array()),
}
_OTHERS = "objects", Text()


def _infer_type(
    table: TextTable, name: str, values: Sequence[Any], found: TableFields
) -> FieldType | str:
    """Infer the type of a column that the schema doesn't name, or return why it is left out. The
    cells of a CSV are numbers if all of them are, else text."""
    cells = values
    if table.is_text:
        parsed = [None if cell is None else number_of(cell) for cell in values]
        cells = [n if n is not None else c for n, c in zip(parsed, values, strict=True)]
    rows: dict[type, list[int]] = {}
    for row, cell in enumerate(cells):
        if cell is not None:
            rows.setdefault(type(cell), []).append(row)
    if not rows:
        return "no row has a value"
    if table.is_text and str in rows:
        texts, filled = rows[str], sum(map(len, rows.values()))
        if 2 * len(texts) < filled:
            found.doubts.append(
                f'the column "{name}" of {table.source} is read as text: '
                f"{filled - len(texts):,} of {filled:,} cells are numbers, "
                f"{shorten(values[texts[0]])} in {table.place(texts[0])} isn't. For numbers pass "
                f'schema={{"{name}": Value("float32")}}: other rows are then left out.'
            )
        rows = {str: texts}
    if float in rows and rows.keys() <= {int, float}:
        numbers = [cell for cell in cells if cell is not None]
        exact, are_whole = np.array(numbers, np.float64), [isinstance(n, int) for n in numbers]
        with np.errstate(over="ignore"):
            is_changed = exact.astype(np.float32) != exact
        is_narrow = fits(np.dtype(np.float32), exact) and not (is_changed & are_whole).any()
        return Value("float32" if is_narrow else "float64")
    if len(rows) > 1:
        kinds = sorted(rows, key=lambda kind: (-len(rows[kind]), kind.__name__))
        shown = [
            f"{_KINDS.get(kind, _OTHERS)[0]} ({shorten(values[row])}, {table.place(row)})"
            for kind in kinds[:2]
            for row in rows[kind][:1]
        ]
        raise DatasetError(
            f'{table.source}: the column "{name}" holds {" and ".join(shown)}. Correct the values, '
            f'or choose a type, such as schema={{"{name}": {_KINDS.get(kinds[0], _OTHERS)[1]}}}: '
            "rows that don't fit are then left out, by name."
        )
    (kind,) = rows
    if kind not in _KINDS:
        return "it holds objects without keys"
    if kind is int and not all(cells[row] in INT64 for row in rows[kind]):
        return "it has integers beyond 64 bits"
    return ClassLabel() if name == LABEL and kind in (int, str) else _KINDS[kind][1]


def _add(
    found: TableFields, table: TextTable, name: str, type: FieldType, is_inferred: bool
) -> str | None:
    """Add a column as a field of a type, and reject the rows that don't fit. Returns why a column
    is left out whose lists the schema doesn't describe."""
    values = table.columns[name]
    is_numbered = type.is_class and not type.class_names
    if is_numbered and (names := _class_names(table, values, name, found)):
        type = ClassLabel(names)
    is_named = is_numbered and bool(type.class_names)
    read = type.cell_reader(is_text=table.is_text)
    cells: list[Any] = [None] * len(values)
    wrong: dict[int, str] = {}
    for row, value in enumerate(values):
        if value is None:
            continue
        try:
            cells[row] = read(value)
        except (ValueError, OverflowError) as error:
            wrong[row] = str(error)
        if is_named and not isinstance(value, str):
            wrong[row] = f"{shorten(value)} isn't a class name, but other rows have names"
    if not type.is_settled:
        for row in _odd_rows(cells):
            wrong[row] = f"{shorten(values[row])} differs in kind or depth from most rows"
            cells[row] = None
        if wrong and is_inferred:
            return wrong[min(wrong)]
        type = type.completed(*_dtype_and_shape([each for each in cells if each is not None]))
    for row, reason in wrong.items():
        cells[row] = None
        found.rejected.setdefault(row, f"{name}: {reason} ({table.place(row)})")
    found.types[name], found.values[name] = type, _column(type, cells)
    if any(value is None for value in values):
        found.present[name] = np.array([each is not None for each in cells], np.bool_)
    return None


def _odd_rows(cells: Sequence[Any]) -> list[int]:
    """Return the rows whose arrays differ from most in kind or depth."""
    kinds = {
        row: (each.dtype.kind == "b", each.ndim)
        for row, each in enumerate(cells)
        if each is not None and each.size
    }
    usual = Counter(kinds.values()).most_common(1)
    return [row for row, kind in kinds.items() if kind != usual[0][0]]


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
            f"({table.place(row)}) isn't an integer: which class is that? Write integers or names; "
            f'or declare its type, schema={{"{name}": Value("float32")}}.'
        )
    names = sorted(text for text in texts if text.encode(errors="ignore").decode() == text)
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
        data = [each or b"" for each in cells]
        joined, ends = np.frombuffer(b"".join(data), np.uint8), np.cumsum([0, *map(len, data)])
        return EncodedColumn([joined[a:b] for a, b in pairwise(ends.tolist())])
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
