"""Verify encoded images: check their structure here, and decode them with the installed decoder.

`readers` stands below `augment` and can't import it; the decoder is looked up by the entry point
"image" of group "penstock.verify".
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, MissingDependencyError, PenstockError
from penstock.cache.base import usable_cores
from penstock.readers.fields.sniff import IMAGE_HEAD_BYTES, check_jpeg, sniff
from penstock.readers.types import ImageFacts, Rejection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.types import Encoded, Verify

_GROUP = "penstock.verify"
_REASON_CHARACTERS = 300


def verify_name(verify: Verify | str | None) -> str | None:
    """How other machines find a verifier: the name of an entry point or "module:function"; None
    stays the installed one. Raises ConfigError for a callable that can't be found by a name."""
    if verify is None or isinstance(verify, str):
        return verify
    module, name = getattr(verify, "__module__", None), getattr(verify, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        raise ConfigError(
            f"verify: got {verify!r} together with executor=, wanted a function of a module that "
            f"the workers have, or the name of an entry point of {_GROUP!r}."
        )
    return f"{module}:{name}"


def named_verify(name: str, *, workers: int | None = None) -> Verify:
    """The verifier of a name, as `verify_name` gives it. Raises MissingDependencyError."""
    if ":" not in name:
        return find_verify(workers=workers, name=name)
    point = EntryPoint(name="verify", value=name, group=_GROUP)
    try:
        found: Verify = point.load()
    except (ImportError, AttributeError) as error:
        raise MissingDependencyError(
            f"verify: {name} can't be loaded here ({error}). It has to be a function of a module "
            "that every worker can import."
        ) from error
    return found


def find_verify(
    *, workers: int | None = None, name: str = "image", max_pixels: int | None = None
) -> Verify:
    """Find the installed decoder, to run on `workers` threads. max_pixels: of an image; None is the
    default. Raises MissingDependencyError."""
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
    """Check structure and fully decode each image; what came in rejected stays so, in place."""
    results: list[ImageFacts | Rejection | None] = [_structure(sample) for sample in samples]
    good = [i for i, result in enumerate(results) if result is None]
    encoded = [sample for i in good if not isinstance(sample := samples[i], Rejection)]
    for i, verdict in zip(good, _verdicts(encoded, verify), strict=True):
        results[i] = verdict
    return [result for result in results if result is not None]


def _verdicts(encoded: Sequence[Encoded], verify: Verify) -> list[ImageFacts | Rejection]:
    """What `verify` says; a sample over which it fails, whatever it raises, is rejected for that.
    What isn't a sample's fault is raised: our own errors, and what the machine lacks."""
    if not encoded:
        return []
    try:
        return verify(encoded)
    except (PenstockError, MemoryError, OSError):
        raise
    except Exception as error:
        if len(encoded) == 1:
            reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
            return [Rejection(f"the decoder failed over it ({type(error).__name__}: {reason})")]
    half = len(encoded) // 2
    return [*_verdicts(encoded[:half], verify), *_verdicts(encoded[half:], verify)]


def _structure(sample: Encoded | Rejection) -> Rejection | None:
    if isinstance(sample, Rejection):
        return sample
    codec = sniff(sample[:IMAGE_HEAD_BYTES].tobytes())
    if isinstance(codec, Rejection):
        return codec
    return check_jpeg(sample) if codec == "jpeg" else None
