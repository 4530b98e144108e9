"""Lend memory for the copies of a batch's samples, and use it again once no view of it is left.

Memory that is new for each batch is faulted in page by page, which costs as much as copying into
it: 15 faults for a sample of 60 KB, in as many heaps as threads read. A block comes back by itself
when its last view is gone, so none is ever overwritten while somebody still reads it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

    Allocate = Callable[[int], Encoded | None]

MAX_FREE = 8  # free blocks; a loader's batches in flight are about as many
FREE_BYTES = 2**30
"""Free blocks take so many bytes at most, or are one block that is larger."""
_STEP_BYTES = 2**20


class Blocks:
    """Lends memory for copies. Safe for several threads; what is free stays until this is closed.

    Nothing here holds a lock: a block may come back while any line of anything runs.
    """

    def __init__(self, *, allocate: Allocate | None = None) -> None:
        """allocate: makes memory of so many bytes for large arrays and keeps what comes back, such
        as page-locked memory. None: they lie in blocks, and so do those that it gives None for."""
        self._free: deque[Encoded] = deque(maxlen=MAX_FREE)
        self._allocate = allocate
        self._closed = False

    def take(self, size_bytes: int) -> tuple[Encoded, Encoded]:
        """Room of at least so many bytes, writable, and the same as others may see it: read-only,
        views of which keep it from being used again. Drop the first before the second is handed
        on."""
        memory = self._memory(size_bytes)
        lease = _BlockLease(memory, self)
        shown = pa.foreign_buffer(memory.ctypes.data, len(memory), base=lease)
        return memory, np.frombuffer(shown, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A writable array, its numbers anything: in such memory, which is used again once nobody
        has a view of it; a small one in memory of its own."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < _STEP_BYTES:
            return np.empty(shape, dtype)
        lent = None if self._allocate is None else self._allocate(size_bytes)
        if lent is None:
            lent = np.asarray(_BlockLease(self._memory(size_bytes), self))
        return lent[:size_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Let go of what is free, and of what is lent as soon as it comes back. Whoever still asks
        gets memory that nobody keeps. Safe to call twice."""
        self._closed = True
        self._free.clear()

    @property
    def free_bytes(self) -> int:
        """Bytes of the blocks that wait to be used again."""
        return sum(map(len, self._free.copy()))

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

    def give_back(self, memory: Encoded) -> None:
        """Take a block that nobody sees any more; those that waited longest make room for it."""
        if self._closed:
            return
        self._free.append(memory)
        while len(self._free) > 1 and self.free_bytes > FREE_BYTES:
            try:
                self._free.popleft()
            except IndexError:  # another thread took them
                return
        if self._closed:  # meanwhile
            self._free.clear()


class _BlockLease:
    """Gives memory back when the last view into it is gone."""

    __slots__ = ("_blocks", "_memory")

    def __init__(self, memory: NDArray[np.uint8], blocks: Blocks) -> None:
        self._memory, self._blocks = memory, blocks

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._blocks.give_back(self._memory)
