"""Fetch what a node will read, before the job or beside it.

A job that runs at the same time shares the fills: both write into the same files of the cache, and
each range is fetched by one of them. What is there is skipped, so an interrupted warm-up goes on
where it stopped.
"""

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
from penstock.pipeline.options.sizes import batch_schedule
from penstock.pipeline.plan.job_order import JobOrder
from penstock.pipeline.plan.needs import Needs, node_ranks
from penstock.pipeline.plan.settings import ordered_settings, shuffled_settings
from penstock.pipeline.plan.steps import Cursor, Walk
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.feed.share_fills import WarmResult, WarmState
    from penstock.pipeline.options.sizes import GlobalBatch
    from penstock.pipeline.plan.batch_schedule import BatchSchedule
    from penstock.readers.remote_shards import RemoteShards
    from penstock.readers.source import Source

# Of one rank, where nobody says what the job's will be: as people train on images.
BATCH_PER_RANK = 256
# Shards at a time. Each is fetched by several ranges at once; several shards hide each one's ends.
FILLS_AT_ONCE = 4


def node_world(world_size: int, *, nodes: int, node_rank: int) -> World:
    """The first rank of a node, with the node's ranks as its local ones. Raises ConfigError."""
    if nodes < 1 or world_size < 1:
        raise ConfigError(f"Got {world_size} ranks on {nodes} nodes, wanted at least 1 of each.")
    if not 0 <= node_rank < nodes:
        raise ConfigError(
            f"node_rank: got {node_rank}, wanted 0 to {nodes - 1} for {nodes} node"
            f"{'s' * (nodes != 1)}. Nodes are counted from 0."
        )
    if world_size % nodes:
        raise ConfigError(
            f"world_size: got {world_size}, wanted a multiple of the {nodes} nodes: each node has "
            "as many ranks as GPUs, all nodes alike."
        )
    ranks = world_size // nodes
    return World(node_rank * ranks, world_size, local_rank=0, local_size=ranks)


def warm(
    dataset: Source,
    *,
    world: World | None = None,
    epoch: int = 0,
    seed: int = 0,
    global_batch_size: GlobalBatch | None = None,
    shuffle: bool = True,
    lanes: int | None = None,
    window: int | None = None,
    reshuffle: float = 0.0,
    process: tuple[int, int] = (0, 1),
    workers: int = FILLS_AT_ONCE,
    dry_run: bool = False,
    progress: Callable[[WarmState], None] | None = None,
    stop: threading.Event | None = None,
) -> WarmResult:
    """Fill the cache with what this node reads in an epoch, in the order in which it reads it.

    The plan is that of a loader with the same dataset, seed, global batch (256 a rank unless told),
    shuffle, lanes, window and reshuffle; with others a node of several reads other shards. On one
    node all plans read the same, in another order. Only what the cache keeps for the job is
    fetched.

    world: of a rank on this node, whose local ranks are all of the node's; None is World(0, 1).
    process: (number, of how many) where several processes of a node share its shards out. workers:
    shards at a time. dry_run: fetch nothing. progress: called from several threads. stop: ends it
    early; the result tells what came till then.

    Raises ConfigError for a local dataset (nothing to warm), one without cache=, and a limit
    below two open windows; WriteError for a cache folder that can't be used; and what opening the
    dataset raises. An object that fails doesn't end it: see WarmResult.failed.
    """
    began = time.perf_counter()
    world, contents = world or World(0, 1), dataset.contents
    remote = _checked_remote(dataset)
    schedule = _schedule(global_batch_size, world)
    order = _order(
        dataset,
        schedule,
        seed=seed,
        shuffle=shuffle,
        lanes=lanes,
        window=window,
        reshuffle=reshuffle,
    )
    share = NodeShare(remote, contents, order.plan(), batches=schedule.sizes, world=world)
    peers = None if dry_run else peer_links(remote, order, world, _store())
    if peers is not None:
        peers.begin(epoch)
    share.join()
    try:
        fills = ShareFills(
            contents, remote, share, processes=process[1], dry_run=dry_run, progress=progress
        )
        shards = _in_order(_needs(order, world), fills.kept, start=Cursor(epoch, 0))
        mine = itertools.islice(shards, process[0], None, process[1])
        own = mine if peers is None else _own_first(remote, mine)
        fills.run(own, workers=workers, stop=stop or threading.Event())
    finally:
        share.leave()
        if peers is not None:
            peers.close()
    return fills.result(time.perf_counter() - began)


def _order(
    dataset: Source,
    schedule: BatchSchedule,
    *,
    seed: int,
    shuffle: bool,
    lanes: int | None,
    window: int | None,
    reshuffle: float,
) -> JobOrder:
    settings = ordered_settings(seed=seed)
    if shuffle:
        settings = shuffled_settings(
            dataset.contents,
            seed=seed,
            global_batch=schedule.first_size,
            lanes=lanes,
            window=window,
            reshuffle=reshuffle,
        )
    walk = Walk(samples=dataset.contents.samples, schedule=schedule, drop_last=False)
    return JobOrder(source=dataset, settings=settings, walk=walk)


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


def _schedule(size: GlobalBatch | None, world: World) -> BatchSchedule:
    schedule = batch_schedule(BATCH_PER_RANK * world.size if size is None else size)
    if (least := schedule.smallest) < world.size:
        raise ConfigError(
            f"global_batch_size: got {least}, wanted at least the world's {world.size} ranks."
        )
    return schedule


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
