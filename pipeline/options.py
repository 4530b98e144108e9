"""Check a loader's arguments once, as one frozen value, and resolve them for a world.

`LoaderOptions` holds the arguments of a DataLoader as the user passed them. `LoaderOptions.at` adds
what follows from the world: batch sizes of a rank, the seed, the device. The world may become known
only after the loader was made (`LateWorld`), so the loader calls `at` again when it changes. Every
error names the argument. Arguments that contradict one another or the kind of dataset are errors
before any work starts.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.cache import ConfigError, PenstockWarning, PlanError
from penstock.cache.base import READ_MODE, ReadMode
from penstock.pipeline.plan import MOST_ENTRIES, BatchSchedule, World, first_settings, local_rank

if TYPE_CHECKING:
    import torch

    from penstock.augment import Recipes
    from penstock.pipeline.plan import LoaderState, PlanSettings
    from penstock.readers import Contents

MOST_COUNT = 2**53 - 1
"""The largest integer that JSON, and so a state, holds exactly."""


def check_count(name: str, value: object, *, least: int) -> int:
    """Return the value as an int.

    Raises ConfigError unless it is an integer of at least `least` that a state can hold.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if int(value) > MOST_COUNT:
        raise ConfigError(f"{name} must be an integer of at most 2^53 - 1, got {value!r}.")
    return int(value)


def check_counts(**values: int | None) -> None:
    """Raise ConfigError unless each value is None or an integer ≥ 1 (num_workers: ≥ 0)."""
    for name, value in values.items():
        if value is not None:
            check_count(name, value, least=0 if name in ("num_workers",) else 1)


def check_share(name: str, value: object) -> float:
    """Return the value as a float. Raises ConfigError unless it is a share in [0, 1]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a share between 0 and 1, got {value!r}.")
    return float(value)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigError unless the value is one of the choices."""
    if value not in choices:
        wanted = " or ".join(map(repr, choices))
        raise ConfigError(f"{name} must be {wanted}, got {value!r}.")


def check_tokens(value: object) -> None:
    """Raise ConfigError unless it is None, a number of tokens, or such a number for one field."""
    tokens = value
    if isinstance(value, Mapping) and len(value) == 1:
        ((field, number),) = value.items()
        tokens = number if isinstance(field, str) else value
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise ConfigError(
            f"batch_tokens: got {value!r}, wanted the most tokens that a rank's batch may have, "
            'such as 8192, or {"tokens": 8192}.'
        )


def check_timeout(value: object) -> None:
    """Raise ConfigError unless the value is a number of seconds ≥ 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"timeout must be seconds ≥ 0 (0 means 300), got {value!r}.")


def check_epoch(value: object) -> None:
    """Raise ConfigError unless the value is an integer ≥ 0."""
    check_count("epoch", value, least=0)


def checked_augment(value: Any) -> Recipes | None:
    """Return the operations as a tuple, by field if they were passed by field, or None.

    Raises ConfigError for anything else. Later checks find out if they fit one another and the
    images.
    """
    if value is None:
        return None
    from penstock.augment import checked_operations

    if isinstance(value, Mapping):
        names = [key if isinstance(key, tuple) else (key,) for key in value]
        if not value or not all(each and all(isinstance(n, str) for n in each) for each in names):
            raise ConfigError(
                f"augment: got {value!r}, wanted a list of operations, or such a list by field, or "
                'by a tuple of fields that share its draws: {"image": [...], ("left", "right"): '
                "[...]}."
            )
        shown = {key: f'"{key}"' if isinstance(key, str) else key for key in value}
        return {
            key: checked_operations(f"augment[{shown[key]}]", each) for key, each in value.items()
        }
    return checked_operations("augment", value)


DeviceFunction = Callable[[Any, Any], Any]
"""A function for `device_augment=`: (batch, generator) -> what the loop gets."""


def check_function(function: object) -> None:
    """Raise ConfigError unless a value is None or can be called as device_augment(batch,
    generator)."""
    wanted = "wanted a function of two arguments: the batch, a dict by field, and a torch.Generator"
    if function is None:
        return
    if not callable(function):
        raise ConfigError(
            f"device_augment: got {function!r}, {wanted}. Penstock's operations belong in augment=."
        )
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"device_augment: got {function!r} ({error}), {wanted}.") from None
    except ValueError:  # a function of C, which has no signature
        return


# torch's arguments that choose or build batches. A native dataset's order comes from its plan.
_REFUSED_OF_TORCH = {
    "batch_sampler": "the order comes from the plan; pass batch_size=, shuffle= and seed=",
    "collate_fn": "batches already leave DALI as tensors; put per-sample work into augment=, or do "
    "it on the batch in your loop",
    "worker_init_fn": "there are no worker processes; draws are keyed by (seed, epoch, sample id)",
    "multiprocessing_context": "there are no worker processes; drop it",
}


def no_worker_processes(worker: int) -> None:
    """The worker_init_fn that a native loader shows.

    There is no worker to seed, so a framework that sets a missing one (Lightning) needn't.
    """


def refuse_torch_arguments(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for torch's arguments that a native dataset can't use."""
    for name, remedy in _REFUSED_OF_TORCH.items():
        if arguments.get(name) not in (None, no_worker_processes):
            raise ConfigError(
                f"{name}={arguments[name]!r} can't be used with a native dataset: {remedy}. "
                "If you didn't pass it, a framework rebuilt this loader (Lightning's predict() "
                "does): see docs/howto/trainers.md."
            )


GlobalBatch = int | Mapping[int, int]
"""Samples of a global batch, or such numbers by the job's sample from which they hold."""


def batch_schedule(global_batch_size: GlobalBatch) -> BatchSchedule:
    """Return the schedule of the user's number, or of numbers by the sample from which they hold.

    Raises ConfigError for numbers that descend or are out of range.
    """
    if not isinstance(global_batch_size, Mapping):
        return BatchSchedule.constant(check_count("global_batch_size", global_batch_size, least=1))
    key, sizes = "global_batch_size: the sample from which a size holds", dict[int, int]()
    for first, size in global_batch_size.items():
        begin = check_count(key, first, least=0)
        sizes[begin] = check_count(f"global_batch_size[{first!r}]", size, least=1)
    firsts = list(sizes)
    if not 0 < len(sizes) <= MOST_ENTRIES or firsts[0] != 0 or sorted(firsts) != firsts:
        raise ConfigError(
            f"global_batch_size: got {len(sizes)} sizes from the samples {firsts[:8]} on, wanted 1 "
            f"to {MOST_ENTRIES} by the sample from which they hold, from 0 on and in ascending "
            "order: {0: 8192, ...}. Samples are counted from the job's start, over all epochs."
        )
    return BatchSchedule.of(sizes)


def check_by_tokens(
    batch_size: object, global_batch_size: GlobalBatch | None, *, pad: Literal["mask"] | None
) -> None:
    """Raise ConfigError for arguments that set batch sizes otherwise than batch_tokens=."""
    passed = {"batch_size": None if batch_size == 1 else batch_size, "pad": pad}
    for name, given in (passed | {"global_batch_size": global_batch_size}).items():
        if given is not None:
            raise ConfigError(
                f"Got batch_tokens= and {name}={given!r}: a batch has as many samples as its "
                "tokens allow, on every rank, and no sample is left out. Pass one of them."
            )


def check_ends(world: World, *, drop_last: bool, pad: Literal["mask"] | None) -> None:
    """Raise ConfigError unless every rank's epoch ends alike: unequal ranks hang in collectives."""
    if pad is not None and drop_last:
        raise ConfigError(
            'Got drop_last=True and pad="mask": one drops the last batch of an epoch, the other '
            "fills it up. Pass one of them (drop_last for training, pad for evaluation)."
        )
    if world.size > 1 and pad is None and not drop_last:
        raise ConfigError(
            f"With {world.size} ranks the end of an epoch must be the same on each: pass "
            'drop_last=True (training), or pad="mask" (evaluation: each sample exactly once, and '
            "a `valid` mask as the last element of every batch)."
        )


def fresh_seed(generator: torch.Generator | None = None) -> int:
    """Return a seed drawn as torch's samplers and loaders draw theirs."""
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


_LOG = logging.getLogger("penstock")


def parse_device(device: object, *, local_rank: int = 0) -> torch.device:
    """Return a torch device of type cpu or cuda that exists on this machine. Raises ConfigError.

    local_rank: this process's number on its node, which chooses the device if "cuda" has no number.
    """
    import torch

    try:
        parsed = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f'device={device!r} is not a torch device. Pass "cpu", "cuda" or "cuda:1".'
        ) from error
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.type != "cuda":
        raise ConfigError(f'device={device!r}: DALI decodes on "cpu" or "cuda" only.')
    if not torch.cuda.is_available():
        raise ConfigError(
            f'device={device!r}, but torch finds no CUDA device. Pass device="cpu", or install '
            "a CUDA build of torch and check `nvidia-smi`."
        )
    index = _device_index(local_rank) if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}, but this machine has {torch.cuda.device_count()} CUDA device(s). "
            'Pass "cuda" for the current one.'
        )
    return torch.device("cuda", index)


def _device_index(local_rank: int) -> int:
    """Return the index of torch's current device, or the local rank if no device was set.

    Otherwise every rank of a node would fill the first GPU.
    """
    import torch

    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    # If one device is visible, the launcher has assigned it to this rank.
    if current or not local_rank or count == 1:
        return current
    if local_rank < count:
        _LOG.info("device='cuda' is cuda:%d for local rank %d.", local_rank, local_rank)
        return local_rank
    warnings.warn(
        f"device='cuda' is cuda:{current}, torch's current device: this is local rank "
        f"{local_rank}, but only {count} devices are visible, so other ranks may use the same one. "
        "Call torch.cuda.set_device first, or pass device='cuda:N'.",
        PenstockWarning,
        stacklevel=4,
    )
    return current


SlotsMode = Literal["data", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Settings of the order in which a job reads its samples, for `DataLoader(order=…)` and `warm`.

    Neither a default nor a state overrides a setting (docs/explanation/order.md explains the
    order).

    lanes: the fixed shares of the shards that every global batch reads from, at least 1; None
        follows the dataset and the batch.
    window: shards that each lane shuffles together, at least 1 (units of decoding, if shards
        consist of several); None follows the dataset and the batch.
    reshuffle: the share of the shards, between 0 and 1, that change places in each epoch.
    slots: how ranks are assigned to parts of a global batch: "data" follows the contents of the
        nodes' caches, "rank" the ranks' numbers (docs/howto/cluster.md). A warm-up ignores it.

    Raises ConfigError for values that no order can have.
    """

    lanes: int | None = None
    window: int | None = None
    reshuffle: float = 0.0
    slots: SlotsMode = "data"

    def __post_init__(self) -> None:
        check_counts(lanes=self.lanes, window=self.window)
        check_share("reshuffle", self.reshuffle)
        check_choice("slots", self.slots, get_args(SlotsMode))


DEFAULT_ORDER = Order()
"""The order that follows from the dataset and the batch alone."""


def shuffle_settings(order: Order) -> dict[str, int | float]:
    """Return the settings by name that differ from the defaults and need a shuffled order."""
    reshuffle = float(order.reshuffle) or None
    given = {"lanes": order.lanes, "window": order.window, "reshuffle": reshuffle}
    return {name: value for name, value in given.items() if value is not None}


def check_shuffles(order: Order, *, shuffle: bool) -> None:
    """Raise ConfigError for settings of a shuffled order if the order isn't shuffled."""
    for name, value in () if shuffle else shuffle_settings(order).items():
        raise ConfigError(
            f"{name}={value} has no meaning with shuffle=False: samples come in index order. "
            "Drop it, or pass shuffle=True."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerArguments:
    """torch's arguments about workers and pinning."""

    num_workers: int = 0
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchArguments(WorkerArguments):
    """All arguments of torch's DataLoader except its dataset."""

    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Callable[..., Any] | None = None
    drop_last: bool = False
    generator: torch.Generator | None = None


WORKER_ARGUMENTS = tuple(each.name for each in fields(WorkerArguments))
"""The names of torch's arguments about workers and pinning."""

ResidentMode = bool | Literal["auto"]
DatasetKind = Literal["native", "map", "stream"]
"""A `penstock.Dataset`, or a map-style or an iterable one of torch."""

_ALONE, _SINGLE = World(0, 1), BatchSchedule.constant(1)

MAX_BAD = 0.001
"""The share of a dataset's samples that may be bad in an epoch, unless the user sets another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions(TorchArguments):
    """The arguments of a DataLoader, and what follows from them in one world.

    Arguments have the names and meanings of `DataLoader` and are as the user passed or set them.
    kind: of the dataset. drawn_seed: drawn from torch's generator, because the user passed no seed;
    it differs between ranks, so it orders samples in a world of one rank alone. `at` sets the rest:
    device: of this rank. world. agrees: the world is that of torch's process group, so its ranks
    compare plans and count bad samples together. schedule: of the global batches, if Penstock
    orders the samples; a state may set it, and plan_seed, the seed of the order and of draws.

    Raises ConfigError for arguments that fit no dataset, or not this kind.
    """

    kind: DatasetKind

    seed: int | None = None
    augment: Recipes | None = None
    global_batch_size: GlobalBatch | None = None
    pad: Literal["mask"] | None = None
    max_bad: float | None = None
    deterministic: bool = False
    order: Order = DEFAULT_ORDER
    read: ReadMode = READ_MODE
    resident: ResidentMode = False
    as_dict: bool = False
    batch_tokens: int | Mapping[str, int] | None = None
    bucket_by: Literal["aspect"] | None = None
    device_augment: DeviceFunction | None = None

    drawn_seed: int | None = None
    device: torch.device
    world: World = _ALONE
    agrees: bool = False
    schedule: BatchSchedule = _SINGLE
    plan_seed: int = 0

    def __post_init__(self) -> None:
        if self.seed is not None:
            if not isinstance(self.seed, Integral) or isinstance(self.seed, bool):
                raise ConfigError(f"seed must be an integer, got {self.seed!r}.")
            object.__setattr__(self, "seed", int(self.seed))
        if not isinstance(self.order, Order):
            raise ConfigError(
                f"order must be an Order, such as Order(lanes=8), got {self.order!r}."
            )
        check_tokens(self.batch_tokens)
        check_choice("bucket_by", self.bucket_by, (None, "aspect"))
        if self.bucket_by is not None and self.batch_tokens is not None:
            raise ConfigError(
                "Got bucket_by= and batch_tokens=: a batch holds images of similar shapes, or "
                "samples of similar length. Pass one of them."
            )
        check_function(self.device_augment)
        check_choice("pad", self.pad, (None, "mask"))
        check_choice("read", self.read, get_args(ReadMode))
        if not isinstance(self.resident, bool) and self.resident != "auto":  # not 1, equal to True
            raise ConfigError(f"resident must be True, False or 'auto', got {self.resident!r}.")
        if self.max_bad is not None:
            check_share("max_bad", self.max_bad)
        check_choice("as_dict", self.as_dict, (True, False))
        if self.kind == "native":
            refuse_torch_arguments(self.torch_arguments())
            check_counts(num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)
            check_timeout(self.timeout)
            for name in ("shuffle", "drop_last"):  # None is False here; torch wants it as passed
                object.__setattr__(self, name, bool(getattr(self, name)))
            return
        # torch's own constructor checks torch's arguments.
        self._refuse_what_is_native()
        if not self.is_planned:
            self._refuse_what_is_planned()
            return
        other_orders = {
            "sampler=": self.sampler,
            "batch_sampler=": self.batch_sampler,
            "generator=": self.generator,
            "in_order=False": None if self.in_order else False,
        }
        for name in (name for name, value in other_orders.items() if value is not None):
            raise ConfigError(
                f"{name} and seed= contradict each other: with a seed, Penstock orders the samples "
                "and shares them out. Drop seed= to keep torch's order, or drop the other."
            )

    def _refuse_what_is_native(self) -> None:
        """Raise ConfigError for arguments that only native datasets can use."""
        from penstock.augment import Stage

        operations = () if isinstance(self.augment, Mapping) else self.augment or ()
        of_fields = [op for op in operations if op.stage in (Stage.MAP, Stage.FIELD)]
        is_passed = {
            "augment= by field": isinstance(self.augment, Mapping),
            **{f"{type(op).__name__} in augment=": True for op in of_fields},
            "deterministic=": self.deterministic and self.augment is None,
            "read=": self.read != READ_MODE,
            "resident=True": self.resident is True,
            "as_dict=True": self.as_dict is True,
            "batch_tokens=": self.batch_tokens is not None,
            "bucket_by=": self.bucket_by is not None,
            "device_augment=": self.device_augment is not None,
            'slots="rank"': self.order.slots != "data",
            "global_batch_size= by samples": isinstance(self.global_batch_size, Mapping),
        }
        for argument in (name for name, passed in is_passed.items() if passed):
            drop = "Call the function in your loop" if "device" in argument else "Drop it"
            raise ConfigError(
                f"{argument} works on native datasets (penstock.Dataset), but this is a torch "
                f"dataset. {drop}, or read the files with penstock.Dataset."
            )

    def _refuse_what_is_planned(self) -> None:
        """Raise ConfigError for arguments that need Penstock's order."""
        is_map = self.kind == "map"
        arguments = {
            **shuffle_settings(self.order),
            "pad": self.pad,
            "global_batch_size": self.global_batch_size,
            "max_bad": self.max_bad if is_map else None,
        }
        for name, value in arguments.items():
            if value is not None:
                remedy = "An iterable dataset brings its own order: drop it."
                if is_map:
                    remedy = f"Pass seed= as well, or drop {name}=."
                raise ConfigError(
                    f"{name}={value!r} needs Penstock's order of the samples. {remedy}"
                )
        if self.max_bad is not None:
            raise ConfigError(
                f"max_bad={self.max_bad!r} replaces bad samples by others, but the samples of an "
                "iterable dataset have no numbers by which to find others. Drop max_bad=, and let "
                "its __iter__ leave out the samples that it can't read."
            )

    # -- what follows from the arguments alone

    @property
    def is_planned(self) -> bool:
        """True if Penstock orders the samples, and not torch or an iterable dataset."""
        return self.kind == "native" or (self.kind == "map" and self.seed is not None)

    @property
    def is_batched(self) -> bool:
        """True if samples come in batches."""
        return self.batch_size is not None or self.batch_sampler is not None

    @property
    def keeps_workers(self) -> bool:
        """True if worker processes live on from one pass to the next."""
        return bool(self.persistent_workers) and self.num_workers > 0

    @property
    def depth(self) -> int:
        """Batches of a native dataset that are in DALI at once."""
        return self.prefetch_factor or (2 if self.shuffle else 1)

    @property
    def batch_is_default(self) -> bool:
        """True if the user passed no batch size, so that a state may set it."""
        return self.batch_size == 1 and self.global_batch_size is None

    def torch_arguments(self) -> dict[str, Any]:
        """Return the arguments for torch's constructor."""
        return {each.name: getattr(self, each.name) for each in fields(TorchArguments)}

    def worker_arguments(self) -> dict[str, Any]:
        """Return torch's arguments about workers, without those that mean nothing without workers.

        torch's constructor rejects these, but ignores them in a loader's attributes.
        """
        values = {name: getattr(self, name) for name in WORKER_ARGUMENTS}
        without = {"multiprocessing_context": None, "prefetch_factor": None}
        return values if self.num_workers else values | without | {"persistent_workers": False}

    def with_drawn_seed(self) -> LoaderOptions:
        """Return the options with a drawn seed, if the user passed none and one is needed."""
        draws = self.needs_seed if self.kind == "native" else self.augment is not None
        if self.seed is not None or not draws:
            return self
        return replace(self, drawn_seed=fresh_seed(self.generator))

    @property
    def needs_seed(self) -> bool:
        """True if the order of the samples follows from a seed."""
        return bool(self.shuffle) or (self.kind == "native" and self.sampler is not None)

    # -- what follows from the world

    def at(self, world: World, *, device: torch.device, agrees: bool = False) -> LoaderOptions:
        """Return the options for a rank of a world. device: of this rank.

        Raises ConfigError and PlanError for arguments that don't fit the world.
        """
        here = replace(self, world=world, device=device, agrees=agrees)
        if not self.is_planned:
            return here
        return replace(here, schedule=self._schedule_in(world), plan_seed=self._seed_in(world))

    def _schedule_in(self, world: World) -> BatchSchedule:
        batch_size = self.batch_size
        if self.batch_tokens is None:
            check_ends(world, drop_last=bool(self.drop_last), pad=self.pad)
        else:
            check_by_tokens(batch_size, self.global_batch_size, pad=self.pad)
        if self.kind == "map" and batch_size is None:
            if self.global_batch_size is not None or self.pad is not None:
                raise ConfigError(
                    "batch_size=None (single samples) allows no global_batch_size= and no pad=."
                )
            batch_size = 1
        if self.global_batch_size is not None:
            if batch_size != 1:
                raise ConfigError(
                    f"Got batch_size={batch_size!r} and global_batch_size="
                    f"{self.global_batch_size!r}: batch_size is per rank, global_batch_size over "
                    "all ranks. Pass one of them."
                )
            return _checked_in_world(batch_schedule(self.global_batch_size), world)
        if batch_size is None:
            raise ConfigError(
                "batch_size=None (no batching) isn't possible with a native dataset: DALI decodes "
                "batches. Pass batch_size=1 and take the first element."
            )
        if isinstance(batch_size, Mapping):
            raise ConfigError(
                f"batch_size: got {batch_size!r}, wanted a number of this rank's samples. Pass a "
                "schedule of batch sizes over all ranks as global_batch_size=."
            )
        count = check_count("batch_size", batch_size, least=1)
        return BatchSchedule.constant(count * world.size)

    def _seed_in(self, world: World) -> int:
        """Return the seed in a world; 0 if nothing depends on it."""
        if self.seed is not None:
            return self.seed
        if not self.needs_seed:
            return 0
        if self.drawn_seed is None or world.size > 1:
            what = "shuffle=True" if self.shuffle else "sampler="
            raise ConfigError(
                f"{what} on {world.size} ranks needs seed=: without it, each rank would draw "
                "its own order, and samples would repeat and go missing. Pass the same seed on "
                "every rank."
            )
        return self.drawn_seed

    @property
    def per_rank(self) -> int:
        """The samples of the largest rank's largest batch, if Penstock orders the samples."""
        return self.rank_share(self.schedule.largest)

    def rank_share(self, global_batch: int) -> int:
        """Return the largest rank's part of a global batch; the others have at most one less."""
        return -(-global_batch // self.world.size)

    @property
    def rank_batch(self) -> int | None:
        """The samples of this rank's largest batch; None if they are single, or cut by a batch
        sampler."""
        if self.batch_sampler is not None or self.batch_size is None:
            return None
        return self.per_rank if self.is_planned else self.batch_size

    def first_settings(self, contents: Contents, *, global_batch: int) -> PlanSettings:
        """Return the settings of a new job's plan: the user's, else those that follow from the
        dataset and the batch. Raises ConfigError and PlanError."""
        check_shuffles(self.order, shuffle=bool(self.shuffle))
        given: Any = shuffle_settings(self.order)
        given |= {"shuffle": bool(self.shuffle), "drop_last": bool(self.drop_last)}
        return first_settings(contents, seed=self.plan_seed, global_batch=global_batch, **given)

    # -- states of a native dataset

    def wanted(self) -> dict[str, int | float]:
        """Return the settings by name that the user passed, which a state must equal."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {"shuffle": bool(self.shuffle), **seed, **shuffle_settings(self.order)}

    def resumed(self, state: LoaderState, *, warns: bool = True) -> LoaderOptions:
        """Return the options with which to continue from a state.

        They have the state's seed and its batches so far. From the state's place on, the user's
        batch sizes count, if any. warns: warn of differences from the saved job from here on.
        Raises PlanError if a batch of the state is smaller than the world.
        """
        if state.plan.buckets is not None:
            return replace(self, plan_seed=state.plan.seed)
        wanted = None if self.batch_is_default else self.schedule
        schedule = state.resumed_schedule(wanted, drop_last=self.drop_last)
        if warns:
            planned = state.resumed_schedule(None, drop_last=self.drop_last)
            self._warn_of_other_batches(planned, schedule)
            rest = state.samples % schedule.size
            if rest and self.drop_last != state.drop_last:
                warn_of_other_ends(saved=state.drop_last, rest=rest)
        schedule = _checked_in_world(schedule, self.world)
        return replace(self, plan_seed=state.plan.seed, schedule=schedule)

    def _warn_of_other_batches(self, planned: BatchSchedule, schedule: BatchSchedule) -> None:
        if schedule == planned:
            return
        if schedule.size != planned.size:
            change = f"goes from {planned.size} to {schedule.size} samples with this state"
        else:
            change = "will change at other samples, or to other sizes, than the saved job planned"
        given = planned.size if len(planned.sizes) == 1 else planned.as_given()
        warnings.warn(
            f"The global batch {change}. No sample is lost, but batches differ from the saved "
            f"job's. For identical batches pass global_batch_size={given}.",
            PenstockWarning,
            stacklevel=6,  # the caller of load_state_dict() or iter()
        )


def warn_of_other_ends(*, saved: bool, rest: int | None) -> None:
    """Warn that epochs end otherwise than in the saved job.

    saved: that job's drop_last. rest: samples that don't fill an epoch's last batch; None if
    unknown.
    """
    last = "last samples, fewer than a batch," if rest is None else f"last {rest} samples,"
    change = f"leaves out its {last} which the saved job delivered"
    if saved:
        change = f"ends with its {last} which the saved job left out"
    warnings.warn(
        f"State was saved with drop_last={saved}, this loader has drop_last={not saved}: the "
        f"batches before an epoch's end stay the same, but each epoch now {change}. For the same "
        f"epochs pass drop_last={saved}.",
        PenstockWarning,
        stacklevel=6,  # the caller of load_state_dict() or iter()
    )


def _checked_in_world(schedule: BatchSchedule, world: World) -> BatchSchedule:
    """Return the schedule. Raises PlanError for a batch smaller than the world."""
    if (least := schedule.smallest) < world.size:
        raise PlanError(
            f"global_batch_size={least} is smaller than the world of {world.size} "
            f"ranks, so some ranks would get no samples. Pass at least {world.size}."
        )
    return schedule


class LateWorld:
    """The world of one loader, and this rank's device: the user's, or those of the latest search.

    A trainer's launcher may start the process group between the loader's construction and its first
    batch, and may not give its child processes their rank before that (Lightning's doesn't).

    world: World(0, 1) until another is found. is_known: False while other processes exist whose
    ranks aren't known.
    """

    def __init__(
        self,
        given: World | None,
        *,
        data_parallel: tuple[int, int] | None = None,
        device: str | torch.device | int = "cpu",
    ) -> None:
        """Search for the world, unless the user passed it.

        data_parallel: rank and size among the replicas of a model, if several processes share one.
        Raises ConfigError if both are passed and for a device that this machine doesn't have, and
        PlanError for impossible replicas.
        """
        if not isinstance(given, World | None):
            raise ConfigError(f"world: got {given!r}, wanted World(rank, size) or None.")
        if given is not None and data_parallel is not None:
            raise ConfigError(
                "Got world= and data_parallel=, which both set the rank whose batches this process "
                "gets. Pass one of them."
            )
        self._is_given, self._device = given is not None, device
        self._replica = _checked_replica(data_parallel)
        self.is_known = self._was_found = True
        if given is None:
            try:
                found = World.find()
            except PlanError:
                found, self.is_known = None, False
            self._was_found = found is not None
            given = self._placed(found)
        self.world, self.device = given, self._device_in(given)

    def settle(self, *, has_begun: bool, must_be_known: bool) -> None:
        """Search for the world again. has_begun: the loader has delivered batches.

        Raises PlanError, if the world must be known, while it isn't and if it changed under a
        loader that has begun; and ConfigError for a device that this rank doesn't have.
        """
        if self._is_given:
            return
        try:
            found = World.find()
            now = self._placed(found)
            has_changed = (now.rank, now.size) != (self.world.rank, self.world.size)
            if has_changed and has_begun and self._was_found:
                raise PlanError(
                    f"This loader has begun as rank {self.world.rank} of {self.world.size}, but "
                    f"this process is now rank {now.rank} of {now.size}: samples would repeat or "
                    "go missing. Make a loader for the new world and load this one's state_dict() "
                    "into it, or pass world=."
                )
        except PlanError:
            if must_be_known:
                raise
            return
        if has_changed or not self.is_known or not has_begun:
            if now != self.world:
                self.device = self._device_in(now)
            self.world, self._was_found, self.is_known = now, found is not None, True

    def resolve(self, options: LoaderOptions) -> LoaderOptions:
        """Return a loader's options in this world, as far as it is known."""
        # The ranks of torch's process group exchange facts.
        is_of_group = not self._is_given or self.world.place is not None
        return options.at(self.world, device=self.device, agrees=is_of_group)

    def rejoined(self, world: World) -> LateWorld:
        """Return another world with this rank's device.

        world: if it has no place on a node, this process keeps its own.
        """
        before = self.world
        if world.local_size == 1 and before.local_size <= world.processes:
            world = replace(world, local_rank=before.local_rank, local_size=before.local_size)
        return LateWorld(world, device=self.device)

    def _device_in(self, world: World) -> torch.device:
        return parse_device(self._device, local_rank=world.local_rank or local_rank())

    def _placed(self, found: World | None) -> World:
        """Return the world that was found, with the replica that the user passed."""
        if self._replica is None:
            return World(0, 1) if found is None else found
        rank, size = self._replica
        return World(rank, size) if found is None else found.with_replicas(rank, size)


def _checked_replica(replica: object) -> tuple[int, int] | None:
    if replica is None:
        return None
    if not isinstance(replica, (tuple, list)) or len(replica) != 2:
        hint = ' For a torch DeviceMesh pass world=World.from_mesh(mesh["dp"]).'
        raise ConfigError(
            f"data_parallel: got {type(replica).__name__}, wanted (rank, size) of this process's "
            f"replica.{hint if hasattr(replica, 'mesh') else ''}"
        )
    world = World(*replica)  # checks both numbers
    return world.rank, world.size
