"""Reads the spans of a batch: from the local disk, behind a fill, or around the cache."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.cache.blobs.cached_blob import CachedBlob
from penstock.cache.blobs.demand_fills import Demand, demand_of
from penstock.cache.blobs.passing_blob import PassingBlob
from penstock.cache.disk.access import DISK_ERRORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSpans, ReadMode
    from penstock.cache.base.counters import TrafficMeter
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.demand_fills import DemandFills
    from penstock.cache.blobs.passing_reads import PassingReads
    from penstock.cache.blobs.requester import BlobRequest

    Bytes = NDArray[np.uint8]


class BlobReader:
    """Gives the bytes of spans of many blobs at once, and counts hits and misses."""

    def __init__(
        self,
        demand_fills: DemandFills,
        passing: PassingReads,
        *,
        cache: DatasetCache,
        meter: TrafficMeter,
    ) -> None:
        self._demand_fills, self._passing = demand_fills, passing
        self._cache, self._meter = cache, meter

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode = "mmap") -> list[list[Bytes]]:
        """Read the bytes of all spans, as `Remote.load` says."""
        cold = [
            number
            for number, want in enumerate(wanted)
            if not isinstance(want.blob, CachedBlob) or want.blob.fill is not None
        ]
        passed = self._bring([wanted[number] for number in cold]) if cold else []
        results: dict[int, list[Bytes]] = {
            number: found for number, found in zip(cold, passed, strict=True) if found is not None
        }
        disk_bytes = 0
        hits = 0
        loaded = []
        for number, want in enumerate(wanted):
            found = results.get(number)
            if found is None:
                blob = want.blob
                assert isinstance(blob, CachedBlob)
                read = blob.copies if mode == "pread" else blob.views
                found = read(want.starts, want.ends)
                size_bytes = sum(want.ends) - sum(want.starts)
                disk_bytes += size_bytes if want.touched_bytes is None else want.touched_bytes
                hits += len(found) if want.touched_bytes != 0 else 0
            loaded.append(found)
        self._meter.add(bytes_disk=disk_bytes, hits=hits)
        return loaded

    def bring(self, wanted: Sequence[BlobSpans], *, here: int) -> None:
        """Fetch what cached blobs miss, as `Remote.bring` says."""
        began, demands, missed = time.perf_counter(), list[Demand](), 0
        for want in wanted:
            if isinstance(want.blob, CachedBlob):
                demand, missing = demand_of(want.blob, want.starts, want.ends)
                missed += missing
                demands += [demand] if demand is not None else []
        if demands:
            try:
                self._demand_fills.bring(demands, [])
            except DISK_ERRORS as error:  # who reads meets it again, shard by shard
                self._cache.give_up(error)
        hits = here + sum(len(want.starts) for want in wanted) - missed
        waited_s = time.perf_counter() - began if demands else 0.0
        self._meter.add(hits=hits, misses=missed, remote_wait_s=waited_s)

    def _bring(self, cold: Sequence[BlobSpans]) -> list[list[Bytes] | None]:
        """Fetch what isn't here: into the cache (None in its place), or for passing blobs the
        arrays themselves."""
        began = time.perf_counter()
        passed: list[list[Bytes] | None] = [None] * len(cold)
        requests: list[BlobRequest] = []
        demands: list[Demand] = []
        missed = passing = 0
        for number, want in enumerate(cold):
            if isinstance(want.blob, CachedBlob):
                demand, missing = demand_of(want.blob, want.starts, want.ends)
                missed += missing
                if demand is not None:
                    demands.append(demand)
            else:
                assert isinstance(want.blob, PassingBlob)
                passed[number], more = self._passing.requests(want.blob, want.starts, want.ends)
                requests += more
                passing += len(want.starts)
        if requests or demands:
            try:
                self._demand_fills.bring(demands, requests)
            except DISK_ERRORS as error:
                self._cache.give_up(error)
                # Past a cache that can't be written any more.
                passed = list(self._passing.read(cold))
        self._meter.add(
            # load() counts all that it gives from the disk as hits, what had to come first too.
            misses=missed + passing,
            hits=-missed,
            remote_wait_s=time.perf_counter() - began,
        )
        return passed
