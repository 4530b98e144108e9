"""How a blob is cut into pieces: 4 KiB each of a single object, one object each of many. Pure."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSource

PIECE_BYTES = 4096

PieceSpan = tuple[int, int]
"""Pieces [first, end)."""


class Pieces:
    """Pieces tell where each piece of a blob begins, and which of them hold given bytes. Pure."""

    def __init__(self, source: BlobSource) -> None:
        self.size_bytes = source.size_bytes
        self.single = len(source.segments) == 1
        if self.single:
            self.count = -(-source.size_bytes // PIECE_BYTES)
            self._starts: NDArray[np.int64] | None = None
        else:
            self.count = len(source.segments)
            sizes = np.fromiter((p.size_bytes for p in source.segments), np.int64, self.count)
            self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def span(self, pieces: PieceSpan) -> tuple[int, int]:
        """The bytes [start, end) of some pieces."""
        if self._starts is None:
            return pieces[0] * PIECE_BYTES, min(pieces[1] * PIECE_BYTES, self.size_bytes)
        return int(self._starts[pieces[0]]), int(self._starts[pieces[1]])

    def covering(self, starts: Sequence[int], ends: Sequence[int]) -> list[PieceSpan]:
        """The pieces that hold spans of bytes; sorted, merged where they touch."""
        first, last = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        some = last > first
        first, last = first[some], last[some]
        if self._starts is None:
            low, high = first // PIECE_BYTES, -(-last // PIECE_BYTES)
        else:
            low = np.searchsorted(self._starts, first, side="right") - 1
            high = np.searchsorted(self._starts, last, side="left")
        return merge(zip(low.tolist(), high.tolist(), strict=True))


def merge(spans: Iterator[PieceSpan] | list[PieceSpan]) -> list[PieceSpan]:
    """Sort spans, and merge them where they touch or overlap."""
    result: list[PieceSpan] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def cut(pieces: PieceSpan, *, most: int) -> Iterator[PieceSpan]:
    """Cut a span into spans of at most so many pieces."""
    for low in range(pieces[0], pieces[1], most):
        yield low, min(low + most, pieces[1])


def bridge(spans: list[PieceSpan], *, waste: int) -> list[PieceSpan]:
    """Join sorted spans over their smallest gaps, of at most `waste` pieces in all."""
    gaps = sorted(
        (after[0] - before[1], place)
        for place, (before, after) in enumerate(itertools.pairwise(spans))
    )
    closed = set()
    for gap, place in gaps:
        if gap > waste:
            break
        waste -= gap
        closed.add(place)
    result: list[PieceSpan] = []
    for place, span in enumerate(spans):
        if place - 1 in closed:
            result[-1] = (result[-1][0], span[1])
        else:
            result.append(span)
    return result
