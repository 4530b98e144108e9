"""What a job's order is frozen to: the plan's settings, and the walk through its epochs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.plan.settings import make_plan, order_fingerprint
from penstock.pipeline.plan.steps import Cursor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.job_plan import JobPlan
    from penstock.pipeline.plan.settings import PlanSettings
    from penstock.pipeline.plan.steps import Walk
    from penstock.pipeline.plan.world import World
    from penstock.readers.source import Source


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobOrder:
    """Which samples a job reads in which steps, on any rank. Walkers take a plan each."""

    source: Source
    settings: PlanSettings
    walk: Walk

    def plan(self) -> JobPlan:
        """A plan for one walker."""
        return make_plan(self.source.contents, self.settings)

    def fingerprint(self) -> str:
        """What a resumed job must share, of dataset and order, as hex."""
        return order_fingerprint(self.source.contents, self.settings)

    def batches(self, epoch: int, world: World) -> Iterator[list[int]]:
        """Sample ids that a rank is handed in a whole epoch, a batch at a time."""
        plan, batch = self.plan(), self.walk.global_batch
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            at = step.start
            rows = plan.batch(at.epoch, at.position, batch, rank=world.rank, world=world.size)
            yield self.source.ids(rows).tolist()

    def samples(self, world: World) -> int:
        """Samples in all `batches` of an epoch."""
        walk = self.walk
        whole, rest = divmod(walk.samples, walk.global_batch)
        mine = whole * world.share(walk.global_batch)
        return mine if walk.drop_last else mine + world.share(rest)
