"""Checks of one argument each; every error names the argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, get_args

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from penstock.augment import Operation
    from penstock.augment.field_recipes import Recipes


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
        return {key: _operations(f"augment[{_shown(key)}]", each) for key, each in value.items()}
    return None if value is None else _operations("augment", value)


def _is_names(key: object) -> bool:
    return isinstance(key, tuple) and bool(key) and all(isinstance(name, str) for name in key)


def _shown(key: str | tuple[str, ...]) -> str:
    return f'"{key}"' if isinstance(key, str) else str(key)


def _operations(what: str, value: Any) -> tuple[Operation, ...]:
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
