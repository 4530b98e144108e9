"""Decode units: a shard may consist of parts that have to be decoded as a whole. Pure.

Lanes run over shards, so that what a node owns stays whole; inside a lane units change places and
windows mix them, so that each is decoded about once an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """The units of all shards, end to end.

    rows: of each unit, at least 1. shard: that it is of. first_row: of it in its shard. All int64,
    shape (units,). first: units before each shard, and of all, int64, shape (shards + 1,).
    """

    rows: Ints
    shard: Ints
    first_row: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Rows of the longest unit."""
        return int(self.rows.max(initial=0))

    def of_shards(self, shards: Ints) -> Ints:
        """The units of these shards, shard after shard: numbers, int64, shape (n,)."""
        begin, counts = self.first[shards], self.first[shards + 1] - self.first[shards]
        before = np.cumsum(counts) - counts
        return np.repeat(begin - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def units_of(sizes: Ints, given: Sequence[ArrayLike] | None) -> Units | None:
    """Check what a plan was given as `units`; None where each shard is one unit.

    given: for each shard the rows of its units, in the order of the rows; or one number where all
    have as many, but for a shorter last one. Raises PlanError for units that don't add up to their
    shards.
    """
    if given is None:
        return None
    if len(given) != len(sizes):
        raise PlanError(
            f"units: got those of {len(given)} shards, wanted those of each of the {len(sizes)}: "
            "a list of rows for every shard."
        )
    each = [_rows(n, units, size) for n, (units, size) in enumerate(zip(given, sizes, strict=True))]
    counts = np.array([len(units) for units in each], np.int64)
    if (counts <= 1).all() and all(u.sum() == n for u, n in zip(each, sizes, strict=True)):
        return None
    rows = np.concatenate(each)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shard = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    ends = np.cumsum(rows)
    total = np.concatenate([[0], ends])[first]
    if (wrong := np.flatnonzero(np.diff(total) != sizes)).size:
        at = int(wrong[0])
        raise PlanError(
            f"units: those of shard {at} have {int(total[at + 1] - total[at])} rows, and the shard "
            f"has {int(sizes[at])}. Units cover their shard, each row once."
        )
    return Units(rows=rows, shard=shard, first_row=ends - rows - total[shard], first=first)


def _rows(shard: int, given: ArrayLike, size: int) -> Ints:
    units: NDArray[Any] = np.asarray(given)
    if units.ndim > 1 or (units.size and (units.dtype.kind not in "iu" or units.min() < 1)):
        raise PlanError(
            f"units: got {given!r:.80} for shard {shard}, wanted the rows of its units: whole "
            "numbers from 1 on."
        )
    if not units.ndim:
        return np.diff([*range(0, int(size), int(units)), size]).astype(np.int64)
    return units.astype(np.int64)
