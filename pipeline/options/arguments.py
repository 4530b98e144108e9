"""The loader's arguments, checked once and turned into values. Errors name the argument."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, get_args

from penstock.cache.errors import ConfigError, PenstockWarning, PlanError

if TYPE_CHECKING:
    import torch

    from penstock.augment import Operation
    from penstock.pipeline.plan.world import World

_LOG = logging.getLogger("penstock")

# torch's arguments that choose or build batches: a native dataset's order comes from its plan.
_REFUSED = {
    "sampler": "the order comes from the plan; pass shuffle= and seed=",
    "batch_sampler": "the order comes from the plan; pass batch_size=, shuffle= and seed=",
    "collate_fn": "batches leave DALI as tensors already; put per-sample work into augment=, or do "
    "it on the batch in your loop",
    "worker_init_fn": "there are no worker processes; draws are keyed by (seed, epoch, sample id)",
    "multiprocessing_context": "there are no worker processes; drop it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """Batch sizes in samples. per_rank: of the largest rank; the others have at most one less."""

    global_batch: int
    per_rank: int


def no_worker_processes(worker: int) -> None:
    """Stands where others look for a native loader's worker_init_fn.

    There is no worker to seed, so that who sets one where there is none (Lightning) needn't.
    """


def refuse_foreign(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for torch's arguments that a native dataset has no use for."""
    for name, remedy in _REFUSED.items():
        if arguments.get(name) not in (None, no_worker_processes):
            raise ConfigError(
                f"{name}={arguments[name]!r} can't be used with a native dataset: {remedy}. "
                "If a framework passed it, it rebuilt this loader (Lightning's predict() does): "
                "see docs/trainers.md."
            )


def refuse_native(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for arguments that only native datasets have a use for."""
    for name, value in arguments.items():
        if value:
            raise ConfigError(
                f"{name if '=' in name else name + '='} works on native datasets "
                "(readers.Dataset), and this is a torch dataset. Drop it, or point readers.Dataset "
                "at the files."
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


def batch_sizes(batch_size: object, global_batch_size: int | None, world: World) -> BatchSizes:
    """From what the user gave. Raises ConfigError, and PlanError for a batch below the world."""
    if global_batch_size is not None:
        if batch_size != 1:
            raise ConfigError(
                f"Got batch_size={batch_size!r} and global_batch_size={global_batch_size!r}: "
                "batch_size is per rank, global_batch_size over all ranks. Pass one of them."
            )
        _check_count("global_batch_size", global_batch_size, least=1)
        if global_batch_size < world.size:
            raise PlanError(
                f"global_batch_size={global_batch_size} is smaller than the world of {world.size} "
                f"ranks, so some ranks would get nothing. Pass at least {world.size}."
            )
        return BatchSizes(
            global_batch=global_batch_size, per_rank=-(-global_batch_size // world.size)
        )
    if batch_size is None:
        raise ConfigError(
            "batch_size=None (no batching) isn't possible with a native dataset: DALI decodes "
            "batches. Pass batch_size=1 and take the first element."
        )
    count = _check_count("batch_size", batch_size, least=1)
    return BatchSizes(global_batch=count * world.size, per_rank=count)


def _check_count(name: str, value: object, *, least: int) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)


def check_counts(**values: int | None) -> None:
    """Each must be an integer ≥ 0 (prefetch_factor, lanes, window: ≥ 1) or None."""
    for name, value in values.items():
        if value is not None:
            _check_count(name, value, least=0 if name in ("num_workers",) else 1)


def check_share(name: str, value: object) -> float:
    """A share in [0, 1]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a share between 0 and 1, got {value!r}.")
    return float(value)


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigError unless value is one of the choices."""
    if value not in choices:
        wanted = " or ".join(map(repr, choices))
        raise ConfigError(f"{name} must be {wanted}, got {value!r}.")


def check_resident(value: object) -> None:
    """True, False or "auto"; not 1, which would be equal to True."""
    if not isinstance(value, bool) and value != "auto":
        raise ConfigError(f"resident must be True, False or 'auto', got {value!r}.")


def check_ends(world: World, *, drop_last: bool, pad: Literal["mask"] | None) -> None:
    """On several ranks the end of an epoch must be decided: unequal ranks hang collectives."""
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


def parse_device(device: object, *, local_rank: int = 0) -> torch.device:
    """A torch device of type cpu or cuda that exists here. Raises ConfigError.

    local_rank: this process's place on its node; "cuda" without a number is its own device.
    """
    import torch

    try:
        parsed = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f'device={device!r} is no torch device. Pass "cpu", "cuda" or "cuda:1".'
        ) from error
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.type != "cuda":
        raise ConfigError(f'device={device!r}: DALI decodes on "cpu" or "cuda", not on this.')
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


def check_timeout(value: object) -> None:
    """Seconds ≥ 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"timeout must be seconds ≥ 0 (0 stands for 300), got {value!r}.")


def check_epoch(value: object) -> None:
    """An integer ≥ 0."""
    _check_count("epoch", value, least=0)


def checked_augment(value: Any) -> tuple[Operation, ...] | None:
    """Operations, or None. Raises ConfigError for what isn't; whether they fit comes later."""
    from penstock.augment import Operation

    if value is None:
        return None
    wanted = (
        "wanted operations in a list or tuple, such as imagenet_train(224) or [Resize(256), "
        "Normalize()]"
    )
    if isinstance(value, get_args(Operation)):
        raise ConfigError(f"augment: got the operation {value!r} alone, {wanted}. Put it in [...].")
    own = (
        "A function of yours goes into the dataset's __getitem__ (torch datasets), onto the batch "
        "in your loop, or, made of DALI's nodes, into the list as Apply(function)"
    )
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ConfigError(f"augment: got {value!r}, {wanted}. {own}.")
    operations = tuple(value)
    for place, operation in enumerate(operations):
        if not isinstance(operation, get_args(Operation)):
            raise ConfigError(f"augment: got {operation!r} at place {place}, {wanted}. {own}.")
    return operations


def check_seed(value: object) -> None:
    """An integer or None."""
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool)):
        raise ConfigError(f"seed must be an integer, got {value!r}.")


def choose_seed(
    seed: int | None, generator: torch.Generator | None, *, shuffle: bool, world: World
) -> int:
    """The seed of order and draws. Without one: torch's generator where that is safe.

    Raises ConfigError where several ranks would each draw their own.
    """
    if seed is not None:
        return int(seed)
    if not shuffle:
        return 0
    if world.size > 1:
        raise ConfigError(
            f"shuffle=True on {world.size} ranks needs seed=: without it each rank would draw its "
            "own order, and samples would repeat and go missing. Pass the same seed on every rank."
        )
    import torch

    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
