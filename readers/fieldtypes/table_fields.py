"""Turn the columns of a table into fields: types, values, and the rows that don't fit.

Types follow from the values, in the same way for every table (`_infer_type`), unless a schema gives
them. A row that doesn't fit its schema is rejected. A column that holds two kinds of values needs a
schema, else it is an error, because either kind could be meant. Values are never converted to fit:
a fraction is no integer, and true is no number.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes.boxes import check_points
from penstock.readers.fieldtypes.columns import DenseColumn, EncodedColumn, RaggedColumn
from penstock.readers.fieldtypes.field_types import (
    AUTO_DTYPE,
    PRESENT,
    Array,
    Boxes,
    ClassLabel,
    Keypoints,
    MultiLabel,
    Text,
    Tokens,
    Value,
    is_field_name,
    is_utf8,
)
from penstock.readers.fieldtypes.schema import LABEL
from penstock.readers.fieldtypes.text_tables import shorten
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes.columns import Column
    from penstock.readers.fieldtypes.field_types import FieldType
    from penstock.readers.fieldtypes.text_tables import TextTable

# As JSON writes them: digits after a leading zero are a name ("007"), not a number.
_INTEGER = re.compile(r"\s*[+-]?(?:0|[1-9][0-9]*)\s*")
_NUMBER = re.compile(
    r"\s*[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?"
    r"|nan|inf|infinity)\s*",
    re.IGNORECASE,
)
_SEPARATORS = ("|", ";", ",")
_INT64 = range(-(2**63), 2**63)
_LONGEST_INTEGER = 20
_MAX_DEPTH = 16

COLUMN_TYPES = (Value, ClassLabel, MultiLabel, Text, Array, Boxes, Keypoints, Tokens)
"""The types that the values of a table can have."""


def number_of(text: str) -> int | float | None:
    """Parse a cell of a CSV as a number. Returns None for other text, and for integers beyond 64
    bits."""
    if _INTEGER.fullmatch(text):
        number = int(text) if len(text.strip()) <= _LONGEST_INTEGER else None
        return number if number is not None and number in _INT64 else None
    return float(text) if _NUMBER.fullmatch(text) else None


class ClassNumbers(dict[str, int]):
    """Class numbers by name. is_ambiguous: the name of one class reads as the number of another, as
    in ("1", "2", "3"), so that a number may mean either."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__((name, number) for number, name in enumerate(names))
        self.is_ambiguous = any(
            isinstance(parsed := number_of(name), int) and parsed != number
            for name, number in self.items()
        )


_NONE = ClassNumbers(())


def cell(type: FieldType, value: Any, *, is_text: bool, numbers: ClassNumbers = _NONE) -> Any:
    """Convert a value to its type, or return a Rejection.

    is_text: the value is a cell of a CSV. numbers: the classes of a type with names. Text becomes
    bytes, everything else a number or an array.
    """
    if isinstance(type, Value):
        return _value(type, value, is_text=is_text)
    if isinstance(type, Text):
        return _utf8(value)
    if isinstance(type, ClassLabel):
        return _label(value, numbers, is_text=is_text)
    if isinstance(type, MultiLabel):
        return _labels(value, numbers, is_text=is_text)
    return _array(type, value, is_text=is_text)


def array_of(value: Any) -> tuple[NDArray[Any], type] | Rejection:
    """Convert lists of numbers to an array. Returns the array and the kind of its numbers, bool,
    int or float (float64 then), or a Rejection."""
    kinds = _leaves(value)
    if kinds <= {int}:
        kind: type = int if kinds else float
    elif kinds <= {int, float}:
        kind = float
    elif kinds == {bool}:
        kind = bool
    else:
        return Rejection(f"{shorten(value)} isn't a list of numbers")
    try:
        return np.array(value, {bool: np.bool_, int: np.int64, float: np.float64}[kind]), kind
    except OverflowError:
        return Rejection(f"{shorten(value)} holds an integer beyond 64 bits")
    except ValueError:
        return Rejection(f"{shorten(value)} holds lists of different lengths")


def fits(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Return True if a dtype holds the values: integers keep their value, and numbers stay
    finite."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        in_range = values.size == 0 or (limits.min <= values.min() and values.max() <= limits.max)
        return bool(values.dtype.kind in "iu" and in_range)
    if dtype.kind in "fc":
        if values.dtype.kind not in "iuf":
            return False
        with np.errstate(over="ignore"):
            return bool((np.isfinite(values.astype(dtype)) == np.isfinite(values)).all())
    return values.dtype.kind == "b"


def _leaves(value: Any, depth: int = 0) -> set[type]:
    if not isinstance(value, list):
        return {type(value)}
    kinds = set(map(type, value))
    if list not in kinds or depth == _MAX_DEPTH:
        return kinds
    return set().union(*(_leaves(each, depth + 1) for each in value))


def _value(type: Value, value: Any, *, is_text: bool) -> Any:
    dtype = np.dtype(type.dtype)
    found = _cell_number(value, dtype) if is_text else value
    if isinstance(found, bool) is not (dtype.kind == "b") or not isinstance(found, int | float):
        return Rejection(f"{shorten(value)} is no {_KINDS[dtype.kind]}")
    if isinstance(found, float) and dtype.kind in "iu":
        return Rejection(f"{shorten(value)} is no integer")
    if isinstance(found, int) and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= found <= limits.max:
            return Rejection(f"{shorten(value)} doesn't fit into {dtype.name}")
        return found
    try:
        with np.errstate(over="ignore"):
            made = dtype.type(found)
    except OverflowError:
        made = dtype.type(math.inf)
    if dtype.kind in "fc" and np.isinf(made) and not math.isinf(found):
        return Rejection(f"{shorten(value)} doesn't fit into {dtype.name}")
    return made


_KINDS = {"b": "true or false", "i": "integer", "u": "integer", "f": "number", "c": "number"}
_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def _cell_number(text: str, dtype: np.dtype[Any]) -> bool | int | float | None:
    if dtype.kind == "b":
        return _BOOLS.get(text.strip().lower())
    if dtype.kind == "u" and _INTEGER.fullmatch(text) and len(text.strip()) <= _LONGEST_INTEGER:
        return int(text)
    return number_of(text)


def _utf8(value: Any) -> bytes | Rejection:
    if not isinstance(value, str):
        return Rejection(f"{shorten(value)} is no text")
    try:
        return value.encode()
    except UnicodeEncodeError:
        return Rejection(f"{shorten(value)} holds half of a character (a lone surrogate)")


def _label(value: Any, numbers: ClassNumbers, *, is_text: bool) -> int | Rejection:
    if isinstance(value, str) and value in numbers:
        return numbers[value]
    found = number_of(value) if is_text else value
    if isinstance(value, str) and numbers and (numbers.is_ambiguous or not isinstance(found, int)):
        return Rejection(f"{shorten(value)} is no class of the list, which has {len(numbers):,}")
    if type(found) is not int:
        return Rejection(f"{shorten(value)} is no integer")
    if numbers.is_ambiguous:
        return Rejection(
            f'{found} may be the class named "{found}" or class number {found}: rename the '
            "classes, or write names as text"
        )
    if found not in (range(len(numbers)) if numbers else _INT64):
        return Rejection(f"{found} is no class: there are {len(numbers)}, numbered from 0")
    return found


def _labels(value: Any, numbers: ClassNumbers, *, is_text: bool) -> Any:
    parts = _parts(value, numbers) if is_text else value
    if not isinstance(parts, list):
        return Rejection(f"{shorten(value)} is no list of classes")
    found = np.zeros(len(numbers), np.float32)
    for part in parts:
        number = _label(part, numbers, is_text=is_text and isinstance(part, str))
        if isinstance(number, Rejection):
            return number
        if found[number]:
            return Rejection(
                f"{shorten(part)} occurs twice in {shorten(value)}; a list of zeros and ones is "
                f'Array("float32", ({len(numbers)},))'
            )
        found[number] = 1
    return found


def _parts(text: str, numbers: ClassNumbers) -> list[Any] | None:
    """Return the classes that a cell of a CSV lists, as JSON or between separators or spaces."""
    if text.strip() in numbers:
        return [text.strip()]
    if text.lstrip().startswith("["):
        return _json_list(text)
    separator = next((each for each in _SEPARATORS if each in text), None)
    return [part.strip() for part in text.split(separator) if part.strip()]


def _json_list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _array(type: FieldType, value: Any, *, is_text: bool) -> NDArray[Any] | Rejection:
    """Convert a value to an array. An Array type that isn't settled keeps the dtype and shape of
    the lists; `_array_column` settles it for all rows."""
    if is_text:
        value = _numbers(value)
    found = array_of(value)
    if isinstance(found, Rejection):
        return found
    array, _ = found
    if isinstance(type, Boxes | Keypoints):
        width = 4 if isinstance(type, Boxes) else 2
        made = _shaped(array, value, np.dtype(np.float32), (None, width))
        return made if isinstance(made, Rejection) else check_points(type, made) or made
    if isinstance(type, Tokens):
        return _shaped(array, value, np.dtype(type.dtype), (None,))
    assert isinstance(type, Array)
    dtype = array.dtype if type.dtype == AUTO_DTYPE else np.dtype(type.dtype)
    return _shaped(array, value, dtype, type.shape)


def _numbers(text: str) -> Any:
    """Parse a cell of a CSV as lists: JSON, or numbers between spaces, commas or semicolons."""
    if text.lstrip().startswith("["):
        return _json_list(text)
    numbers = [number_of(part) for part in re.split(r"[\s,;]+", text.strip())]
    return text if None in numbers else numbers


def _shaped(
    array: NDArray[Any], value: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...] | None
) -> NDArray[Any] | Rejection:
    if array.size == 0 and array.shape == (0,) and shape is not None:
        array = np.zeros([length or 0 for length in shape], dtype)
        if array.size:
            return Rejection(f"{shorten(value)} is empty, wanted shape {shape}")
    elif shape is not None and (
        array.ndim != len(shape)
        or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True))
    ):
        return Rejection(f"{shorten(value)} has shape {array.shape}, wanted {shape}")
    if array.dtype != dtype and not (array.size == 0 or fits(dtype, array)):
        return Rejection(f"{shorten(value)} doesn't fit into {dtype.name}")
    return array.astype(dtype, copy=False)


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
        if given is not None and not isinstance(given, COLUMN_TYPES):
            raise ConfigError(
                f'schema["{name}"]: got {given!r}, but that column of {table.source} holds values, '
                f"not files. Wanted one of {', '.join(t.__name__ for t in COLUMN_TYPES)}."
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
    """Infer the type of a column that the schema doesn't name; None leaves the column out."""
    if table.is_text:
        return _infer_from_cells(table, name, values, found)
    rows: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        if value is not None:
            rows.setdefault(_kind(value), []).append(row)
    if rows.keys() == {"integers", "fractions"}:
        return Value(_float_of(np.array([v for v in values if v is not None], np.float64), values))
    if len(rows) > 1:
        first, other = sorted(rows, key=lambda kind: (-len(rows[kind]), kind))[:2]
        a, b = rows[first][0], rows[other][0]
        raise DatasetError(
            f'{table.source}: the column "{name}" holds {first} ({shorten(values[a])}, '
            f"{table.place(a)}) and {other} ({shorten(values[b])}, {table.place(b)}). Correct the "
            f'values, or choose a type, such as schema={{"{name}": {_EXAMPLES[first]}}}: rows that '
            "don't fit are then left out, by name."
        )
    return _infer_from_kind(name, next(iter(rows), ""), values, found)


_EXAMPLES = {
    "integers": 'Value("int64")',
    "fractions": 'Value("float32")',
    "true or false": 'Value("bool")',
    "text": "Text()",
    "lists": "Array()",
    "objects": "Text()",
}


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int):
        return "integers"
    if isinstance(value, float):
        return "fractions"
    if isinstance(value, str):
        return "text"
    return "lists" if isinstance(value, list) else "objects"


def _infer_from_kind(
    name: str, kind: str, values: Sequence[Any], found: TableFields
) -> FieldType | None:
    """Return the type of a column whose values are of one kind; None leaves the column out."""
    if kind == "text":
        return ClassLabel() if name == LABEL else Text()
    if kind == "true or false":
        return Value("bool")
    if kind == "integers":
        numbers = [value for value in values if value is not None]
        if min(numbers) < -(2**63) or max(numbers) >= 2**63:
            found.left_out[name] = "it has integers beyond 64 bits"
            return None
        return ClassLabel() if name == LABEL else Value("int64")
    if kind == "fractions":
        return Value(_float_of(np.array([v for v in values if v is not None], np.float64), ()))
    if kind == "lists":
        return _infer_from_lists(name, values, found)
    found.left_out[name] = "no row has a value" if not kind else "it holds objects without keys"
    return None


def _infer_from_cells(
    table: TextTable, name: str, cells: Sequence[str | None], found: TableFields
) -> FieldType | None:
    """Return the type of a CSV's column: integers if all cells are, else numbers if all are, else
    text."""
    numbers = [None if each is None else number_of(each) for each in cells]
    filled = sum(each is not None for each in cells)
    good = sum(number is not None for number in numbers)
    if not filled:
        found.left_out[name] = "no row has a value"
        return None
    if good < filled:
        if good > filled - good:
            odd = next(i for i, c in enumerate(cells) if c is not None and numbers[i] is None)
            found.doubts.append(
                f'the column "{name}" of {table.source} is read as text: {good:,} of {filled:,} '
                f"cells are numbers, {shorten(cells[odd])} in {table.place(odd)} isn't. For "
                f'numbers pass schema={{"{name}": Value("float32")}}: other rows are then left out.'
            )
        return ClassLabel() if name == LABEL else Text()
    if all(number is None or isinstance(number, int) for number in numbers):
        return ClassLabel() if name == LABEL else Value("int64")
    return Value(_float_of(np.array([n for n in numbers if n is not None], np.float64), numbers))


def _float_of(numbers: NDArray[np.float64], values: Sequence[Any]) -> str:
    """Return "float32", or "float64" if float32 would change an integer or make a number
    infinite."""
    large = [v for v in values if isinstance(v, int) and abs(v) > 2**24]
    exact = all(int(np.float32(v)) == v for v in large if abs(v) < 2**127)
    return "float32" if exact and fits(np.dtype(np.float32), numbers) else "float64"


def _infer_from_lists(name: str, values: Sequence[Any], found: TableFields) -> Array | None:
    kinds: set[type] = set()
    dimensions: set[int] = set()
    wide = False
    for value in values:
        if value is None:
            continue
        made = array_of(value)
        if isinstance(made, Rejection):
            is_text = all(isinstance(each, str) for each in value)
            advice = f'; for classes pass schema={{"{name}": MultiLabel(names)}}' if is_text else ""
            found.left_out[name] = f"{made.reason}{advice}"
            return None
        array, kind = made
        if array.size:
            kinds.add(kind)
            dimensions.add(array.ndim)
            wide = wide or (kind is float and not fits(np.dtype(np.float32), array))
    if len(dimensions) > 1:
        found.left_out[name] = "its lists differ in depth"
        return None
    if bool in kinds and len(kinds) > 1:
        found.left_out[name] = "it holds true or false in some rows, and numbers in others"
        return None
    if kinds == {bool}:
        dtype = "bool"
    elif kinds == {int}:
        dtype = "int64"
    else:
        dtype = "float64" if wide else "float32"
    return Array(dtype)


def _add(
    found: TableFields, table: TextTable, name: str, values: Sequence[Any], type: FieldType
) -> None:
    """Add a column as a field of a type, and reject the rows that don't fit."""
    is_numbered = isinstance(type, ClassLabel) and not type.names
    if is_numbered:
        type = _label_type(table, values, name, found)
    names = type.names if isinstance(type, ClassLabel | MultiLabel) else ()
    numbers = ClassNumbers(names)
    cells: list[Any] = [None] * len(values)
    present = np.zeros(len(values), np.bool_)
    for row, value in enumerate(values):
        if value is None:
            continue
        made = cell(type, value, is_text=table.is_text, numbers=numbers)
        if is_numbered and names and not isinstance(value, str):
            made = Rejection(f"{shorten(value)} is no class name, but other rows have names")
        if isinstance(made, Rejection):
            found.rejected.setdefault(row, f"{name}: {made.reason} ({table.place(row)})")
        else:
            cells[row] = made
            present[row] = True
    if isinstance(type, Array) and not type.is_settled:
        for row in _odd_rows(cells):
            reason = f"{name}: {shorten(values[row])} differs in kind or depth from most rows"
            found.rejected.setdefault(row, f"{reason} ({table.place(row)})")
            cells[row], present[row] = None, False
    found.types[name], found.values[name] = _column(type, cells)
    if any(value is None for value in values):
        found.present[name] = present


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


def _label_type(
    table: TextTable, values: Sequence[Any], name: str, found: TableFields
) -> ClassLabel:
    """Number the classes by their sorted names, if the values are texts."""
    texts = {value for value in values if isinstance(value, str)}
    if table.is_text and all(isinstance(number_of(text), int) for text in texts):
        return ClassLabel()
    if table.is_text and None not in map(number_of, texts):
        row = next(i for i, v in enumerate(values) if v and not isinstance(number_of(v), int))
        raise DatasetError(
            f'{table.source}: the column "{name}" holds numbers, and {values[row]!r} '
            f"({table.place(row)}) is no integer: which class is that? Write integers or names; or "
            f'declare its type, schema={{"{name}": Value("float32")}}.'
        )
    names = sorted(filter(is_utf8, texts))
    if not names:
        return ClassLabel()
    listed = ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
    found.notes.append(
        f'{table.source}: "{name}" is {len(names):,} classes, numbered by sorted name ({listed}).'
    )
    return ClassLabel(tuple(names))


def _column(type: FieldType, cells: list[Any]) -> tuple[FieldType, Column]:
    """Return the settled type of a field and its column. cells: as `cell` returns them; None for no
    value."""
    if isinstance(type, Text):
        ends = np.cumsum([0, *(len(each or b"") for each in cells)], dtype=np.int64).tolist()
        joined = np.frombuffer(b"".join(each or b"" for each in cells), np.uint8)
        return type, EncodedColumn([joined[a:b] for a, b in pairwise(ends)])
    if isinstance(type, Value | ClassLabel):
        dtype = np.dtype(type.dtype if isinstance(type, Value) else np.int64)
        return type, DenseColumn(np.array([each or 0 for each in cells], dtype))
    if isinstance(type, MultiLabel):
        empty = np.zeros(len(type.names), np.float32)
        stacked = [empty if each is None else each for each in cells]
        return type, DenseColumn(np.array(stacked, np.float32).reshape(-1, len(type.names)))
    if isinstance(type, Boxes | Keypoints):
        width = 4 if isinstance(type, Boxes) else 2
        return type, _joined(cells, np.dtype(np.float32), (None, width))
    if isinstance(type, Tokens):
        return type, _joined(cells, np.dtype(type.dtype), (None,))
    assert isinstance(type, Array)
    return _array_column(type, cells)


def _array_column(type: Array, cells: list[Any]) -> tuple[Array, Column]:
    arrays = [each for each in cells if each is not None]
    full = [each for each in arrays if each.shape != (0,)] or arrays
    shape = type.shape
    if shape is None:
        depth = max((each.ndim for each in full), default=1)
        lengths = [
            {each.shape[axis] for each in full if each.ndim == depth} for axis in range(depth)
        ]
        if len(full) < len(arrays) or 0 in lengths[0]:
            lengths[0] = set()
        shape = tuple(each.pop() if len(each) == 1 else None for each in lengths)
    dtype = np.dtype(np.float32)
    if type.dtype != AUTO_DTYPE:
        dtype = np.dtype(type.dtype)
    elif full:
        dtype = np.result_type(*{each.dtype for each in full if each.size} or {dtype})
        if dtype == np.float64 and all(fits(np.dtype(np.float32), each) for each in full):
            dtype = np.dtype(np.float32)
    settled = replace(type, dtype=dtype.name, shape=shape)
    if not settled.is_ragged:
        wanted = [length for length in shape if length is not None]
        empty = np.zeros(wanted, dtype)
        stacked = [empty if each is None else each for each in cells]
        return settled, DenseColumn(np.array(stacked, dtype).reshape(-1, *wanted))
    return settled, _joined(cells, dtype, shape)


def _joined(cells: list[Any], dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> RaggedColumn:
    """Return a ragged column, which stores shapes if more than the first length differs."""
    empty = np.zeros([length or 0 for length in shape], dtype)
    if empty.size:
        empty = np.zeros([0] * len(shape), dtype)
    is_flat = None in shape[1:] or shape[0] is not None
    arrays = [
        empty if each is None or (each.size == 0 and each.ndim < len(shape)) else each
        for each in cells
    ]
    like = RaggedColumn(
        np.zeros(0 if is_flat else (0, *empty.shape[1:]), dtype),
        np.zeros(1, np.int64),
        np.zeros((0, len(shape)), np.int64) if is_flat else None,
    )
    return RaggedColumn.of([each.astype(dtype, copy=False) for each in arrays], like=like)
