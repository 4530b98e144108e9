"""Which samples of a step one rank reads: its own, stand-ins of a padded batch, partners. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.partners import with_partners
from penstock.pipeline.plan.world import first_slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan.job_plan import JobPlan
    from penstock.pipeline.plan.steps import Step, Walk
    from penstock.pipeline.plan.world import World


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slots:
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

    def slots(self, step: Step) -> Slots:
        """What this rank reads for a step."""
        epoch, position = step.start.epoch, step.start.position
        rank, size = self.world.rank, self.world.size
        low, high = (first_slot(step.size, r, size, self.plan.bins) for r in (rank, rank + 1))
        rows = self.plan.places(epoch, position, step.size, low=low, high=high).rows
        real = len(rows)
        if self.mixes:
            rows, partner = self._with_partners(step, rows)
            return Slots(rows=rows, real=real, partner=partner)
        if self.padded_by is None:
            return Slots(rows=rows, real=real)
        padded_size = -(-self.padded_by.full_size(step.start) // size)
        valid = np.arange(padded_size) < real
        if missing := padded_size - real:
            stand_in = self.plan.places(epoch, position, 1, low=0, high=1).rows
            rows = np.concatenate([rows, np.repeat(stand_in, missing, axis=0)])
        return Slots(rows=rows, real=real, valid=valid)

    def _with_partners(
        self, step: Step, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """This rank's rows and those of partners on other ranks; the partner of each of its own."""
        size, world = step.size, self.world
        low = first_slot(size, world.rank, world.size, self.plan.bins)
        position, lanes = step.start.position, self.plan.lanes
        own_slots = self.plan.own_slots(step.start.epoch, position, size)
        slots, partner = with_partners(
            low,
            low + len(rows),
            position=position,
            size=size,
            lanes=lanes,
            own_slots=own_slots,
        )
        elsewhere = [
            self.plan.places(step.start.epoch, position, size, low=slot, high=slot + 1).rows
            for slot in slots[len(rows) :].tolist()
        ]
        return np.concatenate([rows, *elsewhere]), partner
