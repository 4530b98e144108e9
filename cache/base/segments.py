"""Where the segments of a blob begin, and which of its bytes lie in a row in one object. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Segment

    Ints = NDArray[np.int64]


class Stretch(NamedTuple):
    """A stretch is bytes [start, end) of a blob that one request can ask for: from byte `at` of the
    object that the segment is of."""

    segment: Segment
    at: int
    start: int
    end: int


class Segments:
    """The segments of a blob as a table.

    starts: where each begins in the blob, and the end, int64, shape (segments + 1,). begins: where
    stretches begin, which are cut only by their objects, int64, shape (stretches,).
    is_of_one_object: all bytes are of one object.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        sizes = np.fromiter((one.size_bytes for one in segments), np.int64, len(segments))
        self.starts: Ints = np.concatenate(([0], np.cumsum(sizes)))
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

    @property
    def sizes(self) -> Ints:
        """The bytes of each."""
        return np.diff(self.starts)

    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        """Divide bytes [start, end) of the blob into such that lie in a row in one object."""
        place = int(np.searchsorted(self.begins, start, side="right")) - 1
        while start < end:
            begin = int(self.begins[place])
            is_last = place + 1 == len(self.begins)
            upto = end if is_last else min(end, int(self.begins[place + 1]))
            segment = self._segments[self._first[place]]
            yield Stretch(segment, segment.start + start - begin, start, upto)
            start, place = upto, place + 1
