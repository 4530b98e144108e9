"""Whether the kernel is asked to read a batch's pages ahead: while batches wait for the disk.

Reading through a map is checksumming it: about 10 GB/s (one core, measured) where the pages are in
memory, under 0.1 where each fault waits for the disk. After a batch this many times slower than
warm the next ones are read ahead; several, since on a fast disk an advised batch looks warm. Advice
costs about 4 us a sample, so warm batches do without.
"""

from __future__ import annotations

_WARM_BYTES_PER_S = 8e9
_WARM_SAMPLE_S = 2e-6
_COLD_FACTOR = 5.0
ADVISED_BATCHES = 16


class PageAdvice:
    """Remembers for the next batches whether the last ones waited for the disk.

    Threads that note at once may count a batch twice, which changes no result.
    """

    def __init__(self) -> None:
        self._batches = ADVISED_BATCHES  # until enough batches say otherwise

    @property
    def is_on(self) -> bool:
        """Whether the next batch shall be read ahead."""
        return bool(self._batches)

    def note(self, *, samples: int, size_bytes: int, seconds: float) -> None:
        """Take into account how long a batch took to be read and checked."""
        warm_s = size_bytes / _WARM_BYTES_PER_S + samples * _WARM_SAMPLE_S
        is_cold = seconds > _COLD_FACTOR * warm_s
        self._batches = ADVISED_BATCHES if is_cold else max(0, self._batches - 1)
