"""Which pieces of a fill are one request, and what becomes of its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.blobs.object_changes import object_changed
from penstock.cache.blobs.requester import BlobRequest
from penstock.cache.blobs.upstream import BlobRange
from penstock.cache.disk.pieces import PIECE_BYTES, bridge, cut
from penstock.cache.fetch.object_range import ObjectRange

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.counters import TrafficMeter
    from penstock.cache.base.store import Answer
    from penstock.cache.disk.fills import Fill
    from penstock.cache.disk.pieces import PieceSpan

# Of a blob, that may be fetched twice so that two gaps become one range.
_WASTE_SHARE = 0.01
_OBJECTS_AT_ONCE = 64


class FillStoppedError(Exception):
    """A fill was asked to stop. This error never leaves the room."""


class PieceRequests:
    """Makes the requests of fills. range_bytes: of one request at most; meter: counts what is
    kept."""

    def __init__(self, *, range_bytes: int, meter: TrafficMeter) -> None:
        self._range_bytes, self._meter = range_bytes, meter

    def most(self, fill: Fill) -> int:
        """How many pieces are asked for at a time."""
        if fill.pieces.single:
            return max(1, self._range_bytes // PIECE_BYTES)
        return _OBJECTS_AT_ONCE

    def split(self, fill: Fill, missing: list[PieceSpan]) -> Iterator[PieceSpan]:
        """Cut spans into such of one request at most."""
        most = self.most(fill)
        for pieces in missing:
            yield from cut(pieces, most=most)

    def ranges(self, fill: Fill) -> Iterator[PieceSpan]:
        """Cut all that a fill misses into few requests: small gaps are fetched again."""
        missing = fill.missing([(0, fill.pieces.count)])
        if fill.pieces.single:
            missing = bridge(missing, waste=int(fill.pieces.count * _WASTE_SHARE))
        yield from self.split(fill, missing)

    def of(
        self,
        source: BlobSource,
        fill: Fill,
        pieces: PieceSpan,
        *,
        stop: threading.Event | None = None,
    ) -> Iterator[BlobRequest]:
        """Make the requests for pieces, one for each object. stop: once it is set, what comes is
        refused with FillStoppedError."""
        single = fill.pieces.single
        for one in [pieces] if single else [(i, i + 1) for i in range(*pieces)]:
            start, end = fill.pieces.span(one)
            segment = source.segments[0] if single else source.segments[one[0]]
            if start == end:
                fill.write(one, memoryview(b""))
                continue
            low, high = (start, end) if single else (0, end - start)
            version = segment.version or (fill.version if single else None)
            stored = ObjectRange(path=segment.path, start=low, end=high, version=version)
            wanted = BlobRange(blob=source, segment=segment, start=start, end=end, stored=stored)
            yield BlobRequest(wanted, self._take(wanted, fill, one, stop), one)

    def _take(
        self,
        wanted: BlobRange,
        fill: Fill,
        pieces: PieceSpan,
        stop: threading.Event | None,
    ) -> Callable[[Answer], None]:
        def take(answer: Answer) -> None:
            if stop is not None and stop.is_set():
                raise FillStoppedError
            same = not fill.pieces.single or fill.agree(answer.version)
            if not same or answer.object_bytes != wanted.segment.size_bytes:
                raise object_changed(wanted.blob)
            data = memoryview(answer.data)
            fill.write(pieces, data)
            self._meter.add(bytes_filled=len(data))

        return take
