"""Parse tables in text (CSV, JSON lines, JSON objects) into columns of values without types.

A table may come from anybody: sizes are bounded, nothing is evaluated, and text that can be read in
two ways is an error.
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

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MAX_TABLE_BYTES = 2**30
"""As large a table is read, in one piece; what is larger belongs into tar files or a pack."""

MAX_COLUMNS = 4096
_MAX_DEPTH = 32
_DELIMITERS = (",", "\t", ";")
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextTable:
    """Rows, column by column.

    source: what the table is, for messages. columns: of each name one value a row; None where the
    row has none. places: where each row stands, for messages: lines of a file, or names; unit: what
    they count. is_text: cells are a CSV's, in which numbers are still to be told from text.
    """

    source: str
    columns: Mapping[str, Sequence[Any]]
    places: Sequence[int | str]
    unit: str = "line"
    is_text: bool = False

    def __len__(self) -> int:
        return len(self.places)

    def place(self, row: int) -> str:
        """Where a row stands, as a person looks for it."""
        return f"{self.unit} {self.places[row]}"

    def without(self, *names: str) -> TextTable:
        """The table without some columns."""
        left = {name: values for name, values in self.columns.items() if name not in names}
        return replace(self, columns=left)

    def take(self, rows: Sequence[int]) -> TextTable:
        """These rows, in this order."""
        columns = {name: [values[i] for i in rows] for name, values in self.columns.items()}
        return replace(self, columns=columns, places=[self.places[i] for i in rows])


def csv_table(data: bytes, *, source: str) -> TextTable:
    """A CSV with a header, in UTF-8, separated by commas; by tabs or semicolons where the header
    has no comma. An empty cell is a missing value. Raises DatasetError for anything else."""
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
                    f"{source}, line {reader.line_num}: got {len(row)} cells, and the header has "
                    f'{len(names)}. Put cells that hold "{delimiter}" between double quotes.'
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DatasetError(
            f"{source}, line {reader.line_num}: isn't CSV ({error}). Cells have at most "
            f"{csv.field_size_limit():,} characters; a double quote in a quoted cell is doubled."
        ) from error
    cells = zip(*rows, strict=True) if rows else ([] for _ in names)
    columns = {
        name: [cell or None for cell in column] for name, column in zip(names, cells, strict=True)
    }
    return TextTable(source=source, columns=columns, places=lines, is_text=True)


def jsonl_table(data: bytes, *, source: str) -> TextTable:
    """One JSON object a line, in UTF-8; see `object_table`. Raises DatasetError for anything
    else."""
    lines: list[int] = []
    objects: list[Any] = []
    for number, line in enumerate(_text(data, source).split("\n"), start=1):
        if line.strip():
            objects.append(json_object(line, what=f"{source}, line {number}"))
            lines.append(number)
    return object_table(objects, source=source, places=lines)


def json_object(text: str | bytes, *, what: str) -> dict[str, Any]:
    """The JSON object that a text is. Raises DatasetError for what isn't one, and for keys that
    stand in it twice."""
    found = json_value(text, what=what)
    if not isinstance(found, dict):
        raise DatasetError(
            f"{what}: got {shorten(found)}, wanted a JSON object, such as "
            '{"file_name": "a.jpg", "label": 3}.'
        )
    return found


def json_value(text: str | bytes, *, what: str) -> Any:
    """What a text in JSON says. Raises DatasetError for what isn't JSON, and for keys that stand
    in an object twice."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DatasetError(
            f"{what}: isn't JSON ({error}). Wanted one object, such as "
            '{"file_name": "a.jpg", "label": 3}.'
        ) from error


def object_table(
    objects: Sequence[Mapping[str, Any] | None],
    *,
    source: str,
    places: Sequence[int | str],
    unit: str = "line",
) -> TextTable:
    """JSON objects as rows. Objects in objects are flattened, with dots ("objects.bbox"), and so
    are lists of objects: each key is a list. null is a missing value, and so is an object that is
    None. Raises DatasetError."""
    columns: dict[str, list[Any]] = {}
    for row, each in enumerate(objects):
        flat: dict[str, Any] = {}
        try:
            _flatten(flat, "", each or {}, depth=0)
        except ValueError as error:
            raise DatasetError(f"{source}, {unit} {places[row]}: {error}") from error
        for name, value in flat.items():
            if name not in columns:
                columns[name] = [None] * len(objects)
            columns[name][row] = value
        if len(columns) > MAX_COLUMNS:
            raise DatasetError(
                f"{source}: more than {MAX_COLUMNS:,} columns by {unit} {places[row]}. Wanted the "
                "same keys in each object: put what varies into lists."
            )
    return TextTable(source=source, columns=_empties(columns), places=places, unit=unit)


def _flatten(flat: dict[str, Any], name: str, value: Any, *, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} objects in one another, at {shorten(name)}.")
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(flat, f"{name}.{key}" if depth else key, inner, depth=depth + 1)
    elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        for key in dict.fromkeys(key for each in value for key in each):
            inner = [each.get(key) for each in value]
            _flatten(flat, f"{name}.{key}", inner, depth=depth + 1)
    elif name in flat:
        raise ValueError(f"the key {shorten(name)} is there twice. Rename one.")
    else:
        flat[name] = value


def _empties(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """An empty list of objects has no keys: it is an empty list of each key that others have."""
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


def _once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shorten(key)} is there twice")
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
        raise DatasetError(f"{source}: the column {shorten(twice[0])} is there twice. Rename one.")
    if len(names) > MAX_COLUMNS:
        raise DatasetError(f"{source}: got {len(names):,} columns, wanted at most {MAX_COLUMNS:,}.")


def shorten(value: object) -> str:
    """A value in a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
