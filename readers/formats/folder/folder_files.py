"""List the files of a folder by name, size and time. None is read."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.readers.files import is_passed_over, printable, unsafe_reason
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.origin import (
    NOT_FOUND,
    Entry,
    LocalFolder,
    QuarantineEntry,
    RemoteFolder,
    cannot_examine,
    not_a_folder_message,
    not_found_message,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.readers.origin import Origin


def list_folder(origin: Origin) -> DatasetFiles:
    """List all files of a folder, sorted by name as bytes, or those that a URL names.

    Raises DatasetNotFoundError (the folder is missing or empty), ConfigError (it is a file),
    FetchError, DatasetError (a directory can't be listed).
    """
    quarantined: list[QuarantineEntry] = []
    directories: dict[bytes, int] = {}
    if origin.selection is not None:
        if origin.selection.is_one:
            raise ConfigError(not_a_folder_message(origin.url))
        found = origin.top(bool).entries
    elif isinstance(origin, RemoteFolder):
        found = list(_walk_remote(origin, quarantined))
    else:
        assert isinstance(origin, LocalFolder)
        found = list(_walk_local(origin, directories, quarantined))
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


def _walk_local(
    origin: LocalFolder, directories: dict[bytes, int], quarantined: list[QuarantineEntry]
) -> Iterator[Entry]:
    root = status_of(origin.root)
    if root is None:
        raise DatasetNotFoundError(not_found_message(printable(origin.root)))
    if not stat.S_ISDIR(root.st_mode):
        raise ConfigError(not_a_folder_message(printable(origin.root)))
    for folder, mtime_ns, files, _ in origin.walk(skip=is_passed_over):
        if mtime_ns is None:
            reason = "a symbolic link that leads back to a folder above it"
            quarantined.append(QuarantineEntry(name=folder, reason=reason))
            continue
        directories[folder] = mtime_ns
        for each in files:
            name = os.path.join(folder, each.name)
            if isinstance(file := _local_file(name, each), Entry):
                yield file
            else:
                quarantined.append(QuarantineEntry(name=name, reason=file))


def _local_file(name: bytes, entry: os.DirEntry[bytes]) -> Entry | str:
    try:
        found = entry.stat()
    except OSError as error:
        # A failing mount or a missing permission isn't a fault of the file.
        if error.errno not in NOT_FOUND:
            raise cannot_examine(entry.path, error) from error
        what = (
            "a symbolic link that leads to no file" if entry.is_symlink() else "can't be examined"
        )
        return f"{what} ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")


def _walk_remote(origin: RemoteFolder, quarantined: list[QuarantineEntry]) -> Iterator[Entry]:
    is_empty = True
    for _, found in origin.list_below(""):
        is_empty = False
        name = found.name if found is not None else b""
        reason = unsafe_reason(name)
        if reason is not None:
            quarantined.append(QuarantineEntry(name=name, reason=reason))
        elif (
            found and name and name[-1:] != b"/" and not any(map(is_passed_over, name.split(b"/")))
        ):
            yield found
    if is_empty:
        if origin.remote.fetcher.info("") is not None:
            raise ConfigError(not_a_folder_message(origin.url))
        raise DatasetNotFoundError(not_found_message(origin.url))


def changed_directories(origin: LocalFolder, directories: Mapping[bytes, int]) -> list[bytes]:
    """Return the directories whose modification time differs from the recorded one.

    Files were added, removed or renamed there.
    """
    changed = []
    for name, mtime_ns in directories.items():
        try:
            is_same = os.stat(os.path.join(origin.root, name)).st_mtime_ns == mtime_ns
        except OSError:  # removed, or no longer accessible
            is_same = False
        if not is_same:
            changed.append(name)
    return changed
