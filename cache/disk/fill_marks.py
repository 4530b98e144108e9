"""Read which pieces of a blob that is being filled are present, knowing only the blob's key.

A fill's map holds a header, one byte per piece (1: present), and the starts of the pieces unless
each has PIECE_BYTES: pieces of many objects end where the objects do. It uses no numpy, so that the
process that serves a cache to other nodes stays small.
"""

from __future__ import annotations

import bisect
import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER_BYTES = 512
KIND_AT = HEADER_BYTES - 1
EVEN_PIECES, BORDERS_FOLLOW = b"\x01", b"\x02"
BORDER_BYTES = 8
_PIECE_BYTES = 4096  # pieces.PIECE_BYTES, without importing numpy


def part_name(key: str) -> str:
    """Return the name of the file that holds a blob's bytes while it is filled."""
    return f"{key}.part"


def map_name(key: str) -> str:
    """Return the name of the file that has a mark for each piece."""
    return f"{key}.map"


class FillMarks:
    """The marks of a blob that is being filled, read from its open map.

    fd: the map's descriptor, which this object then owns. size_bytes: the size of the blob.
    most_marks: the most marks that one call of the system reads. Raises ValueError if the file
    isn't a map of such a blob.
    """

    most_marks = 2**20

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd, self.size_bytes = fd, size_bytes
        map_bytes = os.fstat(fd).st_size - HEADER_BYTES
        kind = os.pread(fd, 1, KIND_AT)
        self._is_even = kind == EVEN_PIECES
        if self._is_even:
            self.count = -(-size_bytes // _PIECE_BYTES)
            is_right = map_bytes == self.count
        else:
            self.count, rest = divmod(map_bytes - BORDER_BYTES, 1 + BORDER_BYTES)
            is_right = kind == BORDERS_FOLLOW and not rest and self.count >= 1
            is_right = is_right and (self._border(0), self._border(self.count)) == (0, size_bytes)
        if not is_right:
            raise ValueError("the file isn't a map of this blob's pieces")

    def has(self, start: int, end: int) -> bool:
        """Return True if bytes [start, end) are present: at least one byte, inside the blob."""
        low, high = self._piece(start), self._piece(end - 1) + 1
        while low < high:
            count = min(high - low, self.most_marks)
            if os.pread(self._fd, count, HEADER_BYTES + low) != b"\1" * count:
                return False
            low += count
        return True

    @property
    def share(self) -> float:
        """The share of pieces that are present, in [0, 1], among the first most_marks pieces."""
        marks = os.pread(self._fd, min(self.most_marks, self.count), HEADER_BYTES)
        return marks.count(1) / max(1, len(marks))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self._fd)

    def _border(self, piece: int) -> int:
        if self._is_even:
            return min(piece * _PIECE_BYTES, self.size_bytes)
        at = HEADER_BYTES + self.count + BORDER_BYTES * piece
        data = os.pread(self._fd, BORDER_BYTES, at)
        if len(data) != BORDER_BYTES:
            raise ValueError("the file isn't a map of this blob's pieces")
        return int(struct.unpack("<q", data)[0])

    def _piece(self, byte: int) -> int:
        """Return the number of the piece that holds a byte."""
        if self._is_even:
            return byte // _PIECE_BYTES
        return bisect.bisect_right(range(self.count), byte, key=self._border) - 1
