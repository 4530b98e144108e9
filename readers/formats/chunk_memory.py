"""Memory for decoded chunks and for what they are decoded from, used again once nobody looks into
it any more.

Arrays of some hundred kilobytes that are freed go back to the system, and are faulted in anew page
by page: 6.5 faults for a sample of 49 kB in chunks of 8.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

LEAST_BYTES = 2**16
"""What is smaller lies in memory of its own, which the allocator keeps."""

FREE_BYTES = 2**28
"""What waits to be used again takes so many bytes at most."""


class ChunkMemory:
    """Lends memory. Safe for several threads.

    Nothing here holds a lock: memory may come back while any line of anything runs.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Encoded]] = {}  # by size
        self._most_bytes = FREE_BYTES
        # As threads count that may come between one another; counted anew with each new memory.
        self._counted_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that wait to be used again."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """A writable array, its numbers anything. Its memory is used again once nobody has a view
        of it."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LEAST_BYTES:
            return np.empty(shape, dtype)
        step = max(4096, 2 ** (size_bytes.bit_length() - 4))
        room_bytes = -(-size_bytes // step) * step
        try:
            memory = self._free[room_bytes].pop()
            self._counted_bytes -= room_bytes
        except (KeyError, IndexError):
            memory = np.empty(room_bytes, np.uint8)
            self._counted_bytes = self.free_bytes
        lent: Encoded = np.asarray(_Lease(memory, self))
        return lent[:size_bytes].view(dtype).reshape(shape)

    def limit(self, most_bytes: int) -> None:
        """Let what is free take at most so many bytes from now on, and no more than `FREE_BYTES`;
        below 0: nothing."""
        self._most_bytes = min(FREE_BYTES, most_bytes)
        if self._counted_bytes > self._most_bytes:
            self._free, self._counted_bytes = {}, 0

    def give_back(self, memory: Encoded) -> None:
        """Take memory that nobody sees any more."""
        if self._counted_bytes + len(memory) <= self._most_bytes:
            self._counted_bytes += len(memory)
            self._free.setdefault(len(memory), deque()).append(memory)


class _Lease:
    """Gives memory back when the last view into it is gone."""

    __slots__ = ("_memory", "_owner")

    def __init__(self, memory: Encoded, owner: ChunkMemory) -> None:
        self._memory, self._owner = memory, owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._owner.give_back(self._memory)
