"""Measure from outside what slows a running loader: a held GIL, costly images, slow cores.

The reading threads sample the GIL and the images once per batch (`ReadProbe`). A thread that
releases the GIL for a moment and then takes it back finds out whether another thread holds it; this
takes 0.1 ms with almost no work, at most every 10 ms. The headers of some images of the first
batches are parsed, which costs a few microseconds each.

The cores are measured on request (`core_speeds`). Another program or a limit may slow a core. Every
core gets a thread for a moment, which works without the GIL. If a core seems slow, all are measured
again a little later, so that a program that ran by chance doesn't count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import Workers
from penstock.cache.base import allowed_cores

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.pipeline.report.run_facts import CoreSpeeds, ImageFigures
    from penstock.readers import EncodedBatch

# Long enough for a thread that waits for the GIL to wake up and take it. After a shorter nap, this
# thread often has the GIL back first (in half of the attempts against a loop of pure Python).
_NAP_S = 50e-6
_EVERY_S = 0.01
# A longer delay isn't due to the kernel's timer (0.06 ms): another thread held the GIL.
_LATE_S = 1e-3
_TRIES_KEPT = 256
_FEWEST_TRIES = 8
_MOST_IMAGES = 256
_IMAGES_A_BATCH = 8
# ImageNet's packs have a short side of 256 for crops of 224.
_PACK_PER_OUTPUT = 256 / 224


def _gil_s() -> float:
    """Return the seconds that it took to get the GIL back after a nap, without waits for a core."""
    queued_s, began = _queued_s(), time.perf_counter()
    select.select((), (), (), _NAP_S)
    took_s = time.perf_counter() - began - _NAP_S
    return took_s - (_queued_s() - queued_s)


def _queued_s() -> float:
    """Return the seconds that this thread has waited for a core so far.

    This is the second number of schedstat (proc(5)), in nanoseconds; 0.0 if the kernel doesn't
    provide it.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


class ReadProbe:
    """Samples of a run's GIL delays and images. Several threads may sample, and one evaluates."""

    def __init__(self) -> None:
        self._late: deque[float] = deque(maxlen=_TRIES_KEPT)
        # (bytes, height, width, is progressive), as the headers state them
        self._seen: deque[tuple[int, int, int, bool]] = deque(maxlen=_MOST_IMAGES)
        self._due_s = 0.0

    def sample(self, batch: EncodedBatch | None = None) -> None:
        """Sample the GIL and a batch that this thread has read."""
        now = time.perf_counter()
        if now >= self._due_s:
            self._due_s = now + _EVERY_S
            self._late.append(_gil_s())
        if batch is not None and len(self._seen) < _MOST_IMAGES:
            from penstock.readers.fieldtypes import is_progressive  # for the first batches only

            for sample, (height, width) in zip(
                batch.encoded[:_IMAGES_A_BATCH], batch.dims[:_IMAGES_A_BATCH].tolist(), strict=True
            ):
                self._seen.append((len(sample), height, width, is_progressive(sample)))

    def gil(self) -> tuple[float, float]:
        """Return the share of late attempts to take the GIL, and their mean delay in seconds.

        Only the latest attempts count; (0.0, 0.0) before there are enough of them.
        """
        tries = list(self._late)
        late = [seconds for seconds in tries if seconds > _LATE_S]
        if len(tries) < _FEWEST_TRIES or not late:
            return 0.0, 0.0
        return len(late) / len(tries), sum(late) / len(late)

    def images(self, out: tuple[int, int]) -> ImageFigures | None:
        """Return figures of the sampled images, for a recipe that delivers `out` (height, width).

        None if no image was sampled.
        """
        seen = [each for each in list(self._seen) if each[0] and each[1]]
        if not seen:
            return None
        from penstock.pipeline.report.run_facts import ImageFigures  # needed by statistics only

        pack_short = round(min(out) * _PACK_PER_OUTPUT)
        size_bytes, height, width, progressive = np.array(seen, np.float64).T
        shrink = np.minimum(1.0, pack_short / np.minimum(height, width))
        return ImageFigures(
            seen=len(seen),
            mean_bytes=float(size_bytes.mean()),
            mean_pixels=float((height * width).mean()),
            progressive=float(progressive.mean()),
            out_short=min(out),
            pack_short=pack_short,
            mean_short_pixels=float((height * width * shrink**2).mean()),
        )


# Many time slices of the kernel's scheduler (3 to 4 ms), so that two programs share a core evenly.
_MEASURE_S = 0.15
_PAUSE_S = 0.2
_ROUNDS = 1000  # of a hash, about 0.7 ms


def core_speeds(*, seconds: float = _MEASURE_S) -> CoreSpeeds:
    """Measure the speed of each core that this thread may use, which takes about `seconds`.

    It takes three times as long if a core seems slow, and longer still if a program of real-time
    priority occupies one. The affinity of the process's other threads doesn't change.
    """
    from penstock.pipeline.report.run_facts import SLOW_CORE, CoreSpeeds  # for statistics only

    numbers = allowed_cores()
    with contextlib.closing(Workers(len(numbers), name="cores")) as pool:

        def measured() -> NDArray[np.float64]:
            running = [pool.submit(_core_work(seconds), core) for core in numbers]
            rates = np.array([each.result() for each in running], np.float64)
            shares: NDArray[np.float64] = rates / rates.max()
            return shares

        speeds = measured()
        if speeds.min() < SLOW_CORE:
            threading.Event().wait(_PAUSE_S)
            speeds = np.maximum(speeds, measured())
    return CoreSpeeds(numbers=tuple(numbers), speeds=tuple(speeds.tolist()))


def _core_work(seconds: float) -> Callable[[int], float]:
    """Return a function that works on a core and returns the pieces of work done per second.

    The time counts from now on, so a core that another program occupies completely has a low rate.
    The work needs neither memory nor the GIL.
    """
    began = time.perf_counter()

    def run(core: int) -> float:
        pieces = 0
        os.sched_setaffinity(0, {core})  # of this thread only, which ends afterwards
        while True:
            hashlib.pbkdf2_hmac("sha256", b"penstock", b"core", _ROUNDS)
            pieces += 1
            if (elapsed_s := time.perf_counter() - began) >= seconds:
                return pieces / elapsed_s

    return run
