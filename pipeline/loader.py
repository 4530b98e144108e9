"""The DataLoader: torch's names and meanings in front of two engines.

It is a subclass of torch's because trainers ask for one. For a native dataset torch's constructor
is never called and nothing of its machinery (worker processes, pin threads) is started; a torch
dataset goes through torch's constructor, which checks its arguments as users know it, and through
torch's own workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.utils.data
from torch.utils.data.dataloader import _DatasetKind

from cache.errors import ClosedError, ConfigError, PlanError
from pipeline import arguments
from pipeline.build import Settings
from pipeline.foreign import ForeignEngine, ForeignSettings
from pipeline.foreign_order import TorchOrder, plan_order
from pipeline.native import NativeEngine
from pipeline.pictures import Darkroom, Split, needs_our_loader
from pipeline.sampler import PlanBatches, PlanSampler
from pipeline.world import World, usable_cores
from readers import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from augment import Operation
    from pipeline.resident_room import ResidentMode
    from pipeline.statistics import Statistics


# torch's attributes that a native loader shows as they were given.
_AS_GIVEN = (
    "num_workers",
    "pin_memory",
    "timeout",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "worker_init_fn",
    "pin_memory_device",
    "in_order",
)
_WORKER_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class Engine(Protocol):
    """What hands out batches behind the facade. shards_itself: frameworks must not shard again."""

    shards_itself: bool

    @property
    def epoch(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def __len__(self) -> int: ...
    def begin(self) -> Iterator[Any]: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def statistics(self) -> Statistics: ...
    def close(self) -> None: ...


class DataLoader(torch.utils.data.DataLoader[Any]):
    """Batches of a dataset, in torch's shape, resumable exactly.

    Positional arguments and those up to in_order are torch's; the rest are Penstock's. How each
    behaves with native and with torch datasets: docs/datasets.md.

    dataset: a `readers.Dataset` (native: decoded and augmented by DALI), or any torch dataset, map-
        style or iterable, which torch's own workers read.
    batch_size: samples of this rank's batch; global_batch_size is the alternative, over all ranks.
    shuffle: draw the order from the seed; otherwise samples come in index order.
    num_workers: native: decode threads of this rank, 0 is this rank's share of the usable cores.
        torch datasets: worker processes, 0 reads in this one.
    drop_last, pad: the end of an epoch. One of them is needed on several ranks; pad="mask" fills
        the last batch up and appends a bool tensor `valid` of shape (n,) to every batch.
    timeout: seconds to wait for the bytes of a batch; 0 stands for 300 (torch datasets: for ever).
    prefetch_factor: native: batches decoded ahead, None is 2 when shuffling, else 1.
    seed: of order and draws. Native: None takes one from torch's generator, as torch does; several
        ranks need the same, so there it must be given. torch datasets: None leaves order and
        randomness to torch; a seed gives Penstock's order, shared out over the ranks, and seeds
        python's, numpy's and torch's generators for each sample by (seed, epoch, index).
    augment: operations, such as `imagenet_train(224)`. None gives uint8 images of shape (n, 3, h,
        w) where all are of one size, and is an error otherwise.
    device: "cpu", "cuda" or "cuda:1": native images are decoded there; every tensor lies there.
    world: rank and size; None reads torch's process group, else the launcher's environment.
    max_bad: native: share of the samples that may be bad in an epoch before every rank stops.
    lanes, window, reshuffle: of the plan (`pipeline.order.Plan`); None follows dataset and batch.
    deterministic: bit-exact pixels on CUDA too, for speed.
    resident: native: keep decoded images in memory, on the device; each is read, checked and
        decoded once a job. True, False, or "auto": if they are small (docs/datasets.md).
    read: "mmap" views on mapped packs, or "pread" where files may change under the map (NFS).

    Yields, for a native dataset, tuples in the order of `dataset.fields`: "image" (n, c, h, w),
    "label" and "id" int64 (n,); MixUp and CutMix make of "label" float32 (n, classes). For a torch
    dataset what torch yields. A batch is the user's; no buffer is reused.

    Raises: ConfigError, PlanError and RecipeError (all ValueErrors) for arguments that don't fit,
    before any work starts; torch's own errors for torch's arguments with a torch dataset;
    DatasetError for a dataset that can't be read.
    """

    sampler: Any
    _iterator: Any

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
        seed: int | None = None,
        augment: Sequence[Operation] | None = None,
        device: str | torch.device | int = "cpu",
        world: World | None = None,
        global_batch_size: int | None = None,
        pad: Literal["mask"] | None = None,
        max_bad: float = 0.001,
        deterministic: bool = False,
        lanes: int | None = None,
        window: int | None = None,
        reshuffle: float = 0.0,
        read: Literal["mmap", "pread"] = "mmap",
        resident: ResidentMode = False,
    ) -> None:
        arguments.check_choice("pad", pad, (None, "mask"))
        arguments.check_choice("read", read, ("mmap", "pread"))
        arguments.check_resident(resident)
        arguments.check_counts(lanes=lanes, window=window)
        arguments.check_share("max_bad", max_bad)
        # What the user spelt out is never overruled by a default, nor by a state.
        wanted: dict[str, int | float] = {
            name: value
            for name, value in (("seed", seed), ("lanes", lanes), ("window", window))
            if value is not None
        }
        if arguments.check_share("reshuffle", reshuffle):
            wanted["reshuffle"] = float(reshuffle)
        self._world_was_given = world is not None
        self._world = World.detect() if world is None else world
        self._device = arguments.parse_device(device)
        torchs: dict[str, Any] = {
            "batch_size": batch_size,
            "shuffle": shuffle,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            "num_workers": num_workers,
            "collate_fn": collate_fn,
            "pin_memory": pin_memory,
            "drop_last": drop_last,
            "timeout": timeout,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
            "generator": generator,
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
        }
        self._engine: Engine
        if isinstance(dataset, Dataset):
            self._init_native(
                dataset,
                torchs,
                wanted=wanted,
                seed=seed,
                augment=augment,
                global_batch_size=global_batch_size,
                pad=pad,
                max_bad=max_bad,
                deterministic=deterministic,
                read=read,
                resident=resident,
            )
        else:
            arguments.refuse_native(
                {"deterministic": deterministic and augment is None, "read": read != "mmap"}
                | {"resident=True": resident is True}
            )
            self._init_foreign(
                dataset,
                torchs,
                wanted=wanted,
                seed=seed,
                augment=augment,
                global_batch_size=global_batch_size,
                pad=pad,
                deterministic=deterministic,
            )
        if self._engine.shards_itself:
            # Accelerate hands such loaders back as they are; what it would build in their place
            # shards again, and half of the samples would be lost.
            self._is_accelerate_prepared = True
            self.use_stateful_dataloader = True

    def _init_native(
        self,
        dataset: Dataset,
        torchs: dict[str, Any],
        *,
        wanted: dict[str, int | float],
        seed: int | None,
        augment: Sequence[Operation] | None,
        global_batch_size: int | None,
        pad: Literal["mask"] | None,
        max_bad: float,
        deterministic: bool,
        read: Literal["mmap", "pread"],
        resident: ResidentMode,
    ) -> None:
        world, drop_last = self._world, bool(torchs["drop_last"])
        arguments.refuse_foreign(torchs)
        arguments.check_ends(world, drop_last=drop_last, pad=pad)
        num_workers, prefetch_factor = torchs["num_workers"], torchs["prefetch_factor"]
        arguments.check_counts(num_workers=num_workers, prefetch_factor=prefetch_factor)
        arguments.check_timeout(torchs["timeout"])
        sizes = arguments.batch_sizes(torchs["batch_size"], global_batch_size, world)
        shuffle = bool(torchs["shuffle"])
        settings = Settings(
            world=world,
            sizes=sizes,
            wanted=wanted,
            seed=arguments.choose_seed(seed, torchs["generator"], shuffle=shuffle, world=world),
            shuffle=shuffle,
            drop_last=drop_last,
            pad=pad is not None,
            augment=None if augment is None else tuple(augment),
            device=self._device,
            deterministic=deterministic,
            threads=num_workers,
            depth=prefetch_factor or (2 if shuffle else 1),
            timeout_s=float(torchs["timeout"]),
            mode=read,
            max_bad=max_bad,
            agrees=not self._world_was_given,
            resident=resident,
        )
        engine = NativeEngine(
            dataset,
            settings,
            batch_is_default=torchs["batch_size"] == 1 and global_batch_size is None,
            pin_memory=bool(torchs["pin_memory"]),
        )
        self._engine = engine
        for name in _AS_GIVEN:
            setattr(self, name, torchs[name])
        # torch's own place for it (the classes share their name): its constructor wasn't called.
        self.__multiprocessing_context = None
        self.dataset = dataset  # type: ignore[assignment]  # not one of torch's: no samples by index
        self.batch_size = engine.batch_size
        self.drop_last = drop_last
        self.collate_fn = None  # type: ignore[assignment]
        # Frameworks that rebuild loaders over map-style datasets leave this one alone.
        self._dataset_kind = _DatasetKind.Iterable
        self.sampler = PlanSampler(engine, world)
        self.batch_sampler = PlanBatches(self.sampler, sizes.per_rank, drop_last)

    def _init_foreign(
        self,
        dataset: Any,
        torchs: dict[str, Any],
        *,
        wanted: dict[str, int | float],
        seed: int | None,
        augment: Sequence[Operation] | None,
        global_batch_size: int | None,
        pad: Literal["mask"] | None,
        deterministic: bool,
    ) -> None:
        world = self._world
        is_map = not isinstance(dataset, torch.utils.data.IterableDataset)
        plan = is_map and seed is not None
        order: Any = None
        sampler: PlanSampler | None = None
        if plan:
            given = {name: torchs[name] for name in ("sampler", "batch_sampler", "generator")}
            given["in_order=False"] = None if torchs["in_order"] else True
            arguments.refuse_with_seed(given)
            order = plan_order(
                dataset, torchs, wanted=wanted, global_batch=global_batch_size, pad=pad, world=world
            )
            sampler = PlanSampler(None, world)
            size = None if torchs["batch_size"] is None else order.per_rank
            torchs = {**torchs, "shuffle": None, "sampler": sampler, "batch_size": size}
        else:
            arguments.refuse_without_plan(
                {"lanes": wanted.get("lanes"), "window": wanted.get("window"), "pad": pad}
                | {"reshuffle": wanted.get("reshuffle"), "global_batch_size": global_batch_size},
                is_map=is_map,
            )
        super().__init__(dataset, **torchs)
        if is_map and not plan:
            indices = self.sampler if self.batch_sampler is None else self.batch_sampler
            order = TorchOrder(indices, torchs["generator"])
        collate: Any = self.collate_fn
        darkroom: Darkroom | None = None
        if augment is not None:
            darkroom = self._darkroom(augment, seed=seed, deterministic=deterministic)
            collate = Split(collate)
            # Whoever rebuilds this loader would get images without augmentation.
            self.collate_fn = needs_our_loader
        options = {name: torchs[name] for name in _WORKER_OPTIONS}
        if torchs["num_workers"] == 0:
            options["multiprocessing_context"] = None
        engine = ForeignEngine(
            ForeignSettings(
                dataset=self.dataset,
                order=order,
                batch_size=self.batch_size,
                drop_last=self.drop_last,
                batched=self.batch_sampler is not None,
                collate_fn=collate,
                generator=torchs["generator"],
                options=options,
                seed=None if seed is None else int(seed),
                world=world,
                detected=not self._world_was_given,
                device=self._device,
                darkroom=darkroom,
            )
        )
        self._engine = engine
        if sampler is not None:
            sampler.follow(engine)
            object.__setattr__(self, "_dataset_kind", _DatasetKind.Iterable)
            if self.batch_sampler is not None:
                batches = PlanBatches(sampler, order.per_rank, self.drop_last)
                object.__setattr__(self, "batch_sampler", batches)

    def _darkroom(
        self, operations: Sequence[Operation], *, seed: int | None, deterministic: bool
    ) -> Darkroom:
        if self.batch_size is None:
            raise ConfigError(
                "augment= needs batches of one size: pass batch_size= (not a batch_sampler, nor "
                "batch_size=None)."
            )
        draw_seed = arguments.choose_seed(seed, self.generator, shuffle=True, world=self._world)
        return Darkroom(
            operations,
            batch_size=self.batch_size,
            threads=self._world.threads(usable_cores()),
            device=self._device,
            deterministic=deterministic,
            seed=draw_seed,
        )

    # -- iteration

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank; equal on all ranks."""
        return len(self._engine) if self._engine.shards_itself else super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin the current epoch at its start, or at a restored position.

        Nothing is consumed before the first next(): some trainers call iter() once more to look.
        """
        self._check_world()
        return self._engine.begin()

    def _check_world(self) -> None:
        """A process group that came up after the loader was built may be another world."""
        if self._world_was_given or not self._engine.shards_itself:
            return
        now = World.detect()
        if (now.rank, now.size) != (self._world.rank, self._world.size):
            raise PlanError(
                f"This loader was built for rank {self._world.rank} of {self._world.size}, and "
                f"this process is rank {now.rank} of {now.size} now: samples would repeat or go "
                "missing. Build the loader after the process group, or pass world=."
            )

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
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that the saved loader handed out.

        With a native dataset the state's plan is taken over (seed, lanes, window); the world and
        the batch size may differ. Raises ResumeError for a state of another dataset, seed, plan or
        version; the loader is then unchanged.
        """
        self._engine.load_state_dict(state)
        if isinstance(self._engine, NativeEngine):
            self.batch_size = self._engine.batch_size

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
        return self._world

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self._device
