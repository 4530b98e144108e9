"""Hold what a pass over a torch dataset works by, and derive its steps, streams and length."""

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
    from penstock.pipeline.options import TorchDataOptions
    from penstock.pipeline.plan import World
    from penstock.pipeline.torch_data.augmenter import Augmenter
    from penstock.pipeline.torch_data.index_order import IndexOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSetup:
    """What a pass over a torch dataset goes by from its beginning to its end.

    order: None for an iterable dataset. augmenter: of the images of each batch, if asked for.
    """

    dataset: Any
    options: TorchDataOptions
    order: IndexOrder | None
    augmenter: Augmenter | None

    @property
    def num_workers(self) -> int:
        return int(self.options.workers.num_workers)

    @property
    def world(self) -> World:
        """Rank and size that the batches are for."""
        return self.options.world

    @property
    def sampler(self) -> Any:
        """What draws indices in torch's order; None where that isn't torch's."""
        return self.order.sampler if isinstance(self.order, TorchOrder) else None

    @property
    def streams(self) -> int:
        """Iterators of an iterable dataset, or copies of a map-style one."""
        return max(1, self.num_workers)

    @property
    def tracks_workers(self) -> bool:
        """Whether resuming needs to know how far each worker came."""
        return self.order is None or (self.num_workers > 0 and has_state(self.dataset))

    def own_generator(self) -> torch.Generator | None:
        """What the order is drawn from, if it isn't torch's default generator."""
        own = self.order.own_generator() if isinstance(self.order, TorchOrder) else None
        return own if own is not None else self.options.torch_options.generator

    def steps(self) -> int | None:
        """Batches of an epoch, None if nobody knows."""
        return self.promised_steps() if self.order is None else self.order.steps()

    def length(self) -> int:
        """Batches of an epoch. Raises TypeError if nobody knows."""
        steps = self.steps()
        if steps is None:
            raise TypeError(f"object of type {type(self.dataset).__name__} has no len()")
        return steps

    def promised_steps(self) -> int | None:
        """Batches of an epoch by the length of an iterable dataset; None for any other."""
        length = None if self.order is not None else length_of(self.dataset)
        if length is None or self.options.batch_size is None:
            return length
        whole, rest = divmod(length, self.options.batch_size)
        return whole + (rest > 0 and not self.options.torch_options.drop_last)

    def last_samples(self) -> int | None:
        """Samples of an epoch's last batch that isn't whole; None if nobody knows."""
        if self.order is not None:
            return self.order.last_samples()
        length, size = length_of(self.dataset), self.options.batch_size
        return None if length is None or size is None else length % size

    def is_counted_out(self, mark: Mark) -> bool:
        """Whether a stream gave what its length promises: there may be more, but who never asks
        past the length means the next epoch by the next iter()."""
        steps = self.promised_steps()
        return steps is not None and 0 < steps <= mark.batches

    def after(self, mark: Mark) -> Mark:
        """Where the next epoch begins. Persistent workers keep their datasets over epochs, and so
        what is known of those."""
        workers: tuple[WorkerPosition, ...] = ()
        if self.options.workers.persistent_workers:
            is_map = self.order is not None
            workers = tuple(
                WorkerPosition(state=worker.state) if is_map else worker.next_epoch()
                for worker in mark.workers
            )
        return Mark(epoch=mark.epoch + 1, workers=workers)

    def moved(self, mark: Mark, worker: int, position: WorkerPosition) -> Mark:
        """The mark with one worker's stream at another position, the next worker's turn."""
        workers = list(mark.workers)
        workers[worker] = position
        return replace(mark, workers=tuple(workers), next_worker=(worker + 1) % self.streams)

    # -- what is wrong with it

    def check_length(self, batches: int) -> None:
        """Warn, as torch does, where an iterable dataset has more than its length says."""
        steps = self.promised_steps()
        if steps is not None and batches == steps + 1:
            several = (
                f" Each of {self.num_workers} workers ends its own stream, often with a batch that "
                "isn't whole; where the dataset doesn't share its samples out by "
                "torch.utils.data.get_worker_info(), each gives all of them."
            )
            warnings.warn(
                f"{type(self.dataset).__name__} has {steps} batches by its __len__, but more have "
                "come. A loop to the end gets them all, one that stops at the length (as trainers "
                f"do) doesn't.{several if self.num_workers > 1 else ''}",
                PenstockWarning,
                stacklevel=4,
            )

    def check_short(self, batches: int) -> None:
        """Refuse an iterable dataset that ends before its length: other ranks would wait."""
        steps = self.promised_steps()
        if steps is not None and batches < steps and self.world.size > 1:
            raise DatasetError(
                f"{type(self.dataset).__name__} ended after {batches} batches on rank "
                f"{self.world.rank}; its __len__ promises {steps}, and the other ranks would "
                "wait for ever for the rest. Make __len__ return what this rank really gives."
            )

    def warn_if_unsharded(self) -> None:
        """Warn where every rank of several would read the whole dataset."""
        kinds = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
        if self.world.size > 1 and self.options.agrees and type(self.sampler) in kinds:
            warnings.warn(
                f"Each of {self.world.size} ranks reads the whole dataset: there is neither "
                "seed= (Penstock shards then) nor a DistributedSampler (torch shards).",
                PenstockWarning,
                stacklevel=4,
            )
