"""Divide a blob into pieces that can be fetched separately, and find the objects that hold them.

A piece is 4 KiB of a single object or of ranges of objects; in a blob of many whole objects it is
one object. A stretch is a range of contiguous bytes of one object, for which one request suffices.

The module is pure.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import BlobSource, Segment

    Ints = NDArray[np.int64]


class Stretch(NamedTuple):
    """Bytes [start, end) of a blob that one request can fetch. at: their first byte in the
    segment's object."""

    segment: Segment
    at: int
    start: int
    end: int


class Segments:
    """The segments of a blob as a table.

    starts: the first byte of each segment in the blob, and the blob's end, int64, shape
    (segments + 1,). sizes: the bytes of each segment, int64, shape (segments,). begins: the first
    byte of each stretch, int64, shape (stretches,). is_of_one_object: True if one object holds all
    bytes.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.sizes: Ints = np.fromiter((s.size_bytes for s in segments), np.int64, len(segments))
        self.starts: Ints = np.concatenate(([0], np.cumsum(self.sizes)))
        first: list[int] = []
        path, end = None, 0
        for number, one in enumerate(segments):
            if one.size_bytes:
                if one.path != path or one.start != end:
                    first.append(number)
                path, end = one.path, one.start + one.size_bytes
        self._first = first
        self.begins: Ints = self.starts[:-1][first]
        self.is_of_one_object = len({segments[number].path for number in first}) <= 1

    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        """Divide bytes [start, end) of the blob into stretches."""
        place = int(np.searchsorted(self.begins, start, side="right")) - 1
        while start < end:
            begin = int(self.begins[place])
            is_last = place + 1 == len(self.begins)
            upto = end if is_last else min(end, int(self.begins[place + 1]))
            segment = self._segments[self._first[place]]
            yield Stretch(segment, segment.start + start - begin, start, upto)
            start, place = upto, place + 1


PIECE_BYTES = 4096
OBJECTS_AT_ONCE = 64

PieceSpan = tuple[int, int]
"""Pieces [first, end)."""


class BlobPieces:
    """The pieces of a blob.

    count: the number of pieces. starts: the start of each piece, and the end, int64, shape
    (count + 1,); None if all pieces but the last have PIECE_BYTES. are_small: True if no piece has
    more than PIECE_BYTES. is_of_one_object: True if one object holds all bytes.
    """

    def __init__(self, source: BlobSource) -> None:
        self.size_bytes = source.size_bytes
        self._segments = source.segments
        self._table = table = Segments(source.segments)
        self.is_of_one_object = table.is_of_one_object
        self.starts: Ints | None = None
        self.are_small = len(source.segments) == 1
        if self.are_small:
            self.count = -(-source.size_bytes // PIECE_BYTES)
        else:
            self.starts = self._cut(table)
            self.count = len(self.starts) - 1
            self._borders = np.searchsorted(self.starts, table.begins)

    def _cut(self, table: Segments) -> NDArray[np.int64]:
        """Compute the start of each piece of several segments, and the end."""
        ranges = np.array([one.object_bytes is not None for one in self._segments], np.bool_)
        self.are_small, self._has_ranges = bool(ranges.all()), bool(ranges.any())
        steps = np.where(ranges, PIECE_BYTES, np.maximum(1, table.sizes))
        counts = -(-table.sizes // steps)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.repeat(table.starts[:-1], counts) + within * np.repeat(steps, counts)
        return np.append(starts, table.starts[-1])

    def span(self, pieces: PieceSpan) -> tuple[int, int]:
        """Return the bytes [start, end) of some pieces."""
        if self.starts is None:
            return pieces[0] * PIECE_BYTES, min(pieces[1] * PIECE_BYTES, self.size_bytes)
        return int(self.starts[pieces[0]]), int(self.starts[pieces[1]])

    def most(self, range_bytes: int) -> int:
        """Return the number of pieces that are fetched together, by one request of at most
        range_bytes or by several small ones."""
        return max(1, range_bytes // PIECE_BYTES) if self.are_small else OBJECTS_AT_ONCE

    def covering(self, starts: Sequence[int], ends: Sequence[int]) -> list[PieceSpan]:
        """Return the pieces that hold spans of bytes, sorted, and merged if they touch."""
        first, last = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        some = last > first
        first, last = first[some], last[some]
        if self.starts is None:
            low, high = first // PIECE_BYTES, -(-last // PIECE_BYTES)
        else:
            low = np.searchsorted(self.starts, first, side="right") - 1
            high = np.searchsorted(self.starts, last, side="left")
        return merge_spans(zip(low.tolist(), high.tolist(), strict=True))

    def stretches(self, pieces: PieceSpan) -> Iterator[Stretch]:
        """Divide the bytes of some pieces into stretches."""
        return self._table.stretches(*self.span(pieces))

    def cut(self, pieces: PieceSpan, *, range_bytes: int) -> Iterator[PieceSpan]:
        """Cut a span into spans that are fetched together: one request of at most range_bytes, or
        several small ones."""
        if self.starts is None:
            most = self.most(range_bytes)
            for low in range(pieces[0], pieces[1], most):
                yield low, min(low + most, pieces[1])
            return
        low, high = pieces
        while low < high:
            last = int(np.searchsorted(self._borders, low, side="right")) - 1 + OBJECTS_AT_ONCE
            end = high if last >= len(self._borders) else min(high, int(self._borders[last]))
            most = int(self.starts[low]) + range_bytes
            fits = int(np.searchsorted(self.starts, most, side="right")) - 1
            if fits < end and self._has_ranges:
                end = max(fits, low + 1)
                # End at a border of objects, so that no object takes more requests than necessary.
                border = int(self._borders[np.searchsorted(self._borders, end, side="right") - 1])
                end = border if border > low else end
            yield low, end
            low = end


def merge_spans(spans: Iterator[PieceSpan] | list[PieceSpan]) -> list[PieceSpan]:
    """Sort spans, and merge those that touch or overlap."""
    result: list[PieceSpan] = []
    for low, high in sorted(spans):
        if result and low <= result[-1][1]:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return result


def bridge_gaps(spans: list[PieceSpan], *, waste: int) -> list[PieceSpan]:
    """Join sorted spans across their smallest gaps, of at most `waste` pieces in total."""
    pairs = enumerate(itertools.pairwise(spans), start=1)
    gaps = sorted((after[0] - before[1], place) for place, (before, after) in pairs)
    totals = itertools.accumulate(gap for gap, _ in gaps)
    closed = {place for total, (_, place) in zip(totals, gaps, strict=True) if total <= waste}
    result: list[PieceSpan] = []
    for place, span in enumerate(spans):
        if place in closed:
            result[-1] = (result[-1][0], span[1])
        else:
            result.append(span)
    return result
