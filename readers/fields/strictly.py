"""Pillow as a decoder that passes over nothing that is missing."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_inside: list[bool] = []  # what the switch was for each thread that is in here


@contextlib.contextmanager
def strictly() -> Iterator[None]:
    """Pillow passes over what is missing where a program says so, as many training scripts do:
    not here. Pillow knows no other way than its module's own switch, which stays off until the last
    thread has left."""
    from PIL import ImageFile

    with _lock:
        _inside.append(_inside[0] if _inside else ImageFile.LOAD_TRUNCATED_IMAGES)
        if ImageFile.LOAD_TRUNCATED_IMAGES:  # nothing is written where nothing need be
            ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _lock:
            if _inside.pop() and not _inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = True
