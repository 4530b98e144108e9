"""What a manifest says of its fields, checked: it may come from anybody, with a right checksum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from penstock.readers.fields.arrays import array_form, has_sides, number_dtype
from penstock.readers.formats.layout import STORAGES
from penstock.readers.formats.limits import MAX_SAMPLES, MAX_SHARD_BYTES, MAX_SIDE
from penstock.readers.formats.summary import FieldSummary
from penstock.readers.types import ImageRange

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.fields.field_types import FieldType

_MAX_CODECS, _MAX_CODEC, _MAX_DIMENSIONS = 2**10, 64, 32


def check_summary(values: Any) -> FieldSummary:
    """The value, of JSON that says only what can be. Raises ValueError, TypeError."""
    if not isinstance(values, dict):
        raise ValueError(f"what it says of a field can't be {str(values)[:80]!r}")
    for name, is_right in _RIGHT.items():
        if name in values and not is_right(values[name]):
            raise ValueError(f"a field's {name} can't be {str(values[name])[:80]!r}")
    images, bounds = values.get("images"), values.get("bounds")
    return FieldSummary(
        **{
            **values,
            "images": None if images is None else ImageRange(**images),
            "channels": tuple(values.get("channels", ())),
            "codecs": tuple(values.get("codecs", ())),
            "lengths": tuple((low, high) for low, high in values.get("lengths", ())),
            "bounds": None if bounds is None else (bounds[0], bounds[1]),
        }
    )


def check_fit(summary: FieldSummary, type: FieldType, *, samples: int) -> None:
    """Whether a field of this type can be so. Raises ValueError."""
    is_number = number_dtype(type) is not None
    if (summary.storage == "value") > is_number:
        raise ValueError(f"{type.kind} is no number")
    if summary.missing > samples:
        raise ValueError(f"{summary.missing:,} of {samples:,} samples lack a field")
    is_there = summary.missing < samples
    if summary.storage == "chunks":
        return
    if has_sides(type) and is_there != (summary.images is not None):
        raise ValueError(f"{type.kind} without bounds of its heights and widths")
    form = array_form(type)
    if form is not None and summary.lengths and len(summary.lengths) != len(form.shape):
        raise ValueError(f"{len(summary.lengths)} dimensions for the shape {form.shape}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SAMPLES


def _is_list(is_right: Callable[[Any], bool], *, most: int) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and len(value) <= most and all(map(is_right, value))
    )


def _is_codec(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CODEC


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(each) is int for each in value)
        and 0 <= value[0] <= value[1] <= MAX_SHARD_BYTES
    )


def _is_bounds(value: Any) -> bool:
    return value is None or (
        isinstance(value, list)
        and len(value) == 2
        and all(type(each) in (int, float, bool) for each in value)
        and all(abs(each) < 2**64 for each in value if type(each) is int)
        and all(map(math.isfinite, value))
        and value[0] <= value[1]
    )


def _is_range(value: Any) -> bool:
    names = ("min_height", "max_height", "min_width", "max_width")
    if value is None:
        return True
    if not isinstance(value, dict) or set(value) != set(names):
        return False
    if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in value.values()):
        return False
    return bool(
        value["min_height"] <= value["max_height"] and value["min_width"] <= value["max_width"]
    )


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "storage": lambda value: value in STORAGES,
    "missing": _is_count,
    "images": _is_range,
    "channels": _is_list(lambda value: type(value) is int and 0 <= value <= 2**16, most=2**17),
    "codecs": _is_list(_is_codec, most=_MAX_CODECS),
    "lengths": _is_list(_is_pair, most=_MAX_DIMENSIONS),
    "bounds": _is_bounds,
    "progressive": lambda value: value is None or _is_count(value),
}
