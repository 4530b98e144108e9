"""Freeze a job's order: its plan settings, the plan built from them, the walk and the fingerprint.

Pure. Each walker (a loader, a warm-up, a prefetch) takes a plan of its own from one `JobOrder`.
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
    """What a plan was frozen with. seed: of draws, and of the order if shuffle. buckets: of batches
    that are cut by tokens, else None."""

    seed: int
    shuffle: bool
    lanes: int
    window: int
    reshuffle: float
    buckets: BucketSettings | None = None


def ordered_settings(*, seed: int) -> PlanSettings:
    """Plan settings of a job in index order. seed: of draws."""
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
    """Plan settings of a shuffled job: what isn't given follows from dataset and global batch."""
    shards = int(np.count_nonzero(contents.sizes))
    lanes = int(lanes or default_lanes(global_batch, shards))
    if not window and contents.units is not None:
        from penstock.pipeline.plan.order import default_unit_window  # others need none of it

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
    """Make a plan from its settings, for one walker.

    Each takes a plan of its own: a plan remembers the windows of one place only, and two places on
    one plan would compute them over and over.
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
    """What a resumed job must share, of dataset and order, as hex."""
    plan = make_plan(contents, settings)
    told = f"{contents.fingerprint} {plan.fingerprint}"
    if settings.buckets is not None:
        told = f"{told} {settings.buckets}"
    return hashlib.sha256(told.encode()).hexdigest()


def buckets_of(
    source: Source, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> Buckets | None:
    """The pools of one walker, where batches are cut by tokens."""
    told = settings.buckets
    if told is None:
        return None
    from penstock.pipeline.plan.buckets import Buckets  # other jobs need none of it

    return Buckets(
        make_plan(source.contents, settings, lane_order),
        told,
        lambda rows: source.lengths(told.field, rows),
        seed=settings.seed if settings.shuffle else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOrder:
    """Which samples a job reads in which steps, on any rank. Walkers take a plan each.

    lane_order: which rank reads what of a global batch; None for the identity.
    """

    source: Source
    settings: PlanSettings
    walk: Walk
    lane_order: LaneOrder | None = None

    def plan(self) -> JobPlan:
        """A plan for one walker."""
        buckets = buckets_of(self.source, self.settings, self.lane_order)
        if buckets is None:
            return make_plan(self.source.contents, self.settings, self.lane_order)
        from penstock.pipeline.plan.buckets import BucketPlan

        return BucketPlan(buckets)

    def partners_elsewhere(self, world: World) -> int:
        """Samples of other ranks that a rank reads as partners of mixing, at most."""
        if self.lane_order is None:
            return PARTNERS_ELSEWHERE
        sizes, lanes = self.walk.schedule.sizes, self.settings.lanes
        most = max(most_elsewhere(size, lanes=lanes, ranks=world.size) for size in sizes)
        told = self.settings.buckets  # each bin of a rank may have neighbours of its own
        return most if told is None else max(most, PARTNERS_ELSEWHERE * -(-told.bins // world.size))

    def fingerprint(self) -> str:
        """What a resumed job must share, of dataset and order, as hex."""
        return order_fingerprint(self.source.contents, self.settings)

    def batches(self, epoch: int, world: World) -> Iterator[list[int]]:
        """Sample ids that a rank is handed in a whole epoch, a batch at a time."""
        plan = self.plan()
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            at, size = step.start, step.size
            rank, bins = world.rank, plan.bins
            low, high = (first_slot(size, r, world.size, bins) for r in (rank, rank + 1))
            rows = plan.places(at.epoch, at.position, size, low=low, high=high).rows
            yield self.source.ids(rows).tolist()

    def samples(self, epoch: int, world: World) -> int:
        """Samples in all `batches` of an epoch."""
        walk = self.walk
        if (told := self.settings.buckets) is not None:
            steps = walk.steps(Cursor(epoch, 0), endless=False)
            return sum(world.share(step.size, told.bins) for step in steps)
        return sum(run.count * world.share(run.size) for run in walk.runs(Cursor(epoch, 0)))
