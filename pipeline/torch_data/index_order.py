"""Order the indices of a map-style dataset by torch's sampler or, with a seed, by Penstock's own
plan.

An order (`IndexOrder`) holds nothing of a pass. It returns the requests of one pass from a mark on
(`PassRequests`), and resumes without reading data: a plan by arithmetic, a sampler with state by
its state, any other sampler by drawing the same indices again and skipping those that were
delivered.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.utils.data

from penstock.cache import ConfigError, PlanError
from penstock.pipeline.options import check_shuffles, fresh_seed
from penstock.pipeline.plan import Cursor, Plan, RankOrder, Walk, default_lanes, default_window
from penstock.pipeline.torch_data.mark import WorkerRequest, copy_of, has_state, length_of, state_of
from penstock.pipeline.torch_data.occurrences import Occurrences
from penstock.pipeline.torch_data.random_states import NAMES, WatchedDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.torch_data.mark import Mark


_DONE: Any = object()


@dataclass(frozen=True, slots=True)
class TorchOrder:
    """torch's order: the user's or torch's own sampler, as torch would iterate it.

    indices: the batch sampler, or the sampler if there are no batches. generator: the loader's.
    is_numbered: requests number the samples that repeat others of the epoch.
    """

    indices: Any
    generator: torch.Generator | None
    is_numbered: bool = False

    @property
    def name(self) -> str:
        """The class name of the sampler."""
        return type(self.sampler).__name__

    @property
    def sampler(self) -> Any:
        """The sampler that draws indices: of torch's BatchSampler, the one inside it."""
        if type(self.indices) is torch.utils.data.BatchSampler:
            return self.indices.sampler
        return self.indices

    @property
    def draws_a_seed(self) -> bool:
        """True if it is torch's RandomSampler without a generator, which draws a seed from the
        default one."""
        sampler = self.sampler
        return type(sampler) is torch.utils.data.RandomSampler and sampler.generator is None

    @property
    def keeps_its_position(self) -> bool:
        """True if it has a state of its own, which holds its position once it has begun."""
        return has_state(self.indices) or has_state(self.sampler)

    @property
    def batch_size(self) -> int:
        """The number of indices of torch's full batches; 1 without batches."""
        return self.indices.batch_size if self.sampler is not self.indices else 1

    def own_generator(self) -> torch.Generator | None:
        """Return the generator from which the order is drawn, unless it is torch's default one."""
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else self.generator

    @property
    def is_watched(self) -> bool:
        """True if it is unknown what it draws from until it has drawn."""
        # Of torch's samplers, these don't draw from a generator's state; classes derived from
        # them may.
        kinds = (torch.utils.data.SequentialSampler, torch.utils.data.DistributedSampler)
        if type(self.sampler) in kinds:
            return False
        is_torchs = type(self.sampler).__module__.startswith("torch.utils.data.")
        return not is_torchs or self.own_generator() is None

    def decided(self, mark: Mark) -> Mark:
        """Return the mark with the seed or state fixed from which the sampler will draw."""
        is_open = mark.sampler_seed is None and not any(getattr(mark, name) for name in NAMES)
        if self.is_watched and is_open:
            mark = replace(mark, sampler_seed=fresh_seed())
        return mark

    def begin(self, mark: Mark) -> _TorchRequests:
        """Return the requests of a pass from a mark on."""
        return _TorchRequests(self, mark)

    def steps(self) -> int | None:
        """Return the number of batches of a whole epoch on this rank; None if unknown."""
        return length_of(self.indices)

    def is_over(self, mark: Mark) -> bool:
        """Return True if nothing is left of a mark's epoch, as far as is known."""
        steps = self.steps()
        return steps is not None and 0 < steps <= mark.batches

    def last_samples(self) -> int | None:
        """Return the number of samples of an epoch's incomplete last batch; None if unknown."""
        if self.sampler is self.indices:  # single samples, or the user's own batches
            return 0
        samples = length_of(self.sampler)
        return None if samples is None else samples % self.batch_size


class _TorchRequests:
    """The requests of one pass in torch's order, and the mark behind each delivered batch.

    mark: where the pass starts. Until then, the seeds and states in it may change.
    """

    def __init__(self, order: TorchOrder, mark: Mark) -> None:
        self._order = order
        self.mark = mark
        self._states: deque[Any] = deque()
        self._occurrences: Occurrences | None = None
        self.drawn: dict[str, Any] = {}  # seeds and states that the order was drawn from

    def __iter__(self) -> Iterator[WorkerRequest]:
        mark = self.mark
        stateful = self._order.indices if has_state(self._order.indices) else self._order.sampler
        if not has_state(stateful):
            stateful = None
        if stateful is not None and mark.sampler is not None:
            stateful.load_state_dict(copy_of(mark.sampler))
        skip = 0 if mark.sampler is not None else mark.batches
        for number, index in enumerate(self._indices()):
            repeats = None if self._occurrences is None else self._occurrences.of(index)
            if number < skip:
                continue
            self._states.append(None if stateful is None else state_of(stateful))
            yield WorkerRequest(index=index, epoch=mark.epoch, occurrences=repeats)

    def _number(self, replay: Callable[[Any], Any]) -> None:
        """Begin to number repeats, from the states with which the sampler is about to draw."""
        order, mark = self._order, self.mark
        if order.is_numbered:
            self._occurrences = Occurrences(
                order.sampler,
                stateful=order.keeps_its_position,
                first=mark.batches * order.batch_size if mark.sampler is not None else 0,
                replay=replay,
            )

    def _indices(self) -> Iterator[Any]:
        """Yield indices in torch's order, and record or restore the states from which they are
        drawn."""
        order, mark = self._order, self.mark
        if mark.sampler_epoch is not None and hasattr(order.sampler, "set_epoch"):
            order.sampler.set_epoch(mark.sampler_epoch)
        if order.draws_a_seed or not order.is_watched:
            self._number(lambda draw: draw())
        if order.draws_a_seed:
            seed = mark.sampler_seed if mark.sampler_seed is not None else fresh_seed()
            self.drawn["sampler_seed"] = seed
            yield from _with_seed(order, seed)
            return
        if not order.is_watched:
            iterator = iter(order.indices)
            # Not `yield from`: it would call iter() again, and some iterators restart then.
            while (item := next(iterator, _DONE)) is not _DONE:
                yield item
            return
        frozen = {name: getattr(mark, name) for name in NAMES}
        draws = WatchedDraws(seed=mark.sampler_seed, frozen=frozen)
        self._number(draws.replay)
        iterator = draws(lambda: iter(order.indices))
        is_first = True
        while True:
            if is_first or not order.keeps_its_position:
                item = draws(lambda: next(iterator, _DONE))
                self.drawn.update(draws.recorded, mixed=draws.mixed)
            else:
                item = next(iterator, _DONE)
            is_first = False
            if item is _DONE:
                return
            yield item

    def after_batch(self, mark: Mark) -> Mark:
        state = self._states.popleft()
        return replace(self.with_draws(mark), batches=mark.batches + 1, sampler=state)

    def with_draws(self, mark: Mark) -> Mark:
        return replace(mark, **self.drawn)

    def valid_slots(self) -> NDArray[np.bool_] | None:
        return None


def _with_seed(order: TorchOrder, seed: int) -> Iterator[Any]:
    """Return the indices of torch's RandomSampler for a seed that it would have drawn itself."""
    sampler = copy.copy(order.sampler)
    sampler.generator = torch.Generator()
    sampler.generator.manual_seed(seed)
    if order.sampler is order.indices:
        return iter(sampler)
    indices = copy.copy(order.indices)
    indices.sampler = sampler
    return iter(indices)


# Up to this many samples, all indices are shuffled at once, at 8 bytes each. Larger datasets are
# shuffled in windows of virtual shards, as native ones are.
FULL_SHUFFLE_SAMPLES = 2**26
VIRTUAL_SHARD_SAMPLES = 2**16


@dataclass(frozen=True, kw_only=True)
class PlannedOrder:
    """Penstock's order over indices 0 to N - 1 of a map-style dataset, for one rank.

    ranks: the rows of each step that this rank reads. starts: first index of each virtual shard.
    batched: False requests single samples.
    """

    ranks: RankOrder
    walk: Walk
    starts: NDArray[np.int64]
    batched: bool

    @property
    def name(self) -> str:
        """The plan's fingerprint."""
        return self.ranks.plan.fingerprint

    def indices(self, rows: NDArray[np.int64]) -> list[int]:
        """Return the indices of (virtual shard, row) pairs."""
        indices: list[int] = (self.starts[rows[:, 0]] + rows[:, 1]).tolist()
        return indices

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """Yield this rank's indices in an epoch by batch, without padding."""
        for step in self.walk.steps(Cursor(epoch, 0), endless=False):
            slots = self.ranks.slots(step)
            yield self.indices(slots.rows[: slots.real])

    def samples(self) -> int:
        """Return the number of samples in all `batches`."""
        runs = self.walk.runs(Cursor(0, 0))
        return sum(run.count * self.ranks.world.share(run.size) for run in runs)

    def decided(self, mark: Mark) -> Mark:
        """Return the mark: it needs no seed or state."""
        return mark

    def begin(self, mark: Mark) -> _PlannedRequests:
        """Return the requests of a pass from a mark on."""
        return _PlannedRequests(self, mark)

    def steps(self) -> int:
        """Return the number of batches of a whole epoch on each rank."""
        return len(self.walk)

    def is_over(self, mark: Mark) -> bool:
        """Return True if nothing is left of a mark's epoch."""
        return not self.walk.step_size(mark.cursor)

    def last_samples(self) -> int:
        """Return the number of samples of an epoch's incomplete last batch."""
        return self.walk.samples % self.walk.schedule.size if self.batched else 0


class _PlannedRequests:
    """The requests of one pass of a plan, as `_TorchRequests`."""

    def __init__(self, order: PlannedOrder, mark: Mark) -> None:
        self._order = order
        self.mark = mark
        self._sent: deque[tuple[int, NDArray[np.bool_] | None]] = deque()

    def __iter__(self) -> Iterator[WorkerRequest]:
        order, mark = self._order, self.mark
        for step in order.walk.steps(mark.cursor, endless=False):
            slots = order.ranks.slots(step)
            indices = order.indices(slots.rows)
            self._sent.append((step.start.position + step.size, slots.valid))
            yield WorkerRequest(index=indices if order.batched else indices[0], epoch=mark.epoch)

    def with_draws(self, mark: Mark) -> Mark:
        return mark

    def after_batch(self, mark: Mark) -> Mark:
        return replace(mark, batches=mark.batches + 1, position=self._sent.popleft()[0])

    def valid_slots(self) -> NDArray[np.bool_] | None:
        return self._sent[0][1]


IndexOrder = TorchOrder | PlannedOrder
PassRequests = _TorchRequests | _PlannedRequests


def planned_order(dataset: Any, options: LoaderOptions) -> PlannedOrder:
    """Return the order of a map-style dataset with a seed.

    Raises ConfigError and PlanError for arguments that don't fit.
    """
    try:
        samples = len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"seed= needs a dataset with a length, but {type(dataset).__name__} has none. Give it "
            "a __len__, or drop seed=."
        ) from error
    check_shuffles(options.order, shuffle=bool(options.shuffle))
    schedule = options.schedule
    walk = Walk(samples=samples, schedule=schedule, drop_last=bool(options.drop_last))
    if samples and not len(walk):
        raise PlanError(
            f"A global batch of {schedule.size} samples is larger than the dataset of "
            f"{samples}, and drop_last=True drops it, so an epoch would have no step. Pass a "
            "smaller batch or drop_last=False."
        )
    plan = _index_plan(samples, options)
    return PlannedOrder(
        ranks=RankOrder(
            plan=plan, world=options.world, padded_by=None if options.pad is None else walk
        ),
        walk=walk,
        starts=np.cumsum(plan.sizes) - plan.sizes,
        batched=options.is_batched,
    )


def _index_plan(samples: int, options: LoaderOptions) -> Plan:
    """Return the plan over the indices of a dataset without shards."""
    order, lanes, window = options.order, 1, 1
    sizes = [samples]
    if samples > FULL_SHUFFLE_SAMPLES:
        whole, rest = divmod(samples, VIRTUAL_SHARD_SAMPLES)
        sizes = [VIRTUAL_SHARD_SAMPLES] * whole + [rest] * (rest > 0)
        batch = options.schedule.size
        lanes = default_lanes(batch, len(sizes))
        window = default_window(len(sizes), lanes, global_batch=batch, icc=None, shuffled=False)
    return Plan(
        sizes,
        seed=options.plan_seed if options.shuffle else None,
        lanes=int(lanes if order.lanes is None else order.lanes),
        window=int(window if order.window is None else order.window),
        reshuffle=float(order.reshuffle),
    )
