"""List the files of a folder by name, size and time. None is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.readers.files import is_passed_over, kind_of, unsafe_reason
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.origin import QuarantineEntry, not_a_folder_message, not_found_message

if TYPE_CHECKING:
    from penstock.readers.origin import Entry, Origin


def list_folder(origin: Origin) -> DatasetFiles:
    """List all files of a folder, sorted by name as bytes, or those that a URL names.

    Raises DatasetNotFoundError (the folder is missing or empty), ConfigError (it is a file),
    FetchError, DatasetError (a directory can't be listed).
    """
    if origin.selection is not None:
        if origin.selection.is_one:
            raise ConfigError(not_a_folder_message(origin.url))
        return DatasetFiles(entries=sorted(origin.entries(bool), key=lambda file: file.name))
    found: list[Entry] = []
    quarantined: list[QuarantineEntry] = []
    directories: dict[bytes, int] = {}
    is_empty = True
    for text, known in origin.list_below("", directories=directories):
        is_empty = False
        name = os.fsencode(text)
        reason = unsafe_reason(name)
        if reason is None:
            if not name or name[-1:] == b"/" or any(map(is_passed_over, name.split(b"/"))):
                continue
            entry = known or origin.entry(name)
            if entry is not None:
                found.append(entry)
                continue
            reason = "not a regular file, or a symbolic link that leads to none"
        is_data = kind_of(name) is not None
        quarantined.append(QuarantineEntry(name=name, reason=reason, is_counted=is_data))
    if is_empty and (kind := origin.root_kind()) != "folder":
        if kind == "file":
            raise ConfigError(not_a_folder_message(origin.url))
        raise DatasetNotFoundError(not_found_message(origin.url))
    if not found and not quarantined:
        raise DatasetNotFoundError(
            f"{origin.url}: the folder is empty. Wanted images, in one sub-folder for each class "
            "or directly in it."
        )
    return DatasetFiles(
        entries=sorted(found, key=lambda file: file.name),
        directories=directories,
        quarantined=sorted(quarantined, key=lambda q: q.name),
    )
