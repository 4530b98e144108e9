"""The samplers that trainers look for: they show the loader's order and forward set_epoch.

The loader itself doesn't draw from them. They hold its engine weakly, so that a dropped loader
stops its threads at once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Protocol

import torch.utils.data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.world import World


class EpochOrder(Protocol):
    """The order of an epoch, as an engine knows it."""

    @property
    def epoch(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def epoch_batches(self) -> Iterator[list[int]]: ...
    def epoch_samples(self) -> int: ...
    def __len__(self) -> int: ...


class PlanSampler(torch.utils.data.DistributedSampler[int]):
    """Sample ids of this rank in the loader's current epoch, in order.

    A DistributedSampler, because it is one: trainers that shard what isn't sharded yet look for
    that.
    """

    def __init__(self, engine: EpochOrder | None, world: World) -> None:
        """The engine may come later, by `follow`."""
        self._engine = None if engine is None else weakref.ref(engine)
        self.place(world)
        self.shuffle, self.drop_last, self.seed = True, False, 0

    def place(self, world: World) -> None:
        """Show the place of this rank from now on."""
        self.rank, self.num_replicas = world.rank, world.size

    def follow(self, engine: EpochOrder) -> None:
        """Show this engine's order from now on."""
        self._engine = weakref.ref(engine)

    def _order(self) -> EpochOrder | None:
        return None if self._engine is None else self._engine()

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """The loader's epoch."""
        engine = self._order()
        return 0 if engine is None else engine.epoch

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """How many samples this rank has in an epoch."""
        return len(self)

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[int]]:
        """Sample ids of this rank in the current epoch, a batch at a time."""
        engine = self._order()
        return iter(()) if engine is None else engine.epoch_batches()

    def steps(self) -> int:
        """How many batches an epoch has."""
        engine = self._order()
        return 0 if engine is None else len(engine)

    def __len__(self) -> int:
        engine = self._order()
        return 0 if engine is None else engine.epoch_samples()

    def set_epoch(self, epoch: int) -> None:
        """Forward to the loader; trainers whose only epoch hook is `.sampler.set_epoch` use it."""
        engine = self._order()
        if engine is not None:
            engine.set_epoch(epoch)


class PlanBatches(torch.utils.data.BatchSampler):
    """Sample ids of this rank in batches; some trainers' hook is `.batch_sampler.set_epoch`."""

    sampler: PlanSampler

    def __init__(self, sampler: PlanSampler, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches as they are: torch would cut equal ones, but a rank's may differ by one."""
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.steps()

    def set_epoch(self, epoch: int) -> None:
        """Forward to the loader."""
        self.sampler.set_epoch(epoch)
