"""Write a blob while it is being filled: a preallocated file, and a map that marks present pieces.

A piece is 4 KiB of a single object, or one whole object of a blob of many. A process that fetches
pieces holds a byte-range lock on them, writes them and marks them. So small ranges for a batch and
large ranges of a background fill complement each other, no piece is fetched twice, and the locks of
a killed process are free at once. A mark is set after the write, so a marked piece is right until
the machine restarts; fills from before a reboot are dropped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache.base import ByteLocks, Folder
from penstock.cache.disk.catalogue import BLOCK_BYTES, crcs_of
from penstock.cache.disk.folder_layout import disk_bytes, map_name, part_name
from penstock.cache.disk.pieces import PIECE_BYTES, BlobPieces, PieceSpan

if TYPE_CHECKING:
    from collections.abc import Callable


HEADER_BYTES = 512
"""The size of a map's header; a byte for each piece follows it, 1 if the piece is present."""
_TEXT = 6  # where the version of all pieces begins, after 2 bytes of length and 4 of CRC-32C
_VERSION_LOCK = 2**62


class Fill:
    """A blob that is being filled, with its two open files. Several threads and processes may fill
    one blob."""

    def __init__(self, folder: Folder, key: str, pieces: BlobPieces) -> None:
        """Open an existing fill. Raises FileNotFoundError, ValueError and StrangeFileError if it is
        incomplete or another program's: then create it again with `make`."""
        self.key, self.pieces = key, pieces
        self.part = os.path.join(folder.path, part_name(key))
        self.fd = -1
        self.fd = folder.open(part_name(key), os.O_RDWR)
        found = os.fstat(self.fd)
        self.inode = found.st_ino
        with open(folder.open(map_name(key), os.O_RDWR), "r+b", buffering=0) as marks:
            wanted = (pieces.size_bytes, HEADER_BYTES + pieces.count)
            if (found.st_size, os.fstat(marks.fileno()).st_size) != wanted:
                raise ValueError(f"{self.part}: the fill has another size")
            self._memory = mmap.mmap(marks.fileno(), 0)
        self._crcs: dict[int, int] = {}
        self.marks = np.frombuffer(self._memory, np.uint8, pieces.count, HEADER_BYTES)

    @classmethod
    def make(cls, folder: Folder, key: str, pieces: BlobPieces) -> Fill:
        """Create both files, the part file last; the caller holds the key. Raises OSError (disk
        full)."""
        discard_fill(folder, key)
        # Preallocation reports a full disk before the download starts.
        sizes = {map_name(key): HEADER_BYTES + pieces.count, part_name(key): pieces.size_bytes}
        try:
            for name, size_bytes in sizes.items():
                with open(folder.create(name), "wb", buffering=0) as file:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
            return cls(folder, key, pieces)
        except BaseException:
            discard_fill(folder, key)
            raise

    @property
    def is_whole(self) -> bool:
        """True if all pieces are present."""
        return bool(self.marks.all())

    def missing(self, spans: list[PieceSpan]) -> list[PieceSpan]:
        """Return the parts of sorted spans whose pieces are missing."""
        result: list[PieceSpan] = []
        for low, high in spans:
            # bytes.find: numpy is slower on few marks.
            marks = self._memory[HEADER_BYTES + low : HEADER_BYTES + high]
            first = marks.find(0)
            while first >= 0:
                end = marks.find(1, first)
                result.append((low + first, high if end < 0 else low + end))
                first = marks.find(0, end) if end >= 0 else -1
        return result

    def missing_bytes(self) -> int:
        """Return the number of bytes that are missing."""
        return sum(b - a for a, b in map(self.pieces.span, self.missing([(0, self.pieces.count)])))

    @property
    def version(self) -> str | None:
        """The object's version that all pieces have; None before the first piece, and if the record
        is damaged. Then the next answer sets it; samples are checked in any case."""
        length = int.from_bytes(self._memory[:2], "little")
        text = self._memory[_TEXT : _TEXT + length]
        if not length or int.from_bytes(self._memory[2:_TEXT], "little") != crc32c(text):
            return None
        return text.decode("utf-8", "replace")

    def agree(self, version: str) -> bool:
        """Return True if pieces of this version may be added; the first call sets the version."""
        text = version.encode("utf-8", "replace")[: HEADER_BYTES - _TEXT]
        if not text:
            return True
        now = self.version
        if now is None:
            # Two processes may set it at once, so it is read again under the lock.
            with (
                contextlib.closing(self.claims()) as locks,
                locks.holding(_VERSION_LOCK, timeout_s=10, what=self.part),
            ):
                now = self.version
                if now is None:
                    self._memory[_TEXT : _TEXT + len(text)] = text
                    self._memory[2:_TEXT] = crc32c(text).to_bytes(4, "little")
                    self._memory[:2] = len(text).to_bytes(2, "little")
                    return True
        return now == text.decode("utf-8", "replace")

    def write(self, span: PieceSpan, data: memoryview) -> None:
        """Write pieces and mark them. Raises OSError."""
        self._put(self.pieces.span(span)[0], data)
        self.mark(span)

    def put(self, at: int, data: memoryview, crc: int) -> None:
        """Write bytes that have this CRC-32C, without marking their pieces as present. Raises
        OSError."""
        self._put(at, data)
        if at % BLOCK_BYTES == 0 and len(data) == min(BLOCK_BYTES, self.pieces.size_bytes - at):
            self._crcs[at // BLOCK_BYTES] = crc

    def _put(self, at: int, data: memoryview) -> None:
        for number in range(at // BLOCK_BYTES, -(-(at + len(data)) // BLOCK_BYTES)):
            self._crcs.pop(number, None)
        while data:
            done = os.pwrite(self.fd, data, at)
            data, at = data[done:], at + done

    def mark(self, span: PieceSpan) -> None:
        """Mark pieces as present."""
        self.marks[span[0] : span[1]] = 1

    def block_crcs(self, data: memoryview) -> bytes:
        """Return the CRC-32C of each block for the catalogue. Blocks that this process received as
        a whole keep their received checksum; others are computed from `data`, the whole blob."""
        return crcs_of(data, known=self._crcs)

    def claims(self) -> ByteLocks:
        """Return the locks with which a fetch claims pieces: byte n for piece n."""
        # Opened by the descriptor, because the file may have been renamed or removed.
        return ByteLocks(os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC))

    def close(self) -> None:
        """Close the part file; the marks stay readable. Safe to call twice. Threads that share a
        fill leave closing to its finalizer, because one of them may be about to claim pieces."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self.close()


def fill_disk_bytes(size_bytes: int, pieces: int = 0) -> int:
    """Compute the most bytes that a fill may use on the disk: both files, and the extents of a file
    that is written in random order. pieces: their number, if it is more than one for each
    PIECE_BYTES."""
    extents = size_bytes // PIECE_BYTES * 6  # worst case: 12 bytes for every second piece
    marks = HEADER_BYTES + max(size_bytes // PIECE_BYTES + 1, pieces)
    return disk_bytes(size_bytes) + disk_bytes(marks) + disk_bytes(extents)


def discard_fill(folder: Folder, key: str) -> None:
    """Remove a fill's files, the part file first: a map without it is ignored."""
    for name in (part_name(key), map_name(key)):
        folder.remove(name)
