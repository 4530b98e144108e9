"""Cache the decoded chunks of an open dataset: one thread decodes each, many use it.

No lock is held while anything is decoded or written. A chunk that memory has no room for goes to a
mapped file where there is a cache folder with room, else it is decoded again: never an error.

Memory for chunks, and for the bytes that they are decoded from, is used again once nothing refers
to it (`ChunkMemory`). Arrays of some hundred kilobytes that are freed go back to the system, and
cost page faults when they are allocated again: 6.5 faults for a sample of 49 kB in chunks of 8.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import weakref
from collections import Counter, deque
from concurrent.futures import CancelledError
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from penstock.cache import STALL_TIMEOUT_S, Outcome, StalledError
from penstock.cache.base import available_memory_bytes, format_size, usable_cores
from penstock.readers.formats.chunk_counts import DecodedCounts, ReadTally
from penstock.readers.formats.kept_chunks import KeptChunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats.kept_chunks import KeptChunk, KeptFile
    from penstock.readers.types import Encoded

    Key = tuple[int, int]

LEAST_LENT_BYTES = 2**16
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
        lent: Encoded = np.asarray(_MemoryLease(memory, self))
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


class _MemoryLease:
    """Gives memory back when the last view into it is gone."""

    __slots__ = ("_memory", "_owner")

    def __init__(self, memory: Encoded, owner: ChunkMemory) -> None:
        self._memory, self._owner = memory, owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._memory.__array_interface__

    def __del__(self) -> None:
        self._owner.give_back(self._memory)


_log = logging.getLogger("penstock")

MEMORY_SHARE = 0.25
"""Of the memory that a process may still take, what decoded chunks take by default, all ranks of
the node together: the rest is the page cache's, the batches' and the training code's."""

LEAST_BYTES = 64 * 2**20
"""The default isn't below that, however little memory a machine tells of."""

LEAST_DECODERS = 4
"""Threads that may decode at a time, or twice as many as there are cores: a remote has more reading
threads than that, and each would have a chunk in hand beside those that are kept."""

_GOLDEN = 0.6180339887498949


class FileRoom(Protocol):
    """Where chunks are kept that memory has no room for."""

    def write(self, value: Any) -> KeptFile | None:
        """Keep a chunk; None where there is no room for it, or it isn't worth it. What a disk does
        is no error."""

    def room_bytes(self) -> int:
        """How much the files of all processes may take, as far as the folder tells."""

    def close(self) -> None:
        """Remove what is left. Safe to call twice."""


T = TypeVar("T")


class Arrival(Generic[T]):
    """One extent on its way, and behind that who has it."""

    def __init__(self) -> None:
        self._is_settled = threading.Event()
        self._holder: weakref.ref[T] | None = None

    def settle(self, holder: T | None) -> None:
        """Say who has it; None: it doesn't come, if that wasn't settled before."""
        if holder is not None:
            self._holder = weakref.ref(holder)
        self._is_settled.set()

    @property
    def is_over(self) -> bool:
        """Whether nobody has it, and nobody is fetching it."""
        return self._is_settled.is_set() and (self._holder is None or self._holder() is None)

    def wait(self, timeout_s: float) -> T | None:
        """Who has it; None: nobody has it any more, or it takes too long."""
        if not self._is_settled.wait(timeout_s) or self._holder is None:
            return None
        return self._holder()


class Arrivals(Generic[T]):
    """What was fetched and decoded of one shard's extents. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[int, Arrival[T]] = {}
        self._chunks: dict[int, set[int]] = {}

    def claim(self, extents: Iterable[int]) -> tuple[dict[int, Arrival[T]], dict[int, Arrival[T]]]:
        """Who is to fetch these: the caller, which settles each, and for the rest what it can wait
        for."""
        mine, others = {}, {}
        with self._lock:
            for extent in extents:
                known = self._coming.get(extent)
                if known is None or known.is_over:
                    mine[extent] = self._coming[extent] = Arrival()
                else:
                    others[extent] = known
        return mine, others

    def note(self, extents: Iterable[int], chunk: int) -> None:
        """Note that a chunk is decoded of these."""
        with self._lock:
            for extent in extents:
                self._chunks.setdefault(extent, set()).add(chunk)

    def chunks(self, extent: int) -> tuple[int, ...]:
        """The chunks that were decoded of an extent."""
        with self._lock:
            return tuple(self._chunks.get(extent, ()))


class DecodedChunks:
    """Keeps decoded chunks by shard and number. Safe for several threads.

    A chunk is a numpy array, or an Arrow table, record batch or array. Whoever takes one copies out
    of it what a batch needs, and lets it go.

    max_bytes: of memory; None: `MEMORY_SHARE` of what the process may take when the first chunk is
    decoded. Beside it stands what threads decode at that moment. files: for what memory has no room
    for; None: it is decoded again. url: for people.
    """

    def __init__(
        self, *, max_bytes: int | None = None, files: FileRoom | None = None, url: str = ""
    ) -> None:
        self._max_bytes, self._files, self._url = max_bytes, files, url
        self._parts = 1
        self.memory = ChunkMemory()
        self._lock = threading.Lock()
        self._kept = KeptChunks()
        self._decoding: dict[Key, Outcome[Any]] = {}
        self._busy: Counter[int] = Counter()  # decodings by shard
        self._reserved_bytes = self._decoded_bytes = self._chunks = self._again = 0
        self._delivered_bytes = 0.0
        # Of which a thread that decodes has one. In C whole, so that a Ctrl-C can't break it.
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(max(LEAST_DECODERS, 2 * usable_cores())):
            self._slots.put(None)
        self._turns = 0
        self.reads = ReadTally()
        self._closed = self._was_told = False
        self._arrivals: dict[int, Arrivals[Any]] = {}

    @property
    def max_bytes(self) -> int:
        """The bound of memory."""
        if self._max_bytes is None:
            self._max_bytes = self.default_bytes()
        return self._max_bytes

    def default_bytes(self) -> int:
        """The bound that this machine gives, here and now."""
        return max(LEAST_BYTES, int(available_memory_bytes() * MEMORY_SHARE) // self._parts)

    def share(self, parts: int) -> None:
        """Take only such a part of what the machine gives: one of the ranks of a node, or of the
        datasets that are read together. A bound that the user gave, or that is in use, stays."""
        self._parts = max(self._parts, parts)

    def expect(self, window_rows: int) -> None:
        """Be told how many rows are taken while a window passes: what nobody takes for longer is
        left over. Of several readers the longest holds."""
        with self._lock:
            self._kept.window_rows = max(self._kept.window_rows, window_rows)

    def file_room_bytes(self) -> int:
        """What files may take beside memory; 0 where there is no cache folder."""
        return 0 if self._files is None else self._files.room_bytes()

    def arrivals(self, shard: int) -> Arrivals[Any]:
        """What was fetched of one shard."""
        with self._lock:
            return self._arrivals.setdefault(shard, Arrivals())

    def of(self, shard: int) -> ShardChunks:
        """The chunks of one shard."""
        return ShardChunks(self, shard)

    def counts(self) -> DecodedCounts:
        """What chunks have come to so far."""
        with self._lock:
            kept = self._kept
            return DecodedCounts(
                decoded_bytes=self._decoded_bytes,
                delivered_bytes=round(self._delivered_bytes),
                chunks=self._chunks,
                again=self._again,
                memory_bytes=kept.memory_bytes,
                disk_bytes=kept.disk_bytes,
                most_memory_bytes=kept.most_memory_bytes,
                most_disk_bytes=kept.most_disk_bytes,
                max_bytes=self._max_bytes or 0,
            )

    # -- taking

    def has(self, key: Key) -> bool:
        """Whether a chunk is kept, by its shard and number."""
        with self._lock:
            return self._kept.find(key) is not None

    def take(
        self,
        key: Key,
        decode: Callable[[], Any],
        *,
        uses: int,
        taken: int,
        size_bytes: int = 0,
        is_view: bool = False,
    ) -> Any:
        """A chunk that is kept, or decoded now by one thread for all that want it; arguments as for
        `ShardData.decoded`. Raises what decode raises, in all these threads, and StalledError."""
        if (found := self._kept_already(key, taken)) is not None:
            return found
        while True:
            mine: Outcome[Any] = Outcome()
            try:
                with self._lock:
                    if (kept := self._kept.find(key)) is not None:
                        return self._used(key, kept, taken)
                    outcome = self._decoding.setdefault(key, mine)
                if outcome is mine:
                    add = partial(self._add, key, uses=max(1, uses), taken=taken, is_view=is_view)
                    self._decode(key, decode, mine, add, size_bytes=size_bytes)
            finally:
                # Whatever interrupts this thread, nobody waits for what nobody does any more.
                if self._decoding.get(key) is mine:
                    del self._decoding[key]
                mine.cancel()
            if outcome is mine:
                return mine.result()
            if self._came_to_something(key, outcome):
                found = self._kept_already(key, taken)
                return outcome.result() if found is None else found

    def take_kept(self, shard: int, chunks: Sequence[int], taken: Sequence[int]) -> dict[int, Any]:
        """Those of a shard's chunks that are kept, by number. taken: rows of each."""
        found: dict[int, Any] = {}
        with self._lock:
            for chunk, count in zip(chunks, taken, strict=True):
                key = (shard, chunk)
                if (kept := self._kept.find(key)) is not None:
                    self._delivered_bytes += kept.size_bytes * count / kept.uses
                    found[chunk] = kept.value
                    self._kept.count_use(key, kept, count)
            self._kept.expire()
            is_over = self._kept.staying_bytes > self.max_bytes  # some may have come back
        if is_over:
            self._make_room()
        return found

    def _kept_already(self, key: Key, taken: int) -> Any:
        """A chunk that is kept, or None."""
        with self._lock:
            if (kept := self._kept.find(key)) is None:
                return None
            value = self._used(key, kept, taken)
            is_over = self._kept.staying_bytes > self.max_bytes  # it may have come back
        if is_over:
            self._make_room()
        return value

    def _used(self, key: Key, kept: KeptChunk, taken: int) -> Any:
        """A chunk's value, and what was taken of it counted; the lock is held."""
        self._delivered_bytes += kept.size_bytes * taken / kept.uses
        value = kept.value
        self._kept.use(key, kept, taken)
        return value

    def _came_to_something(self, key: Key, outcome: Outcome[Any]) -> bool:
        """Wait for a chunk that another thread decodes; False where that thread was interrupted.
        Raises its error, StalledError."""
        if not outcome.wait(STALL_TIMEOUT_S):
            raise StalledError(
                f"{self._url}: another thread has been decoding chunk {key[1]} of shard {key[0]} "
                f"for {STALL_TIMEOUT_S:.0f} s. The disk or the network mount under the dataset may "
                "hang; look at it with `ls`."
            )
        try:
            outcome.result()
        except (CancelledError, KeyboardInterrupt, SystemExit):
            return False
        return True

    def _decode(
        self,
        key: Key,
        decode: Callable[[], Any],
        outcome: Outcome[Any],
        add: Callable[[Any], None],
        *,
        size_bytes: int,
    ) -> None:
        """Decode a chunk and keep it. size_bytes: that it will have; 0: nobody knows."""

        def make(_: None) -> Any:
            value = decode()
            if isinstance(value, np.ndarray):
                value.flags.writeable = False  # several batches are copied from it
            with self._lock:
                add(value)
            return value

        with self._lock:
            self._reserved_bytes += size_bytes
            self._busy[key[0]] += 1
            is_over = self._kept.staying_bytes + self._reserved_bytes > self.max_bytes
        try:
            if is_over:
                self._make_room()
            self._take_slot(key)
            try:
                outcome.run(make, None)
            finally:
                self._slots.put(None)
        finally:
            with self._lock:
                self._reserved_bytes -= size_bytes
                self._busy[key[0]] -= 1
                if not self._busy[key[0]]:
                    del self._busy[key[0]]
        self._make_room()

    def _take_slot(self, key: Key) -> None:
        try:
            self._slots.get(timeout=STALL_TIMEOUT_S)
        except queue.Empty:
            raise StalledError(
                f"{self._url}: chunk {key[1]} of shard {key[0]} waited for {STALL_TIMEOUT_S:.0f} s "
                "until other threads had decoded theirs. The disk or the network mount under the "
                "dataset may hang; look at it with `ls`."
            ) from None

    def _add(self, key: Key, value: Any, *, uses: int, taken: int, is_view: bool) -> None:
        if is_view:
            kept = self._kept.add_view(key, value, uses=uses)
        else:
            size_bytes = int(value.nbytes)
            self._chunks += 1
            self._decoded_bytes += size_bytes
            kept, is_again = self._kept.add(key, value, size_bytes=size_bytes, uses=uses)
            self._again += is_again
        self._used(key, kept, taken)
        self._decoding.pop(key, None)
        if self._closed:
            self._kept.forget()

    # -- leaving

    def _make_room(self) -> None:
        """Bring memory below its bound, and remove files that nobody needs."""
        with self._lock:
            leaving = self._kept.shrink(self.max_bytes - self._reserved_bytes)
            files = None if self._closed else self._files
        try:
            while leaving:
                key, kept = leaving[-1]
                file = files.write(kept.value) if files is not None and kept.left > 0 else None
                with self._lock:
                    leaving.pop()
                    if file is not None:
                        self._kept.moved(key, kept, file)
                    else:
                        self._kept.lost(key, kept)
        finally:
            with self._lock:
                for key, kept in leaving:
                    self._kept.lost(key, kept)
                waste, self._kept.waste = self._kept.waste, []
            most_free = -1 if self._closed else self.max_bytes - self._kept.staying_bytes
            was_told, self._was_told = self._was_told, self._was_told or self._again > 0
        self.memory.limit(most_free)
        for file in waste:
            file.remove()
        if self._was_told and not was_told:
            where = "the cache folder has no room for the rest" if files else "there is no cache="
            _log.warning(
                "%s: the decoded chunks of a window take more than the %s that they may take in "
                "memory, and %s: some are decoded again. Give Dataset(decoded_bytes=…), a "
                "cache=DiskCache(…) with room, or a smaller window=.",
                self._url,
                format_size(self.max_bytes),
                where,
            )

    def forget(self, shard: int) -> None:
        """Forget a shard's chunks: the bytes that they were decoded from were wrong."""
        with self._lock:
            self._kept.forget(shard)
        self._make_room()

    def close(self) -> None:
        """Forget all chunks and remove their files; what was handed out stays valid. Safe to call
        twice."""
        with self._lock:
            self._closed = True
            self._kept.forget()
        self._make_room()
        if self._files is not None:
            self._files.close()

    # -- order

    def in_order(self, shard: int, chunks: Sequence[int]) -> Iterator[int]:
        """The same chunks, those that another thread decodes at this moment last."""
        places = self._idle_first(
            len(chunks), lambda place: (shard, chunks[place]) in self._decoding
        )
        return (chunks[place] for place in places)

    def shards_in_order(self, shards: Sequence[int]) -> Iterator[int]:
        """Places of these shards, those last of which another thread decodes a chunk at this
        moment."""
        return self._idle_first(len(shards), lambda place: self._busy[shards[place]] > 0)

    def _idle_first(self, count: int, is_busy: Callable[[int], bool]) -> Iterator[int]:
        """Numbers up to count, each chosen when it is asked for. Every caller begins elsewhere:
        threads that were let go by one decoding at the same time would else meet at the next."""
        self._turns += 1
        start = int(count * (self._turns * _GOLDEN % 1))
        left = [*range(start, count), *range(start)]
        while left:
            place = next((place for place in left if not is_busy(place)), left[0])
            left.remove(place)
            yield place


class ShardChunks:
    """The decoded chunks of one shard."""

    def __init__(self, store: DecodedChunks, shard: int) -> None:
        self._store, self._shard = store, shard

    @property
    def memory(self) -> ChunkMemory:
        """Where chunks of the dataset may lie."""
        return self._store.memory

    @property
    def arrivals(self) -> Arrivals[Any]:
        """What was fetched of the shard, whoever has it open."""
        return self._store.arrivals(self._shard)

    @property
    def reads(self) -> ReadTally:
        """Counts what is read of the dataset."""
        return self._store.reads

    def take(
        self,
        chunk: int,
        decode: Callable[[], Any],
        *,
        uses: int,
        taken: int,
        size_bytes: int = 0,
        is_view: bool = False,
    ) -> Any:
        """A chunk, as `DecodedChunks.take` has it."""
        return self._store.take(
            (self._shard, chunk),
            decode,
            uses=uses,
            taken=taken,
            size_bytes=size_bytes,
            is_view=is_view,
        )

    def kept(self, chunks: Sequence[int], taken: Sequence[int]) -> dict[int, Any]:
        """Those of some chunks that are kept, as `DecodedChunks.take_kept` has it."""
        return self._store.take_kept(self._shard, chunks, taken)

    def has(self, chunk: int) -> bool:
        """Whether a chunk is kept."""
        return self._store.has((self._shard, chunk))

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """The same chunks, those that another thread decodes at this moment last."""
        return self._store.in_order(self._shard, chunks)
