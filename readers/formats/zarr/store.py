"""Looking at a hierarchy's files before there is an index: documents, folders, chunks' names.

Local folders are scanned, remote ones listed by prefix, an array at a time; a group's own listing
never goes down into its arrays, which may have a million chunks.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.readers.files.names import below, is_passed_over, unsafe_reason
from penstock.readers.formats.local_files import read_file_into
from penstock.readers.origin.absent import NOT_THERE, not_seen
from penstock.readers.origin.local import LocalFolder, leads_to_folder
from penstock.readers.origin.origin import Entry
from penstock.readers.origin.remote import RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.origin.origin import Origin
    from penstock.readers.types import Encoded

Range = tuple[Entry, int, int]
"""First byte and end in a file."""


class Store(Protocol):
    """The files of a hierarchy. Names are below its root. Raises FetchError, DatasetError."""

    def entry(self, name: bytes) -> Entry | None:
        """A file, or None if it isn't there."""

    def folders(self, name: bytes) -> list[bytes]:
        """Names of the folders directly in one, sorted."""

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """All files below a folder, at most so many folders deep; none if it isn't there."""

    def read(self, ranges: Sequence[Range]) -> list[Encoded]:
        """Parts of files, remote ones all at once."""


def store_of(origin: Origin) -> Store:
    """The files of a dataset."""
    if isinstance(origin, LocalFolder):
        return LocalStore(origin)
    if isinstance(origin, RemoteFolder):
        return RemoteStore(origin)
    raise TypeError(f"unknown origin {origin!r}")


class LocalStore:
    """A hierarchy in a local folder."""

    def __init__(self, origin: LocalFolder) -> None:
        self._origin = origin

    def entry(self, name: bytes) -> Entry | None:
        """A file, or None if it isn't there."""
        return self._origin.entry(name)

    def folders(self, name: bytes) -> list[bytes]:
        """Names of the folders directly in one, sorted."""
        return sorted(each.name for each in self._scan(name) if leads_to_folder(each))

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """All files below a folder."""
        for found in self._scan(name):
            path = os.path.join(name, found.name)
            if not leads_to_folder(found):
                if (entry := _file(path, found)) is not None:
                    yield entry
            elif depth > 0:
                yield from self.walk(path, depth - 1)

    def read(self, ranges: Sequence[Range]) -> list[Encoded]:
        """Parts of files."""
        found: list[Encoded] = []
        for entry, start, end in ranges:
            data = np.empty(end - start, np.uint8)
            path = below(self._origin.root, entry.name)
            read_file_into(path, data, name=entry.name, start=start, is_rest=False)
            found.append(data)
        return found

    def _scan(self, name: bytes) -> list[os.DirEntry[bytes]]:
        path = os.path.join(self._origin.root, name) if name else self._origin.root
        try:
            with os.scandir(path) as found:
                return [each for each in found if not is_passed_over(each.name)]
        except OSError as error:
            if error.errno in NOT_THERE:
                return []
            raise not_seen(path, error, is_folder=True) from error


def _file(name: bytes, found: os.DirEntry[bytes]) -> Entry | None:
    try:
        facts = found.stat()
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise not_seen(found.path, error) from error
    if not stat.S_ISREG(facts.st_mode):
        return None
    return Entry(name=name, size_bytes=facts.st_size, mtime_ns=facts.st_mtime_ns, version="")


class RemoteStore:
    """A hierarchy in a folder of a remote store."""

    def __init__(self, origin: RemoteFolder) -> None:
        self._origin = origin

    def entry(self, name: bytes) -> Entry | None:
        """An object, or None if it isn't there."""
        return self._origin.entry(name)

    def folders(self, name: bytes) -> list[bytes]:
        """Names of the folders directly in one, sorted."""
        _, folders = self._origin.remote.fetcher.top(os.fsdecode(name))
        return sorted(each for each in map(os.fsencode, folders) if not is_passed_over(each))

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """All objects below a folder, however deep."""
        del depth
        for found in self._origin.remote.fetcher.walk(os.fsdecode(name)):
            path = os.fsencode(found.path)
            if unsafe_reason(path) is None:
                yield Entry(
                    name=path, size_bytes=found.size_bytes, mtime_ns=0, version=found.version
                )

    def read(self, ranges: Sequence[Range]) -> list[Encoded]:
        """Parts of objects, kept nowhere."""
        return self._origin.read_ranges(ranges)
