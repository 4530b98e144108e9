"""Read the whole blobs and fills of the node's cache folder for other nodes, changing nothing.

Each file that is open here is protected from the evictor as by every reader: a shared lock that
stands for its inode, after which the file must still have its name. Nothing but `blobs/` and
`fills/` is looked into, and only by keys.
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
_MOST_LOOKED_AT = 64
_MOST_NOTES_BYTES = 2**22
"""So much is remembered of the blocks' checksums: of a blob of 64 MiB 256 bytes."""


class HeldFile:
    """A file that is held and open until close().

    size_bytes: of the blob. marks: of what is there, None where all is. crcs: of its blocks, None
    where they aren't known.
    """

    def __init__(
        self, readers: ReaderLocks, fd: int, found: os.stat_result, marks: FillMarks | None
    ) -> None:
        self._readers = readers
        self.fd, self.size_bytes, self.inode = fd, found.st_size, found.st_ino
        self.marks = marks
        self.crcs: bytes | None = None

    def fileno(self) -> int:
        """Its descriptor, for sendfile."""
        return self.fd

    def has(self, start: int, end: int) -> bool:
        """Whether all of these bytes are there."""
        if not 0 <= start < end <= self.size_bytes:
            return False
        return self.marks is None or self.marks.has(start, end)

    def held(self, around: int) -> list[tuple[int, int]]:
        """The spans of bytes that are there. around: see FillMarks."""
        return [(0, self.size_bytes)] if self.marks is None else self.marks.held(around)

    def is_in_memory(self, start: int, end: int) -> bool:
        """Whether reading these bytes hardly waits for the disk: a sample of their pages is in the
        page cache. True where the file system doesn't tell."""
        room = bytearray(1)
        for at in (*range(start, end, _PROBE_STEP), end - 1):
            try:
                os.preadv(self.fd, [room], at, os.RWF_NOWAIT)
            except OSError as error:
                return error.errno != errno.EAGAIN
        return True

    def advise(self, start: int, end: int) -> None:
        """Have the kernel read bytes ahead; nobody waits."""
        os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_WILLNEED)

    def load(self, start: int, end: int) -> None:
        """Have bytes in memory when this returns. For a thread that may wait for the disk."""
        room = bytearray(min(_PROBE_STEP, end - start))
        for at in range(start, end, len(room)):
            os.preadv(self.fd, [room], at)

    def close(self) -> None:
        """Let it go. Safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._readers.release(self.inode)


class HeldFiles:
    """The blobs and fills of one cache folder. For one thread.

    root, mode: as the cache has them. Raises OSError where that is no cache.
    """

    def __init__(self, root: str, *, mode: int) -> None:
        self._layout = FolderLayout(root, mode=mode)
        self._readers = ReaderLocks(self._layout.top.open_or_create("readers.lock"))
        self._books: sqlite3.Connection | None = None
        self._books_inode = 0
        self._notes: dict[tuple[str, int], bytes] = {}
        self._notes_bytes = 0

    def open(self, key: str) -> HeldFile | None:
        """Open a blob, whole or in the making; None if it isn't held, or is about to go. key: 40
        hex digits."""
        layout = self._layout
        # It may be published between the two looks.
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
        file = HeldFile(self._readers, fd, found, None)
        try:
            if folder is self._layout.fills:
                self._mark(file, key)
            else:
                file.crcs = self._crcs(key, file)
            # Behind the map's opening: what is removed with a fill goes after its part.
            if not os.fstat(fd).st_nlink:
                file.close()
                return None
        except BaseException:
            file.close()
            raise
        return file

    def _mark(self, file: HeldFile, key: str) -> None:
        """Give a fill its marks. Raises ValueError, OSError."""
        file.marks = OwnedMarks(self._layout.fills.open(map_name(key)), file.size_bytes)

    # -- the books, which only tell what is known

    def _crcs(self, key: str, file: HeldFile) -> bytes | None:
        noted = self._notes.get((key, file.inode))
        if noted is None:
            noted = None
            with contextlib.suppress(sqlite3.DatabaseError):
                noted = read_crcs(next(self._ask(CRCS_QUERY, key), None), file.size_bytes)
            if noted is not None:
                self._notes[key, file.inode] = noted
                self._notes_bytes += len(noted)
                while self._notes_bytes > _MOST_NOTES_BYTES:
                    self._notes_bytes -= len(self._notes.pop(next(iter(self._notes))))
        return noted

    def keys_of(self, group: str, *, most: int) -> Iterator[str]:
        """The keys of a group's whole blobs as far as the books know them, sorted."""
        return (row[0] for row in self._ask(HELD_QUERY, group, most) if is_key(row[0]))

    def any_key(self) -> str | None:
        """The key of a whole blob, a large one of those that are found first; None: there is none.
        Raises nothing."""
        sizes: dict[str, int] = {}
        with contextlib.suppress(OSError), os.scandir(self._layout.blobs.fd) as entries:
            for entry in itertools.islice(entries, _MOST_LOOKED_AT):
                if is_key(entry.name):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return max(sizes, key=lambda key: (sizes[key], key), default=None)

    def _ask(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        """What the books answer; nothing where they can't be read, or are made anew just now."""
        with contextlib.suppress(sqlite3.Error, OSError), as_database_errors():
            inode = self._layout.top.stat("catalogue.db").st_ino
            if self._books is None or inode != self._books_inode:
                self._close_books()
                self._layout.top.check("catalogue.db")
                root = os.readlink(f"/proc/self/fd/{self._layout.top.fd}")
                place = quote(os.path.join(root, "catalogue.db"))
                self._books = sqlite3.connect(f"file:{place}?mode=ro", uri=True, timeout=0.1)
                self._books_inode = inode
            yield from self._books.execute(query, values)
            return
        self._close_books()

    def _close_books(self) -> None:
        books, self._books = self._books, None
        if books is not None:
            books.close()

    @property
    def count(self) -> int:
        """How many files are held now."""
        return self._readers.count

    def close(self) -> None:
        """Let the folder go."""
        self._close_books()
        self._readers.close()


class OwnedMarks(FillMarks):
    """Marks that own their map's descriptor: closed with the last who looks at them."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._owned = fd
        super().__init__(fd, size_bytes)

    def __del__(self) -> None:
        os.close(self._owned)
