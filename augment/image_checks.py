"""Examine encoded images before DALI decodes them: headers and damage.

Headers: a sample whose header can't be parsed, or whose window is outside its image, ends the
process instead of failing a batch of DALI (see `graph`), and so do some damaged JPEG 2000 files.

Damage: nvImageCodec 0.9 tries another decoder if one rejects a file. OpenCV's decodes damaged TIFF
and WebP files and animated PNGs, and leaves the memory of missing rows unwritten, so that pixels
differ from run to run. nvImageCodec's own bitmap decoder reads run-length codes and palettes as
pixels. Its OpenJPEG ends the process at some damaged JPEG 2000 files: SIGSEGV in
`opj_jp2_read_header`, depending on the earlier contents of its heap. So Pillow decodes these kinds
first. Plain JPEG and PNG don't need it: their decoders reject damaged files, except for JPEG scans.
"""

from __future__ import annotations

import importlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import MissingDependencyError
from penstock.cache.base import machine_remedy
from penstock.readers import MAX_PIXELS, Rejection, pixel_refusal
from penstock.readers.fieldtypes import IMAGE_HEAD_BYTES, sniff, strict_pillow

if TYPE_CHECKING:
    from penstock.readers import Encoded, EncodedBatch

_JPEG2000 = "JPEG 2000"
_JPEG2000_HEAD_BYTES = 8
_PLUGINS = {"TIFF": "Tiff", "WebP": "WebP", "BMP": "Bmp", "PNG": "Png", _JPEG2000: "Jpeg2K"}
_REASON_CHARACTERS = 200
_PNG_CHUNKS_BYTES = 2**16  # a PNG's chunk for animations comes within these, before its pixels
_SAMPLES_PER_PIXEL, _PLANES, _SEPARATE = 277, 284, 2
_BMP_COMPRESSION = slice(30, 34)
# Pillow's messages about missing or broken data; it also rejects good files of unknown kinds.
_DAMAGE = re.compile(r"truncated|broken|decoder error -2|decoder object|next frame")


def is_jpeg2000(sample: Encoded) -> bool:
    """Return True if bytes begin approximately as a JP2 file or a raw code stream: decoders check
    different parts of the signature."""
    head = sample[:_JPEG2000_HEAD_BYTES].tobytes()
    return head[4:8] == b"jP  " or head.startswith(b"\xff\x4f")


def needs_pillow_check(sample: Encoded) -> bool:
    """Return True for a file of a kind that DALI may decode although it is damaged, except for JPEG
    2000, which `capped_header` checks. About 1 us."""
    return _kind_for_pillow(sample) not in (None, _JPEG2000)


def pillow_refusal(sample: Encoded, *, max_pixels: int = MAX_PIXELS) -> Rejection | None:
    """Decode a file by Pillow if it is of a kind that needs it, and return why DALI mustn't decode
    it.

    None: DALI may decode it, or Pillow doesn't know the format. Raises MemoryError, and
    MissingDependencyError for a JPEG 2000 file if Pillow was built without OpenJPEG.
    """
    kind = _kind_for_pillow(sample)
    if kind is None:
        return None
    if kind == _JPEG2000:
        _check_openjpeg()
    stem = _PLUGINS[kind]
    # The plugin itself: Image.open would let other formats try, and warn of large images.
    plugin = getattr(importlib.import_module(f"PIL.{stem}ImagePlugin"), f"{stem}ImageFile")
    messages: list[str] = []
    try:
        with strict_pillow() as messages, plugin(io.BytesIO(sample.data)) as image:
            too_large = pixel_refusal(*image.size, max_pixels=max_pixels)
            if kind == _JPEG2000 and too_large is not None:
                return too_large
            if kind == "TIFF" and _has_alpha_plane(image.tag_v2):
                return Rejection(
                    "a TIFF of separate planes with an alpha channel, which DALI blends in: "
                    "convert it to PNG, or drop its alpha channel"
                )
            image.load()
    except Exception as error:  # each layer of Pillow raises its own kinds
        if machine_remedy(error) is not None:
            raise
        reason = " ".join("; ".join([str(error), *messages]).split())[:_REASON_CHARACTERS]
        is_damage = isinstance(error, OSError) and _DAMAGE.search(reason)
        if is_damage or kind == _JPEG2000:
            return Rejection(
                f"truncated or damaged: a {kind} file that Pillow can't decode "
                f"({type(error).__name__}: {reason})"
            )
    return None


def _has_alpha_plane(tags: Any) -> bool:
    return bool(tags.get(_PLANES) == _SEPARATE and tags.get(_SAMPLES_PER_PIXEL, 1) > 3)


def _check_openjpeg() -> None:
    from PIL import features

    if not features.check_codec("jpg_2000"):
        raise MissingDependencyError(
            "Checking JPEG 2000 images needs a Pillow with OpenJPEG, and this one was built "
            "without it. Install Pillow's own wheel (pip install --force-reinstall pillow), or "
            "convert these images to JPEG, PNG or WebP."
        )


def _kind_for_pillow(sample: Encoded) -> str | None:
    """Return the kind of a file that Pillow must decode before DALI may; None for others."""
    if is_jpeg2000(sample):
        return _JPEG2000
    codec = sniff(sample[:IMAGE_HEAD_BYTES].tobytes())
    if codec == "bmp":
        return None if sample[_BMP_COMPRESSION].any() else "BMP"
    if codec == "png":
        is_animated = b"acTL" in sample[:_PNG_CHUNKS_BYTES].tobytes().partition(b"IDAT")[0]
        return "PNG" if is_animated else None
    return "TIFF" if codec == "tiff" else "WebP" if codec == "webp" else None


_SMALLEST_FILE_BYTES = 16  # no image format has a smaller header
# Sample types that DALI 2.4 decodes, by trial; int32 (TIFF) ends a run half-way.
_DECODABLE_DTYPES = ("uint8", "uint16", "float32")


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an encoded image, before its orientation is applied."""

    height: int
    width: int
    channels: int
    codec: str

    @property
    def pixels(self) -> int:
        """Height times width."""
        return self.height * self.width


def read_header(sample: Encoded) -> Header | Rejection:
    """Return the header of an encoded image without decoding a pixel, in about 4 us."""
    from nvidia import nvimgcodec

    if len(sample) < _SMALLEST_FILE_BYTES:
        return Rejection(f"not an image: {len(sample)} byte(s)" if len(sample) else "empty file")
    try:
        stream = nvimgcodec.CodeStream(sample)
        dtype = str(stream.dtype)
        header = Header(stream.height, stream.width, stream.num_channels, stream.codec_name)
    except (RuntimeError, ValueError):  # nvImageCodec can't parse the bytes
        return Rejection("not an image of a format that DALI decodes")
    except Exception as error:  # its binding's errors for partly parsed files
        if machine_remedy(error) is not None:
            raise
        return Rejection(
            f"its header can't be understood ({type(error).__name__}: {error}): convert it to "
            "JPEG, PNG or WebP"
        )
    if dtype not in _DECODABLE_DTYPES:
        return Rejection(f"its samples are {dtype}; DALI decodes {', '.join(_DECODABLE_DTYPES)}")
    if header.codec == "tiff" and header.channels == 2:
        return Rejection(
            "a TIFF of 2 channels, which DALI reads as colours: convert it to PNG, or drop its "
            "alpha channel"
        )
    return header


def capped_header(sample: Encoded, *, max_pixels: int) -> Header | Rejection:
    """Return the header as `read_header` does, of unverified images of at most max_pixels. JPEG
    2000, which may end the process, is first decoded by Pillow. Raises MissingDependencyError."""
    refusal = pillow_refusal(sample, max_pixels=max_pixels) if is_jpeg2000(sample) else None
    header = refusal or read_header(sample)
    if isinstance(header, Rejection):
        return header
    return pixel_refusal(header.width, header.height, max_pixels=max_pixels) or header


def bad_headers(batch: EncodedBatch, *, max_pixels: int | None = None) -> dict[int, str]:
    """Return the rows that would crash DALI, with reasons: no header, another size than the stored
    one, or a JPEG 2000 file that Pillow can't decode.

    max_pixels: larger images are bad, too; None: the images were verified when they were indexed or
    packed.
    """
    bad: dict[int, str] = {}
    for row, (sample, dims) in enumerate(zip(batch.encoded, batch.dims.tolist(), strict=True)):
        # Verified images were within the limit at that time.
        most = max_pixels or max(MAX_PIXELS, dims[0] * dims[1])
        header = capped_header(sample, max_pixels=most)
        if isinstance(header, Rejection):
            bad[row] = header.reason
        # Stored dims are upright, these may not be.
        elif sorted((header.height, header.width)) != sorted(dims):
            stored = " x ".join(map(str, dims))
            bad[row] = f"it is {header.height} x {header.width} pixels, and {stored} was stored"
    return bad
