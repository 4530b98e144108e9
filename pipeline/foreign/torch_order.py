"""torch's order of a map-style dataset's indices: the user's sampler, or one of torch's own."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

from penstock.pipeline.foreign.dataset_state import copy_of, has_state, state_of
from penstock.pipeline.foreign.generators import NAMES
from penstock.pipeline.foreign.occurrences import Occurrences
from penstock.pipeline.foreign.watched_draws import WatchedDraws
from penstock.pipeline.foreign.worker import Request, fresh_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.foreign.mark import Mark

_DONE: Any = object()


@dataclass(frozen=True, slots=True)
class TorchOrder:
    """torch's order: the user's or torch's own sampler, as torch would iterate it.

    indices: the batch sampler, or the sampler where nothing is batched. generator: the loader's.
    is_numbered: whether requests say which samples are repeats of others of the epoch.
    """

    indices: Any
    generator: torch.Generator | None
    is_numbered: bool = False

    @property
    def name(self) -> str:
        """The kind of sampler."""
        return type(self.sampler).__name__

    @property
    def sampler(self) -> Any:
        """The sampler that draws indices: of torch's BatchSampler, the one inside it."""
        if type(self.indices) is torch.utils.data.BatchSampler:
            return self.indices.sampler
        return self.indices

    @property
    def draws_a_seed(self) -> bool:
        """Whether it is torch's RandomSampler that takes a seed from the default generator."""
        sampler = self.sampler
        return type(sampler) is torch.utils.data.RandomSampler and sampler.generator is None

    @property
    def keeps_its_place(self) -> bool:
        """Whether it has a state of its own, which says where it is once it has begun."""
        return has_state(self.indices) or has_state(self.sampler)

    @property
    def batch_size(self) -> int:
        """Indices of a whole batch of torch's; 1 where nothing is batched."""
        return self.indices.batch_size if self.sampler is not self.indices else 1

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

    def begin(self, mark: Mark) -> _TorchRequests:
        return _TorchRequests(self, mark)

    def steps(self) -> int | None:
        try:
            return len(self.indices)
        except (TypeError, NotImplementedError):
            return None

    def is_over(self, mark: Mark) -> bool:
        steps = self.steps()
        return steps is not None and 0 < steps <= mark.batches

    def last_samples(self) -> int | None:
        if self.sampler is self.indices:  # single samples, or the user's own batches
            return 0
        try:
            return len(self.sampler) % self.batch_size
        except (TypeError, NotImplementedError):
            return None

    def substitutes(self, max_bad: float | None) -> None:
        """Nothing stands in for bad samples in torch's order."""


def _is_deterministic(sampler: Any) -> bool:
    """Samplers of torch's that don't draw from a generator's state; derived ones may."""
    kinds = (torch.utils.data.SequentialSampler, torch.utils.data.DistributedSampler)
    return type(sampler) in kinds


class _TorchRequests:
    def __init__(self, order: TorchOrder, mark: Mark) -> None:
        self._order = order
        self.mark = mark
        self._states: deque[Any] = deque()
        self.drawn: dict[str, Any] = {}  # what the order was drawn from, once that is known
        self._occurrences: Occurrences | None = None

    def __iter__(self) -> Iterator[Request]:
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
            yield Request(index=index, epoch=mark.epoch, occurrences=repeats)

    def _number(self, beside: Callable[[Any], Any]) -> None:
        """Begin to number repeats, from what the sampler is about to draw from."""
        order, mark = self._order, self.mark
        if order.is_numbered:
            self._occurrences = Occurrences(
                order.sampler,
                stateful=order.keeps_its_place,
                first=mark.batches * order.batch_size if mark.sampler is not None else 0,
                beside=beside,
            )

    def _indices(self) -> Iterator[Any]:
        """Indices in torch's order; what they are drawn from is noted, or taken from the mark."""
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
            # Not `yield from`: it would call iter() again, and some iterators begin anew then.
            while (item := next(iterator, _DONE)) is not _DONE:
                yield item
            return
        frozen = {name: getattr(mark, name) for name in NAMES}
        draws = WatchedDraws(seed=mark.sampler_seed, frozen=frozen)
        self._number(draws.beside)
        iterator = draws(lambda: iter(order.indices))
        is_first = True
        while True:
            if is_first or not order.keeps_its_place:
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
