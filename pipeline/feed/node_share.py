"""Which shards this node reads, and which of them its cache keeps for a loader."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import PenstockWarning
from penstock.pipeline.plan.needs import (
    check_room,
    little_room_words,
    node_ranks,
    open_windows_bytes,
    shards_of_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.pipeline.plan.job_plan import JobPlan
    from penstock.pipeline.plan.world import World
    from penstock.readers.contents import Contents
    from penstock.readers.remote_shards import RemoteJobs, RemoteShards

log = logging.getLogger("penstock")


class NodeShare:
    """What this node reads of a dataset, and what its cache keeps of that for one loader.

    It is a job of the cache from join() to leave(), beside other loaders' of the same dataset.

    shards: that this node's ranks read in an epoch, int64, shape (n,). batches: sizes of the job's
    global batches. Raises ConfigError for a limit below one shard.
    """

    def __init__(
        self,
        remote: RemoteShards,
        contents: Contents,
        plan: JobPlan,
        *,
        batches: Sequence[int],
        world: World,
    ) -> None:
        self._remote = remote
        first, end = node_ranks(world)
        self.shards = shards_of_ranks(plan, batches, first=first, end=end, world=world.size)
        self._sizes = contents.shard_bytes[self.shards]
        self.node_bytes = int(self._sizes.sum())
        self._mine: RemoteJobs | None = None
        for cache in remote.caches:
            self._look_at_room(
                cache,
                contents,
                plan,
                share=(end - first) / world.size,
                speaks=world.is_first_on_node,
            )

    def _look_at_room(
        self, cache: DiskCache, contents: Contents, plan: JobPlan, *, share: float, speaks: bool
    ) -> None:
        """Say what the order opens here: in the log, or where that is too much in a warning.

        share: of the ranks, on this node; speaks: this process does, as one of a node.
        """
        kept = self._remote.kept_by(cache)
        sizes = self._sizes[np.isin(self.shards, kept)]
        node_bytes, shard_bytes = int(sizes.sum()), contents.shard_bytes[kept]
        if cache.max_bytes is not None:
            check_room(cache.max_bytes, int(sizes.max(initial=0)))
        if not speaks:
            return
        needed_bytes = open_windows_bytes(
            open_shards=plan.open_shards * len(kept) / len(contents.sizes),
            shard_bytes=float(shard_bytes.mean()),
            share=share,
            node_bytes=node_bytes,
        )
        log.info(
            "this node keeps up to %s of its %s open (window=%d, lanes=%d)",
            format_size(needed_bytes),
            format_size(node_bytes),
            plan.window,
            plan.lanes,
        )
        if cache.max_bytes is not None and (
            words := little_room_words(
                cache.max_bytes, needed_bytes, window=plan.window, lanes=plan.lanes
            )
        ):
            warnings.warn(words, PenstockWarning, stacklevel=6)
        elif cache.max_bytes is not None and cache.max_bytes < node_bytes:
            from penstock.pipeline.plan.sizing.reach import small_cache_words  # others need none

            if words := small_cache_words(cache.max_bytes, node_bytes):
                warnings.warn(words, PenstockWarning, stacklevel=6)

    @property
    def is_cached(self) -> bool:
        """Whether there is a cache at all."""
        return bool(self._remote.caches)

    def join(self) -> None:
        """Become a job of the cache, if it isn't one."""
        if self._mine is None:
            self._mine = self._remote.join(self.shards, self._sizes)

    @property
    def kept_bytes(self) -> int:
        """Those of `node_bytes` that the cache keeps or will keep."""
        mine = self._mine
        return min(mine.pinned_bytes, self.node_bytes) if mine is not None else 0

    def keeps(self, shard: int) -> bool:
        """Whether the cache keeps a shard for the job."""
        return self._mine is not None and self._mine.pins(shard)

    def refresh(self) -> bool:
        """Look again, as jobs come and go; whether what is kept has changed."""
        return self._mine is not None and self._mine.refresh()

    def leave(self) -> None:
        """End this loader's claims. Safe to call twice."""
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.leave()
