"""Read the whole blobs and fills of the node's cache folder for other nodes, without changing it.

As for every reader, a shared lock on its inode protects each open file from eviction; the file must
still have its name after the lock is acquired. Only `blobs/` and `fills/` are read, and only by
keys.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sqlite3
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

_PROBE_STEP = 2**18
_MOST_LISTED = 64
_MOST_NOTES_BYTES = 2**22
"""The most bytes of block checksums in memory; a blob of 64 MiB has 256 bytes."""


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

    def fileno(self) -> int:
        """Return the descriptor, for sendfile."""
        return self.fd

    def has(self, start: int, end: int) -> bool:
        """Return True if bytes [start, end) are present."""
        if not 0 <= start < end <= self.size_bytes:
            return False
        return self.marks is None or self.marks.has(start, end)

    def held(self, around: int) -> list[tuple[int, int]]:
        """Return the spans of present bytes. around: see FillMarks."""
        return [(0, self.size_bytes)] if self.marks is None else self.marks.held(around)

    def is_in_memory(self, start: int, end: int) -> bool:
        """Return True if the page cache holds a sample of these bytes' pages, so that reading them
        hardly waits for the disk. True if the file system doesn't report it."""
        byte = bytearray(1)
        for at in (*range(start, end, _PROBE_STEP), end - 1):
            try:
                os.preadv(self.fd, [byte], at, os.RWF_NOWAIT)
            except OSError as error:
                return error.errno != errno.EAGAIN
        return True

    def advise(self, start: int, end: int) -> None:
        """Request that the kernel reads bytes ahead; doesn't wait."""
        os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_WILLNEED)

    def load(self, start: int, end: int) -> None:
        """Read bytes into the page cache, waiting for the disk."""
        buffer = bytearray(min(_PROBE_STEP, end - start))
        for at in range(start, end, len(buffer)):
            os.preadv(self.fd, [buffer], at)

    def close(self) -> None:
        """Close the file and release its lock. Safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._readers.release(self.inode)


class HeldFiles:
    """The blobs and fills of one cache folder. Not thread-safe.

    root, mode: the path and the permission bits of the cache. Raises OSError if the folder isn't a
    cache.
    """

    def __init__(self, root: str, *, mode: int) -> None:
        self._layout = FolderLayout(root, mode=mode)
        self._readers = ReaderLocks(self._layout.top.open_or_create("readers.lock"))
        self._catalogue: sqlite3.Connection | None = None
        self._catalogue_inode = 0
        self._notes: dict[tuple[str, int], bytes] = {}
        self._notes_bytes = 0

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
                self._notes[key, file.inode] = noted
                self._notes_bytes += len(noted)
                while self._notes_bytes > _MOST_NOTES_BYTES:
                    self._notes_bytes -= len(self._notes.pop(next(iter(self._notes))))
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
        with contextlib.suppress(sqlite3.Error, OSError), as_database_errors():
            inode = self._layout.top.stat("catalogue.db").st_ino
            if self._catalogue is None or inode != self._catalogue_inode:
                self._close_catalogue()
                self._layout.top.check("catalogue.db")
                root = os.readlink(f"/proc/self/fd/{self._layout.top.fd}")
                place = quote(os.path.join(root, "catalogue.db"))
                self._catalogue = sqlite3.connect(f"file:{place}?mode=ro", uri=True, timeout=0.1)
                self._catalogue_inode = inode
            yield from self._catalogue.execute(query, values)
            return
        self._close_catalogue()

    def _close_catalogue(self) -> None:
        catalogue, self._catalogue = self._catalogue, None
        if catalogue is not None:
            catalogue.close()

    @property
    def count(self) -> int:
        """The number of open files."""
        return self._readers.count

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
