"""What everybody who walks a job's stream asks of its plan, whatever it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Places:
    """Samples of a batch, in the order of its slots.

    rows: (shard, row), int64, shape (n, 2). epochs: of the part that each comes from, int64, shape
    (n,); None where that is the stream's own, as with one part.
    """

    rows: Ints
    epochs: Ints | None = None


class JobPlan(Protocol):
    """Says which sample stands where in a job's stream, and what that needs when.

    A plan is made of one part or of several. Shards are numbered over all parts, end to end, as a
    `readers.source.Source` has them: so the shard says the part, and who reads, fetches or counts
    by shards needn't know of parts. One dataset (a selection of one, datasets end to end) is a plan
    of one part: `order.Plan`. A mixture is a plan of several: each position belongs to one part, by
    exact shares in any stretch of the stream and of a batch's slots, and each part goes through
    epochs of its own, which draws are keyed by.

    samples: positions of an epoch of the stream. sizes: samples of each shard, int64, shape
    (shards,). lanes, window: for people. open_shards: mean shards that are mixed at a time.
    bins: parts of a global batch that ranks take whole (`world.first_slot`); 1: none.
    fingerprint: of all that the order depends on, as hex; batch and world are not among that.
    """

    samples: int
    sizes: Ints
    lanes: int
    window: int
    bins: int

    @property
    def open_shards(self) -> float: ...

    @property
    def fingerprint(self) -> str: ...

    def places(self, epoch: int, position: int, size: int, *, low: int, high: int) -> Places:
        """Slots [low, high) of the global batch [position, position + size), which is clipped at
        the end of the epoch. Raises PlanError for what lies outside."""

    def batch(self, epoch: int, position: int, size: int, *, rank: int = 0, world: int = 1) -> Ints:
        """(shard, row) of one rank's slots of a global batch, those from `world.first_slot` of the
        rank to that of the next. int64, shape (slots, 2)."""

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """The number that each slot of a global batch has in the plan's own order, whatever order
        the lanes have, int64, shape (slots,): a permutation. None where that is the slot's."""

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Shards that ranks [first, end) of a world read in any epoch, int64, ascending."""
