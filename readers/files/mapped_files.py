"""Map files into memory, and tell the kernel which of their pages to read ahead.

A thread that faults through cold pages one by one waits for each; asked beforehand, the kernel
reads many at once.

Reading through a map is checksumming it: about 10 GB/s (one core, measured) where the pages are in
memory, under 0.1 where each fault waits for the disk. After a batch this many times slower than
warm, whose thread had something read from a disk, `PageAdvice` asks for the next ones to be read
ahead; for several, since on a fast disk an advised batch looks warm. Time alone doesn't tell: a
thread that waits for a core is slow too. Advice costs about 4 us a sample, so warm batches do
without.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cache.base import map_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, pa.ArrowException)
"""What parsing a damaged Arrow file raises, pyarrow's own kinds and those of what it then lacks."""


def map_buffer(path: bytes) -> Any:
    """A whole file as one mapped pyarrow buffer, read-only: no descriptor stays open, the map lives
    as long as anything that looks into it. Raises OSError, ValueError (an empty file)."""
    return map_file(path).buffer()


def read_buffer(path: bytes) -> Any:
    """A whole file as a pyarrow buffer that no later change of the file reaches. Raises OSError."""
    with open(path, "rb") as file:
        return pa.py_buffer(file.read())


# More than footer, schema and columns of a usual shard (50 bytes a sample, 600 samples).
_TAIL_BYTES = 256 * 2**10


def advise_willneed(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """madvise(MADV_WILLNEED) for address ranges of mapped files, int64, shape (n,), end exclusive.

    Returns at once; a refusal is passed over, since advice changes no result.
    """
    first = starts & -mmap.PAGESIZE
    for start, length in zip(first.tolist(), (ends - first).tolist(), strict=True):
        _madvise(start, length, mmap.MADV_WILLNEED)


@contextlib.contextmanager
def only_the_tail(address: int, length: int) -> Iterator[None]:
    """Inside, faults in this map read single pages, and its last part is read ahead.

    For parsing what stands at a file's end: each fault would read around itself as much as the
    device is set to (8 MiB on some), megabytes of images that nobody asked for.
    """
    _madvise(address, length, mmap.MADV_RANDOM)
    tail = (address + max(0, length - _TAIL_BYTES)) & -mmap.PAGESIZE
    _madvise(tail, address + length - tail, mmap.MADV_WILLNEED)
    try:
        yield
    finally:
        _madvise(address, length, mmap.MADV_NORMAL)


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
