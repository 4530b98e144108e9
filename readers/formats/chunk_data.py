"""Read the bytes of a shard of chunks by extent, and keep its decoded chunks.

A blob of the cache holds the extents of the fields that a dataset selects; other fields are neither
fetched nor kept. They can still be read: their bytes are fetched by exact ranges each time.

All the bytes that the shards of a batch lack are fetched in parallel, before anything is decoded
(`ChunkShard.fetch`), so a batch over many uncached shards waits about one round trip. A local file
is opened once for all that is needed of it, or mapped.
"""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from penstock.cache import STALL_TIMEOUT_S
from penstock.cache.base import LEAST_ABSENT_BYTES, READ_MODE, ReadMode, absent_bytes
from penstock.readers.byte_source import NO_BYTES, SourceSpans
from penstock.readers.formats.chunk_cache import SharedExtents
from penstock.readers.formats.chunk_counts import ReadTally
from penstock.readers.formats.extents import NOT_IN_BLOB, BlobExtents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.byte_source import ByteSource
    from penstock.readers.formats.chunk_cache import PendingExtent, ShardChunks
    from penstock.readers.formats.open_shard import Ints
    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.types import Encoded

    Fetches = Mapping[int, PendingExtent[Any]]

Chunk = TypeVar("Chunk")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkParts:
    """Parts of a shard's source, and of a second source with extents that the first one doesn't
    have.

    sources: one or two, treated as if they lay end to end. starts, ends: the bytes of them that are
    needed, ascending, no two parts touching, int64, shape (parts,). cut: number of parts in the
    first source. begins: the first byte of each extent, below 0 if nothing of it is needed.
    """

    sources: Sequence[ByteSource]
    starts: Ints
    ends: Ints
    cut: int
    begins: Ints

    @classmethod
    def of(
        cls, sources: Sequence[ByteSource], begins: Ints, starts: Ints, ends: Ints
    ) -> ChunkParts:
        """Join neighbouring parts. starts, ends: in any order, none empty."""
        border = sources[0].size_bytes
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        is_new = np.ones(len(starts), np.bool_)
        is_new[1:] = (starts[1:] > reach[:-1]) | ((starts[1:] >= border) & (starts[:-1] < border))
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(starts)) - 1
        merged = starts[first]
        cut = int(np.searchsorted(merged, border))
        return cls(
            sources=sources, starts=merged, ends=reach[last[: len(first)]], cut=cut, begins=begins
        )

    def spans(self) -> list[SourceSpans]:
        """Return the spans to load, of each source."""
        found, offset = [], 0
        parts = (slice(0, self.cut), slice(self.cut, None))
        for source, mine in zip(self.sources, parts, strict=False):
            starts, ends = self.starts[mine] - offset, self.ends[mine] - offset
            found.append(SourceSpans(source, starts.tolist(), ends.tolist()))
            offset += source.size_bytes
        return found

    def find(self, loaded: Sequence[Encoded], extent: int, start: int, end: int) -> Encoded | None:
        """Return bytes of an extent from the loaded parts; None if they aren't part of them."""
        begin = int(self.begins[extent])
        if begin < 0 or not len(self.starts):
            return None
        low, high = begin + start, begin + end
        part = int(np.searchsorted(self.starts, low, side="right")) - 1
        if part < 0 or high > self.ends[part]:
            return None
        at = low - int(self.starts[part])
        return loaded[part][at : at + high - low]

    def begin(self, extent: int) -> int:
        """Return the first byte of an extent in its own source."""
        begin, border = int(self.begins[extent]), self.sources[0].size_bytes
        return begin if begin < border else begin - border


class ChunkData:
    """The data of a shard of chunks: its bytes by extent, and its decoded chunks. Implements
    `ShardData`."""

    def __init__(
        self,
        sidecar: Sidecar,
        place: ShardPlace,
        *,
        fields: Sequence[str],
        chunks: ShardChunks | None,
        may_lack: bool,
    ) -> None:
        """Open the data of a shard. fields: those whose extents are kept. may_lack: True if a
        missing object isn't an error; its extents are then empty. Raises CorruptShardError."""
        assert sidecar.extents is not None
        self._files, self._extents, self._chunks = sidecar.files, sidecar.extents, chunks
        self.source, self._begins, self._beyond = place.parts(sidecar, fields, may_lack=may_lack)
        self._reads = ReadTally() if chunks is None else chunks.store.reads
        # Missing local files have no bytes, missing objects a mark in their place.
        self._is_marked = may_lack and self._beyond is not None
        self._is_simple = not self._is_marked and bool((self._begins >= 0).all())
        self._mode: ReadMode = READ_MODE
        self._shared_extents: SharedExtents[FetchedChunkData] = (
            SharedExtents() if chunks is None else chunks.store.shared_extents(chunks.shard)
        )
        self._decoding = threading.local()  # the chunk that each thread is decoding

    @property
    def has_all(self) -> bool:
        """Return True if nothing ever has to be fetched."""
        return self._is_simple and self.source.is_whole

    def in_mode(self, mode: ReadMode) -> Self:
        """Return the same data with another way of reading: "pread" bypasses any map."""
        if mode == self._mode or "pread" not in (mode, self._mode):
            return self
        same = copy(self)
        same._mode = mode
        return same

    def read(self, extents: Sequence[int]) -> list[Encoded]:
        """Read some extents."""
        sizes = self._extents.sizes
        return self.read_parts(extents, [0] * len(extents), [int(sizes[n]) for n in extents])

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read parts of extents, neighbours by one read."""
        if not len(extents):
            return []
        self._note(extents)
        numbers, first, last = (np.array(each, np.int64) for each in (extents, starts, ends))
        if self._is_simple:
            begins = self._begins[numbers]
            found = self.source.read_parts(begins + first, begins + last, self.room, self._mode)
            self._reads.add(sum(map(len, found)))
            return found
        parts = self._parts_of(numbers, first, last)
        spans = parts.spans()
        fetched = FetchedChunkData(self, parts, self.source.load(spans, self._mode), {})
        return fetched.read_parts(extents, starts, ends)

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Read parts of extents into their slots."""
        if self._is_simple:
            begins = self._begins[np.array(extents, np.int64)] + np.array(starts, np.int64)
            self.source.fill(begins.tolist(), slots, self._mode)
            self._reads.add(sum(map(len, slots)))
            return
        ends = [start + len(slot) for start, slot in zip(starts, slots, strict=True)]
        for slot, data in zip(slots, self.read_parts(extents, starts, ends), strict=True):
            slot[:] = data

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return a view of an extent if it is mapped; None if it isn't, or if the mode is
        "pread"."""
        if self._mode == "pread" or not self.source.may_map:
            return None
        begin, size = int(self._begins[extent]), int(self._extents.sizes[extent])
        if begin == NOT_IN_BLOB:
            return None
        touched = size if size_bytes is None else size_bytes
        data = self.source.view(begin, begin + size, touched_bytes=touched)
        if data is None:
            return None
        self._reads.add(touched)
        return NO_BYTES if self._is_absent(data, begin) else data

    # -- fetching

    def missing_parts(
        self,
        extents: Sequence[int],
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
    ) -> tuple[ChunkParts, Fetches, Fetches] | None:
        """Return the bytes to fetch before parts of extents, or whole extents, can be read; None if
        they are all cached.

        Extents whose chunks are decoded aren't fetched. A whole extent that isn't kept in the cache
        is fetched by one batch for all: the second result is those for which other batches wait,
        the third those that other batches fetch.
        """
        numbers = np.array(extents, np.int64)
        elsewhere = self._begins[numbers] == NOT_IN_BLOB
        if not elsewhere.any() and (self.source.is_whole or not len(numbers)):
            return None
        first = np.zeros(len(numbers), np.int64) if starts is None else np.array(starts, np.int64)
        last = self._extents.sizes[numbers] if ends is None else np.array(ends, np.int64)
        left = np.array([not self._is_decoded(extent) for extent in extents], np.bool_)
        numbers, first, last, elsewhere = (x[left] for x in (numbers, first, last, elsewhere))
        passing = elsewhere | (not self.source.is_kept)
        shared = passing & (first == 0) & (last == self._extents.sizes[numbers])
        mine, others = self._shared_extents.claim(dict.fromkeys(numbers[shared].tolist()))
        own = np.array([extent not in others for extent in numbers.tolist()], np.bool_)
        return self._parts_of(numbers[own], first[own], last[own]), mine, others

    def _parts_of(self, numbers: Ints, first: Ints, last: Ints) -> ChunkParts:
        """Return parts of extents as parts of the source and of a second one with extents that
        it lacks."""
        sizes = self._extents.sizes[numbers]
        sources, begins = [self.source], self._begins
        if (begins[numbers] == NOT_IN_BLOB).any():
            assert self._beyond is not None
            chosen = np.unique(numbers[begins[numbers] == NOT_IN_BLOB])
            others = BlobExtents(self._files, self._extents, chosen)
            behind = others.begins + self.source.size_bytes
            is_other = (begins == NOT_IN_BLOB) & (others.begins != NOT_IN_BLOB)
            begins = np.where(is_other, behind, begins)
            sources.append(self._beyond(others))
        places = begins[numbers]
        low, high = places + first, places + last
        if self._is_marked:  # the head of an extent shows if its object is missing
            low = np.concatenate([low, places])
            high = np.concatenate([high, places + np.minimum(sizes, LEAST_ABSENT_BYTES)])
        some = high > low
        return ChunkParts.of(sources, begins, low[some], high[some])

    def _is_absent(self, head: Encoded, begin: int) -> bool:
        """Return True if an extent's object is missing, judged by its first bytes. begin: their
        place in the blob."""
        size = LEAST_ABSENT_BYTES
        return (
            self._is_marked
            and len(head) >= size
            and head[:size].tobytes() == absent_bytes(begin, begin + size)
        )

    # -- decoded chunks

    def decoded(
        self,
        chunk: int,
        decode: Callable[[], Chunk],
        *,
        uses: int,
        taken: int = 1,
        size_bytes: int = 0,
        is_view: bool = False,
    ) -> Chunk:
        """Return a chunk that is kept, or decode it now."""
        if self._chunks is None:
            return decode()
        watched = partial(self._watched, chunk, decode)
        store, key = self._chunks.store, (self._chunks.shard, chunk)
        found: Chunk = store.take(
            key, watched, uses=uses, taken=taken, size_bytes=size_bytes, is_view=is_view
        )
        return found

    def kept(self, chunks: Sequence[int], taken: Sequence[int]) -> dict[int, Any]:
        """Return those of some chunks that are kept."""
        if self._chunks is None:
            return {}
        return self._chunks.store.take_kept(self._chunks.shard, chunks, taken)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return memory for a chunk."""
        if self._chunks is None:
            return np.empty(shape, dtype)
        return self._chunks.store.memory.array(shape, dtype)

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """Yield the chunks; those that another thread is decoding come last."""
        if self._chunks is None:
            return iter(chunks)
        return self._chunks.store.in_order(self._chunks.shard, chunks)

    def _watched(self, chunk: int, decode: Callable[[], Chunk]) -> Chunk:
        """Decode a chunk while recording which extents it is made from."""
        before, self._decoding.chunk = getattr(self._decoding, "chunk", None), chunk
        try:
            return decode()
        finally:
            self._decoding.chunk = before

    def _note(self, extents: Iterable[int]) -> None:
        """Record that extents are read."""
        if self._beyond is None:  # nothing is ever fetched
            return
        chunk: int | None = getattr(self._decoding, "chunk", None)
        if chunk is not None:
            self._shared_extents.note(extents, chunk)

    def _is_decoded(self, extent: int) -> bool:
        """Return True if every chunk that was decoded from an extent is kept, so that it needn't be
        read."""
        chunks = self._shared_extents.chunks(extent)
        if self._chunks is None or not chunks:
            return False
        store, shard = self._chunks
        return all(store.has((shard, each)) for each in chunks)


class FetchedChunkData(ChunkData):
    """The data of a shard for one batch, whose parts were fetched. others: extents that other
    batches fetch. Raises CorruptShardError if the local disk returned wrong bytes."""

    def __init__(
        self, base: ChunkData, parts: ChunkParts, data: Sequence[Sequence[Any]], others: Fetches
    ) -> None:
        """data: of each of `parts.spans()`."""
        self.__dict__.update(base.__dict__)
        self._is_simple = False
        self._base, self._parts, self._others = base, parts, others
        self._data: list[Encoded] = [part for loaded in data for part in loaded]
        self.source.check(parts.starts[: parts.cut], parts.ends[: parts.cut], self._mode)
        self._reads.add(int((parts.ends - parts.starts).sum()))

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read parts of extents; bytes that weren't fetched are loaded now."""
        self._note(extents)
        rows = list(zip(extents, starts, ends, strict=True))
        found = [self._find(*row) for row in rows]
        for place, row in enumerate(rows):
            if found[place] is None:
                found[place] = self._await(*row)
        missing = [place for place, data in enumerate(found) if data is None]
        if missing:
            some = [rows[place] for place in missing]
            late = self._base.read_parts(*(list(column) for column in zip(*some, strict=True)))
            for place, data in zip(missing, late, strict=True):
                found[place] = data
        return [data for data in found if data is not None]

    def _find(self, extent: int, start: int, end: int) -> Encoded | None:
        if self._is_marked:
            size = min(LEAST_ABSENT_BYTES, int(self._extents.sizes[extent]))
            head = self._parts.find(self._data, extent, 0, size)
            if head is not None and self._is_absent(head, self._parts.begin(extent)):
                return NO_BYTES
        if start == end:
            return NO_BYTES
        return self._parts.find(self._data, extent, start, end)

    def _await(self, extent: int, start: int, end: int) -> Encoded | None:
        """Wait for bytes that another batch fetches; return None if that fails."""
        pending = self._others.get(extent)
        holder = None if pending is None else pending.wait(STALL_TIMEOUT_S)
        return None if holder is None else holder._find(extent, start, end)

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return fetched bytes, or a view of the source."""
        self._note([extent])
        size = int(self._extents.sizes[extent])
        found = self._find(extent, 0, size)
        return self._base.view(extent, size_bytes=size_bytes) if found is None else found
