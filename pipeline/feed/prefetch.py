"""Decide how far ahead of a loader the bytes of a remote dataset are fetched: batches and shards.

This module waits for nothing. The delivered batches and the measured request times determine how
many batches to read ahead (`plan.needs.LookAhead`). At the same time, whole shards are filled
(`shard_fills`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.feed.shard_fills import Filler, NodeShare
from penstock.pipeline.plan import LookAhead, room_for_fills, widening
from penstock.pipeline.report import TierFacts
from penstock.readers.fieldtypes import stored_fields

if TYPE_CHECKING:
    from penstock.augment import ArrayDraws
    from penstock.cache import JobStore
    from penstock.pipeline.plan import Cursor, JobOrder, World
    from penstock.readers import RemoteShards, Source

FILLED_SHARE = 0.9
"""Shards are filled as a whole if an epoch's crops need at least this share of their bytes. Below
it, only the ranges of the next batches are fetched and cached."""

_SAMPLED_SHARDS = 3


def wanted_share(source: Source, remote: RemoteShards, crops: ArrayDraws) -> float:
    """Estimate the share of the shards' bytes that an epoch's crops of arrays need."""
    count = len(source.contents.sizes)
    shards = np.unique(np.linspace(0, count - 1, _SAMPLED_SHARDS).astype(np.int64)).tolist()
    fields = stored_fields(source.fields, source.schema)
    shares = [
        remote.wanted_share(shard, fields, lambda numbers: crops.before(numbers, 0))
        for shard in shards
    ]
    return float(np.mean(shares))


class Prefetch:
    """Decides how far ahead of one loader bytes are fetched. One thread may call it.

    least_ahead: batches in flight if all bytes are local.
    """

    def __init__(
        self,
        remote: RemoteShards,
        order: JobOrder,
        *,
        world: World,
        least_ahead: int,
        store: JobStore | None = None,
        fills: bool = True,
    ) -> None:
        """store: this loader's part of the job's store. fills: also fill whole shards."""
        plan = order.plan()
        self._remote = remote
        self._share = NodeShare(remote, order, plan, world, store=store)
        self._look_ahead = LookAhead(least=least_ahead, connections=remote.max_connections)
        self._least = least_ahead
        self._seen = remote.traffic()
        self._delivered_at: float | None = None
        self._filler: Filler | None = None
        if remote.caches and fills:
            self._filler = Filler(remote, self._share, order, plan, world)

    @property
    def first_ahead(self) -> int:
        """Batches to read ahead at first, few so that the first one gets enough bandwidth."""
        return min(2, self._least)

    @property
    def is_cold(self) -> bool:
        """True if recent batches missed bytes on the local disk."""
        return self._look_ahead.is_cold

    def seek(self, cursor: Cursor) -> None:
        """Prepare for batches from a cursor on. The first call joins the cache."""
        self._delivered_at = None
        self._share.join(cursor.epoch)
        if self._filler is not None:
            self._filler.seek(cursor)

    def ahead(self, size_bytes: int, *, waited_s: float, ready_share: float) -> int:
        """Count a batch that is being delivered, and return how many shall be in flight.

        size_bytes: of its encoded samples; waited_s: the wait for bytes since the last batch;
        ready_share: share of the batches in flight whose reads have ended.
        """
        now, before = time.perf_counter(), self._delivered_at
        self._delivered_at = now
        seen, self._seen = self._seen, self._remote.traffic()
        misses = self._seen.misses - seen.misses
        self._look_ahead.count_misses(misses)
        if before is not None:
            self._look_ahead.count_batch(
                size_bytes, period_s=now - before, waited_s=waited_s, missed=misses > 0
            )
        self._remote.limit_fills(
            lambda now, most: room_for_fills(now, ready_share=ready_share, most=most),
            # If shards aren't filled, the bytes next to a range may never be needed.
            widening=None
            if self._filler is None
            else lambda now: widening(now, ready_share=ready_share),
        )
        mean_s, p99_s = self._remote.request_time()
        return self._look_ahead.batches(mean_s=mean_s, p99_s=p99_s)

    def fill(self, size_bytes: int, *, epoch: int) -> None:
        """Continue fills after a batch of an epoch was consumed. size_bytes: of the batch."""
        if self._share.peers is not None:
            self._share.peers.set_epoch(epoch)
        if self._filler is not None:
            self._filler.count_batch(size_bytes, self._seen)

    def facts(self) -> TierFacts:
        """Return the facts of the remote and the cache, for statistics."""
        return TierFacts(
            traffic=self._remote.traffic(),
            connections=self._remote.max_connections,
            request_p99_s=self._remote.request_time()[1],
            wanted_bytes=self._share.node_bytes,
            kept_bytes=self._share.kept_bytes,
            max_bytes=self._remote.max_bytes,
        )

    def close(self) -> None:
        """Stop fills and leave the cache. Safe to call twice."""
        if self._filler is not None:
            self._filler.close()
        self._share.leave()
