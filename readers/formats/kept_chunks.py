"""Decide which decoded chunks are kept and which is evicted next, without threads or files.

The plan reads the rows of a window's chunks in random order, so a chunk is needed as often as it
has rows. It is evicted after all of its rows were taken and a short grace period has passed. A job
that drops the end of an epoch leaves chunks partly used. The next epoch continues their counts, so
without the grace period it would evict them too early. A chunk that hasn't been used for a long
time is such a remainder, and is evicted too. If memory is short, finished chunks are evicted first,
then the least recently used.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from penstock.readers.formats.chunk_files import ChunkFile

    Key = tuple[int, int]
    """A shard, and a number in it."""

# As multiples of the rows taken while a window passes: a chunk whose rows were all taken is kept
# for _GRACE of them, and an unused chunk is a remainder after _STALE of them. In a window of
# shuffled samples the next row of a chunk is never that far away.
_GRACE, _STALE = 1 / 16, 3.0
# Chunks that were evicted too early are remembered, so that their rows aren't counted again.
_MOST_GONE = 2**16


@dataclass(slots=True, eq=False)
class KeptChunk:
    """A chunk that is kept.

    uses: rows that need it. left: rows of these that weren't taken yet. at: total rows taken, of
    all chunks, when it was last used. file: where it is kept; None for memory.
    """

    value: Any
    size_bytes: int
    uses: int
    left: int
    at: int = 0
    file: ChunkFile | None = None


@dataclass(frozen=True, slots=True)
class _EvictedChunk:
    """A chunk that was evicted before all of its rows were taken.

    value, memory: weak references to it and to the array that owns its memory, which stays alive as
    long as a batch is copied from it.
    """

    uses: int
    left: int
    at: int
    size_bytes: int
    value: weakref.ref[Any] | None
    memory: weakref.ref[Any] | None


class KeptChunks:
    """The chunks that are kept, by shard and number. Not thread-safe: the owner holds a lock.

    disk_bytes: of the files. waste: files of evicted chunks, to be removed by the owner.
    window_rows: rows that are taken while a window passes; 0 if unknown.
    """

    def __init__(self) -> None:
        self._memory: OrderedDict[Key, KeptChunk] = OrderedDict()  # least recently used first
        # Also chunks that are views of mapped files of the dataset.
        self._files: OrderedDict[Key, KeptChunk] = OrderedDict()
        self._moving: dict[Key, KeptChunk] = {}  # being written to files
        self._done: OrderedDict[Key, int] = OrderedDict()  # all rows taken, and at which count
        self._gone: OrderedDict[Key, _EvictedChunk] = OrderedDict()
        self._lent: dict[Key, _EvictedChunk] = {}  # those that may still be read
        self._kept_bytes = 0
        self._left = self._taken = 0  # rows left in kept chunks; rows taken of all
        self._peak, self._peak_before, self._peak_ends = 0, 0, 0  # the most of `_left`, recently
        self.disk_bytes = self.most_memory_bytes = self.most_disk_bytes = 0
        self.waste: list[ChunkFile] = []
        self.window_rows = 0

    def __len__(self) -> int:
        return len(self._memory) + len(self._files) + len(self._moving)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of memory that chunks take, including evicted chunks that are still
        being read."""
        return self.staying_bytes + sum(kept.size_bytes for kept in self._moving.values())

    @property
    def staying_bytes(self) -> int:
        """Return the same without chunks that are being moved to files."""
        if not self._lent:
            return self._kept_bytes
        for key, gone in list(self._lent.items()):
            if gone.memory is None or gone.memory() is None:
                del self._lent[key]
        return self._kept_bytes + sum(gone.size_bytes for gone in self._lent.values())

    # -- use

    def find(self, key: Key) -> KeptChunk | None:
        """Return a chunk if it is kept, or evicted and still in memory."""
        for place in (self._memory, self._files, self._moving):
            if (kept := place.get(key)) is not None:
                return kept
        gone = self._lent.get(key)
        value = gone.value() if gone is not None and gone.value is not None else None
        if gone is None or value is None:
            return None
        kept = KeptChunk(value, gone.size_bytes, uses=gone.uses, left=gone.left)
        del self._lent[key]
        self._add(key, kept)
        return kept

    def add_view(self, key: Key, value: Any, *, uses: int) -> KeptChunk:
        """Keep a chunk that takes no memory, because it is a view of a mapped file."""
        kept = self._files[key] = KeptChunk(value, 0, uses=uses, left=uses)
        self._count(kept.left)
        return kept

    def add(self, key: Key, value: Any, *, size_bytes: int, uses: int) -> tuple[KeptChunk, bool]:
        """Keep a chunk that was just decoded. Also return True if it had been evicted too early."""
        gone = self._gone.pop(key, None)
        self._lent.pop(key, None)
        is_again = gone is not None and self._taken - gone.at <= _STALE * self._most
        left = gone.left if gone is not None and is_again else uses
        kept = KeptChunk(value, size_bytes, uses=uses, left=left)
        self._add(key, kept)
        return kept, is_again

    def _add(self, key: Key, kept: KeptChunk) -> None:
        self._memory[key] = kept
        self._count(kept.left)
        self._kept_bytes += kept.size_bytes
        self.most_memory_bytes = max(self.most_memory_bytes, self.memory_bytes)

    def count_use(self, key: Key, kept: KeptChunk, taken: int) -> None:
        """Count rows of a chunk that are taken. Call `expire` after those of a batch."""
        self._taken += taken
        if self._taken >= self._peak_ends:
            self._peak_before, self._peak = self._peak, self._left
            self._peak_ends = self._taken + max(self._peak, self._peak_before)
        kept.at = self._taken
        more = -taken
        if self._done.pop(key, None) is not None:
            more += kept.uses  # a part of the count was from the epoch before
        kept.left += more
        if key not in self._moving:
            self._count(more)
        if key in self._memory:
            self._memory.move_to_end(key)
        if key in self._files:
            self._files.move_to_end(key)
        if kept.left <= 0:
            self._done[key] = self._taken

    def _count(self, rows: int) -> None:
        """Add to the rows that kept chunks still have to deliver."""
        self._left += rows
        if self._left > self._peak:
            self._peak = self._left

    @property
    def _most(self) -> int:
        """Return the rows taken while a window passes: as set, or the most rows left of late."""
        return self.window_rows or max(self._peak, self._peak_before)

    # -- eviction

    def expire(self) -> None:
        """Evict chunks that aren't needed any more."""
        while self._done:
            key, at = next(iter(self._done.items()))
            if self._taken - at < int(self._most * _GRACE):
                break
            self._drop(key)
        for place in (self._memory, self._files):
            while place:
                key, kept = next(iter(place.items()))
                if self._taken - kept.at <= _STALE * self._most:
                    break
                self._drop(key)

    def _drop(self, key: Key) -> KeptChunk | None:
        """Evict a chunk. A chunk that is being moved to a file is evicted when it arrives there."""
        self._done.pop(key, None)
        if (kept := self._memory.pop(key, None)) is not None:
            self._kept_bytes -= kept.size_bytes
        elif (kept := self._files.pop(key, None)) is not None and kept.file is not None:
            self.disk_bytes -= kept.file.size_bytes
            self.waste.append(kept.file)
        if kept is not None:
            self._count(-kept.left)
        return kept

    def shrink(self, most_bytes: int) -> list[tuple[Key, KeptChunk]]:
        """Evict chunks until memory takes at most this many bytes.

        Returns the chunks with rows left to take. `find` still returns each of them, until the
        owner calls `moved` or `lost` for it.
        """
        leaving: list[tuple[Key, KeptChunk]] = []
        over = self.staying_bytes - most_bytes
        while over > 0 and self._memory:
            done = next((key for key in self._done if key in self._memory), None)
            key = next(iter(self._memory)) if done is None else done
            kept = self._drop(key)
            assert kept is not None
            over -= kept.size_bytes
            if kept.left > 0:
                leaving.append((key, kept))
                self._moving[key] = kept
        return leaving

    def moved(self, key: Key, kept: KeptChunk, file: ChunkFile) -> None:
        """Record that a chunk of `shrink` was moved to a file."""
        if self._moving.pop(key, None) is None or kept.left <= 0:
            self.waste.append(file)
            self._done.pop(key, None)
            return
        kept.value, kept.file = file.value, file
        self._files[key] = kept
        self._count(kept.left)
        self.disk_bytes += file.size_bytes
        self.most_disk_bytes = max(self.most_disk_bytes, self.disk_bytes)

    def lost(self, key: Key, kept: KeptChunk) -> None:
        """Record that a chunk of `shrink` has no room anywhere. It is forgotten when nothing reads
        it any more."""
        if self._moving.pop(key, None) is None:
            return
        self._done.pop(key, None)
        value = kept.value
        is_array = isinstance(value, np.ndarray)
        gone = _EvictedChunk(
            uses=kept.uses,
            left=max(kept.left, 0),
            at=self._taken,
            size_bytes=kept.size_bytes,
            value=weakref.ref(value) if is_array else None,
            memory=weakref.ref(_owner(value)) if is_array else None,
        )
        if kept.left > 0:
            self._gone[key] = gone
            while len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)
        if is_array:
            self._lent[key] = gone
        kept.value = None

    def forget(self, shard: int | None = None) -> None:
        """Forget the chunks of a shard, or all chunks."""
        for place in (self._memory, self._files):
            for key in [key for key in place if shard in (None, key[0])]:
                self._drop(key)
        for some in (self._moving, self._gone, self._lent):
            for key in [key for key in some if shard in (None, key[0])]:
                del some[key]


def _owner(array: Any) -> Any:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
