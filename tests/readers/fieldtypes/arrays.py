"""Small .npy files and masks, good and bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from tests import images

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers import Encoded


def encoded(data: bytes) -> Encoded:
    """Return bytes as an array, as readers pass them."""
    return np.frombuffer(data, np.uint8)


def npy_with(header: str, payload: bytes = b"") -> bytes:
    """Return an .npy file with any header."""
    text = header.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + payload


def palette(classes: NDArray[np.uint8]) -> Image.Image:
    """Return a picture with a palette of mirrored greys, so that luma would give other classes."""
    image = Image.fromarray(classes)
    image.putpalette([255 - value // 3 for value in range(768)])
    return image


def picture(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file."""
    return images.encoded(image, kind, **options)
