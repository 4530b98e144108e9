"""One node's warm-up: the plan of the job, the node's share of it, and its fills in order."""

from __future__ import annotations

import itertools
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import ConfigError, WriteError
from penstock.cache.job_store import JobStore
from penstock.pipeline.feed.node_share import NodeShare
from penstock.pipeline.feed.prefetch import peer_links
from penstock.pipeline.feed.share_fills import ShareFills
from penstock.pipeline.plan.needs import Needs, node_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.feed.share_fills import WarmResult, WarmState
    from penstock.pipeline.feed.warm_order import WarmOrder
    from penstock.pipeline.plan.job_order import JobOrder
    from penstock.pipeline.plan.steps import Cursor
    from penstock.pipeline.plan.world import World
    from penstock.readers.remote_shards import RemoteShards
    from penstock.readers.source import Source


def warm_node(
    dataset: Source,
    order: WarmOrder,
    *,
    world: World,
    progress: Callable[[WarmState], None] | None = None,
    stop: threading.Event | None = None,
) -> WarmResult:
    """Fill the cache of this node with its share; see `warm`."""
    began = time.perf_counter()
    contents = dataset.contents
    remote = _checked_remote(dataset)
    job, start = order.job(dataset, world)
    batches = job.walk.schedule.sizes
    share = NodeShare(remote, contents, job.plan(), batches=batches, world=world)
    peers = None if order.dry_run else peer_links(remote, job, world, _store())
    number, count = order.process
    try:
        if peers is not None:
            peers.begin(start.epoch)
        share.join()
        fills = ShareFills(
            contents, remote, share, processes=count, dry_run=order.dry_run, progress=progress
        )
        shards = _in_order(_needs(job, world), fills.kept, start=start)
        mine = itertools.islice(shards, number, None, count)
        own = mine if peers is None else _own_first(remote, mine)
        fills.run(own, workers=order.workers, stop=stop or threading.Event())
    finally:
        share.leave()
        if peers is not None:
            peers.close()
    return fills.result(time.perf_counter() - began)


def _store() -> JobStore | None:
    store = JobStore.of_group()
    return None if store is None else store.under("warm")


def _own_first(remote: RemoteShards, shards: Iterator[int]) -> Iterator[int]:
    """The shards that this node fetches from the remote, then those that another one fetches for it
    too: by then they are there."""
    others = []
    for shard in shards:
        if remote.is_left_to_others(shard):
            others.append(shard)
        else:
            yield shard
    yield from others


def _checked_remote(dataset: Source) -> RemoteShards:
    remote = dataset.remote_shards
    if remote is None:
        raise ConfigError(
            f"{dataset.url} is local: there is nothing to warm. Read it where it is; for data on a "
            "network mount pass cache= to the Dataset."
        )
    if any(one.cache is None or one.cache.is_temporary for one in remote.remotes):
        raise ConfigError(
            f"{dataset.url}: the dataset has no cache to warm. Pass "
            'cache=DiskCache("/nvme/penstock", max_bytes="1.5TB"), the one that the job will use.'
        )
    if unusable := [cache for cache in remote.caches if not cache.can_be_used]:
        raise WriteError(
            f"{unusable[0].path}: the cache folder can't be used, so nothing can be warmed. "
            "`penstock doctor` with that folder tells why."
        )
    return remote


def _needs(order: JobOrder, world: World) -> Needs:
    first, end = node_ranks(world)
    return Needs(order.plan(), order.walk, first=first, end=end, world=world.size)


def _in_order(needs: Needs, kept: list[int], *, start: Cursor) -> Iterator[int]:
    """Each kept shard once: those of the epoch by first need, then those of other epochs."""
    todo = np.zeros(needs.shard_count, np.bool_)
    todo[kept] = True
    left = len(kept)
    for _, needed in needs.shards(start, endless=False):
        new: NDArray[np.int64] = needed[todo[needed]]
        todo[new] = False
        left -= len(new)
        yield from new.tolist()
        if not left:
            return
    yield from np.flatnonzero(todo).tolist()
