"""Read the bytes of a shard of chunks by extent, and keep its decoded chunks.

A blob of the cache holds the extents of the fields that a dataset selects; other fields are neither
fetched nor kept. They can still be read: their bytes are fetched by exact ranges each time.

All the bytes that the shards of a batch lack are fetched in parallel, before anything is decoded
(`ChunkShard.fetch`), so a batch over many uncached shards waits about one round trip. A local file
is opened once for all that is needed of it, or mapped.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.cache import STALL_TIMEOUT_S
from penstock.cache.base import LEAST_ABSENT_BYTES, READ_MODE, ReadMode, absent_bytes
from penstock.readers.byte_source import NO_BYTES, SourceSpans
from penstock.readers.formats.chunk_cache import DecodedChunks
from penstock.readers.formats.extents import NOT_IN_BLOB, BlobExtents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.byte_source import ByteSource
    from penstock.readers.formats.chunk_cache import PendingExtent, ShardChunks
    from penstock.readers.formats.open_shard import Ints
    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.types import Encoded

    Fetches = Mapping[int, PendingExtent]


class ChunkParts:
    """Parts of extents in one source, joined if they are neighbours.

    begins: the first byte of each extent in the source, below 0 if the source lacks it. starts,
    ends: of the parts, ascending, no two touching, int64, shape (parts,).
    """

    def __init__(self, source: ByteSource, begins: Ints, starts: Ints, ends: Ints) -> None:
        """starts, ends: in any order."""
        self.source, self.begins = source, begins
        starts, ends = starts[ends > starts], ends[ends > starts]
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        first = np.flatnonzero(np.append(True, starts[1:] > reach[:-1])[: len(starts)])
        self.starts = starts[first]
        self.ends = reach[np.append(first[1:], len(starts))[: len(first)] - 1]

    @property
    def spans(self) -> SourceSpans:
        """Return the spans to load."""
        return SourceSpans(self.source, self.starts.tolist(), self.ends.tolist())

    def find(self, loaded: Sequence[Encoded], extent: int, start: int, end: int) -> Encoded | None:
        """Return bytes of an extent from the loaded parts; None if they aren't part of them."""
        low, high = int(self.begins[extent]) + start, int(self.begins[extent]) + end
        part = int(np.searchsorted(self.starts, low, side="right")) - 1
        if part < 0 or self.begins[extent] < 0 or high > self.ends[part]:
            return None
        at = low - int(self.starts[part])
        return loaded[part][at : at + high - low]


class ShardData:
    """The bytes of a shard by extent, and the chunks decoded from them, as its reader receives
    them.

    Safe for several threads. Raises IndexChangedError, DatasetError or FetchError.
    """

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
        self._files, self._extents = sidecar.files, sidecar.extents
        self._store, self._shard = chunks or DecodedChunks(max_bytes=0).of(0)
        self.source, self._begins, self._beyond = place.parts(sidecar, fields, may_lack=may_lack)
        self._reads = self._store.reads
        # Missing local files have no bytes, missing objects a mark in their place.
        self._is_marked = may_lack and self._beyond is not None
        self._is_simple = not self._is_marked and bool((self._begins >= 0).all())
        self._mode: ReadMode = READ_MODE
        self._shared_extents = self._store.shared_extents(self._shard)

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
        """Read the bytes of some extents; remote ones are fetched in parallel.

        The bytes are empty if the object of an extent is missing and the format allows that
        (`ChunkFormat.may_lack_objects`).
        """
        numbers = np.array(extents, np.int64)
        sizes = self._extents.sizes[numbers]
        if self._is_simple and len(numbers):
            return self._read(self._begins[numbers], sizes)
        return self.read_parts(extents, [0] * len(extents), sizes.tolist())

    def _read(self, begins: Ints, sizes: Ints) -> list[Encoded]:
        """Read bytes of the source, which has them all."""
        found = self.source.read_parts(begins, begins + sizes, self.room, self._mode)
        self._reads.add(sum(map(len, found)))
        return found

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read bytes [start, end) of extents, counted from the extent's first byte, in parallel."""
        if not len(extents):
            return []
        numbers, first, last = (np.array(each, np.int64) for each in (extents, starts, ends))
        if self._is_simple:
            return self._read(self._begins[numbers] + first, last - first)
        parts = self._parts_of(numbers, first, last)
        loaded = self.source.load([each.spans for each in parts], self._mode) if parts else []
        return FetchedShardData(self, parts, loaded, {}).read_parts(extents, starts, ends)

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Read parts of extents, counted as for read_parts, into slots of their sizes.

        Use it for large parts, because each takes a read of its own.
        """
        if self._is_simple:
            begins = self._begins[np.array(extents, np.int64)] + np.array(starts, np.int64)
            self.source.fill(begins.tolist(), slots, self._mode)
            self._reads.add(sum(map(len, slots)))
            return
        ends = [start + len(slot) for start, slot in zip(starts, slots, strict=True)]
        for slot, data in zip(slots, self.read_parts(extents, starts, ends), strict=True):
            slot[:] = data

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return a read-only view of an extent on the local disk, mapped.

        Returns None if the extent isn't local or mapping is off; read it then. size_bytes: how much
        of the view will be read now, for the statistics; None means all.
        """
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
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int] | None
    ) -> tuple[list[ChunkParts], Fetches, Fetches]:
        """Return the bytes to fetch before parts of extents can be read. ends: None for the
        extents' ends.

        Extents whose chunks are decoded aren't fetched. A whole extent that isn't kept in the cache
        is fetched by one batch for all: the second result is those for which other batches wait,
        the third those that other batches fetch.
        """
        numbers, first = np.array(extents, np.int64), np.array(starts, np.int64)
        elsewhere = self._begins[numbers] == NOT_IN_BLOB
        if not elsewhere.any() and (self.source.is_whole or not len(numbers)):
            return [], {}, {}
        sizes = self._extents.sizes[numbers]
        last = sizes if ends is None else np.array(ends, np.int64)
        decoded = [self._store.has((self._shard, extent)) for extent in numbers.tolist()]
        left = ~np.array(decoded, np.bool_)
        is_whole = (first == 0) & (last == sizes)
        shared = left & is_whole & (elsewhere | (not self.source.is_kept))
        mine, others = self._shared_extents.claim(dict.fromkeys(numbers[shared].tolist()))
        own = left & np.array([extent not in others for extent in numbers.tolist()], np.bool_)
        return self._parts_of(numbers[own], first[own], last[own]), mine, others

    def _parts_of(self, numbers: Ints, first: Ints, last: Ints) -> list[ChunkParts]:
        """Return parts of extents, by source: those that the source lacks are in another one."""
        here = self._begins[numbers] != NOT_IN_BLOB
        found = [self._joined(self.source, self._begins, numbers[here], first[here], last[here])]
        if not here.all():
            assert self._beyond is not None
            others = BlobExtents(self._files, self._extents, np.unique(numbers[~here]))
            beyond, begins = self._beyond(others), others.begins
            found.append(self._joined(beyond, begins, numbers[~here], first[~here], last[~here]))
        return [parts for parts in found if len(parts.starts)]

    def _joined(
        self, source: ByteSource, begins: Ints, numbers: Ints, first: Ints, last: Ints
    ) -> ChunkParts:
        places = begins[numbers]
        low, high = places + first, places + last
        if self._is_marked:  # the head of an extent shows if its object is missing
            head = np.minimum(self._extents.sizes[numbers], LEAST_ABSENT_BYTES)
            low, high = np.concatenate([low, places]), np.concatenate([high, places + head])
        return ChunkParts(source, begins, low, high)

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

    def decode_all(
        self,
        chunks: Sequence[int],
        decode: Callable[[list[int]], Iterable[Any]],
        *,
        uses: Sequence[int],
        taken: Sequence[int],
        size_bytes: int = 0,
        is_view: Callable[[int], bool] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        """Yield several chunks with their numbers, in any order, decoding those that aren't kept.
        They are read-only: numpy arrays, Arrow tables, or other objects with `nbytes`, of which
        only the first two can be kept in files.

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
        """
        return self._store.take(
            self._shard,
            chunks,
            decode,
            uses=uses,
            taken=taken,
            size_bytes=size_bytes,
            is_view=is_view,
        )

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return writable memory with undefined content to decode a chunk into. It is reused from
        chunks of which no view is left."""
        return self._store.memory.array(shape, dtype)


class FetchedShardData(ShardData):
    """The data of a shard for one batch, whose parts were fetched. others: extents that other
    batches fetch. Raises CorruptShardError if the local disk returned wrong bytes."""

    def __init__(
        self,
        base: ShardData,
        parts: Sequence[ChunkParts],
        data: Sequence[Sequence[Any]],
        others: Fetches,
    ) -> None:
        """data: the loaded spans of each of the parts."""
        self.__dict__.update(base.__dict__)
        self._is_simple = False
        self._base, self._others = base, others
        self._parts = list(zip(parts, data, strict=True))
        for each in parts:
            if each.source is self.source:
                self.source.check(each.starts, each.ends, self._mode)
            self._reads.add(int((each.ends - each.starts).sum()))

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read parts of extents; bytes that weren't fetched are loaded now."""
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
        head_bytes = min(LEAST_ABSENT_BYTES, int(self._extents.sizes[extent]))
        for parts, data in self._parts:
            if self._is_marked:
                head = parts.find(data, extent, 0, head_bytes)
                if head is not None and self._is_absent(head, int(parts.begins[extent])):
                    return NO_BYTES
            found = NO_BYTES if start == end else parts.find(data, extent, start, end)
            if found is not None:
                return found
        return NO_BYTES if start == end else None

    def _await(self, extent: int, start: int, end: int) -> Encoded | None:
        """Wait for bytes that another batch fetches; return None if that fails."""
        pending = self._others.get(extent)
        holder = None if pending is None else pending.wait(STALL_TIMEOUT_S)
        return None if holder is None else holder._find(extent, start, end)

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return fetched bytes, or a view of the source."""
        size = int(self._extents.sizes[extent])
        found = self._find(extent, 0, size)
        return self._base.view(extent, size_bytes=size_bytes) if found is None else found
