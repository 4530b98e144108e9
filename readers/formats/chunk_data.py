"""Read the bytes of a shard of chunks by extent, and keep its decoded chunks.

A blob of the cache holds the extents of the fields that a dataset selects; other fields are neither
fetched nor kept. They can still be read: their bytes are fetched by exact ranges each time.

All the bytes that the shards of a batch lack are fetched in parallel, before anything is decoded
(`ChunkShard.fetch`), so a batch over many uncached shards waits about one round trip. A local file
is opened once for all that is needed of it, or mapped.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from penstock.cache import STALL_TIMEOUT_S
from penstock.cache.base import READ_MODE, ReadMode
from penstock.readers.byte_source import NO_BYTES, ByteSource, SourceSpans
from penstock.readers.formats.chunk_cache import DecodedChunks, PendingFetch
from penstock.readers.formats.extents import NOT_IN_BLOB, BlobExtents

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.sidecar import ShardPlace, Sidecar
    from penstock.readers.types import Encoded, Ints

    Places = Sequence[int] | Ints
    Fetches = Mapping[int, PendingFetch]


class ChunkParts:
    """Parts of extents in one source, joined if they are neighbours.

    begins: the first byte of each extent in the source, below 0 if the source lacks it. starts,
    ends: of the parts, ascending, no two touching, int64, shape (parts,).
    """

    def __init__(
        self, source: ByteSource, begins: Ints, extents: Ints, starts: Ints, ends: Ints
    ) -> None:
        """starts, ends: of the parts, in any order, counted from the first byte of their
        extents."""
        self.source, self.begins = source, begins
        has_bytes = ends > starts
        starts, ends = ((begins[extents] + each)[has_bytes] for each in (starts, ends))
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

    decode_all: yields decoded chunks, from the cache if they are there; see `DecodedChunks.take`,
    whose first argument is given. room: returns writable memory with undefined content to decode a
    chunk into, which is reused from chunks of which no view is left; its arguments are a shape and
    a dtype.

    Safe for several threads. Raises IndexChangedError, DatasetError or FetchError.
    """

    def __init__(
        self,
        sidecar: Sidecar,
        place: ShardPlace,
        *,
        fields: Sequence[str],
        chunks: tuple[DecodedChunks, int] | None,
    ) -> None:
        """Open the data of a shard. fields: those whose extents are kept. chunks: as in
        `ShardEntry`. Raises CorruptShardError."""
        assert sidecar.extents is not None
        self._files, self._extents = sidecar.files, sidecar.extents
        self._store, self._shard = chunks or (DecodedChunks(max_bytes=0), 0)
        self.decode_all = partial(self._store.take, self._shard)
        self.room = self._store.memory.array
        self.source, self._begins, self._beyond = place.parts(sidecar, fields)
        self._reads = self._store.reads
        # True if the source has all extents, and nothing was fetched for a batch.
        self._is_simple = bool((self._begins >= 0).all())
        self._mode: ReadMode = READ_MODE
        self._fetched: Sequence[tuple[ChunkParts, Sequence[Encoded]]] = ()
        self._awaited: Fetches = {}

    @property
    def has_all(self) -> bool:
        """Return True if nothing ever has to be fetched."""
        return self._is_simple and self.source.is_whole

    def in_mode(self, mode: ReadMode) -> Self:
        """Return the same data with another way of reading: "pread" bypasses any map."""
        if mode == self._mode or "pread" not in (mode, self._mode):
            return self
        return self._replaced(_mode=mode)

    def with_fetched(
        self, parts: Sequence[ChunkParts], loaded: Sequence[Sequence[Any]], awaited: Fetches
    ) -> Self:
        """Return the same data for one batch, for which parts of it were fetched.

        loaded: the bytes of the spans of each of the parts. awaited: extents that other batches
        fetch. Raises CorruptShardError if the local disk returned wrong bytes.
        """
        for each in parts:
            if each.source is self.source:
                self.source.check(each.starts, each.ends, self._mode)
            self._reads.add(int((each.ends - each.starts).sum()))
        fetched = list(zip(parts, loaded, strict=True))
        return self._replaced(_fetched=fetched, _awaited=awaited, _is_simple=False)

    def _replaced(self, **attributes: Any) -> Self:
        same = type(self).__new__(type(self))
        same.__dict__.update(self.__dict__, **attributes)
        return same

    def read(self, extents: Sequence[int]) -> list[Encoded]:
        """Read the bytes of some extents; remote ones are fetched in parallel."""
        sizes = self._extents.sizes[np.array(extents, np.int64)]
        return self.read_parts(extents, np.zeros_like(sizes), sizes)

    def read_parts(self, extents: Sequence[int], starts: Places, ends: Places) -> list[Encoded]:
        """Read bytes [start, end) of extents, counted from the extent's first byte, in parallel."""
        if not len(extents):
            return []
        numbers, first, last = (np.asarray(each, np.int64) for each in (extents, starts, ends))
        if self._is_simple:
            begins = self._begins[numbers]
            read = self.source.read_parts(begins + first, begins + last, self.room, self._mode)
            self._reads.add(sum(map(len, read)))
            return read
        rows = list(zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True))
        found = [self._find(*row) for row in rows]
        for place, (extent, start, end) in enumerate(rows):
            if found[place] is None and (pending := self._awaited.get(extent)) is not None:
                holder = pending.wait(STALL_TIMEOUT_S)
                found[place] = None if holder is None else holder._find(extent, start, end)
        missing = [place for place, data in enumerate(found) if data is None]
        if missing:
            parts = self._parts_of(numbers[missing], first[missing], last[missing])
            loaded = self.source.load([each.spans for each in parts], self._mode)
            late = self.with_fetched(parts, loaded, {})
            for place in missing:
                found[place] = late._find(*rows[place])
        return [data for data in found if data is not None]

    def _find(self, extent: int, start: int, end: int) -> Encoded | None:
        """Return bytes that were fetched for the batch; None if they weren't."""
        if start == end:
            return NO_BYTES
        for parts, loaded in self._fetched:
            if (found := parts.find(loaded, extent, start, end)) is not None:
                return found
        return None

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
        """Return a read-only view of an extent on the local disk, mapped, or of fetched bytes.

        Returns None if the extent isn't local or mapping is off; read it then. size_bytes: how much
        of the view will be read now, for the statistics; None means all.
        """
        begin, size = int(self._begins[extent]), int(self._extents.sizes[extent])
        data = self._find(extent, 0, size) if self._fetched else None
        if data is not None or self._mode == "pread" or not self.source.may_map:
            return data
        if begin == NOT_IN_BLOB:
            return None
        touched = size if size_bytes is None else size_bytes
        data = self.source.view(begin, begin + size, touched_bytes=touched)
        if data is not None:
            self._reads.add(touched)
        return data

    # -- fetching

    def missing_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int] | None
    ) -> tuple[list[ChunkParts], PendingFetch | None, Fetches]:
        """Return the bytes to fetch before parts of extents can be read. ends: None for the
        extents' ends.

        Extents whose chunks are decoded aren't fetched. A whole extent that isn't kept in the cache
        is fetched by one batch for all: the second result is this batch's fetch, which it must
        settle, the third those of other batches, by extent.
        """
        numbers, first = np.array(extents, np.int64), np.array(starts, np.int64)
        elsewhere = self._begins[numbers] == NOT_IN_BLOB
        if not elsewhere.any() and (self.source.is_whole or not len(numbers)):
            return [], None, {}
        sizes = self._extents.sizes[numbers]
        last = sizes if ends is None else np.array(ends, np.int64)
        decoded = [self._store.has((self._shard, extent)) for extent in numbers.tolist()]
        left = ~np.array(decoded, np.bool_)
        is_whole = (first == 0) & (last == sizes)
        shared = left & is_whole & (elsewhere | (not self.source.is_kept))
        mine, others = self._store.claim(self._shard, numbers[shared].tolist())
        own = left & np.array([extent not in others for extent in numbers.tolist()], np.bool_)
        return self._parts_of(numbers[own], first[own], last[own]), mine, others

    def _parts_of(self, numbers: Ints, first: Ints, last: Ints) -> list[ChunkParts]:
        """Return parts of extents, by source: those that the source lacks are in another one."""
        here = self._begins[numbers] != NOT_IN_BLOB
        found = [ChunkParts(self.source, self._begins, numbers[here], first[here], last[here])]
        if not here.all():
            assert self._beyond is not None
            others = BlobExtents(self._files, self._extents, np.unique(numbers[~here]))
            beyond, gone = self._beyond(others), ~here
            parts = ChunkParts(beyond, others.begins, numbers[gone], first[gone], last[gone])
            found.append(parts)
        return [parts for parts in found if len(parts.starts)]
