"""Decode by Pillow what DALI's own decoders can't be trusted with.

nvImageCodec 0.9 tries a further decoder where one refuses a file. OpenCV's reads damaged TIFF and
WebP files and animated PNGs into memory that it leaves unwritten where rows are missing, so that
pixels differ from run to run, and its own bitmap decoder takes run-length codes and palettes for
pixels. Its OpenJPEG ends the process at some damaged JPEG 2000 files: SIGSEGV in
`opj_jp2_read_header`, depending on what its heap held before.

Plain JPEG and PNG need none of this: their decoders refuse what is damaged, but for JPEG scans.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

from penstock.cache.base.machine import machine_remedy
from penstock.cache.errors import MissingDependencyError
from penstock.readers.fields.sniff import HEAD_BYTES, sniff
from penstock.readers.fields.strictly import strictly
from penstock.readers.types import Rejection, pixel_refusal

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

_HEAD_BYTES = 8
_REASON_CHARACTERS = 200
_PNG_CHUNKS_BYTES = 2**16  # in which a PNG says that it is animated, before its pixels
_SAMPLES_PER_PIXEL, _PLANES, _SEPARATE = 277, 284, 2
_BMP_COMPRESSION = slice(30, 34)
# What Pillow says of missing or broken data; it also refuses whole files that it doesn't know.
_DAMAGE = re.compile(r"truncated|broken|decoder error -2|decoder object|next frame")


def is_jpeg2000(sample: Encoded) -> bool:
    """Whether bytes begin as a JP2 file or as a raw code stream does, be it roughly: decoders
    differ in how much of a signature they want to see."""
    head = sample[:_HEAD_BYTES].tobytes()
    return head[4:8] == b"jP  " or head.startswith(b"\xff\x4f")


def jpeg2000_refusal(sample: Encoded, *, max_pixels: int) -> Rejection | None:
    """Why a JPEG 2000 file mustn't go to DALI; None for one that Pillow decodes whole.

    Raises MissingDependencyError where Pillow was built without OpenJPEG.
    """
    from PIL import Jpeg2KImagePlugin, features

    if not features.check_codec("jpg_2000"):
        raise MissingDependencyError(
            "Checking JPEG 2000 images takes a Pillow with OpenJPEG, and this one was built "
            "without. Install Pillow's own wheel (pip install --force-reinstall pillow), or "
            "convert these images to JPEG, PNG or WebP."
        )
    try:
        # The plugin itself: Image.open would let other formats try, and warn of large images.
        with Jpeg2KImagePlugin.Jpeg2KImageFile(io.BytesIO(sample.data)) as image:
            width, height = image.size
            too_large = pixel_refusal(width, height, max_pixels=max_pixels)
            if too_large is not None:
                return too_large
            with strictly():
                image.load()
    except Exception as error:  # each layer of Pillow raises its own kinds
        if machine_remedy(error) is not None:
            raise
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        return Rejection(
            f"truncated or damaged: a JPEG 2000 file that Pillow can't decode "
            f"({type(error).__name__}: {reason})"
        )
    return None


def needs_look(sample: Encoded) -> bool:
    """Return True for a file of a kind that DALI may decode although it is damaged. About 1 us."""
    return _plugin(sample) is not None


def refusal(sample: Encoded) -> Rejection | None:
    """Decode a file for which `needs_look` is true; say why DALI mustn't, or None.

    None too for what Pillow doesn't know: DALI decides then. Raises MemoryError.
    """
    found = _plugin(sample)
    if found is None:
        return None
    codec, plugin = found
    said: list[str] = []
    try:
        with strictly() as said, plugin(io.BytesIO(sample.data)) as image:
            if codec == "TIFF" and _has_alpha_plane(image.tag_v2):
                return Rejection(
                    "a TIFF of separate planes with an alpha channel, which DALI blends in: "
                    "convert it to PNG, or drop its alpha channel"
                )
            image.load()
    except Exception as error:  # each layer of Pillow raises its own kinds
        if machine_remedy(error) is not None:
            raise
        reason = " ".join("; ".join([str(error), *said]).split())[:_REASON_CHARACTERS]
        if isinstance(error, OSError) and _DAMAGE.search(reason):
            return Rejection(
                f"truncated or damaged: a {codec} file that Pillow can't decode ({reason})"
            )
    return None


def _has_alpha_plane(tags: Any) -> bool:
    return bool(tags.get(_PLANES) == _SEPARATE and tags.get(_SAMPLES_PER_PIXEL, 1) > 3)


def _plugin(sample: Encoded) -> tuple[str, Any] | None:
    from PIL import BmpImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

    codec = sniff(sample[:HEAD_BYTES].tobytes())
    if codec == "tiff":
        return "TIFF", TiffImagePlugin.TiffImageFile
    if codec == "webp":
        return "WebP", WebPImagePlugin.WebPImageFile
    if codec == "bmp" and not sample[_BMP_COMPRESSION].any():
        return "BMP", BmpImagePlugin.BmpImageFile
    head = sample[:_PNG_CHUNKS_BYTES].tobytes() if codec == "png" else b""
    if b"acTL" in head.partition(b"IDAT")[0]:
        return "PNG", PngImagePlugin.PngImageFile
    return None
