"""Map files into memory, and advise the kernel which of their pages to read ahead.

A thread that faults in cold pages one by one waits for each; with advice, the kernel reads many at
once.

Reading through a map costs its checksum: about 10 GB/s (one core, measured) if the pages are in
memory, under 0.1 GB/s if each fault waits for the disk. `PageAdvice` turns read-ahead on for
several batches after a batch was this many times slower than warm and its thread read from a disk.
It takes several, since on a fast disk an advised batch looks warm. Time alone is no evidence,
because a thread that waits for a core is slow too. Advice costs about 4 us per sample, so warm
batches do without.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cache import CorruptShardError, ReadError
from penstock.cache.base import machine_remedy, map_file, read_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.readers.types import Ints


_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, pa.ArrowException)
"""The errors of parsing a damaged Arrow file: pyarrow's own, and those of using what it returns
then."""


def damaged_file_error(
    shown: str, what: str, error: Exception, *, remedy: str, path: str = ""
) -> CorruptShardError | ReadError:
    """Return the error for a file of Penstock that can't be parsed. shown: the file. what: what is
    wrong with it, unless the machine caused the error. path: of its copy on this machine."""
    if machine_remedy(error) is not None:
        return read_error(path or shown, error)
    return CorruptShardError(f"{shown}: {what} ({error}). {remedy}")


def map_buffer(path: bytes) -> Any:
    """Map a whole file as one read-only pyarrow buffer. No descriptor stays open, and the map lives
    as long as any view of it. Raises OSError, and ValueError for an empty file."""
    return map_file(path).buffer()


def read_buffer(path: bytes) -> Any:
    """Read a whole file into a pyarrow buffer that later changes of the file don't reach. Raises
    OSError."""
    with open(path, "rb") as file:
        return pa.py_buffer(file.read())


# More than footer, schema and columns of a usual shard (50 bytes per sample, 600 samples).
_TAIL_BYTES = 256 * 2**10


def advise_willneed(starts: Ints, ends: Ints) -> None:
    """Call madvise(MADV_WILLNEED) for address ranges of mapped files, int64, shape (n,), end
    exclusive. Returns at once; errors are ignored, since advice changes no result."""
    first = starts & -mmap.PAGESIZE
    for start, length in zip(first.tolist(), (ends - first).tolist(), strict=True):
        _madvise(start, length, mmap.MADV_WILLNEED)


@contextlib.contextmanager
def only_the_tail(address: int, length: int) -> Iterator[None]:
    """Let faults in this map read single pages, and read its last part ahead.

    It is for parsing the end of a file: each fault would otherwise read around itself as much as
    the device is set to (8 MiB on some), megabytes of images that aren't needed.
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
COLD_FACTOR = 5.0
ADVISED_BATCHES = 16


def disk_reads() -> int:
    """Return how often this thread has waited for a page from a disk, plus the blocks that it has
    read."""
    import resource  # warm batches never need it

    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_inblock


class PageAdvice:
    """Decides from the last batches whether the next ones should be read ahead.

    reads: returns a count of the calling thread's reads from disks so far. Threads that call `note`
    at once may count a batch twice, which changes no result.
    """

    def __init__(self, *, reads: Callable[[], int] | None = None) -> None:
        self._batches = ADVISED_BATCHES  # on, until enough warm batches turn it off
        self._reads, self._seen = reads or disk_reads, threading.local()

    @property
    def is_on(self) -> bool:
        """Return True if the next batch should be read ahead."""
        return bool(self._batches)

    def note(self, *, samples: int, size_bytes: int, seconds: float) -> None:
        """Record how long a batch took to be read and checked, on the thread that read it."""
        warm_s = size_bytes / _WARM_BYTES_PER_S + samples * _WARM_SAMPLE_S
        is_cold = seconds > COLD_FACTOR * warm_s and self._has_read()
        self._batches = ADVISED_BATCHES if is_cold else max(0, self._batches - 1)

    def _has_read(self) -> bool:
        """Return True if this thread has read from a disk since the last call. It is called after
        slow batches only, so that others need no system call."""
        before, now = getattr(self._seen, "reads", 0), self._reads()
        self._seen.reads = now
        return now > before
