"""Recognise encoded images, sound and video by their bytes, without decoding them.

The functions find the codec or container, the size of an image, and damage to the structure of a
JPEG.

DALI and libjpeg decode many damaged JPEG scans without an error, so `check_jpeg` checks the
structure: in entropy-coded data 0xFF is followed by 0x00, a restart marker or another 0xFF (ITU-T
T.81, B.1.1.5), and the image ends with EOI. That finds truncation and part of the damage. Damage
that keeps the structure decodes to wrong pixels, and only a checksum of the original could detect
it.

Where samples are indexed one by one, a decoder measures their images. Samples in chunks are not
decoded before they are read, so their sizes come from this module: JPEG, PNG and WebP in
microseconds (Pillow takes 0.3 ms for a WebP), other kinds from their headers by Pillow. Sound and
video are not decoded yet: only their containers are recognised.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.types import Rejection, failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

IMAGE_HEAD_BYTES = 64
"""The number of leading bytes that `sniff` needs."""

_JPEG = b"\xff\xd8\xff"
_MATROSKA, _ASF = rb"\x1aE\xdf\xa3", rb"\x30\x26\xb2\x75\x8e\x66\xcf\x11"
_IMAGES = {
    "jpeg": _JPEG,
    "png": rb"\x89PNG\r\n\x1a\n",
    "tiff": rb"II[*+]\0|MM\0[*+]",
    "bmp": rb"BM",
    "jpeg2000": rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51",
    "webp": rb"RIFF....WEBP",
    "pnm": rb"P[1-6][\s#]",
}
_FOREIGN_IMAGES = {
    "GIF": rb"GIF8",
    "AVIF": rb"....ftypavi[fs]",
    "HEIC": rb"....ftyp(hei[cxf]|hevc|mif1|msf1)",
}
_AUDIO = {
    "wav": rb"(RIFF|RF64)....WAVE",
    "flac": rb"fLaC",
    "ogg": rb"OggS",
    # After a tag, or at a sync word: the layer isn't 0, as it is in ADTS.
    "mp3": rb"ID3|\xff[\xe2-\xe7\xea-\xef\xf2-\xf7\xfa-\xff]",
    "aac": rb"\xff[\xf0\xf1\xf8\xf9]",
    "au": rb"\.snd",
    "wma": _ASF,
    "webm": _MATROSKA,
    "aiff": rb"FORM....AIF[FC]",
    "mp4": rb"....ftyp",
}
_VIDEO = {
    "mp4": rb"....(ftyp|moov|mdat|wide)",
    "avi": rb"RIFF....AVI ",
    "webm": _MATROSKA,
    "ogg": rb"OggS",
    "flv": rb"FLV",
    "mpeg": rb"\0\0\x01[\xba\xb3]",
    "wmv": _ASF,
    "ts": rb"G.{187}G",
}

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_EOI, _SOS = 0xD9, 0xDA
_NO_LENGTH = (0x01, 0xD8)
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# What may follow a scan: tables, a further scan, the end, comments and application data, DNL.
_AFTER_SCAN = frozenset((0xC4, 0xCC, _EOI, _SOS, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)))


def sniff(head: bytes) -> str | Rejection:
    """Return the codec of an image, or why the bytes are no image. head: its first IMAGE_HEAD_BYTES
    bytes."""
    return "jpeg" if head[:3] == _JPEG else sniff_media("image", head)


def sniff_media(kind: str, head: bytes) -> str | Rejection:
    """Return the codec or container of an encoded image, sound or video, or why the bytes are of
    another kind. head: the first 192 of them."""
    if not head:
        return Rejection("empty file")
    patterns, what, known = _KINDS[kind]
    found = patterns.match(head)
    if found is not None and found.lastgroup in _FOREIGN_IMAGES:
        return Rejection(
            f"{found.lastgroup} can't be decoded by DALI: convert it to JPEG, PNG or WebP"
        )
    if found is None or found.lastgroup is None:
        return Rejection(f"not {what} (its first bytes match no known {known} format)")
    return found.lastgroup


def _any_of(patterns: dict[str, bytes]) -> re.Pattern[bytes]:
    """Return a pattern whose last group is the name of the one that matches."""
    # Only the names are groups.
    named = [b"(?P<%b>%b)" % (k.encode(), v.replace(b"(", b"(?:")) for k, v in patterns.items()]
    return re.compile(b"|".join(named), re.S)


_KINDS = {
    "image": (_any_of(_IMAGES | _FOREIGN_IMAGES), "an image", "image"),
    "audio": (_any_of(_AUDIO), "sound", "sound"),
    "video": (_any_of(_VIDEO), "a video", "video"),
}


def check_jpeg(data: Encoded) -> Rejection | None:
    """Return why the structure of a JPEG is broken, or None. data: uint8, shape (bytes,).

    It is lenient where decoders agree: bytes after the end marker and between segments are skipped.
    """
    in_scan = False
    for marker, at in _markers(data.data):
        if in_scan and marker not in _AFTER_SCAN:
            return Rejection(f"corrupt JPEG scan (0xFF{marker:02X} at byte {at})")
        if marker == _EOI:
            return None
        in_scan = marker == _SOS
    return Rejection("truncated JPEG (no end-of-image marker)")


def _markers(view: memoryview) -> Iterator[tuple[int, int]]:
    """Yield the markers of a JPEG after the first, and their positions."""
    at = 2
    while found := _MARKER.search(view, at):
        marker, at = view[found.start() + 1], found.end()
        yield marker, found.start()
        if marker not in _NO_LENGTH:
            at += max(int.from_bytes(view[at : at + 2], "big"), 2)


def is_progressive(data: Encoded) -> bool:
    """Return True if a JPEG consists of several scans that refine it (SOF2 and similar, T.81 table
    B.1), and False for other formats. data: uint8, shape (bytes,)."""
    if data[:2].tobytes() != b"\xff\xd8":
        return False
    decisive = (
        marker for marker, _ in _markers(data.data) if marker in (*_PROGRESSIVE, _SOS, _EOI)
    )
    return next(decisive, None) in _PROGRESSIVE


Sides = tuple[int, int]

UNKNOWN_SIZE: Sides = (0, 0)
"""The size of a sample that is no picture, or whose header is damaged."""

_SIZE_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.S)
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SIZE_NO_LENGTH = frozenset((0x01, *range(0xD0, 0xD9)))
_EXIF, _ORIENTATION = b"Exif\0\0", 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations that exchange height and width."""


def upright_sizes(samples: Sequence[Encoded]) -> NDArray[np.int32]:
    """Return heights and widths, int32, shape (n, 2); zeros if a sample is empty or no picture."""
    return np.array([upright_size(sample) for sample in samples], np.int32).reshape(-1, 2)


def upright_size(sample: Encoded) -> Sides:
    """Return the height and width of an upright picture, or UNKNOWN_SIZE if its header has none."""
    head = sample[:32].tobytes()
    try:
        if head[:2] == b"\xff\xd8":
            return _jpeg_size(sample.data)
        if head[:8] == b"\x89PNG\r\n\x1a\n":
            width, height = struct.unpack(">II", head[16:24])
            return _checked_size(height, width)
        if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
            found = _webp_size(head)
            if found is not None:
                return found
    except (struct.error, IndexError):
        return UNKNOWN_SIZE
    if not head or isinstance(sniff(head), Rejection):
        return UNKNOWN_SIZE
    return _size_by_pillow(sample)


def _checked_size(height: int, width: int, *, is_turned: bool = False) -> Sides:
    if not (0 < height < 2**31 and 0 < width < 2**31):
        return UNKNOWN_SIZE
    return (width, height) if is_turned else (height, width)


def _jpeg_size(data: memoryview) -> Sides:
    at, is_turned = 2, False
    while found := _SIZE_MARKER.match(data, at):
        marker, at = data[found.end() - 1], found.end()
        if marker in _SIZE_NO_LENGTH:
            continue
        length = (data[at] << 8) + data[at + 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return _checked_size(height, width, is_turned=is_turned)
        if marker == 0xE1 and not is_turned and data[at + 2 : at + 8] == _EXIF:
            is_turned = _orientation(bytes(data[at + 8 : at + length])) in _TURNED
        at += length
    return UNKNOWN_SIZE


def _orientation(exif: bytes) -> int:
    """Return the orientation in the TIFF header of EXIF data, or 1 if there is none."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None or len(exif) < 8:
        return 1
    (at,) = struct.unpack_from(order + "I", exif, 4)
    (count,) = struct.unpack_from(order + "H", exif, at) if at + 2 <= len(exif) else (0,)
    for entry in range(at + 2, min(at + 2 + 12 * count, len(exif) - 11), 12):
        tag, kind, _, value = struct.unpack_from(order + "HHIH", exif, entry)
        if tag == _ORIENTATION and kind == 3:
            return int(value)
    return 1


def _webp_size(head: bytes) -> Sides | None:
    """Return the size in a WebP header, or None if metadata may turn the image, so that Pillow must
    read it."""
    kind = head[12:16]
    if kind == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack("<HH", head[26:30])
        return _checked_size(height & 0x3FFF, width & 0x3FFF)
    if kind == b"VP8L" and head[20] == 0x2F:
        (bits,) = struct.unpack("<I", head[21:25])
        return _checked_size((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
    if kind == b"VP8X" and not head[20] & 0x08:
        width, height = (int.from_bytes(head[a : a + 3], "little") + 1 for a in (24, 27))
        return _checked_size(height, width)
    return None


def _size_by_pillow(sample: Encoded) -> Sides:
    import io

    from PIL import Image

    try:
        with Image.open(io.BytesIO(sample.data)) as image:
            turn = image.getexif().get(_ORIENTATION, 1)
            return _checked_size(image.height, image.width, is_turned=turn in _TURNED)
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        failure(error)  # raises it again if the machine caused it
        return UNKNOWN_SIZE
