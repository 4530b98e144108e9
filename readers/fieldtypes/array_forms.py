"""Describe the dtype and shape of arrays, number their codecs, decode payloads of numbers, and read
headers of .npy files with numpy, within bounds, without unpickling anything.

Payloads were checked when they were indexed, but codecs and shapes come from an untrusted index: a
payload that doesn't fit them raises ValueError, whose message is a reason against the sample.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from penstock.readers.fieldtypes.columns import DenseColumn, RaggedColumn
from penstock.readers.types import CODECS, ArrayCodec, Facts, Rejection, accepted, array_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.types import Bools, Encoded, Ints, Numbers

    Known = tuple[np.dtype[Any] | None, tuple[int | None, ...] | None]

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
    def empty(self) -> Numbers:
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

    def returned(self, value: Any) -> Numbers:
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

    def column(self, samples: Sequence[Numbers]) -> DenseColumn | RaggedColumn:
        """Join samples of this form, which may be none."""
        if not self.is_ragged:
            shape = (len(samples), *self.fixed_shape)
            return DenseColumn(np.array(samples, self.dtype).reshape(shape))
        rest = self.rest
        shapes = None if rest is not None else np.zeros((0, len(self.shape)), np.int64)
        nothing = np.empty((0, *(rest or ())), self.dtype)
        return RaggedColumn.of(samples, like=RaggedColumn(nothing, np.zeros(1, np.int64), shapes))


def unfit_numbers(dtype: np.dtype[Any], found: Numbers) -> Bools:
    """Mark the numbers that a dtype can't hold. Returns bools of their shape."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.asarray((found < int(limits.min)) | (found > int(limits.max)))
    with np.errstate(all="ignore"):
        return np.asarray(np.isinf(found.astype(dtype)) & np.isfinite(found))


_HELD = {"i": "iu", "u": "iu", "f": "iuf", "c": "iufc", "b": "b"}


def fits(dtype: np.dtype[Any], values: Numbers) -> bool:
    """Return True if a dtype holds the values: integers keep their value, and numbers stay
    finite."""
    return values.dtype.kind in _HELD[dtype.kind] and not unfit_numbers(dtype, values).any()


def codec_number(codec: str) -> int:
    """Return the number of an array's codec. Raises ValueError for an unknown one."""
    if codec not in _NUMBERS:
        raise ValueError(f"{codec[:40]!r} isn't an array's codec")
    return _NUMBERS[codec]


def as_bits(values: Numbers) -> Ints:
    """Convert numbers to int64 without loss: floats by their bits in float64."""
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, np.float64).view(np.int64)
    if values.dtype.kind in "cu" and values.dtype.itemsize == 8:
        return np.ascontiguousarray(values).view(np.int64)
    return values.astype(np.int64)


def from_bits(bits: Ints, dtype: np.dtype[Any]) -> Numbers:
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


def decode_array(payload: Encoded, codec: str, shape: Sequence[int]) -> Numbers:
    """Decode an array to native byte order, rows first: a view of the payload if it is stored so.
    codec, shape: as the facts have them. Raises ValueError."""
    found = array_codec(codec)
    if found is None:
        raise ValueError(f"{codec[:80]!r} isn't a codec of an array")
    if min(shape, default=0) < 0 or math.prod(shape) * found.dtype.itemsize != len(payload):
        raise ValueError(f"{found.name} of shape {tuple(shape)} can't take {len(payload):,} bytes")
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


MAGIC = npy_format.MAGIC_PREFIX
MAX_HEAD_BYTES = 4096
"""The largest number of bytes before the payload of an .npy file; numpy usually writes 128."""

UNSUPPORTED_NPY = "an .npy file of"
"""Begins the reason against a file whose header is sound but whose dtype isn't supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NpyHeader:
    """The header of an .npy file. start: of the payload in the file, in bytes."""

    codec: ArrayCodec
    shape: tuple[int, ...]
    start: int


def read_npy_header(data: Encoded, *, size_bytes: int | None = None) -> NpyHeader | Rejection:
    """Return the header of an .npy file, or why the file is no array of numbers. data: the first
    bytes of the file, uint8, shape (bytes,). size_bytes: of the file; None if data is the whole
    file."""
    head = data[:MAX_HEAD_BYTES].tobytes()
    if not head.startswith(MAGIC):
        return Rejection("not an .npy file (its first bytes differ)" if head else "empty file")
    version, file = tuple(head[6:8]), io.BytesIO(head)
    # Version 3 differs from 2 only in the names of fields, and arrays with fields are refused.
    width = 2 if version == (1, 0) else 4
    if version not in ((1, 0), (2, 0), (3, 0)):
        return Rejection(f"an .npy file of unknown version {'.'.join(map(str, version))}")
    length, most = int.from_bytes(head[8 : 8 + width], "little"), MAX_HEAD_BYTES - 8 - width
    if length > most:
        return Rejection(f"{UNSUPPORTED_NPY} a header of {length:,} bytes; up to {most:,} are read")
    file.seek(npy_format.MAGIC_LEN)
    read = npy_format.read_array_header_1_0 if width == 2 else npy_format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(file, max_header_size=MAX_HEAD_BYTES)
    except Exception:  # numpy raises what Python's parser raises
        return Rejection("truncated or damaged: its .npy header can't be read")
    codec = array_codec(dtype.str)
    if codec is None:
        return Rejection(
            f"{UNSUPPORTED_NPY} dtype {dtype.str!r:.80}: save booleans, integers or floats of 8 "
            "bytes at most, or complex numbers of 16; objects are pickled and never loaded, and "
            "each field of a structured dtype needs a file of its own"
        )
    if not is_shape(shape):
        return Rejection(f"damaged: its .npy header has the shape {str(shape)[:80]}")
    size_bytes = len(data) if size_bytes is None else size_bytes
    wanted, got = math.prod(shape) * codec.dtype.itemsize, size_bytes - file.tell()
    if wanted != got:
        return Rejection(
            f"truncated or damaged: {codec.name} of shape {shape} takes {wanted:,} bytes, and "
            f"{got:,} follow its .npy header"
        )
    codec = ArrayCodec(codec.dtype, is_fortran=is_fortran and len(shape) > 1)
    return NpyHeader(codec=codec, shape=shape, start=file.tell())


def check_array(data: Encoded, known: Known, *, field: str) -> Facts:
    """Check an .npy file, and return its facts. Raises ValueError if it is bad. known: dtype and
    shape that are wanted, None for any. field: its name, for messages."""
    header, (dtype, shape) = accepted(read_npy_header(data)), known
    found = header.codec.native
    wanted = ArrayForm(found if dtype is None else dtype, header.shape if shape is None else shape)
    if found != wanted.dtype or not wanted.has(header.shape):
        is_deep = len(wanted.shape) == len(header.shape)
        advised = widened(wanted.shape, header.shape) if is_deep else header.shape
        raise ValueError(
            f"it is {ArrayForm(found, header.shape)}, but the schema wants {wanted}, and files "
            f"aren't cast: convert them, or {advice(field, found.name, advised)}"
        )
    if found.kind == "b" and len(data) > header.start and data[header.start :].max() > 1:
        raise ValueError("damaged: booleans that are neither 0 nor 1")
    return Facts.of(data, start=header.start, shape=header.shape, codec=str(header.codec))
