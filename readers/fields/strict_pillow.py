"""Make Pillow raise for truncated data, and collect libtiff's messages about the file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_lock = threading.Lock()
_inside: list[bool] = []  # what the switch was for each thread that is in here


class _TiffMessages(threading.local):
    """What Pillow's libtiff said in this thread; None where nobody listens."""

    words: list[str] | None = None


_heard = _TiffMessages()
_hearing = threading.Lock()
_listeners = 0
_before: Any = None  # the handler that stood there
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


def _hear(module: bytes | None, form: bytes, arguments: int) -> None:
    """Take the place of libtiff's error handler. arguments: a va_list, which is a pointer in calls
    on x86_64 and aarch64."""
    if _heard.words is None:
        if _before:
            _before(module, form, arguments)
        return
    text = ctypes.create_string_buffer(200)
    ctypes.CDLL(None).vsnprintf(text, ctypes.c_size_t(200), form, ctypes.c_void_p(arguments))
    _heard.words.append(text.value.decode(errors="replace").rstrip("."))


_hearer = _Handler(_hear)


@contextlib.contextmanager
def _libtiff_words() -> Iterator[list[str]]:
    """Collect what Pillow's libtiff says against a file that this thread decodes, in place of its
    line on standard error; other threads' lines go where they went. Nothing is collected where that
    library can't be found."""
    global _listeners, _before
    words: list[str] = []
    library = _pillows_libtiff()
    if library is None:
        yield words
        return
    library.TIFFSetErrorHandler.restype = ctypes.c_void_p
    with _hearing:
        _listeners += 1
        if _listeners == 1:
            found = library.TIFFSetErrorHandler(_hearer)
            _before = _Handler(found) if found else None
    _heard.words = words
    try:
        yield words
    finally:
        _heard.words = None
        with _hearing:
            _listeners -= 1
            if not _listeners:
                library.TIFFSetErrorHandler(_before)


@functools.cache
def _pillows_libtiff() -> Any:
    """The library that Pillow decodes TIFF with, where it is a file of its own."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libtiff" in line}
    except (OSError, IndexError):
        return None
    for path in paths:
        if os.path.basename(path).startswith("libtiff") and "nvimgcodec" not in path:
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                library.TIFFSetErrorHandler  # noqa: B018  # an AttributeError where it isn't
                return library
    return None


@contextlib.contextmanager
def strict_pillow() -> Iterator[list[str]]:
    """Decode with Pillow; the list has what its libtiff says against the file by the end.

    Pillow passes over what is missing where a program says so, as many training scripts do:
    not here. Pillow knows no other way than its module's own switch, which stays off until the last
    thread has left."""
    from PIL import ImageFile

    with _lock:
        _inside.append(_inside[0] if _inside else ImageFile.LOAD_TRUNCATED_IMAGES)
        if ImageFile.LOAD_TRUNCATED_IMAGES:  # nothing is written where nothing need be
            ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with _libtiff_words() as words:
            yield words
    finally:
        with _lock:
            if _inside.pop() and not _inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = True
