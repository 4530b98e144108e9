"""Hold the settings of a pass over a torch dataset, and derive its steps, streams and length."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

from penstock.cache import DatasetError, PenstockWarning
from penstock.pipeline.torch_data.index_order import TorchOrder
from penstock.pipeline.torch_data.mark import Mark, WorkerPosition, has_state, length_of

if TYPE_CHECKING:
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import World
    from penstock.pipeline.torch_data.augmenter import Augmenter
    from penstock.pipeline.torch_data.index_order import IndexOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSetup:
    """The settings of a pass over a torch dataset, fixed from its beginning to its end.

    order: None for an iterable dataset. augmenter: of the images of each batch; None without
    augment=.
    """

    dataset: Any
    options: LoaderOptions
    order: IndexOrder | None
    augmenter: Augmenter | None

    @property
    def num_workers(self) -> int:
        return int(self.options.num_workers)

    @property
    def world(self) -> World:
        """Rank and size of the batches."""
        return self.options.world

    @property
    def sampler(self) -> Any:
        """The sampler of torch's order; None in another order."""
        return self.order.sampler if isinstance(self.order, TorchOrder) else None

    @property
    def streams(self) -> int:
        """The number of iterators of an iterable dataset, or of copies of a map-style one."""
        return max(1, self.num_workers)

    @property
    def tracks_workers(self) -> bool:
        """True if a resume needs the position of each worker."""
        return self.order is None or (self.num_workers > 0 and has_state(self.dataset))

    def own_generator(self) -> torch.Generator | None:
        """Return the generator from which the order is drawn, unless it is torch's default one."""
        own = self.order.own_generator() if isinstance(self.order, TorchOrder) else None
        return own if own is not None else self.options.generator

    def steps(self) -> int | None:
        """Return the number of batches of an epoch; None if unknown."""
        return self.promised_steps() if self.order is None else self.order.steps()

    def length(self) -> int:
        """Return the number of batches of an epoch. Raises TypeError if it is unknown."""
        steps = self.steps()
        if steps is None:
            raise TypeError(f"object of type {type(self.dataset).__name__} has no len()")
        return steps

    def promised_steps(self) -> int | None:
        """Return the number of batches by an iterable dataset's length; None for any other
        dataset."""
        length = None if self.order is not None else length_of(self.dataset)
        if length is None or self.options.rank_batch is None:
            return length
        whole, rest = divmod(length, self.options.rank_batch)
        return whole + (rest > 0 and not self.options.drop_last)

    def last_samples(self) -> int | None:
        """Return the number of samples of an epoch's incomplete last batch; None if unknown."""
        if self.order is not None:
            return self.order.last_samples()
        length, size = length_of(self.dataset), self.options.rank_batch
        return None if length is None or size is None else length % size

    def has_reached_length(self, mark: Mark) -> bool:
        """Return True if a stream has delivered as many batches as its length promises.

        There may be more, but a loop that stops at the length expects the next epoch from the next
        iter().
        """
        steps = self.promised_steps()
        return steps is not None and 0 < steps <= mark.batches

    def after(self, mark: Mark) -> Mark:
        """Return the mark at which the next epoch begins.

        Persistent workers keep their datasets over epochs, and so their positions are kept.
        """
        workers: tuple[WorkerPosition, ...] = ()
        if self.options.keeps_workers:
            is_map = self.order is not None
            workers = tuple(
                WorkerPosition(state=worker.state) if is_map else worker.next_epoch()
                for worker in mark.workers
            )
        return Mark(epoch=mark.epoch + 1, workers=workers)

    def with_position(self, mark: Mark, worker: int, position: WorkerPosition) -> Mark:
        """Return the mark with one worker's stream at another position, and the next worker's
        turn."""
        workers = list(mark.workers)
        workers[worker] = position
        return replace(mark, workers=tuple(workers), next_worker=(worker + 1) % self.streams)

    # -- checks

    def check_length(self, batches: int) -> None:
        """Warn, as torch does, if an iterable dataset has more batches than its length promises."""
        steps = self.promised_steps()
        if steps is not None and batches == steps + 1:
            several = (
                f" Each of {self.num_workers} workers ends its own stream, often with an "
                "incomplete batch. If the dataset doesn't share its samples out by "
                "torch.utils.data.get_worker_info(), each worker returns all of them."
            )
            warnings.warn(
                f"{type(self.dataset).__name__} has {steps} batches by its __len__, but it "
                "returned more. A loop to the end gets all of them; a loop that stops at the "
                f"length (as in trainers) doesn't.{several if self.num_workers > 1 else ''}",
                PenstockWarning,
                stacklevel=4,
            )

    def check_short(self, batches: int) -> None:
        """Raise DatasetError if an iterable dataset ends before its length, because other ranks
        would wait."""
        steps = self.promised_steps()
        if steps is not None and batches < steps and self.world.size > 1:
            raise DatasetError(
                f"{type(self.dataset).__name__} ended after {batches} batches on rank "
                f"{self.world.rank}, but its __len__ promises {steps}, and the other ranks would "
                "wait for the rest. Make __len__ return the number that this rank yields."
            )

    def warn_if_unsharded(self) -> None:
        """Warn if each of several ranks would read the whole dataset."""
        kinds = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        if self.world.size > 1 and self.options.agrees and type(self.sampler) in kinds:
            warnings.warn(
                f"Each of {self.world.size} ranks reads the whole dataset. Pass seed=, so that "
                "Penstock shards it, or a DistributedSampler, so that torch does.",
                PenstockWarning,
                stacklevel=4,
            )
