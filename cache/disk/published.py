"""Finding whole blobs in a cache folder: all that a hit needs, and all that a cache gives which
can't be written."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
from crc32c import crc32c

from penstock.cache.base.folders import StrangeFileError
from penstock.cache.base.locks import ReaderLocks, wait_for
from penstock.cache.base.mapping import Map
from penstock.cache.disk.catalogue import recalled
from penstock.cache.disk.layout import Layout
from penstock.cache.errors import StalledError

if TYPE_CHECKING:
    from numpy.typing import NDArray

CRC_BLOCK = 2**20
_EVICTOR_S = 5.0


class Published:
    """A cache folder to read from, by one process. As it stands it takes no locks and changes
    nothing: for a folder that can't be written, where nobody evicts either."""

    can_write = False

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.readers: ReaderLocks | None = None

    @classmethod
    def at(cls, root: str, *, mode: int = 0o700) -> Published | None:
        """A folder of this user's, or of root's alone; None if it isn't a cache or can't be
        read. Raises ConfigError for a newer format."""
        try:
            layout = Layout(root, mode=mode, reads_roots=True)
            layout.check_format()
        except OSError:
            return None
        return cls(layout)

    @property
    def max_bytes(self) -> int | None:
        """The limit; None where nothing can be written."""
        return None

    def close(self) -> None:
        """Safe to call twice."""

    def has(self, key: str) -> bool:
        """Whether a whole blob is there."""
        return self.layout.blobs.has(key)

    def published(self, key: str, size_bytes: int | None) -> Map | None:
        """Map a whole blob; None if it isn't there. One of another size isn't that blob."""
        try:
            fd = self.layout.blobs.open(key)
        except FileNotFoundError:
            return self.published(key, size_bytes) if self._from_before(key) else None
        except StrangeFileError:
            self._wrong(key)
            return None
        except PermissionError:
            if self.can_write:
                raise
            return None
        try:
            found = os.fstat(fd)
            if found.st_size == 0 or (size_bytes is not None and found.st_size != size_bytes):
                self._wrong(key)
                return None
            mapped = self._map(fd, found.st_ino, what=self.layout.blob(key))
        finally:
            os.close(fd)
        if mapped is not None:
            self._note_use(key)
        return mapped

    def _map(self, fd: int, inode: int, *, what: str) -> Map | None:
        readers = self.readers
        if readers is None:
            return Map(fd)
        # An evictor holds it for a moment only, whether it takes the file or not.
        try:
            wait_for(lambda: readers.hold(inode), timeout_s=_EVICTOR_S, what=what)
        except StalledError:
            return None
        try:
            if os.fstat(fd).st_nlink:
                return Map(fd, on_unmap=lambda: readers.let_go(inode))
        except BaseException:
            readers.let_go(inode)
            raise
        readers.let_go(inode)
        return None

    def recall(self, path: str) -> tuple[bool, tuple[int, str] | None]:
        """What a store said of a name, see Catalogue.recall."""
        # Read as they lie: a log that nobody has put into the books is left out.
        place = os.path.join(os.readlink(f"/proc/self/fd/{self.layout.top.fd}"), "catalogue.db")
        with contextlib.suppress(sqlite3.Error, OSError):
            self.layout.top.check("catalogue.db")
            books = sqlite3.connect(f"{_uri(place)}?immutable=1", uri=True)
            with contextlib.closing(books):
                return recalled(books, path)
        return False, None

    def _from_before(self, key: str) -> bool:
        """Whether a blob of before the last boot was taken over."""
        del key
        return False

    def _wrong(self, key: str) -> None:
        """What stands there isn't the blob."""

    def _note_use(self, key: str) -> None:
        """It was used now."""


def _uri(path: str) -> str:
    return "file:" + quote(path)


def block_crcs(fd: int) -> bytes:
    """CRC-32C of each MiB of a file, little-endian uint32. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    room = bytearray(CRC_BLOCK)
    found: NDArray[np.uint32] = np.zeros(-(-size_bytes // CRC_BLOCK), "<u4")
    for i in range(len(found)):
        got = os.preadv(fd, [room], i * CRC_BLOCK)
        found[i] = crc32c(memoryview(room)[:got])
    return found.tobytes()


def crcs_of(data: memoryview) -> bytes:
    """The same of bytes in memory."""
    blocks = (data[at : at + CRC_BLOCK] for at in range(0, len(data), CRC_BLOCK))
    return b"".join(int(crc32c(block)).to_bytes(4, "little") for block in blocks)
