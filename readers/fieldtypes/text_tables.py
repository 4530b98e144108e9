"""Parse tables in text (CSV, JSON lines, JSON objects) into columns of untyped values, and turn the
columns into fields: types, values, and the rows that don't fit.

A table is untrusted input: sizes are bounded, nothing is evaluated, and ambiguous text is an error.
Types follow from the values (`_infer_type`), unless a schema gives them. A row that doesn't fit its
schema is rejected. A column that holds two kinds of values needs a schema, else it is an error,
because either kind could be meant. Values are never converted to fit: a fraction is no integer, and
true is no number.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes.array_forms import fits, widened
from penstock.readers.fieldtypes.cells import INT64, number_of, shorten
from penstock.readers.fieldtypes.columns import Column, EncodedColumn
from penstock.readers.fieldtypes.field_type import PRESENT, FieldType, FieldTypes, is_field_name
from penstock.readers.fieldtypes.media import Text
from penstock.readers.fieldtypes.number_types import Array, ClassLabel, Value, some_names
from penstock.readers.fieldtypes.schema import LABEL
from penstock.readers.files import printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.types import Bools, Numbers

    Places = Sequence[int] | Sequence[str] | Sequence[bytes] | Sequence[int | str | bytes]

MAX_TABLE_BYTES = 2**30
"""The size of the largest table that is read, in one piece; larger ones belong in tar files or a
pack."""

MAX_COLUMNS = 4096
_MAX_DEPTH = 32
_TOO_MANY = (
    f"more than {MAX_COLUMNS:,} columns. Wanted the same keys in each object: put names that vary "
    "into lists."
)
_DELIMITERS = (",", "\t", ";")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextTable:
    """Rows of a table, stored by column.

    source: the name of the table in messages. columns: by name, one value per row; None if the row
    has none. places: for messages, the position of each row: line numbers, texts, or names of
    samples. unit: what places count. is_text: cells are text of a CSV, which may still be numbers.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    places: Places
    unit: str = "line"
    is_text: bool = False

    def __len__(self) -> int:
        return len(self.places)

    def place(self, row: int) -> str:
        """Return the position of a row for messages."""
        place = self.places[row]
        return f"{self.unit} {printable(place) if isinstance(place, bytes) else place}"

    def take(self, rows: Sequence[int], *, without: Container[str] = ()) -> TextTable:
        """Return these rows, in this order, without some columns."""
        kept = {name: values for name, values in self.columns.items() if name not in without}
        columns = {name: [values[i] for i in rows] for name, values in kept.items()}
        return replace(self, columns=columns, places=[self.places[i] for i in rows])


def csv_table(data: bytes, *, source: str) -> TextTable:
    """Parse a CSV with a header in UTF-8, separated by commas, or by tabs or semicolons if the
    header has no comma. An empty cell is a missing value. Raises DatasetError for anything else."""
    text = _text(data, source)
    header = text[: re.search(r"[\r\n]|\Z", text).start()]  # type: ignore[union-attr]
    delimiter = next((each for each in _DELIMITERS if each in header), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        names = [name.strip() for name in next(reader, [])]
        _check_header(names, source)
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise DatasetError(
                    f"{source}, line {reader.line_num}: got {len(row)} cells, but the header has "
                    f'{len(names)}. Put cells that hold "{delimiter}" between double quotes.'
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DatasetError(
            f"{source}, line {reader.line_num}: isn't CSV ({error}). Cells may have at most "
            f"{csv.field_size_limit():,} characters; double each double quote in a quoted cell."
        ) from error
    columns = {name: [row[i] or None for row in rows] for i, name in enumerate(names)}
    return TextTable(source=source, columns=columns, places=lines, is_text=True)


def jsonl_table(data: bytes, *, source: str) -> TextTable:
    """Parse a file with one JSON object per line, in UTF-8; see `object_table`. Raises DatasetError
    for anything else."""
    lines: list[int] = []
    objects: list[Any] = []
    for number, line in enumerate(_text(data, source).split("\n"), start=1):
        if line.strip():
            objects.append(json_object(line, what=f"{source}, line {number}"))
            lines.append(number)
    return object_table(objects, source=source, places=lines)


def json_object(text: str | bytes, *, what: str) -> dict[str, Any]:
    """Parse a JSON object. Raises DatasetError for other text, and for keys that occur twice."""
    found = json_value(text, what=what)
    if not isinstance(found, dict):
        raise DatasetError(
            f"{what}: got {shorten(found)}, wanted a JSON object, such as "
            '{"file_name": "a.jpg", "label": 3}.'
        )
    return found


def strict_json(text: str | bytes) -> Any:
    """Parse JSON whose objects have each key once, and whose numbers are finite. Raises
    ValueError, and RecursionError."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=refuse)


def json_value(text: str | bytes, *, what: str) -> Any:
    """Parse a JSON value. Raises DatasetError for other text, and for keys that occur twice in an
    object."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{what}: isn't JSON ({error}). Correct or remove it.") from error


def object_table(
    objects: Sequence[Mapping[str, Any] | None],
    *,
    source: str,
    places: Places,
    unit: str = "line",
    rejected: dict[int, str] | None = None,
) -> TextTable:
    """Convert JSON objects to the rows of a table.

    Nested objects are flattened with dots ("objects.bbox"), and so are lists of objects: each key
    becomes a list. null is a missing value, and an object that is None has no values. rejected:
    gets the reasons against objects that can't be rows, whose values are then missing; without it
    they raise. Raises DatasetError, too, if the objects don't make a table together.
    """
    columns: dict[str, list[Any]] = {}
    table = TextTable(source=source, columns=columns, places=places, unit=unit)
    for row, each in enumerate(objects):
        try:
            flat = _unique_keys(islice(_flat("", each or {}), MAX_COLUMNS + 1))
            if len(flat) > MAX_COLUMNS:
                raise ValueError(_TOO_MANY)
        except ValueError as error:
            reason = f"{source}, {table.place(row)}: {error}"
            if rejected is None:
                raise DatasetError(reason) from error
            rejected.setdefault(row, reason)
            continue
        for name, value in flat.items():
            if name not in columns:
                columns[name] = [None] * len(objects)
            columns[name][row] = value
        if len(columns) > MAX_COLUMNS:
            raise DatasetError(f"{source}, {table.place(row)}: {_TOO_MANY}")
    return replace(table, columns=_fill_empty_lists(columns))


def _flat(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise ValueError(f"objects nested more than {_MAX_DEPTH} deep, at {shorten(name)}.")
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if depth else key, inner, depth + 1)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for key in dict.fromkeys(key for each in value for key in each):
            yield from _flat(f"{name}.{key}", [each.get(key) for each in value], depth + 1)
    else:
        yield name, value


def _fill_empty_lists(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Replace an empty list of objects, which has no keys, by an empty list for each key that other
    rows have."""
    empty = [name for name, each in columns.items() if all(v is None or v == [] for v in each)]
    for name in empty:
        if children := [other for other in columns if other.startswith(f"{name}.")]:
            for row, value in enumerate(columns.pop(name)):
                for child in children if value == [] else ():
                    columns[child][row] = []
    return columns


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shorten(key)} occurs twice. Rename one.")
        found[sys.intern(key)] = value  # many objects have the same keys
    return found


def _text(data: bytes, source: str) -> str:
    if len(data) > MAX_TABLE_BYTES:
        raise DatasetError(
            f"{source}: got {len(data):,} bytes, wanted at most {MAX_TABLE_BYTES:,}. Split the "
            "dataset, or put the values into tar files."
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DatasetError(
            f"{source}, line {line}: isn't UTF-8 ({error.reason} at byte {error.start}). Save it "
            "as UTF-8."
        ) from error


def _check_header(names: Sequence[str], source: str) -> None:
    if not any(names):
        raise DatasetError(f"{source}: got no header, wanted column names in the first line.")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DatasetError(f"{source}: the column {shorten(twice[0])} occurs twice. Rename one.")
    if len(names) > MAX_COLUMNS:
        raise DatasetError(f"{source}: got {len(names):,} columns, wanted at most {MAX_COLUMNS:,}.")


_FLOAT32 = np.dtype(np.float32)


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
    present: dict[str, Bools] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)


def fields_of(
    table: TextTable, schema: FieldTypes | None = None, *, is_lenient: bool = False
) -> TableFields:
    """Convert the columns of a table to fields. schema: types of some columns. is_lenient: leave
    out a column that holds two kinds of values, unless it is the label.

    Raises DatasetError for a column that holds two kinds of values, and ConfigError for a type that
    no table can hold.
    """
    found = TableFields()
    for name in table.columns:
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
            reason = _add(found, table, name, given)
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
    dict: ("objects", Text()),
}


def _infer_type(table: TextTable, name: str, found: TableFields) -> FieldType | str:
    """Infer the type of a column that the schema doesn't name, or return why it is left out. The
    cells of a CSV are numbers if all of them are, else text."""
    values = cells = table.columns[name]
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
                f'the column "{name}" of {table.source} is read as text, though most cells are '
                f"numbers: {shorten(values[texts[0]])} in {table.place(texts[0])} isn't. For "
                f'numbers pass schema={{"{name}": Value("float32")}}: other rows are left out.'
            )
        rows = {str: texts}
    if float in rows and rows.keys() <= {int, float}:
        exact = np.array([cell for cell in cells if cell is not None], np.float64)
        whole = np.array([cells[row] for row in rows.get(int, ())], np.float64)
        is_narrow = fits(_FLOAT32, exact) and (whole.astype(np.float32) == whole).all()
        return Value("float32" if is_narrow else "float64")
    if len(rows) > 1:
        kinds = sorted(rows, key=lambda kind: (-len(rows[kind]), kind.__name__))[:2]
        shown = [
            f"{_KINDS[kind][0]} ({shorten(values[row])}, {table.place(row)})"
            for kind, row in ((kind, rows[kind][0]) for kind in kinds)
        ]
        raise DatasetError(
            f'{table.source}: the column "{name}" holds {" and ".join(shown)}. Correct the values, '
            f'or choose a type, such as schema={{"{name}": {_KINDS[kinds[0]][1]}}}: '
            "rows that don't fit are then left out, by name."
        )
    (kind,) = rows
    if kind is dict:
        return "it holds objects without keys"
    if kind is int and not all(cells[row] in INT64 for row in rows[kind]):
        return "it has integers beyond 64 bits"
    return ClassLabel() if name == LABEL and kind in (int, str) else _KINDS[kind][1]


def _add(found: TableFields, table: TextTable, name: str, given: FieldType | None) -> str | None:
    """Add a column as a field of a type, and reject the rows that don't fit. Returns why a column
    is left out that the schema doesn't describe. given: the type in the schema."""
    values, type = table.columns[name], given or _infer_type(table, name, found)
    if isinstance(type, str):
        return type
    names: tuple[str, ...] = ()
    if type.is_class and not type.class_names:
        names = _class_names(table, name, found)
        type = ClassLabel(names) if names else type
    read = type.cell_reader(is_text=table.is_text)
    cells: list[Any] = [None] * len(values)
    wrong: dict[int, str] = {}
    for row, value in enumerate(values):
        try:
            cells[row] = None if value is None else read(value)
        except (ValueError, OverflowError) as error:
            wrong[row] = str(error)
        if names and not isinstance(value, str | None):
            wrong[row] = f"{shorten(value)} isn't a class name, but other rows have names"
    if not type.is_settled:
        kinds = {
            row: (each.dtype.kind == "b", each.ndim)
            for row, each in enumerate(cells)
            if each is not None and each.size
        }
        usual = Counter(kinds.values()).most_common(1)
        for row, kind in kinds.items():
            if kind != usual[0][0]:
                wrong[row] = f"{shorten(values[row])} differs in kind or depth from most rows"
                cells[row] = None
        if wrong and given is None:
            return wrong[min(wrong)]
        type = type.completed(*_dtype_and_shape([each for each in cells if each is not None]))
    for row, reason in wrong.items():
        cells[row] = None
        found.rejected.setdefault(row, f"{name}: {reason} ({table.place(row)})")
    found.types[name], found.values[name] = type, column_of(type, cells)
    if any(value is None for value in values):
        found.present[name] = np.array([each is not None for each in cells], np.bool_)
    return None


def _class_names(table: TextTable, name: str, found: TableFields) -> tuple[str, ...]:
    """Return the sorted names of the classes, if the values are texts; empty for numbers."""
    values = table.columns[name]
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
        found.notes.append(
            f'{table.source}: "{name}" is {len(names):,} classes, numbered by sorted name '
            f"({some_names(names)})."
        )
    return tuple(names)


def _dtype_and_shape(arrays: Sequence[Numbers]) -> tuple[str, tuple[int | None, ...]]:
    """Return the dtype and the shape that all arrays have: float32 if it holds all floats, and None
    for lengths that differ."""
    full = [each for each in arrays if each.shape != (0,)]
    shapes = [each.shape for each in full] or [(0,)]
    depth = max(map(len, shapes))
    shape = reduce(widened, (each for each in shapes if len(each) == depth))
    if len(full) < len(arrays) or shape[:1] == (0,):
        shape = (None, *shape[1:])
    dtype = np.result_type(*{each.dtype for each in full if each.size} or {_FLOAT32})
    if dtype == np.float64 and all(fits(_FLOAT32, each) for each in full):
        dtype = _FLOAT32
    return dtype.name, shape


def column_of(type: FieldType, cells: Sequence[Any]) -> Column:
    """Return the column of a settled type. cells: as its `cell` returns them; None for no value."""
    if type.is_encoded:
        return EncodedColumn([np.frombuffer(each or b"", np.uint8) for each in cells])
    form = type.stored
    assert form is not None, type
    empty = form.empty
    filled = [empty if each is None else each for each in cells]
    if form.is_ragged:  # an empty list may lack dimensions
        found = (each if each.ndim == empty.ndim else empty for each in filled)
        filled = [each.astype(form.dtype, copy=False) for each in found]
    return form.column(filled)
