"""Decide how far ahead of a loader the bytes of a remote dataset are fetched: batches and shards.

No thread waits here. Each batch that is delivered counts as consumption. From that and from the
measured request times follows how many batches to read ahead (`plan.needs.LookAhead`); whole shards
are filled beside them (`shard_fills`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.feed.shard_fills import Filler, NodeShare
from penstock.pipeline.plan import LookAhead, Needs, room_for_fills, shards_of_ranks, widening
from penstock.pipeline.report import TierFacts
from penstock.readers.fields import stored_fields

if TYPE_CHECKING:
    from penstock.augment import ArrayDraws
    from penstock.cache import JobStore
    from penstock.pipeline.feed.peer_links import PeerLinks
    from penstock.pipeline.plan import Cursor, JobOrder, World
    from penstock.readers import RemoteShards, Source

FILLED_SHARE = 0.9
"""Shards are filled whole where an epoch's crops touch at least that much of their bytes. Below it
the ranges of the batches ahead are fetched alone, and kept as far as they go."""

_LOOKED_AT = 3


def wanted_share(source: Source, remote: RemoteShards, crops: ArrayDraws) -> float:
    """Which share of the shards' bytes an epoch's crops of arrays touch, of some shards."""
    count = len(source.contents.sizes)
    shards = np.unique(np.linspace(0, count - 1, _LOOKED_AT).astype(np.int64)).tolist()
    fields = stored_fields(source.fields, source.schema)
    shares = [
        remote.wanted_share(shard, fields, lambda numbers: crops.before(numbers, 0))
        for shard in shards
    ]
    return float(np.mean(shares))


class Prefetch:
    """Decides how far ahead of one loader bytes are fetched. One thread calls; close() leaves the
    cache.

    least_ahead: batches in flight where all is local.
    """

    def __init__(
        self,
        remote: RemoteShards,
        source: Source,
        order: JobOrder,
        *,
        world: World,
        least_ahead: int,
        store: JobStore | None = None,
        fills: bool = True,
    ) -> None:
        """store: this loader's part of the job's. fills: whole shards, beside what batches ask
        for."""
        plan, walk = order.plan(), order.walk
        self._remote = remote
        self._share = NodeShare(
            remote, source.contents, plan, batches=walk.schedule.sizes, world=world
        )
        self._look_ahead = LookAhead(least=least_ahead, connections=remote.max_connections)
        self._least = least_ahead
        self._seen = remote.traffic()
        self._handed_out: float | None = None
        self._peers = make_peer_links(remote, order, world, store)
        self._filler: Filler | None = None
        if self._share.is_cached and fills:
            self._filler = Filler(
                remote,
                source,
                self._share,
                needs=Needs(plan, walk, first=world.rank, end=world.rank + 1, world=world.size),
                mine=shards_of_ranks(
                    plan,
                    walk.schedule.sizes,
                    first=world.rank,
                    end=world.rank + 1,
                    world=world.size,
                ),
                endless=order.settings.shuffle,
                epoch_steps=walk.usual_steps,
            )

    @property
    def first_ahead(self) -> int:
        """Batches to begin with: the first one mustn't share the line with many."""
        return min(2, self._least)

    @property
    def is_cold(self) -> bool:
        """Whether batches lately missed bytes on the local disk."""
        return self._look_ahead.is_cold

    def seek(self, cursor: Cursor) -> None:
        """Prepare for batches from this cursor on; the first call makes it a job of the cache."""
        self._handed_out = None
        if self._peers is not None:
            self._peers.begin(cursor.epoch)
        self._share.join()
        if self._filler is not None:
            self._filler.seek(cursor)

    def ahead(self, size_bytes: int, *, waited_s: float, ready_share: float) -> int:
        """Count a batch that is handed out now, and tell how many shall be in flight.

        size_bytes: of its encoded samples; waited_s: of the time since the last one, for bytes;
        ready_share: of the batches in flight, those that are there.
        """
        now, before = time.perf_counter(), self._handed_out
        self._handed_out = now
        seen, self._seen = self._seen, self._remote.traffic()
        misses = self._seen.misses - seen.misses
        self._look_ahead.count_misses(misses)
        if before is not None:
            self._look_ahead.count_batch(
                size_bytes, period_s=now - before, waited_s=waited_s, missed=misses > 0
            )
        self._remote.let_fills(
            lambda now, most: room_for_fills(now, ready_share=ready_share, most=most),
            # Where shards aren't filled, what lies beside a range may never be wanted.
            widening=None
            if self._filler is None
            else lambda now: widening(now, ready_share=ready_share),
        )
        mean_s, p99_s = self._remote.request_time()
        return self._look_ahead.batches(mean_s=mean_s, p99_s=p99_s)

    def fill(self, size_bytes: int, *, epoch: int) -> None:
        """Go on with fills, now that so many bytes more of an epoch were consumed."""
        if self._peers is not None:
            self._peers.at(epoch)
        if self._filler is not None:
            self._filler.count_batch(size_bytes, self._seen)

    def facts(self) -> TierFacts:
        """What the statistics say of the remote and of the cache."""
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
        if self._peers is not None:
            self._peers.close()


def make_peer_links(
    remote: RemoteShards, order: JobOrder, world: World, store: JobStore | None
) -> PeerLinks | None:
    """The ties to the job's other nodes, where a cache has some; None otherwise. store: a part of
    the job's that the loaders of this one dataset and order share."""
    if all(cache.peers is None for cache in remote.caches):
        return None
    from penstock.pipeline.feed.peer_links import PeerLinks  # a node alone needs none of it

    return PeerLinks(remote, order, world=world, store=store)
