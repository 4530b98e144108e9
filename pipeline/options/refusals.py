"""Refusals of arguments that contradict one another, or the kind of dataset."""

from __future__ import annotations

from typing import Any

from penstock.cache.errors import ConfigError

# torch's arguments that choose or build batches: a native dataset's order comes from its plan.
_REFUSED = {
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
    for name, remedy in _REFUSED.items():
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
