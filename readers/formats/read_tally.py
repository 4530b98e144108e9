"""Counts the bytes of chunks that are read, by what lies in storage."""

from __future__ import annotations

import threading


class ReadTally:
    """Adds up from many threads what a dataset's batches read.

    A chunk is read by one thread for all that wait for it, and large samples by several for one: so
    who takes the count takes all that came since it was taken last, and the sum is exact.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._size_bytes += size_bytes

    def take(self) -> int:
        """What was counted since the last call."""
        with self._lock:
            size_bytes, self._size_bytes = self._size_bytes, 0
            return size_bytes
