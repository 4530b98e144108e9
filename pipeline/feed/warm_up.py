"""Fill a node's cache with the shards that the node will read, before or during the job.

A job that runs at the same time shares the fills: both write to the same files of the cache, and
each range is fetched by one of them. Cached shards are skipped, so an interrupted warm-up continues
where it stopped.

With an executor, one task per node is submitted, which fills the node's own cache. Executors don't
know nodes. Dask reports the hosts of its workers, so each task is pinned to a worker of another
host. With other executors, `nodes` tasks are submitted, and the executor decides where each runs,
so start one worker per machine. A share that was fetched on another node than the job would use
isn't lost: the job's lanes follow what the nodes hold.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.cache import (
    LEAVE_TIMEOUT_S,
    ClosedError,
    ConfigError,
    JobStore,
    Ordered,
    PenstockError,
    Workers,
    WriteError,
    check_executor,
    dask_client,
    keep_open,
    run_tasks,
    worker_name,
)
from penstock.pipeline.feed.frozen_order import bucket_order, freeze_order
from penstock.pipeline.feed.prefetch import NodeShare
from penstock.pipeline.options import (
    DEFAULT_ORDER,
    LoaderOptions,
    Order,
    check_count,
    shuffle_settings,
)
from penstock.pipeline.plan import Cursor, Needs, World, node_ranks
from penstock.readers import SerializedSource, Source, open_source

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.cache.disk import DiskCache
    from penstock.pipeline.options import GlobalBatch
    from penstock.pipeline.plan import JobOrder
    from penstock.readers import RemoteShards
    from penstock.readers.origin import Url

    Progress = Callable[["WarmState"], None] | None

# The default batch size of a rank, which is usual for images.
BATCH_PER_RANK = 256
# Shards filled at a time. Each is fetched by several requests; other shards fill the gap while its
# last requests end.
FILLS_AT_ONCE = 4

_FIXED_BY_STATE = ("epoch", "seed", "shuffle")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRequest:
    """The arguments of a warm-up, by the names of `warm`."""

    epoch: int = 0
    seed: int = 0
    global_batch_size: GlobalBatch | None = None
    shuffle: bool = True
    order: Order = DEFAULT_ORDER
    state: dict[str, Any] | None = None
    process: tuple[int, int] = (0, 1)
    workers: int = FILLS_AT_ONCE
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.state is None:
            return
        given = {
            each.name: value
            for each in fields(self)
            if each.name in _FIXED_BY_STATE and (value := getattr(self, each.name)) != each.default
        }
        for name, value in (given | shuffle_settings(self.order)).items():
            raise ConfigError(
                f"{name}: got {value!r} together with a state, which contains the order and the "
                "position. Leave one of them out."
            )

    def job(self, source: Source, world: World) -> tuple[JobOrder, Cursor]:
        """Return the job's order, and where its next batch begins.

        Raises ConfigError and PlanError, and ResumeError for a state of another dataset or order.
        """
        from penstock.pipeline.plan import LoaderState  # not needed at a job's first start

        state = None if self.state is None else LoaderState.from_dict(self.state)
        global_batch = self.global_batch_size
        if global_batch is None and state is None:
            global_batch = BATCH_PER_RANK * world.size
        drop_last = state is not None and state.drop_last
        no_device: Any = None  # a warm-up reads no samples
        options = LoaderOptions(
            kind="native",
            seed=self.seed,
            shuffle=self.shuffle,
            order=self.order,
            global_batch_size=global_batch,
            drop_last=drop_last,
            pad=None if drop_last else "mask",
            device=no_device,
            bucket_by="aspect" if state is not None and state.plan.aspects else None,
        ).at(world, device=no_device)
        if state is None:
            return freeze_order(source, options), Cursor(self.epoch, 0)
        lane_order = state.check(source.contents)
        if state.plan.buckets is None:
            options = options.resumed(state, warns=False)
            job = freeze_order(source, options, state.plan, lane_order)
        else:
            job = bucket_order(source, state.plan, lane_order)
        return job, job.walk.normalise(state.cursor)


_REQUESTED = tuple(each.name for each in fields(WarmRequest))

_FillOutcome = Literal["fetched", "there", "no room", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmState:
    """The progress of a warm-up, in bytes.

    wanted_bytes: bytes that the cache shall keep. Of these, fetched_bytes came from the remote in
    this run, there_bytes were cached, and failed_bytes failed. left_out_bytes: bytes that the node
    reads but its cache doesn't keep.
    """

    wanted_bytes: int
    fetched_bytes: int = 0
    there_bytes: int = 0
    failed_bytes: int = 0
    left_out_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """The result of a warm-up.

    bytes, objects: fetched in this run; in a dry run, those that would be. skipped: objects that
    were cached, or that another process fetched in the meantime. failed: URI and reason of each
    object that couldn't be fetched.

    node_bytes: bytes that the node reads in an epoch; kept_bytes: the part of them that the cache
    keeps for the job; left_out: objects that it doesn't keep, which are fetched in each epoch.
    index_bytes: bytes that opening or building the index received before, from `penstock warm`; in
    a dry run over data without an index, those that building it would read.
    """

    bytes: int = 0
    objects: int = 0
    seconds: float = 0.0
    skipped: int = 0
    failed: tuple[tuple[str, str], ...] = ()
    node_bytes: int = 0
    kept_bytes: int = 0
    left_out: int = 0
    index_bytes: int = 0


class ShareFills:
    """Fills shards on several threads, and counts the outcomes."""

    def __init__(self, share: NodeShare, order: WarmRequest, progress: Progress) -> None:
        """progress: called from several threads."""
        self._share, self._remote = share, share.remote
        self._shard_bytes = share.contents.shard_bytes
        self.kept = [shard for shard in share.shards.tolist() if share.keeps(shard)]
        self._kept_bytes = int(self._shard_bytes[self.kept].sum())
        self._order, self._progress = order, progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._objects, self._bytes = Counter[_FillOutcome](), Counter[_FillOutcome]()
        self._failed: list[tuple[str, str]] = []

    def result(self, seconds: float) -> WarmResult:
        """Return the result. seconds: duration of the fills."""
        return WarmResult(
            bytes=self._bytes["fetched"],
            objects=self._objects["fetched"],
            seconds=seconds,
            skipped=self._objects["there"],
            failed=tuple(self._failed),
            node_bytes=self._share.node_bytes,
            kept_bytes=self._kept_bytes,
            left_out=len(self._share.shards) - len(self.kept) + self._objects["no room"],
        )

    def run(self, shards: Iterator[int], stop: threading.Event) -> None:
        """Fill shards in order, several at a time, until `stop` is set."""
        self._stop, workers = stop, self._order.workers
        pool = Workers(workers, name="warm")
        # A large shard may take any time; its requests have limits of their own.
        no_limit_s = threading.TIMEOUT_MAX
        fills = Ordered(self._fill, shards, pool=pool, ahead=2 * workers, timeout_s=no_limit_s)
        try:
            for _ in fills:
                if stop.is_set():
                    break
        except BaseException:
            stop.set()  # before the pool is closed, which waits for fills that have begun
            raise
        finally:
            pool.close(timeout_s=LEAVE_TIMEOUT_S)  # a request that hangs ends by itself

    def _fill(self, shard: int) -> None:
        """Fill a shard and count the outcome, unless it was stopped."""
        if self._stop.is_set():
            return
        size_bytes, came = int(self._shard_bytes[shard]), 0

        def progress(got: int) -> None:
            nonlocal came
            came += got
            self._count("fetched", got)

        if self._remote.is_whole(shard):
            self._count("there", size_bytes, is_end=True)
        elif self._order.dry_run:
            self._count("fetched", size_bytes, is_end=True)
        else:
            try:
                fetched = self._remote.fill(shard, progress=progress, stop=self._stop)
            except ClosedError:
                raise
            except PenstockError as error:
                if not self._stop.is_set():
                    self._failed.append((self._remote.uri(shard), str(error)))
                    self._count("failed", size_bytes - came, is_end=True)
                return
            if self._stop.is_set() and not self._remote.is_whole(shard):
                return
            if fetched < 0:
                self._count("no room", 0, is_end=True)
                return
            self._count("there", size_bytes - came, is_end=not came)  # of another process
            if came:
                self._count("fetched", 0, is_end=True)

    def _count(self, outcome: _FillOutcome, size_bytes: int, *, is_end: bool = False) -> None:
        """Count bytes, and report the progress. is_end: this is the outcome of a shard."""
        with self._lock:
            self._bytes[outcome] += size_bytes
            self._objects[outcome] += is_end
            state = WarmState(
                wanted_bytes=self._kept_bytes // self._order.process[1],
                fetched_bytes=self._bytes["fetched"],
                there_bytes=self._bytes["there"],
                failed_bytes=self._bytes["failed"],
                left_out_bytes=self._share.node_bytes - self._kept_bytes,
            )
        if self._progress is not None:
            self._progress(state)


def warm_node(
    dataset: Source,
    order: WarmRequest,
    *,
    world: World,
    progress: Progress = None,
    stop: threading.Event | None = None,
) -> WarmResult:
    """Fill the cache of this node with its share; `warm` documents the arguments."""
    began, asks = time.perf_counter(), not order.dry_run
    remote = _checked_remote(dataset)
    (job, start), (number, count) = order.job(dataset, world), order.process
    store = JobStore.of_group() if asks else None
    store = None if store is None else store.under("warm")
    share = NodeShare(remote, job, job.plan(), world, store=store, asks_peers=asks)
    try:
        share.join(start.epoch)
        fills = ShareFills(share, order, progress)
        first, end = node_ranks(world)
        needs = Needs(job.plan(), job.walk, first=first, end=end, world=world.size)
        shards = _in_order(needs, fills.kept, start=start)
        mine = itertools.islice(shards, number, None, count)
        own = mine if share.peers is None else _own_first(remote, mine)
        fills.run(own, stop or threading.Event())
    finally:
        share.leave()
    return fills.result(time.perf_counter() - began)


def _own_first(remote: RemoteShards, shards: Iterator[int]) -> Iterator[int]:
    """Yield the shards that this node fetches from the remote, then those that another node does.

    The other node has usually fetched the latter by then.
    """
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
            f"{dataset.url} is local: there is nothing to warm. Read it directly; for data on a "
            "network mount pass cache= to the Dataset."
        )
    if any(each.cache is None or each.cache.is_temporary for each in remote.remotes):
        raise ConfigError(
            f"{dataset.url}: the dataset has no cache to warm. Pass the cache that the job will "
            'use, such as cache=DiskCache("/nvme/penstock", max_bytes="1.5TB").'
        )
    if unusable := [cache for cache in remote.caches if not cache.can_be_used]:
        raise WriteError(
            f"{unusable[0].path}: the cache folder can't be used, so nothing can be warmed. "
            "`penstock doctor` with that folder explains why."
        )
    return remote


def _in_order(needs: Needs, kept: list[int], *, start: Cursor) -> Iterator[int]:
    """Yield each kept shard once: the epoch's in the order of first need, then all others."""
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


def node_world(world_size: int, *, nodes: int, node_rank: int) -> World:
    """Return the world of a node's first rank, with all ranks of the node. Raises ConfigError."""
    if nodes < 1 or world_size < 1:
        raise ConfigError(f"Got {world_size} ranks on {nodes} nodes, wanted at least 1 of each.")
    if not 0 <= node_rank < nodes:
        raise ConfigError(
            f"node_rank: got {node_rank}, wanted 0 to {nodes - 1} for {nodes} node"
            f"{'s' * (nodes != 1)}. Nodes are counted from 0."
        )
    if world_size % nodes:
        raise ConfigError(
            f"world_size: got {world_size}, wanted a multiple of the {nodes} nodes: all nodes have "
            "the same number of ranks."
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
    """Fill the cache with the shards that this node reads in an epoch, in the order of need.

    ```python
    from penstock import Dataset, DiskCache, warm

    cache = DiskCache("/nvme/penstock", max_bytes="1GB")
    with Dataset("s3://bucket/packs/train", cache=cache) as train:
        warm(train, seed=7)
    ```

    The plan is that of a loader with the same dataset, seed, global batch (256 per rank by
    default), shuffle and order. With other values, one of several nodes would read other shards; a
    single node would read the same ones in another order. Only shards that the cache keeps for the
    job are fetched.

    dataset, cache: a dataset, or a URL and the cache for it; also a mixture file (`mix_file`).
    state: of a job that will continue, from `state_dict()`. Its plan, lane order, batches and
    position apply. Of the other arguments of the plan, only global_batch_size may be passed, too,
    if the job will have another one.
    world: of a rank on this node, whose local ranks are all ranks of the node; None is World(0, 1).
    process: (number, count) if several processes of a node divide its shards. workers: shards that
    are fetched in parallel. dry_run: fetch nothing. progress: called from several threads. stop:
    ends the warm-up early; the result then covers the time before.
    executor: its workers warm their machines, `nodes` of them (docs/howto/packs.md). World is then
    that of any rank, the result is the sum over all nodes, progress is called after each node, and
    stop doesn't reach the workers.

    Raises ConfigError for a local dataset, one without cache=, and a limit below two open windows;
    PlanError for a global batch smaller than the world; ResumeError for a state of another dataset;
    WriteError for a cache folder that can't be used; and the errors of opening the dataset. An
    object that fails doesn't end the warm-up: see WarmResult.failed.
    """
    wanted = WarmRequest(**{n: value for n, value in locals().items() if n in _REQUESTED})
    if nodes is not None and executor is None:
        raise ConfigError(
            f"nodes: got {nodes} without an executor, whose workers would warm them. This call "
            "warms the node on which it runs. Pass world= to choose the node's share."
        )
    source: Any
    if not isinstance(dataset, Source):
        source = open_source(dataset, cache=cache, allow_left_out=1)
    elif cache is None:
        source = contextlib.nullcontext(dataset)  # stays open
    else:
        raise ConfigError(
            "cache: got one together with a dataset, which has its own. Pass a URL, or no cache=."
        )
    with source as opened:
        if executor is not None:
            return warm_nodes(opened, wanted, executor, nodes, world=world, progress=progress)
        local = world or World(0, 1)
        return warm_node(opened, wanted, world=local, progress=progress, stop=stop)


_log = logging.getLogger("penstock")
_MOST_NODES = 2**16
"""No job has more nodes; without a limit, a typing error would fill the memory with tasks."""


def warm_task(source: SerializedSource, order: WarmRequest, world: World) -> tuple[str, WarmResult]:
    """Warm the node of this worker; return the worker's name and the result."""
    dataset = keep_open(source, source.load)
    return worker_name(), warm_node(dataset, order, world=world)


def warm_nodes(
    dataset: Source,
    order: WarmRequest,
    executor: Executor,
    nodes: int | None,
    *,
    world: World | None,
    progress: Progress = None,
) -> WarmResult:
    """Warm several nodes by an executor's workers.

    nodes: None for all hosts of a Dask cluster. world: of the job. progress: called after each
    node. Raises ConfigError, and the errors of a node's warm-up, with the worker's name.
    """
    check_executor(executor)
    hosts = worker_per_host(executor)
    count = len(hosts) if nodes is None else check_count("nodes", nodes, least=1)
    if not count:
        raise ConfigError(
            "nodes: got None, wanted the number of the job's nodes, such as nodes=4: this executor "
            "doesn't report the hosts of its workers."
        )
    if hosts and count > len(hosts):
        raise ConfigError(
            f"nodes: got {count}, and Dask has workers on {len(hosts)} hosts. Start a worker on "
            "each of the job's nodes, or pass fewer."
        )
    if count > _MOST_NODES:
        raise ConfigError(f"nodes: got {count}, wanted at most {_MOST_NODES}.")
    size = count if world is None else world.size
    worlds = [node_world(size, nodes=count, node_rank=node) for node in range(count)]
    serialized = SerializedSource.of(dataset)
    tasks = [(each, partial(warm_task, serialized, order, each)) for each in worlds]
    run: Any = _PinnedExecutor(executor, hosts) if hosts else executor
    results: list[WarmResult] = []
    for _, (worker, result) in run_tasks(run, tasks, what="nodes", total=count):
        results.append(result)
        _log.info("%s has warmed its node: %d of %d", worker, len(results), count)
        if progress is not None:
            done = _total(results)
            progress(
                WarmState(
                    # The other nodes are expected to keep as much.
                    wanted_bytes=int(done.kept_bytes * count / len(results)),
                    fetched_bytes=done.bytes,
                    there_bytes=0 if done.failed else max(0, done.kept_bytes - done.bytes),
                    left_out_bytes=done.node_bytes - done.kept_bytes,
                )
            )
    return _total(results)


def _total(results: Sequence[WarmResult]) -> WarmResult:
    """Add up the results of nodes that were warmed at the same time."""
    added = ("bytes", "objects", "skipped", "node_bytes", "kept_bytes", "left_out")
    return WarmResult(
        **{name: sum(getattr(each, name) for each in results) for name in added},
        seconds=max(each.seconds for each in results),
        failed=tuple(failure for each in results for failure in each.failed),
    )


def worker_per_host(executor: Executor) -> list[str]:
    """Return the address of one worker per host of a Dask cluster; none for other executors."""
    client = dask_client(executor)
    if client is None:
        return []
    workers = client.scheduler_info(n_workers=-1)["workers"]
    first = {info["host"]: address for address, info in sorted(workers.items(), reverse=True)}
    return [first[host] for host in sorted(first)]


class _PinnedExecutor:
    """A Dask executor that sends each task to another worker, in order."""

    def __init__(self, executor: Executor, workers: list[str]) -> None:
        self._client, self._workers = dask_client(executor), iter(workers)
        self.num_workers = len(workers)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        assert self._client is not None
        pinned = self._client.get_executor(workers=[next(self._workers)], pure=False)
        return pinned.submit(function, *arguments)
