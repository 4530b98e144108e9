"""Provide the DataLoader, which puts torch's names and meanings in front of two engines.

It is a subclass of torch's because trainers ask for one. For a native dataset torch's constructor
is never called and nothing of its machinery (worker processes, pin threads) is started; a torch
dataset goes through torch's constructor, which checks its arguments as users know it, and through
torch's own workers.

Beside the class stand what trainers expect of it and what it refuses: - An object that can't be a
dataset is refused when the loader is made. - Samplers show the loader's order and forward
set_epoch. The loader itself doesn't draw from them; they hold its engine weakly, so that a
dropped loader stops its threads at once. - Attributes that torch reads again when a pass begins
may be set later, as programs and trainers do (Lightning's `seed_everything(workers=True)` sets
worker_init_fn). Every other argument of the constructor has done its work by then, and setting it
is an error. - `JobSteps` has the methods that count global batches from the job's start.
"""

from __future__ import annotations

import inspect
import os
import weakref
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.data

from penstock.cache import ClosedError, ConfigError, DatasetError, JobStore
from penstock.cache.base import READ_MODE, ReadMode
from penstock.pipeline.feed import NativeEngine
from penstock.pipeline.loader_arguments import LoaderArguments
from penstock.pipeline.options import (
    DEFAULT_ORDER,
    Order,
    PenstockOptions,
    ResidentMode,
    TorchOptions,
    WorkerOptions,
    check_count,
    check_counts,
    check_timeout,
    checked_augment,
    no_worker_processes,
    planned_batch_size,
    refuse_torch_arguments,
    refuse_with_seed,
)
from penstock.pipeline.plan import World
from penstock.pipeline.torch_private import overwrite, show_as_stream, without_worker_context
from penstock.readers import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import TypeVar

    from penstock.augment import Recipes
    from penstock.pipeline.options import TorchDataOptions
    from penstock.pipeline.report import Statistics
    from penstock.pipeline.torch_data import TorchEngine

    T_co = TypeVar("T_co", covariant=True, default=Any)
    Engine = NativeEngine | TorchEngine
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

_CHECKED_ELEMENTS = 64  # elements of a list
_WRAPPERS_OF_SEVERAL = (
    torch.utils.data.ConcatDataset,
    torch.utils.data.ChainDataset,
    torch.utils.data.StackDataset,
)
_PART_REMEDY = (
    "take dataset.subset(ids), or dataset.split(0.9, 0.1, seed=0), and give that to the DataLoader"
)
_SEVERAL_REMEDY = (
    "give penstock.concat([a, b]) to one DataLoader to read them end to end, or make a DataLoader "
    "for each"
)


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError for what isn't a dataset, DatasetError for a native one inside another.

    A torch dataset passes, and whatever has samples by index, as with torch.
    """
    if isinstance(dataset, str | bytes | os.PathLike):
        shown = os.fsdecode(dataset)
        raise ConfigError(
            f"dataset: got the path {shown!r}, wanted a dataset. Pass "
            f"DataLoader(Dataset({shown!r}), ...), with penstock's Dataset."
        )
    if isinstance(dataset, type):
        raise ConfigError(
            f"dataset: got the class {dataset.__name__}, wanted an instance of it. Pass "
            f"{dataset.__name__}(...)."
        )
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise ConfigError(
            f"dataset: got a {type(dataset).__name__}, wanted the dataset that it reads. Pass its "
            ".dataset."
        )
    _refuse_wrapped(dataset)
    is_known = isinstance(dataset, torch.utils.data.Dataset)
    if not is_known and not any(hasattr(dataset, n) for n in ("__getitem__", "__getitems__")):
        remedy = (
            "One that is only iterated must be a torch.utils.data.IterableDataset: wrap it in one "
            "whose __iter__ gives its samples"
            if hasattr(dataset, "__iter__")
            else "Pass a penstock.Dataset, a torch dataset, or an object with __getitem__ and "
            "__len__"
        )
        raise ConfigError(
            f"dataset: got an object of type {type(dataset).__name__}, wanted a dataset. {remedy}."
        )


def _refuse_wrapped(dataset: Any) -> None:
    inside = _inner_datasets(dataset)
    if not any(_is_native(part) for part in inside):
        return
    name = type(dataset).__name__
    remedy = _PART_REMEDY if isinstance(dataset, torch.utils.data.Subset) else _SEVERAL_REMEDY
    raise DatasetError(
        f"{name} holds a native dataset (penstock.Dataset), which is read whole and by shards, "
        f"never by index, so torch's wrappers and lists can't hold one. Instead {remedy}."
    )


def _inner_datasets(dataset: Any) -> list[Any]:
    if isinstance(dataset, torch.utils.data.Subset):
        return [dataset.dataset]
    if isinstance(dataset, _WRAPPERS_OF_SEVERAL):
        inside: Any = dataset.datasets
        return list(inside.values() if isinstance(inside, dict) else inside)
    if type(dataset) in (list, tuple):
        return list(dataset[:_CHECKED_ELEMENTS])
    if type(dataset) is dict:
        return list(dataset.values())[:_CHECKED_ELEMENTS]
    return []


def _is_native(part: Any) -> bool:
    return isinstance(part, Source) or any(_is_native(inner) for inner in _inner_datasets(part))


class PlanSampler(torch.utils.data.DistributedSampler[int]):
    """Sample ids of this rank in the loader's current epoch, in order.

    A DistributedSampler, because it is one: trainers that shard what isn't sharded yet look for
    that.
    """

    def __init__(self, engine: Engine | None, world: World) -> None:
        """The engine may come later, by `follow`."""
        self._engine = None if engine is None else weakref.ref(engine)
        self.place(world)
        self.shuffle, self.drop_last, self.seed = True, False, 0

    def place(self, world: World) -> None:
        """Show the place of this rank from now on."""
        self.rank, self.num_replicas = world.rank, world.size

    def follow(self, engine: Engine) -> None:
        """Show this engine's order from now on."""
        self._engine = weakref.ref(engine)

    def _order(self) -> Engine | None:
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


# torch's arguments about workers and pinning, which its own loader inside is made with.
WORKER_OPTIONS = tuple(field.name for field in fields(WorkerOptions))
# Those of torch's arguments that torch honours in a loader's attributes.
LIVE_OPTIONS = (*WORKER_OPTIONS, "generator")
# Shown by a native loader as they were given.
SHOWN_ARGUMENTS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
# Read again when a pass begins.
_LIVE_NATIVE = ("num_workers", "prefetch_factor", "timeout", "pin_memory", "in_order")
_LIVE_TORCH = (*(set(WORKER_OPTIONS) - {"persistent_workers"}), "collate_fn", "generator")

_NEW_LOADER_REMEDY = (
    "Make another DataLoader, and hand it this one's state_dict() to go on from here"
)


def is_unchanged(value: Any, there: Any) -> bool:
    """Whether setting a value in place of the one there would change nothing."""
    plain = bool | int | float | str
    return value is there or (
        isinstance(value, plain) and type(value) is type(there) and value == there
    )


def check_native_attribute(name: str, value: Any) -> None:
    """Raise ConfigError unless a native loader honours the value from its next pass on."""
    refuse_torch_arguments({name: value})
    if name not in _LIVE_NATIVE:
        raise fixed_argument_error(name)
    if name in ("num_workers", "prefetch_factor"):
        check_counts(**{name: value})
    elif name == "timeout":
        check_timeout(value)


def check_torch_attribute(name: str, value: Any, *, is_ordered: bool, keeps_workers: bool) -> None:
    """Raise ConfigError unless a loader over a torch dataset honours the value from now on.

    is_ordered: by a seed. keeps_workers: persistent workers are alive, which were started with what
    stood there then.
    """
    if name not in _LIVE_TORCH:
        raise fixed_argument_error(name)
    if name == "generator" and is_ordered:
        refuse_with_seed({name: value})
    if keeps_workers:
        raise ConfigError(
            f"{name} should not be set while persistent workers are alive: they were started with "
            "the old value and keep it. Set it before the first pass, or drop persistent_workers. "
            f"{_NEW_LOADER_REMEDY}."
        )


def fixed_argument_error(name: str) -> ConfigError:
    """The error for an argument that can't change."""
    return ConfigError(
        f"{name} should not be set once the loader is made: it would change nothing. "
        f"{_NEW_LOADER_REMEDY}."
    )


class DataLoader(torch.utils.data.DataLoader[T_co]):
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
            own.check_torch_dataset()
            self._init_torch(dataset)
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
        for name in SHOWN_ARGUMENTS:
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

    def _init_torch(self, dataset: Any) -> None:
        # Here and below: a native loader starts without these modules.
        from penstock.pipeline.torch_data import TorchEngine, needs_our_loader

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
        engine = TorchEngine(dataset, self._torch_data_options())
        self._engine = engine
        if sampler is not None:
            sampler.follow(engine)
            show_as_stream(self)
            if self.batch_size is not None:
                batches = PlanBatches(sampler, self.batch_size, self.drop_last)
                overwrite(self, "batch_sampler", batches)

    def _torch_data_options(self) -> TorchDataOptions:
        from penstock.pipeline.torch_data import shards_by_rank

        indices = self.sampler if self.batch_sampler is None else self.batch_sampler
        live = {name: getattr(self, name) for name in LIVE_OPTIONS}
        return self._arguments.torch_data(
            {**live, "collate_fn": self._collate},
            indices=indices,
            batch_size=self.batch_size,
            is_batched=self.batch_sampler is not None,
            is_planned=self._is_planned,
            is_sharded=shards_by_rank(indices),
        )

    # -- what may change once the loader is made

    def __setattr__(self, name: str, value: Any) -> None:
        """As with torch: what a pass reads may be set before it; the rest raises ConfigError."""
        is_late = self._is_made and name in _ARGUMENTS
        if is_late and not is_unchanged(value, getattr(self, name, self)):
            engine = self._engine
            if isinstance(engine, NativeEngine):
                check_native_attribute(name, value)
            else:
                check_torch_attribute(
                    name, value, is_ordered=self._is_planned, keeps_workers=engine.keeps_workers
                )
                if name == "collate_fn":
                    from penstock.pipeline.torch_data import needs_our_loader

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
            live = {name: getattr(self, name) for name in SHOWN_ARGUMENTS}
            engine.take_over(arguments.native(live))
        else:
            engine.take_over(self._torch_data_options())
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

    # -- steps of the job

    @property
    def step(self) -> int:
        """The number of the next global batch, counted from the job's start over all epochs.

        It is in the state, and the same whatever worlds and batches the job was resumed with.
        Native datasets only. Raises PlanError while the world isn't known.
        """
        return self._steps_of_plan("step").step

    def samples_of(self, step: int, *, rank: int | None = None) -> NDArray[np.int64]:
        """Ids of the samples in the global batch of that number, past or future.

        rank: those of one rank of this world; None: of all, in the order in which the ranks take
        slices of them. int64, shape (n,), the caller's own. It costs the same for any step, and no
        reading (`dataset.names` tells the files). Samples that were found bad stand in it as
        planned. Native datasets only. Raises ConfigError, PlanError for what isn't there.
        """
        return self._steps_of_plan("samples_of").samples_of(step, rank=rank)

    def skip(self, steps: int) -> None:
        """Go on so many global batches later, on every rank alike: past a loss that explodes.

        An iterator that runs goes on there if that is in its epoch, else it ends, and the next one
        begins there. What was skipped counts as handed out. Native datasets only. Raises
        ConfigError for a negative number.
        """
        self._steps_of_plan("skip").skip(steps)

    def rejoin(self, world: World, *, step: int, store: Any = None) -> None:
        """Go on at a global batch of the job as a rank of another world, without a restart.

        All ranks of the new world call it with the same step, the number of the next global batch:
        one that was handed out but never committed, or one ahead. Global batches stay the job's,
        also where `batch_size` was given, so a rank may get more or fewer samples of each. An
        iterator that runs goes on there if the step is in its epoch, else it ends, and the next one
        begins there. It costs the same for any step.

        world: rank and size, from World.detect() or from whatever manages the ranks.
        store: any of torch's stores that all of the new ranks reach, of these ranks alone (a
        PrefixStore of the quorum): through it they compare what they read, and agree on what their
        caches hold. None: the ranks before are compared with if their store still answers, and who
        reads what stays; so a process that is new must have loaded another one's state_dict().
        A process that is new makes its loader, loads such a state and calls this.

        Native datasets only. Raises ConfigError and PlanError for a world or a step that can't be,
        for a global batch below the world, and where ranks differ; StalledError naming the ranks
        that don't come to the store. The loader is then unchanged.
        """
        if not isinstance(world, World):
            raise ConfigError(f"rejoin: got {world!r}, wanted World(rank, size).")
        step = check_count("step", step, least=0)
        if store is not None and not hasattr(store, "compare_set"):
            raise ConfigError(
                f"rejoin: got store={store!r}, wanted one of torch.distributed's stores, such as "
                "PrefixStore(quorum, store), or None."
            )
        engine = self._numbered("rejoin")
        arguments = self._arguments.rejoined(world, seed=engine.options.seed)
        live = {name: getattr(self, name) for name in SHOWN_ARGUMENTS}
        job_store = None if store is None else JobStore.of(store)
        engine.rejoin(arguments.native(live), step=step, store=job_store)
        self._arguments = arguments
        self._show(engine.batch_size)

    def _steps_of_plan(self, name: str) -> NativeEngine:
        """The engine that numbers steps, for the world as it is now."""
        engine = self._numbered(name)
        if not engine.has_begun:
            self._settle(begins=False)
        return engine

    def _numbered(self, name: str) -> NativeEngine:
        engine = self._engine
        if not isinstance(engine, NativeEngine):
            raise ConfigError(
                f"loader.{name} works on native datasets (penstock.Dataset), and this is a torch "
                "dataset, whose state keeps no history of its batches. Count its steps in your "
                "loop, or point penstock.Dataset at the files."
            )
        return engine

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


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {
    "self",
    "snapshot_every_n_steps",  # whatever it is
}
