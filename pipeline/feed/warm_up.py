"""Fetch into a node's cache what the node will read, before the job or beside it.

A job that runs at the same time shares the fills: both write into the same files of the cache, and
each range is fetched by one of them. What is cached already is skipped, so an interrupted warm-up
goes on where it stopped.

With an executor one task a node is submitted, which fills that node's share of its own cache. An
executor doesn't know nodes. Dask says where its workers are, so each task is pinned to a worker of
another host. With others `nodes` tasks are submitted, and the executor decides on which machine
each runs: start one worker a machine. A share that was fetched on another node than the job will
have is not lost: the job's lanes follow what the nodes hold.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import pickle
import threading
import time
from dataclasses import dataclass
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
from penstock.pipeline.feed.prefetch import make_peer_links
from penstock.pipeline.feed.shard_fills import NodeShare
from penstock.pipeline.options import (
    DEFAULT_ORDER,
    Order,
    batch_schedule,
    check_count,
    shuffle_settings,
)
from penstock.pipeline.plan import (
    Cursor,
    JobOrder,
    Needs,
    Walk,
    World,
    node_ranks,
    ordered_settings,
    shuffled_settings,
)
from penstock.readers import Dataset, SerializedSource, Source
from penstock.readers.index import check_indexes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Executor

    from numpy.typing import NDArray

    from penstock.cache.disk import DiskCache
    from penstock.pipeline.options import GlobalBatch
    from penstock.pipeline.plan import BatchSchedule
    from penstock.readers import Contents, RemoteShards
    from penstock.readers.origin import Url

# Of one rank, where nobody says what the job's will be: as people train on images.
BATCH_PER_RANK = 256
# Shards at a time. Each is fetched by several ranges at once; several shards hide each one's ends.
FILLS_AT_ONCE = 4

_FIXED_BY_STATE = ("epoch", "seed", "shuffle")


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmRequest:
    """What a warm-up was asked for, by the names of `warm`."""

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
        fields = type(self).__dataclass_fields__
        given = {name: getattr(self, name) for name in _FIXED_BY_STATE}
        given = {name: value for name, value in given.items() if value != fields[name].default}
        for name, value in (given | shuffle_settings(self.order)).items():
            raise ConfigError(
                f"{name}: got {value!r} beside a state, which says it "
                "already: order and place come from the state. Leave one of them out."
            )

    def job(self, source: Source, world: World) -> tuple[JobOrder, Cursor]:
        """The job's order, and where its next batch begins. Raises ConfigError; ResumeError for a
        state of something else."""
        given = self.global_batch_size
        if self.state is not None:
            wanted = None if given is None else batch_schedule(given)
            return _resumed(source, self.state, wanted, world)
        schedule = batch_schedule(BATCH_PER_RANK * world.size if given is None else given)
        _check_batches(schedule, world)
        settings = ordered_settings(seed=self.seed)
        if self.shuffle:
            settings = shuffled_settings(
                source.contents,
                seed=self.seed,
                global_batch=schedule.first_size,
                lanes=self.order.lanes,
                window=self.order.window,
                reshuffle=self.order.reshuffle,
            )
        walk = Walk(samples=source.contents.samples, schedule=schedule, drop_last=False)
        return JobOrder(source=source, settings=settings, walk=walk), Cursor(self.epoch, 0)


def _check_batches(schedule: BatchSchedule, world: World) -> None:
    if (least := schedule.smallest) < world.size:
        raise ConfigError(
            f"global_batch_size: got {least}, wanted at least the world's {world.size} ranks."
        )


def _resumed(
    source: Source, told: dict[str, Any], wanted: BatchSchedule | None, world: World
) -> tuple[JobOrder, Cursor]:
    """As a loader goes on from the state. wanted: batches from there on; None: the state's."""
    # A job's first start needs none of it.
    from penstock.pipeline.plan import (
        LaneOrder,
        LoaderState,
        check_resumable,
        order_fingerprint,
        other_order,
        resumed_schedule,
    )

    state, contents = LoaderState.from_dict(told), source.contents
    check_resumable(state, dataset=contents.fingerprint, samples=contents.samples, wanted={})
    fingerprint = order_fingerprint(contents, state.plan)
    if fingerprint != state.fingerprint:
        raise other_order(state.fingerprint, fingerprint)
    order = None
    if state.lane_order is not None:
        order = LaneOrder.parse(state.lane_order, lanes=state.plan.lanes)
    if state.plan.buckets is not None:
        from penstock.pipeline.feed.frozen_order import bucket_order

        job = bucket_order(source, state.plan, order)
        return job, job.walk.normalise(state.cursor)
    schedule = resumed_schedule(state, wanted, drop_last=state.drop_last)
    _check_batches(schedule, world)
    walk = Walk(samples=contents.samples, schedule=schedule, drop_last=state.drop_last)
    job = JobOrder(source=source, settings=state.plan, walk=walk, lane_order=order)
    return job, walk.normalise(state.cursor)


_FillOutcome = Literal["fetched", "there", "no room", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmState:
    """How far a warm-up is, in bytes.

    wanted_bytes: what it shall keep; of that, what came from the remote in this run, what was
    there, what failed. left_out_bytes: what the node reads beside that.
    """

    wanted_bytes: int
    fetched_bytes: int = 0
    there_bytes: int = 0
    failed_bytes: int = 0
    left_out_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """What a warm-up has done.

    bytes, objects: fetched in this run (of a dry run: what would be). skipped: objects that were
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


class ShareFills:
    """Fills given shards on several threads, and counts what came of each."""

    def __init__(
        self,
        contents: Contents,
        remote: RemoteShards,
        share: NodeShare,
        *,
        processes: int,
        dry_run: bool,
        progress: Callable[[WarmState], None] | None,
    ) -> None:
        """processes: of this node, which share its shards out; each reports about its own.
        dry_run: fetch nothing. progress: called from several threads."""
        self._shard_bytes, self._remote, self._share = contents.shard_bytes, remote, share
        self.kept = [shard for shard in share.shards.tolist() if share.keeps(shard)]
        self._kept_bytes = int(self._shard_bytes[self.kept].sum())
        self._processes, self._dry_run, self._progress = processes, dry_run, progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._fetched_bytes = self._there_bytes = self._failed_bytes = 0
        self._count: dict[_FillOutcome, int] = {"fetched": 0, "there": 0, "no room": 0, "failed": 0}
        self._failed: list[tuple[str, str]] = []

    def result(self, seconds: float) -> WarmResult:
        """What the fills came to, in so many seconds."""
        return WarmResult(
            bytes=self._fetched_bytes,
            objects=self._count["fetched"],
            seconds=seconds,
            skipped=self._count["there"],
            failed=tuple(self._failed),
            node_bytes=self._share.node_bytes,
            kept_bytes=self._kept_bytes,
            left_out=len(self._share.shards) - len(self.kept) + self._count["no room"],
        )

    def run(self, shards: Iterator[int], *, workers: int, stop: threading.Event) -> None:
        """Fill the shards, the first ones first, so many at a time. stop: ends it early."""
        self._stop = stop
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
            pool.close(timeout_s=LEAVE_TIMEOUT_S)  # a request that hangs ends by itself

    def _one(self, shard: int) -> None:
        outcome = self._fill(shard)
        if outcome is not None:
            with self._lock:
                self._count[outcome] += 1

    def _fill(self, shard: int) -> _FillOutcome | None:
        """Fill a shard; None where it was stopped."""
        if self._stop.is_set():
            return None
        size_bytes = int(self._shard_bytes[shard])
        if self._remote.is_whole(shard):
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
            fetched = self._remote.fill(shard, progress=progress, stop=self._stop)
        except ClosedError:
            raise
        except PenstockError as error:
            if self._stop.is_set():
                return None
            self._failed.append((self._remote.uri(shard), str(error)))
            self._tell(failed_bytes=size_bytes - came)
            return "failed"
        if self._stop.is_set() and not self._remote.is_whole(shard):
            return None
        if fetched < 0:
            return "no room"
        self._tell(there_bytes=size_bytes - came)  # the job, or another warm-up, brought the rest
        return "fetched" if came else "there"

    def _tell(self, *, fetched_bytes: int = 0, there_bytes: int = 0, failed_bytes: int = 0) -> None:
        with self._lock:
            self._fetched_bytes += fetched_bytes
            self._there_bytes += there_bytes
            self._failed_bytes += failed_bytes
            state = WarmState(
                wanted_bytes=self._kept_bytes // self._processes,
                fetched_bytes=self._fetched_bytes,
                there_bytes=self._there_bytes,
                failed_bytes=self._failed_bytes,
                left_out_bytes=self._share.node_bytes - self._kept_bytes,
            )
        if self._progress is not None:
            self._progress(state)


def warm_node(
    dataset: Source,
    order: WarmRequest,
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
    peers = None if order.dry_run else make_peer_links(remote, job, world, _store())
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
    wanted = WarmRequest(
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
    order: WarmRequest,
    world: World | None,
    executor: Executor | None,
    nodes: int | None,
    progress: Callable[[WarmState], None] | None,
    stop: threading.Event | None,
) -> WarmResult:
    if executor is None:
        return warm_node(dataset, order, world=world or World(0, 1), progress=progress, stop=stop)

    return warm_nodes(
        dataset, order, executor=executor, nodes=nodes, world=world, progress=progress
    )


_log = logging.getLogger("penstock")
_MOST_NODES = 2**16
"""No job has as many; a slip of the keyboard would fill the memory with tasks."""


@dataclass(frozen=True, slots=True)
class WarmTask:
    """One node's share. source: a dataset, pickled without secrets; indexes: folders that it needs;
    rank, size, ranks: the node's first rank, all of the job, and those of the node."""

    url: str
    source: bytes
    indexes: tuple[bytes, ...]
    order: WarmRequest
    rank: int
    size: int
    ranks: int


def warm_task(task: WarmTask) -> tuple[str, WarmResult]:
    """Warm the node that this worker is on; returns who did it, and what came of it."""
    check_indexes(task.url, task.indexes)
    key = hashlib.sha256(task.source).hexdigest()
    # Of the driver, as the task that it came with.
    dataset = keep_open(f"warm {key}", lambda: pickle.loads(task.source))
    world = World(task.rank, task.size, local_rank=0, local_size=task.ranks)
    return worker_name(), warm_node(dataset, task.order, world=world)


def warm_nodes(
    dataset: Source,
    order: WarmRequest,
    *,
    executor: Executor,
    nodes: int | None,
    world: World | None,
    progress: Callable[[WarmState], None] | None = None,
) -> WarmResult:
    """Warm so many nodes, None is as many hosts as Dask has. world: of the job. progress: called
    when a node is warm. Raises ConfigError, and what a node's warm-up raises, with the worker's
    name."""
    check_executor(executor)
    hosts = hosts_of_ranks(executor)
    count = len(hosts) if nodes is None else check_count("nodes", nodes, least=1)
    if not count:
        raise ConfigError(
            "nodes: got None, wanted how many nodes the job has, such as nodes=4: this executor "
            "doesn't tell where its workers are."
        )
    if hosts and count > len(hosts):
        raise ConfigError(
            f"nodes: got {count}, and Dask has workers on {len(hosts)} hosts. Start a worker on "
            "each of the job's nodes, or pass fewer."
        )
    if count > _MOST_NODES:
        raise ConfigError(f"nodes: got {count}, wanted at most {_MOST_NODES}, a task each.")
    size = count if world is None else world.size
    if size % count:
        raise ConfigError(f"world: got {size} ranks, wanted a multiple of the {count} nodes.")
    luggage, ranks = SerializedSource.of(dataset), size // count
    tasks = [
        WarmTask(dataset.url, luggage.source, luggage.indexes, order, node * ranks, size, ranks)
        for node in range(count)
    ]
    run: Any = _PinnedExecutor(executor, hosts) if hosts else executor
    told: list[WarmResult] = []
    for _, (worker, result) in run_tasks(run, warm_task, tasks, what="nodes", total=count):
        told.append(result)
        _log.info("%s has warmed its node: %d of %d", worker, len(told), count)
        if progress is not None:
            progress(_state(_total(told), nodes=count / len(told)))
    return _total(told)


def _state(done: WarmResult, *, nodes: float) -> WarmState:
    """How far all are. nodes: that there are, over those that are done: the others keep as much."""
    return WarmState(
        wanted_bytes=int(done.kept_bytes * nodes),
        fetched_bytes=done.bytes,
        there_bytes=0 if done.failed else max(0, done.kept_bytes - done.bytes),
        left_out_bytes=done.node_bytes - done.kept_bytes,
    )


def _total(told: Sequence[WarmResult]) -> WarmResult:
    """What several nodes' warm-ups have done, side by side."""
    return WarmResult(
        bytes=sum(each.bytes for each in told),
        objects=sum(each.objects for each in told),
        seconds=max(each.seconds for each in told),
        skipped=sum(each.skipped for each in told),
        failed=tuple(failure for each in told for failure in each.failed),
        node_bytes=sum(each.node_bytes for each in told),
        kept_bytes=sum(each.kept_bytes for each in told),
        left_out=sum(each.left_out for each in told),
    )


def hosts_of_ranks(executor: Executor) -> list[str]:
    """One worker of each host of a Dask cluster, by its address; none of other executors."""
    client = dask_client(executor)
    if client is None:
        return []
    workers = client.scheduler_info(n_workers=-1)["workers"]
    first = {told["host"]: address for address, told in sorted(workers.items(), reverse=True)}
    return [first[host] for host in sorted(first)]


class _PinnedExecutor:
    """Dask's executor, whose tasks go to one worker each, in turn."""

    def __init__(self, executor: Executor, workers: list[str]) -> None:
        self._client, self._workers = dask_client(executor), iter(workers)
        self.num_workers = len(workers)

    def submit(self, function: Callable[..., Any], call: Any) -> Any:
        assert self._client is not None
        pinned = self._client.get_executor(workers=[next(self._workers)], pure=False)
        return pinned.submit(function, call)
