"""Check the arguments of an operation.

Each function returns the checked value, or raises a RecipeError that names the argument (`what`),
what it got and what it wanted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, cast

from penstock.cache import RecipeError

MAX_SIZE_PX = 65_535  # libjpeg's own limit; a larger output is a typing error
MAX_LENGTH, MAX_AXES = 2**40, 32  # of arrays


def check_argument(op: object, name: str, check: Callable[..., object], **options: object) -> None:
    """Replace an argument of a frozen operation by its checked value, while the operation is
    created.

    check: called as check("Operation(name=...)", value, **options).
    """
    value = check(f"{type(op).__name__}({name}=...)", getattr(op, name), **options)
    object.__setattr__(op, name, value)


def is_finite_number(value: object) -> bool:
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


def one_of(what: str, value: object, *, allowed: tuple[str, ...]) -> str:
    """Return the value if it is one of `allowed`."""
    if value in allowed:
        return value
    names = ", ".join(f'"{name}"' for name in allowed)
    raise RecipeError(f"{what}: got {value!r}, wanted one of {names}.")


def enum_name(what: str, value: object, *, allowed: tuple[str, ...]) -> str:
    """Return the checked name that a value of an enum of torchvision has, or that is the value."""
    return one_of(what, getattr(value, "value", value), allowed=allowed)


def single_value(what: str, value: object, *, only: object, remedy: str) -> object:
    """Return the only supported value of an argument that torchvision also has."""
    if value is only:
        return value
    raise RecipeError(f"{what}: got {value!r}, and only {only!r} is supported: {remedy}.")


def as_tuple(value: object) -> tuple[object, ...]:
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


def positive_range(what: str, value: object, *, most: float) -> tuple[float, float]:
    """Return a checked pair 0 < low <= high <= most."""
    pair = numbers(what, value)
    if len(pair) == 2 and 0 < pair[0] <= pair[1] <= most:
        return pair[0], pair[1]
    raise RecipeError(f"{what}: got {value!r}, wanted a pair 0 < low <= high <= {most:g}.")


def numbers(what: str, value: object) -> tuple[float, ...]:
    """Return one number or several as a tuple of floats."""
    value = python_value(value)
    if isinstance(value, Iterable):
        numbers = tuple(map(python_value, value))
        if numbers and all(is_finite_number(number) for number in numbers):
            return tuple(float(number) for number in numbers)
    elif is_finite_number(value):
        return (float(cast("float", value)),)
    raise RecipeError(f"{what}: got {value!r}, wanted a number per channel.")


def probability(what: str, value: object) -> float:
    """Return a checked number from 0 to 1."""
    if is_finite_number(value) and 0 <= cast("float", value) <= 1:
        return float(cast("float", value))
    raise RecipeError(f"{what}: got {value!r}, wanted a probability from 0 to 1.")


def whole_number(what: str, value: object, *, low: int, high: int) -> int:
    """Return a checked whole number from low to high."""
    number = integer(value)
    if number is not None and low <= number <= high:
        return number
    raise RecipeError(f"{what}: got {value!r}, wanted a whole number from {low} to {high}.")


def range_around(
    what: str, value: object, *, around: float, low: float, high: float
) -> tuple[float, float]:
    """Return the range of torchvision's float or pair: a number x means around - x to around + x.

    The range of a number is cut at `low`; a pair must be between `low` and `high`.
    """
    value = python_value(value)
    if value is None:  # as in torchvision's ColorJitter: no change
        return around, around
    if is_finite_number(value):
        reach = float(cast("float", value))
        if reach >= 0 and around + reach <= high:
            return max(around - reach, low), around + reach
    elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        first, last = value
        if is_finite_number(first) and is_finite_number(last) and low <= first <= last <= high:
            return float(first), float(last)
    raise RecipeError(
        f"{what}: got {value!r}, wanted a number from 0 to {high - around:g}, or a pair "
        f"low <= high from {low:g} to {high:g}."
    )


def fill_value(what: str, value: object) -> float:
    """Return the value of pixels outside an image, 0..255; 0 for None, as in torchvision."""
    if value is None:
        return 0.0
    if is_finite_number(value) and 0 <= cast("float", value) <= 255:
        return float(cast("float", value))
    raise RecipeError(f"{what}: got {value!r}, wanted one number from 0 to 255, for all channels.")


def field_names(what: str, names: object) -> tuple[str, ...] | None:
    """Return a tuple of field names; None stays None: all fields that the operation applies to."""
    if names is None:
        return None
    given = (names,) if isinstance(names, str) else names
    if isinstance(given, Sequence) and given and all(isinstance(name, str) for name in given):
        return tuple(given)
    raise RecipeError(f"{what}: got {names!r}, wanted names of fields, or None for all.")
