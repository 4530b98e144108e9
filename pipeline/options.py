"""Check a loader's arguments once, and turn them into frozen values for an engine.

`TorchOptions` and `PenstockOptions` hold the arguments as the user passed them: those that the
loader shares with torch's, and its own. `NativeOptions` are resolved from both for one world: batch
sizes per rank, the end of an epoch, the seed (the user's, or one drawn as torch does) and the
device. `torch_data` resolves those of torch datasets. Every error names the argument. Arguments
that contradict one another or the kind of dataset are errors before any work starts.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.cache import ConfigError, PenstockWarning, PlanError
from penstock.cache.base import READ_MODE, ReadMode
from penstock.pipeline.plan import MOST_ENTRIES, BatchSchedule

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from penstock.augment import Operation, Recipes
    from penstock.pipeline.plan import LoaderState, World

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
    if isinstance(value, Mapping):
        unknown = [key for key in value if not isinstance(key, str) and not _is_names(key)]
        if unknown or not value:
            raise ConfigError(
                f"augment: got {value!r}, wanted a list of operations, or such a list by field, or "
                'by a tuple of fields that share its draws: {"image": [...], ("left", "right"): '
                "[...]}."
            )
        return {
            key: _checked_operations(f"augment[{_shown_key(key)}]", each)
            for key, each in value.items()
        }
    return None if value is None else _checked_operations("augment", value)


def _is_names(key: object) -> bool:
    return isinstance(key, tuple) and bool(key) and all(isinstance(name, str) for name in key)


def _shown_key(key: str | tuple[str, ...]) -> str:
    return f'"{key}"' if isinstance(key, str) else str(key)


def _checked_operations(name: str, value: Any) -> tuple[Operation, ...]:
    from penstock.augment import Operation

    wanted = (
        "wanted operations in a list or tuple, such as imagenet_train(224) or [Resize(256), "
        "Normalize()]"
    )
    if isinstance(value, Operation):
        raise ConfigError(f"{name}: got the operation {value!r} alone, {wanted}. Put it in [...].")
    own = (
        "To use a function of your own, put it into the list as Map(function, fields=...), which "
        "runs before images are decoded, or as Apply(function), if it builds DALI nodes; or call "
        "it in a torch dataset's __getitem__, or on the batch in your loop"
    )
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ConfigError(f"{name}: got {value!r}, {wanted}. {own}.")
    operations = tuple(value)
    for place, operation in enumerate(operations):
        if not isinstance(operation, Operation):
            raise ConfigError(f"{name}: got {operation!r} at place {place}, {wanted}. {own}.")
    return operations


# torch's arguments that choose or build batches. A native dataset's order comes from its plan.
_REFUSED_OF_TORCH = {
    "sampler": "the order comes from the plan; pass shuffle= and seed=",
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
                "does): see docs/trainers.md."
            )


def refuse_with_seed(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that order samples in another way than the seed."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"{name if '=' in name else name + '='} and seed= contradict each other: with a "
                "seed, Penstock orders the samples and shares them out. Drop seed= to keep torch's "
                "order, or drop the other."
            )


GlobalBatch = int | Mapping[int, int]
"""Samples of a global batch, or such numbers by the job's sample from which they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples. schedule: of global batches. ranks: the size of the world."""

    schedule: BatchSchedule
    ranks: int

    @property
    def global_batch(self) -> int:
        """The first size of a batch over all ranks."""
        return self.schedule.size

    @property
    def per_rank(self) -> int:
        """The size of the largest rank's largest batch; the other ranks have at most one sample
        less."""
        return self.share(self.schedule.largest)

    def share(self, global_batch: int) -> int:
        """Return the largest rank's part of a global batch."""
        return -(-global_batch // self.ranks)


def batch_sizes(
    batch_size: object, global_batch_size: GlobalBatch | None, world: World
) -> BatchSizes:
    """Return the batch sizes that the user's arguments describe.

    Raises ConfigError for arguments that contradict each other, and PlanError for a global batch
    smaller than the world.
    """
    if global_batch_size is not None:
        if batch_size != 1:
            raise ConfigError(
                f"Got batch_size={batch_size!r} and global_batch_size={global_batch_size!r}: "
                "batch_size is per rank, global_batch_size over all ranks. Pass one of them."
            )
        return sizes_in_world(batch_schedule(global_batch_size), world)
    if batch_size is None:
        raise ConfigError(
            "batch_size=None (no batching) isn't possible with a native dataset: DALI decodes "
            "batches. Pass batch_size=1 and take the first element."
        )
    count = check_count("batch_size", batch_size, least=1)
    return BatchSizes(schedule=BatchSchedule.constant(count * world.size), ranks=world.size)


def sizes_in_world(schedule: BatchSchedule, world: World) -> BatchSizes:
    """Return the sizes of a schedule's batches in a world. Raises PlanError for a batch below the
    world."""
    if (least := schedule.smallest) < world.size:
        raise PlanError(
            f"global_batch_size={least} is smaller than the world of {world.size} "
            f"ranks, so some ranks would get no samples. Pass at least {world.size}."
        )
    return BatchSizes(schedule=schedule, ranks=world.size)


def batch_schedule(global_batch_size: GlobalBatch) -> BatchSchedule:
    """Return the schedule of the user's number, or of numbers by the sample from which they hold.

    Raises ConfigError for numbers that descend or are out of range.
    """
    if not isinstance(global_batch_size, Mapping):
        return BatchSchedule.constant(check_count("global_batch_size", global_batch_size, least=1))
    given = dict(global_batch_size)
    wanted = "global_batch_size: wanted sizes by the sample from which they hold, {0: 8192, ...}"
    if not 0 < len(given) <= MOST_ENTRIES:
        raise ConfigError(f"{wanted}, 1 to {MOST_ENTRIES} of them; got {len(given)}.")
    key = "global_batch_size: the sample from which a size holds"
    sizes = {
        check_count(key, first, least=0): check_count(
            f"global_batch_size[{first!r}]", size, least=1
        )
        for first, size in given.items()
    }
    firsts = list(sizes)
    if firsts[0] != 0:
        raise ConfigError(f"{wanted}: the first one holds from sample 0, got {firsts[0]:,}.")
    for before, after in itertools.pairwise(firsts):
        if after <= before:
            raise ConfigError(
                f"{wanted}, in ascending order: got {after:,} after {before:,}. Samples are "
                "counted from the job's start, over all epochs."
            )
    return BatchSchedule.of(sizes)


def check_by_tokens(
    batch_size: object, global_batch_size: GlobalBatch | None, *, pad: Literal["mask"] | None
) -> None:
    """Raise ConfigError for arguments that set batch sizes otherwise than batch_tokens=."""
    for name, given in (
        ("batch_size", None if batch_size in (1, None) else batch_size),
        ("global_batch_size", global_batch_size),
        ("pad", pad),
    ):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSeed:
    """A loader's seed, as passed, or as drawn from torch's generator when the loader was made.

    drawn: it differs between ranks, so it orders samples only in a world of one rank.
    """

    given: int | None
    drawn: int | None = None

    @classmethod
    def choose(
        cls, given: int | None, generator: torch.Generator | None, *, draws: bool
    ) -> LoaderSeed:
        """Return the user's seed; without one, draw it.

        draws: False draws none, because nothing depends on it.
        """
        if given is not None or not draws:
            return cls(given=given)
        import torch

        drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
        return cls(given=given, drawn=int(drawn.item()))

    def in_world(self, world: World, *, draws: bool) -> int:
        """Return the seed for a world. draws: False returns 0, because nothing depends on it.

        Raises ConfigError if several ranks would each draw their own.
        """
        if self.given is not None:
            return int(self.given)
        if not draws:
            return 0
        if self.drawn is None or world.size > 1:
            raise ConfigError(
                f"shuffle=True on {world.size} ranks needs seed=: without it, each rank would draw "
                "its own order, and samples would repeat and go missing. Pass the same seed on "
                "every rank."
            )
        return self.drawn


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

    Neither a default nor a state overrides a setting (docs/order.md explains the order).

    lanes: the fixed shares of the shards that every global batch reads from, at least 1; None
        follows the dataset and the batch.
    window: shards that each lane shuffles together, at least 1 (units of decoding, if shards
        consist of several); None follows the dataset and the batch.
    reshuffle: the share of the shards, between 0 and 1, that change places in each epoch.
    slots: how ranks are assigned to parts of a global batch: "data" follows the contents of the
        nodes' caches, "rank" the ranks' numbers (docs/cluster.md). A warm-up ignores it.

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
    given: dict[str, int | float] = {}
    if order.lanes is not None:
        given["lanes"] = order.lanes
    if order.window is not None:
        given["window"] = order.window
    if order.reshuffle:
        given["reshuffle"] = float(order.reshuffle)
    return given


def check_shuffles(order: Order, *, shuffle: bool) -> None:
    """Raise ConfigError for settings of a shuffled order if the order isn't shuffled."""
    for name, value in () if shuffle else shuffle_settings(order).items():
        raise ConfigError(
            f"{name}={value} has no meaning with shuffle=False: samples come in index order. "
            "Drop it, or pass shuffle=True."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """torch's arguments about workers and pinning, under torch's names."""

    num_workers: int = 0
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True

    @classmethod
    def of(cls, options: TorchOptions) -> WorkerOptions:
        """Return the options, without those that mean nothing without workers.

        torch's constructor rejects these, but ignores them in a loader's attributes.
        """
        values = {field.name: getattr(options, field.name) for field in fields(cls)}
        if options.num_workers == 0:
            values.update(
                multiprocessing_context=None, prefetch_factor=None, persistent_workers=False
            )
        return cls(**values)

    def arguments(self) -> dict[str, Any]:
        """Return the options as keyword arguments for torch's constructor."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions(WorkerOptions):
    """The arguments of torch's DataLoader except its dataset, as the user passed them."""

    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    collate_fn: Callable[..., Any] | None = None
    drop_last: bool = False
    generator: torch.Generator | None = None

    def check_native(self) -> None:
        """Raise ConfigError for arguments that a native dataset can't use, and for wrong numbers.

        For a torch dataset, torch's own constructor checks them.
        """
        refuse_torch_arguments(self.arguments())
        check_counts(num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)
        check_timeout(self.timeout)

    def check_planned(self) -> None:
        """Raise ConfigError for arguments that order samples in another way than Penstock's
        plan."""
        refuse_with_seed(
            {
                "sampler": self.sampler,
                "batch_sampler": self.batch_sampler,
                "generator": self.generator,
                "in_order=False": None if self.in_order else True,
            }
        )


ResidentMode = bool | Literal["auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PenstockOptions:
    """The arguments of DataLoader that torch's doesn't have, except the world, as the user passed
    them.

    Raises ConfigError for a value that fits no dataset.
    """

    seed: int | None = None
    augment: Recipes | None = None
    device: str | torch.device | int = "cpu"
    global_batch_size: GlobalBatch | None = None
    pad: Literal["mask"] | None = None
    max_bad: float | None = None
    deterministic: bool = False
    order: Order = DEFAULT_ORDER
    read: ReadMode = READ_MODE
    resident: ResidentMode = False
    as_dict: bool = False
    batch_tokens: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        seed = self.seed
        if seed is not None and (not isinstance(seed, Integral) or isinstance(seed, bool)):
            raise ConfigError(f"seed must be an integer, got {seed!r}.")
        if not isinstance(self.order, Order):
            raise ConfigError(
                f"order must be an Order, such as Order(lanes=8), got {self.order!r}."
            )
        check_tokens(self.batch_tokens)
        check_choice("pad", self.pad, (None, "mask"))
        check_choice("read", self.read, get_args(ReadMode))
        if not isinstance(self.resident, bool) and self.resident != "auto":  # not 1, equal to True
            raise ConfigError(f"resident must be True, False or 'auto', got {self.resident!r}.")
        if self.max_bad is not None:
            check_share("max_bad", self.max_bad)
        check_choice("as_dict", self.as_dict, (True, False))


MAX_BAD = 0.001
"""The share of a dataset's samples that may be bad in an epoch, unless the user sets another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """The checked arguments of a native loader, resolved for one world.

    given_seed: the seed that the user passed, which a state must equal; None if they passed none.
    batch_is_default: the user passed no batch size, so a state may set it. threads: decode threads,
    0 for this rank's share of the cores. depth: batches in DALI. agrees: the world is that of
    torch's process group, so its ranks compare plans and count bad samples together. resident:
    decoded images stay in memory. pin_memory: of batches on the CPU. as_dict: batches are dicts by
    field, not tuples. batch_tokens: the most tokens of a rank's batch, whose samples then vary in
    number, and sizes mean nothing; else None.
    """

    world: World
    order: Order
    sizes: BatchSizes
    seed: int
    given_seed: int | None
    shuffle: bool
    drop_last: bool
    pad: bool
    augment: Recipes | None
    device: torch.device
    deterministic: bool
    threads: int
    depth: int
    timeout_s: float
    read: ReadMode
    batch_is_default: bool = False
    max_bad: float = MAX_BAD
    agrees: bool = False
    resident: ResidentMode = False
    pin_memory: bool = False
    as_dict: bool = False
    batch_tokens: int | Mapping[str, int] | None = None

    @classmethod
    def of(
        cls,
        torch_options: TorchOptions,
        own: PenstockOptions,
        *,
        seed: LoaderSeed,
        world: World,
        agrees: bool,
        device: torch.device,
    ) -> NativeOptions:
        """Resolve the options from both kinds of arguments. own: Penstock's.

        Raises ConfigError and PlanError for arguments that don't fit a native dataset or the world.
        """
        torch_options.check_native()
        shuffle, drop_last = bool(torch_options.shuffle), bool(torch_options.drop_last)
        if own.batch_tokens is None:
            check_ends(world, drop_last=drop_last, pad=own.pad)
        else:
            check_by_tokens(torch_options.batch_size, own.global_batch_size, pad=own.pad)
        return cls(
            world=world,
            sizes=batch_sizes(torch_options.batch_size, own.global_batch_size, world),
            seed=seed.in_world(world, draws=shuffle),
            given_seed=own.seed,
            shuffle=shuffle,
            drop_last=drop_last,
            pad=own.pad is not None,
            augment=own.augment,
            device=device,
            deterministic=own.deterministic,
            threads=torch_options.num_workers,
            depth=torch_options.prefetch_factor or (2 if shuffle else 1),
            timeout_s=float(torch_options.timeout),
            read=own.read,
            order=own.order,
            batch_is_default=torch_options.batch_size == 1 and own.global_batch_size is None,
            max_bad=MAX_BAD if own.max_bad is None else own.max_bad,
            agrees=agrees,
            resident=own.resident,
            pin_memory=bool(torch_options.pin_memory),
            as_dict=own.as_dict,
            batch_tokens=own.batch_tokens,
        )

    def wanted(self) -> dict[str, int | float]:
        """Return the settings by name that the user passed, which a state must equal."""
        seed = {} if self.given_seed is None else {"seed": self.given_seed}
        return {"shuffle": self.shuffle, **seed, **shuffle_settings(self.order)}

    def resumed(self, state: LoaderState, *, warns: bool = True) -> NativeOptions:
        """Return the options with which to continue from a state.

        They have the state's seed and its batches so far. From the state's place on, the user's
        batch sizes count, if any. warns: warn of differences from the saved job from here on.
        Raises PlanError if a batch of the state is smaller than the world.
        """
        if state.plan.buckets is not None:
            return replace(self, seed=state.plan.seed)
        # Imported here, because a job that starts without a state doesn't need it.
        from penstock.pipeline.plan import resumed_schedule

        wanted = None if self.batch_is_default else self.sizes.schedule
        schedule = resumed_schedule(state, wanted, drop_last=self.drop_last)
        if warns:
            planned = resumed_schedule(state, None, drop_last=self.drop_last)
            self._warn_of_other_batches(planned, schedule)
            self._warn_of_other_ends(state, global_batch=schedule.size)
        return replace(self, seed=state.plan.seed, sizes=sizes_in_world(schedule, self.world))

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
            stacklevel=4,
        )

    def _warn_of_other_ends(self, state: LoaderState, *, global_batch: int) -> None:
        rest = state.samples % global_batch
        if not rest or self.drop_last == state.drop_last:
            return
        change = (
            f"each epoch now leaves out its last {rest} samples, which the saved job delivered"
            if self.drop_last
            else f"each epoch now ends with a batch of {rest} samples, which the saved job left out"
        )
        warnings.warn(
            f"State was saved with drop_last={state.drop_last}, this loader has "
            f"drop_last={self.drop_last}: the batches before an epoch's end stay the same, but "
            f"{change}. For the same epochs pass drop_last={state.drop_last}.",
            PenstockWarning,
            stacklevel=4,
        )
