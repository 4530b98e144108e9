"""Read the whole blobs and fills of the node's cache folder for other nodes, without changing it.

As for every reader, a shared lock on its inode protects each open file from eviction; the file must
still have its name after the lock is acquired. Only `blobs/` and `fills/` are read, and only by
keys.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from penstock.cache.base import ReaderLocks
from penstock.cache.disk import (
    CRCS_QUERY,
    HELD_QUERY,
    FillMarks,
    FolderLayout,
    as_database_errors,
    map_name,
    part_name,
    read_crcs,
)
from penstock.cache.peers.protocol import is_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base import Folder

_MOST_LISTED = 64
_MOST_NOTES = 2**13
"""The most blobs whose block checksums are in memory; a blob of 64 MiB has 256 bytes."""


class HeldFile:
    """A file that is open and protected from eviction until close().

    size_bytes: the size of the blob. marks: the marks of its present pieces, None if it is whole.
    crcs: the checksums of its blocks, None if unknown.
    """

    def __init__(self, readers: ReaderLocks, fd: int, found: os.stat_result) -> None:
        self._readers = readers
        self.fd, self.size_bytes, self.inode = fd, found.st_size, found.st_ino
        self.marks: FillMarks | None = None
        self.crcs: bytes | None = None

    def has(self, start: int, end: int) -> bool:
        """Return True if bytes [start, end) are present."""
        if not 0 <= start < end <= self.size_bytes:
            return False
        return self.marks is None or self.marks.has(start, end)

    def close(self) -> None:
        """Close the file and release its lock. Safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._readers.release(self.inode)


class HeldFiles:
    """The blobs and fills of one cache folder. Safe for several threads.

    root, mode: the path and the permission bits of the cache. Raises OSError if the folder isn't a
    cache.
    """

    def __init__(self, root: str, *, mode: int) -> None:
        self._layout = FolderLayout(root, mode=mode)
        self._readers = ReaderLocks(self._layout.top.open_or_create("readers.lock"))
        self._catalogue: sqlite3.Connection | None = None
        self._catalogue_inode = 0
        self._lock = threading.Lock()  # of the catalogue's connection and the notes
        self._notes: dict[tuple[str, int], bytes] = {}

    def open(self, key: str) -> HeldFile | None:
        """Open a blob or its fill; None if there is none, or it is being evicted. key: 40
        hexadecimal digits."""
        layout = self._layout
        # The fill may be published between the first two attempts.
        for folder, name in (
            (layout.blobs, key),
            (layout.fills, part_name(key)),
            (layout.blobs, key),
        ):
            try:
                if (found := self._open(folder, name, key)) is not None:
                    return found
            except (OSError, ValueError):
                continue
        return None

    def _open(self, folder: Folder, name: str, key: str) -> HeldFile | None:
        fd = folder.open(name)
        try:
            found = os.fstat(fd)
            if not found.st_size or not self._readers.acquire(found.st_ino):
                os.close(fd)
                return None
        except BaseException:
            os.close(fd)
            raise
        file = HeldFile(self._readers, fd, found)
        try:
            if folder is self._layout.fills:
                file.marks = OwnedMarks(folder.open(map_name(key)), file.size_bytes)
            else:
                file.crcs = self._crcs(key, file)
            # Checked after the map is opened, as a fill's map is removed after its part file.
            if not os.fstat(fd).st_nlink:
                file.close()
                return None
        except BaseException:
            file.close()
            raise
        return file

    # -- the catalogue, which may be incomplete

    def _crcs(self, key: str, file: HeldFile) -> bytes | None:
        noted = self._notes.get((key, file.inode))
        if noted is None:
            with contextlib.suppress(sqlite3.DatabaseError):
                noted = read_crcs(next(self._query(CRCS_QUERY, key), None), file.size_bytes)
            if noted is not None:
                with self._lock:
                    self._notes[key, file.inode] = noted
                    while len(self._notes) > _MOST_NOTES:
                        del self._notes[next(iter(self._notes))]
        return noted

    def keys_of(self, group: str, *, most: int) -> Iterator[str]:
        """Return the sorted keys of a group's whole blobs, as listed in the catalogue."""
        return (row[0] for row in self._query(HELD_QUERY, group, most) if is_key(row[0]))

    def any_key(self) -> str | None:
        """Return the key of the largest among the first 64 whole blobs found; None if there is
        none. Raises no errors."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError), os.scandir(self._layout.blobs.fd) as entries:
            for entry in itertools.islice(entries, _MOST_LISTED):
                if is_key(entry.name):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return max(sizes, key=lambda key: (sizes[key], key), default=None)

    def _query(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """Query the catalogue; yield nothing if it can't be read or is being rebuilt."""
        with self._lock:
            with contextlib.suppress(sqlite3.Error, OSError), as_database_errors():
                inode = self._layout.top.stat("catalogue.db").st_ino
                if self._catalogue is None or inode != self._catalogue_inode:
                    self._close_catalogue()
                    self._layout.top.check("catalogue.db")
                    root = os.readlink(f"/proc/self/fd/{self._layout.top.fd}")
                    place = quote(os.path.join(root, "catalogue.db"))
                    self._catalogue = sqlite3.connect(
                        f"file:{place}?mode=ro", uri=True, timeout=0.1, check_same_thread=False
                    )
                    self._catalogue_inode = inode
                yield from self._catalogue.execute(query, values)
                return
            self._close_catalogue()

    def _close_catalogue(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        if catalogue is not None:
            catalogue.close()

    def close(self) -> None:
        """Close the folder."""
        self._close_catalogue()
        self._readers.close()


class OwnedMarks(FillMarks):
    """Marks that own their map's descriptor, and close it with their last reference."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._owned = fd
        super().__init__(fd, size_bytes)

    def __del__(self) -> None:
        os.close(self._owned)
