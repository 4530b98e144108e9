"""Decode the payloads of texts, arrays and masks at read time. Pure.

The payloads were checked when they were indexed. Codecs and shapes may come from anybody's
index. A payload that doesn't fit them is a ValueError whose words are a reason against the sample.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.readers.fields.masks import TOO_WIDE, narrow, npy_mask, read_mask, sniff_mask
from penstock.readers.fields.npy_header import read_npy_header
from penstock.readers.types import MAX_PIXELS, Rejection, array_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

_INT32 = np.dtype(np.int32)


def decode_text(payload: Encoded) -> str:
    """Text as it stands, with its line ends. Raises ValueError (not UTF-8)."""
    try:
        return str(payload.data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text at byte {error.start}") from error


def decode_array(payload: Encoded, codec: str, shape: Sequence[int]) -> NDArray[Any]:
    """An array in this machine's byte order, rows first: a view of the payload where that is how it
    is stored. codec, shape: as facts have them. Raises ValueError."""
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


def decode_mask(
    payload: Encoded, dtype: str = "auto", *, max_pixels: int = MAX_PIXELS
) -> NDArray[Any]:
    """The class numbers of a mask, an image file or an .npy file: uint8 or int32, shape (height,
    width). dtype: of the settled `Mask`. Raises ValueError."""
    codec = sniff_mask(payload)
    classes = (
        codec if isinstance(codec, Rejection) else _classes(payload, codec, max_pixels=max_pixels)
    )
    if isinstance(classes, Rejection):
        raise ValueError(classes.reason)
    if dtype == "uint8" and classes.dtype != np.uint8:
        raise ValueError(TOO_WIDE)
    return classes.astype(_INT32) if dtype == "int32" and classes.dtype != _INT32 else classes


def _classes(payload: Encoded, codec: str, *, max_pixels: int) -> NDArray[Any] | Rejection:
    if codec != "npy":
        return read_mask(payload, codec, max_pixels=max_pixels)
    header = read_npy_header(payload)
    if isinstance(header, Rejection):
        return header
    refusal = npy_mask(header, max_pixels=max_pixels)
    return (
        refusal
        if refusal is not None
        else narrow(decode_array(payload[header.start :], str(header.codec), header.shape))
    )
