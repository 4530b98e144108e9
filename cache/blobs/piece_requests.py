"""Which pieces of a fill are one request, and what becomes of its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.blob import absent_bytes
from penstock.cache.base.store import ABSENT, Kept
from penstock.cache.blobs.object_changes import object_changed
from penstock.cache.blobs.requester import BlobRequest
from penstock.cache.blobs.upstream import BlobRange
from penstock.cache.disk.pieces import OBJECTS_AT_ONCE, PIECE_BYTES, bridge, merge
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


class FillStoppedError(Exception):
    """A fill was asked to stop. This error never leaves the room."""


class PieceRequests:
    """Makes the requests of fills. range_bytes: of one request at most; meter: counts what is
    kept."""

    def __init__(self, *, range_bytes: int, meter: TrafficMeter) -> None:
        self._range_bytes, self._meter = range_bytes, meter

    def most(self, fill: Fill) -> int:
        """How many pieces are asked for at a time."""
        if fill.pieces.are_small:
            return max(1, self._range_bytes // PIECE_BYTES)
        return OBJECTS_AT_ONCE

    def split(self, fill: Fill, missing: list[PieceSpan]) -> Iterator[PieceSpan]:
        """Cut spans into such that are asked for at a time."""
        for pieces in missing:
            yield from fill.pieces.cut(pieces, range_bytes=self._range_bytes)

    def widened(
        self, fill: Fill, missing: list[PieceSpan], *, times: int
    ) -> Iterator[tuple[PieceSpan, list[PieceSpan]]]:
        """Cut what somebody waits for into such that are asked for at a time, each with what lies
        beside it and is missing too: about so many times as much. Gives both, the wider one first.

        Blocks of powers of two, so that those of different sizes don't leave slivers."""
        wide = missing
        if times > 1 and fill.pieces.are_small:
            wide = fill.missing(merge([self._block(fill, one, times) for one in missing]))
        for low, high in self.split(fill, wide):
            exact = [(max(a, low), min(b, high)) for a, b in missing if a < high and low < b]
            if exact:
                yield (low, high), exact

    def _block(self, fill: Fill, pieces: PieceSpan, times: int) -> PieceSpan:
        low, high = pieces
        most = min(times * (high - low), self.most(fill))
        block = 1 << (max(1, most).bit_length() - 1)
        return low // block * block, min(-(-high // block) * block, fill.pieces.count)

    def ranges(self, fill: Fill) -> Iterator[PieceSpan]:
        """Cut all that a fill misses into few requests: small gaps are fetched again."""
        missing = fill.missing([(0, fill.pieces.count)])
        if fill.pieces.are_small:
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
        """Make the requests for pieces, one for what lies in a row in an object. stop: once it is
        set, what comes is refused with FillStoppedError."""
        agreed = fill.version if fill.pieces.is_of_one_object else None
        for segment, at, start, end in fill.pieces.stretches(pieces):
            stored = ObjectRange(
                path=segment.path,
                start=at,
                end=at + end - start,
                version=segment.version or agreed,
                may_lack=segment.may_lack,
            )
            wanted = BlobRange(
                blob=source,
                segment=segment,
                start=start,
                end=end,
                stored=stored,
                keep=self._keep(fill, stop),
            )
            (one,) = fill.pieces.covering([start], [end])
            yield BlobRequest(wanted, self._take(wanted, fill, one, stop), one)

    def _keep(
        self, fill: Fill, stop: threading.Event | None
    ) -> Callable[[int, memoryview, int], None]:
        def keep(start: int, data: memoryview, crc: int) -> None:
            if stop is not None and stop.is_set():
                raise FillStoppedError
            fill.put(start, data, crc)

        return keep

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
            if answer is ABSENT:
                fill.write(pieces, memoryview(absent_bytes(wanted.start, wanted.end)))
                return
            same = not fill.pieces.is_of_one_object or fill.agree(answer.version)
            if not same or answer.object_bytes != wanted.segment.whole_bytes:
                raise object_changed(wanted.blob, wanted.segment)
            if isinstance(answer, Kept):
                fill.mark(pieces)
            else:
                fill.write(pieces, memoryview(answer.data))
            self._meter.add(bytes_filled=wanted.end - wanted.start)

        return take
