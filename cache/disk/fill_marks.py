"""Read which pieces of a blob that is being filled are there, knowing only the blob's key.

A fill's map holds a header, one byte a piece (1: it is there), and where the pieces begin unless
each has PIECE_BYTES: pieces of many objects end where the objects do. No numpy: the process that
serves a cache to other nodes stays small.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADER_BYTES = 512
KIND_AT = HEADER_BYTES - 1
EVEN_PIECES, BORDERS_FOLLOW = b"\x01", b"\x02"
BORDER_BYTES = 8
_PIECE_BYTES = 4096  # pieces.PIECE_BYTES, without its numpy
_MOST_MARKS = 2**20
"""Are looked at in one go; of a larger blob those around what is asked for."""

Span = tuple[int, int]
"""Bytes [start, end)."""


def part_name(key: str) -> str:
    """Name the file that a blob is filled in."""
    return f"{key}.part"


def map_name(key: str) -> str:
    """Name the file that has a mark for each piece."""
    return f"{key}.map"


class FillMarks:
    """Which pieces of a blob that is being filled are there, as its open map says.

    fd: of the map, not taken over. size_bytes: of the blob. Raises ValueError for what is no map of
    such a blob, or an older version's, which doesn't say where pieces begin.
    """

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
            raise ValueError("no map of this blob's pieces")

    def has(self, start: int, end: int) -> bool:
        """Whether bytes [start, end) are there: at least one, inside of the blob."""
        low, high = self._piece(start), self._piece(end - 1) + 1
        while low < high:
            count = min(high - low, _MOST_MARKS)
            if os.pread(self._fd, count, HEADER_BYTES + low) != b"\1" * count:
                return False
            low += count
        return True

    @property
    def share(self) -> float:
        """Which share of the pieces is there; of a blob of very many, of the first ones."""
        marks = os.pread(self._fd, min(_MOST_MARKS, self.count), HEADER_BYTES)
        return marks.count(1) / max(1, len(marks))

    def held(self, around: int) -> list[Span]:
        """The spans of bytes that are there, sorted. around: a byte; of a blob of very many pieces
        only those near it are looked at."""
        middle = self._piece(min(max(around, 0), self.size_bytes - 1))
        low = max(0, min(middle - _MOST_MARKS // 2, self.count - _MOST_MARKS))
        marks = os.pread(self._fd, min(_MOST_MARKS, self.count - low), HEADER_BYTES + low)
        return [(self._border(low + a), self._border(low + b)) for a, b in _runs(marks)]

    def _border(self, piece: int) -> int:
        if self._is_even:
            return min(piece * _PIECE_BYTES, self.size_bytes)
        at = HEADER_BYTES + self.count + BORDER_BYTES * piece
        data = os.pread(self._fd, BORDER_BYTES, at)
        if len(data) != BORDER_BYTES:
            raise ValueError("no map of this blob's pieces")
        return int(struct.unpack("<q", data)[0])

    def _piece(self, byte: int) -> int:
        """The piece that holds a byte."""
        if self._is_even:
            return byte // _PIECE_BYTES
        low, high = 0, self.count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if byte < self._border(middle) else (middle, high)
        return low


def _runs(marks: bytes) -> Iterator[tuple[int, int]]:
    """Stretches [first, end) of marks that are set."""
    end = 0
    while (first := marks.find(1, end)) >= 0:
        after = marks.find(0, first)
        end = len(marks) if after < 0 else after
        yield first, end
