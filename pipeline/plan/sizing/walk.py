"""The real order of a sized job: which shards each node touches at each step, and which it pins."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.order import Plan
from penstock.pipeline.plan.sizing.costs import MARGIN_SHARE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.plan.sizing.geometry import Geometry
    from penstock.pipeline.plan.sizing.values import Setup

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Touch:
    """What a node reads of a step: shards, ascending, and samples of each; int64, shape (n,). ids:
    of all of these samples, in the order of the shards; int64, shape (samples,)."""

    shards: Ints
    samples: Ints
    ids: Ints


class SizedOrder:
    """A setup's plan over shards as even as they can be, and what each node pins of them.

    sizes: samples of each shard; shard_bytes: float64; both of shape (shards,). pinned: bool, shape
    (nodes, shards), by the cache's own rule: of a node's share those with the lowest keys, as far
    as its room goes.
    """

    def __init__(self, setup: Setup, geometry: Geometry, *, seed: int) -> None:
        self._setup = setup
        job, data, shards = setup.job, setup.data, geometry.shards
        each, more = divmod(data.samples, shards)
        self.sizes = np.full(shards, each, dtype=np.int64)
        self.sizes[:more] += 1
        self._first_id = np.cumsum(self.sizes) - self.sizes
        self.shard_bytes = self.sizes * data.sample_bytes
        if data.spread:  # sizes of samples differ, so those of shards do
            uneven = np.random.default_rng(seed).standard_normal(shards)
            factor = 1 + data.spread * uneven / np.sqrt(np.maximum(self.sizes, 1))
            self.shard_bytes *= np.maximum(factor, 0.05)
        self._plan = Plan(self.sizes, seed=seed, lanes=geometry.lanes, window=geometry.window)
        self.read = np.zeros((job.nodes, shards), np.bool_)
        for node in range(job.nodes):
            first = node * job.gpus
            own = self._plan.shards(
                job.global_batch, first=first, end=first + job.gpus, world=job.ranks
            )
            self.read[node, own] = True
        self.pinned = self._pinned()

    def steps(self, epoch: int) -> Iterator[list[Touch]]:
        """For each step of an epoch what each node reads."""
        job = self._setup.job
        for step in range(self._setup.steps):
            yield [self._touch(epoch, step * job.global_batch, node) for node in range(job.nodes)]

    def _touch(self, epoch: int, position: int, node: int) -> Touch:
        job = self._setup.job
        low = node * job.gpus * job.global_batch // job.ranks
        high = (node + 1) * job.gpus * job.global_batch // job.ranks
        places = self._plan.places(epoch, position, job.global_batch, low=low, high=high)
        ids = np.sort(self._first_id[places.rows[:, 0]] + places.rows[:, 1])
        counts = np.bincount(places.rows[:, 0])
        shards = np.flatnonzero(counts)
        return Touch(shards=shards, samples=counts[shards], ids=ids)

    def _pinned(self) -> NDArray[np.bool_]:
        from penstock.cache.disk.shares import ReadSet  # what the cache itself goes by

        room = (1 - MARGIN_SHARE) * self._setup.node.nvme_bytes
        if self._setup.store is None:
            return self.read.copy()
        keys = [hashlib.sha256(b"%d" % shard).hexdigest() for shard in range(len(self.sizes))]
        pinned = np.zeros_like(self.read)
        for node, read in enumerate(self.read):
            own = np.flatnonzero(read).tolist()
            share = ReadSet(
                "sizing", [keys[n] for n in own], [int(self.shard_bytes[n]) for n in own]
            )
            below = share.threshold(int(room))
            pinned[node, [n for n in own if keys[n] < below]] = True
        return pinned
