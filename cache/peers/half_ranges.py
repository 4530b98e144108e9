"""Ranges of which a peer has a part: its pieces, and what is asked of the store around them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache.base.store import Answer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cache.blobs.upstream import BlobRange
    from penstock.cache.peers.protocol import Span

_MOST_PIECES = 2  # of a range: each leaves one more request to the store
_LEAST_BYTES = 2**16  # a smaller piece costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces(Answer):
    """The answer for a range of which a peer gave some pieces: (start in the blob, bytes) each,
    ascending."""

    pieces: tuple[tuple[int, memoryview], ...]


def worthwhile(held: Iterable[Span], span: Span) -> list[Span]:
    """Which parts of a range to ask of a peer that holds these spans: the longest, ascending."""
    inside = [(max(low, span[0]), min(high, span[1])) for low, high in held]
    found = [(low, high) for low, high in inside if high - low >= _LEAST_BYTES]
    return sorted(sorted(found, key=lambda part: part[0] - part[1])[:_MOST_PIECES])


def gaps_of(span: Span, parts: Iterable[Span]) -> list[Span]:
    """What a range lacks beside parts that don't overlap, of which others may lie elsewhere;
    ascending."""
    inside = sorted(part for part in parts if span[0] <= part[0] and part[1] <= span[1])
    borders = [span[0], *(end for part in inside for end in part), span[1]]
    pairs = zip(borders[::2], borders[1::2], strict=True)
    return [(low, high) for low, high in pairs if low < high]


class HalfRange:
    """Puts a range together from pieces and from what lies between them. Safe for several
    threads."""

    def __init__(self, whole: BlobRange, pieces: tuple[tuple[int, memoryview], ...]) -> None:
        self._whole = whole
        self._data = bytearray(whole.end - whole.start)
        self._left_bytes, self._lock = len(self._data), threading.Lock()
        for start, data in pieces:
            self.put(start, data)
        parts = [(start, start + len(data)) for start, data in pieces]
        gaps = gaps_of((whole.start, whole.end), parts)
        self.gaps = [self._part(low, high) for low, high in gaps]

    def put(self, start: int, data: memoryview | bytes) -> bool:
        """Take over bytes from a place in the blob; whether that was the last of them."""
        at = start - self._whole.start
        self._data[at : at + len(data)] = data
        with self._lock:
            self._left_bytes -= len(data)
            return not self._left_bytes

    def answer(self, last: Answer) -> Answer:
        """All of it. last: the answer for one of the gaps, or one like it where there is none."""
        return replace(last, data=memoryview(self._data).toreadonly())

    def _part(self, start: int, end: int) -> BlobRange:
        whole, offset = self._whole, self._whole.stored.start - self._whole.start
        stored = replace(whole.stored, start=start + offset, end=end + offset)
        return replace(whole, start=start, end=end, stored=stored)
