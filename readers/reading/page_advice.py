"""Whether the kernel is asked to read a batch's pages ahead: while batches wait for the disk.

Reading through a map is checksumming it: about 10 GB/s (one core, measured) where the pages are in
memory, under 0.1 where each fault waits for the disk. After a batch this many times slower than
warm, whose thread had something read from a disk, the next ones are read ahead; several, since on a
fast disk an advised batch looks warm. Time alone doesn't tell: a thread that waits for a core is
slow too. Advice costs about 4 us a sample, so warm batches do without.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_BYTES_PER_S = 8e9
_WARM_SAMPLE_S = 2e-6
_COLD_FACTOR = 5.0
ADVISED_BATCHES = 16


def disk_reads() -> int:
    """How often this thread waited for a page that had to be read, and blocks that it read."""
    import resource  # warm batches never come here

    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


class PageAdvice:
    """Remembers for the next batches whether the last ones waited for the disk.

    reads: what the calling thread had read from disks so far. Threads that note at once may count a
    batch twice, which changes no result.
    """

    def __init__(self, *, reads: Callable[[], int] = disk_reads) -> None:
        self._batches = ADVISED_BATCHES  # until enough batches say otherwise
        self._reads, self._seen = reads, threading.local()

    @property
    def is_on(self) -> bool:
        """Whether the next batch shall be read ahead."""
        return bool(self._batches)

    def note(self, *, samples: int, size_bytes: int, seconds: float) -> None:
        """Take into account how long a batch took to be read and checked, on the thread that did
        it."""
        warm_s = size_bytes / _WARM_BYTES_PER_S + samples * _WARM_SAMPLE_S
        is_cold = seconds > _COLD_FACTOR * warm_s and self._has_read()
        self._batches = ADVISED_BATCHES if is_cold else max(0, self._batches - 1)

    def _has_read(self) -> bool:
        """Whether this thread read from a disk since it was last asked: only of slow batches, so
        that others cost no call of the system."""
        before, now = getattr(self._seen, "reads", 0), self._reads()
        self._seen.reads = now
        return now > before
