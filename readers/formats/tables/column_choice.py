"""Choose which columns of a table's files are fields, under which names and types."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import ConfigError, DatasetError, PenstockWarning
from penstock.readers.fieldtypes import PRESENT, Bytes, is_field_name
from penstock.readers.files import printable
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.tables.column_types import (
    FILES_BY_PATHS,
    ArrowColumn,
    arrow_columns,
    completed_type,
    features_of,
    is_text,
    misfit,
)
from penstock.readers.formats.tables.column_values import NULL_INSIDE, RAGGED_INSIDE, TableValues

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.tables.column_types import Feature
    from penstock.readers.origin import Arrangement, Entry

_log = logging.getLogger("penstock")
_MAX_NAMES, _MAX_REASONS = 20, 5
_NAMES_OF_PATHS = re.compile(
    "image|img|photo|picture|frame|mask|file|path|audio|sound|wav|video|clip|ur[il]", re.IGNORECASE
)
_FILE = re.compile(
    rb"\.(jpe?g|png|webp|bmp|tiff?|jp2|ppm|pgm|gif|avif|npy|wav|flac|mp3|ogg|opus|m4a|mp4|mkv|avi"
    rb"|mov|webm)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChoice:
    """The columns that are fields, by the user's arguments.

    columns, types: by field, in order; a type is None if it depends on the first values.
    left_out: the reasons of the columns that aren't fields, by name.
    """

    columns: Mapping[str, ArrowColumn]
    types: Mapping[str, FieldType | None]
    left_out: Mapping[str, str]


def choose_columns(
    columns: Sequence[ArrowColumn],
    arrangement: Arrangement,
    *,
    file: str,
    refused: Mapping[str, str],
) -> FieldChoice:
    """Return the columns that are fields.

    file: its name, for messages. refused: the reasons why the values of columns, by name, can't be
    a field. Raises ConfigError if a requested column doesn't exist or doesn't fit its type,
    DatasetError if it can't be a field.
    """
    names = [column.name for column in columns]
    given, places = given_types(arrangement), dict(arrangement.places)
    for name, place in places.items():
        if place not in names:
            raise ConfigError(f'fields["{name}"]: got {place!r}, and {file} has {_shown(names)}.')
    renamed = {place: name for name, place in places.items()}
    chosen: dict[str, ArrowColumn] = {}
    types: dict[str, FieldType | None] = {}
    left_out: dict[str, str] = {}
    for column in columns:
        name = renamed.get(column.name, column.name)
        if column.name in places and column.name not in renamed:
            continue  # another column has this name now
        if not is_field_name(name) or name.endswith(PRESENT):
            rename = f'fields={{"…": "{column.name}"}} gives it another one'
            left_out[name] = f"no field can have this name; {rename}"
            continue
        type, reason = given.pop(name, None), refused.get(column.name)
        if type is None:
            reason = reason or column.refusal
            if reason is not None and column.name in renamed:
                raise DatasetError(
                    f'fields["{name}"]: {file}: the column "{column.name}": {reason}.'
                )
        elif reason is not None:
            raise ConfigError(f'schema["{name}"]: the column "{column.name}": {reason}.')
        elif (reason := misfit(type, column.arrow)) is not None:
            paths = type.is_encoded and not type.in_tables and is_text(column.arrow)
            advice = "Name a type that it can become (docs/parquet.md), or leave it out of schema="
            advice = f"If these are paths of files: {FILES_BY_PATHS}" if paths else advice
            raise ConfigError(f'schema["{name}"]: got {reason} ({file}). {advice}.')
        if reason is not None:
            left_out[name] = reason
            continue
        chosen[name] = column
        types[name] = column.type if type is None else completed_type(type, column.arrow)
    for name in given:
        raise ConfigError(f'schema["{name}"]: there is no such column; {file} has {_shown(names)}.')
    return FieldChoice(columns=chosen, types=types, left_out=left_out)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{names[:_MAX_NAMES]}{more}"


def warn_of_left_out(url: str, choice: FieldChoice) -> None:
    """Log which columns aren't fields, and why."""
    if choice.left_out:
        shown = [f'"{name}" ({reason})' for name, reason in choice.left_out.items()]
        more = f" and {len(shown) - _MAX_REASONS} more" if len(shown) > _MAX_REASONS else ""
        _log.warning(
            "%s: columns that aren't fields: %s%s.", url, "; ".join(shown[:_MAX_REASONS]), more
        )


def refusal_of(table: Any, *, file: str, first: int) -> str | None:
    """Return why a column can't be a field, if its values in some rows are lists that
    aren't arrays. A value that doesn't fit isn't a reason: it makes one bad sample.

    table: as `values_table` returns it. file: its name, for messages; first: the first row in it.
    """
    for row, reason in TableValues(table).reasons(np.arange(len(table))):
        if reason in (NULL_INSIDE, RAGGED_INSIDE):
            advice = "replace the null" if reason == NULL_INSIDE else "pad or flatten the lists"
            return f"{reason} ({file}, row {first + row}): {advice} when you write the file"
    return None


def may_be_paths(name: str, type: FieldType) -> bool:
    """Return True if a field of texts has a name that is usual for paths of files."""
    return type.is_encoded and type.in_tables and bool(_NAMES_OF_PATHS.search(name))


def warn_of_paths(url: str, column: str, values: Sequence[bytes]) -> None:
    """Warn if a column's values are paths of images, sound, video or arrays. values: some of
    them."""
    paths = [value for value in values if value]
    if paths and all(map(_FILE.search, paths)):
        shown = paths[0].decode(errors="replace")
        warnings.warn(
            f'{url}: the column "{column}" holds paths of files ({shown!r:.200}), which '
            f"are read as text. To read the files, {FILES_BY_PATHS}.",
            PenstockWarning,
            stacklevel=11,
        )


def warn_of_partitions(url: str, files: Iterable[bytes], choice: FieldChoice) -> None:
    """Warn if columns of a partitioned table are only in the names of its folders (`label=3/`).

    files: the names of the table's files.
    """
    known = {column.name for column in choice.columns.values()} | set(choice.left_out)
    folders = dict.fromkeys(part for name in files for part in name.split(b"/")[:-1])
    lacking: dict[str, bytes] = {}
    for folder in folders:
        name, equals, _ = folder.partition(b"=")
        if equals and (column := name.decode(errors="replace")) not in known:
            lacking.setdefault(column, folder)
    if lacking:
        shown = ", ".join(folder.decode(errors="replace") for folder in lacking.values())
        warnings.warn(
            f"{url}: the table is partitioned ({shown:.200}), and a column that is only in the "
            f"names of folders isn't read: {_shown(list(lacking))}. Write such columns into the "
            "files too, or write the table without partitions.",
            PenstockWarning,
            stacklevel=11,
        )


def no_field_error(url: str, choice: FieldChoice) -> DatasetError:
    """Return the error for a table none of whose columns can be a field."""
    shown = list(choice.left_out.items())[:_MAX_REASONS]
    listed = "; ".join(f'"{name}": {reason}' for name, reason in shown)
    return DatasetError(f"{url}: no column can be a field ({listed}).")


def kind_of(values: Sequence[bytes]) -> FieldType:
    """Return the type of binary values: images, sound or video if the first bytes of all of them
    are of that kind, else bytes."""
    from penstock.readers.fieldtypes import Audio, Image, Video

    for type in (Image(), Audio(), Video()):
        heads = [value[: type.head_bytes] for value in values if value]
        if heads and all(type.check_head(head) is None for head in heads):
            return type
    return Bytes()


def union_of_columns(
    files: Iterable[tuple[Entry, Mapping[str, ArrowColumn]]], given: Mapping[str, FieldType]
) -> list[ArrowColumn]:
    """Return the columns of all files of a dataset, in the order in which they occur.

    files: the columns of each, by name. given: the types that the user declared. Raises
    DatasetError if a column has another type than in an earlier file, unless the user declared a
    type that both can become.
    """
    found: dict[str, tuple[ArrowColumn, Entry]] = {}
    seen: set[int] = set()
    for entry, columns in files:
        if id(columns) in seen:  # most files share their columns
            continue
        seen.add(id(columns))
        for column in columns.values():
            first, its_entry = found.get(column.name, (None, entry))
            if first is None or pa.types.is_null(first.arrow):
                found[column.name] = column, entry
                continue
            here, there = printable(entry.name), printable(its_entry.name)
            if first.path != column.path and not pa.types.is_null(column.arrow):
                raise DatasetError(
                    f'{here}: its column "{column.name}" is at {list(column.path)}, and in {there} '
                    f"at {list(first.path)}. Write both alike, or read them as two datasets."
                )
            type = given.get(column.name)
            is_declared = type is not None and misfit(type, column.arrow) is None
            if not is_declared and not _agree(first, column):
                raise DatasetError(
                    f'{here}: its column "{column.name}" holds {column.arrow}, and in {there} it '
                    f"holds {first.arrow}. Write both alike, read them as two datasets, or declare "
                    f'a type that both can become: schema={{"{column.name}": …}}.'
                )
    return [column for column, _ in found.values()]


def _agree(first: ArrowColumn, other: ArrowColumn) -> bool:
    if pa.types.is_null(other.arrow):
        return True  # no row of that file has a value
    if first.tensor != other.tensor:
        return False
    if first.refusal is not None or other.refusal is not None:
        return first.refusal is not None and other.refusal is not None
    return first.type == other.type


def columns_of(schema: Any, entry: Entry) -> dict[str, ArrowColumn]:
    """Return the columns of a file's schema that may be fields, by name. A warning names Hugging
    Face's features if they are invalid. Raises ValueError."""
    if len(set(schema.names)) < len(schema.names):
        raise ValueError("two of its columns have one name")
    features: Mapping[str, Feature] = {}
    try:
        features = features_of(schema.metadata)
    except ValueError as error:
        _log.warning(
            "%s: Hugging Face's features in its metadata are ignored: %s",
            printable(entry.name),
            error,
        )
    return {column.name: column for column in arrow_columns(schema, features)}
