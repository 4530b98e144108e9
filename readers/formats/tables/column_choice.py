"""Choose which columns of a table's files are fields, under which names and types.

The columns should be the same in all files of a dataset; `SchemaDrift` gathers and compares them.
"""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import ConfigError, DatasetError, PenstockWarning
from penstock.readers.fields import PRESENT, Bytes, Text, is_encoded, is_field_name
from penstock.readers.files import printable
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.tables.column_types import (
    FILES_BY_PATHS,
    ArrowColumn,
    completed_type,
    features_of,
    is_text,
    misfit,
)
from penstock.readers.formats.tables.column_values import NULL_INSIDE, RAGGED_INSIDE, reasons

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.tables.column_types import Feature
    from penstock.readers.origin import Arrangement, Entry

_log = logging.getLogger("penstock")
_SHOWN, _TOLD = 20, 5
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
    """The fields that a user's arguments make of a file's columns.

    columns, types: by field, in order; a type is None where the first values have to tell.
    left_out: columns that are no field, by name, and why.
    """

    columns: Mapping[str, ArrowColumn]
    types: Mapping[str, FieldType | None]
    left_out: Mapping[str, str]


def choose_columns(
    columns: Sequence[ArrowColumn],
    arrangement: Arrangement,
    *,
    file: str,
    refused: Mapping[str, str] | None = None,
) -> FieldChoice:
    """The fields of a file's columns. file: its name, for people; refused: why columns, by name,
    are none, whatever their type, as their values say.

    Raises ConfigError for what was asked for and isn't there or doesn't fit, DatasetError for what
    can't be a field.
    """
    there = {column.name: column for column in columns}
    given, places = given_types(arrangement), dict(arrangement.places)
    for name, place in places.items():
        if place not in there:
            raise ConfigError(f'fields["{name}"]: got {place!r}, and {file} has {_shown(there)}.')
    renamed = {place: name for name, place in places.items()}
    found: dict[str, ArrowColumn] = {}
    left_out: dict[str, str] = {}
    for column in columns:
        if column.name in places and column.name not in renamed:
            continue  # another column has this name now
        name = renamed.get(column.name, column.name)
        if not is_field_name(name) or name.endswith(PRESENT):
            rename = f'fields={{"…": "{column.name}"}} gives it another'
            left_out[name] = f"no field can have this name; {rename}"
        else:
            found[name] = column
    for name in given:
        if name not in found:
            raise ConfigError(
                f'schema["{name}"]: there is no such column; {file} has {_shown(there)}.'
            )
    types: dict[str, FieldType | None] = {}
    for name, column in list(found.items()):
        type = given.get(name)
        if (why := (refused or {}).get(column.name)) is not None and type is not None:
            raise ConfigError(f'schema["{name}"]: the column "{column.name}": {why}.')
        why = why or (column.refusal if type is None else misfit(type, column.arrow))
        if why is None:
            types[name] = column.type if type is None else completed_type(type, column.arrow)
            continue
        if type is not None:
            paths = is_encoded(type) and not isinstance(type, Text) and is_text(column.arrow)
            files = ". Name a type that it can become (docs/parquet.md), or leave it out of schema="
            files = f". If these are paths of files: {FILES_BY_PATHS}" if paths else files
            raise ConfigError(f'schema["{name}"]: got {why} ({file}){files}.')
        if column.name in renamed:
            raise DatasetError(f'fields["{name}"]: {file}: the column "{column.name}": {why}.')
        left_out[name] = why
        del found[name]
    return FieldChoice(columns=found, types=types, left_out=left_out)


def _shown(there: Mapping[str, object]) -> str:
    names = list(there)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{more}"


def warn_of_left_out(url: str, choice: FieldChoice) -> None:
    """Say once which columns are no fields, and why."""
    if choice.left_out:
        told = [f'"{name}" ({why})' for name, why in choice.left_out.items()]
        more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        _log.warning("%s: columns that are no fields: %s%s.", url, "; ".join(told[:_TOLD]), more)


def refusal_of(table: Any, *, file: str, first: int) -> str | None:
    """Why a column is refused, by the values of some rows (`values.values_table`): lists that are
    no arrays. None where they are, or a value alone doesn't fit. first: the row where they begin in
    the file, whose name is for people."""
    for row, reason in reasons(table, np.arange(len(table))):
        if reason in (NULL_INSIDE, RAGGED_INSIDE):
            advice = "fill it in" if reason == NULL_INSIDE else "pad them, or flatten them"
            return f"{reason} ({file}, row {first + row}): {advice} when the file is written"
    return None


def may_be_paths(name: str, type: FieldType) -> bool:
    """Return True for a field of texts whose name is one that paths of files have."""
    return isinstance(type, Text) and bool(_NAMES_OF_PATHS.search(name))


def warn_of_paths(url: str, column: str, values: Sequence[bytes]) -> None:
    """Warn of a column of texts that are paths of pictures, sound or video. values: some."""
    some = [value for value in values if value]
    if some and all(map(_FILE.search, some)):
        shown = some[0].decode(errors="replace")
        warnings.warn(
            f'{url}: the column "{column}" holds paths of files ({shown!r:.200}), and they '
            f"are read as text. To read the files, {FILES_BY_PATHS}.",
            PenstockWarning,
            stacklevel=9,
        )


def warn_of_partitions(url: str, files: Iterable[bytes], choice: FieldChoice) -> None:
    """Warn of columns that stand in the names of folders alone (`label=3/`), as partitioned tables
    have them. files: the names of the table's files."""
    there = {column.name for column in choice.columns.values()} | set(choice.left_out)
    folders = dict.fromkeys(part for name in files for part in name.split(b"/")[:-1])
    lacking: dict[str, bytes] = {}
    for folder in folders:
        name, equals, _ = folder.partition(b"=")
        if equals and (column := name.decode(errors="replace")) not in there:
            lacking.setdefault(column, folder)
    if lacking:
        shown = ", ".join(folder.decode(errors="replace") for folder in lacking.values())
        warnings.warn(
            f"{url}: the table is partitioned ({shown:.200}), and a column that stands only in the "
            f"names of folders isn't read: {_shown(lacking)}. Write such columns into the files "
            "too, or the table without partitions.",
            PenstockWarning,
            stacklevel=9,
        )


def no_field_error(url: str, choice: FieldChoice) -> DatasetError:
    """The error for files none of whose columns is a field."""
    told = "; ".join(f'"{name}": {why}' for name, why in list(choice.left_out.items())[:_TOLD])
    return DatasetError(f"{url}: no column can be a field ({told}).")


def kind_of(values: Sequence[bytes]) -> FieldType:
    """What binary values are, by the first bytes of some of them: pictures, sound or video where
    all are, else bytes."""
    from penstock.readers.fields import HEAD_BYTES, Audio, Image, Video, refusal_by_head

    heads = [value[:HEAD_BYTES] for value in values if value]
    for type in (Image(), Audio(), Video()):
        if heads and all(refusal_by_head(type, head) is None for head in heads):
            return type
    return Bytes()


@dataclass(slots=True, kw_only=True)
class SchemaDrift:
    """Gathers the columns of files whose schemas should be one, in the order in which they come."""

    given: Mapping[str, FieldType]
    columns: dict[str, ArrowColumn]
    files: dict[str, Entry]

    def add(self, columns: Sequence[ArrowColumn], entry: Entry) -> None:
        """The columns of one more file. Raises DatasetError where one is of another type than in
        an earlier file."""
        for column in columns:
            first = self.columns.get(column.name)
            if first is None or pa.types.is_null(first.arrow):
                self.columns[column.name], self.files[column.name] = column, entry
            elif first.path != column.path and not pa.types.is_null(column.arrow):
                raise DatasetError(
                    f'{printable(entry.name)}: its column "{column.name}" lies at '
                    f"{list(column.path)}, and in {printable(self.files[column.name].name)} at "
                    f"{list(first.path)}. Write both alike, or read them as two datasets."
                )
            elif not _is_alike(first, column) and not self._is_meant(column):
                raise DatasetError(
                    f'{printable(entry.name)}: its column "{column.name}" holds {column.arrow}, '
                    f"and in {printable(self.files[column.name].name)} it holds {first.arrow}. "
                    "Write both alike, read them as two datasets, or say which is meant by "
                    f'schema={{"{column.name}": …}}, where one can become the other.'
                )

    def _is_meant(self, column: ArrowColumn) -> bool:
        type = self.given.get(column.name)
        return type is not None and misfit(type, column.arrow) is None


def _is_alike(first: ArrowColumn, other: ArrowColumn) -> bool:
    if pa.types.is_null(other.arrow):
        return True  # no row of that file has it
    if first.tensor != other.tensor:
        return False
    if first.refusal is not None or other.refusal is not None:
        return first.refusal is not None and other.refusal is not None
    return first.type == other.type


def features_in_metadata(schema: Any, entry: Entry) -> Mapping[str, Feature]:
    """What features in a file's metadata say; nothing, with a warning, where they are broken."""
    try:
        return features_of(schema.metadata)
    except ValueError as error:
        _log.warning(
            "%s: Hugging Face's features in its metadata are passed over: %s",
            printable(entry.name),
            error,
        )
        return {}
