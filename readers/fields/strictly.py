"""Pillow as a decoder that passes over nothing that is missing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Pillow passes over what is missing where a program says so, as many training scripts do:
    not here. Pillow knows no other way than its module's own switch."""
    from PIL import ImageFile

    allowed = ImageFile.LOAD_TRUNCATED_IMAGES
    if not allowed:  # nothing is written where nothing need be: other threads read it
        yield
        return
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = allowed
