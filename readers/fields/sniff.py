"""What can be told of an image's bytes without decoding them: the codec, and whether a JPEG is
whole.

DALI and libjpeg decode most damaged JPEG scans without a word, so the structure is checked here: in
entropy-coded data 0xFF is followed by 0x00, a restart marker or another 0xFF (ITU-T T.81, B.1.1.5),
and the image ends with EOI. That finds truncation and part of the damage; damage that keeps the
structure decodes to wrong pixels and nothing but a checksum of the original could tell.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

HEAD_BYTES = 64
"""As many first bytes as `sniff` looks at."""

_MAGIC = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"II+\x00", "tiff"),
    (b"MM\x00+", "tiff"),
    (b"BM", "bmp"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "jpeg2000"),
    (b"\xff\x4f\xff\x51", "jpeg2000"),
)
_PNM = re.compile(rb"P[1-6][\s#]")
_FOREIGN_BRANDS = {
    b"avif": "AVIF",
    b"avis": "AVIF",
    b"heic": "HEIC",
    b"heix": "HEIC",
    b"heif": "HEIC",
    b"hevc": "HEIC",
    b"mif1": "HEIC",
    b"msf1": "HEIC",
}

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_EOI, _SOS = 0xD9, 0xDA
_NO_LENGTH = (0x01, 0xD8)
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# What may follow a scan: tables, a further scan, the end, comments and application data, DNL.
_AFTER_SCAN = frozenset((0xC4, 0xCC, _EOI, _SOS, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)))


def sniff(head: bytes) -> str | Rejection:
    """The codec of an image by its first HEAD_BYTES bytes, or why it can't be one."""
    if not head:
        return Rejection("empty file")
    for magic, codec in _MAGIC:
        if head.startswith(magic):
            return codec
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "webp"
    if _PNM.match(head):
        return "pnm"
    foreign = "GIF" if head[:4] == b"GIF8" else None
    if head[4:8] == b"ftyp":
        foreign = _FOREIGN_BRANDS.get(head[8:12])
    if foreign:
        return Rejection(f"{foreign} can't be decoded by DALI: convert it to JPEG, PNG or WebP")
    return Rejection("not an image (its first bytes are of no known image format)")


def check_jpeg(data: Encoded) -> Rejection | None:
    """Why a JPEG's structure is broken, or None. data: uint8, shape (bytes,).

    Lenient where decoders agree: bytes after the end marker and between segments are passed over.
    """
    view = data.data
    at, in_scan = 2, False
    while found := _MARKER.search(view, at):
        marker, at = view[found.start() + 1], found.end()
        if in_scan and marker not in _AFTER_SCAN:
            return Rejection(f"corrupt JPEG scan (0xFF{marker:02X} at byte {found.start()})")
        if marker == _EOI:
            return None
        if marker not in _NO_LENGTH:
            at += max(int.from_bytes(view[at : at + 2], "big"), 2)
        in_scan = marker == _SOS
    return Rejection("truncated JPEG (no end-of-image marker)")


def is_progressive(data: Encoded) -> bool:
    """Whether a JPEG comes in several scans that refine it (SOF2 and its kin, T.81 table B.1);
    False for what isn't a JPEG. data: uint8, shape (bytes,)."""
    view, at = data.data, 2
    if len(view) < 2 or view[0] != 0xFF or view[1] != 0xD8:
        return False
    while found := _MARKER.search(view, at):
        marker, at = view[found.start() + 1], found.end()
        if marker in _PROGRESSIVE:
            return True
        if marker in (_SOS, _EOI):
            return False
        if marker not in _NO_LENGTH:
            at += max(int.from_bytes(view[at : at + 2], "big"), 2)
    return False
