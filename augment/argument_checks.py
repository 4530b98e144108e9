"""Check the arguments of an operation.

A check is a function of (what, value). It returns the checked value, or raises a RecipeError that
names the argument (`what`), what it got and what it wanted. Some functions return a check.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeGuard

from penstock.cache import RecipeError

Check = Callable[[str, Any], Any]
MAX_SIZE_PX = 65_535  # libjpeg's own limit; a larger output is a typing error
MAX_LENGTH, MAX_AXES = 2**40, 32  # of arrays


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return True for a finite real number that isn't a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def python_value(value: Any) -> Any:
    """Return numpy's and torch's numbers and arrays as Python's, anything else as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def integer(value: Any) -> int | None:
    """Return the int of a whole number of Python, numpy or torch; None for any other value,
    including bools."""
    value = python_value(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def one_of(*allowed: str) -> Check:
    """Return the check of names, or of an enum of torchvision whose values are these names."""

    def check(what: str, value: Any) -> str:
        name = getattr(value, "value", value)
        if name in allowed:
            return str(name)
        names = ", ".join(f'"{name}"' for name in allowed)
        raise RecipeError(f"{what}: got {value!r}, wanted one of {names}.")

    return check


def only(supported: object, remedy: str) -> Check:
    """Return the check of an argument that torchvision also has, with its only supported value."""

    def check(what: str, value: Any) -> Any:
        if value is supported:
            return value
        raise RecipeError(f"{what}: got {value!r}, and only {supported!r} is supported: {remedy}.")

    return check


def optional(check: Check) -> Check:
    """Return the check of an argument that may be None."""
    return lambda what, value: None if value is None else check(what, value)


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return the items of a sequence or an array; an empty tuple for anything else."""
    value = python_value(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def boolean(what: str, value: object) -> bool:
    """Return the value if it is a bool."""
    if isinstance(value, bool):
        return value
    raise RecipeError(f"{what}: got {value!r}, wanted True or False.")


def pixels(what: str, value: object) -> int:
    """Return a checked length in pixels."""
    length = integer(value)
    if length is not None and 1 <= length <= MAX_SIZE_PX:
        return length
    raise RecipeError(
        f"{what}: got {value!r}, wanted pixels as a whole number from 1 to {MAX_SIZE_PX}, or a "
        "pair of them: (height, width)."
    )


def height_width(what: str, value: object) -> tuple[int, int]:
    """Return (height, width) in pixels; a single number is used for both."""
    sides = as_tuple(value)
    if len(sides) == 2:
        return pixels(what, sides[0]), pixels(what, sides[1])
    side = pixels(what, sides[0] if len(sides) == 1 else value)
    return side, side


def axis_lengths(what: str, value: object) -> tuple[int | None, ...]:
    """Return lengths by axis, None for a full axis; a single number is used for two axes."""
    side = integer(value)
    given = as_tuple(value) if side is None else (side, side)
    sides = tuple(None if each is None else integer(each) or 0 for each in given)
    if 1 <= len(sides) <= MAX_AXES and all(
        each is None or 1 <= each <= MAX_LENGTH for each in sides
    ):
        return sides
    raise RecipeError(
        f"{what}: got {value!r}, wanted a whole number of 1 or more (a square), a pair (height, "
        "width), or of arrays the lengths of the last axes, None for all of one."
    )


def positive_range(most: float) -> Check:
    """Return the check of a pair 0 < low <= high <= most."""

    def check(what: str, value: Any) -> tuple[float, float]:
        pair = numbers(what, value)
        if len(pair) == 2 and 0 < pair[0] <= pair[1] <= most:
            return pair[0], pair[1]
        raise RecipeError(f"{what}: got {value!r}, wanted a pair 0 < low <= high <= {most:g}.")

    return check


def numbers(what: str, value: object) -> tuple[float, ...]:
    """Return one number or several as a tuple of floats."""
    value = python_value(value)
    if isinstance(value, Iterable):
        numbers = tuple(map(python_value, value))
        if numbers and all(is_finite_number(number) for number in numbers):
            return tuple(float(number) for number in numbers)
    elif is_finite_number(value):
        return (float(value),)
    raise RecipeError(f"{what}: got {value!r}, wanted a number per channel.")


def probability(what: str, value: object) -> float:
    """Return a checked number from 0 to 1."""
    if is_finite_number(value) and 0 <= value <= 1:
        return float(value)
    raise RecipeError(f"{what}: got {value!r}, wanted a probability from 0 to 1.")


def whole_number(low: int, high: int) -> Check:
    """Return the check of a whole number from low to high."""

    def check(what: str, value: Any) -> int:
        number = integer(value)
        if number is not None and low <= number <= high:
            return number
        raise RecipeError(f"{what}: got {value!r}, wanted a whole number from {low} to {high}.")

    return check


def number(low: float, high: float) -> Check:
    """Return the check of a number from low to high."""

    def check(what: str, value: Any) -> float:
        if is_finite_number(value) and low <= value <= high:
            return float(value)
        raise RecipeError(f"{what}: got {value!r}, wanted a number from {low:g} to {high:g}.")

    return check


def range_around(around: float, *, low: float, high: float) -> Check:
    """Return the check of torchvision's float or pair: a number x means around - x to around + x.

    The range of a number is cut at `low`; a pair must be between `low` and `high`. None means no
    change, as in torchvision's ColorJitter.
    """

    def check(what: str, value: Any) -> tuple[float, float]:
        value = python_value(value)
        if value is None:
            return around, around
        if is_finite_number(value) and value >= 0 and around + value <= high:
            return max(around - value, low), float(around + value)
        pair = as_tuple(value)
        is_pair = len(pair) == 2 and all(map(is_finite_number, pair))
        if is_pair and low <= pair[0] <= pair[1] <= high:
            return float(pair[0]), float(pair[1])
        raise RecipeError(
            f"{what}: got {value!r}, wanted a number from 0 to {high - around:g}, or a pair "
            f"low <= high from {low:g} to {high:g}."
        )

    return check


def fill_value(what: str, value: object) -> float:
    """Return the value of pixels outside an image, 0..255; 0 for None, as in torchvision."""
    if value is None:
        return 0.0
    if is_finite_number(value) and 0 <= value <= 255:
        return float(value)
    raise RecipeError(f"{what}: got {value!r}, wanted one number from 0 to 255, for all channels.")


def field_names(what: str, names: object) -> tuple[str, ...] | None:
    """Return a tuple of field names; None stays None: all fields that the operation applies to."""
    if names is None:
        return None
    given = (names,) if isinstance(names, str) else names
    if isinstance(given, Sequence) and given and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise RecipeError(f"{what}: got {names!r}, wanted names of fields, or None for all.")


def checks(**by_name: Check) -> Mapping[str, Check]:
    """Return the checks of an operation's arguments by name."""
    return MappingProxyType(by_name)


COMMON_CHECKS = checks(
    p=probability,
    fill=fill_value,
    mask_fill=whole_number(-(2**31), 2**31 - 1),
    fields=field_names,
    inplace=boolean,
)
"""The checks of arguments that mean the same in each operation."""
