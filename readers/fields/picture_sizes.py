"""How large a picture is, by its first bytes, before it is decoded: height and width, upright.

Where samples are indexed one by one a decoder tells; in chunks nobody looks at them before they
are read. JPEG, PNG and WebP are told here in microseconds, other kinds by Pillow's reading of their
headers.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.machine import machine_remedy
from penstock.readers.fields import sniff
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

Sides = tuple[int, int]

NOT_KNOWN: Sides = (0, 0)
"""Of what is no picture, or damaged at its head."""

_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.S)
_FRAMES = frozenset(
    (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
)
_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_EXIF, _ORIENTATION = b"Exif\0\0", 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations that exchange height and width."""


def upright_sizes(samples: Sequence[Encoded]) -> NDArray[np.int32]:
    """Heights and widths, int32, shape (n, 2); zeros where a sample is empty or no picture."""
    return np.array([upright_size(sample) for sample in samples], np.int32).reshape(-1, 2)


def upright_size(sample: Encoded) -> Sides:
    """Height and width as the picture is looked at, NOT_KNOWN where its head doesn't tell."""
    head = sample[:32].tobytes()
    try:
        if head[:2] == b"\xff\xd8":
            return _jpeg(sample.data)
        if head[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack(">II", head[16:24])
            return _checked(height, width)
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            found = _webp(head, sample)
            if found is not None:
                return found
    except (struct.error, IndexError):
        return NOT_KNOWN
    if not head or isinstance(sniff.sniff(head), Rejection):
        return NOT_KNOWN
    return _by_pillow(sample)


def _checked(height: int, width: int, *, is_turned: bool = False) -> Sides:
    if not (0 < height < 2**31 and 0 < width < 2**31):
        return NOT_KNOWN
    return (width, height) if is_turned else (height, width)


def _jpeg(data: memoryview) -> Sides:
    at, is_turned = 2, False
    while found := _MARKER.match(data, at):
        marker, at = data[found.end() - 1], found.end()
        if marker in _NO_LENGTH:
            continue
        length = (data[at] << 8) + data[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return _checked(height, width, is_turned=is_turned)
        if marker == 0xE1 and not is_turned and data[at + 2 : at + 8] == _EXIF:
            is_turned = _orientation(bytes(data[at + 8 : at + length])) in _TURNED
        at += length
    return NOT_KNOWN


def _orientation(exif: bytes) -> int:
    """The orientation that a TIFF head of EXIF tells, 1 where none."""
    if len(exif) < 8 or exif[:2] not in (b"II", b"MM"):
        return 1
    order = "<" if exif[:2] == b"II" else ">"
    (at,) = struct.unpack_from(order + "I", exif, 4)
    if at + 2 > len(exif):
        return 1
    (count,) = struct.unpack_from(order + "H", exif, at)
    for entry in range(at + 2, min(at + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind = struct.unpack_from(order + "HH", exif, entry)
        if tag == _ORIENTATION and kind == 3:
            return int(struct.unpack_from(order + "H", exif, entry + 8)[0])
    return 1


def _webp(head: bytes, sample: Encoded) -> Sides | None:
    """None where it has metadata that may turn it: Pillow tells then."""
    kind = head[12:16]
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        return _checked(height & 0x3FFF, width & 0x3FFF)
    if kind == b"VP8L" and head[20] == 0x2F:
        (bits,) = struct.unpack("<I", head[21:25])
        return _checked((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if kind == b"VP8X" and not head[20] & 0x08:
        width, height = (int.from_bytes(head[a : a + 3], "little") + 1 for a in (24, 27))
        return _checked(height, width)
    del sample
    return None


def _by_pillow(sample: Encoded) -> Sides:
    import io

    from PIL import Image

    try:
        with Image.open(io.BytesIO(sample.data)) as image:
            turn = image.getexif().get(_ORIENTATION, 1)
            return _checked(image.height, image.width, is_turned=turn in _TURNED)
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        if machine_remedy(error) is not None:
            raise
        return NOT_KNOWN
