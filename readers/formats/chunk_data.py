"""The bytes of a shard of chunks, by extent: of local files, or of a blob of the cache.

A blob holds the extents of the fields that a dataset selects, so what nobody wants is neither
fetched nor kept. Other fields can still be asked for: their bytes come by exact ranges each time.
"""

from __future__ import annotations

import threading
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from penstock.cache.base.blob import (
    LEAST_ABSENT_BYTES,
    READ_MODE,
    BlobSource,
    BlobSpans,
    ReadMode,
    absent_bytes,
)
from penstock.cache.errors import CorruptShardError
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.readers.formats.arrivals import Arrivals
from penstock.readers.formats.blob_extents import NOWHERE, BlobExtents
from penstock.readers.formats.chunk_parts import ChunkParts
from penstock.readers.formats.extent_files import ExtentFiles
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.read_tally import ReadTally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob
    from penstock.cache.blobs.block_sums import BlockSums
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.formats.decoded_chunks import ShardChunks
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

Chunk = TypeVar("Chunk")

_NOTHING: Encoded = np.frombuffer(b"", np.uint8)


class ChunkData:
    """What is common to a shard's data, wherever its bytes are. may_lack: an object that isn't
    there is no error, and its extents are empty."""

    def __init__(self, sidecar: Sidecar, chunks: ShardChunks | None, *, may_lack: bool) -> None:
        assert sidecar.extents is not None
        self._sidecar, self._chunks, self._may_lack = sidecar, chunks, may_lack
        self._extents = sidecar.extents
        self._mode: ReadMode = READ_MODE
        self._arrivals: Arrivals[BroughtChunkData] = (
            Arrivals() if chunks is None else chunks.arrivals
        )
        self._reads = ReadTally() if chunks is None else chunks.reads
        self._decoding = threading.local()  # in each thread the chunk that is decoded

    def in_mode(self, mode: ReadMode) -> Self:
        """The same bytes, read so: "pread" reads past any map."""
        same = copy(self)
        same._mode = mode
        return same

    def read(self, extents: Sequence[int]) -> list[Encoded]:
        """The bytes of some extents."""
        sizes = self._extents.sizes
        return self.read_parts(extents, [0] * len(extents), [int(sizes[n]) for n in extents])

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents."""
        raise NotImplementedError

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Parts of extents, copied into their slots."""
        ends = [start + len(slot) for start, slot in zip(starts, slots, strict=True)]
        for slot, data in zip(slots, self.read_parts(extents, starts, ends), strict=True):
            slot[:] = data

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """A view of an extent."""
        raise NotImplementedError

    def _touched(self, extent: int, size_bytes: int | None) -> int:
        """How much of a view is looked at."""
        return int(self._extents.sizes[extent]) if size_bytes is None else size_bytes

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
        """A chunk that is kept, or decoded now."""
        if self._chunks is None:
            return decode()
        watched = partial(self._watched, chunk, decode)
        found: Chunk = self._chunks.take(
            chunk, watched, uses=uses, taken=taken, size_bytes=size_bytes, is_view=is_view
        )
        return found

    def kept(self, chunks: Sequence[int], taken: Sequence[int]) -> dict[int, Any]:
        """Those of some chunks that are kept."""
        return {} if self._chunks is None else self._chunks.kept(chunks, taken)

    def room(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Memory for a chunk."""
        if self._chunks is None:
            return np.empty(shape, dtype)
        return self._chunks.memory.array(shape, dtype)

    def _watched(self, chunk: int, decode: Callable[[], Chunk]) -> Chunk:
        """Decode a chunk, and note what it is made of."""
        before, self._decoding.chunk = getattr(self._decoding, "chunk", None), chunk
        try:
            return decode()
        finally:
            self._decoding.chunk = before

    def _note(self, extents: Iterable[int]) -> None:
        """Note that extents are read."""
        chunk: int | None = getattr(self._decoding, "chunk", None)
        if chunk is not None:
            self._arrivals.note(extents, chunk)

    def is_decoded(self, extent: int) -> bool:
        """Whether all that was ever decoded of an extent is kept, so that it needn't be read."""
        chunks = self._arrivals.chunks(extent)
        return bool(
            chunks and self._chunks is not None and all(self._chunks.has(each) for each in chunks)
        )

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """The chunks, those that another thread decodes last."""
        return iter(chunks) if self._chunks is None else self._chunks.in_order(chunks)


class LocalChunkData(ChunkData):
    """The bytes of a shard's files in a local folder."""

    def __init__(
        self, root: bytes, sidecar: Sidecar, chunks: ShardChunks | None, *, may_lack: bool
    ) -> None:
        super().__init__(sidecar, chunks, may_lack=may_lack)
        self._files = ExtentFiles(
            root,
            sidecar.files,
            self._extents,
            may_lack=may_lack,
            memory=None if chunks is None else chunks.memory,
            on_read=self._reads.add,
        )

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents, each file opened once."""
        return self._files.read(extents, starts, ends)

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Parts of extents, read straight into their slots."""
        self._files.read_into(extents, starts, slots)

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """A view of a map."""
        found = self._files.view(extent) if self._mode != "pread" else None
        if found is not None:
            self._reads.add(self._touched(extent, size_bytes))
        return found


class BlobChunkData(ChunkData):
    """The bytes of a blob of the cache. fields: that it holds."""

    def __init__(
        self,
        remote: Remote,
        blob: Blob,
        sidecar: Sidecar,
        *,
        fields: Sequence[str],
        chunks: ShardChunks | None,
        may_lack: bool,
    ) -> None:
        """Raises CorruptShardError."""
        super().__init__(sidecar, chunks, may_lack=may_lack)
        self._remote, self._blob = remote, blob
        extents = BlobExtents(sidecar, fields)
        if extents.size_bytes != blob.source.size_bytes:
            raise CorruptShardError(
                f"{blob.source.uri}: this part of the index tells {extents.size_bytes:,} bytes of "
                f"{list(fields)}, the manifest {blob.source.size_bytes:,}. {REINDEX}"
            )
        self._begins = extents.begins
        self._sums: BlockSums | None = None
        self._has_sums = False

    def wanted(
        self,
        extents: Sequence[int],
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
    ) -> ChunkParts | None:
        """What has to be brought before these parts of extents, or whole ones, can be read; None
        where all of it is here. What is decoded already needn't be, and what passes and is whole is
        fetched by one batch for all: `ChunkParts.settle` says what came of it."""
        numbers = np.array(extents, np.int64)
        elsewhere = self._begins[numbers] == NOWHERE
        if not elsewhere.any() and (self._blob.is_whole or not len(numbers)):
            return None
        first = np.zeros(len(numbers), np.int64) if starts is None else np.array(starts, np.int64)
        last = self._extents.sizes[numbers] if ends is None else np.array(ends, np.int64)
        left = np.array([not self.is_decoded(extent) for extent in extents], np.bool_)
        numbers, first, last, elsewhere = (x[left] for x in (numbers, first, last, elsewhere))
        passing = elsewhere | (not self._blob.is_cached)
        shared = passing & (first == 0) & (last == self._extents.sizes[numbers])
        mine, others = self._arrivals.claim(dict.fromkeys(numbers[shared].tolist()))
        own = np.array([extent not in others for extent in numbers.tolist()], np.bool_)
        parts = self._parts(numbers[own], first[own], last[own])
        return replace(parts, claimed=mine, others=others)

    def _parts(
        self,
        numbers: np.ndarray[tuple[int], np.dtype[np.int64]],
        first: np.ndarray[tuple[int], np.dtype[np.int64]],
        last: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> ChunkParts:
        """Parts of extents as parts of the blob and of what lies beside it."""
        sizes = self._extents.sizes[numbers]
        blobs, begins = [self._blob], self._begins
        if (begins[numbers] == NOWHERE).any():
            others = BlobExtents.of(self._sidecar, numbers[begins[numbers] == NOWHERE].tolist())
            behind = others.begins + self._blob.source.size_bytes
            is_other = (begins == NOWHERE) & (others.begins != NOWHERE)
            begins = np.where(is_other, behind, begins)
            blobs.append(self._aside(others))
        places = begins[numbers]
        low, high = places + first, places + last
        if self._may_lack:  # the head of an extent says whether its object is there
            low = np.concatenate([low, places])
            high = np.concatenate([high, places + np.minimum(sizes, LEAST_ABSENT_BYTES)])
        some = high > low
        return ChunkParts.of(blobs, begins, low[some], high[some])

    def _aside(self, others: BlobExtents) -> Blob:
        """What the blob doesn't hold, which is kept nowhere."""
        source = self._blob.source
        return self._remote.pass_by(
            BlobSource(
                key=source.key,
                uri=source.uri,
                segments=others.segments(may_lack=self._may_lack),
                size_bytes=others.size_bytes,
            )
        )

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents, by one load."""
        if not len(extents):
            return []
        self._note(extents)
        parts = self._parts(*(np.array(each, np.int64) for each in (extents, starts, ends)))
        data = self._remote.load(parts.spans(), mode=self._mode)
        return self.brought(parts, data).read_parts(extents, starts, ends)

    def brought(self, parts: ChunkParts, data: Sequence[Sequence[Encoded]]) -> BroughtChunkData:
        """The same data when these parts are here. data: of each of `parts.spans()`. Raises
        CorruptShardError: the local disk has other bytes than came."""
        self._check(parts.starts[: parts.cut], parts.ends[: parts.cut])
        self._reads.add(int((parts.ends - parts.starts).sum()))
        return BroughtChunkData(self, parts, [one for some in data for one in some])

    def is_absent(self, head: Encoded, begin: int) -> bool:
        """Whether an extent's object isn't there, by its first bytes. begin: where these stand in
        their blob."""
        size = LEAST_ABSENT_BYTES
        return (
            self._may_lack
            and len(head) >= size
            and head[:size].tobytes() == absent_bytes(begin, begin + size)
        )

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """A view of the blob's map, where the blob is whole."""
        begin, size = int(self._begins[extent]), int(self._extents.sizes[extent])
        if self._mode == "pread" or begin == NOWHERE or not self._blob.is_whole:
            return None
        touched = self._touched(extent, size_bytes)
        self._reads.add(touched)
        spans = BlobSpans(
            blob=self._blob, starts=[begin], ends=[begin + size], touched_bytes=touched
        )
        ((data,),) = self._remote.load([spans])
        self._check(np.array([begin]), np.array([begin + size]))
        return _NOTHING if self.is_absent(data, begin) else data

    def _check(
        self,
        starts: np.ndarray[tuple[int], np.dtype[np.int64]],
        ends: np.ndarray[tuple[int], np.dtype[np.int64]],
    ) -> None:
        """Each block of a whole blob is checked when it is touched first. Raises
        CorruptShardError."""
        if not self._has_sums and self._blob.is_whole:
            self._sums, self._has_sums = self._remote.block_sums(self._blob), True
        if self._sums is not None and not self._sums.are_right(starts, ends, self._mode):
            raise CorruptShardError(
                f"{self._blob.source.uri}: its copy in the cache has a block whose checksum "
                "(CRC-32C) is wrong: the disk is failing, or somebody writes there."
            )


class BroughtChunkData(ChunkData):
    """The data of a remote shard for one batch, whose bytes were brought. data: the parts'."""

    def __init__(self, base: BlobChunkData, parts: ChunkParts, data: Sequence[Encoded]) -> None:
        super().__init__(base._sidecar, base._chunks, may_lack=base._may_lack)
        self._base, self._parts, self._data = base, parts, data
        self._arrivals, self._decoding = base._arrivals, base._decoding

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents; what wasn't brought is loaded now."""
        self._note(extents)
        rows = list(zip(extents, starts, ends, strict=True))
        found = [self._find(*row) for row in rows]
        for place, row in enumerate(rows):
            if found[place] is None:
                found[place] = self._await(*row)
        missing = [place for place, one in enumerate(found) if one is None]
        if missing:
            some = [rows[place] for place in missing]
            late = self._base.read_parts(*(list(column) for column in zip(*some, strict=True)))
            for place, one in zip(missing, late, strict=True):
                found[place] = one
        return [one for one in found if one is not None]

    def _find(self, extent: int, start: int, end: int) -> Encoded | None:
        if self._may_lack:
            size = min(LEAST_ABSENT_BYTES, int(self._extents.sizes[extent]))
            head = self._parts.find(self._data, extent, 0, size)
            if head is not None and self._base.is_absent(head, self._parts.begin(extent)):
                return _NOTHING
        if start == end:
            return _NOTHING
        return self._parts.find(self._data, extent, start, end)

    def _await(self, extent: int, start: int, end: int) -> Encoded | None:
        """Bytes that another batch fetches; None where it doesn't."""
        coming = self._parts.others.get(extent)
        holder = None if coming is None else coming.wait(STALL_TIMEOUT_S)
        return None if holder is None else holder._find(extent, start, end)

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """What was brought, or a view of the blob."""
        self._note([extent])
        size = int(self._extents.sizes[extent])
        found = self._find(extent, 0, size)
        return self._base.view(extent, size_bytes=size_bytes) if found is None else found
