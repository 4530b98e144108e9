"""Select the samples of a step that one rank reads: its own, those of padding, partners. Pure.

Partners are the samples that MixUp and CutMix mix. The samples of a global batch are sorted by
(lane, offset), in the plan's numbering of lanes, whichever rank reads them. Within a lane the first
and the second sample are each other's partners, the third and the fourth, and so on; the last of an
odd number has the one before it. So a partner is always a neighbour: a rank with complete lanes
reads no other sample for it, any other rank at most two. Neighbours in a lane come from different
strands, so never from one shard: on data that are sorted by class, partners have the same class no
more often than by chance.

If a batch has only one sample of some lane (the last batch of an epoch, or as many lanes as
samples), that sample's partner is one of the neighbouring lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import Step, Walk
    from penstock.pipeline.plan.world import World

    Ints = NDArray[np.int64]

PARTNERS_ELSEWHERE = 2
"""Maximum samples of other ranks that a rank reads as partners, in the plan's own order of lanes
or if each of its lanes has two samples of a batch or more."""


def most_elsewhere(batch: int, *, lanes: int, ranks: int) -> int:
    """Return the maximum samples of other ranks that a rank reads as partners with any lane order,
    in excess of a usual batch: the partner of a lane's only sample may be on any rank.

    batch: samples of the usual global batch. If that has four samples a lane, a batch with fewer
    than two a lane is less than half as long, and its partners fit into a usual batch.
    """
    return PARTNERS_ELSEWHERE if batch >= 4 * lanes else max(PARTNERS_ELSEWHERE, -(-batch // ranks))


def partners(slots: Ints, *, position: int, size: int, lanes: int) -> Ints:
    """Return the slot of each slot's partner in the global batch [position, position + size).

    Slots number the batch's samples sorted by (lane, offset). int64, shape (slots,).
    """
    each, more = divmod(size, lanes)
    # Lanes [first, first + more), modulo lanes, have one sample more than the others.
    first = position % lanes
    lane = np.arange(lanes + 1)
    begin = lane * each + _longer_before(lane, first, more, lanes)
    of = np.searchsorted(begin, slots, side="right") - 1
    low, high = begin[of], begin[of + 1]
    is_only = high - low == 1
    low, high = np.where(is_only, 0, low), np.where(is_only, size, high)
    other = low + ((slots - low) ^ 1)
    return np.where(other < high, other, np.maximum(slots - 1, 0))


def with_partners(
    low: int, high: int, *, position: int, size: int, lanes: int, own_slots: Ints | None = None
) -> tuple[Ints, Ints]:
    """Return the slots that a rank with slots [low, high) of a global batch reads, and partners.

    own_slots: the number of each slot in the plan's own order, int64, shape (size,); None: the same
    number. Returns (slots, partner): the rank's own slots, then a few more (`most_elsewhere`), and
    for each of its own the index of its partner in `slots`.
    """
    own = np.arange(low, high)
    if own_slots is None:
        wanted = partners(own, position=position, size=size, lanes=lanes)
    else:
        slot_of = np.empty(size, dtype=np.int64)
        slot_of[own_slots] = np.arange(size)
        wanted = slot_of[partners(own_slots[low:high], position=position, size=size, lanes=lanes)]
    outside = (wanted < low) | (wanted >= high)
    more = np.unique(wanted[outside])
    place = np.where(outside, len(own) + np.searchsorted(more, wanted), wanted - low)
    return np.concatenate([own, more]), place


def _longer_before(lane: Ints, first: int, more: int, lanes: int) -> Ints:
    """Return how many of the `more` longer lanes, a circular range from `first`, precede a lane."""
    behind = np.clip(lane - first, 0, more)
    wrapped = max(0, first + more - lanes)
    return behind + np.minimum(lane, wrapped)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSlots:
    """Store the rows that one rank reads for one step.

    rows: (shard, row), int64, shape (n, 2). real: number of rows of its batch; stand-ins of padding
    and partners that other ranks have come after these. valid: bool, shape (n,), False for
    stand-ins; None without padding. partner: for each real row the index of its partner in `rows`,
    int64, shape (real,); None without mixing.
    """

    rows: NDArray[np.int64]
    real: int
    valid: NDArray[np.bool_] | None = None
    partner: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """Select one rank's rows of each step of a plan.

    padded_by: the walk whose full batch size pad="mask" fills batches up to; None without padding.
    mixes: samples have partners; not together with padding.
    """

    plan: JobPlan
    world: World
    padded_by: Walk | None = None
    mixes: bool = False

    def slots(self, step: Step) -> RankSlots:
        """Return the rows that this rank reads for a step."""
        epoch, position = step.start.epoch, step.start.position
        rank, size = self.world.rank, self.world.size
        low, high = (first_slot(step.size, r, size, self.plan.bins) for r in (rank, rank + 1))
        rows = self.plan.places(epoch, position, step.size, low=low, high=high).rows
        real = len(rows)
        if self.mixes:
            rows, partner = self._with_partners(step, rows)
            return RankSlots(rows=rows, real=real, partner=partner)
        if self.padded_by is None:
            return RankSlots(rows=rows, real=real)
        padded_size = -(-self.padded_by.full_size(step.start) // size)
        valid = np.arange(padded_size) < real
        if missing := padded_size - real:
            stand_in = self.plan.places(epoch, position, 1, low=0, high=1).rows
            rows = np.concatenate([rows, np.repeat(stand_in, missing, axis=0)])
        return RankSlots(rows=rows, real=real, valid=valid)

    def _with_partners(
        self, step: Step, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return this rank's rows followed by partners of other ranks, and the index of each own
        row's partner."""
        size, world = step.size, self.world
        low = first_slot(size, world.rank, world.size, self.plan.bins)
        position, lanes = step.start.position, self.plan.lanes
        own_slots = self.plan.own_slots(step.start.epoch, position, size)
        slots, partner = with_partners(
            low, low + len(rows), position=position, size=size, lanes=lanes, own_slots=own_slots
        )
        elsewhere = [
            self.plan.places(step.start.epoch, position, size, low=slot, high=slot + 1).rows
            for slot in slots[len(rows) :].tolist()
        ]
        return np.concatenate([rows, *elsewhere]), partner
