"""Read the bytes of a shard of chunks by extent: from local files, or from a blob of the cache.

A blob holds the extents of the fields that a dataset selects; other fields are neither fetched nor
kept. They can still be read: their bytes are fetched by exact ranges each time.

All the bytes that the shards of a batch lack are fetched in parallel, before anything is decoded
(`ChunkParts`), so a batch over many uncached shards waits about one round trip. A local file is
opened once for all that is needed of it, or mapped.
"""

from __future__ import annotations

import os
import threading
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from penstock.cache import STALL_TIMEOUT_S, CorruptShardError, IndexChangedError
from penstock.cache.base import (
    LEAST_ABSENT_BYTES,
    READ_MODE,
    BlobSource,
    BlobSpans,
    FileMap,
    ReadMode,
    absent_bytes,
)
from penstock.readers.files import below
from penstock.readers.formats.chunk_cache import SharedExtents
from penstock.readers.formats.chunk_counts import ReadTally
from penstock.readers.formats.extents import NOT_IN_BLOB, BlobExtents
from penstock.readers.formats.local_files import (
    REINDEX,
    changed_file_error,
    open_file,
    read_up_to,
    unreadable_file_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob
    from penstock.cache.blobs import BlockSums, Remote
    from penstock.readers.formats.chunk_cache import PendingExtent, ShardChunks
    from penstock.readers.formats.open_shard import Ints
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

# A process may have 65,530 maps, and a dataset has 1,024 open shards. If a shard has many small
# files, none is mapped, because reading them costs less.
_MOST_MAPPED, _LEAST_BYTES = 4, 16 * 2**20

_NO_BYTES: Encoded = np.frombuffer(b"", np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkParts:
    """Parts of a shard's blob, and of a second blob with extents that the first one doesn't hold.

    blobs: one or two, treated as if they lay end to end. starts, ends: the bytes of them that are
    needed, ascending, no two parts touching, int64, shape (parts,). cut: number of parts in the
    first blob. begins: the first byte of each extent, below 0 if nothing of it is needed. claimed:
    extents for which other batches wait. others: extents that other batches fetch.
    """

    blobs: Sequence[Blob]
    starts: Ints
    ends: Ints
    cut: int
    begins: Ints
    claimed: Mapping[int, PendingExtent[Any]] = field(default_factory=dict)
    others: Mapping[int, PendingExtent[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, blobs: Sequence[Blob], begins: Ints, starts: Ints, ends: Ints) -> ChunkParts:
        """Join neighbouring parts. starts, ends: in any order, none empty."""
        border = blobs[0].source.size_bytes
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        is_new = np.ones(len(starts), np.bool_)
        is_new[1:] = (starts[1:] > reach[:-1]) | ((starts[1:] >= border) & (starts[:-1] < border))
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(starts)) - 1
        merged = starts[first]
        cut = int(np.searchsorted(merged, border))
        return cls(
            blobs=blobs, starts=merged, ends=reach[last[: len(first)]], cut=cut, begins=begins
        )

    def settle(self, holder: object) -> None:
        """Publish the holder of the claimed extents to the batches that wait for them.

        None: the fetch failed, unless a holder was published before.
        """
        for pending in self.claimed.values():
            pending.settle(holder)

    def spans(self) -> list[BlobSpans]:
        """Return the spans to load, of each blob."""
        found, offset = [], 0
        parts = (slice(0, self.cut), slice(self.cut, None))
        for blob, mine in zip(self.blobs, parts, strict=False):
            starts, ends = self.starts[mine] - offset, self.ends[mine] - offset
            found.append(BlobSpans(blob=blob, starts=starts.tolist(), ends=ends.tolist()))
            offset += blob.source.size_bytes
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
        """Return the first byte of an extent in its own blob."""
        begin, border = int(self.begins[extent]), self.blobs[0].source.size_bytes
        return begin if begin < border else begin - border


Chunk = TypeVar("Chunk")


class ChunkData:
    """The data of a shard of chunks: its bytes by extent, and its decoded chunks. Implements
    `ShardData`.

    may_lack: True if a missing object isn't an error; its extents are then empty.
    """

    def __init__(self, sidecar: Sidecar, chunks: ShardChunks | None, *, may_lack: bool) -> None:
        assert sidecar.extents is not None
        self._sidecar, self._chunks, self._may_lack = sidecar, chunks, may_lack
        self._extents = sidecar.extents
        self._mode: ReadMode = READ_MODE
        self._shared_extents: SharedExtents[FetchedChunkData] = (
            SharedExtents() if chunks is None else chunks.store.shared_extents(chunks.shard)
        )
        self._reads = ReadTally() if chunks is None else chunks.store.reads
        self._decoding = threading.local()  # the chunk that each thread is decoding

    def in_mode(self, mode: ReadMode) -> Self:
        """Return the same data with another way of reading: "pread" bypasses any map."""
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
        """Read parts of extents."""
        raise NotImplementedError

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Read parts of extents into their slots."""
        ends = [start + len(slot) for start, slot in zip(starts, slots, strict=True)]
        for slot, data in zip(slots, self.read_parts(extents, starts, ends), strict=True):
            slot[:] = data

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return a view of an extent, or None."""
        raise NotImplementedError

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

    def _watched(self, chunk: int, decode: Callable[[], Chunk]) -> Chunk:
        """Decode a chunk while recording which extents it is made from."""
        before, self._decoding.chunk = getattr(self._decoding, "chunk", None), chunk
        try:
            return decode()
        finally:
            self._decoding.chunk = before

    def _note(self, extents: Iterable[int]) -> None:
        """Record that extents are read."""
        chunk: int | None = getattr(self._decoding, "chunk", None)
        if chunk is not None:
            self._shared_extents.note(extents, chunk)

    def is_decoded(self, extent: int) -> bool:
        """Return True if every chunk that was decoded from an extent is kept, so that it needn't be
        read."""
        chunks = self._shared_extents.chunks(extent)
        if self._chunks is None or not chunks:
            return False
        store, shard = self._chunks
        return all(store.has((shard, each)) for each in chunks)

    def in_order(self, chunks: Sequence[int]) -> Iterator[int]:
        """Yield the chunks; those that another thread is decoding come last."""
        if self._chunks is None:
            return iter(chunks)
        return self._chunks.store.in_order(self._chunks.shard, chunks)


class LocalChunkData(ChunkData):
    """The data of a shard whose files lie in a local folder. Safe for several threads."""

    def __init__(
        self, root: bytes, sidecar: Sidecar, chunks: ShardChunks | None, *, may_lack: bool
    ) -> None:
        super().__init__(sidecar, chunks, may_lack=may_lack)
        self._root, self._folder, self._files = root, os.path.join(root, b""), sidecar.files
        self._maps: dict[int, tuple[int, Encoded] | None] = {}
        # Checked once per file, as it costs as much as a read: a link must not lead out of root.
        self._is_below = np.zeros(len(self._files), np.bool_)

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read parts of extents; neighbours in a file are read in one call. The result is
        read-only.

        Raises IndexChangedError if a file is gone or too short, and DatasetError.
        """
        if len(extents) == 1:
            return [self._read_one(extents[0], starts[0], ends[0])]
        numbers = np.array(extents, np.int64)
        files = self._extents.files[numbers]
        low = self._extents.starts[numbers] + np.array(starts, np.int64)
        high = self._extents.starts[numbers] + np.array(ends, np.int64)
        found: list[Encoded] = [_NO_BYTES] * len(numbers)
        order = np.lexsort((low, files)).tolist()
        names, begins, stops = files.tolist(), low.tolist(), high.tolist()
        fd, now, run = -1, -1, list[int]()
        try:
            for place in order:
                if names[place] != now:
                    self._read(fd, now, run, begins, stops, found)
                    before, fd = fd, -1  # _reopened closes it in any case
                    fd, now, run = self._reopened(before, names[place]), names[place], []
                elif run and begins[place] > stops[run[-1]]:
                    self._read(fd, now, run, begins, stops, found)
                    run = []
                run.append(place)
            self._read(fd, now, run, begins, stops, found)
        finally:
            if fd >= 0:
                os.close(fd)
        return found

    def _read_one(self, extent: int, start: int, end: int) -> Encoded:
        """Read a part of one extent."""
        file, begin = int(self._extents.files[extent]), int(self._extents.starts[extent])
        found, fd = [_NO_BYTES], self._reopened(-1, file)
        try:
            self._read(fd, file, (0,), (begin + start,), (begin + end,), found)
        finally:
            if fd >= 0:
                os.close(fd)
        return found[0]

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Read parts of extents into their slots, each by a read of its own.

        Raises as read_parts does, and IndexChangedError for a missing file even with may_lack.
        """
        numbers = np.array(extents, np.int64)
        files = self._extents.files[numbers].tolist()
        begins = (self._extents.starts[numbers] + np.array(starts, np.int64)).tolist()
        fd, now = -1, -1
        try:
            for place in np.lexsort((begins, files)).tolist():
                file, slot = files[place], slots[place]
                if file != now:
                    before, fd = fd, -1
                    fd, now = self._reopened(before, file), file
                self._fill(fd, file, begins[place], slot)
        finally:
            if fd >= 0:
                os.close(fd)

    def _fill(self, fd: int, file: int, begin: int, into: Encoded) -> None:
        """Fill an array from a byte of a file onwards."""
        name = self._files.names[file]
        if fd < 0:
            raise changed_file_error(name, "it is gone")
        try:
            got = read_up_to(fd, into, begin)
        except OSError as error:
            raise unreadable_file_error(self._path(file), error) from error
        if got < len(into):
            raise changed_file_error(
                name, f"it had {begin + len(into)} bytes or more and now has {begin + got}"
            )
        self._reads.add(got)

    def _path(self, file: int) -> bytes:
        name = self._files.names[file]
        if self._is_below[file]:
            return self._folder + name
        path = below(self._root, name)
        self._is_below[file] = True
        return path

    def _reopened(self, fd: int, file: int) -> int:
        """Close a descriptor and return that of another file; -1 if the file is missing and may
        be."""
        if fd >= 0:
            os.close(fd)
        name, path = self._files.names[file], self._path(file)
        try:
            return open_file(path, name)
        except IndexChangedError:
            if self._may_lack and not os.path.lexists(path):
                return -1
            raise

    def _read(
        self,
        fd: int,
        file: int,
        run: Sequence[int],
        begins: Sequence[int],
        stops: Sequence[int],
        found: list[Encoded],
    ) -> None:
        """Read parts that are neighbours or overlap."""
        if not run or fd < 0:
            return
        begin = begins[run[0]]
        stop = stops[run[0]] if len(run) == 1 else max(stops[place] for place in run)
        data = self.room((stop - begin,), np.dtype(np.uint8))
        self._fill(fd, file, begin, data)
        data.flags.writeable = False
        if len(run) == 1:
            found[run[0]] = data
            return
        for place in run:
            found[place] = data[begins[place] - begin : stops[place] - begin]

    # -- maps

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return a view of a mapped file; None if the file isn't mapped. Raises as read_parts
        does."""
        if self._mode == "pread":
            return None
        file = int(self._extents.files[extent])
        if file not in self._maps:  # if two threads map it, one of the maps is dropped
            self._maps[file] = self._map(file)
        mapped = self._maps[file]
        if mapped is None:
            return None
        begin, data = mapped
        start, size = int(self._extents.starts[extent]) - begin, int(self._extents.sizes[extent])
        self._reads.add(size if size_bytes is None else size_bytes)
        return data[start : start + size]

    @cached_property
    def _file_spans(self) -> dict[int, tuple[int, int]]:
        """The range of each file from the first to the last byte of its extents."""
        starts, ends = self._extents.starts, self._extents.starts + self._extents.sizes
        found = {}
        for file in np.unique(self._extents.files).tolist():
            mine = self._extents.files == file
            found[file] = int(starts[mine].min()), int(ends[mine].max())
        return found

    def _map(self, file: int) -> tuple[int, Encoded] | None:
        """Map the part of a file in which extents lie."""
        start, end = self._file_spans[file]
        if len(self._file_spans) > _MOST_MAPPED and end - start < _LEAST_BYTES:
            return None
        name = self._files.names[file]
        fd = self._reopened(-1, file)
        if fd < 0 or start == end:
            if fd >= 0:
                os.close(fd)
            return None
        try:
            # Reading a map beyond the end of the file would kill the process.
            size_bytes, now = int(self._files.sizes[file]), os.fstat(fd).st_size
            if now != size_bytes:
                raise changed_file_error(name, f"it had {size_bytes} bytes, now {now}")
            mapped = FileMap(fd, span=(start, end))
        except OSError as error:
            raise unreadable_file_error(self._path(file), error) from error
        finally:
            os.close(fd)
        return start, np.frombuffer(mapped.buffer(), np.uint8)


class BlobChunkData(ChunkData):
    """The data of a shard in a blob of the cache. fields: those that the blob holds."""

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
        extents = sidecar.blob_extents(fields)
        if extents.size_bytes != blob.source.size_bytes:
            raise CorruptShardError(
                f"{blob.source.uri}: this part of the index records {extents.size_bytes:,} bytes "
                f"of {list(fields)}, the manifest {blob.source.size_bytes:,}. {REINDEX}"
            )
        self._begins = extents.begins
        self._sums: BlockSums | None = None
        self._has_sums = False

    def missing_parts(
        self,
        extents: Sequence[int],
        starts: Sequence[int] | None = None,
        ends: Sequence[int] | None = None,
    ) -> ChunkParts | None:
        """Return the bytes to fetch before parts of extents, or whole extents, can be read; None if
        they are all cached.

        Extents whose chunks are decoded aren't fetched. A whole extent that isn't kept in the cache
        is fetched by one batch for all; that batch calls `ChunkParts.settle`.
        """
        numbers = np.array(extents, np.int64)
        elsewhere = self._begins[numbers] == NOT_IN_BLOB
        if not elsewhere.any() and (self._blob.is_whole or not len(numbers)):
            return None
        first = np.zeros(len(numbers), np.int64) if starts is None else np.array(starts, np.int64)
        last = self._extents.sizes[numbers] if ends is None else np.array(ends, np.int64)
        left = np.array([not self.is_decoded(extent) for extent in extents], np.bool_)
        numbers, first, last, elsewhere = (x[left] for x in (numbers, first, last, elsewhere))
        passing = elsewhere | (not self._blob.is_cached)
        shared = passing & (first == 0) & (last == self._extents.sizes[numbers])
        mine, others = self._shared_extents.claim(dict.fromkeys(numbers[shared].tolist()))
        own = np.array([extent not in others for extent in numbers.tolist()], np.bool_)
        parts = self._parts(numbers[own], first[own], last[own])
        return replace(parts, claimed=mine, others=others)

    def _parts(self, numbers: Ints, first: Ints, last: Ints) -> ChunkParts:
        """Return parts of extents as parts of the blob and of a second blob with extents that it
        lacks."""
        sizes = self._extents.sizes[numbers]
        blobs, begins = [self._blob], self._begins
        if (begins[numbers] == NOT_IN_BLOB).any():
            chosen = np.unique(numbers[begins[numbers] == NOT_IN_BLOB])
            others = BlobExtents(self._sidecar.files, self._extents, chosen)
            behind = others.begins + self._blob.source.size_bytes
            is_other = (begins == NOT_IN_BLOB) & (others.begins != NOT_IN_BLOB)
            begins = np.where(is_other, behind, begins)
            source = self._blob.source
            blobs.append(
                self._remote.pass_by(
                    BlobSource(
                        key=source.key,
                        uri=source.uri,
                        segments=others.segments(may_lack=self._may_lack),
                        size_bytes=others.size_bytes,
                    )
                )
            )
        places = begins[numbers]
        low, high = places + first, places + last
        if self._may_lack:  # the head of an extent shows if its object is missing
            low = np.concatenate([low, places])
            high = np.concatenate([high, places + np.minimum(sizes, LEAST_ABSENT_BYTES)])
        some = high > low
        return ChunkParts.of(blobs, begins, low[some], high[some])

    def read_parts(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Read parts of extents by one load."""
        if not len(extents):
            return []
        self._note(extents)
        parts = self._parts(*(np.array(each, np.int64) for each in (extents, starts, ends)))
        data = self._remote.load(parts.spans(), mode=self._mode)
        return self.with_fetched(parts, data).read_parts(extents, starts, ends)

    def with_fetched(
        self, parts: ChunkParts, data: Sequence[Sequence[Encoded]]
    ) -> FetchedChunkData:
        """Return the same data with these parts in memory. data: of each of `parts.spans()`.

        Raises CorruptShardError if the local disk returned wrong bytes.
        """
        self._check(parts.starts[: parts.cut], parts.ends[: parts.cut])
        self._reads.add(int((parts.ends - parts.starts).sum()))
        return FetchedChunkData(self, parts, [part for blob in data for part in blob])

    def is_absent(self, head: Encoded, begin: int) -> bool:
        """Return True if an extent's object is missing, judged by its first bytes. begin: their
        place in the blob."""
        size = LEAST_ABSENT_BYTES
        return (
            self._may_lack
            and len(head) >= size
            and head[:size].tobytes() == absent_bytes(begin, begin + size)
        )

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return a view of the blob's map, if the blob is complete."""
        begin, size = int(self._begins[extent]), int(self._extents.sizes[extent])
        if self._mode == "pread" or begin == NOT_IN_BLOB or not self._blob.is_whole:
            return None
        touched = size if size_bytes is None else size_bytes
        self._reads.add(touched)
        spans = BlobSpans(
            blob=self._blob, starts=[begin], ends=[begin + size], touched_bytes=touched
        )
        ((data,),) = self._remote.load([spans])
        self._check(np.array([begin]), np.array([begin + size]))
        return _NO_BYTES if self.is_absent(data, begin) else data

    def _check(self, starts: Ints, ends: Ints) -> None:
        """Check each block of a complete blob at its first use. Raises CorruptShardError."""
        if not self._has_sums and self._blob.is_whole:
            self._sums, self._has_sums = self._remote.block_sums(self._blob), True
        if self._sums is not None and not self._sums.are_right(starts, ends, self._mode):
            raise CorruptShardError(
                f"{self._blob.source.uri}: its copy in the cache has a block whose checksum "
                "(CRC-32C) is wrong: the disk is failing, or another program wrote to it."
            )


class FetchedChunkData(ChunkData):
    """The data of a remote shard for one batch, whose bytes were fetched. data: of the parts."""

    def __init__(self, base: BlobChunkData, parts: ChunkParts, data: Sequence[Encoded]) -> None:
        super().__init__(base._sidecar, base._chunks, may_lack=base._may_lack)
        self._base, self._parts, self._data = base, parts, data
        self._shared_extents, self._decoding = base._shared_extents, base._decoding

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
        if self._may_lack:
            size = min(LEAST_ABSENT_BYTES, int(self._extents.sizes[extent]))
            head = self._parts.find(self._data, extent, 0, size)
            if head is not None and self._base.is_absent(head, self._parts.begin(extent)):
                return _NO_BYTES
        if start == end:
            return _NO_BYTES
        return self._parts.find(self._data, extent, start, end)

    def _await(self, extent: int, start: int, end: int) -> Encoded | None:
        """Wait for bytes that another batch fetches; return None if that fails."""
        pending = self._parts.others.get(extent)
        holder = None if pending is None else pending.wait(STALL_TIMEOUT_S)
        return None if holder is None else holder._find(extent, start, end)

    def view(self, extent: int, *, size_bytes: int | None = None) -> Encoded | None:
        """Return fetched bytes, or a view of the blob."""
        self._note([extent])
        size = int(self._extents.sizes[extent])
        found = self._find(extent, 0, size)
        return self._base.view(extent, size_bytes=size_bytes) if found is None else found
