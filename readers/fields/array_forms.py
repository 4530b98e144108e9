"""Give the dtype and shape of every numeric field type, and convert payloads to such arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.fields.field_types import (
    Array,
    Boxes,
    ClassLabel,
    FieldType,
    Image,
    Keypoints,
    Mask,
    MultiLabel,
    Tokens,
    Value,
)
from penstock.readers.types import Facts, Rejection, array_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8), "c": (8, 16)}

ARRAY_CODECS: tuple[str, ...] = tuple(
    np.dtype(f"{order}{kind}{size}").str + columns_first
    for columns_first, kind in product(("", ":F"), _SIZES)
    for size in _SIZES[kind]
    for order in ("<>" if size > 1 else "|")
)
"""All codecs that an array's facts can name: a table notes their numbers."""

CODEC_ITEMSIZES = np.array(
    [np.dtype(codec.removesuffix(":F")).itemsize for codec in ARRAY_CODECS], np.int64
)
"""Bytes of one number, by the number of the codec."""

_NUMBERS = {codec: number for number, codec in enumerate(ARRAY_CODECS)}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Dtype and shape of one sample of numbers. None in shape: a length that differs."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def is_ragged(self) -> bool:
        """Whether samples differ in shape."""
        return None in self.shape

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape of every sample, where it isn't ragged."""
        return tuple(length or 0 for length in self.shape)

    @property
    def rest(self) -> tuple[int, ...] | None:
        """The shape behind the first length where that alone differs, else None."""
        rest = tuple(length for length in self.shape[1:] if length is not None)
        return rest if len(rest) == len(self.shape) - 1 else None


def array_form(type: FieldType) -> ArrayForm | None:
    """The form of a type whose samples are arrays and whose dtype and shape are known; None of
    others."""
    if isinstance(type, Array):
        return None if not type.is_settled or type.shape is None else _form(type.dtype, type.shape)
    if isinstance(type, Boxes):
        return _form("float32", (None, 4))
    if isinstance(type, Keypoints):
        return _form("float32", (None, 2))
    if isinstance(type, Tokens):
        return _form(type.dtype, (None,))
    if isinstance(type, MultiLabel):
        return _form("float32", (len(type.names),))
    return None


def _form(dtype: str, shape: tuple[int | None, ...]) -> ArrayForm:
    return ArrayForm(np.dtype(dtype), shape)


def number_dtype(type: FieldType) -> np.dtype[Any] | None:
    """The dtype of a type of which a sample is one number; None of others."""
    if isinstance(type, Value):
        return np.dtype(type.dtype)
    return np.dtype(np.int64) if isinstance(type, ClassLabel) else None


def has_sides(type: FieldType) -> bool:
    """Whether samples have a height and a width that are noted."""
    return isinstance(type, Image | Mask)


def codec_number(codec: str) -> int:
    """The number of an array's codec. Raises ValueError for what is none."""
    if codec not in _NUMBERS:
        raise ValueError(f"{codec[:40]!r} is no array's codec")
    return _NUMBERS[codec]


def as_bits(values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers as int64 that hold all of them: floats by their bits in float64."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, np.float64).view(np.int64)
    if values.dtype.kind in "cu" and values.dtype.itemsize == 8:
        return np.ascontiguousarray(values).view(np.int64)
    return values.astype(np.int64)


def from_bits(bits: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """The numbers that `as_bits` was given, as a copy."""
    if dtype.kind == "f":
        return np.ascontiguousarray(bits).view(np.float64).astype(dtype)
    if dtype.kind in "cu" and dtype.itemsize == 8:
        return bits.copy().view(dtype)
    return bits.astype(dtype)


def bare_facts(data: Encoded, form: ArrayForm, codec: str) -> Facts | Rejection:
    """The facts of an array whose bytes are bare numbers. codec: of them; one length of the form
    may be None."""
    stored = array_codec(codec)
    if stored is None:
        raise ValueError(f"{codec[:40]!r} is no array's codec")
    rest = math.prod(length for length in form.shape if length is not None)
    open = form.shape.count(None)
    count, left = divmod(len(data), stored.dtype.itemsize * rest or 1)
    if left or open > 1 or (not open and count != 1):
        return Rejection(
            f"{len(data):,} bytes, which aren't {stored.name} of shape {form.shape}: truncated, or "
            "of another dtype or shape"
        )
    shape = tuple(count if length is None else length for length in form.shape)
    return Facts(crc32c(data), 0, len(data), shape, codec)


def to_array(
    payload: Encoded, codec: str, shape: Sequence[int], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """One sample's numbers in a dtype, rows first. shape: its own. Raises ValueError for a payload
    that doesn't fit."""
    from penstock.readers.fields.decode import decode_array  # numbers and images need none of it

    return decode_array(payload, codec, shape).astype(dtype, copy=False)
