"""Fills what batches are waiting for: exactly the pieces that they miss, each byte once a node."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.locks import wait_for
from penstock.cache.blobs.object_changes import drop_if_changed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.base.counters import TrafficMeter
    from penstock.cache.blobs.cached_blob import CachedBlob
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.fill_failures import FillFailures
    from penstock.cache.blobs.piece_requests import PieceRequests
    from penstock.cache.blobs.requester import BlobRequest, Requester
    from penstock.cache.blobs.upstream import Upstream
    from penstock.cache.disk.pieces import PieceSpan

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
