"""Choose which columns of a table's files are fields, under which names and types."""

from __future__ import annotations

import logging
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.cache import ConfigError, DatasetError, PenstockWarning
from penstock.readers.fieldtypes import MAX_FIELDS, PRESENT, Bytes, is_field_name
from penstock.readers.files import printable
from penstock.readers.formats.tables.column_types import FILES_BY_PATHS, completed_type, misfit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.tables.column_types import ArrowColumn
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
    """The columns that are fields and their types, by field, in order; and the reasons of the
    columns that aren't fields, by name."""

    columns: Mapping[str, ArrowColumn]
    types: Mapping[str, FieldType]
    left_out: Mapping[str, str]

    @property
    def reasons(self) -> str:
        """Return why columns aren't fields, for messages."""
        shown = [f'"{name}" ({reason})' for name, reason in self.left_out.items()]
        more = f" and {len(shown) - _MAX_REASONS} more" if len(shown) > _MAX_REASONS else ""
        return "; ".join(shown[:_MAX_REASONS]) + more


def choose_columns(
    columns: Sequence[ArrowColumn],
    arrangement: Arrangement,
    *,
    file: str,
    examine: Callable[[ArrowColumn, FieldType | None], tuple[FieldType, str | None]],
) -> FieldChoice:
    """Return the columns that are fields.

    file: its name, for messages. examine: given a column and its type, None if its first values
    decide, returns the type and the reason why its values can't be a field, or None. Raises
    ConfigError if a requested column doesn't exist or doesn't fit its type, DatasetError if it
    can't be a field.
    """
    given, places = dict(arrangement.schema), dict(arrangement.places)
    renamed = {place: name for name, place in places.items()}
    chosen: dict[str, ArrowColumn] = {}
    types: dict[str, FieldType] = {}
    left_out: dict[str, str] = {}
    for column in columns:
        name = renamed.pop(column.name, column.name)
        if column.name in places and name == column.name != places[name]:
            continue  # another column has this name now
        if not is_field_name(name) or name.endswith(PRESENT):
            rename = f'fields={{"…": "{column.name}"}} gives it another one'
            left_out[name] = f"no field can have this name; {rename}"
            continue
        type, where = given.pop(name, None), f'{file}: the column "{column.name}"'
        reason = column.refusal if type is None else misfit(type, column.arrow)
        if reason is None:
            settled = column.type if type is None else completed_type(type, column.arrow)
            types[name], reason = examine(column, settled)
        if reason is None:
            chosen[name] = column
            if len(chosen) > MAX_FIELDS:
                raise DatasetError(
                    f"{file}: more than {MAX_FIELDS:,} of its columns can be fields. Write the "
                    "wide ones as lists."
                )
        elif type is not None:
            raise ConfigError(
                f'schema["{name}"]: {where}: {reason}. Name a type that it can become '
                "(docs/parquet.md), or leave it out of schema=."
            )
        elif name in places:
            raise DatasetError(f'fields["{name}"]: {where}: {reason}.')
        else:
            left_out[name] = reason
    lacking = [f'fields["{name}"]: got {place!r}' for place, name in renamed.items()]
    lacking += [f'schema["{name}"]: there is no such column' for name in given]
    if lacking:
        names = _shown([column.name for column in columns])
        raise ConfigError(f"{lacking[0]}, and {file} has {names}.")
    kept = {name: types[name] for name in chosen}
    return FieldChoice(columns=chosen, types=kept, left_out=left_out)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{names[:_MAX_NAMES]}{more}"


def warn_of_columns(
    url: str,
    choice: FieldChoice,
    files: Iterable[bytes],
    first_values: Callable[[ArrowColumn], Sequence[bytes]],
) -> None:
    """Warn of columns that may not be what the user expects: that aren't fields, whose texts are
    paths of images, sound, video or arrays, or that are only in the names of folders (`label=3/`).

    files: the names of the table's files. first_values: returns some values of a column.
    """
    found: list[str] = []
    for name, column in choice.columns.items():
        is_text = choice.types[name].is_encoded and choice.types[name].in_tables
        if is_text and _NAMES_OF_PATHS.search(name):
            paths = [value for value in first_values(column) if value]
            if paths and all(map(_FILE.search, paths)):
                shown = paths[0].decode(errors="replace")
                found.append(
                    f'the column "{column.name}" holds paths of files ({shown!r:.200}), which '
                    f"are read as text. To read the files, {FILES_BY_PATHS}"
                )
    if choice.left_out:
        _log.warning("%s: columns that aren't fields: %s.", url, choice.reasons)
    known = {column.name for column in choice.columns.values()} | set(choice.left_out)
    folders = dict.fromkeys(part for name in files for part in name.split(b"/")[:-1])
    lacking: dict[str, str] = {}
    for folder in folders:
        column_name, equals, _ = folder.decode(errors="replace").partition("=")
        if equals and column_name not in known:
            lacking.setdefault(column_name, folder.decode(errors="replace"))
    if lacking:
        found.append(
            f"the table is partitioned ({', '.join(lacking.values()):.200}), and a column that is "
            f"only in the names of folders isn't read: {_shown(list(lacking))}. Write such columns "
            "into the files too, or write the table without partitions"
        )
    for text in found:
        warnings.warn(f"{url}: {text}.", PenstockWarning, stacklevel=11)


def kind_of(values: Sequence[bytes]) -> FieldType:
    """Return the type of binary values: images if the first bytes of all of them are those of
    images, else bytes."""
    from penstock.readers.fieldtypes import Image

    image = Image()
    heads = [value[: image.head_bytes] for value in values if value]
    is_image = heads and all(image.check_head(head) is None for head in heads)
    return image if is_image else Bytes()


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
        for name, column in columns.items():
            first, its_entry = found.setdefault(name, (column, entry))
            if pa.types.is_null(first.arrow):
                found[name] = column, entry
            elif not (pa.types.is_null(column.arrow) or _agree(first, column, given.get(name))):
                raise DatasetError(
                    f'{printable(entry.name)}: its column "{name}" holds {column.arrow} at '
                    f"{list(column.path)}, and in {printable(its_entry.name)} it holds "
                    f"{first.arrow} at {list(first.path)}. Write both alike, read them as two "
                    "datasets, or declare a type that both can become: "
                    f'schema={{"{name}": …}}.'
                )
    return [column for column, _ in found.values()]


def _agree(first: ArrowColumn, other: ArrowColumn, given: FieldType | None) -> bool:
    """Return True if a column of two files is one field. given: the declared type."""
    if first.path != other.path:
        return False
    if given is not None and misfit(given, other.arrow) is None:
        return True
    if first.tensor != other.tensor or (first.refusal is None) != (other.refusal is None):
        return False
    return first.refusal is not None or first.type == other.type
