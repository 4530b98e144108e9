"""Cache the decoded chunks of an open dataset: one thread decodes each, and all threads share it.

No lock is held while a chunk is decoded or written. A chunk for which memory has no room is written
to a mapped file if there is a cache folder with room. Otherwise it is decoded again; this is never
an error.

Memory for chunks, and for the bytes from which they are decoded, is reused once nothing refers to
it (`ChunkMemory`). If arrays of some hundred kilobytes are freed, their memory goes back to the
system and costs page faults when it is allocated again: 6.5 faults for a sample of 49 kB in chunks
of 8.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import deque
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import STALL_TIMEOUT_S, Outcome, StalledError, log
from penstock.cache.base import available_memory_bytes, format_size, usable_cores
from penstock.readers.blocks import MemoryLease
from penstock.readers.formats.kept_chunks import KeptChunk, KeptChunks, ReadTally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.readers.formats.chunk_files import ChunkFile, ChunkFiles
    from penstock.readers.formats.kept_chunks import DecodedCounts, Key
    from penstock.readers.types import Encoded, Numbers

    DecodeSeveral = Callable[[list[int]], Iterable[Any]]
    IsView = Callable[[int], bool]

LEAST_LENT_BYTES = 2**16
"""Smaller arrays have memory of their own, which the allocator keeps."""

FREE_BYTES = 2**30
"""The most bytes of memory that wait to be reused."""


class ChunkMemory:
    """Lends memory that is reused. Safe for several threads.

    It uses no lock, because memory may be returned while any line of any thread runs.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Encoded]] = {}  # by size
        self._most_bytes = FREE_BYTES
        # Approximate, as threads change it without a lock; corrected with each new allocation.
        self._counted_bytes = 0

    @property
    def free_bytes(self) -> int:
        """Return the bytes that wait to be reused."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Numbers:
        """Return a writable array with undefined content. Its memory is reused once no view of it
        is left."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LEAST_LENT_BYTES:
            return np.empty(shape, dtype)
        step = max(4096, 2 ** (size_bytes.bit_length() - 4))
        room_bytes = -(-size_bytes // step) * step
        try:
            memory = self._free[room_bytes].pop()
            self._counted_bytes -= room_bytes
        except (KeyError, IndexError):
            memory = np.empty(room_bytes, np.uint8)
            self._counted_bytes = self.free_bytes
        lent: Encoded = np.asarray(MemoryLease(memory, self))
        return lent[:size_bytes].view(dtype).reshape(shape)

    def limit(self, most_bytes: int) -> None:
        """Limit the bytes that wait to be reused, to at most `FREE_BYTES`. Below 0 none are
        kept."""
        self._most_bytes = min(FREE_BYTES, most_bytes)
        if self._counted_bytes > self._most_bytes:
            self._free, self._counted_bytes = {}, 0

    def give_back(self, memory: Encoded) -> None:
        """Accept memory of which no view is left."""
        if self._counted_bytes + len(memory) <= self._most_bytes:
            self._counted_bytes += len(memory)
            self._free.setdefault(len(memory), deque()).append(memory)


MEMORY_SHARE = 0.25
"""The share of the available memory that decoded chunks take by default, in all ranks of the node
together. The rest is for the page cache, the batches and the training code."""

LEAST_BYTES = 64 * 2**20
"""The smallest default, even if a machine reports less memory."""

LEAST_DECODERS = 4
"""Threads that may decode at a time, or twice the number of cores if that is more. A remote dataset
has more reading threads, and each would hold a chunk in addition to those that are kept."""

GROUP_BYTES = 4 * 2**20
"""Decoded bytes of chunks that a thread decodes at a time. Small chunks that are read together,
then decoded, then kept take less time in Python, as the code of each step stays in the processor's
cache: of 400 kB each, 9 % of the CPU time in total."""

_GOLDEN = 0.6180339887498949

_NO_CACHE = "there is no cache="


class PendingFetch:
    """The extents of one shard that a batch fetches, and then the data that holds their bytes."""

    def __init__(self) -> None:
        self._is_settled = threading.Event()
        self._holder: weakref.ref[Any] | None = None

    def settle(self, holder: Any) -> None:
        """Publish the holder of the bytes. None: the fetch failed, unless a holder was published
        before."""
        if holder is not None:
            self._holder = weakref.ref(holder)
        self._is_settled.set()

    @property
    def is_over(self) -> bool:
        """Return True if nothing holds the bytes and no batch is fetching them."""
        return self._is_settled.is_set() and (self._holder is None or self._holder() is None)

    def wait(self, timeout_s: float) -> Any:
        """Wait for the holder of the bytes; return None if there is none any more, or at the
        timeout."""
        if not self._is_settled.wait(timeout_s) or self._holder is None:
            return None
        return self._holder()


class DecodedChunks:
    """Keeps decoded chunks by shard and number. Safe for several threads.

    A chunk is a numpy array, or an Arrow table, record batch or array. The caller copies the rows
    of a batch out of a chunk and then drops it.

    max_bytes: of memory; None means `MEMORY_SHARE` of the memory that is available when the first
    chunk is decoded. Chunks that threads are decoding come on top. files: storage for chunks for
    which memory has no room; None decodes them again. url: for messages.
    """

    def __init__(
        self, *, max_bytes: int | None = None, files: ChunkFiles | None = None, url: str = ""
    ) -> None:
        self._max_bytes, self._files, self._url = max_bytes, files, url
        self._parts = 1
        self._available: int | None = None
        self.memory = ChunkMemory()
        self._lock = threading.Lock()
        self._kept = KeptChunks()
        self._decoding: dict[Key, Outcome[dict[int, Any]]] = {}
        # A thread that decodes holds one. A queue written in C, so that a Ctrl-C can't break it.
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max(LEAST_DECODERS, 2 * usable_cores())):
            self._slots.put(None)
        self._turns = 0
        self.reads = ReadTally()
        self._closed = self._has_warned = False
        self._fetches: dict[Key, PendingFetch] = {}

    @property
    def max_bytes(self) -> int:
        """Return the limit of memory."""
        if self._max_bytes is None:
            self._max_bytes = self.default_bytes()
        return self._max_bytes

    def default_bytes(self) -> int:
        """Return the default limit, from the memory that is available now."""
        available = available_memory_bytes() if self._available is None else self._available
        return max(LEAST_BYTES, int(available * MEMORY_SHARE) // self._parts)

    def share(self, parts: int, *, available_bytes: int | None = None) -> None:
        """Divide the default limit by `parts`: the ranks of a node, or the datasets that are read
        together. available_bytes: the memory to divide, if it was measured for all of them.

        A limit that the user set, or that is in use, stays.
        """
        self._parts, self._available = max(self._parts, parts), available_bytes

    def expect(self, window_rows: int) -> None:
        """Set how many rows are taken while a window passes; a chunk that is unused for longer is a
        remainder.

        With several readers, the longest window applies.
        """
        with self._lock:
            self._kept.window_rows = max(self._kept.window_rows, window_rows)

    def file_room_bytes(self) -> int:
        """Return the bytes that files may take in addition to memory; 0 without a cache folder."""
        return 0 if self._files is None else self._files.room_bytes()

    def counts(self) -> DecodedCounts:
        """Return the counts so far."""
        with self._lock:
            return self._kept.counts(max_bytes=self._max_bytes or 0)

    # -- use

    def claim(
        self, shard: int, extents: Iterable[int]
    ) -> tuple[PendingFetch, dict[int, PendingFetch]]:
        """Return the fetch of those extents of a shard that no other batch is fetching, which the
        caller settles, and the fetches of other batches, by extent.

        Batches that are read at the same time need the same chunks. The cache fetches each byte
        once per node. Bytes that it doesn't keep are shared for as long as the batch that fetched
        them is being read. By then they are decoded, and decoded chunks are kept.
        """
        own, others = PendingFetch(), dict[int, PendingFetch]()
        with self._lock:
            for extent in set(extents):
                known = self._fetches.get((shard, extent))
                if known is None or known.is_over:
                    self._fetches[shard, extent] = own
                else:
                    others[extent] = known
        return own, others

    def has(self, key: Key) -> bool:
        """Return True if a chunk is kept. key: its shard and number."""
        with self._lock:
            return self._kept.find(key) is not None

    def take(
        self,
        shard: int,
        chunks: Sequence[int],
        decode: DecodeSeveral,
        *,
        uses: Sequence[int],
        taken: Sequence[int],
        size_bytes: int = 0,
        is_view: IsView | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield several chunks of a shard with their numbers, in any order, decoding those that
        aren't kept. They are read-only: numpy arrays, Arrow tables, or other objects with `nbytes`,
        of which only the first two can be kept in files.

        Each is decoded once and kept as long as there is room, until it was taken `uses` times.
        Copy the rows of a batch out of it and drop it, because any view keeps all of it in memory.

        chunks: the number of the extent from which each is decoded, the first one of several. An
        extent whose chunk is kept isn't fetched. decode: returns the chunks of these numbers in
        their order, or a ValueError in the place of a damaged one, which is yielded instead of the
        chunk. This thread calls it, or another that came first, for several small chunks at a time
        if their size is known. It must not request other chunks. uses: rows of the shard that need
        each chunk. taken: rows of this call that need it. size_bytes: of a chunk, if metadata
        record it, so that room can be made in advance; 0 if unknown. is_view: returns True if a
        chunk is a view of a mapped file, which takes no memory; None if none is.

        Of chunks that aren't kept, the thread decodes those that no other thread is decoding. Only
        then it waits for the others. Even if it is interrupted, no other thread waits for it in
        vain.
        """
        several = max(1, GROUP_BYTES // size_bytes) if size_bytes else 1
        left = self._rotated(range(len(chunks))) if len(chunks) > several else range(len(chunks))
        while left:
            group: _Group | None = None
            found, others = list[tuple[int, Any]](), list[int]()
            try:
                with self._lock:
                    for place in left:
                        number, count = chunks[place], taken[place]
                        key = shard, number
                        if (kept := self._kept.find(key)) is not None:
                            self._kept.count_use(key, kept, count)
                            found.append((number, kept.value))
                        elif key in self._decoding or (group and len(group.rows) == several):
                            others.append(place)
                        else:
                            group = group or _Group(shard, decode, size_bytes, is_view)
                            group.rows[number] = max(1, uses[place]), count
                            self._decoding[key] = group.outcome
                    self._kept.expire()
                if group is not None:
                    self._decode(group)
            finally:
                if group is not None:
                    self._release(group)
            yield from found
            if group is not None:
                yield from group.outcome.result().items()
            elif not found:
                ready = self._wait_for(shard, chunks[others[0]])
                for place in [place for place in others if chunks[place] in ready]:
                    others.remove(place)
                    self._count(shard, chunks[place], taken[place])
                    yield chunks[place], ready[chunks[place]]
            left = others

    def _release(self, group: _Group) -> None:
        """End the waits for chunks that weren't decoded, as their thread was interrupted."""
        for number in group.rows:
            if self._decoding.get((group.shard, number)) is group.outcome:
                del self._decoding[group.shard, number]
        group.outcome.cancel()

    def _count(self, shard: int, number: int, taken: int) -> None:
        """Count rows that are taken of a chunk that another thread has decoded."""
        key = shard, number
        with self._lock:
            if (kept := self._kept.known(key)) is not None:
                self._kept.count_use(key, kept, taken)

    def _wait_for(self, shard: int, number: int) -> Mapping[int, Any]:
        """Wait until another thread has decoded a chunk, and return all chunks that it decoded at
        once; none if it was interrupted, or has ended already.

        Raises its error, or StalledError.
        """
        outcome = self._decoding.get((shard, number))
        if outcome is None:
            return {}
        if not outcome.wait(STALL_TIMEOUT_S):
            raise self._stalled(f"another thread has been decoding chunk {number} of shard {shard}")
        try:
            return outcome.result()
        except (CancelledError, KeyboardInterrupt, SystemExit):
            return {}

    def _decode(self, group: _Group) -> None:
        """Decode the chunks of a group and keep them."""

        def make(_: None) -> dict[int, Any]:
            numbers = [*group.rows]
            values = dict(zip(numbers, group.decode(numbers), strict=True))
            for value in values.values():
                if isinstance(value, np.ndarray):
                    value.flags.writeable = False  # several batches copy from it
            self._keep(group, values)
            return values

        size_bytes = len(group.rows) * group.size_bytes
        with self._lock:
            self._kept.make_room(size_bytes, most_bytes=self.max_bytes)
        try:
            self._slots.get(timeout=STALL_TIMEOUT_S)
        except queue.Empty:
            what = f"chunk {next(iter(group.rows))} of shard {group.shard}"
            raise self._stalled(f"other threads have been decoding, and {what} waited") from None
        try:
            group.outcome.run(make, None)
        finally:
            self._slots.put(None)
        self._clean()

    def _stalled(self, what: str) -> StalledError:
        return StalledError(
            f"{self._url}: {what} for {STALL_TIMEOUT_S:.0f} s. The disk or the network mount under "
            "the dataset may hang; check it with `ls`."
        )

    def _keep(self, group: _Group, values: Mapping[int, Any]) -> None:
        """Keep chunks in memory if there is room, else in files if there is, else count them."""
        without_room: list[tuple[int, KeptChunk]] = []
        good = {n: value for n, value in values.items() if not isinstance(value, ValueError)}
        views = set() if group.is_view is None else set(filter(group.is_view, good))
        with self._lock:
            for number, value in good.items():
                size, uses = 0 if number in views else int(value.nbytes), group.rows[number][0]
                kept = KeptChunk(
                    value=value, size_bytes=size, memory_bytes=size, uses=uses, left=uses
                )
                if self._kept.make_room(size, most_bytes=self.max_bytes):
                    self._add(group, number, kept)
                else:
                    without_room.append((number, kept))
            self._kept.expire()
            files = None if self._closed else self._files
        for number, kept in without_room:
            value, kept.memory_bytes, kept.value = kept.value, 0, None
            is_needed = kept.uses > group.rows[number][1]
            if files is not None and is_needed and (file := files.write(value)) is not None:
                kept.file, kept.value = file, file.value
            with self._lock:
                self._add(group, number, kept)

    def _add(self, group: _Group, number: int, kept: KeptChunk) -> None:
        """Add a decoded chunk, of which rows are taken. The caller holds the lock."""
        key = group.shard, number
        self._kept.add(key, kept)
        self._kept.count_use(key, kept, group.rows[number][1])
        self._decoding.pop(key, None)
        if self._closed:
            self._kept.forget()

    def _clean(self) -> None:
        """Limit the memory that waits to be reused, remove files that aren't needed any more, and
        warn once if chunks are decoded again."""
        waste: list[ChunkFile] = []
        if self._kept.waste:
            with self._lock:
                waste, self._kept.waste = self._kept.waste, waste
        self.memory.limit(-1 if self._closed else self.max_bytes - self._kept.memory_bytes)
        for file in waste:
            file.remove()
        if self._kept.again and not self._has_warned:
            self._has_warned = True
            room = "the cache folder has no room for the rest" if self._files else _NO_CACHE
            log.warning(
                "%s: the decoded chunks of a window take more than the %s that they may take in "
                "memory, and %s, so some are decoded again. Pass Dataset(decoded_bytes=…), a "
                "cache=DiskCache(…) with room, or a smaller window=.",
                self._url,
                format_size(self.max_bytes),
                room,
            )

    def forget(self, shard: int) -> None:
        """Forget a shard's chunks, because the bytes from which they were decoded were wrong."""
        with self._lock:
            self._kept.forget(shard)
        self._clean()

    def close(self) -> None:
        """Forget all chunks and remove their files. Chunks that were returned stay valid. Safe to
        call twice."""
        with self._lock:
            self._closed = True
            self._kept.forget()
        self._clean()
        if self._files is not None:
            self._files.close()

    # -- order

    def shards_in_order(self, shards: Sequence[int]) -> Iterator[int]:
        """Yield the places of these shards, each chosen when it is requested; those of which
        another thread is decoding a chunk come last."""
        left = self._rotated(range(len(shards)))
        while left:
            busy = {shard for shard, _ in [*self._decoding]}
            place = next((place for place in left if shards[place] not in busy), left[0])
            left.remove(place)
            yield place

    def _rotated(self, places: range) -> list[int]:
        """Return places, beginning at another one for every caller. Otherwise threads that waited
        for the same decoding would meet again at the next."""
        self._turns += 1
        start = int(len(places) * (self._turns * _GOLDEN % 1))
        return [*places[start:], *places[:start]]


class _Group:
    """Chunks of a shard that one thread decodes at a time. size_bytes: of each; 0 if unknown. rows:
    by chunk, how many need it, and how many are taken now."""

    def __init__(
        self, shard: int, decode: DecodeSeveral, size_bytes: int, is_view: IsView | None
    ) -> None:
        self.shard, self.decode = shard, decode
        self.size_bytes, self.is_view = size_bytes, is_view
        self.rows: dict[int, tuple[int, int]] = {}
        self.outcome: Outcome[dict[int, Any]] = Outcome()
