"""Recognise and verify encoded images: their codec and size, damage to their structure, and a full
decode by the installed decoder.

DALI and libjpeg decode many damaged JPEG scans without an error, so `check_jpeg` checks the
structure: in entropy-coded data 0xFF is followed by 0x00, a restart marker or another 0xFF (ITU-T
T.81, B.1.1.5), and the image ends with EOI. That finds truncation and part of the damage. Damage
that keeps the structure decodes to wrong pixels, and only a checksum of the original could detect
it.

Where samples are indexed one by one, a decoder measures their images. Samples in chunks are not
decoded before they are read, so their sizes come from this module: JPEG, PNG and WebP in
microseconds (Pillow takes 0.3 ms for a WebP), other kinds from their headers by Pillow.

`readers` stands below `augment` and can't import it; the decoder is looked up by the entry point
"image" of group "penstock.verify". `strict_pillow` makes Pillow raise for truncated data.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import re
import struct
import threading
from dataclasses import replace
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.cache import ConfigError, MissingDependencyError, PenstockError
from penstock.cache.base import usable_cores
from penstock.readers.types import MAX_PIXELS, Facts, ImageFacts, Rejection, failure, pixel_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded, Verify

IMAGE_HEAD_BYTES = 64
"""The number of leading bytes that `sniff` needs."""

_JPEG = b"\xff\xd8\xff"
# The first bytes of each kind of image, and its plugin of Pillow.
_KINDS = {
    "jpeg": (_JPEG, "Jpeg"),
    "png": (rb"\x89PNG\r\n\x1a\n", "Png"),
    "tiff": (rb"II[*+]\0|MM\0[*+]", "Tiff"),
    "bmp": (rb"BM", "Bmp"),
    "jpeg2000": (rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", "Jpeg2K"),
    "webp": (rb"RIFF....WEBP", "WebP"),
    "pnm": (rb"P[1-6][\s#]", "Ppm"),
    "GIF": (rb"GIF8", None),
    "AVIF": (rb"....ftypavi[fs]", None),
    "HEIC": (rb"....ftyp(?:hei[cxf]|hevc|mif1|msf1)", None),
}
# Its last group is the name of the kind that matches.
_ANY = re.compile(
    b"|".join(b"(?P<%b>%b)" % (kind.encode(), magic) for kind, (magic, _) in _KINDS.items()), re.S
)

_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_EOI, _SOS = 0xD9, 0xDA
_NO_LENGTH = (0x01, 0xD8)
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
# What may follow a scan: tables, a further scan, the end, comments and application data, DNL.
_AFTER_SCAN = frozenset((0xC4, 0xCC, _EOI, _SOS, 0xDB, 0xDC, 0xDD, 0xFE, *range(0xE0, 0xF0)))


def sniff(head: bytes) -> str | Rejection:
    """Return the codec of an image, or why the bytes are no image. head: its first IMAGE_HEAD_BYTES
    bytes."""
    found = _ANY.match(head)
    if found is None:
        reason = "not an image (its first bytes match no known image format)"
        return Rejection(reason if head else "empty file")
    kind = str(found.lastgroup)
    if _KINDS[kind][1] is None:
        return Rejection(f"{kind} can't be decoded by DALI: convert it to JPEG, PNG or WebP")
    return kind


def open_with_plugin(sample: Encoded, kind: str) -> Any:
    """Open an image with Pillow's plugin of its kind. `Image.open` would let other plugins try, and
    warn of large images."""
    name = _KINDS[kind][1]
    plugin = getattr(importlib.import_module(f"PIL.{name}ImagePlugin"), f"{name}ImageFile")
    return plugin(io.BytesIO(sample.data))


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
    at, last, search = 2, len(view) - 2, _MARKER.search
    while found := search(view, at):
        at = found.end()
        marker = view[at - 1]
        yield marker, at - 2
        if marker not in _NO_LENGTH and at <= last:
            at += (view[at] << 8) + view[at + 1]


def is_progressive(data: Encoded) -> bool:
    """Return True if a JPEG consists of several scans that refine it (SOF2 and similar, T.81 table
    B.1), and False for other formats. data: uint8, shape (bytes,)."""
    if data[:2].tobytes() != b"\xff\xd8":
        return False
    decisive = {*_PROGRESSIVE, _SOS, _EOI}
    return next((m for m, _ in _markers(data.data) if m in decisive), None) in _PROGRESSIVE


Sides = tuple[int, int]

UNKNOWN_SIZE: Sides = (0, 0)
"""The size of a sample that is no picture, or whose header is damaged."""

_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_EXIF, _ORIENTATION = b"Exif\0\0", 0x0112
_TURNED = (5, 6, 7, 8)
"""Orientations that exchange height and width."""


def upright_sizes(samples: Sequence[Encoded]) -> NDArray[np.int32]:
    """Return heights and widths, int32, shape (n, 2); zeros if a sample is empty or no picture."""
    return np.array([upright_size(sample) for sample in samples], np.int32).reshape(-1, 2)


def upright_size(sample: Encoded) -> Sides:
    """Return the height and width of an upright picture, or UNKNOWN_SIZE if its header has none."""
    head = sample[:IMAGE_HEAD_BYTES].tobytes()
    try:
        if head[:2] == _JPEG[:2]:
            return _jpeg_size(sample.data)
        kind = sniff(head)
        if kind == "png":
            return _checked_size(*reversed(struct.unpack(">II", head[16:24])))
        if kind == "webp" and (found := _webp_size(head)) is not None:
            return found
    except (struct.error, IndexError):
        return UNKNOWN_SIZE
    return UNKNOWN_SIZE if isinstance(kind, Rejection) else _size_by_pillow(sample, kind)


def _checked_size(height: int, width: int, *, is_turned: bool = False) -> Sides:
    if not (0 < height < 2**31 and 0 < width < 2**31):
        return UNKNOWN_SIZE
    return (width, height) if is_turned else (height, width)


def _jpeg_size(data: memoryview) -> Sides:
    """Return the upright size. This is on the path of each image of a batch, where `_markers` would
    take a third longer."""
    at, is_turned = 2, False
    while found := _MARKER.search(data, at):
        at = found.end()
        marker = data[at - 1]
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return _checked_size(height, width, is_turned=is_turned)
        if marker in (_SOS, _EOI):
            break
        length = 0 if marker in _NO_LENGTH else (data[at] << 8) + data[at + 1]
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


def _size_by_pillow(sample: Encoded, kind: str) -> Sides:
    try:
        with open_with_plugin(sample, kind) as image:
            turn = image.getexif().get(_ORIENTATION, 1)
            return _checked_size(image.height, image.width, is_turned=turn in _TURNED)
    except Exception as error:  # each layer of Pillow raises its own kinds
        failure(error)  # raises it again if the machine caused it
        return UNKNOWN_SIZE


_GROUP = "penstock.verify"


def verify_name(verify: Verify | str | None) -> str | None:
    """Return the name by which other machines find a verifier: an entry point or "module:function".
    None stands for the installed one. Raises ConfigError for a callable that has no such name."""
    if verify is None or isinstance(verify, str):
        return verify
    module, name = getattr(verify, "__module__", None), getattr(verify, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise ConfigError(
            f"verify: got {verify!r} together with executor=, wanted a function of a module that "
            f"the workers can import, or the name of an entry point of {_GROUP!r}."
        )
    return f"{module}:{name}"


def named_verify(
    name: str = "image", *, workers: int | None = None, max_pixels: int = MAX_PIXELS
) -> Verify:
    """Load a verifier by a name that `verify_name` returned. An entry point's runs on `workers`
    threads. max_pixels: of an image. Raises MissingDependencyError."""
    try:
        if ":" in name:
            return cast("Verify", resolve_name(name))
        point = next(iter(entry_points(group=_GROUP, name=name)), None)
        if point is None:
            raise ImportError("no such entry point is installed")
        threads = workers or usable_cores()
        return functools.partial(point.load(), threads=threads, max_pixels=max_pixels)
    except (ImportError, AttributeError, ValueError) as error:
        raise MissingDependencyError(
            f"The image verifier {name!r} ({_GROUP!r}) can't be loaded ({error}). Checking images "
            "decodes each once, with DALI: pip install 'penstock[dali]' (CUDA 13 or no GPU) or "
            "'penstock[cuda12]'; or pass verify=, a function of a module that every worker can "
            "import."
        ) from error


def check_images(
    samples: Sequence[Encoded | Rejection | None], verify: Verify | None, *, max_pixels: int
) -> list[Facts | Rejection | None]:
    """Check the structure of each image, decode it fully, and return its facts or why it is bad.
    Samples that are missing or rejected already stay as they are."""
    found: list[Any] = [*samples]
    images: dict[int, Encoded] = {}
    for row, sample in enumerate(samples):
        if isinstance(sample, np.ndarray):
            codec = sniff(sample[:IMAGE_HEAD_BYTES].tobytes())
            found[row] = check_jpeg(sample) if codec == "jpeg" else codec
            if not isinstance(found[row], Rejection):
                images[row] = sample
    for row, verdict in zip(images, _verdicts([*images.values()], verify), strict=True):
        found[row], image = verdict, images[row]
        if isinstance(verdict, ImageFacts):
            height, width = verdict.height, verdict.width
            facts = Facts.of(image, shape=(height, width, verdict.channels), codec=verdict.codec)
            facts = replace(facts, is_progressive=is_progressive(image))
            found[row] = pixel_refusal(width, height, max_pixels=max_pixels) or facts
    return found


def _verdicts(encoded: Sequence[Encoded], verify: Verify | None) -> list[ImageFacts | Rejection]:
    """Return the results of `verify`, with a Rejection for a sample on which it raises. Errors that
    aren't a sample's fault are raised: our own, and those of the machine."""
    if not encoded:
        return []
    assert verify is not None, "images need a verifier"
    try:
        return verify(encoded)
    except (PenstockError, MemoryError, OSError):
        raise
    except Exception as error:
        if len(encoded) == 1:
            return [Rejection(f"the decoder failed on it ({failure(error)})")]
    return [verdict for each in encoded for verdict in _verdicts([each], verify)]


_lock = threading.Lock()
_inside: list[bool] = []  # the switch's value before each thread that is inside


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Make Pillow raise for truncated data inside.

    Pillow ignores missing data if a program sets its module's switch, as many training scripts do.
    It offers no other way than this switch, which stays off until the last thread has left.
    """
    from PIL import ImageFile

    with _lock:
        _inside.append(_inside[0] if _inside else ImageFile.LOAD_TRUNCATED_IMAGES)
        if ImageFile.LOAD_TRUNCATED_IMAGES:  # don't write it without need
            ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _lock:
            if _inside.pop() and not _inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = True
