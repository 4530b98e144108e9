"""Memory for the copies of a batch's samples, used again once nobody looks into it any more.

Memory that is new for each batch is faulted in page by page, which costs as much as copying into
it: 15 faults for a sample of 60 KB, in as many heaps as threads read. A block goes back by itself
when the last view of it is gone, so none is ever reused under anyone.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

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
        memory = self._fitting(size_bytes)
        if memory is None:
            steps = -(-max(1, size_bytes) * 9 // 8 // _STEP_BYTES)
            memory = np.empty(max(1, steps) * _STEP_BYTES, np.uint8)
        lease = _Lease(memory, self._free)
        shown = pa.foreign_buffer(memory.ctypes.data, len(memory), base=lease)
        return memory, np.frombuffer(shown, np.uint8)

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

    def __del__(self) -> None:
        self._free.append(self._memory)
