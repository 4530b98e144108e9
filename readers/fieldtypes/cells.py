"""Convert the cells of tables in text (CSV, JSON) to numbers, arrays and texts.

Values are never converted to fit: a fraction is no integer, and true is no number. A value that
doesn't fit raises ValueError, whose message is a reason against its row.
"""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes.array_forms import ArrayForm, fits
from penstock.readers.types import Encoded, Numbers, Rejection, accepted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.readers.fieldtypes.array_forms import Known

    Check = Callable[[Numbers], Rejection | None]

# As JSON writes them: digits after a leading zero are a name ("007"), not a number.
_INTEGER = re.compile(r"\s*[+-]?(?:0|[1-9][0-9]*)\s*")
_NUMBER = re.compile(
    r"\s*[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?"
    r"|nan|inf|infinity)\s*",
    re.IGNORECASE,
)
INT64 = range(-(2**63), 2**63)
_INTEGERS = range(-(2**63), 2**64)
_LONGEST_INTEGER = 20
_SEPARATORS = ("|", ";", ",")
_SHOWN = 60
_MAX_DEPTH = 16
_WHOLE, _ANY = ("an integer", (int,)), ("a number", (int, float))
_KINDS = {"b": ("true or false", (bool,)), "i": _WHOLE, "u": _WHOLE, "f": _ANY, "c": _ANY}
_BOOLS = {"true": True, "false": False, "1": True, "0": False}


def number_of(text: str, integers: range = INT64) -> int | float | None:
    """Parse a cell of a CSV as a number. Returns None for other text, and for other integers than
    these."""
    if _INTEGER.fullmatch(text):
        is_short = len(text.strip()) <= _LONGEST_INTEGER
        return int(text) if is_short and int(text) in integers else None
    return float(text) if _NUMBER.fullmatch(text) else None


def number_cell(value: Any, dtype: np.dtype[Any], *, is_text: bool) -> Any:
    """Convert a value to a number of a dtype. is_text: of a CSV."""
    found, (what, types) = value, _KINDS[dtype.kind]
    if is_text:
        is_bool = dtype.kind == "b"
        found = _BOOLS.get(value.strip().lower()) if is_bool else number_of(value, _INTEGERS)
    if type(found) not in types:
        raise ValueError(f"{shorten(value)} isn't {what}")
    if dtype.kind in "iu":
        if np.iinfo(dtype).min <= found <= np.iinfo(dtype).max:
            return found
    else:
        with np.errstate(over="ignore"), suppress(OverflowError):  # an integer beyond float64
            number = dtype.type(found)
            if not np.isinf(number) or math.isinf(found):
                return number
    raise ValueError(f"{shorten(value)} doesn't fit into {dtype.name}")


class ClassNumbers(dict[str, int]):
    """Class numbers by name. is_ambiguous: the name of one class reads as the number of another, as
    in ("1", "2", "3"), so that a number may mean either."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__((name, number) for number, name in enumerate(names))
        self.is_ambiguous = any(
            isinstance(parsed := number_of(name), int) and parsed != number
            for name, number in self.items()
        )


def class_cell(value: Any, *, numbers: ClassNumbers, is_text: bool) -> int:
    """Convert a class's name or number to its number. is_text: of a CSV."""
    if isinstance(value, str) and value in numbers:
        return numbers[value]
    found = number_of(value) if is_text else value
    if isinstance(value, str) and numbers and (numbers.is_ambiguous or not isinstance(found, int)):
        raise ValueError(f"{shorten(value)} isn't a class of the list, which has {len(numbers):,}")
    if type(found) is not int:
        raise ValueError(f"{shorten(value)} isn't an integer")
    if numbers.is_ambiguous:
        raise ValueError(
            f'{found} may be the class named "{found}" or class number {found}: rename the '
            "classes, or write names as text"
        )
    if found not in (range(len(numbers)) if numbers else INT64):
        raise ValueError(f"{found} isn't a class: there are {len(numbers)}, numbered from 0")
    return found


def classes_cell(value: Any, *, numbers: ClassNumbers, is_text: bool) -> Any:
    """Convert a list of classes to float32 with 1 for each of them."""
    found = np.zeros(len(numbers), np.float32)
    for number, part in _class_parts(value, numbers, is_text=is_text):
        if found[number]:
            raise ValueError(
                f"{shorten(part)} occurs twice in {shorten(value)}; a list of zeros and ones is "
                f'Array("float32", ({len(numbers)},))'
            )
        found[number] = 1
    return found


def labels_cell(value: Any, *, numbers: ClassNumbers, is_text: bool) -> Any:
    """Convert a list of classes, which may occur several times, to their numbers, int64."""
    found = [number for number, _ in _class_parts(value, numbers, is_text=is_text)]
    return np.array(found, np.int64)


def _class_parts(value: Any, numbers: ClassNumbers, *, is_text: bool) -> Iterator[tuple[int, Any]]:
    """Yield the number of each class that a cell lists, and the class as it is written there."""
    parts = _parts(value, numbers) if is_text else value
    if not isinstance(parts, list):
        raise ValueError(f"{shorten(value)} isn't a list of classes")
    for part in parts:
        is_word = is_text and isinstance(part, str)
        yield class_cell(part, numbers=numbers, is_text=is_word), part


def _parts(text: str, numbers: ClassNumbers) -> list[Any] | None:
    """Return the classes that a cell of a CSV lists, as JSON or between separators or spaces."""
    if text.strip() in numbers:
        return [text.strip()]
    if text.lstrip().startswith("["):
        return json_list(text)
    separator = next((each for each in _SEPARATORS if each in text), None)
    return [part.strip() for part in text.split(separator) if part.strip()]


def text_cell(value: Any, *, decode: Callable[[Encoded], Any]) -> bytes:
    """Convert a text to UTF-8 that decodes."""
    if not isinstance(value, str):
        raise ValueError(f"{shorten(value)} isn't a text")
    try:
        text = value.encode()
    except UnicodeEncodeError:
        reason = f"{shorten(value)} holds half of a character (a lone surrogate)"
        raise ValueError(reason) from None
    decode(np.frombuffer(text, np.uint8))
    return text


def array_cell(value: Any, *, known: Known, check: Check, is_text: bool) -> Numbers:
    """Convert lists of numbers to an array. known: its dtype and shape, None keeps those of the
    lists. check: returns why it is invalid. is_text: of a CSV, as JSON or as numbers between
    spaces, commas or semicolons."""
    array, (wanted, shape) = _array_of(_numbers(value) if is_text else value), known
    dtype = array.dtype if wanted is None else wanted
    if shape is not None:
        form = ArrayForm(dtype, shape)
        if array.shape == (0,) and not form.empty.size:
            array = form.empty
        if not form.has(array.shape):
            raise ValueError(f"{shorten(value)} has shape {array.shape}, wanted {shape}")
    if array.dtype != dtype and not (array.size == 0 or fits(dtype, array)):
        raise ValueError(f"{shorten(value)} doesn't fit into {dtype.name}")
    array = array.astype(dtype, copy=False)
    accepted(check(array))
    return array


def _array_of(value: Any) -> Numbers:
    """Convert lists of numbers to an array of bool, int64 or float64."""
    kinds = _leaves(value)
    if not kinds <= {int, float} and kinds != {bool}:
        hint = "; for classes declare MultiLabel(names)" if str in kinds else ""
        raise ValueError(f"{shorten(value)} isn't a list of numbers{hint}")
    dtype = np.bool_ if bool in kinds else np.int64 if kinds == {int} else np.float64
    try:
        return np.array(value, dtype)
    except (OverflowError, ValueError):
        what = "lists of different lengths, or an integer beyond 64 bits"
        raise ValueError(f"{shorten(value)} holds {what}") from None


def json_list(text: str) -> list[Any] | None:
    """Parse a list in JSON, or return None for other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _leaves(value: Any, depth: int = 0) -> set[type]:
    if not isinstance(value, list):
        return {type(value)}
    kinds = set(map(type, value))
    if list not in kinds or depth == _MAX_DEPTH:
        return kinds
    return set().union(*(_leaves(each, depth + 1) for each in value))


def _numbers(text: str) -> Any:
    if text.lstrip().startswith("["):
        return json_list(text)
    numbers = [number_of(part) for part in re.split(r"[\s,;]+", text.strip())]
    return text if None in numbers else numbers


def shorten(value: object) -> str:
    """Return a value as text for a message, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
