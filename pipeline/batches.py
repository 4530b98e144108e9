"""From a step of the walk to encoded bytes and draws: what the reading threads do for a batch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from augment.draws import Draws, draw

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from augment.recipe import CheckedRecipe
    from pipeline.order import Plan
    from pipeline.steps import Step
    from pipeline.world import World
    from readers import Dataset
    from readers.types import EncodedBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """One rank's share of a global batch, read and checked, ready for decoding.

    valid: bool, shape (n,), False where a padded slot holds a stand-in; None without padding.
    read_s: thread time that this took.
    """

    step: Step
    encoded: EncodedBatch
    draws: Draws | None
    valid: NDArray[np.bool_] | None
    read_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReader:
    """Prepares any step of a plan for one rank. Pure but for the reads; several threads may call.

    global_batch: samples of a full step over all ranks.
    padded_size: slots of this rank that pad="mask" fills up to; None without padding.
    """

    dataset: Dataset
    plan: Plan
    recipe: CheckedRecipe | None
    draw_seed: int
    world: World
    global_batch: int
    padded_size: int | None
    mode: Literal["mmap", "pread"]

    def __call__(self, step: Step) -> Prepared:
        began = time.thread_time()
        rows, valid = self._rows(step)
        encoded = self.dataset.read(rows, mode=self.mode)
        draws = None
        if self.recipe is not None:
            draws = draw(
                self.recipe,
                ids=encoded.ids,
                dims=encoded.dims,
                seed=self.draw_seed,
                epoch=step.start.epoch,
            )
        return Prepared(
            step=step,
            encoded=encoded,
            draws=draws,
            valid=valid,
            read_s=time.thread_time() - began,
        )

    def _rows(self, step: Step) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
        epoch, position = step.start.epoch, step.start.position
        rank, size = self.world.rank, self.world.size
        # The full size, not the step's: the plan clips at the epoch's end, where a rank may get
        # none.
        rows = self.plan.batch(epoch, position, self.global_batch, rank=rank, world=size)
        if self.padded_size is None:
            return rows, None
        missing = self.padded_size - len(rows)
        valid = np.ones(self.padded_size, dtype=np.bool_)
        if missing:
            valid[len(rows) :] = False
            stand_in = self.plan.batch(epoch, position, 1)
            rows = np.concatenate([rows, np.repeat(stand_in, missing, axis=0)])
        return rows, valid
