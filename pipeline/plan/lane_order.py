"""Which lane has which place in a job's batches: so which rank reads it, and nothing else. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The lane at each place of a job's batches: a permutation of 0, 1, 2, ….

    Raises PlanError for what isn't one.
    """

    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.places) != list(range(len(self.places))):
            raise PlanError(
                f"lane order: got {len(self.places)} places that don't hold each lane once."
            )

    @property
    def is_identity(self) -> bool:
        """Whether every lane has its own number's place."""
        return self.places == tuple(range(len(self.places)))

    def lanes_of(self, lanes: int) -> Ints:
        """The lane at each place, int64, shape (lanes,). Raises PlanError for an order of another
        number of lanes."""
        if len(self.places) != lanes:
            raise PlanError(f"lane order: got one of {len(self.places)} lanes, wanted {lanes}.")
        return np.array(self.places, dtype=np.int64)


def ordered_slots(
    position: int, count: int, lane_at: Ints, *, low: int, high: int
) -> tuple[Ints, Ints]:
    """Slots [low, high) of the positions [position, position + count) sorted by (place of the lane,
    offset).

    lane_at: the lane at each place, int64, shape (lanes,). Returns their lanes and offsets, int64,
    shape (high - low,). Costs O(high - low), and O(lanes) where some lanes have a sample more.
    """
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    turn, start = divmod(position, lanes)
    slots = np.arange(low, high, dtype=np.int64)
    if not more:
        place, nth = np.divmod(slots, max(1, each))
    else:
        ends = np.cumsum(each + ((lane_at - start) % lanes < more))
        place = ends.searchsorted(slots, side="right")
        nth = slots - np.where(place > 0, ends[place - 1], 0)
    lane = lane_at[place]
    return lane, nth + turn + (lane < start)
