"""Count the bytes of chunks that were read from storage, and that were decoded and delivered."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedCounts:
    """What the chunks of a dataset have come to since it was opened.

    decoded_bytes: of chunks, whenever one was decoded; delivered_bytes: the part of them that was
    read: what a chunk has for each of its rows, times the rows. chunks: decodings; again: of those,
    of chunks that had to go before all of their rows were read. memory_bytes, disk_bytes: kept now,
    in memory and in the cache folder; most_memory_bytes, most_disk_bytes: at most so far.
    max_bytes: the bound of memory; 0 before the first chunk where the machine decides.
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
        """Bytes decoded for a byte delivered; 1.0 is each chunk once, and what it is before the
        first."""
        return self.decoded_bytes / self.delivered_bytes if self.delivered_bytes else 1.0

    def since(self, earlier: DecodedCounts) -> DecodedCounts:
        """What was decoded and delivered after `earlier`, of the same datasets."""
        grown = {name: getattr(self, name) - getattr(earlier, name) for name in _GROWING}
        return replace(self, **grown)


_GROWING = ("decoded_bytes", "delivered_bytes", "chunks", "again")


def sum_counts(several: Iterable[DecodedCounts]) -> DecodedCounts:
    """Those of several datasets together."""
    each = list(several)
    names = [field.name for field in fields(DecodedCounts)]
    return DecodedCounts(**{name: sum(getattr(one, name) for one in each) for name in names})
