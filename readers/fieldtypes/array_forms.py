"""Define the dtype and shape of every numeric field type, and decode payloads of numbers and texts.

Payloads were checked when they were indexed, but codecs and shapes come from an untrusted index: a
payload that doesn't fit them raises ValueError, whose message is a reason against the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.fieldtypes.field_types import (
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
from penstock.readers.types import NUMBER_SIZES, Facts, Rejection, array_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded


ARRAY_CODECS: tuple[str, ...] = tuple(
    np.dtype(f"{order}{kind}{size}").str + columns_first
    for columns_first, kind in product(("", ":F"), NUMBER_SIZES)
    for size in NUMBER_SIZES[kind]
    for order in ("<>" if size > 1 else "|")
)
"""All codecs that the facts of an array can name; tables store their numbers."""

CODEC_ITEMSIZES = np.array(
    [np.dtype(codec.removesuffix(":F")).itemsize for codec in ARRAY_CODECS], np.int64
)
"""Bytes of one number, by the number of the codec."""

_NUMBERS = {codec: number for number, codec in enumerate(ARRAY_CODECS)}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Dtype and shape of one sample of numbers. None in shape is a length that differs."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @property
    def is_ragged(self) -> bool:
        """Return True if samples differ in shape."""
        return None in self.shape

    @property
    def fixed_shape(self) -> tuple[int, ...]:
        """The shape of every sample, if the form isn't ragged."""
        return tuple(length or 0 for length in self.shape)

    @property
    def rest(self) -> tuple[int, ...] | None:
        """The shape after the first length if only that length differs, else None."""
        rest = tuple(length for length in self.shape[1:] if length is not None)
        return rest if len(rest) == len(self.shape) - 1 else None


def array_form(type: FieldType) -> ArrayForm | None:
    """Return the form of a type whose samples are arrays of known dtype and shape; None for
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
    """Return the dtype of a type whose samples are single numbers; None for others."""
    if isinstance(type, Value):
        return np.dtype(type.dtype)
    return np.dtype(np.int64) if isinstance(type, ClassLabel) else None


def has_sides(type: FieldType) -> bool:
    """Return True if the height and width of samples are recorded."""
    return isinstance(type, Image | Mask)


def codec_number(codec: str) -> int:
    """Return the number of an array's codec. Raises ValueError for an unknown one."""
    if codec not in _NUMBERS:
        raise ValueError(f"{codec[:40]!r} is no array's codec")
    return _NUMBERS[codec]


def as_bits(values: NDArray[Any]) -> NDArray[np.int64]:
    """Convert numbers to int64 without loss: floats by their bits in float64."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, np.float64).view(np.int64)
    if values.dtype.kind in "cu" and values.dtype.itemsize == 8:
        return np.ascontiguousarray(values).view(np.int64)
    return values.astype(np.int64)


def from_bits(bits: NDArray[np.int64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Restore the numbers that `as_bits` converted, as a copy."""
    if dtype.kind == "f":
        return np.ascontiguousarray(bits).view(np.float64).astype(dtype)
    if dtype.kind in "cu" and dtype.itemsize == 8:
        return bits.copy().view(dtype)
    return bits.astype(dtype)


def bare_facts(data: Encoded, form: ArrayForm, codec: str) -> Facts | Rejection:
    """Return the facts of an array without a header, or why its size is wrong. codec: of the
    numbers. At most one length of the form may be None."""
    stored = array_codec(codec)
    if stored is None:
        raise ValueError(f"{codec[:40]!r} is no array's codec")
    rest = math.prod(length for length in form.shape if length is not None)
    unknown = form.shape.count(None)
    count, left = divmod(len(data), stored.dtype.itemsize * rest or 1)
    if left or unknown > 1 or (not unknown and count != 1):
        return Rejection(
            f"{len(data):,} bytes, which aren't {stored.name} of shape {form.shape}: truncated, or "
            "of another dtype or shape"
        )
    shape = tuple(count if length is None else length for length in form.shape)
    return Facts(crc32c(data), 0, len(data), shape, codec)


def decode_text(payload: Encoded) -> str:
    """Decode a text, with its line ends as stored. Raises ValueError if it isn't UTF-8."""
    try:
        return str(payload.data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from error


def decode_array(payload: Encoded, codec: str, shape: Sequence[int]) -> NDArray[Any]:
    """Decode an array to native byte order, rows first: a view of the payload if it is stored so.
    codec, shape: as the facts have them. Raises ValueError."""
    found = array_codec(codec)
    if found is None:
        raise ValueError(f"{codec[:80]!r} is no codec of an array")
    if min(shape, default=0) < 0 or math.prod(shape) * found.dtype.itemsize != len(payload):
        raise ValueError(
            f"{found.name} of shape {tuple(shape)} doesn't take {len(payload):,} bytes"
        )
    values = payload.view(found.dtype)
    if not found.dtype.isnative:
        values = values.astype(found.dtype.newbyteorder("="))
    if not found.is_fortran:
        return values.reshape(shape)
    return np.ascontiguousarray(values.reshape(shape[::-1]).T)


def to_array(
    payload: Encoded, codec: str, shape: Sequence[int], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Decode one sample's numbers to a dtype, rows first. shape: of this sample. Raises ValueError
    for a payload that doesn't fit."""
    return decode_array(payload, codec, shape).astype(dtype, copy=False)
