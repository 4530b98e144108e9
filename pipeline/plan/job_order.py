"""Freeze a job's order: its plan settings, the plan built from them, the walk and the fingerprint.

Pure. Each reader (a loader, a warm-up, a prefetch) gets its own plan from one `JobOrder`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.order import Plan, default_lanes, default_window
from penstock.pipeline.plan.rank_slots import PARTNERS_ELSEWHERE, most_elsewhere
from penstock.pipeline.plan.walk import Cursor
from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.buckets import Buckets, BucketSettings
    from penstock.pipeline.plan.lanes import LaneOrder
    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import Walk
    from penstock.pipeline.plan.world import World
    from penstock.readers import Contents, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """Store the settings of a job's plan. seed: of random draws, and of the order if shuffle.
    buckets: settings of batches by tokens, else None."""

    seed: int
    shuffle: bool
    lanes: int
    window: int
    reshuffle: float
    buckets: BucketSettings | None = None


def ordered_settings(*, seed: int) -> PlanSettings:
    """Return the plan settings of a job in index order. seed: of random draws."""
    return PlanSettings(seed=seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)


def shuffled_settings(
    contents: Contents,
    *,
    seed: int,
    global_batch: int,
    lanes: float | None = None,
    window: float | None = None,
    reshuffle: float = 0.0,
) -> PlanSettings:
    """Return the plan settings of a shuffled job; defaults follow from dataset and global batch."""
    shards = int(np.count_nonzero(contents.sizes))
    lanes = int(lanes or default_lanes(global_batch, shards))
    if not window and contents.units is not None:
        from penstock.pipeline.plan.order import default_unit_window  # only these jobs load it

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


def buckets_of(
    source: Source, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> Buckets | None:
    """Return the pools of one reader; None unless batches are cut by tokens."""
    by_tokens = settings.buckets
    if by_tokens is None:
        return None
    from penstock.pipeline.plan.buckets import Buckets  # only these jobs load it

    return Buckets(
        make_plan(source.contents, settings, lane_order),
        by_tokens,
        lambda rows: source.lengths(by_tokens.field, rows),
        seed=settings.seed if settings.shuffle else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOrder:
    """Determine the samples that a job reads in each step, on any rank.

    lane_order: decides which part of a global batch each rank reads; None for the identity.
    """

    source: Source
    settings: PlanSettings
    walk: Walk
    lane_order: LaneOrder | None = None

    def plan(self) -> JobPlan:
        """Return a new plan for one reader."""
        buckets = buckets_of(self.source, self.settings, self.lane_order)
        if buckets is None:
            return make_plan(self.source.contents, self.settings, self.lane_order)
        from penstock.pipeline.plan.buckets import BucketPlan

        return BucketPlan(buckets)

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
        plan = self.plan()
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            at, size = step.start, step.size
            rank, bins = world.rank, plan.bins
            low, high = (first_slot(size, r, world.size, bins) for r in (rank, rank + 1))
            rows = plan.places(at.epoch, at.position, size, low=low, high=high).rows
            yield self.source.ids(rows).tolist()

    def samples(self, epoch: int, world: World) -> int:
        """Return the number of samples in all `batches` of an epoch."""
        walk = self.walk
        if (by_tokens := self.settings.buckets) is not None:
            steps = walk.steps(Cursor(epoch, 0), endless=False)
            return sum(world.share(step.size, by_tokens.bins) for step in steps)
        return sum(run.count * world.share(run.size) for run in walk.runs(Cursor(epoch, 0)))
