"""The DataLoader: torch's names and meanings in front of the run.

It is a subclass of torch's because trainers ask for one, but never calls torch's constructor:
nothing of torch's machinery (worker processes, pin threads) is started for a native dataset.
"""

from __future__ import annotations

import time
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.utils.data

from cache.errors import ClosedError, ConfigError
from pipeline import arguments
from pipeline.build import Built, Settings, build, make_plan
from pipeline.sampler import PlanSampler
from pipeline.state import LoaderState, check_resumable, other_order
from pipeline.steps import Cursor
from pipeline.world import World
from readers import Dataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from augment import Operation
    from pipeline.run import Taken
    from pipeline.statistics import Statistics

Batch = tuple[torch.Tensor, ...]


class DataLoader(torch.utils.data.DataLoader[Batch]):
    """Batches of a native dataset as torch tensors, in an order that is a function of the seed.

    Positional arguments and those up to persistent_workers are torch's; the rest are Penstock's.

    dataset: a `readers.Dataset`.
    batch_size: samples of this rank's batch; global_batch_size is the alternative, over all ranks.
    shuffle: draw the order from the seed; otherwise samples come in index order.
    num_workers: decode threads of this rank; 0 is this rank's share of the usable cores.
    drop_last, pad: the end of an epoch. One of them is needed on several ranks; pad="mask" fills
        the last batch up and appends a bool tensor `valid` of shape (n,) to every batch.
    timeout: seconds to wait for the bytes of a batch; 0 stands for 300.
    prefetch_factor: batches decoded ahead; None is 2 when shuffling, else 1.
    seed: of order and draws. None takes one from torch's generator, as torch does; several ranks
        need the same, so there it must be given.
    augment: operations, such as `imagenet_train(224)`. None gives uint8 images of shape (n, 3, h,
        w) where all are of one size, and is an error otherwise.
    device: "cpu", "cuda" or "cuda:1"; images are decoded there and every tensor lies there.
    world: rank and size; None reads torch's process group, else the launcher's environment.
    lanes, window, reshuffle: of the plan (`pipeline.order.Plan`); None follows dataset and batch.
    deterministic: bit-exact pixels on CUDA too, for speed.
    read: "mmap" views on mapped packs, or "pread" where files may change under the map (NFS).

    Yields tuples in the order of `dataset.fields`: "image" (n, c, h, w), "label" and "id" int64
    (n,). A batch is the user's; no buffer is reused.

    Raises: ConfigError, PlanError and RecipeError (all ValueErrors) for arguments that don't fit,
    before any work starts; DatasetError for a dataset that can't be read.
    """

    dataset: Dataset  # type: ignore[assignment]  # not one of torch's: it has no __getitem__
    sampler: PlanSampler
    _run_finalizer: weakref.finalize[..., Any]

    def __init__(
        self,
        dataset: Dataset,
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
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise ConfigError(
                f"dataset is a {type(dataset).__name__}, wanted a readers.Dataset. This release "
                "reads native datasets only: point readers.Dataset at the folder or pack; keep "
                "torch's DataLoader for other torch datasets."
            )
        arguments.refuse_foreign(
            {
                "sampler": sampler,
                "batch_sampler": batch_sampler,
                "collate_fn": collate_fn,
                "worker_init_fn": worker_init_fn,
                "multiprocessing_context": multiprocessing_context,
            }
        )
        world = World.detect() if world is None else world
        arguments.check_choice("pad", pad, (None, "mask"))
        arguments.check_choice("read", read, ("mmap", "pread"))
        arguments.check_ends(world, drop_last=bool(drop_last), pad=pad)
        arguments.check_counts(
            num_workers=num_workers, prefetch_factor=prefetch_factor, lanes=lanes, window=window
        )
        arguments.check_share("max_bad", max_bad)
        arguments.check_timeout(timeout)
        sizes = arguments.batch_sizes(batch_size, global_batch_size, world)
        self.shuffle = bool(shuffle)
        # What the user spelt out is never overruled by a default, nor by a state.
        wanted: dict[str, int | float] = {
            name: value
            for name, value in (("seed", seed), ("lanes", lanes), ("window", window))
            if value is not None
        }
        if arguments.check_share("reshuffle", reshuffle):
            wanted["reshuffle"] = float(reshuffle)
        self._settings = Settings(
            world=world,
            sizes=sizes,
            wanted=wanted,
            seed=arguments.choose_seed(seed, generator, shuffle=self.shuffle, world=world),
            shuffle=self.shuffle,
            drop_last=bool(drop_last),
            pad=pad is not None,
            augment=None if augment is None else tuple(augment),
            device=arguments.parse_device(device),
            deterministic=deterministic,
            threads=num_workers,
            depth=prefetch_factor or (2 if self.shuffle else 1),
            timeout_s=float(timeout),
            mode=read,
        )
        self._batch_is_default = batch_size == 1 and global_batch_size is None

        self.dataset = dataset
        self.batch_size = sizes.per_rank
        self.num_workers = num_workers
        self.drop_last = bool(drop_last)
        self.pin_memory = pin_memory
        self.timeout = timeout
        self.generator = generator
        self.prefetch_factor = prefetch_factor
        self.persistent_workers = persistent_workers
        self.collate_fn = None  # type: ignore[assignment]
        self.worker_init_fn = None
        self.pin_memory_device = ""
        self.in_order = True
        self.max_bad = max_bad
        self.device = self._settings.device
        self.world = world

        self._cursor = Cursor(0, 0)
        self._restored = False
        self._iteration = 0
        self._install(build(dataset, self._settings))
        self.sampler = PlanSampler(self)
        self.batch_sampler = torch.utils.data.BatchSampler(
            self.sampler, sizes.per_rank, self.drop_last
        )

    def _install(self, built: Built) -> None:
        """Take a run over; the finalizer stops it when the loader goes, whichever way."""
        self._built = built
        self._run_finalizer = weakref.finalize(self, built.run.close)
        self._run_finalizer.atexit = False  # the run has a hook of its own, in the right order

    # -- iteration

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank; equal on all ranks."""
        return len(self._built.walk)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """Begin the current epoch at its start, or at a restored position.

        Nothing is consumed before the first next(): some trainers call iter() once more to look.
        """
        self._check_open()
        self._built.run.start(self._pass_start())
        return _Batches(self)

    def _pass_start(self) -> Cursor:
        return self._cursor if self._restored else Cursor(self._cursor.epoch, 0)

    def _begin_pass(self) -> tuple[int, int]:
        """Move to where a pass begins; (its number, its epoch)."""
        self._check_open()
        self._cursor = self._pass_start()
        self._iteration += 1
        return self._iteration, self._cursor.epoch

    def _deliver(self, iteration: int, epoch: int) -> Batch | None:
        """The batch at the cursor for the pass of that number; None when its epoch is over."""
        if self._cursor.epoch != epoch:
            return None
        self._check_open()
        if iteration != self._iteration:
            raise ConfigError(
                "This iterator was overtaken: another one of the same loader was begun, or the "
                "loader's position was set. Use one loader for each concurrent loop."
            )
        taken = self._built.run.take(self._cursor)
        batch = self._tensors(taken)
        self._cursor = taken.prepared.step.then
        self._restored = False
        return batch

    def _count_step(self, step_s: float) -> None:
        self._built.meter.step_s += step_s

    def _tensors(self, taken: Taken) -> Batch:
        encoded = taken.prepared.encoded
        columns: dict[str, Any] = {**encoded.columns, "id": encoded.ids}
        tensors = [
            taken.images if field == "image" else self._place(torch.from_numpy(columns[field]))
            for field in self.dataset.fields
        ]
        if taken.prepared.valid is not None:
            tensors.append(self._place(torch.from_numpy(taken.prepared.valid)))
        if self.pin_memory and self.device.type == "cpu" and torch.cuda.is_available():
            tensors = [t.pin_memory() for t in tensors if t is not None]
        return tuple(t for t in tensors if t is not None)

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)

    # -- epochs and state

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to; it moves on with the last batch of an epoch."""
        return self._cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. The current epoch again changes nothing, so that a restored
        position stays. Raises ConfigError for a negative epoch."""
        arguments.check_epoch(epoch)
        if epoch != self._cursor.epoch:
            self._cursor = Cursor(int(epoch), 0)
            self._restored = False
            self._iteration += 1

    def state_dict(self) -> dict[str, Any]:
        """What was handed out, as JSON types, under 1 kB. The same on every rank."""
        built = self._built
        return LoaderState(
            dataset=self.dataset.index.fingerprint,
            fingerprint=built.fingerprint,
            samples=built.walk.samples,
            plan=built.frozen,
            epoch=self._cursor.epoch,
            position=self._cursor.position,
            global_batch_size=built.walk.global_batch,
        ).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly behind the last batch that the saved loader handed out.

        The state's plan is taken over (seed, lanes, window); the world and the batch size may
        differ.
        Raises ResumeError for a state of another dataset, seed, plan or version; the loader is then
        unchanged.
        """
        self._check_open()
        loaded = LoaderState.from_dict(state)
        index = self.dataset.index
        check_resumable(
            loaded,
            dataset=index.fingerprint,
            samples=index.samples,
            wanted={"shuffle": self.shuffle, **self._settings.wanted},
        )
        settings = self._settings.resumed(loaded, take_batch=self._batch_is_default)
        if settings != self._settings or loaded.plan != self._built.frozen:
            built = build(self.dataset, settings, frozen=loaded.plan)
            if built.fingerprint != loaded.fingerprint:
                built.run.close()
                raise other_order(loaded.fingerprint, built.fingerprint)
            self._run_finalizer()
            self._settings = settings
            self.batch_size = settings.sizes.per_rank
            self._install(built)
        self._cursor = self._built.walk.normalise(Cursor(loaded.epoch, loaded.position))
        self._restored = True
        self._iteration += 1

    def epoch_ids(self) -> Iterator[int]:
        """Sample ids that this rank is handed in a whole current epoch, in order."""
        built, world = self._built, self.world
        plan = make_plan(self.dataset.index, built.frozen)
        for step in built.walk.steps(Cursor(self._cursor.epoch, 0), endless=False):
            epoch, position = step.start.epoch, step.start.position
            yield from plan.ids(
                epoch, position, built.walk.global_batch, rank=world.rank, world=world.size
            ).tolist()

    def epoch_samples(self) -> int:
        """How many `epoch_ids` there are."""
        walk = self._built.walk
        whole, rest = divmod(walk.samples, walk.global_batch)
        mine = whole * self.world.share(walk.global_batch)
        return mine if walk.drop_last else mine + self.world.share(rest)

    def statistics(self) -> Statistics:
        """What was measured so far, and the one-line verdict."""
        return self._built.meter.snapshot()

    # -- life

    def close(self) -> None:
        """Stop threads, drop what is in flight, release DALI. Safe to call twice."""
        self._run_finalizer()

    def _check_open(self) -> None:
        if not self._run_finalizer.alive:
            raise ClosedError("This loader is closed; make a new one.")

    def __enter__(self) -> DataLoader:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"DataLoader({self.dataset!r}, batch_size={self.batch_size}, rank {self.world.rank} of "
            f"{self.world.size}, device={str(self.device)!r}, at {self._cursor})"
        )

    @property
    def multiprocessing_context(self) -> None:
        """None: a native dataset has no worker processes."""
        return

    @multiprocessing_context.setter
    def multiprocessing_context(self, value: object) -> None:
        arguments.refuse_foreign({"multiprocessing_context": value})


class _Batches:
    """One pass over an epoch. Holds the loader, so that `for x in DataLoader(...)` lives on."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._begun: tuple[int, int] | None = None
        self._handed_out: float | None = None

    def __iter__(self) -> _Batches:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Batch:
        if self._handed_out is not None:
            self._loader._count_step(time.perf_counter() - self._handed_out)
            self._handed_out = None
        self._begun = self._begun or self._loader._begin_pass()
        batch = self._loader._deliver(*self._begun)
        if batch is None:
            raise StopIteration
        self._handed_out = time.perf_counter()
        return batch
