"""One value of a table as a value of a field's type, or why it can't be one.

Nothing is bent until it fits: a fraction is no integer, and true is no number.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.boxes import check_boxes, check_keypoints
from penstock.readers.fields.field_types import (
    Array,
    Boxes,
    ClassLabel,
    Keypoints,
    MultiLabel,
    Text,
    Tokens,
    Value,
)
from penstock.readers.fields.rows import shown
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.field_types import FieldType

# As JSON writes them: what leads with a zero is a name ("007"), not a number.
_INTEGER = re.compile(r"\s*[+-]?(?:0|[1-9][0-9]*)\s*")
_NUMBER = re.compile(
    r"\s*[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?"
    r"|nan|inf|infinity)\s*",
    re.IGNORECASE,
)
_SEPARATORS = ("|", ";", ",")
_INT64 = range(-(2**63), 2**63)
_LONGEST_INTEGER = 20
_MAX_DEPTH = 16

COLUMN_TYPES = (Value, ClassLabel, MultiLabel, Text, Array, Boxes, Keypoints, Tokens)
"""The types that a table's values can have."""


def number_of(text: str) -> int | float | None:
    """The number that a CSV's cell is, or None; integers that don't fit into 64 bits are none."""
    if _INTEGER.fullmatch(text):
        whole = int(text) if len(text.strip()) <= _LONGEST_INTEGER else None
        return whole if whole is not None and whole in _INT64 else None
    return float(text) if _NUMBER.fullmatch(text) else None


class ClassNumbers(dict[str, int]):
    """Class numbers by name. is_ambiguous: a name reads as another class's number, as of
    ("1", "2", "3"): a number may then mean either."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__((name, number) for number, name in enumerate(names))
        self.is_ambiguous = any(
            isinstance(said := number_of(name), int) and said != number
            for name, number in self.items()
        )


_NONE = ClassNumbers(())


def cell(type: FieldType, value: Any, *, is_text: bool, numbers: ClassNumbers = _NONE) -> Any:
    """A value as the type has it, or a Rejection.

    is_text: it is a CSV's cell. numbers: of a type with names. Text comes as bytes, everything else
    as what numpy makes of it.
    """
    if isinstance(type, Value):
        return _value(type, value, is_text=is_text)
    if isinstance(type, Text):
        return _utf8(value)
    if isinstance(type, ClassLabel):
        return _label(value, numbers, is_text=is_text)
    if isinstance(type, MultiLabel):
        return _labels(value, numbers, is_text=is_text)
    return _array(type, value, is_text=is_text)


def array_of(value: Any) -> tuple[NDArray[Any], type] | Rejection:
    """Numbers in lists as an array, and what they are: bool, int or float (float64 then)."""
    kinds = _leaves(value)
    if kinds <= {int}:
        kind: type = int if kinds else float
    elif kinds <= {int, float}:
        kind = float
    elif kinds == {bool}:
        kind = bool
    else:
        return Rejection(f"{shown(value)} isn't a list of numbers")
    try:
        return np.array(value, {bool: np.bool_, int: np.int64, float: np.float64}[kind]), kind
    except OverflowError:
        return Rejection(f"{shown(value)} holds an integer beyond 64 bits")
    except ValueError:
        return Rejection(f"{shown(value)} holds lists of different lengths")


def fits(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Whether values keep what they are in a dtype: integers their value, numbers their size."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        in_range = values.size == 0 or (limits.min <= values.min() and values.max() <= limits.max)
        return bool(values.dtype.kind in "iu" and in_range)
    if dtype.kind in "fc":
        if values.dtype.kind not in "iuf":
            return False
        with np.errstate(over="ignore"):
            return bool((np.isfinite(values.astype(dtype)) == np.isfinite(values)).all())
    return values.dtype.kind == "b"


def _leaves(value: Any, depth: int = 0) -> set[type]:
    if not isinstance(value, list):
        return {type(value)}
    kinds = set(map(type, value))
    if list not in kinds or depth == _MAX_DEPTH:
        return kinds
    return set().union(*(_leaves(each, depth + 1) for each in value))


def _value(type: Value, value: Any, *, is_text: bool) -> Any:
    dtype = np.dtype(type.dtype)
    found = _cell_number(value, dtype) if is_text else value
    if isinstance(found, bool) is not (dtype.kind == "b") or not isinstance(found, int | float):
        return Rejection(f"{shown(value)} is no {_KINDS[dtype.kind]}")
    if isinstance(found, float) and dtype.kind in "iu":
        return Rejection(f"{shown(value)} is no integer")
    if isinstance(found, int) and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if not limits.min <= found <= limits.max:
            return Rejection(f"{shown(value)} doesn't fit into {dtype.name}")
        return found
    try:
        with np.errstate(over="ignore"):
            made = dtype.type(found)
    except OverflowError:
        made = dtype.type(math.inf)
    if dtype.kind in "fc" and np.isinf(made) and not math.isinf(found):
        return Rejection(f"{shown(value)} doesn't fit into {dtype.name}")
    return made


_KINDS = {"b": "true or false", "i": "integer", "u": "integer", "f": "number", "c": "number"}
_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def _cell_number(text: str, dtype: np.dtype[Any]) -> bool | int | float | None:
    if dtype.kind == "b":
        return _BOOLS.get(text.strip().lower())
    if dtype.kind == "u" and _INTEGER.fullmatch(text) and len(text.strip()) <= _LONGEST_INTEGER:
        return int(text)
    return number_of(text)


def _utf8(value: Any) -> bytes | Rejection:
    if not isinstance(value, str):
        return Rejection(f"{shown(value)} is no text")
    try:
        return value.encode()
    except UnicodeEncodeError:
        return Rejection(f"{shown(value)} holds half of a character (a lone surrogate)")


def _label(value: Any, numbers: ClassNumbers, *, is_text: bool) -> int | Rejection:
    if isinstance(value, str) and value in numbers:
        return numbers[value]
    found = number_of(value) if is_text else value
    if type(found) is not int:
        if numbers and isinstance(value, str):
            return Rejection(f"{shown(value)} is no class of the list, which has {len(numbers):,}")
        return Rejection(f"{shown(value)} is no integer")
    if numbers.is_ambiguous:
        if is_text:
            return Rejection(f"{shown(value)} is no class of the list, which has {len(numbers):,}")
        return Rejection(
            f'{found} may be the class named "{found}" or class number {found}: name the classes '
            "otherwise, or write names as text"
        )
    if found not in (range(len(numbers)) if numbers else _INT64):
        return Rejection(f"{found} is no class: there are {len(numbers)}, numbered from 0")
    return found


def _labels(value: Any, numbers: ClassNumbers, *, is_text: bool) -> Any:
    parts = _parts(value, numbers) if is_text else value
    if not isinstance(parts, list):
        return Rejection(f"{shown(value)} is no list of classes")
    found = np.zeros(len(numbers), np.float32)
    for part in parts:
        number = _label(part, numbers, is_text=is_text and isinstance(part, str))
        if isinstance(number, Rejection):
            return number
        if found[number]:
            return Rejection(
                f"{shown(part)} is there twice in {shown(value)}; a list of zeros and ones is "
                f'Array("float32", ({len(numbers)},))'
            )
        found[number] = 1
    return found


def _parts(text: str, numbers: ClassNumbers) -> list[Any] | None:
    """The classes that a CSV's cell lists: as JSON, or between separators or spaces."""
    if text.strip() in numbers:
        return [text.strip()]
    if text.lstrip().startswith("["):
        return _json_list(text)
    separator = next((each for each in _SEPARATORS if each in text), None)
    return [part.strip() for part in text.split(separator) if part.strip()]


def _json_list(text: str) -> list[Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _array(type: FieldType, value: Any, *, is_text: bool) -> NDArray[Any] | Rejection:
    """Of an Array that isn't settled as the lists say; `tables` settles it for all rows."""
    if is_text:
        value = _numbers(value)
    found = array_of(value)
    if isinstance(found, Rejection):
        return found
    array, _ = found
    if isinstance(type, Boxes | Keypoints):
        width = 4 if isinstance(type, Boxes) else 2
        made = _shaped(array, value, np.dtype(np.float32), (None, width))
        if isinstance(made, Rejection):
            return made
        if isinstance(type, Boxes):
            return check_boxes(made, type.format) or made
        return check_keypoints(made) or made
    if isinstance(type, Tokens):
        return _shaped(array, value, np.dtype(type.dtype), (None,))
    assert isinstance(type, Array)
    if type.dtype == "auto":
        return _shaped(array, value, array.dtype, type.shape)
    return _shaped(array, value, np.dtype(type.dtype), type.shape)


def _numbers(text: str) -> Any:
    """A CSV's cell as lists: JSON, or numbers between spaces, commas or semicolons."""
    if text.lstrip().startswith("["):
        return _json_list(text)
    numbers = [number_of(part) for part in re.split(r"[\s,;]+", text.strip())]
    return text if None in numbers else numbers


def _shaped(
    array: NDArray[Any], value: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...] | None
) -> NDArray[Any] | Rejection:
    if array.size == 0 and array.shape == (0,) and shape is not None:
        array = np.zeros([length or 0 for length in shape], dtype)
        if array.size:
            return Rejection(f"{shown(value)} is empty, wanted shape {shape}")
    elif shape is not None and (
        array.ndim != len(shape)
        or any(want not in (None, got) for want, got in zip(shape, array.shape, strict=True))
    ):
        return Rejection(f"{shown(value)} has shape {array.shape}, wanted {shape}")
    if array.dtype != dtype and not (array.size == 0 or fits(dtype, array)):
        return Rejection(f"{shown(value)} doesn't fit into {dtype.name}")
    return array.astype(dtype, copy=False)
