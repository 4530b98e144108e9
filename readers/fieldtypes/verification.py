"""Verify encoded images: check their structure, and decode them with the installed decoder.

`readers` stands below `augment` and can't import it; the decoder is looked up by the entry point
"image" of group "penstock.verify". `strict_pillow` makes Pillow raise for truncated data.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from penstock.cache import ConfigError, MissingDependencyError, PenstockError
from penstock.cache.base import usable_cores
from penstock.readers.fieldtypes.sniff import IMAGE_HEAD_BYTES, check_jpeg, is_progressive, sniff
from penstock.readers.types import Facts, ImageFacts, Rejection, failure, pixel_refusal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.types import Encoded, Verify

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
    name: str = "image", *, workers: int | None = None, max_pixels: int | None = None
) -> Verify:
    """Load a verifier by a name that `verify_name` returned. An entry point's runs on `workers`
    threads. max_pixels: of an image; None uses the default. Raises MissingDependencyError."""
    is_function = ":" in name
    known = entry_points(group=_GROUP, name=name)
    point = EntryPoint("verify", name, _GROUP) if is_function else next(iter(known), None)
    try:
        if point is None:
            raise ImportError("no such entry point is installed")
        verify = point.load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"The image verifier {name!r} ({_GROUP!r}) can't be loaded ({error}). Checking images "
            "decodes each once, with DALI: pip install 'penstock[dali]' (CUDA 13 or no GPU) or "
            "'penstock[cuda12]'; or pass verify=, a function of a module that every worker can "
            "import."
        ) from error
    more = {} if max_pixels is None else {"max_pixels": max_pixels}
    if not is_function:
        verify = functools.partial(verify, threads=workers or usable_cores(), **more)
    return cast("Verify", verify)


def check_images(
    samples: Sequence[Encoded | Rejection | None], verify: Verify | None, *, max_pixels: int
) -> list[Facts | Rejection | None]:
    """Check the structure of each image, decode it fully, and return its facts or why it is bad.
    Samples that are missing or rejected already stay as they are."""
    found: list[Any] = [*samples]
    for row, sample in enumerate(found):
        if isinstance(sample, np.ndarray):
            codec = sniff(sample[:IMAGE_HEAD_BYTES].tobytes())
            wrong = check_jpeg(sample) if codec == "jpeg" else codec
            found[row] = wrong if isinstance(wrong, Rejection) else sample
    good = [row for row, sample in enumerate(found) if isinstance(sample, np.ndarray)]
    images = [found[row] for row in good]
    for row, image, verdict in zip(good, images, _verdicts(images, verify), strict=True):
        found[row] = verdict
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
