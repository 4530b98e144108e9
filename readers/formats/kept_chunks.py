"""Decide which decoded chunks are kept and for how long, without threads or files, and count the
bytes that are read, decoded and delivered.

The plan reads the rows of a window's chunks in random order, so a chunk is needed as often as it
has rows. It is evicted after all of its rows were taken and a short grace period has passed. A job
that drops the end of an epoch leaves chunks partly used. The next epoch continues their counts, so
without the grace period it would evict them too early. A chunk that hasn't been used for a long
time is such a remainder, and is evicted too.

A chunk that is needed is never evicted for another one. Within a window all chunks are used equally
often, so evicting the least recently used one would decode as many again, and would never finish
any. A chunk for which there is no room is only counted, until it is decoded again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from penstock.cache.base import counter, gauge

if TYPE_CHECKING:
    from penstock.readers.formats.chunk_files import ChunkFile

    Key = tuple[int, int]
    """A shard, and a number in it."""


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

    A chunk's delivered bytes are its bytes per row, times the rows read. max_bytes is 0 before the
    first chunk if the machine decides it.
    """

    decoded_bytes: int = counter("decoded bytes of chunks (Zarr, Parquet, …)")
    delivered_bytes: int = counter(
        "decoded bytes that went into samples; equal to decoded_bytes if each chunk was decoded "
        "once and used completely"
    )
    chunks: int = counter("chunks decoded")
    again: int = counter("chunks decoded again because there was no room to keep them")
    memory_bytes: int = gauge("decoded bytes in memory now")
    disk_bytes: int = gauge("decoded bytes in the cache folder now")
    most_memory_bytes: int = gauge("the most decoded bytes that were kept in memory at a time")
    most_disk_bytes: int = gauge("the most decoded bytes that were kept in the cache at a time")
    max_bytes: int = gauge("the limit of decoded bytes in memory")

    @property
    def ratio(self) -> float:
        """Return the bytes decoded per byte delivered. It is 1.0 if each chunk is decoded once, and
        before the first."""
        return self.decoded_bytes / self.delivered_bytes if self.delivered_bytes else 1.0


# As multiples of the rows taken while a window passes: a chunk whose rows were all taken is kept
# for _GRACE of them, and an unused chunk is a remainder after _STALE of them, or after _SHORT if
# there is no room for another one. In a window of shuffled samples the next row of a chunk is never
# that far away.
_GRACE, _SHORT, _STALE = 1 / 16, 1.0, 3.0


@dataclass(slots=True, kw_only=True, eq=False)
class KeptChunk:
    """A chunk of which rows were taken.

    value: None if there was no room for it. size_bytes: decoded; 0 if it is a view of a mapped
    file. memory_bytes: that it takes. uses: rows that need it. left: rows of these that weren't
    taken yet. at: total rows taken, of all chunks, when it was last used. file: where it is kept
    instead of memory.
    """

    value: Any = None
    size_bytes: int
    memory_bytes: int = 0
    uses: int
    left: int
    at: int = 0
    file: ChunkFile | None = None

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of its file."""
        return 0 if self.file is None else self.file.size_bytes


class KeptChunks:
    """The chunks that are kept, by shard and number. Not thread-safe: the owner holds a lock.

    The attributes of `DecodedCounts` but max_bytes are attributes of it. waste: files of evicted
    chunks, to be removed by the owner. window_rows: rows that are taken while a window passes; 0 if
    unknown.
    """

    def __init__(self) -> None:
        # Both with the least recently used first. The rest are in files, or without room.
        self._memory: OrderedDict[Key, KeptChunk] = OrderedDict()
        self._rest: OrderedDict[Key, KeptChunk] = OrderedDict()
        self._done: OrderedDict[Key, int] = OrderedDict()  # all rows taken, and at which count
        self._left = self._taken = 0  # rows left in chunks; rows taken of all
        self._most_left = 0  # the most of `_left` so far
        self.memory_bytes = self.most_memory_bytes = self.disk_bytes = self.most_disk_bytes = 0
        self.decoded_bytes = self.chunks = self.again = 0
        self.delivered_bytes = 0.0
        self.waste: list[ChunkFile] = []
        self.window_rows = 0

    def __len__(self) -> int:
        kept = (*self._memory.values(), *self._rest.values())
        return sum(each.value is not None for each in kept)

    def known(self, key: Key) -> KeptChunk | None:
        """Return a chunk of which rows were taken; its value is None if it isn't kept."""
        return self._memory.get(key) or self._rest.get(key)

    def find(self, key: Key) -> KeptChunk | None:
        """Return a chunk if it is kept."""
        kept = self.known(key)
        return None if kept is None or kept.value is None else kept

    def counts(self, *, max_bytes: int) -> DecodedCounts:
        """Return the counts so far. max_bytes: of memory."""
        names = (field.name for field in fields(DecodedCounts) if field.name != "max_bytes")
        return DecodedCounts(max_bytes=max_bytes, **{n: round(getattr(self, n)) for n in names})

    def make_room(self, size_bytes: int, *, most_bytes: int) -> bool:
        """Evict chunks that aren't needed any more until memory has room for another one. Return
        False if it has none."""
        while size_bytes and self.memory_bytes + size_bytes > most_bytes:
            key = next((key for key in self._done if key in self._memory), None)
            if key is None:
                key = next(iter(self._memory), None)
                if key is None or self._taken - self._memory[key].at <= _SHORT * self._most:
                    return False
            self._drop(key)
        return True

    def add(self, key: Key, kept: KeptChunk) -> None:
        """Add a chunk that was just decoded."""
        if kept.size_bytes:
            self.chunks += 1
            self.decoded_bytes += kept.size_bytes
        if (known := self.known(key)) is not None:
            if known.left > 0:  # there was no room for it when it was decoded before
                kept.left = known.left
                self.again += 1
            self._drop(key)
        place = self._memory if kept.memory_bytes else self._rest
        place[key] = kept
        self._left += kept.left
        self._most_left = max(self._most_left, self._left)
        self.memory_bytes += kept.memory_bytes
        self.disk_bytes += kept.disk_bytes
        self.most_memory_bytes = max(self.most_memory_bytes, self.memory_bytes)
        self.most_disk_bytes = max(self.most_disk_bytes, self.disk_bytes)

    def count_use(self, key: Key, kept: KeptChunk, taken: int) -> None:
        """Count rows of a chunk that are taken. Call `expire` after those of a batch."""
        self.delivered_bytes += kept.size_bytes * taken / kept.uses
        self._taken += taken
        kept.at = self._taken
        if kept.left <= 0:
            del self._done[key]
            kept.left += kept.uses  # a part of the count was from the epoch before
            self._left += kept.uses
        kept.left -= taken
        self._left -= taken
        (self._memory if kept.memory_bytes else self._rest).move_to_end(key)
        if kept.left <= 0:
            self._done[key] = self._taken

    @property
    def _most(self) -> int:
        """Return the rows taken while a window passes: as set, or the most rows left so far."""
        return self.window_rows or self._most_left

    def expire(self) -> None:
        """Evict chunks that aren't needed any more."""
        while self._done:
            key, at = next(iter(self._done.items()))
            if self._taken - at < int(self._most * _GRACE):
                break
            self._drop(key)
        for place in (self._memory, self._rest):
            while place:
                key, kept = next(iter(place.items()))
                if self._taken - kept.at <= _STALE * self._most:
                    break
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self._done.pop(key, None)
        kept = self._memory.pop(key, None) or self._rest.pop(key)
        self._left -= kept.left
        self.memory_bytes -= kept.memory_bytes
        self.disk_bytes -= kept.disk_bytes
        if kept.file is not None:
            self.waste.append(kept.file)

    def forget(self, shard: int | None = None) -> None:
        """Forget the chunks of a shard, or all chunks."""
        for key in [key for key in (*self._memory, *self._rest) if shard in (None, key[0])]:
            self._drop(key)
