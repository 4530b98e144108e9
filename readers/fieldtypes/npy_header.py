"""Parse headers of .npy files strictly and within bounds, without unpickling anything.

Source: NEP 1, "A simple file format for NumPy arrays", and the description of versions 1.0 to 3.0
in numpy.lib.format.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.readers.types import ArrayCodec, Rejection, array_codec

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4, 3: 4}
_MAX_HEADER_BYTES = 10_000  # numpy's own limit for files that it doesn't trust
MAX_HEAD_BYTES = 12 + _MAX_HEADER_BYTES
"""The largest number of bytes before the payload of an .npy file."""

UNSUPPORTED_NPY = "an .npy file of"
"""Begins the reason against a file whose header is sound but whose dtype isn't supported."""

_MAX_DIMENSIONS, _MAX_LENGTH = 32, 2**40
_KEYS = {"descr", "fortran_order", "shape"}


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
    text = _header_text(data)
    if isinstance(text, Rejection):
        return text
    values, start = text
    found = _codec(values["descr"])
    if isinstance(found, Rejection):
        return found
    shape = _shape(values["shape"])
    if shape is None:
        return Rejection(f"damaged: its .npy header has the shape {_short(values['shape'])}")
    if type(values["fortran_order"]) is not bool:
        return Rejection("damaged: its .npy header has no valid order")
    codec = ArrayCodec(found.dtype, is_fortran=values["fortran_order"] and len(shape) > 1)
    size_bytes = len(data) if size_bytes is None else size_bytes
    wanted, got = math.prod(shape) * codec.dtype.itemsize, size_bytes - start
    if wanted != got:
        return Rejection(
            f"truncated or damaged: {codec.name} of shape {shape} takes {wanted:,} bytes, and "
            f"{got:,} follow its .npy header"
        )
    return NpyHeader(codec=codec, shape=shape, start=start)


def _header_text(data: Encoded) -> tuple[dict[str, object], int] | Rejection:
    """Return the values of the header, and the position at which the payload starts."""
    head = data[:12].tobytes()
    if not head:
        return Rejection("empty file")
    if not head.startswith(MAGIC):
        return Rejection("not an .npy file (its first bytes differ)")
    version = tuple(head[6:8])
    width = _LENGTH_BYTES.get(version[0], 0) if version[1:] == (0,) else 0
    if not width:
        return Rejection(f"an .npy file of unknown version {'.'.join(map(str, version))}")
    length, at = int.from_bytes(head[8 : 8 + width], "little"), 8 + width
    if length > _MAX_HEADER_BYTES:
        return Rejection(f"its .npy header has {length:,} bytes; at most {_MAX_HEADER_BYTES:,}")
    text = data[at : at + length].tobytes()
    try:
        values = ast.literal_eval(text.decode("utf-8" if version[0] == 3 else "latin-1").strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        values = None
    if len(text) < length or not isinstance(values, dict) or set(values) != _KEYS:
        return Rejection("truncated or damaged: its .npy header can't be read")
    return values, at + length


def _codec(descr: object) -> ArrayCodec | Rejection:
    if not isinstance(descr, str):
        return Rejection(
            f"{UNSUPPORTED_NPY} named fields (a structured dtype): save one file for each field"
        )
    if descr.lstrip("|<>=").startswith("O"):
        return Rejection(
            f"{UNSUPPORTED_NPY} Python objects (dtype object), which are pickled and never loaded: "
            "save numbers"
        )
    codec = array_codec(descr)
    if codec is None:
        return Rejection(
            f"{UNSUPPORTED_NPY} dtype {_short(descr)}: save booleans, integers or floats of 8 "
            "bytes at most, or complex numbers of 16"
        )
    return codec


def _shape(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, tuple) or len(value) > _MAX_DIMENSIONS:
        return None
    if not all(type(length) is int and 0 <= length <= _MAX_LENGTH for length in value):
        return None
    # With a length of 0 no bytes back the other lengths, and numpy refuses such an array.
    if 0 in value and math.prod(length or 1 for length in value) > _MAX_LENGTH:
        return None
    return value


def _short(value: object) -> str:
    return repr(value)[:80]
