"""Telling the kernel which pages of a map are needed next.

A thread that faults through cold pages one by one waits for each; asked beforehand, the kernel
reads many at once. pyarrow has no call for it, hence libc's.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_libc = ctypes.CDLL(None)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


def advise_willneed(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
    """madvise(MADV_WILLNEED) for address ranges of mapped files, int64, shape (n,), end exclusive.

    Returns at once; a refusal is passed over, since advice changes no result.
    """
    first = starts & -mmap.PAGESIZE
    for start, length in zip(first.tolist(), (ends - first).tolist(), strict=True):
        _madvise(start, length, mmap.MADV_WILLNEED)
