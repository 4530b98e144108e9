"""Recognise and list folders of files that hold one sample each, grouped into virtual shards.

The code that turns files into candidates is imported only when a folder is indexed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.readers.files import is_passed_over, kind_of, unsafe_reason
from penstock.readers.formats.format import DatasetFiles, Format, Listing, Snapshot
from penstock.readers.origin import (
    LocalFolder,
    QuarantineEntry,
    not_a_folder_message,
    not_found_message,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.formats.span_listing import SpanListing
    from penstock.readers.origin import Entry, Origin


class FolderFormat(Format):
    """The format of folders of images, in one sub-folder for each class or directly in the root.

    The modification times of a local folder's directories show whether files were added or removed,
    so it isn't listed each time it is opened. A file that changed in place is found when it is
    read, by its size and CRC-32C.
    """

    name: ClassVar[str] = "folder"
    is_file_per_sample: ClassVar[bool] = True
    keeps_facts: ClassVar[bool] = True

    def list(self, origin: Origin) -> SpanListing:
        """List all files. Raises as `list_folder` does."""
        # Opening an existing index doesn't need this module.
        from penstock.readers.formats.folder.folder_listing import FolderFiles

        return FolderFiles(origin, list_folder(origin))

    def is_current(
        self, origin: Origin, snapshot: Snapshot, listing: Callable[[], Listing]
    ) -> bool:
        """Return True if no directory's time has changed, or for a remote dataset no file."""
        if isinstance(origin, LocalFolder) and origin.selection is None:
            return not origin.changed_directories(snapshot.directories)
        return listing().snapshot().fingerprint == snapshot.fingerprint

    def recognises(self, origin: Origin) -> bool:
        """Return True for a folder, and for images that a URL names.

        This is the last format that is tried. If a folder isn't one of images, listing it raises an
        error that explains what is wrong.
        """
        if origin.selection is None:
            return True
        names = origin.names().files
        return not origin.selection.is_one and all(kind_of(name) == "image" for name in names)

    def has_default_names(self, origin: Origin) -> bool:
        """Return True if the places of fields are none of the folder's folders and patterns, so
        that they can only be names of fields."""
        arrangement = origin.arrangement
        if arrangement.manifest or origin.selection is not None:
            return False
        folders = {os.fsdecode(name) for name in origin.names().folders}
        places = [place for _, place in arrangement.places]
        tops = [place.removeprefix("./").partition("/")[0] for place in places]
        return not any("*" in place for place in places) and folders.isdisjoint(tops)


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


FORMAT = FolderFormat()
