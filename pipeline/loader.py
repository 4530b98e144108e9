"""The DataLoader: torch's names and meanings in front of two engines.

It is a subclass of torch's because trainers ask for one. For a native dataset torch's constructor
is never called and nothing of its machinery (worker processes, pin threads) is started; a torch
dataset goes through torch's constructor, which checks its arguments as users know it, and through
torch's own workers.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.data

from penstock.cache.base.blob import READ_MODE, ReadMode
from penstock.cache.errors import ClosedError
from penstock.pipeline.facade import late_attributes
from penstock.pipeline.facade.arguments import LoaderArguments
from penstock.pipeline.facade.dataset_check import check_dataset
from penstock.pipeline.facade.job_steps import JobSteps
from penstock.pipeline.facade.samplers import PlanBatches, PlanSampler
from penstock.pipeline.feed.native import NativeEngine
from penstock.pipeline.options.checks import checked_augment
from penstock.pipeline.options.foreign_options import planned_batch_size
from penstock.pipeline.options.order_options import DEFAULT_ORDER, Order
from penstock.pipeline.options.penstock_options import (
    PenstockOptions,
    ResidentMode,
)
from penstock.pipeline.options.refusals import no_worker_processes
from penstock.pipeline.options.torch_options import TorchOptions
from penstock.pipeline.torch_private import overwrite, show_as_stream, without_worker_context
from penstock.readers.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import TypeVar

    from penstock.augment.field_recipes import Recipes
    from penstock.pipeline.foreign.engine import ForeignEngine
    from penstock.pipeline.foreign.ranks import Ranks
    from penstock.pipeline.foreign.setup import PassSetup
    from penstock.pipeline.options.foreign_options import ForeignOptions
    from penstock.pipeline.plan.world import World
    from penstock.pipeline.report.meter import Meter
    from penstock.pipeline.report.statistics import Statistics

    T_co = TypeVar("T_co", covariant=True, default=Any)
    Engine = NativeEngine | ForeignEngine
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


class DataLoader(JobSteps, torch.utils.data.DataLoader[T_co]):
    """Batches of a dataset, in torch's shape, resumable exactly.

    Arguments up to in_order are torch's; snapshot_every_n_steps is torchdata's and changes nothing
    (states are exact at every step); the rest are Penstock's. docs/datasets.md says how each
    behaves with native and with torch datasets.

    dataset: a `penstock.Dataset` (native: decoded and augmented by DALI), a part of one (`subset`,
        `split`) or several end to end (`concat`); or any torch dataset, which torch's workers read.
    batch_size: samples of this rank's batch; global_batch_size is the alternative, over all ranks:
        a number, or {0: 8192, 50_000_000: 16384}, sizes by the job's sample from which they hold.
    shuffle: draw the order from the seed; otherwise samples come in index order.
    num_workers: native: decode threads of this rank, 0 is this rank's share of the usable cores.
        torch datasets: worker processes, 0 reads in this one.
    drop_last, pad: the end of an epoch. One of them is needed on several ranks; pad="mask" fills
        the last batch up and appends a bool tensor `valid` of shape (n,) to every batch.
    timeout: seconds to wait for the bytes of a batch; 0 stands for 300 (torch datasets: for ever).
        Also for ranks that are late where all must agree; 0 stands for 600 there.
    prefetch_factor: native: batches decoded ahead, None is 2 when shuffling, else 1.
    seed: of order and draws. Native: None takes one from torch's generator, as torch does; several
        ranks need the same, so there it must be given. torch datasets: None leaves order and
        randomness to torch; a seed gives Penstock's order, shared out over the ranks.
    augment: operations, such as `imagenet_train(224)`, or such a list by field or tuple of fields
        (docs/augment.md). None gives uint8 images as they are, if all are of one size.
    device: "cpu", "cuda" or "cuda:1": native images are decoded there; every tensor lies there.
    world: rank and size; None reads torch's process group, else the launcher's environment, again
        with each pass until one has begun: a trainer may start the group later.
    data_parallel: (rank, size) of this process's replica, where several processes share a model
        (tensor, pipeline, context parallel) and get the same batches; or `World.from_mesh`.
    max_bad: share of the samples that may be bad in an epoch, replaced by others, before every rank
        stops; None: 0.001. A map-style dataset with seed=: None makes each an error.
    deterministic: bit-exact pixels on CUDA too, for speed.
    order: `Order(lanes=, window=, reshuffle=, slots=)`: settings of the order, where what follows
        from the dataset and the batch doesn't fit (docs/order.md).
    resident: native: keep decoded images in memory, on the device; each is read, checked and
        decoded once a job. True, False, or "auto": if they are small (docs/datasets.md).
    as_dict: native: batches are dicts by field, not tuples.
    batch_tokens: native, in batch_size's place: tokens of this rank's batch at most, of samples of
        about one length (docs/batches.md); {"tokens": 8192} says whose lengths count.
    read: how a sample's bytes come from its file: "copy", "pread" or "mmap" (docs/cache.md).

    Yields, for a native dataset, tuples in the order of `dataset.fields`, or with as_dict=True
    dicts; docs/batches.md says of each type what comes. For a torch dataset what torch yields. A
    batch is the user's; no buffer is reused.

    Raises: ConfigError, PlanError and RecipeError (all ValueErrors) for arguments that don't fit,
    before any work starts; torch's own errors for torch's arguments with a torch dataset;
    DatasetError for a dataset that can't be read.
    """

    sampler: Any
    _iterator: Any
    _is_made = False

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[..., Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int = 1,
        seed: int | None = None,
        augment: Recipes | None = None,
        device: str | torch.device | int = "cpu",
        world: World | None = None,
        global_batch_size: int | Mapping[int, int] | None = None,
        pad: Literal["mask"] | None = None,
        max_bad: float | None = None,
        deterministic: bool = False,
        order: Order = DEFAULT_ORDER,
        read: ReadMode = READ_MODE,
        resident: ResidentMode = False,
        as_dict: bool = False,
        batch_tokens: int | Mapping[str, int] | None = None,
        data_parallel: tuple[int, int] | None = None,
    ) -> None:
        self.snapshot_every_n_steps = snapshot_every_n_steps
        torch_options = TorchOptions(
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        own = PenstockOptions(
            seed=seed,
            augment=checked_augment(augment),
            device=device,
            global_batch_size=global_batch_size,
            pad=pad,
            max_bad=max_bad,
            deterministic=deterministic,
            order=order,
            read=read,
            resident=resident,
            as_dict=as_dict,
            batch_tokens=batch_tokens,
        )
        self._arguments = LoaderArguments(
            torch_options, own, world=world, data_parallel=data_parallel
        )
        self._engine: Engine
        if isinstance(dataset, Source):
            self._init_native(dataset)
        else:
            check_dataset(dataset)
            own.check_foreign()
            self._init_foreign(dataset)
        if self._engine.shards_itself:
            # Accelerate hands such loaders back as they are; what it would build in their place
            # shards again, and half of the samples would be lost.
            self._is_accelerate_prepared = True
            self.use_stateful_dataloader = True
        self._is_made = True

    def _init_native(self, dataset: Source) -> None:
        arguments = self._arguments
        options = arguments.torch_options
        options.check_native()
        arguments.choose_seed(options.generator, draws=bool(options.shuffle))
        for name in late_attributes.AS_GIVEN:
            setattr(self, name, getattr(options, name))
        without_worker_context(self)
        self.worker_init_fn = no_worker_processes
        engine = NativeEngine(
            dataset, arguments.native({}), world_is_known=arguments.world_is_known
        )
        self._engine = engine
        self.dataset = dataset  # type: ignore[assignment]  # not one of torch's: no samples by index
        self.batch_size = engine.batch_size
        self.drop_last = bool(options.drop_last)
        self.collate_fn = None  # type: ignore[assignment]
        show_as_stream(self)
        self.sampler = PlanSampler(engine, arguments.world)
        self.batch_sampler = PlanBatches(self.sampler, engine.batch_size, self.drop_last)

    def _init_foreign(self, dataset: Any) -> None:
        # Here and below: a native loader starts without these modules.
        from penstock.pipeline.foreign.engine import ForeignEngine
        from penstock.pipeline.foreign.image_split import needs_our_loader

        arguments = self._arguments
        options, own, world = arguments.torch_options, arguments.own, arguments.world
        is_map = not isinstance(dataset, torch.utils.data.IterableDataset)
        sampler: PlanSampler | None = None
        self._is_planned = is_map and own.seed is not None
        if self._is_planned:
            options.check_planned()
            sampler = PlanSampler(None, world)
            size = planned_batch_size(options, own, world)
            options = replace(options, shuffle=None, sampler=sampler, batch_size=size)
        else:
            own.check_unplanned(is_map=is_map)
        super().__init__(dataset, **options.arguments())
        self._collate: Any = self.collate_fn
        arguments.choose_seed(self.generator, draws=own.augment is not None)
        if own.augment is not None:
            # Whoever rebuilds this loader would get images without augmentation.
            self.collate_fn = needs_our_loader
        engine = ForeignEngine(dataset, self._foreign_options(), join_ranks=_join_ranks)
        self._engine = engine
        if sampler is not None:
            sampler.follow(engine)
            show_as_stream(self)
            if self.batch_size is not None:
                batches = PlanBatches(sampler, self.batch_size, self.drop_last)
                overwrite(self, "batch_sampler", batches)

    def _foreign_options(self) -> ForeignOptions:
        from penstock.pipeline.foreign.occurrences import shards

        indices = self.sampler if self.batch_sampler is None else self.batch_sampler
        live = {name: getattr(self, name) for name in late_attributes.LIVE_OPTIONS}
        return self._arguments.foreign(
            {**live, "collate_fn": self._collate},
            indices=indices,
            batch_size=self.batch_size,
            is_batched=self.batch_sampler is not None,
            is_planned=self._is_planned,
            is_sharded=shards(indices),
        )

    # -- what may change once the loader is made

    def __setattr__(self, name: str, value: Any) -> None:
        """As with torch: what a pass reads may be set before it; the rest raises ConfigError."""
        is_late = self._is_made and name in _ARGUMENTS
        if is_late and not late_attributes.is_same(value, getattr(self, name, self)):
            engine = self._engine
            if isinstance(engine, NativeEngine):
                late_attributes.check_native(name, value)
            else:
                late_attributes.check_torch(
                    name,
                    value,
                    is_ordered=self._is_planned,
                    keeps_workers=engine.keeps_workers,
                )
                if name == "collate_fn":
                    from penstock.pipeline.foreign.image_split import needs_our_loader

                    self._collate = value
                    value = value if self._arguments.own.augment is None else needs_our_loader
        super().__setattr__(name, value)

    def _settle(self, *, begins: bool) -> None:
        """Look where this process stands, and work for another world than before if it is one.

        begins: a pass does, so that the world must be known, and attributes that were set count.
        Raises PlanError as `LateWorld.settle`; ConfigError and PlanError for arguments that don't
        fit that world.
        """
        engine, arguments = self._engine, self._arguments
        arguments.settle(
            is_shared=engine.shards_itself, has_begun=engine.has_begun, must_be_known=begins
        )
        if not begins and engine.world == arguments.world:
            return
        if isinstance(engine, NativeEngine):
            live = {name: getattr(self, name) for name in late_attributes.AS_GIVEN}
            engine.take_over(arguments.native(live))
        else:
            engine.take_over(self._foreign_options())
        self._show(engine.batch_size)

    def _show(self, batch_size: int | None) -> None:
        """Where others look for them: the batch size, and this rank's place."""
        overwrite(self, "batch_size", batch_size)
        if isinstance(self.sampler, PlanSampler):
            self.sampler.place(self._arguments.world)
        if isinstance(self.batch_sampler, PlanBatches) and batch_size is not None:
            self.batch_sampler.batch_size = batch_size

    # -- iteration

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank; equal on all ranks.

        Before a trainer has started the process group that is for one rank; it is asked again.
        """
        self._settle(begins=False)
        return len(self._engine) if self._engine.shards_itself else super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the current epoch at its start, or at a restored position.

        Nothing is consumed before the first next(): some trainers call iter() once more to look.
        The world, and attributes that were set, count from here on.
        """
        self._settle(begins=True)
        return self._engine.begin()

    # -- epochs and state

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; it moves on with the last batch of an epoch."""
        return self._engine.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The current epoch again changes nothing, so that a restored
        position stays. Raises ConfigError for a negative epoch."""
        self._engine.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """What was handed out, as JSON types, under 10 kB; with a native dataset or a seed the same
        on every rank. What a torch dataset or sampler of the user's gives as its own state is kept
        in it as it is."""
        if not self._engine.has_begun:
            self._settle(begins=False)
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that the saved loader handed out.

        With a native dataset the state's plan is taken over (seed, lanes, window); the world and
        the batch size may differ. Raises ResumeError for a state of another dataset, seed, plan or
        version; the loader is then unchanged.
        """
        if not self._engine.has_begun:
            self._settle(begins=False)
        self._engine.load_state_dict(state)
        if isinstance(self._engine, NativeEngine):
            self._show(self._engine.batch_size)

    def statistics(self) -> Statistics:
        """What was measured so far, and the one-line verdict."""
        return self._engine.statistics()

    # -- life

    def close(self) -> None:
        """Stop threads and workers, drop what is in flight, release DALI. Safe to call twice."""
        self._engine.close()

    def __enter__(self) -> DataLoader:
        if self._engine.closed:
            raise ClosedError("This loader is closed; make a new one.")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._engine)

    @property
    def world(self) -> World:
        """Rank and size that the batches are for."""
        return self._arguments.world

    @property
    def device(self) -> torch.device:
        """The device on which the tensors lie."""
        return self._arguments.device


def _join_ranks(setup: PassSetup, meter: Meter) -> Ranks | None:
    if setup.world.processes == 1:
        return None
    from penstock.pipeline.facade.job_ranks import joined  # a process alone needs none of it

    return joined(setup, meter)


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {
    "self",
    "snapshot_every_n_steps",  # whatever it is
}
