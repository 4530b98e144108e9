"""What a job's order is frozen to: the plan's settings, and the walk through its epochs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.plan.partners import PARTNERS_ELSEWHERE, most_elsewhere
from penstock.pipeline.plan.settings import make_plan, order_fingerprint
from penstock.pipeline.plan.steps import Cursor
from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.buckets import Buckets
    from penstock.pipeline.plan.job_plan import JobPlan
    from penstock.pipeline.plan.lane_order import LaneOrder
    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.pipeline.plan.steps import Walk
    from penstock.pipeline.plan.world import World
    from penstock.readers.source import Source


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
