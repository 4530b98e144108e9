"""Fetch what a node will read, before the job or beside it.

A job that runs at the same time shares the fills: both write into the same files of the cache, and
each range is fetched by one of them. What is there is skipped, so an interrupted warm-up goes on
where it stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.pipeline.feed.node_warm import warm_node
from penstock.pipeline.feed.warm_order import FILLS_AT_ONCE, WarmOrder
from penstock.pipeline.options.order_options import DEFAULT_ORDER, Order
from penstock.pipeline.plan.world import World
from penstock.readers.dataset import Dataset
from penstock.readers.source import Source

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable
    from concurrent.futures import Executor

    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.pipeline.feed.share_fills import WarmResult, WarmState
    from penstock.pipeline.options.sizes import GlobalBatch
    from penstock.readers.origin.urls import Url


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
    dataset: Source | Url,
    *,
    cache: DiskCache | str | os.PathLike[str] | None = None,
    world: World | None = None,
    epoch: int = 0,
    seed: int = 0,
    global_batch_size: GlobalBatch | None = None,
    shuffle: bool = True,
    order: Order = DEFAULT_ORDER,
    state: dict[str, Any] | None = None,
    process: tuple[int, int] = (0, 1),
    workers: int = FILLS_AT_ONCE,
    dry_run: bool = False,
    progress: Callable[[WarmState], None] | None = None,
    stop: threading.Event | None = None,
    executor: Executor | None = None,
    nodes: int | None = None,
) -> WarmResult:
    """Fill the cache with what this node reads in an epoch, in the order in which it reads it.

    The plan is that of a loader with the same dataset, seed, global batch (256 a rank unless told),
    shuffle and order; with others a node of several reads other shards. On one node all plans read
    the same, in another order. Only what the cache keeps for the job is fetched.

    state: of the job that will go on, as `state_dict()` gave it: its plan, order of lanes, batches
    and place are those of the warm-up; of the other arguments only global_batch_size may stand
    beside it, where the job will have another.
    world: of a rank on this node, whose local ranks are all of the node's; None is World(0, 1).
    process: (number, of how many) where several processes of a node share its shards out. workers:
    shards at a time. dry_run: fetch nothing. progress: called from several threads. stop: ends it
    early; the result tells what came till then. dataset, cache: also a URL and the cache for it.
    executor: whose workers warm their machines, `nodes` of them (docs/packs.md); world is then any
    rank's of the job, the result the sum of all, progress is told as each node is warm, and stop
    doesn't reach the workers.

    Raises ConfigError for a local dataset (nothing to warm), one without cache=, and a limit
    below two open windows; ResumeError for a state of another dataset; WriteError for a cache
    folder that can't be used; and what opening the dataset raises. An object that fails doesn't end
    it: see WarmResult.failed.
    """
    wanted = WarmOrder(
        epoch=epoch,
        seed=seed,
        global_batch_size=global_batch_size,
        shuffle=shuffle,
        order=order,
        state=state,
        process=process,
        workers=workers,
        dry_run=dry_run,
    )
    if nodes is not None and executor is None:
        raise ConfigError(
            f"nodes: got {nodes} without an executor, whose workers would warm them. This call "
            "warms one node, the one that it runs on: say which by world=."
        )
    if not isinstance(dataset, Source):
        with Dataset(dataset, cache=cache, allow_left_out=1) as opened:
            return _warmed(opened, wanted, world, executor, nodes, progress, stop)
    if cache is not None:
        raise ConfigError("cache: got one beside a dataset, which was made with its own.")
    return _warmed(dataset, wanted, world, executor, nodes, progress, stop)


def _warmed(
    dataset: Source,
    order: WarmOrder,
    world: World | None,
    executor: Executor | None,
    nodes: int | None,
    progress: Callable[[WarmState], None] | None,
    stop: threading.Event | None,
) -> WarmResult:
    if executor is None:
        return warm_node(dataset, order, world=world or World(0, 1), progress=progress, stop=stop)
    from penstock.pipeline.feed.warm_crew import warm_nodes  # one node needs none

    return warm_nodes(
        dataset, order, executor=executor, nodes=nodes, world=world, progress=progress
    )
