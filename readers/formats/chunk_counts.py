"""Count the bytes of chunks that are read from storage, decoded, and delivered."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ReadTally:
    """Adds up the bytes that a dataset's batches read, from several threads.

    One thread may read a chunk for several batches, and several threads may read one batch's large
    samples. So `take` returns all bytes since its last call, whichever batch they were for, and the
    sum over all calls is exact.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Count bytes that were read."""
        with self._lock:
            self._size_bytes += size_bytes

    def take(self) -> int:
        """Return the bytes counted since the last call."""
        with self._lock:
            size_bytes, self._size_bytes = self._size_bytes, 0
            return size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedCounts:
    """Counts of the decoded chunks of a dataset since it was opened.

    decoded_bytes: of chunks, counted at each decoding. delivered_bytes: the part of them that was
    read: a chunk's bytes per row, times the rows read. chunks: decodings. again: decodings of
    chunks that were evicted before all of their rows were read. memory_bytes, disk_bytes: kept now,
    in memory and in the cache folder. most_memory_bytes, most_disk_bytes: the most so far.
    max_bytes: the limit of memory; 0 before the first chunk if the machine decides it.
    """

    decoded_bytes: int = 0
    delivered_bytes: int = 0
    chunks: int = 0
    again: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    most_memory_bytes: int = 0
    most_disk_bytes: int = 0
    max_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Return the bytes decoded per byte delivered. It is 1.0 if each chunk is decoded once, and
        before the first."""
        return self.decoded_bytes / self.delivered_bytes if self.delivered_bytes else 1.0

    def since(self, earlier: DecodedCounts) -> DecodedCounts:
        """Return the counts of the time after `earlier`, of the same datasets."""
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in _GROWING}
        return replace(self, **grown)


_GROWING = ("decoded_bytes", "delivered_bytes", "chunks", "again")


def sum_counts(several: Iterable[DecodedCounts]) -> DecodedCounts:
    """Add up the counts of several datasets."""
    each = list(several)
    names = [field.name for field in fields(DecodedCounts)]
    return DecodedCounts(**{name: sum(getattr(counts, name) for counts in each) for name in names})
