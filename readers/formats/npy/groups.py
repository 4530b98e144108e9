"""Which arrays belong together: those of one archive, or the files of several fields."""

from __future__ import annotations

import fnmatch
import logging
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields.field_types import is_field_name
from penstock.readers.files.names import is_passed_over, printable
from penstock.readers.formats.npy.archive import read_archives
from penstock.readers.formats.npy.stored import read_arrays
from penstock.readers.origin.unread import extension

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.npy.stored import StoredArray, StoredFile
    from penstock.readers.origin.origin import Entry, Origin

_log = logging.getLogger("penstock")

FIELD = "array"
"""The field of .npy files."""

EXTENSIONS = frozenset(("npy", "npz"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Arrays of the same samples, by field. name: of their file, the first of several. left_out:
    what else is there, and why it is no field."""

    name: bytes
    arrays: Mapping[str, StoredArray]
    left_out: Mapping[str, str] = field(default_factory=dict)


def list_entries(origin: Origin) -> list[Entry]:
    """The files of a dataset, in order. Raises DatasetNotFoundError, ConfigError, FetchError."""
    top = origin.top(_is_ours)
    if origin.selection is not None and top.others:
        raise ConfigError(
            f"{origin.url}: {printable(top.others[0])} isn't called *.npy or *.npz. Name files of "
            "one kind."
        )
    if not top.entries:
        missing = f", and {printable(top.missing[0])} leads nowhere" if top.missing else ""
        raise DatasetNotFoundError(f"{origin.url}: no *.npy or *.npz file is there{missing}.")
    kinds = {extension(entry.name) for entry in top.entries}
    if len(kinds) > 1:
        raise ConfigError(
            f"{origin.url}: holds .npy and .npz files. Name those of one kind, such as "
            f"{origin.url.rstrip('/')}/*.npy."
        )
    return top.entries


def _is_ours(name: bytes) -> bool:
    return extension(name) in EXTENSIONS and not is_passed_over(name.rpartition(b"/")[2])


def read_groups(origin: Origin, entries: Sequence[Entry], *, workers: int) -> list[Group]:
    """The arrays of all files, by their headers. Raises ConfigError, DatasetError, FetchError."""
    places = dict(origin.arrangement.places)
    if extension(entries[0].name) == "npz":
        return [
            _members(stored, places, url=origin.url)
            for stored in read_archives(origin, entries, workers=workers)
        ]
    fields = _files_of(entries, places, url=origin.url)
    wanted = [entry for files in fields.values() for entry in files]
    found = dict(zip(wanted, read_arrays(origin, wanted, workers=workers), strict=True))
    return [
        Group(
            name=together[0].name,
            arrays={name: found[e] for name, e in zip(fields, together, strict=True)},
        )
        for together in zip(*fields.values(), strict=True)
    ]


def _files_of(
    entries: Sequence[Entry], places: Mapping[str, str], *, url: str
) -> dict[str, list[Entry]]:
    """The files of each field."""
    if not places:
        return {FIELD: list(entries)}
    fields = {}
    for name, pattern in places.items():
        fits = [e for e in entries if fnmatch.fnmatchcase(os.fsdecode(e.name), pattern)]
        if not fits:
            raise ConfigError(
                f'fields: got {{"{name}": {pattern!r}}}, and no file of {url} is called so, such '
                f"as {printable(entries[0].name)}."
            )
        fields[name] = fits
    counts = {name: len(files) for name, files in fields.items()}
    if len(set(counts.values())) > 1:
        raise ConfigError(
            f"fields: the patterns fit different numbers of files ({counts}). Files of one dataset "
            "go together one by one, in the order of their names."
        )
    return fields


def _members(stored: StoredFile, places: Mapping[str, str], *, url: str) -> Group:
    """The fields of one archive."""
    shown = printable(stored.entry.name)
    arrays, refused = dict(stored.arrays), dict(stored.refused)
    if places:
        chosen = {}
        for name, member in places.items():
            key = member.removesuffix(".npy")
            if key in refused:
                raise DatasetError(f"{shown}: {member!r} can't be read: {refused[key]}.")
            if key not in arrays:
                raise ConfigError(
                    f'fields: got {{"{name}": {member!r}}}, and {shown} of {url} has no such '
                    f"array. It has {sorted(arrays)[:20]}."
                )
            chosen[name] = arrays[key]
        return Group(name=stored.entry.name, arrays=chosen)
    for name in list(arrays):
        if not is_field_name(name):
            refused[name] = "no field can have its name; say fields={name: member}"
            del arrays[name]
    if not arrays:
        told = "; ".join(f"{name}: {why}" for name, why in list(refused.items())[:5])
        raise DatasetError(
            f"{shown}: no array of it can be read ({told or 'it is empty'}). Write numbers with "
            "np.savez, or take the file out of the dataset."
        )
    for name, why in refused.items():
        _log.info("%s: %s of %s isn't a field: %s", url, name, shown, why)
    return Group(name=stored.entry.name, arrays=arrays, left_out=refused)
