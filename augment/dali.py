"""Loading DALI, and what a process does with its pipelines behind a fork."""

from __future__ import annotations

import sys
from typing import Any

from penstock.augment.quiet import load_quietly
from penstock.cache.base.machine import refuse_shortage
from penstock.cache.errors import MissingDependencyError
from penstock.cache.forks import keep_for_ever


def load_dali() -> Any:
    """The module nvidia.dali. Raises MissingDependencyError with the remedy; ReadError where
    memory or open files ran out."""
    try:
        import nvidia.dali
        import nvidia.dali.fn
    except ImportError as error:
        refuse_shortage(error, "NVIDIA DALI")
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
    load_quietly(_load_decoders)
    return nvidia.dali


def _load_decoders() -> None:
    """Build a pipeline, which is when DALI loads the libraries that decode."""
    from nvidia import nvimgcodec
    from nvidia.dali import Pipeline, fn, types

    del nvimgcodec
    pipe = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
    with pipe:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        pipe.set_outputs(fn.decoders.image(encoded))
    pipe.build()


def disown_pipeline(pipeline: Any) -> None:
    """In a forked child: taken down, at exit too, a pipeline waits for threads that it has not
    got here. So it never is."""
    handle = getattr(pipeline, "_pipe", None)
    if handle is not None:
        keep_for_ever(handle)
        pipeline._pipe = None
