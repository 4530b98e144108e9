"""Read headers of .npy files with numpy, within bounds, without unpickling anything; check files of
one sample.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.lib import format as npy_format

from penstock.readers.fieldtypes.array_forms import ArrayForm, advice, is_shape, widened
from penstock.readers.types import ArrayCodec, Facts, Rejection, accepted, array_codec

if TYPE_CHECKING:
    import numpy as np

    from penstock.readers.types import Encoded

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
        return Rejection(
            f"{UNSUPPORTED_NPY} a header of {length:,} bytes; at most {most:,} are read"
        )
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


def check_array(
    data: Encoded, dtype: np.dtype[Any] | None, shape: tuple[int | None, ...] | None, *, field: str
) -> Facts:
    """Check an .npy file, and return its facts. Raises ValueError if it is bad. dtype, shape:
    wanted, None for any. field: its name, for messages."""
    header = accepted(read_npy_header(data))
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
