"""Fill cached blobs: the pieces that batches wait for, and whole blobs in the background.

For a batch exactly the missing pieces are fetched, each byte once per node; the batch waits for
pieces that another process is fetching. Background fills fetch large ranges with the connections
that batches don't use. Both write into the same file."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import StreamedAnswer, wait_for
from penstock.cache.blobs.upstream import BlobRange, BlobRequest, object_changed
from penstock.cache.disk import DISK_ERRORS, OBJECTS_AT_ONCE, PIECE_BYTES, bridge_gaps, merge_spans
from penstock.cache.errors import ObjectChangedError, StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base import Answer, BlobSource, TrafficMeter
    from penstock.cache.blobs.dataset_cache import CachedBlob, DatasetCache
    from penstock.cache.blobs.upstream import Requester, Upstream
    from penstock.cache.disk import Claims, Fill, PieceSpan

# The share of a blob that may be fetched twice to join ranges across gaps.
_WASTE_SHARE = 0.01
# A claimed range is fetched as a whole if at least this share of it is missing.
_WORTH_SHARE = 0.9
# The most full ranges that one fill claims at a time, so that other processes of the node can claim
# the rest.
_FULL_RANGES_AT_ONCE = 8


class FillStoppedError(Exception):
    """The caller stopped a fill. `BlobFills.fill` catches this error."""


class PieceRequests:
    """The construction of requests for the pieces of fills.

    range_bytes: the most bytes of one request. meter: counts the bytes that are stored.
    """

    def __init__(self, *, range_bytes: int, meter: TrafficMeter) -> None:
        self._range_bytes, self._meter = range_bytes, meter

    def most(self, fill: Fill) -> int:
        """Return the number of pieces that are fetched together."""
        if fill.pieces.are_small:
            return max(1, self._range_bytes // PIECE_BYTES)
        return OBJECTS_AT_ONCE

    def split(self, fill: Fill, missing: list[PieceSpan]) -> Iterator[PieceSpan]:
        """Cut spans into spans that are fetched together."""
        for pieces in missing:
            yield from fill.pieces.cut(pieces, range_bytes=self._range_bytes)

    def widened(
        self, fill: Fill, missing: list[PieceSpan], *, times: int
    ) -> Iterator[tuple[PieceSpan, list[PieceSpan]]]:
        """Cut missing spans into requests, and widen each to about `times` its size by missing
        neighbours. Yield each wide span and the exact spans in it.

        The sizes of widened spans are powers of two, so that different sizes leave no small
        gaps."""
        wide = missing
        if times > 1 and fill.pieces.are_small:
            wide = fill.missing(merge_spans([self._block(fill, span, times) for span in missing]))
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
        """Cut all missing pieces of a fill into few requests; small present gaps between them are
        fetched again."""
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
        """Make the requests for pieces, one for each stretch of an object. stop: once it is set,
        answers raise FillStoppedError."""
        is_of_one_object = fill.pieces.is_of_one_object
        agreed = fill.version if is_of_one_object else None

        def check_stop() -> None:
            if stop is not None and stop.is_set():
                raise FillStoppedError

        def keep(start: int, data: memoryview, crc: int) -> None:
            check_stop()
            fill.put(start, data, crc)

        def receive(wanted: BlobRange, span: PieceSpan, answer: Answer) -> None:
            check_stop()
            is_same = not is_of_one_object or fill.agree(answer.version)
            if not is_same or answer.object_bytes != wanted.segment.whole_bytes:
                raise object_changed(source, wanted.segment)
            if isinstance(answer, StreamedAnswer):
                fill.mark(span)
            else:
                fill.write(span, memoryview(answer.data))
            self._meter.add(bytes_filled=wanted.end - wanted.start)

        for stretch in fill.pieces.stretches(pieces):
            wanted = BlobRange.of_stretch(source, stretch, version=agreed, keep=keep)
            (span,) = fill.pieces.covering([wanted.start], [wanted.end])
            yield BlobRequest(wanted, partial(receive, wanted, span), span)


@dataclass(slots=True)
class Demand:
    """Pieces of a blob that a reader waits for."""

    blob: CachedBlob
    pieces: list[PieceSpan]

    def missing(self) -> list[PieceSpan]:
        """Return the pieces that are still missing."""
        fill = self.blob.fill
        return fill.missing(self.pieces) if fill is not None else []


def demand_of(
    blob: CachedBlob, starts: Sequence[int], ends: Sequence[int]
) -> tuple[Demand | None, int]:
    """Return the demand for the missing pieces of spans, None if no piece is missing, and the
    number of spans with missing pieces."""
    fill = blob.fill
    if fill is None or not (missing := fill.missing(fill.pieces.covering(starts, ends))):
        return None, 0
    spans = [fill.pieces.span(pieces) for pieces in missing]
    first = np.array([a for a, _ in spans])
    last = np.array([b for _, b in spans])
    begins, stops = np.asarray(starts), np.asarray(ends)
    # A sample has missing bytes if the first missing span that ends after the sample's start
    # begins before its end.
    place = np.searchsorted(last, begins, side="right")
    hit = (place < len(first)) & (first[np.minimum(place, len(first) - 1)] < stops)
    return Demand(blob, missing), int(hit.sum())


class BlobFills:
    """The fills of a dataset's blobs.

    Those for batches fetch missing pieces and wait for those that other processes are fetching.
    Background fills fetch all missing pieces of a blob with the connections that batches don't use.
    widening: the factor by which requests for batches are widened by missing neighbours, which
    makes fewer requests and fetches only bytes that the cache keeps.
    """

    others_s = 15.0
    """Seconds to wait for pieces that another process fetches before fetching them, too."""

    def __init__(
        self, upstream: Upstream, requester: Requester, cache: DatasetCache, *, meter: TrafficMeter
    ) -> None:
        self._upstream, self._requester, self._cache = upstream, requester, cache
        self._pieces = PieceRequests(range_bytes=upstream.range_bytes, meter=meter)
        self._meter = meter
        self.widening = 1

    def open(self, source: BlobSource) -> CachedBlob | None:
        """Open a cached blob, or begin its fill; None if the cache doesn't keep it."""
        return self._cache.open(source, ensure=self._ensure)

    def _ensure(self, blob: CachedBlob, spans: Sequence[tuple[int, int]]) -> None:
        """Fetch the missing pieces of spans of one blob. Raises FetchError, StalledError."""
        fill = blob.fill
        if fill is not None:
            pieces = fill.pieces.covering([a for a, _ in spans], [b for _, b in spans])
            began = time.perf_counter()
            self.bring([Demand(blob, pieces)], [])
            self._meter.add(remote_wait_s=time.perf_counter() - began)

    @contextlib.contextmanager
    def _dropping_changed(self, blobs: Sequence[CachedBlob]) -> Iterator[None]:
        """Drop the fills of blobs whose object was replaced, because their pieces are useless."""
        try:
            yield
        except ObjectChangedError as error:
            for blob in blobs:
                names = {self._upstream.uri(segment.path) for segment in blob.source.segments}
                if error.uri in (*names, blob.source.uri) and blob.fill is not None:
                    self._cache.drop(blob.source, inode=blob.inode)
            raise

    # -- for batches

    def bring(self, demands: Sequence[Demand], passing: Sequence[BlobRequest]) -> None:
        """Fetch pieces until no demand misses any, and send the requests of passing blobs together
        with the first ones. Raises FetchError, StalledError."""
        first: Sequence[BlobRequest] = passing
        progress_s = began_s = time.monotonic()

        def settled() -> bool:
            nonlocal first, progress_s
            while True:
                # A stopped process may hold pieces forever, so after a while they are fetched
                # twice. Pieces that this process fetches will arrive, however slow the remote is.
                force = time.monotonic() - progress_s > self.others_s
                done, fetched = self._round(demands, first, force=force, began_s=began_s)
                first = ()
                if done or not fetched:
                    return done
                progress_s = time.monotonic()

        blobs = [demand.blob for demand in demands]
        what = blobs[0].source.uri if blobs else self._cache.label
        with self._dropping_changed(blobs):
            # Longer than a fetch that holds pieces can take.
            wait_for(settled, timeout_s=2 * self._upstream.timeout_s, what=what)
        for blob in blobs:
            blob.settle()

    def _round(
        self,
        demands: Sequence[Demand],
        passing: Sequence[BlobRequest],
        *,
        force: bool,
        began_s: float,
    ) -> tuple[bool, bool]:
        """Claim and fetch unclaimed pieces. Return (no piece is missing, this call fetched some).
        force: fetch pieces that other processes have claimed, too. began_s: the start of the wait.
        """
        requests = list(passing)
        with contextlib.ExitStack() as held:
            for demand in demands:
                fill = demand.blob.fill
                if fill is None or not (missing := demand.missing()):
                    continue
                claims = fill.claims()
                held.callback(claims.close)
                source = demand.blob.source
                for pieces, exact in self._pieces.widened(fill, missing, times=self.widening):
                    own = [pieces]
                    if not claims.claim(pieces):
                        is_fetching = self._requester.is_fetching
                        own = [
                            span
                            for span in exact
                            if claims.claim(span) or (force and not is_fetching(source, span))
                        ]
                    for span in fill.missing(own):
                        requests += self._pieces.of(source, fill, span)
            # Checked after claiming, because a claim that was just released may have failed.
            wanted = ((demand.blob.source.key, demand.missing()) for demand in demands)
            if (failed := self._requester.failures.since(began_s, wanted)) is not None:
                raise failed
            self._requester.send(requests)
        return not any(demand.missing() for demand in demands), bool(requests)

    # -- in the background

    def fill(
        self,
        source: BlobSource,
        *,
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> int:
        """Fetch a whole blob into the cache; see `Remote.fill`."""
        if not source.size_bytes:
            return 0
        blob = self.open(source)
        if blob is None:
            return -1
        fill = blob.fill
        if fill is None:
            return 0
        stop = stop or threading.Event()
        try:
            fetched = self._fetch_all(blob, fill, progress, stop)
            blob.settle()
        except FillStoppedError:
            return -1
        except StalledError:
            if stop.is_set():
                return -1
            raise
        except DISK_ERRORS as error:
            self._cache.give_up(error)
            return -1
        return fetched

    def _fetch_all(
        self,
        blob: CachedBlob,
        fill: Fill,
        progress: Callable[[int], None] | None,
        stop: threading.Event,
    ) -> int:
        """Fetch until no piece is missing; return the fetched bytes."""
        fetched = 0
        # Computed once: gaps that were bridged again in each round would add up.
        ranges = deque(self._pieces.ranges(fill))

        def settled() -> bool:
            nonlocal fetched
            came = True
            while came and not stop.is_set():
                left = fill.missing_bytes()
                came = self._fetch_some(blob, fill, ranges, stop)
                done = left - fill.missing_bytes()
                fetched += done
                if progress is not None and done:
                    progress(done)
            return not ranges

        with self._dropping_changed([blob]):
            # Longer than a fetch that holds pieces can take.
            timeout_s = 2 * self._upstream.timeout_s
            wait_for(settled, timeout_s=timeout_s, what=blob.source.uri, stop=stop)
        return fetched

    def _fetch_some(
        self, blob: CachedBlob, fill: Fill, ranges: deque[PieceSpan], stop: threading.Event
    ) -> bool:
        """Fetch some of a fill's ranges, and remove complete ones from the list. Return False if
        nothing was fetched, because others have claimed all or batches need the connections."""
        # Reserve only as many connections as the fill can use, so that other fills can run, too.
        upstream, key = self._upstream, blob.source.key
        with (
            upstream.reserve_fills(key, self._most_requests(fill, ranges)) as most,
            contextlib.closing(fill.claims()) as claims,
        ):
            requests = list(self._claimed(blob, fill, ranges, claims, most, stop))
            self._requester.send(requests, urgent=False)
        return bool(requests)

    def _most_requests(self, fill: Fill, ranges: deque[PieceSpan]) -> int:
        """Return the number of requests that a fill could make now with enough connections."""
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
        most: int,
        stop: threading.Event,
    ) -> Iterator[BlobRequest]:
        """Claim pieces, and yield at most `most` requests for them."""
        left = _FULL_RANGES_AT_ONCE * self._pieces.most(fill)
        for _ in range(len(ranges)):
            pieces = ranges.popleft()
            missing = fill.missing([pieces])
            if not missing:
                continue
            ranges.append(pieces)
            # A bridged range is one request, unless other processes have filled much of it.
            still = sum(high - low for low, high in missing)
            if fill.pieces.are_small and still >= _WORTH_SHARE * (pieces[1] - pieces[0]):
                missing = [pieces]
            for span in missing:
                if most > 0 and left > 0 and claims.claim(span) and fill.missing([span]):
                    yield from self._pieces.of(blob.source, fill, span, stop=stop)
                    most -= 1
                    left -= span[1] - span[0]
