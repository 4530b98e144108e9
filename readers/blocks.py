"""Lend memory for the copies of a batch's samples, and reuse it once no view of it is left.

New memory for each batch would be faulted in page by page, which costs as much as copying into it:
15 faults for a sample of 60 KB, in as many heaps as threads read. A block is returned when its last
view is gone, so no block is overwritten while it is still being read.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.types import Encoded, Numbers

    Allocate = Callable[[int], Encoded | None]

MAX_FREE = 8  # free blocks, about as many as a loader has batches in flight
FREE_BYTES = 2**30
"""The most bytes of free blocks, except that one larger block is kept."""
_STEP_BYTES = 2**20


class MemoryOwner(Protocol):
    """Lends memory and reuses it."""

    def give_back(self, memory: Encoded) -> None:
        """Accept memory of which no view is left, while any line of any thread runs."""


class Blocks:
    """Lends memory for copies. Safe for several threads. Free blocks are kept until `close`.

    It uses no lock, because a block may be returned while any line of any thread runs.
    """

    def __init__(self, *, allocate: Allocate | None = None) -> None:
        """allocate: returns memory of a given size for large arrays and keeps it when it is
        returned, such as page-locked memory. If it is None, or returns None, large arrays use
        blocks."""
        self._free: deque[Encoded] = deque(maxlen=MAX_FREE)
        self._allocate = allocate
        self._closed = False

    def take(self, size_bytes: int) -> tuple[Encoded, Encoded]:
        """Return memory of at least this size: writable, and as a read-only array to share.

        Views of the second keep the block from being reused. Drop the first before you pass on the
        second.
        """
        memory = self._memory(size_bytes)
        lease = MemoryLease(memory, self)
        shown = pa.foreign_buffer(memory.ctypes.data, len(memory), base=lease)
        return memory, np.frombuffer(shown, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Numbers:
        """Return a writable array with undefined content.

        Its memory is reused once no view of it is left. A small array has memory of its own.
        """
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < _STEP_BYTES:
            return np.empty(shape, dtype)
        lent = None if self._allocate is None else self._allocate(size_bytes)
        if lent is None:
            lent = np.asarray(MemoryLease(self._memory(size_bytes), self))
        return lent[:size_bytes].view(dtype).reshape(shape)

    def close(self) -> None:
        """Drop free blocks now, and lent blocks when they are returned. Safe to call twice.

        Memory that is requested later isn't kept.
        """
        self._closed = True
        self._free.clear()

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the blocks that wait to be reused."""
        return sum(map(len, self._free.copy()))

    def _memory(self, size_bytes: int) -> Encoded:
        for _ in range(len(self._free)):
            try:
                memory = self._free.pop()
            except IndexError:  # another thread has it
                break
            if size_bytes <= len(memory) <= 4 * (size_bytes + _STEP_BYTES):
                return memory
            self._free.appendleft(memory)
        steps = -(-max(1, size_bytes) * 9 // 8 // _STEP_BYTES)
        return np.empty(max(1, steps) * _STEP_BYTES, np.uint8)

    def give_back(self, memory: Encoded) -> None:
        """Accept a block of which no view is left. The blocks that waited longest make room for
        it."""
        if self._closed:
            return
        self._free.append(memory)
        is_large = len(memory) > FREE_BYTES // MAX_FREE  # otherwise the number bounds the bytes
        while is_large and len(self._free) > 1 and self.free_bytes > FREE_BYTES:
            try:
                self._free.popleft()
            except IndexError:  # another thread has them
                return
        if self._closed:  # in the meantime
            self._free.clear()


class MemoryLease:
    """Gives memory back to its owner when the last view of it is gone.

    An array made from it (`np.asarray`) and all views of that array keep it alive.
    """

    __slots__ = ("_memory", "_owner")

    def __init__(self, memory: Encoded, owner: MemoryOwner) -> None:
        self._memory, self._owner = memory, owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._owner.give_back(self._memory)
