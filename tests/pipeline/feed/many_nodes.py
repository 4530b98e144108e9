"""Run several nodes of a job in one process: one cache per node, and one job store."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import fsspec
import torch.distributed as dist

from penstock.cache import DiskCache, JobStore
from penstock.pipeline import DataLoader, Order, World
from penstock.readers import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import pytest
    from numpy.typing import NDArray

OPTIONS: dict[str, Any] = {
    "global_batch_size": 32,
    "shuffle": True,
    "seed": 7,
    "drop_last": True,
    "order": Order(lanes=8),
}


class Node:
    """A node is a cache, and the dataset as it is read through it."""

    def __init__(self, pack: Path, cache: Path) -> None:
        self.cache = DiskCache(cache, max_bytes="64MiB")
        files = fsspec.filesystem("file", skip_instance_cache=True)
        self.dataset = Dataset(str(pack), fields=("id",), filesystem=files, cache=self.cache)

    def fill(self, shards: NDArray[np.int64]) -> None:
        """Have these shards in the cache."""
        remote = self.dataset.remote_shards
        assert remote is not None
        for shard in shards.tolist():
            remote.fill(shard, progress=lambda _: None, stop=threading.Event())

    def missing_bytes(self, shards: NDArray[np.int64]) -> int:
        """Bytes of some shards that aren't in the cache."""
        remote, sizes = self.dataset.remote_shards, self.dataset.contents.shard_bytes
        assert remote is not None
        return int((sizes * (1 - remote.held_shares()))[shards].sum())

    def close(self) -> None:
        self.dataset.close()
        self.cache.close()


@contextlib.contextmanager
def job(
    nodes: Sequence[Node],
    monkeypatch: pytest.MonkeyPatch,
    *,
    state: dict[str, Any] | None = None,
    is_group: bool = True,
    ranks_a_node: int = 1,
    **more: Any,
) -> Iterator[list[DataLoader]]:
    """A job's loaders, one a rank, each at its first pass. is_group: its ranks have a store."""
    store = JobStore(dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.setattr(JobStore, "of_group", classmethod(lambda _: store))
    size, each = len(nodes) * ranks_a_node, ranks_a_node

    def world(rank: int) -> World:
        return World(
            rank,
            size,
            local_rank=rank % each,
            local_size=each,
            place=(rank, size) if is_group else None,
        )

    with contextlib.ExitStack() as stack:
        loaders = [
            stack.enter_context(
                DataLoader(nodes[rank // each].dataset, world=world(rank), **{**OPTIONS, **more})
            )
            for rank in range(size)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        together(loaders)
        yield loaders


def together(loaders: Sequence[DataLoader]) -> None:
    """Begin a pass on each rank at once, as they may wait for one another."""
    with ThreadPoolExecutor(len(loaders)) as pool:
        list(pool.map(iter, loaders))


def order_of(loader: DataLoader) -> Any:
    return loader._engine.assembly.order  # type: ignore[union-attr]


def shards_of(loader: DataLoader) -> NDArray[np.int64]:
    """The shards that a rank reads."""
    order, world = order_of(loader), loader.world
    shards: NDArray[np.int64] = order.plan().shards(
        order.walk.schedule.size, first=world.rank, end=world.rank + 1, world=world.size
    )
    return shards


def take(passes: Sequence[Iterator[Any]], count: int) -> list[list[list[int]]]:
    """The ids of the next batches of some passes, by step and rank."""
    return [[next(one)[0].tolist() for one in passes] for _ in range(count)]


def global_batches(steps: list[list[list[int]]]) -> list[list[int]]:
    """Return the samples of each step over all ranks."""
    return [sorted(itertools.chain.from_iterable(ranks)) for ranks in steps]
