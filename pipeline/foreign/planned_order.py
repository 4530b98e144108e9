"""Penstock's own order of a torch dataset's indices: a plan over a dataset without shards."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ConfigError, PlanError
from penstock.pipeline.foreign.faults import Substitutes
from penstock.pipeline.foreign.worker import Request
from penstock.pipeline.options.foreign_options import planned_batch_size
from penstock.pipeline.options.order_options import check_shuffles
from penstock.pipeline.options.sizes import batch_sizes
from penstock.pipeline.plan.order import Plan, default_lanes, default_window
from penstock.pipeline.plan.steps import Cursor, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.foreign.mark import Mark
    from penstock.pipeline.options.penstock_options import PenstockOptions
    from penstock.pipeline.options.torch_options import TorchOptions
    from penstock.pipeline.plan.world import World

# Up to here one full shuffle of all indices is kept: 8 bytes each. Beyond, windows of virtual
# shards, as for native data.
FULL_SHUFFLE_SAMPLES = 2**26
VIRTUAL_SHARD_SAMPLES = 2**16


@dataclass(frozen=True, kw_only=True)
class PlannedOrder:
    """Penstock's order over indices 0 to N - 1 of a map-style dataset, for one rank.

    per_rank: samples of the largest rank's batch; is_padded: every batch is filled up to it.
    batched: False asks for single samples. seed: as the user gave it.
    """

    plan: Plan
    walk: Walk
    world: World
    per_rank: int
    is_padded: bool
    batched: bool
    seed: int

    @property
    def name(self) -> str:
        """The plan's fingerprint."""
        return self.plan.fingerprint

    @property
    def padded_size(self) -> int | None:
        return self.per_rank if self.is_padded else None

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Indices that this rank is asked for in an epoch, stand-ins left out."""
        rank, size = self.world.rank, self.world.size
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            ids = self.plan.ids(epoch, step.start.position, step.size, rank=rank, world=size)
            yield ids.tolist()

    def samples(self) -> int:
        """Samples in all `batches`."""
        runs = self.walk.runs(Cursor(0, 0))
        return sum(run.count * self.world.share(run.size) for run in runs)

    def decided(self, mark: Mark) -> Mark:
        return mark

    def begin(self, mark: Mark) -> _PlannedRequests:
        return _PlannedRequests(self, mark)

    def steps(self) -> int | None:
        return len(self.walk)

    def is_over(self, mark: Mark) -> bool:
        return not self.walk.step_size(Cursor(mark.epoch, mark.position))

    def last_samples(self) -> int:
        return self.walk.samples % self.walk.schedule.size if self.batched else 0

    def substitutes(self, max_bad: float | None) -> Substitutes | None:
        if max_bad is None or not self.walk.samples:
            return None
        return Substitutes.among(_parts(self.walk.samples), seed=self.seed)


class _PlannedRequests:
    def __init__(self, order: PlannedOrder, mark: Mark) -> None:
        self._order = order
        self.mark = mark
        self._sent: deque[tuple[int, NDArray[np.bool_] | None]] = deque()

    def __iter__(self) -> Iterator[Request]:
        order, mark = self._order, self.mark
        for step in order.walk.steps(Cursor(mark.epoch, mark.position), endless=False):
            ids, valid = self._ids(step.start)
            end = step.start.position + step.size
            self._sent.append((end, valid))
            yield Request(index=ids if order.batched else ids[0], epoch=mark.epoch)

    def _ids(self, start: Cursor) -> tuple[list[int], NDArray[np.bool_] | None]:
        import numpy as np

        order = self._order
        rank, size = order.world.rank, order.world.size
        batch = order.walk.full_size(start)
        ids = order.plan.ids(start.epoch, start.position, batch, rank=rank, world=size).tolist()
        if order.padded_size is None:
            return ids, None
        missing = order.padded_size - len(ids)
        valid = np.arange(order.padded_size) < len(ids)
        stand_in = order.plan.ids(start.epoch, start.position, 1).tolist()
        return ids + stand_in * missing, valid

    def noted(self, mark: Mark) -> Mark:
        return mark

    def moved(self, mark: Mark) -> Mark:
        return replace(mark, batches=mark.batches + 1, position=self._sent.popleft()[0])

    def valid(self) -> NDArray[np.bool_] | None:
        return self._sent[0][1]


def planned_order(
    dataset: Any, torch_options: TorchOptions, own: PenstockOptions, *, world: World
) -> PlannedOrder:
    """The order of a map-style dataset with a seed. own: Penstock's options.

    Raises ConfigError, PlanError for arguments that don't fit.
    """
    per_rank = planned_batch_size(torch_options, own, world)
    sizes = batch_sizes(
        1 if per_rank is None else torch_options.batch_size, own.global_batch_size, world
    )
    drop_last = bool(torch_options.drop_last)
    try:
        samples = len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"seed= needs a dataset with a length, and {type(dataset).__name__} has none. Give it "
            "__len__, or drop seed=."
        ) from error
    shuffle = bool(torch_options.shuffle)
    check_shuffles(own.order, shuffle=shuffle)
    walk = Walk(samples=samples, schedule=sizes.schedule, drop_last=drop_last)
    if samples and not len(walk):
        raise PlanError(
            f"One global batch of {sizes.global_batch} samples is more than the {samples} of the "
            "dataset, and drop_last=True drops it: an epoch would have no step. Pass a smaller "
            "batch or drop_last=False."
        )
    return PlannedOrder(
        plan=index_plan(samples, own, shuffle=shuffle, global_batch=sizes.global_batch),
        walk=walk,
        world=world,
        per_rank=sizes.per_rank,
        is_padded=own.pad is not None,
        batched=per_rank is not None,
        seed=int(own.seed or 0),
    )


def _parts(samples: int) -> list[int]:
    """What stands for the shards of a dataset without shards: how many samples are in each."""
    if samples <= FULL_SHUFFLE_SAMPLES:
        return [samples]
    whole, rest = divmod(samples, VIRTUAL_SHARD_SAMPLES)
    return [VIRTUAL_SHARD_SAMPLES] * whole + [rest] * (rest > 0)


def index_plan(samples: int, own: PenstockOptions, *, shuffle: bool, global_batch: int) -> Plan:
    """The plan over the indices of a dataset without shards."""
    sizes, order = _parts(samples), own.order
    if len(sizes) == 1:
        lanes, window = 1, 1
    else:
        lanes = default_lanes(global_batch, len(sizes))
        window = default_window(
            len(sizes), lanes, global_batch=global_batch, icc=None, shuffled=False
        )
    return Plan(
        sizes,
        seed=int(own.seed or 0) if shuffle else None,
        lanes=int(lanes if order.lanes is None else order.lanes),
        window=int(window if order.window is None else order.window),
        reshuffle=float(order.reshuffle),
    )
