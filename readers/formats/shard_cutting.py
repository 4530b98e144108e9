"""Divide a listing into shards: contiguous parts of about one size, or groups by number.

Parts are cut from what lies in a row, such as the units of a large file or many small files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]

PART_BYTES = 64 * 2**20
"""A shard's size, unless what lies there is larger and can't be cut: as a pack's."""


def part_bounds(sizes: ArrayLike, *, target_bytes: int | None = None) -> Ints:
    """Bounds of contiguous parts of about one size: int64, shape (parts + 1,).

    target_bytes: that size; None is `PART_BYTES`. sizes: bytes of each item, which isn't cut, at
    least 0, shape (items,). Part i is items [bounds[i], bounds[i + 1]); none is empty, and there is
    one at least where there are items. The parts are as equal as the items let them be, so none is
    a small rest: a part differs from the mean by one item at most.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64))
    if not len(ends):
        return np.zeros(1, np.int64)
    total, target = int(ends[-1]), target_bytes or PART_BYTES
    count = max(1, min(len(ends), round(total / target)))
    # Items go where their middle lies. As floats, since count * total may pass 2^63.
    middles = (ends - np.asarray(sizes, np.int64) / 2) * (count / max(1, total))
    number = np.minimum(middles.astype(np.int64), count - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return np.append(first, len(ends)).astype(np.int64)


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


def group_positions(groups: NDArray[np.int64]) -> Grouping:
    """Group positions by number, in order inside a group; numbers that nobody has are left out."""
    order = np.argsort(groups, kind="stable")
    counts = np.bincount(groups) if len(groups) else np.empty(0, np.int64)
    ends = np.cumsum(counts[counts > 0], dtype=np.int64)
    return Grouping(order=order.astype(np.int64), bounds=np.concatenate(([0], ends)))
