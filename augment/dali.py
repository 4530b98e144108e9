"""Loading DALI, and what a process does with its pipelines behind a fork."""

from __future__ import annotations

import sys
from typing import Any

from penstock.cache.errors import MissingDependencyError
from penstock.cache.forks import keep_for_ever


def load_dali() -> Any:
    """The module nvidia.dali. Raises MissingDependencyError with the remedy."""
    try:
        import nvidia.dali
        import nvidia.dali.fn
    except ImportError as error:
        if not sys.platform.startswith("linux"):
            remedy = f"DALI exists for Linux only, and this is {sys.platform}: use a Linux machine."
        else:
            remedy = (
                "Install it: pip install 'penstock[dali]' (CUDA 13, or no GPU), or "
                "'penstock[cuda12]'."
            )
        raise MissingDependencyError(
            f"Decoding images takes NVIDIA DALI, which can't be imported ({error}). {remedy}"
        ) from error
    return nvidia.dali


def disown_pipeline(pipeline: Any) -> None:
    """In a forked child: taken down, at exit too, a pipeline waits for threads that it has not
    got here. So it never is."""
    handle = getattr(pipeline, "_pipe", None)
    if handle is not None:
        keep_for_ever(handle)
        pipeline._pipe = None
