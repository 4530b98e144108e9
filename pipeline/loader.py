"""Provide the DataLoader: torch's arguments and behaviour in front of two engines.

It subclasses torch's DataLoader because trainers check for that class. With a native dataset,
torch's constructor is never called, and none of its worker processes and pinning threads are
started. A torch dataset goes through torch's constructor, which checks its arguments, and through
torch's own workers.

- An object that can't be a dataset is an error when the loader is made.
- Samplers show the loader's order and forward set_epoch. The loader doesn't draw from them. They
  hold its engine weakly, so that a dropped loader stops its threads at once.
- Attributes that torch reads again when a pass begins may be set later, as programs and trainers do
  (Lightning's `seed_everything(workers=True)` sets worker_init_fn). All other arguments have no
  effect by then, and setting them is an error.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.data

from penstock.cache import ClosedError, ConfigError, explain_arguments
from penstock.cache.base import READ_MODE, ReadMode
from penstock.pipeline.feed import NativeEngine
from penstock.pipeline.options import (
    DEFAULT_ORDER,
    WORKER_ARGUMENTS,
    LateWorld,
    LoaderOptions,
    Order,
    ResidentMode,
    check_count,
    checked_augment,
    no_worker_processes,
    refuse_torch_arguments,
)
from penstock.pipeline.plan import World
from penstock.pipeline.torch_private import overwrite, show_as_stream, without_worker_context
from penstock.readers import Source, listed, weighted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import TypeVar

    from penstock.augment import Recipes
    from penstock.pipeline.options import DatasetKind, DeviceFunction
    from penstock.pipeline.report import Statistics
    from penstock.pipeline.torch_data import TorchEngine
    from penstock.readers import WeightsOfSamples

    T_co = TypeVar("T_co", covariant=True, default=Any)
    Engine = NativeEngine | TorchEngine
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


class PlanSampler(torch.utils.data.DistributedSampler[int]):
    """The sample ids of this rank in the loader's current epoch, in order.

    It is a DistributedSampler, so that trainers don't shard the samples again. It shows nothing
    once its loader is gone.
    """

    def __init__(self, engine: Engine, world: World) -> None:
        self._engine = weakref.ref(engine)
        self.place(world)
        self.shuffle, self.drop_last, self.seed = True, False, 0

    def place(self, world: World) -> None:
        """Set the rank and the number of ranks to show."""
        self.rank, self.num_replicas = world.rank, world.size

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """The loader's epoch."""
        engine = self._engine()
        return 0 if engine is None else engine.epoch

    @property
    def num_samples(self) -> int:  # type: ignore[override]  # an attribute of torch's
        """The number of this rank's samples in an epoch."""
        return len(self)

    def __iter__(self) -> Iterator[int]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[int]]:
        """Return this rank's sample ids in the current epoch, batch by batch."""
        engine = self._engine()
        return iter(()) if engine is None else engine.epoch_batches()

    def steps(self) -> int:
        """Return the number of batches in an epoch."""
        engine = self._engine()
        return 0 if engine is None else len(engine)

    def __len__(self) -> int:
        engine = self._engine()
        return 0 if engine is None else engine.epoch_samples()

    def set_epoch(self, epoch: int) -> None:
        """Forward to the loader, for trainers whose only epoch hook is `.sampler.set_epoch`."""
        engine = self._engine()
        if engine is not None:
            engine.set_epoch(epoch)


class PlanBatches(torch.utils.data.BatchSampler):
    """The sample ids of this rank in batches, for trainers that call `.batch_sampler.set_epoch`."""

    sampler: PlanSampler

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of the plan: torch would cut equal ones, but a rank's may differ by
        one."""
        return self.sampler.batches()

    def __len__(self) -> int:
        return self.sampler.steps()

    def set_epoch(self, epoch: int) -> None:
        """Forward to the loader."""
        self.sampler.set_epoch(epoch)


# Attributes that a native loader shows as they were passed.
_SHOWN_NATIVE = (
    *(set(WORKER_ARGUMENTS) - {"worker_init_fn", "multiprocessing_context"}),
    "generator",
)
# Attributes that may be set, and count from the next pass on.
_LIVE_NATIVE = ("num_workers", "prefetch_factor", "timeout", "pin_memory", "in_order")
_LIVE_TORCH = (*(set(WORKER_ARGUMENTS) - {"persistent_workers"}), "collate_fn", "generator")

_NEW_LOADER_REMEDY = (
    "Make another DataLoader, and load this one's state_dict() into it to continue from here"
)


def _is_unchanged(value: Any, current: Any) -> bool:
    """Return True if setting the value in place of the current one changes nothing."""
    plain = bool | int | float | str
    return value is current or (
        isinstance(value, plain) and type(value) is type(current) and value == current
    )


def _sampled(source: Source, options: LoaderOptions) -> Source:
    """Return a source whose epochs a sampler lists. Raises ConfigError."""
    if options.shuffle:
        raise ConfigError(
            "sampler= and shuffle=True contradict each other: the sampler gives the order. Drop "
            "one of them."
        )
    # Few loaders need it, and it belongs to torch's samplers.
    from penstock.pipeline.torch_data import sampler_lists

    return listed(source, sampler_lists(options.sampler, samples=source.contents.samples))


@explain_arguments(ConfigError)
class DataLoader(torch.utils.data.DataLoader[T_co]):
    """Batches of a dataset, as torch's DataLoader yields them, resumable exactly at any position.

    ```python
    from penstock import DataLoader, Dataset, imagenet_train

    train = Dataset("photos/train")
    with DataLoader(train, 32, shuffle=True, seed=7, augment=imagenet_train(224)) as loader:
        for images, labels in loader:  # float32 (32, 3, 224, 224), int64 (32,)
            state = loader.state_dict()  # load_state_dict continues after this batch
    ```

    Arguments up to in_order are torch's. snapshot_every_n_steps is torchdata's and changes nothing:
    states are exact at every step. The rest are Penstock's. docs/reference/datasets.md lists what
    works with native and with torch datasets.

    dataset: a `penstock.Dataset` (native: DALI decodes and augments it), a part of one (`subset`,
        `split`), several end to end (`concat`) or several in shares (`mix`); or any torch dataset,
        which torch's workers read.
    batch_size: samples of this rank's batch. The alternative is global_batch_size, over all ranks:
        a number, or a schedule such as {0: 8192, 50_000_000: 16384}, which gives the sample of the
        job from which each size holds.
    shuffle: draw the order from the seed; otherwise samples come in index order.
    sampler: native: an object with a length that lists positions in the dataset, such as torch's
        WeightedRandomSampler, or a list. It gives the order of all ranks together, which take
        slices of it (docs/reference/datasets.md).
    num_workers: native: decode threads of this rank; 0 is this rank's share of the usable cores.
        torch datasets: worker processes; 0 reads in this process.
    drop_last, pad: the end of an epoch. Several ranks need one of them. pad="mask" fills the last
        batch and appends a bool tensor `valid` of shape (n,) to every batch.
    timeout: seconds to wait for the bytes of a batch; 0 means 300 (torch datasets: no limit). Also
        the seconds to wait for other ranks when all must agree; there 0 means 600.
    prefetch_factor: native: batches decoded ahead; None is 2 if shuffled, else 1.
    seed: of order and draws. Native: None draws one from torch's generator, as torch does; several
        ranks need the same seed, so they must pass one. torch datasets: None leaves order and
        randomness to torch; with a seed, Penstock orders the samples and shares them out.
    augment: a list of operations, such as `imagenet_train(224)`, or a mapping with such a list for
        each field or tuple of fields (docs/howto/augment.md). None returns uint8 images unchanged,
        if all are of one size.
    device: "cpu", "cuda" or "cuda:1": native images are decoded there, and every tensor is on it.
    world: rank and size. None reads torch's process group, else the launcher's environment; it is
        read again at each pass until one has begun, because a trainer may start the group later.
    data_parallel: (rank, size) of this process's replica, if several processes share a model
        (tensor, pipeline, context parallel) and get the same batches; or use `World.from_mesh`.
    max_bad: the share of an epoch's samples that may be bad and are replaced by others before
        every rank stops; None is 0.001. With a map-style dataset, None makes each bad one an error.
    deterministic: bit-exact pixels on CUDA too; slower.
    order: `Order(lanes=, window=, reshuffle=, slots=)`: settings of the order that replace those
        chosen from the dataset and the batch (docs/explanation/order.md).
    resident: native: keep decoded images in memory, on the device; each is read, checked and
        decoded once per job. True, False, or "auto": if they are small
        (docs/reference/datasets.md).
    as_dict: native: batches are dicts by field instead of tuples.
    weights: native: how often each sample is expected in an epoch: an array with a number for each
        sample in the order of ids, the name of a field of numbers, "balanced" (each class equally
        often; the sum is the number of samples), or a file of scores (docs/howto/weights.md). An
        epoch has as many samples as their sum, rounded. A sample is delivered as often as its
        weight, rounded down or up, with other random draws each time. It needs shuffle=True.
    batch_tokens: native, instead of batch_size: the most tokens of this rank's batch, of samples of
        similar length (docs/reference/batches.md); {"tokens": 8192} names the field whose lengths
        count.
    bucket_by: native: "aspect" puts images of similar height / width into the same batches, so that
        they need little padding (docs/howto/detection.md).
    device_augment: native: a function (batch, generator) that gets each whole batch, a dict by
        field on its device, and a torch.Generator. What it returns is what the loop gets
        (docs/howto/augment.md).
    read: how a sample's bytes are read from its file: "copy", "pread" or "mmap"
        (docs/reference/stores.md).

    Yields, for a native dataset, tuples in the order of `dataset.fields`, or dicts with
    as_dict=True; docs/reference/batches.md describes the value of each type. For a torch dataset
    it yields what torch yields. A batch belongs to the user; no buffer is reused.

    Raises ConfigError, PlanError and RecipeError (all ValueErrors) for arguments that don't fit,
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
        weights: WeightsOfSamples | None = None,
        as_dict: bool = False,
        batch_tokens: int | Mapping[str, int] | None = None,
        bucket_by: Literal["aspect"] | None = None,
        data_parallel: tuple[int, int] | None = None,
        device_augment: DeviceFunction | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _OPTIONS}
        self.snapshot_every_n_steps = snapshot_every_n_steps
        kind = _kind_of(dataset)
        self._late_world = LateWorld(world, data_parallel=data_parallel, device=device)
        given["augment"] = checked_augment(augment)
        given["device"] = self._late_world.device
        # Without what follows from the world.
        self._options = LoaderOptions(kind=kind, **given).with_drawn_seed()
        self._engine: Engine
        if isinstance(dataset, Source):
            self._init_native(dataset, weights)
        elif weights is not None:
            raise ConfigError(
                "weights= works on native datasets (penstock.Dataset), but this is a torch "
                "dataset. Drop it, and pass sampler=torch.utils.data.WeightedRandomSampler(...) "
                "without seed=; or read the files with penstock.Dataset."
            )
        else:
            self._init_torch(dataset)
        if self._engine.shards_itself:
            # Accelerate returns such loaders unchanged. The loader that it would otherwise build
            # shards again, and samples would be lost.
            self._is_accelerate_prepared = True
            self.use_stateful_dataloader = True
        overwrite(self, "_is_made", True)

    def _init_native(self, dataset: Source, weights: WeightsOfSamples | None) -> None:
        options = self._late_world.resolve(self._options)
        for name in _SHOWN_NATIVE:
            setattr(self, name, getattr(options, name))
        without_worker_context(self)
        self.worker_init_fn = no_worker_processes
        source = dataset if weights is None else weighted(dataset, weights)
        if options.sampler is not None:
            source = _sampled(source, options)
        engine = NativeEngine(source, options, world_is_known=self._late_world.is_known)
        self._engine = engine
        self.dataset = dataset  # type: ignore[assignment]  # not one of torch's
        self.batch_size = engine.batch_size
        self.drop_last = options.drop_last
        self.collate_fn = None  # type: ignore[assignment]
        show_as_stream(self)
        self.sampler = PlanSampler(engine, options.world)
        self.batch_sampler = PlanBatches(self.sampler, engine.batch_size, self.drop_last)

    def _init_torch(self, dataset: Any) -> None:
        # Imported here and below, because a native loader doesn't need these modules.
        from penstock.pipeline.torch_data import TorchEngine, reject_rebuilt_loader

        options = self._late_world.resolve(self._options)
        arguments = options.torch_arguments()
        if options.is_planned:
            arguments.update(shuffle=None, sampler=(), batch_size=options.rank_batch)
        super().__init__(dataset, **arguments)
        # Lightning builds a loader again with its own sampler, and then repeats each setting of an
        # attribute that followed torch's __init__. It mustn't see these.
        made_with = replace(self._options, collate_fn=self.collate_fn)  # torch's, if none
        overwrite(self, "_options", made_with)
        if options.augment is not None:
            # A framework that rebuilds this loader would get images without augmentation.
            self.collate_fn = reject_rebuilt_loader
        indices = self.sampler if self.batch_sampler is None else self.batch_sampler
        engine = TorchEngine(dataset, self._late_world.resolve(made_with), indices=indices)
        overwrite(self, "_engine", engine)
        if options.is_planned:
            sampler = PlanSampler(engine, options.world)
            overwrite(self, "sampler", sampler)
            show_as_stream(self)
            if self.batch_size is not None:
                batches = PlanBatches(sampler, self.batch_size, self.drop_last)
                overwrite(self, "batch_sampler", batches)

    # -- attributes that may change once the loader is made

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; raises ConfigError for an argument that no later pass reads."""
        is_late = self._is_made and name in _ARGUMENTS
        if not is_late or _is_unchanged(value, getattr(self, name, self)):
            super().__setattr__(name, value)
            return
        options, shown = self._options_with(name, value), value
        if name == "collate_fn" and options.augment is not None:
            from penstock.pipeline.torch_data import reject_rebuilt_loader

            shown = reject_rebuilt_loader
        super().__setattr__(name, shown)
        overwrite(self, "_options", options)

    def _options_with(self, name: str, value: Any) -> LoaderOptions:
        """Return the options with an argument that is set late, from the next pass on.

        Raises ConfigError if no later pass reads it.
        """
        is_native = self._options.kind == "native"
        if is_native:
            refuse_torch_arguments({name: value})
        if name not in (_LIVE_NATIVE if is_native else _LIVE_TORCH):
            raise ConfigError(
                f"{name} should not be set once the loader is made: it would have no effect. "
                f"{_NEW_LOADER_REMEDY}."
            )
        options = replace(self._options, **{name: value})
        if not isinstance(self._engine, NativeEngine) and self._engine.keeps_workers:
            raise ConfigError(
                f"{name} should not be set while persistent workers are alive: they were started "
                "with the old value and keep it. Set it before the first pass, or drop "
                f"persistent_workers. {_NEW_LOADER_REMEDY}."
            )
        return options

    def _settle(self, *, begins: bool) -> None:
        """Search for this process's world again, and let the engine use it if it has changed.

        begins: a pass begins, so the world must be known, and attributes that were set take effect.
        Raises what `LateWorld.settle` raises, and ConfigError and PlanError for arguments that
        don't fit that world.
        """
        engine, late, options = self._engine, self._late_world, self._options
        # Otherwise torch distributes the samples, and Penstock only warns.
        given = (options.seed, options.augment)
        needs_world = engine.shards_itself or given != (None, None)
        has_begun, must_be_known = needs_world and engine.has_begun, needs_world and begins
        late.settle(has_begun=has_begun, must_be_known=must_be_known)
        if begins or engine.world != late.world:
            engine.take_over(self._late_world.resolve(self._options))
            self._show(engine.batch_size)

    def _show(self, batch_size: int | None) -> None:
        """Update the attributes that trainers read: the batch size, and this rank's place."""
        overwrite(self, "batch_size", batch_size)
        if isinstance(self.sampler, PlanSampler):
            self.sampler.place(self._late_world.world)
        if isinstance(self.batch_sampler, PlanBatches) and batch_size is not None:
            self.batch_sampler.batch_size = batch_size

    # -- iteration

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch on this rank; it is equal on all ranks.

        Before a trainer has started the process group, it is the number for a single rank.
        """
        self._settle(begins=False)
        return len(self._engine) if self._engine.shards_itself else super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the current epoch at its start, or at a restored position.

        Nothing is consumed before the first next(), because some trainers call iter() once more.
        The world, and attributes that were set, take effect here.
        """
        self._settle(begins=True)
        return self._engine.begin()

    # -- epochs and state

    @property
    def epoch(self) -> int:
        """The epoch of the next batch; it changes with the last batch of an epoch."""
        return self._engine.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; raises ConfigError for a negative one.

        Setting the current epoch changes nothing, so that a restored position stays.
        """
        self._engine.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, as JSON types, under 10 kB.

        With a native dataset or a seed, it is the same on every rank. It contains the states of a
        torch dataset and sampler as their own `state_dict` returns them.
        """
        if not self._engine.has_begun:
            self._settle(begins=False)
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the last batch that the saved loader delivered.

        With a native dataset the state's plan is used (seed, lanes, window), and the world and the
        batch size may differ. Raises ResumeError for a state of another dataset, seed, plan or
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

        It is in the state, and it is the same for any worlds and batch sizes with which the job was
        resumed. Native datasets only. Raises PlanError while the world isn't known.
        """
        return self._steps_of_plan("step").step

    def samples_of(self, step: int, *, rank: int | None = None) -> NDArray[np.int64]:
        """Return the ids of the samples in a global batch, past or future: int64, shape (n,).

        rank: only those of one rank of this world; None: those of all, in the order in which the
        ranks take slices of them. The array belongs to the caller. The cost is the same for any
        step, and nothing is read (`dataset.names` returns the files). Samples that were found bad
        are included as planned. Native datasets only. Raises ConfigError and PlanError for a step
        or a rank that doesn't exist.
        """
        return self._steps_of_plan("samples_of").samples_of(step, rank=rank)

    def skip(self, steps: int) -> None:
        """Skip a number of global batches on every rank, for example to avoid a loss that explodes.

        A running iterator continues there if that is in its epoch; otherwise it ends, and the next
        one begins there. Skipped batches count as delivered. Native datasets only. Raises
        ConfigError for a negative number.
        """
        self._steps_of_plan("skip").skip(steps)

    def set_weights(self, weights: Any, *, step: int | None = None) -> None:
        """Change the weights of a mixture's parts during the job, for example by their losses.

        All ranks call it with the same arguments, and wait for one another. What was prepared is
        discarded, cached bytes stay, and a running iterator continues. The state records the
        change, which replaces the rest of a schedule. The length of an epoch doesn't change.

        weights: as for `mix`, numbers by name or "size". step: the number of the first global batch
        with these weights, which must not have been delivered yet; None: the next one. With
        `batch_tokens` they hold from the next range of the stream whose samples are sorted by
        length, about 64 global batches. Raises ConfigError for datasets that aren't mixtures and
        for invalid weights; PlanError for a step that was delivered, and on each rank if ranks
        call it with different arguments; StalledError, which names the ranks that don't call it.
        """
        self._steps_of_plan("set_weights").set_weights(weights, step=step)

    def set_sample_weights(self, weights: WeightsOfSamples) -> None:
        """Change how often each sample is expected from the next epoch on, for example by its loss.

        All ranks call it with the same arguments. The weights are scaled: an epoch keeps its
        length. Before the first batch of an epoch, they hold from that epoch on; later, what was
        prepared is discarded, cached bytes stay, and a running iterator continues. The state
        records a hash of the array; before load_state_dict(), the same array must be passed to this
        method, or as weights=.

        weights: as for the argument of the loader. Raises ConfigError for mixtures and for invalid
        weights; PlanError if shuffle=False, and on each rank if ranks call it with different
        arguments. Native datasets only.
        """
        self._steps_of_plan("set_sample_weights").set_sample_weights(weights)

    def rejoin(self, world: World, *, step: int, store: Any = None) -> None:
        """Continue at a global batch of the job as a rank of another world, without a restart.

        All ranks of the new world call it with the same step, the number of the next global batch:
        one that was delivered but never committed, or a later one. Global batches stay the job's,
        even if `batch_size` was passed, so a rank may get more or fewer samples of each. A running
        iterator continues there if the step is in its epoch; otherwise it ends, and the next one
        begins there. The cost is the same for any step.

        world: rank and size, from World.detect() or from the program that manages the ranks. store:
        any of torch's stores that all of the new ranks reach and that only they use (a PrefixStore
        of the quorum). Through it they compare what they read, and agree on what their caches hold.
        None: compare with the earlier ranks, if their store still answers, and keep the lane order;
        a process that is new must then have loaded another rank's state_dict(). A new process makes
        its loader, loads such a state and calls this.

        Native datasets only. Raises ConfigError and PlanError for an impossible world or step, for
        a global batch smaller than the world, and if ranks differ; StalledError or
        RankFailedError, which name the ranks that don't come to the store. The loader is then
        unchanged.
        """
        if not isinstance(world, World):
            raise ConfigError(f"rejoin: got {world!r}, wanted World(rank, size).")
        step = check_count("step", step, least=0)
        if store is not None and not hasattr(store, "compare_set"):
            raise ConfigError(
                f"rejoin: got store={store!r}, wanted one of torch.distributed's stores, such as "
                "PrefixStore(quorum, store), or None."
            )
        engine = self._native_engine("rejoin")
        from penstock.cache import JobStore

        late = self._late_world.rejoined(world)
        options = replace(
            self._options, batch_size=1, global_batch_size=None, seed=engine.options.plan_seed
        )
        job_store = None if store is None else JobStore.of(store)
        engine.rejoin(late.resolve(options), step=step, store=job_store)
        self._late_world, self._options = late, options
        self._show(engine.batch_size)

    def _steps_of_plan(self, name: str) -> NativeEngine:
        """Return the engine that numbers steps, for the current world."""
        engine = self._native_engine(name)
        if not engine.has_begun:
            self._settle(begins=False)
        return engine

    def _native_engine(self, name: str) -> NativeEngine:
        engine = self._engine
        if not isinstance(engine, NativeEngine):
            raise ConfigError(
                f"loader.{name} works on native datasets (penstock.Dataset), but this is a torch "
                "dataset, whose state keeps no history of its batches. Count the steps in your "
                "loop, or read the files with penstock.Dataset."
            )
        return engine

    def statistics(self) -> Statistics:
        """Return what was measured so far, and the one-line verdict."""
        return self._engine.statistics()

    # -- life

    def close(self) -> None:
        """Stop threads and workers, drop prefetched batches and release DALI. Safe to call
        twice."""
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
        """Rank and size of this loader's batches."""
        return self._late_world.world

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._late_world.device


def _kind_of(dataset: Any) -> DatasetKind:
    """Return the kind of a dataset. Raises ConfigError if it isn't one."""
    if isinstance(dataset, Source):
        return "native"
    from penstock.pipeline.torch_data import check_dataset

    check_dataset(dataset)
    return "stream" if isinstance(dataset, torch.utils.data.IterableDataset) else "map"


_ARGUMENTS = frozenset(inspect.signature(DataLoader.__init__).parameters) - {
    "self",
    "snapshot_every_n_steps",  # changes nothing
}
_OPTIONS = _ARGUMENTS - {"dataset", "world", "data_parallel", "weights"}
