"""What an image folder holds: a listing in a fixed order, classes, and groups of files as shards.

Class = first-level sub-folder, files below it recursively: torchvision's ImageFolder, in its order.
Many small files are grouped into virtual shards by a hash of their names, so that a shard mixes
classes as the whole does: groups in listing order would hold one class each, and no practical
shuffle window could mend that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.files.names import is_passed_over, printable, unsafe_reason
from penstock.readers.formats.grouping import Grouping, grouping
from penstock.readers.origin.absent import not_a_folder, not_seen, nothing_there
from penstock.readers.origin.local import LocalFolder, leads_to_folder
from penstock.readers.origin.origin import Entry
from penstock.readers.origin.quarantine import QuarantineEntry
from penstock.readers.origin.remote import RemoteFolder
from penstock.readers.origin.unread import check_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.readers.origin.origin import Origin

VIRTUAL_SHARD_BYTES = 64 * 2**20
"""Mean size of a virtual shard: what one fetch of an object store moves well (8 ranges of 8 "
"MiB)."""

# Part of the index format: another salt is another order of every folder.
_GROUP_SALT = b"penstock-group-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderListing:
    """A folder's candidates, before anything was read.

    files: sorted by class, folder and name, as bytes. sizes: bytes, int64, shape (files,).
    labels: int64, shape (files,), or None without class folders; classes: names by label.
    directories: modification time in ns of each local folder that was listed, by name.
    quarantined: what can't be a candidate. passed_over: files of other kinds, by extension.
    """

    files: list[Entry]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    directories: Mapping[bytes, int]
    quarantined: list[QuarantineEntry]
    passed_over: dict[str, int] = field(default_factory=dict)


def list_folder(origin: Origin) -> FolderListing:
    """All candidates of a folder.

    Raises DatasetNotFoundError (missing, empty), ConfigError (a file), FetchError, DatasetError (a
    folder that may not be listed).
    """
    quarantined: list[QuarantineEntry] = []
    directories: dict[bytes, int] = {}
    if isinstance(origin, LocalFolder):
        found = list(_walk_local(origin, directories, quarantined))
    elif isinstance(origin, RemoteFolder):
        found = list(_walk_remote(origin, quarantined))
    else:
        raise TypeError(f"unknown origin {origin!r}")
    if not found and not quarantined:
        raise DatasetNotFoundError(
            f"{origin.url}: the folder is empty. Wanted images, in one sub-folder a class or "
            "directly."
        )
    listing = _arrange(found, directories, quarantined)
    names = [file.name for file in found]
    passed_over = check_layout(origin.url, names, listing.classes)
    return replace(listing, passed_over=dict(passed_over))


def _arrange(
    found: Iterable[Entry], directories: Mapping[bytes, int], quarantined: list[QuarantineEntry]
) -> FolderListing:
    files = sorted(found, key=_order)
    classes = sorted({top for file in files if (top := _class_of(file.name)) is not None})
    if classes:
        reason = "not in a class folder (a file beside the class folders has no label)"
        stray = [file.name for file in files if _class_of(file.name) is None]
        quarantined = [*quarantined, *(QuarantineEntry(name=name, reason=reason) for name in stray)]
        files = [file for file in files if _class_of(file.name) is not None]
    label_of = {name: label for label, name in enumerate(classes)}
    labels = [label_of[top] for file in files if (top := _class_of(file.name)) is not None]
    return FolderListing(
        files=files,
        sizes=np.array([file.size_bytes for file in files], np.int64),
        labels=np.array(labels, np.int64) if classes else None,
        classes=tuple(os.fsdecode(name) for name in classes),
        directories=directories,
        quarantined=sorted(quarantined, key=lambda q: q.name),
    )


def _class_of(name: bytes) -> bytes | None:
    top, slash, _ = name.partition(b"/")
    return top if slash else None


def _order(file: Entry) -> tuple[bytes, bytes, bytes]:
    folder, _, base = file.name.rpartition(b"/")
    return file.name.partition(b"/")[0] if folder else b"", folder, base


def _walk_local(
    origin: LocalFolder, directories: dict[bytes, int], quarantined: list[QuarantineEntry]
) -> Iterator[Entry]:
    try:
        root = os.stat(origin.root)
    except (FileNotFoundError, NotADirectoryError):
        raise DatasetNotFoundError(nothing_there(printable(origin.root))) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DatasetNotFoundError(nothing_there(printable(origin.root))) from None
        raise _not_listed(origin.root, error) from error
    if not stat.S_ISDIR(root.st_mode):
        raise ConfigError(not_a_folder(printable(origin.root)))
    # Each folder comes with the identities of those above it: a link back to one of them is a loop.
    stack: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(b"", frozenset())]
    while stack:
        folder, above = stack.pop()
        path = os.path.join(origin.root, folder) if folder else origin.root
        try:
            found = os.stat(path)
            identity = (found.st_dev, found.st_ino)
            if identity in above:
                reason = "a symbolic link that leads back to a folder above it"
                quarantined.append(QuarantineEntry(name=folder, reason=reason))
                continue
            # Before the scan: what is added while it runs must look newer than it.
            directories[folder] = found.st_mtime_ns
            with os.scandir(path) as entries:
                inside = [entry for entry in entries if not is_passed_over(entry.name)]
        except OSError as error:
            raise _not_listed(path, error) from error
        for entry in inside:
            name = os.path.join(folder, entry.name) if folder else entry.name
            if leads_to_folder(entry):
                stack.append((name, above | {identity}))
            elif isinstance(file := _local_file(name, entry), Entry):
                yield file
            else:
                quarantined.append(QuarantineEntry(name=name, reason=file))


def _local_file(name: bytes, entry: os.DirEntry[bytes]) -> Entry | str:
    try:
        found = entry.stat()
    except FileNotFoundError:
        return "a symbolic link to nothing" if entry.is_symlink() else "it vanished while listed"
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "a symbolic link that leads back to itself"
        # A file that is denied is told and left out; a mount that fails is no file's fault.
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG):
            raise not_seen(entry.path, error) from error
        return f"can't be looked at ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return "not a regular file"
    return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")


def _not_listed(path: bytes, error: OSError) -> DatasetError:
    return DatasetError(
        f"{printable(path)}: the folder can't be listed ({error.strerror}). Give this user the "
        "right to read it, or take it out of the dataset."
    )


def _walk_remote(origin: RemoteFolder, quarantined: list[QuarantineEntry]) -> Iterator[Entry]:
    for found in origin.walk():
        name = found.name
        reason = unsafe_reason(name)
        if reason is not None:
            quarantined.append(QuarantineEntry(name=name, reason=reason))
        elif name and not name.endswith(b"/") and not any(map(is_passed_over, name.split(b"/"))):
            yield found


def changed_directories(origin: LocalFolder, directories: Mapping[bytes, int]) -> list[bytes]:
    """Folders whose time differs from the one noted: files came, went or were renamed there."""
    return [name for name, mtime_ns in directories.items() if _mtime_ns(origin, name) != mtime_ns]


def _mtime_ns(origin: LocalFolder, name: bytes) -> int | None:
    try:
        return os.stat(os.path.join(origin.root, name)).st_mtime_ns
    except OSError:  # gone, or not ours to see any more: changed either way
        return None


def virtual_shards(listing: FolderListing, *, shard_bytes: int = VIRTUAL_SHARD_BYTES) -> Grouping:
    """Group a listing's files into about total bytes / shard_bytes shards by a hash of their names.

    Depends on names and sizes alone, and is decided before any file is judged, so that an index and
    an unshuffled pack agree.
    """
    count = max(1, -(-int(listing.sizes.sum()) // shard_bytes))
    if count == 1:
        return grouping(np.zeros(len(listing.files), np.int64))
    hashes = (
        hashlib.blake2b(file.name, digest_size=8, key=_GROUP_SALT).digest()
        for file in listing.files
    )
    numbers = np.frombuffer(b"".join(hashes), "<u8") % np.uint64(count)
    return grouping(numbers.astype(np.int64))
