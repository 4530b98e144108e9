"""CPU time of a whole tree of processes, workers that still run included."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def tree_cpu_s() -> float:
    """CPU-seconds of this process and all of its children so far, those that still run included.

    Linux keeps a CPU clock for every process, in nanoseconds; clock_getcpuclockid(3) names it by
    the complement of the process id shifted left by three, plus 2 (the scheduler's clock).
    """
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it ended meanwhile: os.times counts it next time
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread or process ended meanwhile
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)
