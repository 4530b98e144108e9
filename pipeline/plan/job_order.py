"""Freeze a job's order, and select the samples of a step that one rank reads.

A `JobOrder` holds the plan settings, the walk and the fingerprint; each reader (a loader, a
warm-up, a prefetch) gets its own plan from it. Pure.

A rank reads its own samples of a step, stand-ins for padding, and partners, which MixUp and CutMix
mix. The samples of a global batch are sorted by (lane, offset) in the plan's numbering of lanes,
whatever rank reads them. Within a lane the first and the second sample are partners, the third and
the fourth, and so on; the last of an odd number has the one before it. So a partner is always a
neighbour: a rank with complete lanes reads no additional samples, any other rank at most two.
Neighbours in a lane come from different strands, so never from one shard: on data that are sorted
by class, partners have the same class no more often than by chance. If a batch has only one sample
of some lane (the last batch of an epoch, or as many lanes as samples), that sample's partner is one
of the neighbouring lane.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.lanes import first_slots
from penstock.pipeline.plan.order import Plan, default_lanes, default_unit_window, default_window
from penstock.pipeline.plan.walk import Cursor
from penstock.pipeline.plan.world import rank_slots

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.pipeline.plan.buckets import BucketPlan, BucketSettings
    from penstock.pipeline.plan.lanes import LaneOrder
    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import Step, Walk
    from penstock.pipeline.plan.world import World
    from penstock.readers import Contents, Source

    Ints = NDArray[np.int64]

PARTNERS_ELSEWHERE = 2
"""Maximum samples of other ranks that a rank reads as partners, in the plan's own order of lanes
or if each of its lanes has two samples of a batch or more."""


def most_elsewhere(batch: int, *, lanes: int, ranks: int) -> int:
    """Return the maximum samples that a rank reads in addition to a usual batch as partners, with
    any lane order: the partner of a lane's only sample may be on any rank.

    batch: samples of the usual global batch. If it has four samples a lane, a batch with fewer than
    two a lane is less than half as long, and fits into a usual batch together with its partners.
    """
    return PARTNERS_ELSEWHERE if batch >= 4 * lanes else max(PARTNERS_ELSEWHERE, -(-batch // ranks))


def partners(slots: Ints, *, position: int, size: int, lanes: int) -> Ints:
    """Return the slot of each slot's partner in the global batch [position, position + size).

    Slots number the batch's samples sorted by (lane, offset). int64, shape (slots,).
    """
    begin = first_slots(position, size, np.arange(lanes))
    of = np.searchsorted(begin, slots, side="right") - 1
    low, high = begin[of], begin[of + 1]
    is_only = high - low == 1
    low, high = np.where(is_only, 0, low), np.where(is_only, size, high)
    other = low + ((slots - low) ^ 1)
    return np.where(other < high, other, np.maximum(slots - 1, 0))


def with_partners(
    low: int, high: int, *, position: int, size: int, lanes: int, own_slots: Ints | None = None
) -> tuple[Ints, Ints]:
    """Return the slots that a rank with slots [low, high) of a global batch reads, and the index of
    each own slot's partner in these.

    own_slots: the number of each slot in the plan's own order, int64, shape (size,); None: the same
    number. Returns (slots, partner): slots has the rank's own slots, then a few of other ranks
    (`most_elsewhere`); partner has shape (high - low,).
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankSlots:
    """The rows that one rank reads for one step.

    rows: (shard, row), int64, shape (n, 2). real: number of rows of its batch; stand-ins for
    padding and partners from other ranks come after these. valid: bool, shape (n,), False for
    stand-ins; None without padding. partner: for each real row the index of its partner in `rows`,
    int64, shape (real,); None without mixing.
    """

    rows: NDArray[np.int64]
    real: int
    valid: NDArray[np.bool_] | None = None
    partner: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOrder:
    """The selection of one rank's rows of each step of a plan.

    padded_by: the walk with the full batch size to which pad="mask" fills batches; None without
    padding. mixes: True if samples have partners; not together with padding.
    """

    plan: JobPlan
    world: World
    padded_by: Walk | None = None
    mixes: bool = False

    def slots(self, step: Step) -> RankSlots:
        """Return the rows that this rank reads for a step."""
        epoch, position = step.start.epoch, step.start.position
        low, high = rank_slots(self.world, step.size, self.plan.bins)
        rows = self.plan.places(epoch, position, step.size, low=low, high=high).rows
        real = len(rows)
        if self.mixes:
            rows, partner = self._with_partners(step, rows)
            return RankSlots(rows=rows, real=real, partner=partner)
        if self.padded_by is None:
            return RankSlots(rows=rows, real=real)
        padded_size = -(-self.padded_by.full_size(step.start) // self.world.size)
        valid = np.arange(padded_size) < real
        if missing := padded_size - real:
            stand_in = self.plan.places(epoch, position, 1, low=0, high=1).rows
            rows = np.concatenate([rows, np.repeat(stand_in, missing, axis=0)])
        return RankSlots(rows=rows, real=real, valid=valid)

    def slots_together(
        self, steps: Sequence[Step]
    ) -> tuple[list[RankSlots], NDArray[np.int64]] | None:
        """Return the rows that this rank reads for steps of one epoch, and all of them end to end;
        None if they are of two epochs, padded or mixed."""
        epoch, world = steps[0].start.epoch, self.world
        if steps[-1].start.epoch != epoch or self.mixes or self.padded_by is not None:
            return None
        bins, bounds = self.plan.bins, [0]
        cuts = []
        for step in steps:
            low, high = rank_slots(world, step.size, bins) if world.size > 1 else (0, step.size)
            cuts.append((step.start.position, step.size, low, high))
            bounds.append(bounds[-1] + high - low)
        rows = self.plan.places_together(epoch, cuts).rows
        parts = [rows[a:b] for a, b in pairwise(bounds)]
        return [RankSlots(rows=part, real=len(part)) for part in parts], rows

    def _with_partners(
        self, step: Step, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return this rank's rows followed by partners of other ranks, and the index of each own
        row's partner."""
        size, position, lanes = step.size, step.start.position, self.plan.lanes
        low, _ = rank_slots(self.world, size, self.plan.bins)
        own_slots = self.plan.own_slots(step.start.epoch, position, size)
        slots, partner = with_partners(
            low, low + len(rows), position=position, size=size, lanes=lanes, own_slots=own_slots
        )
        elsewhere = [
            self.plan.places(step.start.epoch, position, size, low=slot, high=slot + 1).rows
            for slot in slots[len(rows) :].tolist()
        ]
        return np.concatenate([rows, *elsewhere]), partner


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a job's plan. seed: keys random draws, and the order if it is shuffled.
    buckets: settings of batches by tokens, else None."""

    seed: int
    shuffle: bool
    lanes: int
    window: int
    reshuffle: float
    buckets: BucketSettings | None = None


def first_settings(
    contents: Contents,
    *,
    seed: int,
    global_batch: int,
    shuffle: bool = True,
    lanes: float | None = None,
    window: float | None = None,
    reshuffle: float = 0.0,
) -> PlanSettings:
    """Return the plan settings of a job's first start; defaults follow from dataset and global
    batch. seed: keys random draws, and the order. shuffle: False for index order."""
    if not shuffle:
        return PlanSettings(seed=seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)
    shards = int(np.count_nonzero(contents.sizes))
    lanes = int(lanes or default_lanes(global_batch, shards))
    if not window and contents.units is not None:
        window = default_unit_window(contents, lanes, global_batch=global_batch)
    window = int(
        window
        or default_window(
            shards,
            lanes,
            global_batch=global_batch,
            icc=contents.icc,
            shuffled=contents.shuffled,
            rows=contents.samples / max(1, shards),
        )
    )
    return PlanSettings(seed=seed, shuffle=True, lanes=lanes, window=window, reshuffle=reshuffle)


def make_plan(
    contents: Contents, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> Plan:
    """Return a plan with these settings, for one reader.

    Each reader needs its own: a plan caches the windows of one position, and two readers would
    evict each other's.
    """
    return Plan(
        contents.sizes,
        seed=settings.seed if settings.shuffle else None,
        lanes=settings.lanes,
        window=settings.window,
        reshuffle=settings.reshuffle,
        units=contents.units,
        lane_order=lane_order,
    )


def order_fingerprint(contents: Contents, settings: PlanSettings) -> str:
    """Return the hash of dataset and order, as hex, which a resumed job must have, too."""
    plan = make_plan(contents, settings)
    text = f"{contents.fingerprint} {plan.fingerprint}"
    if settings.buckets is not None:
        text = f"{text} {settings.buckets}"
    return hashlib.sha256(text.encode()).hexdigest()


def bucket_plan(
    source: Source, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> BucketPlan | None:
    """Return the plan of one reader for batches by tokens; None unless they are cut so."""
    by_tokens = settings.buckets
    if by_tokens is None:
        return None
    from penstock.pipeline.plan.buckets import BucketPlan  # only these jobs load it

    return BucketPlan(
        make_plan(source.contents, settings, lane_order),
        by_tokens,
        lambda rows: source.lengths(by_tokens.field, rows),
        seed=settings.seed if settings.shuffle else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOrder:
    """The samples that a job reads in each step, on any rank.

    lane_order: decides which part of a global batch each rank reads; None for the identity.
    """

    source: Source
    settings: PlanSettings
    walk: Walk
    lane_order: LaneOrder | None = None

    def plan(self) -> JobPlan:
        """Return a new plan for one reader."""
        by_tokens = bucket_plan(self.source, self.settings, self.lane_order)
        return by_tokens or make_plan(self.source.contents, self.settings, self.lane_order)

    def partners_elsewhere(self, world: World) -> int:
        """Return the maximum samples of other ranks that a rank reads as partners of mixing."""
        if self.lane_order is None:
            return PARTNERS_ELSEWHERE
        sizes, lanes = self.walk.schedule.sizes, self.settings.lanes
        most = max(most_elsewhere(size, lanes=lanes, ranks=world.size) for size in sizes)
        by_tokens = self.settings.buckets
        if by_tokens is None:
            return most
        bins = -(-by_tokens.bins // world.size)  # each bin of a rank may have other neighbours
        return max(most, PARTNERS_ELSEWHERE * bins)

    def fingerprint(self) -> str:
        """Return the hash of dataset and order, as hex, which a resumed job must have, too."""
        return order_fingerprint(self.source.contents, self.settings)

    def batches(self, epoch: int, world: World) -> Iterator[list[int]]:
        """Yield the sample ids of a rank's batches in an epoch."""
        order = RankOrder(plan=self.plan(), world=world)
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            yield self.source.ids(order.slots(step).rows).tolist()

    def samples(self, epoch: int, world: World) -> int:
        """Return the number of samples in all `batches` of an epoch."""
        walk = self.walk
        if (by_tokens := self.settings.buckets) is not None:
            steps = walk.steps(Cursor(epoch, 0), endless=False)
            return sum(world.share(step.size, by_tokens.bins) for step in steps)
        return sum(run.count * world.share(run.size) for run in walk.runs(Cursor(epoch, 0)))
