"""Parse tables in text (CSV, JSON lines, JSON objects) into columns of untyped values.

A table is untrusted input: sizes are bounded, nothing is evaluated, and ambiguous text is an error.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache import DatasetError
from penstock.readers.fieldtypes.cells import shorten
from penstock.readers.files import printable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

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
    cells = zip(*rows, strict=True) if rows else ([] for _ in names)
    columns = {
        name: [cell or None for cell in column] for name, column in zip(names, cells, strict=True)
    }
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


def json_value(text: str | bytes, *, what: str) -> Any:
    """Parse a JSON value. Raises DatasetError for other text, and for keys that occur twice in an
    object."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{what}: isn't JSON ({error}). Wanted one object, such as "
            '{"file_name": "a.jpg", "label": 3}.'
        ) from error


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
        flat: dict[str, Any] = {}
        try:
            _flatten(flat, "", each or {}, depth=0)
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


def _flatten(flat: dict[str, Any], name: str, value: Any, *, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"objects nested more than {_MAX_DEPTH} deep, at {shorten(name)}.")
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(flat, f"{name}.{key}" if depth else key, inner, depth=depth + 1)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for key in dict.fromkeys(key for each in value for key in each):
            inner = [each.get(key) for each in value]
            _flatten(flat, f"{name}.{key}", inner, depth=depth + 1)
    elif name in flat:
        raise ValueError(f"the key {shorten(name)} occurs twice. Rename one.")
    elif len(flat) == MAX_COLUMNS:
        raise ValueError(_TOO_MANY)
    else:
        flat[name] = value


def _fill_empty_lists(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Replace an empty list of objects, which has no keys, by an empty list for each key that other
    rows have."""
    parents = {
        name: [other for other in columns if other.startswith(f"{name}.")]
        for name, values in columns.items()
        if all(value is None or value == [] for value in values)
    }
    for name, children in parents.items():
        if children:
            for row, value in enumerate(columns.pop(name)):
                for child in children if value == [] else ():
                    columns[child][row] = []
    return columns


def _unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shorten(key)} occurs twice")
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
