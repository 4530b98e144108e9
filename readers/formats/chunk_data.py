"""Read the bytes of a shard of chunks by extent: from local files, or from a blob of the cache.

A blob holds the extents of the fields that a dataset selects, so what nobody wants is neither
fetched nor kept. Other fields can still be read: their bytes come by exact ranges each time.

All that the shards of a batch miss is fetched at once, before anything is decoded (`ChunkParts`):
so a batch over many cold shards waits for the remote about once. A local file is opened once for
what is wanted of it, or mapped.
"""

from __future__ import annotations

import os
import threading
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
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
from penstock.readers.formats.chunk_cache import Arrivals
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
    from penstock.readers.formats.chunk_cache import Arrival, ChunkMemory, ShardChunks
    from penstock.readers.formats.extents import Extents, ShardFiles
    from penstock.readers.formats.open_shard import Ints
    from penstock.readers.formats.sidecar import Sidecar
    from penstock.readers.types import Encoded

    IntArray = NDArray[np.int64]

# A process may have 65,530 maps, and a dataset has 1,024 open shards: of many small files none is
# mapped, as reading them costs less.
_MOST_MAPPED, _LEAST_BYTES = 4, 16 * 2**20

_NOTHING: Encoded = np.frombuffer(b"", np.uint8)


class ExtentFiles:
    """The files of one shard in a local folder. may_lack: a file that isn't there is no error, its
    extents are empty. memory: for what is read. Safe for several threads."""

    def __init__(
        self,
        root: bytes,
        files: ShardFiles,
        extents: Extents,
        *,
        may_lack: bool = False,
        memory: ChunkMemory | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        """on_read: is told the bytes of each read; of views it hears nothing."""
        self._root, self._files, self._extents = root, files, extents
        self._folder = os.path.join(root, b"")
        self._may_lack, self._memory, self._on_read = may_lack, memory, on_read
        self._maps: dict[int, tuple[int, Encoded] | None] = {}
        self._spans: dict[int, tuple[int, int]] | None = None
        # Whether a link leads out of root is looked at once a file: it costs as much as a read.
        self._is_below = np.zeros(len(files), np.bool_)

    def read(
        self, extents: Sequence[int], starts: Sequence[int], ends: Sequence[int]
    ) -> list[Encoded]:
        """Parts of extents: what lies side by side in a file is read as one. Read-only. Raises
        IndexChangedError (gone, too short), DatasetError."""
        if len(extents) == 1:
            return [self._read_one(extents[0], starts[0], ends[0])]
        numbers = np.array(extents, np.int64)
        files = self._extents.files[numbers]
        low = self._extents.starts[numbers] + np.array(starts, np.int64)
        high = self._extents.starts[numbers] + np.array(ends, np.int64)
        found: list[Encoded] = [_NOTHING] * len(numbers)
        order = np.lexsort((low, files)).tolist()
        names, begins, stops = files.tolist(), low.tolist(), high.tolist()
        fd, now, run = -1, -1, list[int]()
        try:
            for place in order:
                if names[place] != now:
                    self._read(fd, now, run, begins, stops, found)
                    before, fd = fd, -1  # it is closed, whatever comes
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
        """Part of one extent."""
        file, begin = int(self._extents.files[extent]), int(self._extents.starts[extent])
        found, fd = [_NOTHING], self._reopened(-1, file)
        try:
            self._read(fd, file, (0,), (begin + start,), (begin + end,), found)
        finally:
            if fd >= 0:
                os.close(fd)
        return found[0]

    def read_into(
        self, extents: Sequence[int], starts: Sequence[int], slots: Sequence[Encoded]
    ) -> None:
        """Parts of extents, each by one read into its slot. Raises as read does, and
        IndexChangedError for a file that may lack."""
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
        """Fill an array from a byte of a file on."""
        name = self._files.names[file]
        if fd < 0:
            raise changed_file_error(name, "it is gone")
        try:
            got = read_up_to(fd, into, begin)
        except OSError as error:
            raise unreadable_file_error(self._path(file), error) from error
        if got < len(into):
            raise changed_file_error(
                name, f"it had {begin + len(into)} bytes or more and has {begin + got}"
            )
        if self._on_read is not None:
            self._on_read(got)

    def _path(self, file: int) -> bytes:
        name = self._files.names[file]
        if self._is_below[file]:
            return self._folder + name
        path = below(self._root, name)
        self._is_below[file] = True
        return path

    def _reopened(self, fd: int, file: int) -> int:
        """The next file's descriptor, -1 where it may lack and isn't there; closes the one
        before."""
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
        """Read parts that lie side by side or overlap."""
        if not run or fd < 0:
            return
        begin = begins[run[0]]
        stop = stops[run[0]] if len(run) == 1 else max(stops[place] for place in run)
        size, dtype = (stop - begin,), np.dtype(np.uint8)
        data = np.empty(size, dtype) if self._memory is None else self._memory.array(size, dtype)
        self._fill(fd, file, begin, data)
        data.flags.writeable = False
        if len(run) == 1:
            found[run[0]] = data
            return
        for place in run:
            found[place] = data[begins[place] - begin : stops[place] - begin]

    # -- maps

    def view(self, extent: int) -> Encoded | None:
        """A view of a mapped file; None where it isn't mapped. Raises as read does."""
        file = int(self._extents.files[extent])
        if file not in self._maps:  # two threads may map it; one of the maps goes again
            self._maps[file] = self._map(file)
        mapped = self._maps[file]
        if mapped is None:
            return None
        begin, data = mapped
        start = int(self._extents.starts[extent]) - begin
        return data[start : start + int(self._extents.sizes[extent])]

    def _map(self, file: int) -> tuple[int, Encoded] | None:
        """Map the part of a file that extents lie in."""
        if self._spans is None:
            self._spans = _spans(self._extents)
        start, end = self._spans[file]
        if len(self._spans) > _MOST_MAPPED and end - start < _LEAST_BYTES:
            return None
        name = self._files.names[file]
        fd = self._reopened(-1, file)
        if fd < 0 or start == end:
            if fd >= 0:
                os.close(fd)
            return None
        try:
            # A map ends where the file ends: behind that the kernel ends the process.
            size_bytes, now = int(self._files.sizes[file]), os.fstat(fd).st_size
            if now != size_bytes:
                raise changed_file_error(name, f"it had {size_bytes} bytes, now {now}")
            mapped = FileMap(fd, span=(start, end))
        except OSError as error:
            raise unreadable_file_error(self._path(file), error) from error
        finally:
            os.close(fd)
        return start, np.frombuffer(mapped.buffer(), np.uint8)


def _spans(extents: Extents) -> dict[int, tuple[int, int]]:
    """From the first to the last byte that is some extent's, of each file."""
    ends: Ints = extents.starts + extents.sizes
    found = {}
    for file in np.unique(extents.files).tolist():
        mine = extents.files == file
        found[file] = int(extents.starts[mine].min()), int(ends[mine].max())
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkParts:
    """Bytes of a shard's blob, and of what lies beside it.

    blobs: one or two, which lie end to end here; starts, ends: bytes of them that are wanted,
    ascending, none touching another, int64, shape (parts,); cut: how many of them are of the first.
    begins: of each extent its first byte here, below 0 where nothing of it is wanted. claimed: the
    extents that other batches wait for; others: those that others fetch.
    """

    blobs: Sequence[Blob]
    starts: IntArray
    ends: IntArray
    cut: int
    begins: IntArray
    claimed: Mapping[int, Arrival[Any]] = field(default_factory=dict)
    others: Mapping[int, Arrival[Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, blobs: Sequence[Blob], begins: IntArray, starts: IntArray, ends: IntArray
    ) -> ChunkParts:
        """What lies side by side is asked for as one. starts, ends: in any order, none empty."""
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
        """Tell who waits for what was claimed. holder: who has it; None: it doesn't come, unless it
        has."""
        for coming in self.claimed.values():
            coming.settle(holder)

    def spans(self) -> list[BlobSpans]:
        """What to load, of each blob."""
        found, offset = [], 0
        parts = (slice(0, self.cut), slice(self.cut, None))
        for blob, mine in zip(self.blobs, parts, strict=False):
            starts, ends = self.starts[mine] - offset, self.ends[mine] - offset
            found.append(BlobSpans(blob=blob, starts=starts.tolist(), ends=ends.tolist()))
            offset += blob.source.size_bytes
        return found

    def find(self, loaded: Sequence[Encoded], extent: int, start: int, end: int) -> Encoded | None:
        """Bytes of an extent among what came; None where they weren't wanted. loaded: of each
        part."""
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
        """The first byte of an extent in its own blob."""
        begin, border = int(self.begins[extent]), self.blobs[0].source.size_bytes
        return begin if begin < border else begin - border


Chunk = TypeVar("Chunk")

_NO_BYTES: Encoded = np.frombuffer(b"", np.uint8)


class ChunkData:
    """What is common to a shard's data, wherever its bytes are. may_lack: an object that isn't
    there is no error, and its extents are empty."""

    def __init__(self, sidecar: Sidecar, chunks: ShardChunks | None, *, may_lack: bool) -> None:
        assert sidecar.extents is not None
        self._sidecar, self._chunks, self._may_lack = sidecar, chunks, may_lack
        self._extents = sidecar.extents
        self._mode: ReadMode = READ_MODE
        self._arrivals: Arrivals[FetchedChunkData] = (
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
        elsewhere = self._begins[numbers] == NOT_IN_BLOB
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
        if (begins[numbers] == NOT_IN_BLOB).any():
            others = BlobExtents.of(self._sidecar, numbers[begins[numbers] == NOT_IN_BLOB].tolist())
            behind = others.begins + self._blob.source.size_bytes
            is_other = (begins == NOT_IN_BLOB) & (others.begins != NOT_IN_BLOB)
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

    def brought(self, parts: ChunkParts, data: Sequence[Sequence[Encoded]]) -> FetchedChunkData:
        """The same data when these parts are here. data: of each of `parts.spans()`. Raises
        CorruptShardError: the local disk has other bytes than came."""
        self._check(parts.starts[: parts.cut], parts.ends[: parts.cut])
        self._reads.add(int((parts.ends - parts.starts).sum()))
        return FetchedChunkData(self, parts, [one for some in data for one in some])

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
        if self._mode == "pread" or begin == NOT_IN_BLOB or not self._blob.is_whole:
            return None
        touched = self._touched(extent, size_bytes)
        self._reads.add(touched)
        spans = BlobSpans(
            blob=self._blob, starts=[begin], ends=[begin + size], touched_bytes=touched
        )
        ((data,),) = self._remote.load([spans])
        self._check(np.array([begin]), np.array([begin + size]))
        return _NO_BYTES if self.is_absent(data, begin) else data

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


class FetchedChunkData(ChunkData):
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
                return _NO_BYTES
        if start == end:
            return _NO_BYTES
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
