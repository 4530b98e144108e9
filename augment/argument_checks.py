"""Check the arguments of an operation.

A check is a function of (what, value). It returns the checked value, or raises a RecipeError that
names the argument (`what`), what it got and what it wanted. Some functions return a check. A class
declares the check of an argument by `argument`, next to the name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field
from numbers import Real
from typing import Any, TypeGuard, TypeVar

from penstock.cache import RecipeError

Check = Callable[[str, Any], Any]
T = TypeVar("T")
MAX_SIZE_PX = 65_535  # libjpeg's own limit; a larger output is a typing error
MAX_LENGTH, MAX_AXES = 2**40, 32  # of arrays


def argument(check: Check, *, default: Any = MISSING, hash: bool | None = None) -> Any:
    """Declare an argument of an operation with its check and its default value, if it has one.
    hash: as in `dataclasses.field`."""
    return field(default=default, hash=hash, metadata={"check": check})


def expect(convert: Callable[[Any], T], wanted: str) -> Callable[[str, Any], T]:
    """Return the check of values that `convert` converts; for others it raises ValueError or
    TypeError. wanted: what the message names."""

    def check(what: str, value: Any) -> T:
        try:
            return convert(python_value(value))
        except (TypeError, ValueError):
            raise RecipeError(f"{what}: got {value!r}, wanted {wanted}.") from None

    return check


def expect_that(test: Callable[[Any], object], wanted: str) -> Check:
    """Return the check of values for which `test` is true. wanted: as in `expect`."""

    def convert(value: Any) -> Any:
        if not test(value):
            raise ValueError(value)
        return value

    return expect(convert, wanted)


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return True for a finite real number that isn't a bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def python_value(value: Any) -> Any:
    """Return numpy's and torch's numbers and arrays as Python's, anything else as it is."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def whole(value: Any, low: int, high: int) -> int:
    """Return a whole number of Python, numpy or torch from low to high. Raises ValueError or
    TypeError for anything else, including bools."""
    number = python_value(value)
    if isinstance(number, bool) or not low <= operator.index(number) <= high:
        raise ValueError(value)
    return operator.index(number)


def real(value: Any, low: float, high: float) -> float:
    """Return a finite number from low to high as a float. Raises ValueError for anything else."""
    number = python_value(value)
    if not is_finite_number(number) or not low <= number <= high:
        raise ValueError(value)
    return float(number)


def as_tuple(value: object) -> tuple[Any, ...]:
    """Return the items of a sequence or an array; an empty tuple for anything else."""
    value = python_value(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _pair(value: Any, low: float, high: float) -> tuple[float, float]:
    first, second = (real(each, low, high) for each in as_tuple(value))
    if first > second:
        raise ValueError(value)
    return first, second


def one_of(*allowed: str) -> Check:
    """Return the check of names, or of an enum of torchvision whose values are these names."""

    def convert(value: Any) -> str:
        return allowed[allowed.index(getattr(value, "value", value))]

    return expect(convert, "one of " + ", ".join(f'"{name}"' for name in allowed))


def only(supported: object, remedy: str) -> Check:
    """Return the check of an argument that torchvision also has, with its only supported value."""
    wanted = f"{supported!r}, as only {supported!r} is supported: {remedy}"
    return expect_that(lambda value: value is supported, wanted)


def optional(check: Check) -> Check:
    """Return the check of an argument that may be None."""
    return lambda what, value: None if value is None else check(what, value)


def whole_number(low: int, high: int) -> Check:
    """Return the check of a whole number from low to high."""
    return expect(lambda value: whole(value, low, high), f"a whole number from {low} to {high}")


def number(low: float, high: float) -> Check:
    """Return the check of a number from low to high."""
    return expect(lambda value: real(value, low, high), f"a number from {low:g} to {high:g}")


def positive_range(most: float) -> Check:
    """Return the check of a pair 0 < low <= high <= most."""
    least = math.ulp(0.0)
    return expect(lambda value: _pair(value, least, most), f"a pair 0 < low <= high <= {most:g}")


def range_around(around: float, *, low: float, high: float) -> Check:
    """Return the check of torchvision's float or pair: a number x means around - x to around + x.

    The range of a number is cut at `low`; a pair must be between `low` and `high`. None means no
    change, as in torchvision's ColorJitter.
    """

    def convert(value: Any) -> tuple[float, float]:
        if as_tuple(value):
            return _pair(value, low, high)
        reach = 0.0 if value is None else real(value, 0, high - around)
        return max(around - reach, low), around + reach

    wanted = f"a number from 0 to {high - around:g}, or a pair low <= high from {low:g} to {high:g}"
    return expect(convert, wanted)


def sides_px(value: Any) -> tuple[int, int]:
    """Return (height, width) in pixels; a single number is used for both. Raises ValueError or
    TypeError."""
    sides = as_tuple(value) or (value,)
    height, width = sides * 2 if len(sides) == 1 else sides
    return whole(height, 1, MAX_SIZE_PX), whole(width, 1, MAX_SIZE_PX)


def _axis_lengths(value: Any) -> tuple[int | None, ...]:
    sides = as_tuple(value) or (whole(value, 1, MAX_LENGTH),) * 2
    if len(sides) > MAX_AXES:
        raise ValueError(value)
    return tuple(None if each is None else whole(each, 1, MAX_LENGTH) for each in sides)


def _numbers(value: Any) -> tuple[float, ...]:
    several = value if isinstance(value, Iterable) else (value,)
    found = tuple(real(each, -math.inf, math.inf) for each in several)
    if not found:
        raise ValueError(value)
    return found


def _names(value: Any) -> tuple[str, ...]:
    names = tuple([value] if isinstance(value, str) else value)
    if not names or not all(isinstance(each, str) for each in names) or len({*names}) < len(names):
        raise ValueError(value)
    return names


boolean = expect_that(lambda value: isinstance(value, bool), "True or False")
"""The check of a bool."""

height_width = expect(
    sides_px,
    f"pixels as a whole number from 1 to {MAX_SIZE_PX}, or a pair of them: (height, width)",
)
"""The check of (height, width) in pixels; a single number is used for both."""

axis_lengths = expect(
    _axis_lengths,
    "a whole number of 1 or more (a square), a pair (height, width), or of arrays the lengths of "
    "the last axes, None for all of one",
)
"""The check of lengths by axis, None for a full axis; a single number is used for two axes."""

numbers = expect(_numbers, "a number per channel")
"""The check of one number or several, as a tuple of floats."""

probability = expect(lambda value: real(value, 0, 1), "a probability from 0 to 1")
"""The check of a number from 0 to 1."""

function = expect_that(callable, "a function")
"""The check of something to call."""

fill_value = expect(
    lambda value: 0.0 if value is None else real(value, 0, 255),
    "one number from 0 to 255, for all channels",
)
"""The check of the value of pixels outside an image; 0 for None, as in torchvision."""

field_names = optional(expect(_names, "names of fields, each once, or None for all"))
"""The check of field names; None stays None: all fields that the operation applies to."""


COMMON_CHECKS: Mapping[str, Check] = {
    "p": probability,
    "fill": fill_value,
    "mask_fill": whole_number(-(2**31), 2**31 - 1),
    "fields": field_names,
    "inplace": boolean,
}
"""The checks of arguments that mean the same in each operation."""
