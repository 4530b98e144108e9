"""Warm-ups over an executor: one task a node, which fills that node's share of its own cache.

An executor doesn't know nodes. Dask's tells where its workers are, so each task is pinned to a
worker of another host. With others `nodes` tasks go out, and it is theirs on which machine each
runs: start one worker a machine. A share that landed on another node than the job will have is not
lost: the job's lanes follow what the nodes hold.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError
from penstock.cache.executors import check_executor, dask_client, keep_open, run_tasks, worker_name
from penstock.pipeline.feed.node_warm import warm_node
from penstock.pipeline.feed.share_fills import WarmResult, WarmState
from penstock.pipeline.options.checks import check_count
from penstock.pipeline.plan.world import World
from penstock.readers.index.reach import check_indexes
from penstock.readers.luggage import Luggage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

    from penstock.pipeline.feed.warm_order import WarmOrder
    from penstock.readers.source import Source


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
    order: WarmOrder
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
    order: WarmOrder,
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
    hosts = _hosts(executor)
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
    luggage, ranks = Luggage.of(dataset), size // count
    tasks = [
        WarmTask(dataset.url, luggage.source, luggage.indexes, order, node * ranks, size, ranks)
        for node in range(count)
    ]
    run: Any = _Pinned(executor, hosts) if hosts else executor
    told: list[WarmResult] = []
    for _, (worker, result) in run_tasks(run, warm_task, tasks, what="nodes", total=count):
        told.append(result)
        _log.info("%s has warmed its node: %d of %d", worker, len(told), count)
        if progress is not None:
            progress(_state(_sum(told), nodes=count / len(told)))
    return _sum(told)


def _state(done: WarmResult, *, nodes: float) -> WarmState:
    """How far all are. nodes: that there are, over those that are done: the others keep as much."""
    return WarmState(
        wanted_bytes=int(done.kept_bytes * nodes),
        fetched_bytes=done.bytes,
        there_bytes=0 if done.failed else max(0, done.kept_bytes - done.bytes),
        left_out_bytes=done.node_bytes - done.kept_bytes,
    )


def _sum(told: Sequence[WarmResult]) -> WarmResult:
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


def _hosts(executor: Executor) -> list[str]:
    """One worker of each host of a Dask cluster, by its address; none of other executors."""
    client = dask_client(executor)
    if client is None:
        return []
    workers = client.scheduler_info(n_workers=-1)["workers"]
    first = {told["host"]: address for address, told in sorted(workers.items(), reverse=True)}
    return [first[host] for host in sorted(first)]


class _Pinned:
    """Dask's executor, whose tasks go to one worker each, in turn."""

    def __init__(self, executor: Executor, workers: list[str]) -> None:
        self._client, self._workers = dask_client(executor), iter(workers)
        self.num_workers = len(workers)

    def submit(self, function: Callable[..., Any], call: Any) -> Any:
        assert self._client is not None
        pinned = self._client.get_executor(workers=[next(self._workers)], pure=False)
        return pinned.submit(function, call)
