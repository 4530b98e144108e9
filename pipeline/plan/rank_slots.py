"""Select the samples of a step that one rank reads: its own, those of padding, partners. Pure.

Partners are the samples that MixUp and CutMix mix. The samples of a global batch stand by
(lane, offset), as the plan numbers lanes, whoever reads those. Within a lane the first and the
second are each other's partners, the third and the fourth, and so on; the last of an odd number
takes the one before it. So a partner is always a neighbour: a rank that has whole lanes reads
nothing for it, any other at most two samples. And as neighbours in a lane come from different
strands, they don't share a shard, so that on data that are sorted by class partners are of one
class no more often than by chance.

A batch with fewer than two samples for some lane (the last one of an epoch, or as many lanes as
samples) pairs what is alone with the neighbouring lane's.
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
"""Samples of other ranks that a rank reads as partners, at most, in the plan's own order of lanes
and wherever each of its lanes has two samples of a batch or more."""


def most_elsewhere(batch: int, *, lanes: int, ranks: int) -> int:
    """Samples of other ranks that a rank reads as partners, at most, beyond the room that a batch
    shorter than usual leaves, where lanes have any order: a lane's only sample has its partner in
    a lane that may be anybody's.

    batch: samples of the usual global batch. Of a batch of under two samples a lane the rest makes
    less than half of the usual one, if that has four.
    """
    return PARTNERS_ELSEWHERE if batch >= 4 * lanes else max(PARTNERS_ELSEWHERE, -(-batch // ranks))


def partners(slots: Ints, *, position: int, size: int, lanes: int) -> Ints:
    """Partners' slots of these slots of the global batch [position, position + size).

    RankSlots count the batch's samples as they stand by (lane, offset). int64, shape (slots,).
    """
    each, more = divmod(size, lanes)
    # Lanes [first, first + more), modulo lanes, have one sample more than the others.
    first = position % lanes
    lane = np.arange(lanes + 1)
    begin = lane * each + _longer_before(lane, first, more, lanes)
    of = np.searchsorted(begin, slots, side="right") - 1
    low, high = begin[of], begin[of + 1]
    alone = high - low == 1
    low, high = np.where(alone, 0, low), np.where(alone, size, high)
    other = low + ((slots - low) ^ 1)
    return np.where(other < high, other, np.maximum(slots - 1, 0))


def with_partners(
    low: int, high: int, *, position: int, size: int, lanes: int, own_slots: Ints | None = None
) -> tuple[Ints, Ints]:
    """What a rank with the slots [low, high) of the global batch [position, position + size) reads.

    own_slots: what the batch's slots are in the plan's own order, int64, shape (size,); None: they
    are as they stand. Returns the slots, its own first and then a few more (`most_elsewhere`), and
    for each of its own the place of the partner among them.
    """
    own = np.arange(low, high)
    if own_slots is None:
        wanted = partners(own, position=position, size=size, lanes=lanes)
    else:
        stands = np.empty(size, dtype=np.int64)
        stands[own_slots] = np.arange(size)
        wanted = stands[partners(own_slots[low:high], position=position, size=size, lanes=lanes)]
    outside = (wanted < low) | (wanted >= high)
    more = np.unique(wanted[outside])
    place = np.where(outside, len(own) + np.searchsorted(more, wanted), wanted - low)
    return np.concatenate([own, more]), place


def _longer_before(lane: Ints, first: int, more: int, lanes: int) -> Ints:
    """How many of the `more` longer lanes from `first` on, a circular range, come before a lane."""
    behind = np.clip(lane - first, 0, more)
    wrapped = max(0, first + more - lanes)
    return behind + np.minimum(lane, wrapped)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSlots:
    """The rows that one rank reads for one step.

    rows: (shard, row), int64, shape (n, 2). real: rows before the stand-ins of a padded batch, and
    before mere partners. valid: bool, shape (n,), False for stand-ins; None without padding.
    partner: of each real row the place of its partner, int64, shape (real,); None without mixing.
    """

    rows: NDArray[np.int64]
    real: int
    valid: NDArray[np.bool_] | None = None
    partner: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """A plan as one rank reads it.

    padded_by: the walk whose full batches pad="mask" fills up to; None without padding. mixes:
    samples have partners; not together with padding.
    """

    plan: JobPlan
    world: World
    padded_by: Walk | None = None
    mixes: bool = False

    def slots(self, step: Step) -> RankSlots:
        """What this rank reads for a step."""
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
        """This rank's rows and those of partners on other ranks; the partner of each of its own."""
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
