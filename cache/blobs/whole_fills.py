"""Fills whole blobs in the background, in big ranges, beside the batches that read them."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

from penstock.cache.base.locks import wait_for
from penstock.cache.blobs.object_changes import drop_if_changed
from penstock.cache.blobs.piece_requests import FillStoppedError
from penstock.cache.disk.access import DISK_ERRORS
from penstock.cache.errors import StalledError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.blobs.blob_opener import BlobOpener
    from penstock.cache.blobs.cached_blob import CachedBlob
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.piece_requests import PieceRequests
    from penstock.cache.blobs.requester import BlobRequest, Requester
    from penstock.cache.blobs.upstream import Upstream
    from penstock.cache.disk.fills import Claims, Fill
    from penstock.cache.disk.pieces import PieceSpan

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
        self,
        blob: CachedBlob,
        fill: Fill,
        ranges: deque[PieceSpan],
        stop: threading.Event | None,
    ) -> bool:
        """Fetch some of a fill's ranges, and take those that are there off the list. False if
        nothing came: others are at all of them, or batches need the connections."""
        # What this one can't use is left to other fills: all of them may go on at a time.
        upstream, key = self._upstream, blob.source.key
        with (
            upstream.room_for_fills(key, self._most_requests(fill, ranges)) as room,
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
