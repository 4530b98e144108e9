"""JPEG 2000 files are decoded by Pillow's OpenJPEG before DALI may see them.

The OpenJPEG that nvImageCodec brings (0.9) ends the process at some damaged files: SIGSEGV in
`opj_jp2_read_header`, depending on what its heap held before. What Pillow decodes whole is fit to
be given to it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from penstock.cache.errors import MissingDependencyError
from penstock.readers.fields.strictly import strictly
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

_HEAD_BYTES = 8
_REASON_CHARACTERS = 200


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
            if not 1 <= width * height <= max_pixels:
                return Rejection(
                    f"its header says {width} x {height} pixels; wanted 1 to {max_pixels:,} in all"
                )
            with strictly():
                image.load()
    except MemoryError:
        raise
    except Exception as error:  # each layer of Pillow raises its own kinds
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        return Rejection(
            f"truncated or damaged: a JPEG 2000 file that Pillow can't decode "
            f"({type(error).__name__}: {reason})"
        )
    return None
