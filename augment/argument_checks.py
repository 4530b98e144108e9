"""Check the arguments of an operation; each error names the argument, what it got and wanted."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, cast

from penstock.cache import RecipeError

# libjpeg's own limit; a larger output is a slip of the keyboard, not a training image.
MAX_SIZE_PX = 65_535

# Of arrays.
MAX_LENGTH, MAX_AXES = 2**40, 32


def is_finite_number(value: object) -> bool:
    """Return True for a finite real number that isn't a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def python_value(value: Any) -> Any:
    """Return numpy's and torch's numbers and arrays as Python's, anything else as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def integer(value: Any) -> int | None:
    """Return the int that a value stands for, of Python, numpy or torch; None for what is no whole
    number, bools among them."""
    value = python_value(value)
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_one_of(what: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises RecipeError unless the value is one of these."""
    if value not in allowed:
        names = ", ".join(f'"{name}"' for name in allowed)
        raise RecipeError(f"{what}: got {value!r}, wanted one of {names}.")


def interpolation_name(what: str, value: object, allowed: tuple[str, ...]) -> str:
    """Return the name of an interpolation; torchvision's InterpolationMode stands for its value."""
    name = getattr(value, "value", value)
    check_one_of(what, name, allowed)
    return cast("str", name)


def check_single_value(what: str, value: object, only: object, remedy: str) -> None:
    """Raise RecipeError for an argument of torchvision's that has a single value here."""
    if value is not only:
        raise RecipeError(f"{what}: got {value!r}, and only {only!r} is supported: {remedy}.")


def as_tuple(value: object) -> tuple[object, ...]:
    """Return the items of a sequence or an array; an empty tuple for anything else."""
    value = python_value(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def check_bool(what: str, value: object) -> None:
    """Raises RecipeError unless the value is a bool."""
    if not isinstance(value, bool):
        raise RecipeError(f"{what}: got {value!r}, wanted True or False.")


def pixels(what: str, value: object) -> int:
    """A length in pixels."""
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
    """A pair 0 < low <= high <= most."""
    pair = numbers(what, value)
    if len(pair) == 2 and 0 < pair[0] <= pair[1] <= most:
        return pair[0], pair[1]
    raise RecipeError(f"{what}: got {value!r}, wanted a pair 0 < low <= high <= {most:g}.")


def numbers(what: str, value: object) -> tuple[float, ...]:
    """One number or several, as floats."""
    value = python_value(value)
    if isinstance(value, Iterable):
        numbers = tuple(map(python_value, value))
        if numbers and all(is_finite_number(number) for number in numbers):
            return tuple(float(number) for number in numbers)
    elif is_finite_number(value):
        return (float(cast("float", value)),)
    raise RecipeError(f"{what}: got {value!r}, wanted a number per channel.")


def probability(what: str, value: object) -> float:
    """A number from 0 to 1."""
    if is_finite_number(value) and 0 <= cast("float", value) <= 1:
        return float(cast("float", value))
    raise RecipeError(f"{what}: got {value!r}, wanted a probability from 0 to 1.")


def whole_number(what: str, value: object, *, low: int, high: int) -> int:
    """A whole number from low to high."""
    number = integer(value)
    if number is not None and low <= number <= high:
        return number
    raise RecipeError(f"{what}: got {value!r}, wanted a whole number from {low} to {high}.")


def range_around(
    what: str, value: object, *, around: float, low: float, high: float
) -> tuple[float, float]:
    """Return the range of torchvision's float or pair: a number x means around - x to around + x.

    What a number spans is cut at `low`; a pair must lie between `low` and `high`.
    """
    value = python_value(value)
    if value is None:  # torchvision's ColorJitter: this one changes nothing
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
    """Return the value of pixels outside of an image, in units of 0..255. None is torchvision's
    0."""
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
