"""Decide which decoded chunks are kept and which is evicted next, without threads or files.

The plan reads the rows of a window's chunks in random order, so a chunk is wanted as often as it
has rows. It is evicted once all of them were taken, after a short grace period: a job that drops
the end of an epoch leaves chunks half used, so the next epoch, which counts on from there, would
take them for done too early. A chunk that nobody has used for long is such a rest, and is evicted
too. Where room is short, finished chunks go first, then the least recently used.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    Key = tuple[int, int]
    """A shard, and a number in it."""

# A chunk whose rows were all taken stays while so small a share of the rows that are kept is taken;
# and one that nobody took while so many times the most that was kept of late were is a rest: in a
# window of shuffled samples the next row of a chunk is never so far.
_GRACE, _STALE = 1 / 16, 3.0
# Chunks that went before their time are remembered, so that their rows aren't counted anew.
_MOST_GONE = 2**16


class KeptFile(Protocol):
    """A chunk in a file of the cache folder. value: mapped, read-only; size_bytes: of the disk."""

    value: Any
    size_bytes: int

    def remove(self) -> None:
        """Remove the file, now or as soon as nobody looks into it."""


@dataclass(slots=True, eq=False)
class KeptChunk:
    """A chunk that is kept. uses: rows that need it; left: of those, that weren't taken yet; at:
    rows that had been taken of all chunks when it was used last. file: where it lies; None: in
    memory."""

    value: Any
    size_bytes: int
    uses: int
    left: int
    at: int = 0
    file: KeptFile | None = None


@dataclass(frozen=True, slots=True)
class _EvictedChunk:
    """A chunk that went before its time: what it was, and when it went.

    value, memory: weak references to it and to the array that owns its memory, which lives on as
    long as a batch is copied from it.
    """

    uses: int
    left: int
    at: int
    size_bytes: int
    value: weakref.ref[Any] | None
    memory: weakref.ref[Any] | None


class KeptChunks:
    """The chunks that are kept. Not thread-safe: the owner locks.

    memory_bytes: of those in memory, and of those that had to go and are still being read. waste:
    files of chunks that left; the owner removes them. window_rows: that are taken while a window
    passes, where somebody told.
    """

    def __init__(self) -> None:
        self._memory: OrderedDict[Key, KeptChunk] = OrderedDict()  # least recently used first
        self._files: OrderedDict[Key, KeptChunk] = (
            OrderedDict()
        )  # those too that look into others' maps
        self._moving: dict[Key, KeptChunk] = {}  # on their way into files
        self._done: OrderedDict[Key, int] = OrderedDict()  # all rows taken, and when
        self._gone: OrderedDict[Key, _EvictedChunk] = OrderedDict()
        self._lent: dict[Key, _EvictedChunk] = {}  # of those, that may be read still
        self._kept_bytes = 0
        self._left = self._taken = 0  # rows that kept chunks are still to give; rows taken of any
        self._peak, self._peak_before, self._peak_ends = 0, 0, 0  # most of the former, of late
        self.disk_bytes = self.most_memory_bytes = self.most_disk_bytes = 0
        self.waste: list[KeptFile] = []
        self.window_rows = 0

    def __len__(self) -> int:
        return len(self._memory) + len(self._files) + len(self._moving)

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that chunks take."""
        return self.staying_bytes + sum(kept.size_bytes for kept in self._moving.values())

    @property
    def staying_bytes(self) -> int:
        """The same without those that are on their way into files."""
        if not self._lent:
            return self._kept_bytes
        for key, gone in list(self._lent.items()):
            if gone.memory is None or gone.memory() is None:
                del self._lent[key]
        return self._kept_bytes + sum(gone.size_bytes for gone in self._lent.values())

    # -- taking

    def find(self, key: Key) -> KeptChunk | None:
        """A chunk, if it is still there."""
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
        """Keep a chunk that takes no memory, as it looks into a map."""
        kept = self._files[key] = KeptChunk(value, 0, uses=uses, left=uses)
        self._count(kept.left)
        return kept

    def add(self, key: Key, value: Any, *, size_bytes: int, uses: int) -> tuple[KeptChunk, bool]:
        """Keep a chunk that was just decoded, and whether it had gone before its time."""
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

    def use(self, key: Key, kept: KeptChunk, taken: int) -> None:
        """Count rows of a chunk that are taken, and let go what nobody needs by now."""
        self.count_use(key, kept, taken)
        self.expire()

    def count_use(self, key: Key, kept: KeptChunk, taken: int) -> None:
        """Count rows of a chunk that are taken; `expire` behind those of a batch."""
        self._taken += taken
        if self._taken >= self._peak_ends:
            self._peak_before, self._peak = self._peak, self._left
            self._peak_ends = self._taken + max(self._peak, self._peak_before)
        kept.at = self._taken
        more = -taken
        if self._done.pop(key, None) is not None:
            more += kept.uses  # what had been counted was in part the epoch's before
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
        """Count rows that kept chunks are still to give."""
        self._left += rows
        if self._left > self._peak:
            self._peak = self._left

    @property
    def _most(self) -> int:
        """Rows that are taken while a window passes: as told, else those to be given at most."""
        return self.window_rows or max(self._peak, self._peak_before)

    # -- leaving

    def expire(self) -> None:
        """Let go what nobody needs by now."""
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
        """Let a chunk go; one that is on its way into a file goes when it is there."""
        self._done.pop(key, None)
        if (kept := self._memory.pop(key, None)) is not None:
            self._kept_bytes -= kept.size_bytes
        elif (kept := self._files.pop(key, None)) is not None and kept.file is not None:  # its own
            self.disk_bytes -= kept.file.size_bytes
            self.waste.append(kept.file)
        if kept is not None:
            self._count(-kept.left)
        return kept

    def shrink(self, most_bytes: int) -> list[tuple[Key, KeptChunk]]:
        """Let chunks go until memory takes at most so many bytes. Returns those that have rows left
        to be taken: each is still found, until `moved` or `lost` says what became of it."""
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

    def moved(self, key: Key, kept: KeptChunk, file: KeptFile) -> None:
        """A chunk of `shrink` lies in a file."""
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
        """A chunk of `shrink` has no room anywhere: it is forgotten, once nobody reads it."""
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
        """Forget the chunks of a shard, or all."""
        for place in (self._memory, self._files):
            for key in [key for key in place if shard in (None, key[0])]:
                self._drop(key)
        for some in (self._moving, self._gone, self._lent):
            for key in [key for key in some if shard in (None, key[0])]:
                del some[key]


def _owner(array: Any) -> Any:
    """The array that others are views of, which they keep alive."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
