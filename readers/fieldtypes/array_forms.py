"""Describe the dtype and shape of arrays, number their codecs, and decode payloads of numbers.

Payloads were checked when they were indexed, but codecs and shapes come from an untrusted index: a
payload that doesn't fit them raises ValueError, whose message is a reason against the sample.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fieldtypes.columns import DenseColumn, RaggedColumn
from penstock.readers.types import CODECS, Facts, array_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded


AUTO_DTYPE = "auto"
"""Stands for the dtype of the stored data, until the index has settled it."""

ARRAY_CODECS = tuple(CODECS)
"""The names of all codecs of arrays."""

CODEC_ITEMSIZES = np.array([each.dtype.itemsize for each in CODECS.values()], np.int64)
"""Bytes of one number, by the number of the codec."""

_MAX_DIMENSIONS, _MAX_LENGTH = 32, 2**40
_NUMBERS = {codec: number for number, codec in enumerate(CODECS)}


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """Dtype and shape of one sample of numbers. None in shape is a length that differs."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    @classmethod
    def of(cls, dtype: str, shape: tuple[int | None, ...] = ()) -> ArrayForm:
        """Return the form of a dtype's name and a shape."""
        return cls(np.dtype(dtype), shape)

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

    @property
    def empty(self) -> NDArray[Any]:
        """The value of a sample that lacks the field: zeros, and no rows if lengths differ."""
        return np.zeros(self.fixed_shape, self.dtype)

    def has(self, shape: Sequence[int]) -> bool:
        """Return True if a sample can have a shape."""
        return len(shape) == len(self.shape) and all(
            want in (None, got) for got, want in zip(shape, self.shape, strict=True)
        )

    def __str__(self) -> str:
        """Return a description for messages."""
        if not self.shape:
            return f"one {self.dtype}"
        lengths = ", ".join("any" if length is None else str(length) for length in self.shape)
        return f"{self.dtype} of shape ({lengths}{',' if len(self.shape) == 1 else ''})"

    def returned(self, value: Any) -> NDArray[Any]:
        """Convert a value that a user's function returned; arrays must have the dtype. Raises
        ValueError(got, wanted) for another value; got is "" to show the value."""
        is_typed = hasattr(value, "dtype")
        try:
            array = np.asarray(value)
        except Exception as error:  # an array-like object may raise anything
            why = f"a value that numpy can't convert to an array ({error})"
            raise ValueError(why, str(self)) from None
        if not (is_typed or array.size) and self.shape[:1] == (None,):
            array = self.empty
        is_same = array.dtype.newbyteorder("=") == self.dtype
        if not (is_same or (not is_typed and fits(self.dtype, array))) or not self.has(array.shape):
            got = str(ArrayForm(array.dtype, array.shape)) if is_typed else ""
            raise ValueError(got, str(self))
        return array.astype(self.dtype, copy=False)

    def column(self, samples: Sequence[NDArray[Any]]) -> DenseColumn | RaggedColumn:
        """Join samples of this form, which may be none."""
        if not self.is_ragged:
            shape = (len(samples), *self.fixed_shape)
            return DenseColumn(np.array(samples, self.dtype).reshape(shape))
        rest = self.rest
        like = RaggedColumn(
            np.empty((0, *(rest or ())), self.dtype),
            np.zeros(1, np.int64),
            None if rest is not None else np.zeros((0, len(self.shape)), np.int64),
        )
        return RaggedColumn.of(samples, like=like)


def unfit_numbers(dtype: np.dtype[Any], found: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the numbers that a dtype can't hold. Returns bools of their shape."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray((found < int(limits.min)) | (found > int(limits.max)))
    with np.errstate(all="ignore"):
        return np.asarray(np.isinf(found.astype(dtype)) & np.isfinite(found))


_HELD = {"i": "iu", "u": "iu", "f": "iuf", "c": "iufc", "b": "b"}


def fits(dtype: np.dtype[Any], values: NDArray[Any]) -> bool:
    """Return True if a dtype holds the values: integers keep their value, and numbers stay
    finite."""
    return values.dtype.kind in _HELD[dtype.kind] and not unfit_numbers(dtype, values).any()


def codec_number(codec: str) -> int:
    """Return the number of an array's codec. Raises ValueError for an unknown one."""
    if codec not in _NUMBERS:
        raise ValueError(f"{codec[:40]!r} isn't an array's codec")
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


def bare_facts(data: Encoded, form: ArrayForm, codec: str) -> Facts:
    """Return the facts of an array without a header. codec: of the numbers. At most one length of
    the form may be None. Raises ValueError if its size is wrong."""
    stored = CODECS[codec]
    rest = math.prod(length for length in form.shape if length is not None)
    unknown = form.shape.count(None)
    count, left = divmod(len(data), stored.dtype.itemsize * rest or 1)
    if left or unknown > 1 or (not unknown and count != 1):
        raise ValueError(
            f"{len(data):,} bytes, which aren't {stored.name} of shape {form.shape}: truncated, or "
            "of another dtype or shape"
        )
    shape = tuple(count if length is None else length for length in form.shape)
    return Facts.of(data, shape=shape, codec=codec)


def decode_array(payload: Encoded, codec: str, shape: Sequence[int]) -> NDArray[Any]:
    """Decode an array to native byte order, rows first: a view of the payload if it is stored so.
    codec, shape: as the facts have them. Raises ValueError."""
    found = array_codec(codec)
    if found is None:
        raise ValueError(f"{codec[:80]!r} isn't a codec of an array")
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


def is_shape(shape: Sequence[int | None]) -> bool:
    """Return True if samples can have a shape; None in it is any length."""
    lengths = [length for length in shape if length is not None]
    if len(shape) > _MAX_DIMENSIONS:
        return False
    if not all(type(length) is int and 0 <= length <= _MAX_LENGTH for length in lengths):
        return False
    # With a length of 0 no bytes back the other lengths, and numpy refuses such an array.
    return 0 not in lengths or math.prod(length or 1 for length in lengths) <= _MAX_LENGTH


def widened(a: Sequence[int | None], b: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the lengths that two shapes share, with None for those that differ."""
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def advice(field: str, dtype: str, shape: tuple[int | None, ...], *, of: str | None = None) -> str:
    """Return what to pass to `Dataset` for an array of this type, as an instruction."""
    owner = "" if of is None else f', of="{of}"'
    return f'pass schema={{"{field}": Array("{dtype}", {shape}{owner})}}'
