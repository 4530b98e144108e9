"""Memory for the copies of a batch's samples, used again once nobody looks into it any more.

Memory that is new for each batch is faulted in page by page, which costs as much as copying into
it: 15 faults for a sample of 60 KB, in as many heaps as threads read. A block goes back by itself
when the last view of it is gone, so none is ever reused under anyone.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

MAX_FREE = 8  # free blocks; a loader's batches in flight are about as many
_STEP_BYTES = 2**20


class Blocks:
    """Lends memory for copies. Safe for several threads; what is free stays until this is gone."""

    def __init__(self) -> None:
        self._free: deque[Encoded] = deque(maxlen=MAX_FREE)

    def take(self, size_bytes: int) -> tuple[Encoded, Encoded]:
        """Room of at least so many bytes, writable, and the same as others may see it: read-only,
        views of which keep it from being used again. Drop the first before the second is handed
        on."""
        memory = self._memory(size_bytes)
        lease = _Lease(memory, self._free)
        shown = pa.foreign_buffer(memory.ctypes.data, len(memory), base=lease)
        return memory, np.frombuffer(shown, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A writable array, its numbers anything: in such memory, which is used again once nobody
        has a view of it; a small one in memory of its own."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < _STEP_BYTES:
            return np.empty(shape, dtype)
        lent = np.asarray(_Lease(self._memory(size_bytes), self._free))
        return lent[:size_bytes].view(dtype).reshape(shape)

    def _memory(self, size_bytes: int) -> Encoded:
        memory = self._fitting(size_bytes)
        if memory is None:
            steps = -(-max(1, size_bytes) * 9 // 8 // _STEP_BYTES)
            memory = np.empty(max(1, steps) * _STEP_BYTES, np.uint8)
        return memory

    def _fitting(self, size_bytes: int) -> Encoded | None:
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread took it
                return None
            if size_bytes <= len(memory) <= 4 * (size_bytes + _STEP_BYTES):
                return memory
            self._free.appendleft(memory)
        return None


class _Lease:
    """Gives memory back when the last view into it is gone."""

    __slots__ = ("_free", "_memory")

    def __init__(self, memory: NDArray[np.uint8], free: deque[Encoded]) -> None:
        self._memory, self._free = memory, free

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._free.append(self._memory)
