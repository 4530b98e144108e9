"""Check a loader's arguments once and turn them into frozen values for an engine.

`TorchOptions` and `PenstockOptions` hold the arguments as the user gave them: those that the
loader shares with torch's, and its own. `NativeOptions` and `TorchDataOptions` are resolved from
both for one world: batch sizes per rank, the end of an epoch, the seed (the user's, or one drawn
as torch does) and the device. Every error names the argument, and arguments that contradict one
another or the kind of dataset are refused before any work starts.
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
"""JSON holds no larger number exactly, so a state couldn't."""


def check_count(name: str, value: object, *, least: int) -> int:
    """The value as an int; raises ConfigError unless it is an integer of at least `least` that a
    state can hold."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    if int(value) > MOST_COUNT:
        raise ConfigError(f"{name} must be an integer of at most 2^53 - 1, got {value!r}.")
    return int(value)


def check_counts(**values: int | None) -> None:
    """Raise ConfigError unless each is None or an integer ≥ 1 (num_workers: ≥ 0)."""
    for name, value in values.items():
        if value is not None:
            check_count(name, value, least=0 if name in ("num_workers",) else 1)


def check_share(name: str, value: object) -> float:
    """The value as a float; raises ConfigError unless it is a share in [0, 1]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a share between 0 and 1, got {value!r}.")
    return float(value)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigError unless value is one of the choices."""
    if value not in choices:
        wanted = " or ".join(map(repr, choices))
        raise ConfigError(f"{name} must be {wanted}, got {value!r}.")


def check_tokens(value: object) -> None:
    """Raise ConfigError unless it is None, a number of tokens, or such a number for one field."""
    told = value
    if isinstance(told, Mapping) and len(told) == 1:
        ((field, told),) = told.items()
        if not isinstance(field, str):
            told = value
    if told is not None and (type(told) is not int or told < 1):
        raise ConfigError(
            f"batch_tokens: got {value!r}, wanted how many tokens a rank's batch may have, such as "
            '8192, or {"tokens": 8192}.'
        )


def check_resident(value: object) -> None:
    """Raise ConfigError unless it is True, False or "auto"; 1 isn't, though equal to True."""
    if not isinstance(value, bool) and value != "auto":
        raise ConfigError(f"resident must be True, False or 'auto', got {value!r}.")


def check_timeout(value: object) -> None:
    """Raise ConfigError unless it is a number of seconds ≥ 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"timeout must be seconds ≥ 0 (0 stands for 300), got {value!r}.")


def check_epoch(value: object) -> None:
    """Raise ConfigError unless it is an integer ≥ 0."""
    check_count("epoch", value, least=0)


def checked_augment(value: Any) -> Recipes | None:
    """The operations as a tuple, by field where they were given so, or None; raises ConfigError for
    anything else.

    Whether they fit one another and the images is checked later.
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


def _checked_operations(what: str, value: Any) -> tuple[Operation, ...]:
    from penstock.augment import Operation

    wanted = (
        "wanted operations in a list or tuple, such as imagenet_train(224) or [Resize(256), "
        "Normalize()]"
    )
    if isinstance(value, get_args(Operation)):
        raise ConfigError(f"{what}: got the operation {value!r} alone, {wanted}. Put it in [...].")
    own = (
        "A function of yours goes into the list as Map(function, fields=...), before images are "
        "decoded; into a torch dataset's __getitem__; onto the batch in your loop; or, made of "
        "DALI's nodes, into the list as Apply(function)"
    )
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ConfigError(f"{what}: got {value!r}, {wanted}. {own}.")
    operations = tuple(value)
    for place, operation in enumerate(operations):
        if not isinstance(operation, get_args(Operation)):
            raise ConfigError(f"{what}: got {operation!r} at place {place}, {wanted}. {own}.")
    return operations


def check_seed(value: object) -> None:
    """Raise ConfigError unless it is an integer or None."""
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise ConfigError(f"seed must be an integer, got {value!r}.")


# torch's arguments that choose or build batches: a native dataset's order comes from its plan.
_REFUSED_OF_TORCH = {
    "sampler": "the order comes from the plan; pass shuffle= and seed=",
    "batch_sampler": "the order comes from the plan; pass batch_size=, shuffle= and seed=",
    "collate_fn": "batches leave DALI as tensors already; put per-sample work into augment=, or do "
    "it on the batch in your loop",
    "worker_init_fn": "there are no worker processes; draws are keyed by (seed, epoch, sample id)",
    "multiprocessing_context": "there are no worker processes; drop it",
}


def no_worker_processes(worker: int) -> None:
    """Stands where others look for a native loader's worker_init_fn.

    There is no worker to seed, so that who sets one where there is none (Lightning) needn't.
    """


def refuse_torch_arguments(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for torch's arguments that a native dataset has no use for."""
    for name, remedy in _REFUSED_OF_TORCH.items():
        if arguments.get(name) not in (None, no_worker_processes):
            raise ConfigError(
                f"{name}={arguments[name]!r} can't be used with a native dataset: {remedy}. "
                "If a framework passed it, it rebuilt this loader (Lightning's predict() does): "
                "see docs/trainers.md."
            )


def refuse_native_arguments(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that only native datasets have a use for."""
    for name, value in arguments.items():
        if value:
            raise ConfigError(
                f"{name if '=' in name else name + '='} works on native datasets "
                "(penstock.Dataset), and this is a torch dataset. Drop it, or point "
                "penstock.Dataset at the files."
            )


def refuse_with_seed(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for what would order samples beside the seed."""
    for name, value in arguments.items():
        if value is not None:
            raise ConfigError(
                f"{name if '=' in name else name + '='} and seed= contradict each other: with a "
                "seed Penstock orders and shares out the samples itself. Drop seed= to keep "
                "torch's order, or drop the other."
            )


def refuse_without_plan(arguments: dict[str, Any], *, is_map: bool) -> None:
    """Raise ConfigError for what only Penstock's own order can honour."""
    for name, value in arguments.items():
        if value is not None:
            remedy = (
                f"Pass seed= as well, or drop {name}=."
                if is_map
                else "An iterable dataset brings its own order: drop it."
            )
            raise ConfigError(f"{name}={value!r} needs Penstock's order of the samples. {remedy}")


GlobalBatch = int | Mapping[int, int]
"""Samples of a global batch, or such numbers by the job's sample from which they hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples. schedule: of global batches. ranks: of the world."""

    schedule: BatchSchedule
    ranks: int

    @property
    def global_batch(self) -> int:
        """Of all ranks, to begin with."""
        return self.schedule.size

    @property
    def per_rank(self) -> int:
        """Of the largest rank, of all its batches; the other ranks have at most one less."""
        return self.share(self.schedule.largest)

    def share(self, global_batch: int) -> int:
        """The largest rank's part of a global batch."""
        return -(-global_batch // self.ranks)


def batch_sizes(
    batch_size: object, global_batch_size: GlobalBatch | None, world: World
) -> BatchSizes:
    """The batch sizes by what the user gave.

    Raises ConfigError, and PlanError for a global batch below the world.
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
    """The sizes of a schedule's batches in a world. Raises PlanError for one below the world."""
    if (least := schedule.smallest) < world.size:
        raise PlanError(
            f"global_batch_size={least} is smaller than the world of {world.size} "
            f"ranks, so some ranks would get nothing. Pass at least {world.size}."
        )
    return BatchSizes(schedule=schedule, ranks=world.size)


def batch_schedule(global_batch_size: GlobalBatch) -> BatchSchedule:
    """The schedule by what the user gave: a number, or numbers by the sample from which they hold.

    Raises ConfigError for what goes backwards or can't be.
    """
    if not isinstance(global_batch_size, Mapping):
        return BatchSchedule.constant(check_count("global_batch_size", global_batch_size, least=1))
    given = dict(global_batch_size)
    wanted = "global_batch_size: wanted sizes by the sample from which they hold, {0: 8192, ...}"
    if not 0 < len(given) <= MOST_ENTRIES:
        raise ConfigError(f"{wanted}, 1 to {MOST_ENTRIES} of them; got {len(given)}.")
    sizes = {
        check_count(
            "global_batch_size: the sample from which a size holds", first, least=0
        ): check_count(f"global_batch_size[{first!r}]", size, least=1)
        for first, size in given.items()
    }
    firsts = list(sizes)
    if firsts[0] != 0:
        raise ConfigError(f"{wanted}: the first one holds from sample 0, got {firsts[0]:,}.")
    for before, after in itertools.pairwise(firsts):
        if after <= before:
            raise ConfigError(
                f"{wanted}, in ascending order: got {after:,} behind {before:,}. Samples are "
                "counted from the job's start, over all epochs."
            )
    return BatchSchedule.of(sizes)


def check_by_tokens(
    batch_size: object, global_batch_size: GlobalBatch | None, *, pad: Literal["mask"] | None
) -> None:
    """Raise ConfigError for what can't go with batch_tokens=, which says how large batches are."""
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
    """Raise ConfigError unless every rank's epoch ends alike: unequal ranks hang collectives."""
    if pad is not None and drop_last:
        raise ConfigError(
            'Got drop_last=True and pad="mask": drop what does not fill a batch, or pad it. Pass '
            "one of them (drop_last for training, pad for evaluation)."
        )
    if world.size > 1 and pad is None and not drop_last:
        raise ConfigError(
            f"With {world.size} ranks the end of an epoch must be the same on each: pass "
            'drop_last=True (training), or pad="mask" (evaluation: each sample exactly once, and '
            "a `valid` mask as the last element of every batch)."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSeed:
    """A loader's seed, as given or as drawn from torch's generator when the loader was made.

    drawn: each rank has its own, so it orders samples in a world of one rank only.
    """

    given: int | None
    drawn: int | None = None

    @classmethod
    def choose(
        cls, given: int | None, generator: torch.Generator | None, *, draws: bool
    ) -> LoaderSeed:
        """The user's seed; without one it is drawn, if anything follows from it.

        draws: whether anything does.
        """
        if given is not None or not draws:
            return cls(given=given)
        import torch

        drawn = torch.empty((), dtype=torch.int64).random_(generator=generator)
        return cls(given=given, drawn=int(drawn.item()))

    def in_world(self, world: World, *, draws: bool) -> int:
        """The seed for a world. draws: whether anything follows from it; otherwise it is 0.

        Raises ConfigError where several ranks would each draw their own.
        """
        if self.given is not None:
            return int(self.given)
        if not draws:
            return 0
        if self.drawn is None or world.size > 1:
            raise ConfigError(
                f"shuffle=True on {world.size} ranks needs seed=: without it each rank would draw "
                "its own order, and samples would repeat and go missing. Pass the same seed on "
                "every rank."
            )
        return self.drawn


_LOG = logging.getLogger("penstock")


def parse_device(device: object, *, local_rank: int = 0) -> torch.device:
    """A torch device of type cpu or cuda that exists here. Raises ConfigError.

    local_rank: this process's place on its node; "cuda" without a number is its own device.
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
            f'device={device!r}, but torch sees no CUDA device here. Pass device="cpu", or install '
            "a CUDA build of torch and check `nvidia-smi`."
        )
    index = _own_device(local_rank) if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}, but this machine has {torch.cuda.device_count()} CUDA device(s). "
            'Pass "cuda" for the current one.'
        )
    return torch.device("cuda", index)


def _own_device(local_rank: int) -> int:
    """torch's current device; that of the local rank where nobody has chosen one yet: else every
    rank of a node would fill the first GPU."""
    import torch

    current, count = torch.cuda.current_device(), torch.cuda.device_count()
    if current or not local_rank or count == 1:  # one is visible: the launcher gave each its own
        return current
    if local_rank < count:
        _LOG.info("device='cuda' is cuda:%d, as this is local rank %d.", local_rank, local_rank)
        return local_rank
    warnings.warn(
        f"device='cuda' is cuda:{current}, torch's current device: this is local rank "
        f"{local_rank}, and {count} devices are visible, so others may use the same. Call "
        "torch.cuda.set_device first, or pass device='cuda:N'.",
        PenstockWarning,
        stacklevel=4,
    )
    return current


SlotsMode = Literal["data", "rank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Settings of the order in which a job reads its samples, for `DataLoader(order=…)` and `warm`.

    Neither a default nor a state overrules what is set here (docs/order.md explains the order).

    lanes: the fixed shares of the shards that every global batch reads from, at least 1; None
        follows the dataset and the batch.
    window: shards that each lane shuffles together, at least 1 (units of decoding, where shards
        consist of several); None follows the dataset and the batch.
    reshuffle: the share of the shards, between 0 and 1, that change places in each epoch.
    slots: which rank reads which part of a global batch: "data" follows what the nodes' caches
        hold, "rank" the ranks' numbers (docs/cluster.md). A warm-up has no use for it.

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
    """Raise ConfigError for settings that would shuffle where the order isn't shuffled."""
    for name, value in () if shuffle else shuffle_settings(order).items():
        raise ConfigError(
            f"{name}={value} has no meaning with shuffle=False: samples come in index order. "
            "Drop it, or pass shuffle=True."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """What torch's DataLoader takes beside its dataset, as the user gave it, by torch's names."""

    batch_size: int | None = 1
    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    num_workers: int = 0
    collate_fn: Callable[..., Any] | None = None
    pin_memory: bool = False
    drop_last: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    generator: torch.Generator | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory_device: str = ""
    in_order: bool = True

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments for torch's constructor."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check_native(self) -> None:
        """Raise ConfigError for what a native dataset has no use for, and for wrong numbers.

        torch's own constructor checks them for a torch dataset.
        """
        refuse_torch_arguments(self.arguments())
        check_counts(num_workers=self.num_workers, prefetch_factor=self.prefetch_factor)
        check_timeout(self.timeout)

    def check_planned(self) -> None:
        """Raise ConfigError for what would order samples beside Penstock's own plan."""
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
    """What a DataLoader takes beyond torch's arguments, but for the world, as the user gave it.

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
        check_seed(self.seed)
        if not isinstance(self.order, Order):
            raise ConfigError(
                f"order must be an Order, such as Order(lanes=8), got {self.order!r}."
            )
        check_tokens(self.batch_tokens)
        check_choice("pad", self.pad, (None, "mask"))
        check_choice("read", self.read, get_args(ReadMode))
        check_resident(self.resident)
        if self.max_bad is not None:
            check_share("max_bad", self.max_bad)
        check_choice("as_dict", self.as_dict, (True, False))

    def check_torch_dataset(self) -> None:
        """Raise ConfigError for what only native datasets have a use for."""
        from penstock.augment import Map, Pad, SanitizeBoxes, Unpack

        operations = () if isinstance(self.augment, Mapping) else self.augment or ()
        of_fields = [op for op in operations if isinstance(op, (Map, Pad, SanitizeBoxes, Unpack))]
        refuse_native_arguments(
            {
                "augment= by field": isinstance(self.augment, Mapping),
                **{f"{type(op).__name__} in augment=": True for op in of_fields},
                "deterministic": self.deterministic and self.augment is None,
                "read": self.read != READ_MODE,
                "resident=True": self.resident is True,
                "as_dict=True": self.as_dict is True,
                "batch_tokens": self.batch_tokens is not None,
                'slots="rank"': self.order.slots != "data",
                "global_batch_size= by samples": isinstance(self.global_batch_size, Mapping),
            }
        )

    def check_unplanned(self, *, is_map: bool) -> None:
        """Raise ConfigError for what only Penstock's own plan can honour."""
        order = shuffle_settings(self.order)
        refuse_without_plan(
            {
                "lanes": order.get("lanes"),
                "window": order.get("window"),
                "pad": self.pad,
                "reshuffle": order.get("reshuffle"),
                "global_batch_size": self.global_batch_size,
                "max_bad": self.max_bad if is_map else None,
            },
            is_map=is_map,
        )
        if self.max_bad is not None:
            raise ConfigError(
                f"max_bad={self.max_bad!r} lets others stand in for bad samples, and those of an "
                "iterable dataset have no numbers to find others by: drop max_bad=, and let its "
                "__iter__ leave out what it can't read."
            )


MAX_BAD = 0.001
"""Share of a dataset's samples that may be bad in an epoch, unless the user says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """What the user asked of a native loader, checked and worked out for one world.

    given_seed: the seed that the user passed, which a state has to equal; None where they passed
    none. batch_is_default: nobody gave a batch size, so a state may.
    threads: decode threads, 0 for this rank's share of the cores. depth: batches in DALI.
    agrees: the world is that of torch's process group, so its ranks compare plans and count bad
    samples together. resident: whether decoded images stay in memory. pin_memory: of what is
    handed out on the CPU. as_dict: batches are dicts by field, not tuples. batch_tokens: of a
    rank's batch at most, whose samples then vary in number, and sizes mean nothing; else None.
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
        """The options by both kinds of arguments. own: Penstock's.

        Raises ConfigError and PlanError for what doesn't fit a native dataset or the world.
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
        """Return the settings by name that the user passed, which a state has to equal."""
        seed = {} if self.given_seed is None else {"seed": self.given_seed}
        return {"shuffle": self.shuffle, **seed, **shuffle_settings(self.order)}

    def resumed(self, state: LoaderState, *, warns: bool = True) -> NativeOptions:
        """The options to go on with from a state: its seed, and its batches, but that from its
        place on those count that the user gave, if any.

        warns: of what differs from the saved job from here on. Raises PlanError for batches of the
        state's below the world.
        """
        if state.plan.buckets is not None:
            return replace(self, seed=state.plan.seed)
        # A job's first start needs none of it.
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
            f"The global batch {change}: no sample is lost, but "
            "batches differ from the saved job's. For identical ones pass "
            f"global_batch_size={given}.",
            PenstockWarning,
            stacklevel=4,
        )

    def _warn_of_other_ends(self, state: LoaderState, *, global_batch: int) -> None:
        rest = state.samples % global_batch
        if not rest or self.drop_last == state.drop_last:
            return
        change = (
            f"each epoch now leaves out its last {rest} samples, which the saved job handed out"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """torch's arguments about workers and pinning, under torch's names."""

    num_workers: int
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory_device: str
    in_order: bool

    @classmethod
    def of(cls, options: TorchOptions) -> WorkerOptions:
        """The options by all of torch's arguments, but for what means nothing without workers.

        torch's constructor refuses that; in attributes of a loader torch ignores it.
        """
        values = {field.name: getattr(options, field.name) for field in fields(cls)}
        if options.num_workers == 0:
            values.update(
                multiprocessing_context=None, prefetch_factor=None, persistent_workers=False
            )
        return cls(**values)

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments for torch's constructor."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchDataOptions:
    """What a loader over a torch dataset works by, worked out for one world.

    torch_options: as the user gave them, but for attributes that were set since. own: Penstock's.
    indices: the sampler or batch sampler that torch's constructor made or took; None
    for an iterable dataset. batch_size: of this rank's largest batch; None where torch batches
    nothing, or by a batch sampler. is_batched: whether samples come in batches. draw_seed: of
    augmentation, else None. agrees: the world is that of torch's process group.
    """

    torch_options: TorchOptions
    own: PenstockOptions
    indices: Any
    batch_size: int | None
    is_batched: bool
    workers: WorkerOptions
    draw_seed: int | None
    world: World
    agrees: bool
    device: torch.device

    @property
    def seed(self) -> int | None:
        """The seed of the order and of each sample; None leaves randomness to torch."""
        return None if self.own.seed is None else int(self.own.seed)


def planned_batch_size(
    torch_options: TorchOptions, own: PenstockOptions, world: World
) -> int | None:
    """This rank's batch size in Penstock's order of a torch dataset; None for single samples.

    Raises ConfigError and PlanError for sizes that don't fit it or the world.
    """
    check_ends(world, drop_last=bool(torch_options.drop_last), pad=own.pad)
    if torch_options.batch_size is None:
        if own.global_batch_size is not None or own.pad is not None:
            raise ConfigError(
                "batch_size=None (single samples) allows no global_batch_size= and no pad=."
            )
        return None
    return batch_sizes(torch_options.batch_size, own.global_batch_size, world).per_rank


def draw_seed(
    own: PenstockOptions, seed: LoaderSeed, world: World, *, is_sharded: bool
) -> int | None:
    """The seed of augmentation in a world; None where nothing is augmented.

    is_sharded: a sampler shares the samples out, so each rank has crops, and a state, of its own.
    Raises ConfigError where several ranks would draw their own crops of the same samples.
    """
    if own.augment is None:
        return None
    if seed.given is None and seed.drawn is not None and is_sharded:
        return seed.drawn
    if seed.given is None and world.size > 1:
        raise ConfigError(
            f"augment= on {world.size} ranks needs seed=, the same on every rank: then Penstock "
            "orders the samples and shares them out, so leave sampler= out. Or pass a sampler that "
            "shares them out, such as torch's DistributedSampler, and no seed=."
        )
    return seed.in_world(world, draws=True)
