"""Verify encoded images: check their structure, and decode them with the installed decoder.

`readers` stands below `augment` and can't import it; the decoder is looked up by the entry point
"image" of group "penstock.verify". `strict_pillow` makes Pillow raise for truncated data, and
collects the messages of libtiff.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, MissingDependencyError, PenstockError
from penstock.cache.base import usable_cores
from penstock.readers.fieldtypes.sniff import IMAGE_HEAD_BYTES, check_jpeg, sniff
from penstock.readers.types import ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.types import Encoded, Verify

_GROUP = "penstock.verify"
_REASON_CHARACTERS = 300


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


def named_verify(name: str, *, workers: int | None = None) -> Verify:
    """Return the verifier of a name that `verify_name` returned. Raises MissingDependencyError."""
    if ":" not in name:
        return find_verify(workers=workers, name=name)
    point = EntryPoint(name="verify", value=name, group=_GROUP)
    try:
        found: Verify = point.load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"verify: {name} can't be loaded ({error}). Pass a function of a module that every "
            "worker can import."
        ) from error
    return found


def find_verify(
    *, workers: int | None = None, name: str = "image", max_pixels: int | None = None
) -> Verify:
    """Find the installed decoder, to run on `workers` threads. max_pixels: of an image; None uses
    the default. Raises MissingDependencyError."""
    remedy = (
        "Checking images decodes each once, with DALI: pip install 'penstock[dali]' (CUDA 13 or no "
        "GPU) or 'penstock[cuda12]'; or pass verify=."
    )
    points = entry_points(group=_GROUP, name=name)
    if not points:
        raise MissingDependencyError(
            f"No verifier {name!r} is installed (entry point {_GROUP!r}). {remedy}"
        )
    try:
        verify = next(iter(points)).load()
    except ImportError as error:
        raise MissingDependencyError(
            f"The image verifier can't be loaded ({error}). {remedy}"
        ) from error
    more = {} if max_pixels is None else {"max_pixels": max_pixels}
    return functools.partial(verify, threads=workers or usable_cores(), **more)


def image_verdicts(
    samples: Sequence[Encoded | Rejection], verify: Verify
) -> list[ImageFacts | Rejection]:
    """Check the structure of each image and decode it fully. Samples that are rejected already keep
    their place and reason."""
    results: list[ImageFacts | Rejection | None] = [_structure(sample) for sample in samples]
    good = [i for i, result in enumerate(results) if result is None]
    encoded = [sample for i in good if not isinstance(sample := samples[i], Rejection)]
    for i, verdict in zip(good, _verdicts(encoded, verify), strict=True):
        results[i] = verdict
    return [result for result in results if result is not None]


def _verdicts(encoded: Sequence[Encoded], verify: Verify) -> list[ImageFacts | Rejection]:
    """Return the results of `verify`, with a Rejection for a sample on which it raises. Errors that
    aren't a sample's fault are raised: our own, and those of the machine."""
    if not encoded:
        return []
    try:
        return verify(encoded)
    except (PenstockError, MemoryError, OSError):
        raise
    except Exception as error:
        if len(encoded) == 1:
            reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
            return [Rejection(f"the decoder failed on it ({type(error).__name__}: {reason})")]
    half = len(encoded) // 2
    return [*_verdicts(encoded[:half], verify), *_verdicts(encoded[half:], verify)]


def _structure(sample: Encoded | Rejection) -> Rejection | None:
    if isinstance(sample, Rejection):
        return sample
    codec = sniff(sample[:IMAGE_HEAD_BYTES].tobytes())
    if isinstance(codec, Rejection):
        return codec
    return check_jpeg(sample) if codec == "jpeg" else None


_lock = threading.Lock()
_inside: list[bool] = []  # the switch's value before each thread that is inside


class _TiffMessages(threading.local):
    """The messages of Pillow's libtiff in this thread; None if they aren't collected."""

    texts: list[str] | None = None


_messages = _TiffMessages()
_handler_lock = threading.Lock()
_collectors = 0
_previous_handler: Any = None
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)


def _collect(module: bytes | None, form: bytes, arguments: int) -> None:
    """Replace libtiff's error handler. arguments: a va_list, which is a pointer in calls on x86_64
    and aarch64."""
    if _messages.texts is None:
        if _previous_handler:
            _previous_handler(module, form, arguments)
        return
    text = ctypes.create_string_buffer(200)
    ctypes.CDLL(None).vsnprintf(text, ctypes.c_size_t(200), form, ctypes.c_void_p(arguments))
    _messages.texts.append(text.value.decode(errors="replace").rstrip("."))


_collector = _Handler(_collect)


@contextlib.contextmanager
def _libtiff_messages() -> Iterator[list[str]]:
    """Collect the messages of Pillow's libtiff about a file that this thread decodes, instead of
    printing them to standard error. Other threads still print theirs. Nothing is collected if that
    library can't be found."""
    global _collectors, _previous_handler
    texts: list[str] = []
    library = _pillows_libtiff()
    if library is None:
        yield texts
        return
    library.TIFFSetErrorHandler.restype = ctypes.c_void_p
    with _handler_lock:
        _collectors += 1
        if _collectors == 1:
            found = library.TIFFSetErrorHandler(_collector)
            _previous_handler = _Handler(found) if found else None
    _messages.texts = texts
    try:
        yield texts
    finally:
        _messages.texts = None
        with _handler_lock:
            _collectors -= 1
            if not _collectors:
                library.TIFFSetErrorHandler(_previous_handler)


@functools.cache
def _pillows_libtiff() -> Any:
    """Load the library with which Pillow decodes TIFF, if it is a file of its own."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libtiff" in line}
    except (OSError, IndexError):
        return None
    for path in paths:
        if os.path.basename(path).startswith("libtiff") and "nvimgcodec" not in path:
            with contextlib.suppress(OSError, AttributeError):
                library = ctypes.CDLL(path)
                library.TIFFSetErrorHandler  # noqa: B018  # AttributeError if it is missing
                return library
    return None


@contextlib.contextmanager
def strict_pillow() -> Iterator[list[str]]:
    """Make Pillow raise for truncated data inside, and yield a list that collects libtiff's
    messages about the file.

    Pillow ignores missing data if a program sets its module's switch, as many training scripts do.
    It offers no other way than this switch, which stays off until the last thread has left.
    """
    from PIL import ImageFile

    with _lock:
        _inside.append(_inside[0] if _inside else ImageFile.LOAD_TRUNCATED_IMAGES)
        if ImageFile.LOAD_TRUNCATED_IMAGES:  # don't write it without need
            ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with _libtiff_messages() as texts:
            yield texts
    finally:
        with _lock:
            if _inside.pop() and not _inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = True
