"""Fill cached blobs: the pieces that batches wait for, and whole blobs in the background.

A batch gets exactly the pieces that it misses, each byte once a node; pieces that another process
is fetching are waited for. Background fills take big ranges, with the connections that batches
leave. Both write into the same file.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import ABSENT, ObjectRange, StreamedAnswer, absent_bytes, wait_for
from penstock.cache.blobs.blob_requests import BlobRequest, drop_if_changed, object_changed
from penstock.cache.blobs.upstream import BlobRange
from penstock.cache.disk import DISK_ERRORS, OBJECTS_AT_ONCE, PIECE_BYTES, bridge_gaps, merge_spans
from penstock.cache.errors import StalledError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base import Answer, BlobSource, TrafficMeter
    from penstock.cache.blobs.blob_requests import FillFailures, Requester
    from penstock.cache.blobs.dataset_cache import BlobOpener, CachedBlob, DatasetCache
    from penstock.cache.blobs.upstream import Upstream
    from penstock.cache.disk import Claims, Fill, PieceSpan

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
            wide = fill.missing(merge_spans([self._block(fill, one, times) for one in missing]))
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
            missing = bridge_gaps(missing, waste=int(fill.pieces.count * _WASTE_SHARE))
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
        self, wanted: BlobRange, fill: Fill, pieces: PieceSpan, stop: threading.Event | None
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
            if isinstance(answer, StreamedAnswer):
                fill.mark(pieces)
            else:
                fill.write(pieces, memoryview(answer.data))
            self._meter.add(bytes_filled=wanted.end - wanted.start)

        return take


# Samples that others are fetching are waited for so long, then fetched here too.
_OTHERS_S = 15.0


@dataclass(slots=True)
class Demand:
    """A demand is pieces of a blob that somebody waits for."""

    blob: CachedBlob
    pieces: list[PieceSpan]

    def missing(self) -> list[PieceSpan]:
        """Find the pieces that aren't here yet."""
        fill = self.blob.fill
        return fill.missing(self.pieces) if fill is not None else []


class DemandFills:
    """Fetches pieces until none is missing; those that others are fetching are waited for."""

    def __init__(
        self,
        upstream: Upstream,
        requester: Requester,
        pieces: PieceRequests,
        *,
        cache: DatasetCache,
        failures: FillFailures,
        meter: TrafficMeter,
    ) -> None:
        self._upstream, self._requester, self._pieces = upstream, requester, pieces
        self._cache, self._failures, self._meter = cache, failures, meter
        self.times = 1
        """What batches wait for is asked for with its neighbours, about so many times as much."""

    def ensure(self, blob: CachedBlob, spans: Sequence[tuple[int, int]]) -> None:
        """Bring spans of one blob. Raises FetchError, StalledError."""
        fill = blob.fill
        if fill is not None:
            pieces = fill.pieces.covering([a for a, _ in spans], [b for _, b in spans])
            began = time.perf_counter()
            self.bring([Demand(blob, pieces)], [])
            self._meter.add(remote_wait_s=time.perf_counter() - began)

    def bring(self, demands: Sequence[Demand], beside: Sequence[BlobRequest]) -> None:
        """Fetch pieces until none of the demands misses any; send the requests `beside` once, with
        the first of them. Raises FetchError, StalledError."""
        first: Sequence[BlobRequest] = beside
        moved_s = began_s = time.monotonic()

        def settled() -> bool:
            nonlocal first, moved_s
            while True:
                # Another process that was stopped may hold pieces for ever. Fetching them twice is
                # no harm; what this one asks for itself is on its way, however slow the remote is.
                force = time.monotonic() - moved_s > _OTHERS_S
                done, fetched = self._round(demands, first, force=force, began_s=began_s)
                first = ()
                if done or not fetched:
                    return done
                moved_s = time.monotonic()

        blobs = [demand.blob for demand in demands]
        what = blobs[0].source.uri if blobs else self._cache.label
        with drop_if_changed(blobs, cache=self._cache, upstream=self._upstream):
            # Longer than whoever holds pieces can take for them.
            wait_for(settled, timeout_s=2 * self._upstream.timeout_s, what=what)
        for blob in blobs:
            blob.settle()

    def _round(
        self,
        demands: Sequence[Demand],
        beside: Sequence[BlobRequest],
        *,
        force: bool,
        began_s: float,
    ) -> tuple[bool, bool]:
        """Claim what nobody fetches and fetch it: (nothing is missing any more, something came).
        force: fetch what other processes are at, too; began_s: since when this is waited for."""
        requests = list(beside)
        with contextlib.ExitStack() as held:
            for demand in demands:
                fill = demand.blob.fill
                if fill is None or not (missing := demand.missing()):
                    continue
                claims = fill.claims()
                held.callback(claims.close)
                source = demand.blob.source
                for pieces, exact in self._pieces.widened(fill, missing, times=self.times):
                    mine = [pieces]
                    if not claims.claim(pieces):
                        asks = self._requester.asks
                        mine = [
                            one
                            for one in exact
                            if claims.claim(one) or (force and not asks(source, one))
                        ]
                    for one in fill.missing(mine):
                        requests += self._pieces.of(source, fill, one)
            # Behind the claims: what was just let go may have failed.
            wanted = ((demand.blob.source.key, demand.missing()) for demand in demands)
            if (failed := self._failures.since(began_s, wanted)) is not None:
                raise failed
            self._requester.send(requests)
        return not any(demand.missing() for demand in demands), bool(requests)


def demand_of(
    blob: CachedBlob, starts: Sequence[int], ends: Sequence[int]
) -> tuple[Demand | None, int]:
    """Find the pieces that spans miss (None: none), and how many spans miss something."""
    fill = blob.fill
    if fill is None:
        return None, 0
    missing = fill.missing(fill.pieces.covering(starts, ends))
    if not missing:
        return None, 0
    spans = [fill.pieces.span(pieces) for pieces in missing]
    first = np.array([a for a, _ in spans])
    last = np.array([b for _, b in spans])
    begins, stops = np.asarray(starts), np.asarray(ends)
    # The first missing span that ends behind a sample's start: does it begin before its end?
    place = np.searchsorted(last, begins, side="right")
    hit = (place < len(first)) & (first[np.minimum(place, len(first) - 1)] < stops)
    return Demand(blob, missing), int(hit.sum())


# A claimed range is fetched as a whole if so much of it is missing.
_WORTH_SHARE = 0.9
# What one fill holds at a time at most, in full ranges' bytes; the rest is free for other processes
# of the node.
_FULL_RANGES_AT_ONCE = 8


class WholeFills:
    """Brings all that is missing of a blob, with the connections that batches leave."""

    def __init__(
        self,
        upstream: Upstream,
        requester: Requester,
        pieces: PieceRequests,
        *,
        opener: BlobOpener,
        cache: DatasetCache,
    ) -> None:
        self._upstream, self._requester, self._pieces = upstream, requester, pieces
        self._opener, self._cache = opener, cache

    def fill(
        self,
        source: BlobSource,
        *,
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Fetch a whole blob into the cache, as `Remote.fill` says."""
        if not source.size_bytes:
            return 0
        blob = self._opener.open(source)
        if blob is None:
            return -1
        fill = blob.fill
        if fill is None:
            return 0
        try:
            fetched = self._bring(blob, fill, progress, stop)
            blob.settle()
        except FillStoppedError:
            return -1
        except StalledError:
            if stop is not None and stop.is_set():
                return -1
            raise
        except DISK_ERRORS as error:
            self._cache.give_up(error)
            return -1
        return fetched

    def _bring(
        self,
        blob: CachedBlob,
        fill: Fill,
        progress: Callable[[int], None] | None,
        stop: threading.Event | None,
    ) -> int:
        """Fetch until nothing is missing; bytes that came."""
        fetched = 0
        # Decided once: what is bridged in each round anew would add up.
        ranges = deque(self._pieces.ranges(fill))

        def settled() -> bool:
            nonlocal fetched
            came = True
            while came and not (stop is not None and stop.is_set()):
                left = fill.missing_bytes()
                came = self._round(blob, fill, ranges, stop)
                done = left - fill.missing_bytes()
                fetched += done
                if progress is not None and done:
                    progress(done)
            return not ranges

        with drop_if_changed([blob], cache=self._cache, upstream=self._upstream):
            # Longer than whoever holds pieces can take for them.
            timeout_s = 2 * self._upstream.timeout_s
            wait_for(settled, timeout_s=timeout_s, what=blob.source.uri, stop=stop)
        return fetched

    def _round(
        self, blob: CachedBlob, fill: Fill, ranges: deque[PieceSpan], stop: threading.Event | None
    ) -> bool:
        """Fetch some of a fill's ranges, and take those that are there off the list. False if
        nothing came: others are at all of them, or batches need the connections."""
        # What this one can't use is left to other fills: all of them may go on at a time.
        upstream, key = self._upstream, blob.source.key
        with (
            upstream.reserve_fills(key, self._most_requests(fill, ranges)) as room,
            contextlib.closing(fill.claims()) as claims,
        ):
            requests = list(self._claimed(blob, fill, ranges, claims, room, stop))
            self._requester.send(requests, urgent=False)
        return bool(requests)

    def _most_requests(self, fill: Fill, ranges: deque[PieceSpan]) -> int:
        """How many requests a fill could make now, if it had all connections."""
        left, count = _FULL_RANGES_AT_ONCE * self._pieces.most(fill), 0
        for pieces in ranges:
            for low, high in fill.missing([pieces]):
                left, count = left - (high - low), count + 1
            if left <= 0:
                break
        return max(1, count)

    def _claimed(
        self,
        blob: CachedBlob,
        fill: Fill,
        ranges: deque[PieceSpan],
        claims: Claims,
        room: int,
        stop: threading.Event | None,
    ) -> Iterator[BlobRequest]:
        """At most `room` requests, whose pieces are claimed."""
        left = _FULL_RANGES_AT_ONCE * self._pieces.most(fill)
        for _ in range(len(ranges)):
            pieces = ranges.popleft()
            missing = fill.missing([pieces])
            if not missing:
                continue
            ranges.append(pieces)
            # A bridged range is one request, unless others have brought much of it.
            still = sum(high - low for low, high in missing)
            if fill.pieces.are_small and still >= _WORTH_SHARE * (pieces[1] - pieces[0]):
                missing = [pieces]
            for one in missing:
                if room > 0 and left > 0 and claims.claim(one) and fill.missing([one]):
                    yield from self._pieces.of(blob.source, fill, one, stop=stop)
                    room -= 1
                    left -= one[1] - one[0]
