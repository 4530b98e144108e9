"""Mapping files, and telling the kernel which pages are needed next.

A map of our own, by libc: pyarrow's asks for the whole file to be read ahead (a cold open of a
64 MiB shard read 64 MiB), and Python's `mmap` keeps a descriptor open for each map. A thread that
faults through cold pages one by one waits for each; asked beforehand, the kernel reads many at
once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import TYPE_CHECKING, Any

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_mmap.restype = ctypes.c_void_p
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


BROKEN = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    pa.ArrowException,
)
"""What parsing a damaged Arrow file raises, pyarrow's own kinds and those of what it then lacks."""


class _Map:
    """A whole file, mapped read-only until nothing refers to this object any more."""

    def __init__(self, path: bytes) -> None:
        self.address: int | None = None
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.size_bytes = os.fstat(fd).st_size
            if self.size_bytes == 0:
                raise ValueError("the file is empty")
            found = _mmap(None, self.size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if found is None or found == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        self.address = found

    def __del__(self, unmap: Callable[[int, int], int] = _munmap) -> None:
        if self.address is not None:
            unmap(self.address, self.size_bytes)


def map_buffer(path: bytes) -> Any:
    """A whole file as one mapped pyarrow buffer, read-only: no descriptor stays open, the map lives
    as long as anything that looks into it. Raises OSError, ValueError (an empty file)."""
    mapped = _Map(path)
    return pa.foreign_buffer(mapped.address, mapped.size_bytes, base=mapped)


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
