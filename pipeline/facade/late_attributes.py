"""Attributes of a loader that may be set once it is made: what torch honours, and no others.

torch reads some of its loader's attributes when a pass begins, so programs and trainers set them
(Lightning's `seed_everything(workers=True)` sets worker_init_fn). Every other argument of the
constructor has done its work by then.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from penstock.cache.errors import ConfigError
from penstock.pipeline.options.checks import check_counts, check_timeout
from penstock.pipeline.options.foreign_options import WorkerOptions
from penstock.pipeline.options.refusals import refuse_torch_arguments, refuse_with_seed

# torch's arguments about workers and pinning, which its own loader inside is made with.
WORKER_OPTIONS = tuple(field.name for field in fields(WorkerOptions))
# Those of torch's arguments that torch honours in a loader's attributes.
LIVE_OPTIONS = (*WORKER_OPTIONS, "generator")
# Shown by a native loader as they were given.
AS_GIVEN = (
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

_AGAIN = "Make another DataLoader, and hand it this one's state_dict() to go on from here"


def is_same(value: Any, there: Any) -> bool:
    """Whether setting a value in place of the one there would change nothing."""
    plain = bool | int | float | str
    return value is there or (
        isinstance(value, plain) and type(value) is type(there) and value == there
    )


def check_native(name: str, value: Any) -> None:
    """Raise ConfigError unless a native loader honours the value from its next pass on."""
    refuse_torch_arguments({name: value})
    if name not in _LIVE_NATIVE:
        raise refused(name)
    if name in ("num_workers", "prefetch_factor"):
        check_counts(**{name: value})
    elif name == "timeout":
        check_timeout(value)


def check_torch(name: str, value: Any, *, is_ordered: bool, keeps_workers: bool) -> None:
    """Raise ConfigError unless a loader over a torch dataset honours the value from now on.

    is_ordered: by a seed. keeps_workers: persistent workers are alive, which were started with what
    stood there then.
    """
    if name not in _LIVE_TORCH:
        raise refused(name)
    if name == "generator" and is_ordered:
        refuse_with_seed({name: value})
    if keeps_workers:
        raise ConfigError(
            f"{name} should not be set while persistent workers are alive: they were started with "
            "the old value and keep it. Set it before the first pass, or drop persistent_workers. "
            f"{_AGAIN}."
        )


def refused(name: str) -> ConfigError:
    """The error for an argument that can't change."""
    return ConfigError(
        f"{name} should not be set once the loader is made: it would change nothing. {_AGAIN}."
    )
