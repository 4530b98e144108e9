"""Measure how fast each core is.

A core may be slowed by another program or by a limit. To measure that, every core gets a thread
of its own for a moment, which works without the GIL. A core that seems slow is measured again a
little later, so that a program that ran by chance isn't taken for one that stays.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from typing import TYPE_CHECKING

from penstock.cache import Workers
from penstock.cache.base import allowed_cores
from penstock.pipeline.report.run_facts import SLOW_CORE, CoreSpeeds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Many turns of the kernel's scheduler (3 to 4 ms): two programs then share a core evenly.
_TRY_S = 0.15
_PAUSE_S = 0.2
_PIECE_TURNS = 1000  # about 0.7 ms


def core_speeds(*, seconds: float = _TRY_S) -> CoreSpeeds:
    """The speed of each core that this thread may use, in about so many seconds; where one seems
    slow, three times that, and seconds where a program of real-time priority has it.

    Neither this thread nor any other of the process is moved.
    """
    numbers = allowed_cores()
    pool = Workers(len(numbers), name="cores")
    try:
        found = _measure_cores(pool, numbers, seconds)
        if min(found.speeds) < SLOW_CORE:
            threading.Event().wait(_PAUSE_S)
            again = _measure_cores(pool, numbers, seconds).speeds
            found = relative_speeds(
                numbers, [max(*two) for two in zip(found.speeds, again, strict=True)]
            )
    finally:
        pool.close()
    return found


def _measure_cores(pool: Workers, numbers: Sequence[int], seconds: float) -> CoreSpeeds:
    running = [pool.submit(_work_on_core(seconds), core) for core in numbers]
    return relative_speeds(numbers, [one.result() for one in running])


def relative_speeds(numbers: Sequence[int], rates: Sequence[float]) -> CoreSpeeds:
    """Speeds from the work that each core did in a second."""
    fastest = max(rates)
    return CoreSpeeds(numbers=tuple(numbers), speeds=tuple(rate / fastest for rate in rates))


def _work_on_core(seconds: float) -> Callable[[int], float]:
    """Pieces of work a second on a core, from now on: one that is taken lets nobody begin.

    The work needs neither memory nor the GIL.
    """
    began = time.perf_counter()

    def run(core: int) -> float:
        pieces = 0
        os.sched_setaffinity(0, {core})  # of this thread alone, which ends afterwards
        while True:
            hashlib.pbkdf2_hmac("sha256", b"penstock", b"core", _PIECE_TURNS)
            pieces += 1
            if (took_s := time.perf_counter() - began) >= seconds:
                return pieces / took_s

    return run
