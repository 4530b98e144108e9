"""Which columns of a table's files are fields, under which names and types."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError, DatasetError
from penstock.readers.fields.field_types import PRESENT, Bytes, is_field_name
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.arrow.types import misfit, settled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.types import ArrowColumn
    from penstock.readers.origin.arrangement import Arrangement

_log = logging.getLogger("penstock")
_SHOWN, _TOLD = 20, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldChoice:
    """The fields that a user's arguments make of a file's columns.

    columns, types: by field, in order; a type is None where the first values have to tell.
    left_out: columns that are no field, by name, and why.
    """

    columns: Mapping[str, ArrowColumn]
    types: Mapping[str, FieldType | None]
    left_out: Mapping[str, str]


def choose(columns: Sequence[ArrowColumn], arrangement: Arrangement, *, file: str) -> FieldChoice:
    """The fields of a file's columns. file: its name, for people.

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
        why = column.refusal if type is None else misfit(type, column.arrow)
        if why is None:
            types[name] = column.type if type is None else settled(type, column.arrow)
            continue
        if type is not None:
            raise ConfigError(f'schema["{name}"]: got {why} ({file}).')
        if column.name in renamed:
            raise DatasetError(f'fields["{name}"]: {file}: the column "{column.name}": {why}.')
        left_out[name] = why
        del found[name]
    return FieldChoice(columns=found, types=types, left_out=left_out)


def _shown(there: Mapping[str, object]) -> str:
    names = list(there)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{names[:_SHOWN]}{more}"


def tell_left_out(url: str, choice: FieldChoice) -> None:
    """Say once which columns are no fields, and why."""
    if choice.left_out:
        told = [f'"{name}" ({why})' for name, why in choice.left_out.items()]
        more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        _log.warning("%s: columns that are no fields: %s%s.", url, "; ".join(told[:_TOLD]), more)


def no_field(url: str, choice: FieldChoice) -> DatasetError:
    """The error for files none of whose columns is a field."""
    told = "; ".join(f'"{name}": {why}' for name, why in list(choice.left_out.items())[:_TOLD])
    return DatasetError(f"{url}: no column can be a field ({told}).")


def kind_of(values: Sequence[bytes]) -> FieldType:
    """What binary values are, by the first bytes of some of them: pictures, sound or video where
    all are, else bytes."""
    from penstock.readers.fields.field_types import Audio, Image, Video
    from penstock.readers.fields.heads import HEAD_BYTES, refusal_by_head

    heads = [value[:HEAD_BYTES] for value in values if value]
    for type in (Image(), Audio(), Video()):
        if heads and all(refusal_by_head(type, head) is None for head in heads):
            return type
    return Bytes()
