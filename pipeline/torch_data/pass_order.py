"""Order the samples of one pass over a torch dataset, and hold the settings of the pass.

There are three orders: that of an iterable dataset itself (`StreamOrder`); of torch's sampler
(`TorchOrder`); and with a seed, Penstock's own plan over the indices (`PlannedOrder`). An order
holds nothing of a pass. It returns the requests of one pass from a mark on (`PassRequests`), and
resumes without reading data: a plan by arithmetic, a sampler with state by its state, any other
sampler by drawing the same indices again and skipping those that were delivered. `check_dataset`
refuses what is no dataset before that.
"""

from __future__ import annotations

import copy
import os
import warnings
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import ChainDataset, ConcatDataset, StackDataset

from penstock.cache import ConfigError, DatasetError, PenstockWarning, PlanError
from penstock.pipeline.feed import warn_of_late_parts
from penstock.pipeline.options import fresh_seed
from penstock.pipeline.plan import JobOrder, RankOrder, Walk, default_lanes, default_window
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, WorkerRequest
from penstock.pipeline.torch_data.owner_states import copy_of, has_state, length_of, state_of
from penstock.pipeline.torch_data.random_states import NAMES, WatchedDraws, freeze
from penstock.pipeline.torch_data.samplers import Occurrences
from penstock.readers import MapMixture, Source, index_contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Ints, MixtureSettings, RankSlots, Step
    from penstock.pipeline.torch_data.augmenter import Augmenter
    from penstock.readers import Contents

_CHECKED_ELEMENTS = 64  # of a list or dict
_PART_REMEDY = "Pass dataset.subset(ids), or a part of dataset.split(0.9, 0.1, seed=0), instead."
_SEVERAL_REMEDY = "Pass penstock.concat([a, b]) instead, or make one DataLoader per dataset."
_DONE: Any = object()
_ORDERED_TOGETHER = 4096  # samples over all ranks: 0.2 ms before the first batch of a pass


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError if this isn't a dataset, DatasetError if it holds a native one.

    Torch datasets pass, and objects with samples by index, as with torch.
    """
    got = ""
    if isinstance(dataset, str | bytes | os.PathLike):
        shown = os.fsdecode(dataset)
        got = (
            f"the path {shown!r}, wanted a dataset. Pass DataLoader(Dataset({shown!r}), ...), with "
            "penstock's Dataset"
        )
    elif isinstance(dataset, type):
        name = dataset.__name__
        got = f"the class {name}, wanted an instance of it. Pass {name}(...)"
    elif isinstance(dataset, torch.utils.data.DataLoader):
        got = f"a {type(dataset).__name__}, wanted the dataset that it reads. Pass its .dataset"
    if got:
        raise ConfigError(f"dataset: got {got}.")
    if any(_is_native(part) for part in _inner_datasets(dataset)):
        name = type(dataset).__name__
        remedy = _PART_REMEDY if isinstance(dataset, torch.utils.data.Subset) else _SEVERAL_REMEDY
        raise DatasetError(
            f"{name} holds a native dataset (penstock.Dataset), which is read by shards and not by "
            f"index, so torch's wrappers and lists can't hold one. {remedy}"
        )
    is_known = isinstance(dataset, torch.utils.data.Dataset)
    if not is_known and not any(hasattr(dataset, n) for n in ("__getitem__", "__getitems__")):
        remedy = (
            "An object that can only be iterated must be a torch.utils.data.IterableDataset: wrap "
            "it in one whose __iter__ yields its samples"
            if hasattr(dataset, "__iter__")
            else "Pass a penstock.Dataset, a torch dataset, or one with __getitem__ and __len__"
        )
        raise ConfigError(
            f"dataset: got an object of type {type(dataset).__name__}, wanted a dataset. {remedy}."
        )


def _inner_datasets(dataset: Any) -> list[Any]:
    if isinstance(dataset, torch.utils.data.Subset):
        return [dataset.dataset]
    if isinstance(dataset, ConcatDataset | ChainDataset | StackDataset):
        inner: Any = dataset.datasets
        return list(inner.values() if isinstance(inner, dict) else inner)
    if type(dataset) in (list, tuple):
        return list(dataset[:_CHECKED_ELEMENTS])
    if type(dataset) is dict:
        return list(dataset.values())[:_CHECKED_ELEMENTS]
    return []


def _is_native(part: Any) -> bool:
    return isinstance(part, Source) or any(_is_native(inner) for inner in _inner_datasets(part))


class PassRequests:
    """The requests of one pass, and the mark behind each delivered batch.

    This one is of a stream, whose batches need no requests. mark: where the pass starts. Until
    then, the seeds and states in it may change.
    """

    def __init__(self, order: PassOrder, mark: Mark) -> None:
        self._order, self.mark = order, mark
        self._drawn: dict[str, Any] = {}  # seeds and states that the order was drawn from
        # Of each request: what its batch changes in the mark, and its valid slots.
        self._sent: deque[tuple[dict[str, Any], NDArray[np.bool_] | None]] = deque()

    def __iter__(self) -> Iterator[WorkerRequest]:
        return iter(())

    def with_draws(self, mark: Mark) -> Mark:
        """Return a mark with the seeds and states that the order was drawn from."""
        return replace(mark, **self._drawn)

    def after_batch(self, mark: Mark) -> Mark:
        """Return the mark behind the next batch."""
        changes = self._sent.popleft()[0] if self._sent else {}
        return replace(mark, batches=mark.batches + 1, **self._drawn, **changes)

    def valid_slots(self) -> NDArray[np.bool_] | None:
        """Return which samples of the next batch aren't padding; None without padding."""
        return self._sent[0][1] if self._sent else None


@dataclass(frozen=True, kw_only=True)
class PassOrder(ABC):
    """The order and the settings of a pass over a torch dataset, fixed from its beginning to its
    end.

    augmenter: of the images of each batch; None without augment=.
    """

    is_stream: ClassVar[bool] = False

    dataset: Any
    options: LoaderOptions
    augmenter: Augmenter | None = None

    @property
    def name(self) -> str | None:
        """The name of what draws the order; None for an iterable dataset."""
        return None

    @property
    def sampler(self) -> Any:
        """The sampler of torch's order; None in another order."""
        return None

    @property
    def parts(self) -> tuple[Ints, Ints, Ints] | None:
        """The first index and the samples of each shard, and the end of each part of a mixture,
        from which substitutes of bad samples are chosen; None if a bad sample is an error."""
        return None

    @property
    def streams(self) -> int:
        """The number of iterators of an iterable dataset, or of copies of a map-style one."""
        return max(1, int(self.options.num_workers))

    @property
    def tracks_workers(self) -> bool:
        """True if a resume needs the position of each worker."""
        return self.is_stream or (self.options.num_workers > 0 and has_state(self.dataset))

    def own_generator(self) -> torch.Generator | None:
        """Return the generator from which the order is drawn, unless it is torch's default one."""
        return self.options.generator

    def decided(self, mark: Mark, *, keeps_workers: bool) -> Mark:
        """Return the mark of an epoch that begins, with the seeds and states of its draws.

        They are drawn now instead of when the pass begins, in torch's order; nothing else changes.
        keeps_workers: persistent workers were seeded earlier.
        """
        generator = self.own_generator()
        if generator is not None and mark.generator is None:
            mark = replace(mark, generator=freeze(generator.get_state()))
        if self.options.generator is None and mark.base_seed is None and not keeps_workers:
            mark = replace(mark, base_seed=fresh_seed())
        return mark

    def begin(self, mark: Mark) -> PassRequests:
        """Return the requests of a pass from a mark on."""
        return PassRequests(self, mark)

    @abstractmethod
    def steps(self) -> int | None:
        """Return the number of batches of a whole epoch on this rank; None if unknown."""

    @abstractmethod
    def last_samples(self) -> int | None:
        """Return the number of samples of an epoch's incomplete last batch; None if unknown."""

    def is_over(self, mark: Mark) -> bool:
        """Return True if nothing is left of a mark's epoch, as far as is known."""
        steps = self.steps()
        return steps is not None and 0 < steps <= mark.batches

    def has_reached_length(self, mark: Mark) -> bool:
        """Return True if a stream has delivered as many batches as its length promises.

        There may be more, but a loop that stops at the length expects the next epoch from the next
        iter().
        """
        del mark
        return False

    def length(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError if it is unknown."""
        steps = self.steps()
        if steps is None:
            raise TypeError(f"object of type {type(self.dataset).__name__} has no len()")
        return steps

    def after(self, mark: Mark) -> Mark:
        """Return the mark at which the next epoch begins.

        Persistent workers keep their datasets over epochs, and so their positions are kept.
        """
        workers: tuple[WorkerPosition, ...] = ()
        if self.options.keeps_workers:
            workers = tuple(
                worker.next_epoch() if self.is_stream else WorkerPosition(state=worker.state)
                for worker in mark.workers
            )
        return Mark(epoch=mark.epoch + 1, workers=workers)


# -- iterable datasets


@dataclass(frozen=True, kw_only=True)
class StreamOrder(PassOrder):
    """The order of an iterable dataset, which it brings itself."""

    is_stream = True

    def steps(self) -> int | None:
        length, size = length_of(self.dataset), self.options.rank_batch
        if length is None or size is None:
            return length
        return length // size if self.options.drop_last else -(-length // size)

    def last_samples(self) -> int | None:
        length, size = length_of(self.dataset), self.options.rank_batch
        return None if length is None or size is None else length % size

    def is_over(self, mark: Mark) -> bool:
        """Return False: a stream is over when it ends, not when it reaches its length."""
        del mark
        return False

    def has_reached_length(self, mark: Mark) -> bool:
        return super().is_over(mark)

    def check_length(self, batches: int) -> None:
        """Warn, as torch does, if the dataset has more batches than its length promises."""
        steps, workers = self.steps(), self.options.num_workers
        if steps is not None and batches == steps + 1:
            several = (
                f" Each of {workers} workers ends its own stream, often with an "
                "incomplete batch. If the dataset doesn't share its samples out by "
                "torch.utils.data.get_worker_info(), each worker returns all of them."
            )
            warnings.warn(
                f"{type(self.dataset).__name__} has {steps} batches by its __len__, but it "
                "returned more. A loop to the end gets all of them; a loop that stops at the "
                f"length (as in trainers) doesn't.{several if workers > 1 else ''}",
                PenstockWarning,
                stacklevel=4,
            )

    def check_short(self, batches: int) -> None:
        """Raise DatasetError if the dataset ends before its length, because other ranks would
        wait."""
        steps, world = self.steps(), self.options.world
        if steps is not None and batches < steps and world.size > 1:
            raise DatasetError(
                f"{type(self.dataset).__name__} ended after {batches} batches on rank "
                f"{world.rank}, but its __len__ promises {steps}, and the other ranks would "
                "wait for the rest. Make __len__ return the number that this rank yields."
            )


# -- torch's order


@dataclass(frozen=True, kw_only=True)
class TorchOrder(PassOrder):
    """torch's order: the user's or torch's own sampler, as torch would iterate it.

    indices: the batch sampler, or the sampler if there are no batches.
    """

    indices: Any

    @property
    def name(self) -> str:
        return type(self.sampler).__name__

    @property
    def sampler(self) -> Any:
        # Of torch's BatchSampler, the one inside it.
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
        generator = getattr(self.sampler, "generator", None)
        return generator if isinstance(generator, torch.Generator) else self.options.generator

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

    def decided(self, mark: Mark, *, keeps_workers: bool) -> Mark:
        mark = super().decided(mark, keeps_workers=keeps_workers)
        is_open = mark.sampler_seed is None and not any(getattr(mark, name) for name in NAMES)
        if self.is_watched and is_open:
            mark = replace(mark, sampler_seed=fresh_seed())
        return mark

    def begin(self, mark: Mark) -> PassRequests:
        return _TorchRequests(self, mark)

    def steps(self) -> int | None:
        return length_of(self.indices)

    def last_samples(self) -> int | None:
        if self.sampler is self.indices:  # single samples, or the user's own batches
            return 0
        samples = length_of(self.sampler)
        return None if samples is None else samples % self.batch_size

    def with_seed(self, seed: int) -> Any:
        """Return the indices of torch's RandomSampler for a seed that it would have drawn
        itself."""
        sampler = copy.copy(self.sampler)
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(seed)
        if self.sampler is self.indices:
            return sampler
        indices = copy.copy(self.indices)
        indices.sampler = sampler
        return indices

    def warn_if_unsharded(self) -> None:
        """Warn if each of several ranks would read the whole dataset."""
        kinds = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        size = self.options.world.size
        if size > 1 and self.options.agrees and type(self.sampler) in kinds:
            warnings.warn(
                f"Each of {size} ranks reads the whole dataset. Pass seed=, so that "
                "Penstock shards it, or a DistributedSampler, so that torch does.",
                PenstockWarning,
                stacklevel=4,
            )


class _TorchRequests(PassRequests):
    """The requests of one pass in torch's order."""

    _order: TorchOrder
    _occurrences: Occurrences | None = None

    def __iter__(self) -> Iterator[WorkerRequest]:
        mark = self.mark
        owners = (self._order.indices, self._order.sampler)
        stateful = next((owner for owner in owners if has_state(owner)), None)
        if stateful is not None and mark.sampler is not None:
            stateful.load_state_dict(copy_of(mark.sampler))
        skip = 0 if mark.sampler is not None else mark.batches
        for number, index in enumerate(self._indices()):
            repeats = None if self._occurrences is None else self._occurrences.of(index)
            if number < skip:
                continue
            state = None if stateful is None else state_of(stateful)
            self._sent.append(({"sampler": state}, None))
            yield WorkerRequest(index=index, epoch=mark.epoch, occurrences=repeats)

    def _indices(self) -> Iterator[Any]:
        """Yield indices in torch's order, and record or restore the states from which they are
        drawn."""
        order, mark = self._order, self.mark
        indices, draws = order.indices, None
        if mark.sampler_epoch is not None and hasattr(order.sampler, "set_epoch"):
            order.sampler.set_epoch(mark.sampler_epoch)
        if order.draws_a_seed:
            seed = mark.sampler_seed if mark.sampler_seed is not None else fresh_seed()
            self._drawn["sampler_seed"] = seed
            indices = order.with_seed(seed)
        elif order.is_watched:
            frozen = {name: getattr(mark, name) for name in NAMES}
            draws = WatchedDraws(seed=mark.sampler_seed, frozen=frozen)
        draw: Callable[[Callable[[], Any]], Any] = _call if draws is None else draws
        if order.options.augment is not None:
            first = mark.batches * order.batch_size if mark.sampler is not None else 0
            stateful = order.keeps_its_position
            self._occurrences = Occurrences(order.sampler, stateful=stateful, first=first)
        iterator = draw(lambda: iter(indices))
        # Not `yield from`: it would call iter() again, and some iterators restart then.
        while (item := draw(lambda: next(iterator, _DONE))) is not _DONE:
            if draws is not None:
                self._drawn.update(draws.recorded, mixed=draws.mixed)
                if order.keeps_its_position:  # its state repeats what it draws later
                    draws, draw = None, _call
            yield item


def _call(draw: Callable[[], Any]) -> Any:
    return draw()


# -- Penstock's order


@dataclass(frozen=True, kw_only=True)
class IndexSource:
    """The indices 0 to N - 1 of a map-style dataset, as the source of a plan.

    It has what an order and a membership use of a source; torch's workers read its samples. Its
    shards are virtual. A torch dataset has no fingerprint, so its type and length are compared.
    """

    contents: Contents
    url: str = ""
    part_of: None = None
    remote_shards: None = None

    @classmethod
    def of(cls, dataset: Any, samples: int) -> Source:
        """Return the source of a dataset of this length."""
        is_mixture = isinstance(dataset, MapMixture)
        contents = dataset.contents if is_mixture else index_contents(dataset, samples)
        return cast("Source", cls(contents=contents))

    def ids(self, rows: Ints) -> Ints:
        """Return the indices of (virtual shard, row) pairs."""
        return self.contents.places(rows)


@dataclass(frozen=True, kw_only=True)
class PlannedOrder(PassOrder):
    """Penstock's order over the indices of a map-style dataset, for one rank."""

    job: JobOrder

    @cached_property
    def ranks(self) -> RankOrder:
        """The selection of this rank's rows of each step."""
        padded_by = None if self.options.pad is None else self.job.walk
        return RankOrder(plan=self.job.plan(), world=self.options.world, padded_by=padded_by)

    @property
    def name(self) -> str:
        return self.ranks.plan.fingerprint

    @property
    def parts(self) -> tuple[Ints, Ints, Ints] | None:
        contents = self.job.source.contents
        if self.options.max_bad is None:
            return None
        mixture = contents.mixture
        ends = [contents.samples] if mixture is None else np.cumsum(mixture.sizes)
        return contents.starts, contents.sizes, np.array(ends)

    def begin(self, mark: Mark) -> PassRequests:
        return _PlannedRequests(self, mark)

    def steps(self) -> int:
        return len(self.job.walk)

    def is_over(self, mark: Mark) -> bool:
        return not self.job.walk.step_size(mark.cursor)

    def last_samples(self) -> int:
        walk = self.job.walk
        return walk.samples % walk.schedule.size if self.options.is_batched else 0


class _PlannedRequests(PassRequests):
    """The requests of one pass of a plan."""

    _order: PlannedOrder

    def __iter__(self) -> Iterator[WorkerRequest]:
        order, job, mark = self._order, self._order.job, self.mark
        for step, slots in self._slots():
            ids = job.source.ids(slots.rows).tolist()
            self._sent.append(({"position": step.start.position + step.size}, slots.valid))
            epochs = slots.samples.epochs
            yield WorkerRequest(
                index=ids if order.options.is_batched else ids[0],
                epoch=mark.epoch if epochs is None else epochs,
            )

    def _slots(self) -> Iterator[tuple[Step, RankSlots]]:
        """Yield the pass's steps, with the samples of this rank. Those of small batches are found
        by one computation for several of them."""
        job, ranks = self._order.job, self._order.ranks
        steps = job.walk.steps(self.mark.cursor, endless=False)
        together = max(1, _ORDERED_TOGETHER // job.walk.schedule.size)
        while some := [*islice(steps, together)]:
            found = ranks.slots_together(some) if len(some) > 1 else None
            yield from zip(some, found[0] if found else map(ranks.slots, some), strict=True)


def order_of(
    dataset: Any,
    options: LoaderOptions,
    indices: Any,
    augmenter: Augmenter | None,
    mixture: MixtureSettings | None = None,
) -> PassOrder:
    """Return the order and the settings of passes over a dataset.

    indices: of `TorchOrder`. mixture: of a state. Raises ConfigError and PlanError for arguments
    that don't fit.
    """
    if options.kind == "stream":
        return StreamOrder(dataset=dataset, options=options, augmenter=augmenter)
    if not options.is_planned and isinstance(dataset, MapMixture):
        raise ConfigError(
            f"{dataset!r} needs seed=: with it Penstock orders the samples by their weights. "
            "torch's own order has none; without weights, pass "
            "torch.utils.data.ConcatDataset(datasets) instead."
        )
    if not options.is_planned:
        return TorchOrder(dataset=dataset, options=options, augmenter=augmenter, indices=indices)
    job = _job_order(dataset, options, mixture)
    return PlannedOrder(dataset=dataset, options=options, augmenter=augmenter, job=job)


def _job_order(dataset: Any, options: LoaderOptions, mixture: MixtureSettings | None) -> JobOrder:
    """Return the order of a job over the indices of a map-style dataset. Raises as `order_of`."""
    try:
        samples = len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"seed= needs a dataset with a length, but {type(dataset).__name__} has none. Give it "
            "a __len__, or drop seed=."
        ) from error
    schedule = options.schedule
    source = IndexSource.of(dataset, samples)
    settings = options.first_settings(source.contents, global_batch=schedule.size)
    if mixture is not None:
        lanes, window = sum(mixture.lanes), max(mixture.windows)
        settings = replace(settings, lanes=lanes, window=window, mixture=mixture)
    elif settings.shuffle and settings.mixture is None and options.order.window is None:
        # Virtual shards needn't be fetched, so many rows may be open.
        shards = len(source.contents.sizes)
        lanes = default_lanes(schedule.size, shards)
        window = default_window(shards, lanes, global_batch=schedule.size, icc=None, shuffled=False)
        settings = replace(settings, window=window)
    samples = settings.epoch_samples(source.contents)
    walk = Walk(samples=samples, schedule=schedule, drop_last=bool(options.drop_last))
    if samples and not len(walk):
        raise PlanError(
            f"A global batch of {schedule.size} samples is larger than the dataset of "
            f"{samples}, and drop_last=True drops it, so an epoch would have no step. Pass a "
            "smaller batch or drop_last=False."
        )
    order = JobOrder(source=source, settings=settings, walk=walk)
    if mixture is None:
        warn_of_late_parts(order, options.world, stacklevel=6)
    return order
