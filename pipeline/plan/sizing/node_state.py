"""One node of a simulation: what its cache and memory hold, and when its parts are free again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.needs import Pace
from penstock.pipeline.plan.sizing.costs import RAM_SHARE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan.sizing.values import Setup
    from penstock.pipeline.plan.sizing.walk import SizedOrder, Touch

    Floats = NDArray[np.float64]

_RANGE, _LEAST_CONNECTIONS = 8 * 2**20, 8  # of `cache.base.fetch_policy`


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNeed:
    """Where a batch's bytes of one node come from. absent: shards with samples that aren't here,
    and the bytes and number of these; kept: those bytes that the cache writes down."""

    disk: float
    memory: float
    absent: NDArray[np.int64]
    absent_bytes: Floats
    absent_samples: Floats
    kept: float


class NodeState:
    """A node's caches. filled, single: bytes of each pinned shard that whole-shard fills and
    requests for this epoch's single samples have brought, float64, shape (shards,)."""

    def __init__(self, setup: Setup, order: SizedOrder, node: int) -> None:
        self.pinned = order.pinned[node]
        self._shard_bytes, self._sizes = order.shard_bytes, order.sizes
        self.filled = np.zeros(len(order.sizes))
        self.single = np.zeros(len(order.sizes))
        # Of what a node keeps, so much fits into its memory; more than 1 is all.
        kept = float(order.shard_bytes[self.pinned].sum())
        self._memory_share = RAM_SHARE * setup.node.ram_bytes / max(kept, 1.0)
        self._read_at = np.full(setup.data.samples, -1.0, np.float32)  # place in the last epoch
        shard = float(order.shard_bytes.mean())
        share = float(order.shard_bytes[order.read[node]].sum())
        held = _LEAST_CONNECTIONS * min(_RANGE, shard)
        most = max(held, min(_LEAST_CONNECTIONS * _RANGE, share / 4))
        self.pace = Pace(allowance_bytes=int(setup.job.gpus * most))
        self._own_share = np.ones(len(order.sizes))  # of each shard's samples, read in this epoch
        self.queue: list[int] = []  # pinned shards in the order of first need, the next one last

    def forget_memory(self) -> None:
        """Have nothing in memory that lies on the disk."""
        self._read_at[:] = 0.0

    def hold(self, shards: NDArray[np.bool_]) -> None:
        """Have these shards whole on the disk, as far as they are pinned."""
        held = shards & self.pinned
        self.filled[held] = self._shard_bytes[held]

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Which shards are here, bool, shape (shards,)."""
        here: NDArray[np.bool_] = self.filled + self.single >= self._shard_bytes * (1 - 1e-9)
        here &= self.pinned
        return here

    def plan_fills(self, touches: list[Touch]) -> None:
        """Begin an epoch: queue what is pinned and isn't here, in the order of first need."""
        self.filled += self.single  # of this epoch's samples as likely here as what fills brought
        self.single[:] = 0.0
        whole, seen, order = self.whole, np.zeros(len(self._sizes), np.bool_), []
        read = np.zeros(len(self._sizes))
        for touch in touches:
            read[touch.shards] += touch.samples
            new = touch.shards[~seen[touch.shards]]
            seen[new] = True
            order += new[self.pinned[new] & ~whole[new]].tolist()
        self.queue = order[::-1]
        self._own_share = np.clip(read / self._sizes, 1 / self._sizes, 1.0)

    def take(self, touch: Touch, *, at: float, block: float) -> BatchNeed:
        """Return what a batch reads from where; what is missing counts as here from now on.

        at: the batch's place in the epoch, 0 to 1. block: samples that one request brings; those
        of shards that other nodes read too bring samples of theirs.
        """
        shards = touch.shards
        size = self._shard_bytes[shards]
        wanted = touch.samples * size / self._sizes[shards]
        # Single samples are those that were asked for before: what is left comes with the fill.
        left = np.maximum(size - self.single[shards], 1.0)
        here = np.where(self.pinned[shards], np.minimum(1.0, self.filled[shards] / left), 0.0)
        local = wanted * here
        missing = wanted - local
        absent = missing > 1e-6 * wanted
        own = self._own_share[shards]
        missing *= (1 - (1 - own) ** block) / own
        kept = absent & self.pinned[shards]
        room = self._shard_bytes[shards] - self.filled[shards]
        self.single[shards[kept]] = np.minimum(
            self.single[shards[kept]] + missing[kept], room[kept]
        )
        disk = float((local * self._disk_share(touch, at=at)).sum())
        return BatchNeed(
            disk=disk,
            memory=float(local.sum()) - disk,
            absent=shards[absent],
            absent_bytes=missing[absent],
            absent_samples=(touch.samples * (1 - here))[absent],
            kept=float(missing[kept].sum()),
        )

    def fill(self, room: float) -> tuple[float, int | None]:
        """Bring up to so many bytes of the next shard: the bytes, and the shard (None: none is
        left, or the pace allows none)."""
        while self.queue and self.pace.open:
            shard = self.queue[-1]
            left = float(self._shard_bytes[shard] - self.filled[shard] - self.single[shard])
            if left <= 1:
                self.queue.pop()
                continue
            got = min(left, room)
            self.filled[shard] += got
            self.pace.spend(int(got))
            return got, shard
        return 0.0, None

    def _disk_share(self, touch: Touch, *, at: float) -> Floats:
        """Of each shard's samples, those that memory hasn't: shape (shards,).

        Memory keeps what was used last. Between places x and y of two epochs in random orders
        1 - x(1 - y) of all were used. What the first epoch has brought is in memory still.
        """
        before = self._read_at[touch.ids]
        self._read_at[touch.ids] = at
        used = 1 - before * (1 - at)
        gone = (before >= 0) & (used > self._memory_share)
        shard = np.repeat(np.arange(len(touch.shards)), touch.samples)
        share: Floats = np.bincount(shard, weights=gone) / touch.samples
        return share
