"""Fetch what a node will read, before the job or beside it.

A job that runs at the same time shares the fills: both write into the same files of the cache, and
each range is fetched by one of them. What is there is skipped, so an interrupted warm-up goes on
where it stopped.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from penstock.cache.errors import ClosedError, ConfigError, PenstockError, WriteError
from penstock.cache.threads import Ordered, Workers
from penstock.pipeline.feed.build import make_plan, shuffled_plan
from penstock.pipeline.feed.prefetch import Share
from penstock.pipeline.plan.needs import Needs, node_ranks
from penstock.pipeline.plan.state import PlanSettings
from penstock.pipeline.plan.steps import Cursor, Walk
from penstock.pipeline.plan.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.cache.blobs.remote import Remote
    from penstock.readers import Dataset
    from penstock.readers.index.index import Index

# Of one rank, where nobody says what the job's will be: as people train on images.
BATCH_PER_RANK = 256
# Shards at a time. Each is fetched by several ranges at once; several shards hide each one's ends.
FILLS_AT_ONCE = 4
# An interrupted warm-up waits so long for fills to stop. A request that hangs ends by itself.
_CLOSE_S = 2.0

_Outcome = Literal["fetched", "there", "no room", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmState:
    """How far a warm-up is, in bytes: what it shall keep, and of that what came from the remote
    in this run, what was there, what failed; left_out_bytes: what the node reads beside that."""

    wanted_bytes: int
    fetched_bytes: int = 0
    there_bytes: int = 0
    failed_bytes: int = 0
    left_out_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """bytes, objects: fetched in this run (of a dry run: what would be). skipped: objects that were
    there, or that others fetched meanwhile. failed: URI and reason of each object that didn't come.

    node_bytes: what the node reads in an epoch; kept_bytes: of that, what the cache keeps for the
    job; left_out: objects that it doesn't: they come from the remote in each epoch.
    """

    bytes: int
    objects: int
    seconds: float
    skipped: int
    failed: tuple[tuple[str, str], ...]
    node_bytes: int
    kept_bytes: int
    left_out: int


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
    dataset: Dataset,
    *,
    world: World | None = None,
    epoch: int = 0,
    seed: int = 0,
    global_batch_size: int | None = None,
    shuffle: bool = True,
    lanes: int | None = None,
    window: int | None = None,
    reshuffle: float = 0.0,
    part: tuple[int, int] = (0, 1),
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
    part: (number, of how many) where several processes of a node share its list out. workers:
    shards at a time. dry_run: fetch nothing. progress: called from several threads. stop: ends it
    early; the result tells what came till then.

    Raises ConfigError for a local dataset (nothing to warm), one without cache=, and a limit
    below two open windows; WriteError for a cache folder that can't be used; and what opening the
    dataset raises. An object that fails doesn't end it: see WarmResult.failed.
    """
    began = time.perf_counter()
    world = world or World(0, 1)
    index = dataset.index
    remote = _checked_remote(dataset)
    batch = global_batch_size or BATCH_PER_RANK * world.size
    if batch < world.size:
        raise ConfigError(
            f"global_batch_size: got {batch}, wanted at least the world's {world.size} ranks."
        )
    frozen = (
        shuffled_plan(
            index, seed=seed, global_batch=batch, lanes=lanes, window=window, reshuffle=reshuffle
        )
        if shuffle
        else PlanSettings(seed=seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)
    )
    plan = make_plan(index, frozen)
    share = Share(remote, dataset, plan, global_batch=batch, world=world)
    share.join()
    try:
        keys = index.keys()
        kept = [n for n in share.shards.tolist() if share.keeps(keys[n])]
        first, end = node_ranks(world)
        needs = Needs(
            plan,
            Walk(samples=index.samples, global_batch=batch, drop_last=False),
            first=first,
            end=end,
            world=world.size,
        )
        order = _in_order(needs, kept, shards=len(index.sizes), start=Cursor(epoch, 0))
        mine = (shard for place, shard in enumerate(order) if place % part[1] == part[0])
        left_out_bytes = share.node_bytes - int(index.shard_bytes[kept].sum())
        run = _Warming(
            index,
            remote,
            # Of several processes each reports about its part.
            wanted_bytes=int(index.shard_bytes[kept].sum()) // part[1],
            left_out_bytes=left_out_bytes,
            dry_run=dry_run,
            progress=progress,
            stop=stop or threading.Event(),
        )
        run.all(mine, workers=workers)
        return WarmResult(
            bytes=run.fetched_bytes,
            objects=run.count["fetched"],
            seconds=time.perf_counter() - began,
            skipped=run.count["there"],
            failed=tuple(run.failed),
            node_bytes=share.node_bytes,
            kept_bytes=share.node_bytes - left_out_bytes,
            left_out=len(share.shards) - len(kept) + run.count["no room"],
        )
    finally:
        share.leave()


def _checked_remote(dataset: Dataset) -> Remote:
    remote = dataset.remote
    if remote is None:
        raise ConfigError(
            f"{dataset.url} is local: there is nothing to warm. Read it where it is; for data on a "
            "network mount pass cache= to the Dataset."
        )
    if remote.cache is None or remote.cache.is_temporary:
        raise ConfigError(
            f"{dataset.url}: the dataset has no cache to warm. Pass "
            'cache=DiskCache("/nvme/penstock", max_bytes="1.5TB"), the one that the job will use.'
        )
    if not remote.cache.can_be_used:
        raise WriteError(
            f"{remote.cache.path}: the cache folder can't be used, so nothing can be warmed. "
            "`penstock doctor` with that folder tells why."
        )
    return remote


def _in_order(needs: Needs, kept: list[int], *, shards: int, start: Cursor) -> Iterator[int]:
    """Each kept shard once: those of the epoch by first need, then those of other epochs."""
    todo = np.zeros(shards, np.bool_)
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


class _Warming:
    """Fills shards on several threads, and counts."""

    def __init__(
        self,
        index: Index,
        remote: Remote,
        *,
        wanted_bytes: int,
        left_out_bytes: int,
        dry_run: bool,
        progress: Callable[[WarmState], None] | None,
        stop: threading.Event,
    ) -> None:
        self._index, self._remote = index, remote
        self._wanted_bytes, self._left_out_bytes = wanted_bytes, left_out_bytes
        self._dry_run, self._progress, self._stop = dry_run, progress, stop
        self._lock = threading.Lock()
        self._there_bytes = self._failed_bytes = 0
        self.fetched_bytes = 0
        self.count: dict[_Outcome, int] = {"fetched": 0, "there": 0, "no room": 0, "failed": 0}
        self.failed: list[tuple[str, str]] = []

    def all(self, shards: Iterator[int], *, workers: int) -> None:
        pool = Workers(workers, name="warm")
        # A large shard may take any time; its requests have limits of their own.
        no_limit_s = threading.TIMEOUT_MAX
        fills = Ordered(self._one, shards, pool=pool, ahead=2 * workers, timeout_s=no_limit_s)
        try:
            for _ in fills:
                if self._stop.is_set():
                    break
        except BaseException:
            self._stop.set()  # before the pool is closed, which waits for what has started
            raise
        finally:
            pool.close(timeout_s=_CLOSE_S)

    def _one(self, shard: int) -> None:
        outcome = self._fill(shard)
        if outcome is not None:
            with self._lock:
                self.count[outcome] += 1

    def _fill(self, shard: int) -> _Outcome | None:
        """Fill a shard; None where it was stopped."""
        if self._stop.is_set():
            return None
        size_bytes = int(self._index.shard_bytes[shard])
        source = self._index.source(shard)
        if self._remote.is_whole(source):
            self._tell(there_bytes=size_bytes)
            return "there"
        if self._dry_run:
            self._tell(fetched_bytes=size_bytes)
            return "fetched"
        came = 0

        def progress(got: int) -> None:
            nonlocal came
            came += got
            self._tell(fetched_bytes=got)

        try:
            fetched = self._remote.fill(source, progress=progress, stop=self._stop)
        except ClosedError:
            raise
        except PenstockError as error:
            if self._stop.is_set():
                return None
            self.failed.append((source.uri, str(error)))
            self._tell(failed_bytes=size_bytes - came)
            return "failed"
        if self._stop.is_set() and not self._remote.is_whole(source):
            return None
        if fetched < 0:
            return "no room"
        self._tell(there_bytes=size_bytes - came)  # the job, or another warm-up, brought the rest
        return "fetched" if came else "there"

    def _tell(self, *, fetched_bytes: int = 0, there_bytes: int = 0, failed_bytes: int = 0) -> None:
        with self._lock:
            self.fetched_bytes += fetched_bytes
            self._there_bytes += there_bytes
            self._failed_bytes += failed_bytes
            state = WarmState(
                wanted_bytes=self._wanted_bytes,
                fetched_bytes=self.fetched_bytes,
                there_bytes=self._there_bytes,
                failed_bytes=self._failed_bytes,
                left_out_bytes=self._left_out_bytes,
            )
        if self._progress is not None:
            self._progress(state)
