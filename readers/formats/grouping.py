"""Which samples make up which shard: positions in a listing, grouped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """Positions in a listing, shard by shard.

    order: positions, int64, shape (n,); bounds: where each shard starts and ends in it, int64,
    shape (shards + 1,).
    """

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return len(self.bounds) - 1

    def positions(self, shard: int) -> NDArray[np.int64]:
        """The positions of one shard, int64, shape (its samples,)."""
        return self.order[self.bounds[shard] : self.bounds[shard + 1]]


def grouping(groups: NDArray[np.int64]) -> Grouping:
    """Group positions by number, in order inside a group; numbers that nobody has are left out."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups) if len(groups) else np.empty(0, np.int64)
    ends = np.cumsum(counts[counts > 0], dtype=np.int64)
    return Grouping(order=order.astype(np.int64), bounds=np.concatenate(([0], ends)))
