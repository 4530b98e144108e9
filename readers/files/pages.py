"""Mapping files, and telling the kernel which pages are needed next.

A thread that faults through cold pages one by one waits for each; asked beforehand, the kernel
reads many at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cache.base.mapping import map_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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
