"""Which samples a torch dataset is asked for: torch's own samplers, or our plan.

An order gives requests for one pass from a mark on, and knows how to go on behind it without
touching data: a plan by arithmetic, a sampler with state by its state, any other by drawing the
same indices again and skipping what was handed out.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.utils.data

from penstock.cache.errors import ConfigError, PlanError, ResumeError
from penstock.pipeline.foreign.draws import NAMES, Draws, check_told
from penstock.pipeline.foreign.state import copied, has_state, taken
from penstock.pipeline.foreign.stream import WorkerPosition
from penstock.pipeline.foreign.worker import Request, fresh_seed
from penstock.pipeline.options.sizes import batch_sizes, check_ends
from penstock.pipeline.plan.order import Plan, default_lanes, default_window
from penstock.pipeline.plan.steps import Cursor, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.options.penstock_options import PenstockOptions, PlanOptions
    from penstock.pipeline.options.torch_options import TorchOptions
    from penstock.pipeline.plan.world import World

# Up to here one full shuffle of all indices is kept: 8 bytes each. Beyond, windows of virtual
# shards, as for native data.
FULL_SHUFFLE_SAMPLES = 2**26
VIRTUAL_SHARD_SAMPLES = 2**16

_DONE: Any = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where a pass stands: what of an epoch was handed out, and what its order was drawn from.

    batches: handed out on this rank. position: samples of the epoch over all ranks (plans only).
    base_seed: torch's, of the workers. sampler_seed, rng, python_rng, numpy_rng, generator: what
    the sampler drew from: a seed, the states of torch's, python's and numpy's generators, or of
    the user's; mixed: that of them which can't be repeated. sampler: its own state.
    sampler_epoch, dataset_epoch: of a sampler or an iterable dataset with set_epoch. workers: of
    each torch worker (one without workers); next_worker: whose batch is due.
    """

    epoch: int = 0
    batches: int = 0
    position: int = 0
    base_seed: int | None = None
    sampler_seed: int | None = None
    rng: str | None = None
    python_rng: str | None = None
    numpy_rng: str | None = None
    mixed: str | None = None
    generator: str | None = None
    sampler: Any = None
    sampler_epoch: int | None = None
    dataset_epoch: int | None = None
    workers: tuple[WorkerPosition, ...] = field(default=())
    next_worker: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON types, but for states of the user's own dataset and sampler, which are kept."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "workers"}
        kept = {name: value for name, value in values.items() if value is not None}
        return {
            **copied(kept),
            "workers": [
                {each.name: copied(getattr(worker, each.name)) for each in fields(worker)}
                for worker in self.workers
            ],
        }

    @classmethod
    def from_dict(cls, values: Any) -> Mark:
        """Raises ResumeError for what `to_dict` can't have written."""
        try:
            given = copied(dict(values))
            workers = tuple(WorkerPosition(**worker) for worker in given.pop("workers"))
            mark = cls(workers=workers, **given)
            for worker in workers:
                worker.check()
            counts = (mark.epoch, mark.batches, mark.position, mark.next_worker)
            if any(type(count) is not int or count < 0 for count in counts):
                raise ValueError(f"counts are {counts}")
        except (TypeError, ValueError, KeyError) as error:
            raise ResumeError(
                f"State is damaged ({error}). Start from an older checkpoint."
            ) from error
        for told in (
            {name: getattr(mark, name) for name in NAMES},
            *(worker.rng for worker in mark.workers if worker.rng is not None),
        ):
            check_told(told)
        return mark


class Order(Protocol):
    """Requests of a pass. Holds nothing of a pass itself. name: what a resumed job must share."""

    @property
    def name(self) -> str: ...

    def decided(self, mark: Mark) -> Mark:
        """The mark with what the sampler will draw from decided now."""

    def begin(self, mark: Mark) -> Stream:
        """The stream of a pass from a mark on."""

    def steps(self) -> int | None:
        """Batches of a whole epoch on this rank, None if nobody knows."""


class Stream(Protocol):
    """Requests of one pass, and how a mark moves with each that was handed out."""

    mark: Mark  # where it starts; what it is drawn from may be decided until it does

    def __iter__(self) -> Iterator[Request]: ...
    def noted(self, mark: Mark) -> Mark: ...
    def moved(self, mark: Mark) -> Mark: ...
    def valid(self) -> NDArray[np.bool_] | None: ...


@dataclass(frozen=True, kw_only=True)
class PlanOrder:
    """Penstock's order over indices 0 to N - 1 of a map-style dataset, for one rank.

    per_rank: samples of the largest rank's batch; is_padded: every batch is filled up to it.
    batched: False asks for single samples.
    """

    plan: Plan
    walk: Walk
    world: World
    per_rank: int
    is_padded: bool
    batched: bool

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
            batch = self.walk.global_batch
            ids = self.plan.ids(epoch, step.start.position, batch, rank=rank, world=size)
            yield ids.tolist()

    def samples(self) -> int:
        """Samples in all `batches`."""
        whole, rest = divmod(self.walk.samples, self.walk.global_batch)
        mine = whole * self.world.share(self.walk.global_batch)
        return mine if self.walk.drop_last else mine + self.world.share(rest)

    def decided(self, mark: Mark) -> Mark:
        return mark

    def begin(self, mark: Mark) -> _PlanStream:
        return _PlanStream(self, mark)

    def steps(self) -> int | None:
        return len(self.walk)


class _PlanStream:
    def __init__(self, order: PlanOrder, mark: Mark) -> None:
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
        batch = order.walk.global_batch
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


def plan_order(
    dataset: Any, torch_options: TorchOptions, own: PenstockOptions, *, world: World
) -> PlanOrder:
    """The order of a map-style dataset with a seed. own: Penstock's options.

    Raises ConfigError, PlanError for arguments that don't fit.
    """
    drop_last, batched = bool(torch_options.drop_last), torch_options.batch_size is not None
    check_ends(world, drop_last=drop_last, pad=own.pad)
    if not batched and (own.global_batch_size is not None or own.pad is not None):
        raise ConfigError("batch_size=None (single samples) allows no global_batch_size=, no pad=.")
    sizes = batch_sizes(torch_options.batch_size if batched else 1, own.global_batch_size, world)
    try:
        samples = len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"seed= needs a dataset with a length, and {type(dataset).__name__} has none. Give it "
            "__len__, or drop seed=."
        ) from error
    shuffle = bool(torch_options.shuffle)
    own.plan.check_order(shuffle=shuffle)
    walk = Walk(samples=samples, global_batch=sizes.global_batch, drop_last=drop_last)
    if samples and not len(walk):
        raise PlanError(
            f"One global batch of {walk.global_batch} samples is more than the {samples} of the "
            "dataset, and drop_last=True drops it: an epoch would have no step. Pass a smaller "
            "batch or drop_last=False."
        )
    return PlanOrder(
        plan=index_plan(samples, own.plan, shuffle=shuffle, global_batch=walk.global_batch),
        walk=walk,
        world=world,
        per_rank=sizes.per_rank,
        is_padded=own.pad is not None,
        batched=batched,
    )


def index_plan(samples: int, options: PlanOptions, *, shuffle: bool, global_batch: int) -> Plan:
    """The plan over the indices of a dataset without shards."""
    if samples <= FULL_SHUFFLE_SAMPLES:
        sizes = [samples]
        lanes, window = 1, 1
    else:
        whole, rest = divmod(samples, VIRTUAL_SHARD_SAMPLES)
        sizes = [VIRTUAL_SHARD_SAMPLES] * whole + [rest] * (rest > 0)
        lanes = default_lanes(global_batch, len(sizes))
        window = default_window(
            len(sizes), lanes, global_batch=global_batch, icc=None, shuffled=False
        )
    return Plan(
        sizes,
        seed=int(options.seed or 0) if shuffle else None,
        lanes=int(lanes if options.lanes is None else options.lanes),
        window=int(window if options.window is None else options.window),
        reshuffle=float(options.reshuffle),
    )


@dataclass(frozen=True, slots=True)
class TorchOrder:
    """torch's order: the user's or torch's own sampler, as torch would iterate it.

    indices: the batch sampler, or the sampler where nothing is batched. generator: the loader's.
    """

    indices: Any
    generator: torch.Generator | None

    @property
    def name(self) -> str:
        """The kind of sampler."""
        return type(self.sampler).__name__

    @property
    def sampler(self) -> Any:
        """What draws indices: below torch's BatchSampler its sampler."""
        if type(self.indices) is torch.utils.data.BatchSampler:
            return self.indices.sampler
        return self.indices

    @property
    def draws_a_seed(self) -> bool:
        """Whether it is torch's RandomSampler that takes a seed from the default generator."""
        sampler = self.sampler
        return type(sampler) is torch.utils.data.RandomSampler and sampler.generator is None

    def own_generator(self) -> torch.Generator | None:
        """The generator that the order is drawn from, if it isn't torch's default one."""
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else self.generator

    @property
    def is_watched(self) -> bool:
        """Whether nobody knows what it draws from before it has drawn."""
        if _is_deterministic(self.sampler):
            return False
        is_torchs = type(self.sampler).__module__.startswith("torch.utils.data.")
        return not is_torchs or self.own_generator() is None

    def decided(self, mark: Mark) -> Mark:
        is_open = mark.sampler_seed is None and not any(getattr(mark, name) for name in NAMES)
        if self.is_watched and is_open:
            mark = replace(mark, sampler_seed=fresh_seed())
        return mark

    def begin(self, mark: Mark) -> _TorchStream:
        return _TorchStream(self, mark)

    def steps(self) -> int | None:
        try:
            return len(self.indices)
        except (TypeError, NotImplementedError):
            return None


def _is_deterministic(sampler: Any) -> bool:
    """Samplers of torch's that don't draw from a generator's state; derived ones may."""
    kinds = (torch.utils.data.SequentialSampler, torch.utils.data.DistributedSampler)
    return type(sampler) in kinds


class _TorchStream:
    def __init__(self, order: TorchOrder, mark: Mark) -> None:
        self._order = order
        self.mark = mark
        self._states: deque[Any] = deque()
        self.drawn: dict[str, Any] = {}  # what the order was drawn from, once that is known

    def __iter__(self) -> Iterator[Request]:
        mark = self.mark
        stateful = self._order.indices if has_state(self._order.indices) else self._order.sampler
        if not has_state(stateful):
            stateful = None
        if stateful is not None and mark.sampler is not None:
            stateful.load_state_dict(copied(mark.sampler))
        skip = 0 if mark.sampler is not None else mark.batches
        for number, index in enumerate(self._indices()):
            if number < skip:
                continue
            self._states.append(None if stateful is None else taken(stateful))
            yield Request(index=index, epoch=mark.epoch)

    def _indices(self) -> Iterator[Any]:
        """Indices in torch's order; what they are drawn from is noted, or taken from the mark."""
        order, mark = self._order, self.mark
        if mark.sampler_epoch is not None and hasattr(order.sampler, "set_epoch"):
            order.sampler.set_epoch(mark.sampler_epoch)
        if order.draws_a_seed:
            seed = mark.sampler_seed if mark.sampler_seed is not None else fresh_seed()
            self.drawn["sampler_seed"] = seed
            yield from _with_seed(order, seed)
            return
        if not order.is_watched:
            iterator = iter(order.indices)
            # Not `yield from`: it would call iter() again, and some iterators begin anew then.
            while (item := next(iterator, _DONE)) is not _DONE:
                yield item
            return
        told = {name: getattr(mark, name) for name in NAMES}
        draws = Draws(seed=mark.sampler_seed, told=told)
        iterator = draws(lambda: iter(order.indices))
        # One with a state of its own says itself where it is, once it has begun.
        keeps_its_place = has_state(order.indices) or has_state(order.sampler)
        is_first = True
        while True:
            if is_first or not keeps_its_place:
                item = draws(lambda: next(iterator, _DONE))
                self.drawn.update(draws.noted, mixed=draws.mixed)
            else:
                item = next(iterator, _DONE)
            is_first = False
            if item is _DONE:
                return
            yield item

    def moved(self, mark: Mark) -> Mark:
        state = self._states.popleft()
        return replace(self.noted(mark), batches=mark.batches + 1, sampler=state)

    def noted(self, mark: Mark) -> Mark:
        return replace(mark, **self.drawn)

    def valid(self) -> NDArray[np.bool_] | None:
        return None


def _with_seed(order: TorchOrder, seed: int) -> Iterator[Any]:
    """What torch's RandomSampler gives from a seed that it would have drawn itself."""
    sampler = copy.copy(order.sampler)
    sampler.generator = torch.Generator()
    sampler.generator.manual_seed(seed)
    if order.sampler is order.indices:
        return iter(sampler)
    indices = copy.copy(order.indices)
    indices.sampler = sampler
    return iter(indices)
