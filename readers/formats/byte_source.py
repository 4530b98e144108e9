"""Read the bytes of a shard from local files or from a blob of the cache. No other module knows
which of them it reads.

A format opens the `ByteSource` of a shard at a `ShardPlace`. Positions count from the shard's first
byte; several files lie end to end, as in a blob.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache import CorruptShardError
from penstock.cache.base import BlobSpans, FileMap
from penstock.readers.files import advise_willneed, below, only_the_tail, printable
from penstock.readers.formats.local_files import (
    REINDEX,
    FileSpan,
    changed_file_error,
    read_file_into,
    read_up_to,
    unreadable_file_error,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob, ReadMode, Segment
    from penstock.cache.blobs import BlockSums, Remote
    from penstock.readers.formats.chunk_counts import ReadTally
    from penstock.readers.formats.extents import BlobExtents, Extents, ShardFiles
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Spans = Sequence[tuple[int, int]]
    Room = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]

# A process may have 65,530 maps, and a dataset has 1,024 open shards. If a shard has many small
# files, none is mapped, because reading them costs less.
_MOST_MAPPED, _LEAST_BYTES = 4, 16 * 2**20

_BYTES = np.dtype(np.uint8)
_NO_BYTES: Encoded = np.frombuffer(b"", np.uint8)


class ChunkExtents(Protocol):
    """The part of a `Sidecar` that locates the extents of a shard of chunks."""

    @property
    def files(self) -> ShardFiles:
        """Return the files of the shard."""

    @property
    def extents(self) -> Extents | None:
        """Return the extents in these files; None if the shard has no chunks."""

    def blob_extents(self, fields: Sequence[str]) -> BlobExtents:
        """Return the extents of some fields, placed in a blob."""


class ByteSource(ABC):
    """The bytes of one shard. Safe for several threads. Views outlive the source.

    shown: its path or address, for messages. size_bytes: of the shard. is_mapped: True if `views`
    are of mapped files, whose bytes may change. is_file_per_sample: True if one sample can be
    missing or changed while the others are intact. may_fetch: True if bytes may come from a remote,
    so that a batch loads all that it needs at once (`spans`, `load`). is_kept: True if bytes that
    are read stay on the local disk. may_map: False if `view` always returns None.

    Methods raise IndexChangedError, CorruptShardError, DatasetError, ReadError or FetchError.
    """

    shown: str
    size_bytes: int
    is_mapped: bool = True
    may_map: bool = True
    is_file_per_sample: bool = False
    may_fetch: bool = False
    is_kept: bool = True

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Return True if all bytes are on the local disk."""

    @abstractmethod
    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Encoded]:
        """Return bytes [start, end) as read-only arrays. Requires is_mapped or may_fetch."""

    def read_into(self, starts: Sequence[int], slots: Sequence[Encoded]) -> None:
        """Read spans past any map, each into its slot, which is one byte longer than the span."""
        self.fill(starts, [slot[:-1] for slot in slots])

    @abstractmethod
    def fill(self, starts: Sequence[int], slots: Sequence[Encoded]) -> None:
        """Read bytes past any map into slots of their sizes, each by a read of its own."""

    @abstractmethod
    def read_parts(self, starts: Ints, ends: Ints, room: Room) -> list[Encoded]:
        """Return bytes [start, end) past any map, read-only; empty if the file is missing and may
        be. room: returns memory, into which neighbours are read by one call."""

    def read_part(self, start: int, end: int, room: Room) -> Encoded:
        """Return one part as `read_parts` does, sooner."""
        (found,) = self.read_parts(np.array([start]), np.array([end]), room)
        return found

    @abstractmethod
    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of mapped bytes; None if they aren't mapped. touched_bytes: the number of
        them that will be accessed, for the statistics."""

    @abstractmethod
    def buffer(self, spans: Spans) -> Any:
        """Return a read-only pyarrow buffer of the shard's size that holds at least these spans
        [start, end), after fetching missing ones. For parsing headers and footers."""

    def parsing(self) -> AbstractContextManager[None]:
        """Return a context in which the end of the buffer is parsed: the kernel reads it ahead,
        and little around other bytes."""
        return nullcontext()

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read these mapped bytes ahead. Returns at once."""
        del starts, ends

    def file_spans(self, starts: list[int], sizes: list[int]) -> list[FileSpan] | None:
        """Return spans of files that can be read later; None if the shard isn't of such files."""
        del starts, sizes
        return None

    def spans(self, starts: Sequence[int], ends: Sequence[int]) -> BlobSpans:
        """Return spans to load together with those of other sources. Requires may_fetch."""
        raise TypeError(f"{self.shown}: is local: {len(starts)} spans up to {ends}")

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode) -> list[list[Encoded]]:
        """Load the spans of several sources, including this one, by one call, which fetches what is
        missing in parallel. Requires may_fetch. Returns and raises as `Remote.load`."""
        raise TypeError(f"{self.shown}: is local: spans of {len(wanted)} blobs ({mode})")

    def check(self, starts: Ints, ends: Ints, mode: ReadMode) -> None:
        """Check the blocks of loaded bytes [start, end), each once. Raises CorruptShardError if the
        local disk returned wrong bytes."""
        del starts, ends, mode

    # -- the cache

    @property
    def inode(self) -> int | None:
        """Return the inode of the cached file; None for other sources."""
        return None

    @property
    def is_outdated(self) -> bool:
        """Return True if the bytes are read past the cache, and are in the cache by now."""
        return False

    @property
    def is_spare(self) -> bool:
        """Return True if the cache needn't keep the bytes for this process, or has removed them."""
        return False

    def beyond(self, segments: Sequence[Segment], size_bytes: int) -> ByteSource:
        """Return a source of other bytes of the shard, which aren't kept. Requires may_fetch."""
        raise TypeError(f"{self.shown}: is local: {size_bytes} bytes in {segments}")


class FileErrors:
    """The errors of a local file that isn't as it was indexed."""

    def changed(self, path: bytes, name: bytes, *, had: int, now: int | None) -> Exception:
        """Return the error for a file that had some bytes, and has others now, or is gone: None."""
        del path
        what = "it is gone" if now is None else f"it had {had} bytes, now {now}"
        return changed_file_error(name, what)

    def unreadable(self, path: bytes, error: OSError) -> Exception:
        """Return the error for a file that exists and can't be read."""
        return unreadable_file_error(path, error)


class LocalFiles(ByteSource):
    """The bytes of a shard in files of a local folder. It holds no file descriptor.

    One file that is a shard is mapped as a whole. Other files are opened each time that they are
    read, and parts of them are mapped when they are viewed, unless that costs more than reading.
    """

    is_whole = True

    def __init__(
        self,
        root: bytes,
        names: Sequence[bytes],
        sizes: Ints,
        *,
        is_mapped: bool = False,
        is_below: bool = False,
        may_lack: bool = False,
        used: tuple[Ints, Ints] | None = None,
        tally: ReadTally | None = None,
        errors: FileErrors | None = None,
    ) -> None:
        """is_mapped: map the only file now. is_below: refuse links that lead out of root. may_lack:
        a missing file is no error. used: bytes [start, end) outside of which files aren't mapped.
        tally: counts the bytes that are read as parts of files."""
        self._folder, self._root = os.path.join(root, b""), root
        self._names, self._sizes = names, sizes
        self.shown = printable(self._folder + names[0]) if len(names) == 1 else printable(root)
        self.is_mapped, self.is_file_per_sample = is_mapped, not is_mapped
        # Indexing a memoryview returns plain integers, and takes 8 bytes for each.
        self._bounds = np.zeros(len(names) + 1, np.int64)
        np.cumsum(sizes, out=self._bounds[1:])
        self._starts = memoryview(self._bounds)  # type: ignore[arg-type]
        self.size_bytes = self._starts[-1]
        self.may_map = len(names) <= _MOST_MAPPED or self.size_bytes >= _LEAST_BYTES
        # Checked once per file, as it costs as much as a read.
        self._is_below = np.full(len(names), not is_below, np.bool_)
        self._may_lack, self._used, self._tally = may_lack, used, tally
        self._errors = errors or FileErrors()
        self._maps: dict[int, tuple[int, Encoded] | None] = {}
        if is_mapped:
            self._buffer = mapped = self._map_file(0, 0, self.size_bytes)
            self._data, self._address = np.frombuffer(mapped, np.uint8), mapped.address

    def _find(self, start: int) -> int:
        """Return the number of the file in which a byte lies."""
        return bisect_right(self._starts, start, 0, len(self._names)) - 1

    def _path(self, file: int) -> bytes:
        name = self._names[file]
        if self._is_below[file]:
            return self._folder + name
        path = below(self._root, name)
        self._is_below[file] = True
        return path

    def _changed(self, file: int, now: int | None) -> Exception:
        path, name, had = self._path(file), self._names[file], int(self._sizes[file])
        return self._errors.changed(path, name, had=had, now=now)

    def _open(self, file: int) -> int:
        """Open a file; return -1 if it is missing and may be."""
        path = self._path(file)
        try:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            if self._may_lack and not os.path.lexists(path):
                return -1
            raise self._changed(file, None) from None
        except OSError as error:
            raise self._errors.unreadable(path, error) from error

    def _fill(self, fd: int, file: int, begin: int, into: Encoded) -> None:
        """Fill an array from a byte of a file onwards."""
        if fd < 0:
            raise self._changed(file, None)
        try:
            got = read_up_to(fd, into, begin)
        except OSError as error:
            raise self._errors.unreadable(self._path(file), error) from error
        if got < len(into):
            raise self._changed(file, begin + got)
        if self._tally is not None:
            self._tally.add(got)

    # -- reading

    def fill(self, starts: Sequence[int], slots: Sequence[Encoded]) -> None:
        """Read bytes into slots of their sizes; each file is opened once. Raises IndexChangedError
        for a missing file even if it may be missing."""
        fd, now = -1, -1
        try:
            for place in sorted(range(len(slots)), key=starts.__getitem__):
                start = starts[place]
                file = self._find(start)
                if file != now:
                    if fd >= 0:
                        os.close(fd)
                        fd = -1
                    fd, now = self._open(file), file
                self._fill(fd, file, start - self._starts[file], slots[place])
        finally:
            if fd >= 0:
                os.close(fd)

    def read_into(self, starts: Sequence[int], slots: Sequence[Encoded]) -> None:
        """Read spans into their slots. If a span ends with its file, the call that reads it notices
        a file that has grown."""
        if self.is_mapped:
            super().read_into(starts, slots)
            return
        for start, slot in zip(starts, slots, strict=True):
            file = self._find(start)
            begin, is_rest = self._starts[file], start + len(slot) - 1 == self._starts[file + 1]
            into = slot if is_rest else slot[:-1]  # otherwise other spans follow
            name = self._names[file]
            read_file_into(self._path(file), into, name=name, start=start - begin, is_rest=is_rest)

    def file_spans(self, starts: list[int], sizes: list[int]) -> list[FileSpan] | None:
        """Return the file spans of some samples, without reading them."""
        if self.is_mapped:
            return None
        found = []
        for start, size_bytes in zip(starts, sizes, strict=True):
            file = self._find(start)
            begin, is_rest = self._starts[file], start + size_bytes == self._starts[file + 1]
            path, name = self._path(file), self._names[file]
            found.append(FileSpan(path, name, start - begin, size_bytes, is_rest))
        return found

    def read_parts(self, starts: Ints, ends: Ints, room: Room) -> list[Encoded]:
        """Read parts of files."""
        files = np.searchsorted(self._bounds[1:-1], starts, side="right").tolist()
        order: list[int] = np.argsort(starts, kind="stable").tolist()
        lows: list[int] = starts.tolist()
        highs: list[int] = ends.tolist()
        found: list[Encoded] = [_NO_BYTES] * len(lows)
        fd, now, run = -1, -1, list[int]()
        try:
            for place in order:
                if files[place] != now:
                    self._read_run(fd, now, run, lows, highs, room, found)
                    if fd >= 0:
                        os.close(fd)
                        fd = -1
                    now, run = files[place], []
                    fd = self._open(now)
                elif run and lows[place] > highs[run[-1]]:
                    self._read_run(fd, now, run, lows, highs, room, found)
                    run = []
                run.append(place)
            self._read_run(fd, now, run, lows, highs, room, found)
        finally:
            if fd >= 0:
                os.close(fd)
        return found

    def read_part(self, start: int, end: int, room: Room) -> Encoded:
        """Read a part of a file."""
        file, found = self._find(start), [_NO_BYTES]
        fd = self._open(file)
        try:
            self._read_run(fd, file, (0,), (start,), (end,), room, found)
        finally:
            if fd >= 0:
                os.close(fd)
        return found[0]

    def _read_run(
        self,
        fd: int,
        file: int,
        run: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        room: Room,
        found: list[Encoded],
    ) -> None:
        """Read parts of a file that are neighbours or overlap. run: their places in starts."""
        if not run or fd < 0:
            return
        low = starts[run[0]]
        high = ends[run[0]] if len(run) == 1 else max(ends[place] for place in run)
        data = room((high - low,), _BYTES)
        self._fill(fd, file, low - self._starts[file], data)
        data.flags.writeable = False
        if len(run) == 1:
            found[run[0]] = data
            return
        for place in run:
            found[place] = data[starts[place] - low : ends[place] - low]

    # -- maps

    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Encoded]:
        """Return views of the map."""
        data = self._data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read these pages ahead; files that aren't mapped are read by one
        call."""
        if self.is_mapped:
            advise_willneed(self._address + starts, self._address + ends)

    def buffer(self, spans: Spans) -> Any:
        """Return the map of the only file."""
        del spans
        return self._buffer

    def parsing(self) -> AbstractContextManager[None]:
        """Let the kernel read the end of the map ahead."""
        return only_the_tail(self._address, self.size_bytes)

    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of a mapped part of a file."""
        del touched_bytes
        file = self._find(start)
        if file not in self._maps:  # if two threads map it, one of the maps is dropped
            self._maps[file] = self._map_used(file)
        mapped = self._maps[file]
        if mapped is None:
            return None
        begin, data = mapped
        return data[start - begin : end - begin]

    def _map_used(self, file: int) -> tuple[int, Encoded] | None:
        """Map the used part of a file; return its first byte with it."""
        assert self._used is not None
        starts, ends = self._used
        mine = (starts >= self._starts[file]) & (ends <= self._starts[file + 1])
        start, end = int(starts[mine].min()), int(ends[mine].max())
        if len(self._names) > _MOST_MAPPED and end - start < _LEAST_BYTES:
            return None
        if start == end:
            return None
        mapped = self._map_file(file, start, end)
        return None if mapped is None else (start, np.frombuffer(mapped, np.uint8))

    def _map_file(self, file: int, start: int, end: int) -> Any:
        """Return a buffer of mapped bytes of one file; None if it is missing and may be."""
        fd = self._open(file)
        if fd < 0:
            return None
        try:
            # Reading a map beyond the end of the file would kill the process.
            now, begin = os.fstat(fd).st_size, self._starts[file]
            if now != self._sizes[file] or start == end:
                raise self._changed(file, now)
            return FileMap(fd, span=(start - begin, end - begin)).buffer()
        except OSError as error:
            raise self._errors.unreadable(self._path(file), error) from error
        finally:
            os.close(fd)


class BlobBytes(ByteSource):
    """The bytes of a shard in a blob of the cache, or read past the cache."""

    may_fetch = True

    def __init__(self, remote: Remote, blob: Blob) -> None:
        self._remote, self._blob = remote, blob
        self.shown, self.size_bytes = blob.source.uri, blob.source.size_bytes
        self.is_mapped = self.is_kept = blob.is_cached
        self._sums: BlockSums | None = None
        self._has_sums = False

    @property
    def is_whole(self) -> bool:
        """Return True if all bytes are in the cache."""
        return self._blob.is_whole

    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Encoded]:
        """Return views of a cached blob, or fresh memory if it isn't cached."""
        return self._load(starts, ends, "mmap")

    def _load(
        self,
        starts: Sequence[int],
        ends: Sequence[int],
        mode: ReadMode,
        touched_bytes: int | None = None,
    ) -> list[Encoded]:
        spans = BlobSpans(blob=self._blob, starts=starts, ends=ends, touched_bytes=touched_bytes)
        (found,) = self._remote.load([spans], mode=mode)
        return found

    def fill(self, starts: Sequence[int], slots: Sequence[Encoded]) -> None:
        """Read bytes and copy them into their slots."""
        ends = [start + len(slot) for start, slot in zip(starts, slots, strict=True)]
        for slot, data in zip(slots, self._load(starts, ends, "pread"), strict=True):
            slot[:] = data

    def read_parts(self, starts: Ints, ends: Ints, room: Room) -> list[Encoded]:
        """Read parts of the blob, each into memory of its own."""
        del room
        return self._load(starts.tolist(), ends.tolist(), "pread")

    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of the blob's map, if the blob is complete, and check its blocks."""
        if not self._blob.is_whole:
            return None
        (data,) = self._load([start], [end], "mmap", touched_bytes)
        self.check(np.array([start]), np.array([end]), "mmap")
        return data

    def buffer(self, spans: Spans) -> Any:
        """Return a buffer of the blob in which these spans are filled."""
        return self._blob.buffer(spans)

    def parsing(self) -> AbstractContextManager[None]:
        """Let the kernel read the end of the map ahead, if there is one."""
        address = self._blob.address()
        return nullcontext() if address is None else only_the_tail(address, self.size_bytes)

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read the cached bytes ahead."""
        address = self._blob.address()
        if address is not None:
            advise_willneed(address + starts, address + ends)

    def spans(self, starts: Sequence[int], ends: Sequence[int]) -> BlobSpans:
        """Return spans of the blob."""
        return BlobSpans(blob=self._blob, starts=starts, ends=ends)

    def load(self, wanted: Sequence[BlobSpans], *, mode: ReadMode) -> list[list[Encoded]]:
        """Load spans of blobs of one dataset."""
        return self._remote.load(wanted, mode=mode)

    @property
    def inode(self) -> int | None:
        """Return the inode of the cached file; None if the blob isn't cached."""
        return getattr(self._blob, "inode", None)

    @property
    def is_outdated(self) -> bool:
        """Return True if the blob is read past the cache, and the cache has it by now."""
        return not self._blob.is_cached and self._remote.is_whole(self._blob.source)

    @property
    def is_spare(self) -> bool:
        """Return True if the cache needn't keep the blob for a job of this process, or has removed
        it."""
        from penstock.cache.blobs import CachedBlob

        return isinstance(self._blob, CachedBlob) and not (
            self._remote.keeps(self._blob.source.key) and self._blob.has_name
        )

    def check(self, starts: Ints, ends: Ints, mode: ReadMode) -> None:
        """Check each block of a complete blob at its first use."""
        if not self._has_sums and self._blob.is_whole:
            self._sums, self._has_sums = self._remote.block_sums(self._blob), True
        if self._sums is not None and not self._sums.are_right(starts, ends, mode):
            raise CorruptShardError(
                f"{self.shown}: its copy in the cache has a block whose checksum "
                "(CRC-32C) is wrong: the disk is failing, or another program wrote to it."
            )

    def beyond(self, segments: Sequence[Segment], size_bytes: int) -> ByteSource:
        """Return a blob of other bytes that is read past the cache."""
        source = replace(self._blob.source, segments=segments, size_bytes=size_bytes)
        return BlobBytes(self._remote, self._remote.pass_by(source))


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """The place of a shard: a local folder, or a blob of the cache. One of them is None."""

    root: bytes | None = None
    blob: BlobBytes | None = None

    def file(
        self, name: bytes, size_bytes: int, *, is_below: bool, errors: FileErrors | None = None
    ) -> ByteSource:
        """Open a shard that is one file, mapped if it is local. is_below: refuse links that lead
        out of the folder. errors: of a local file."""
        if self.blob is not None:
            return self.blob
        sizes = np.array([size_bytes], np.int64)
        return LocalFiles(
            self._folder, [name], sizes, is_mapped=True, is_below=is_below, errors=errors
        )

    def files(self, files: ShardFiles) -> ByteSource:
        """Open a shard of several files, which are opened when they are read."""
        return self.blob or LocalFiles(self._folder, files.names, files.sizes)

    def extents(
        self, sidecar: ChunkExtents, fields: Sequence[str], *, may_lack: bool, tally: ReadTally
    ) -> tuple[ByteSource, Ints]:
        """Open a shard of chunks; return also the first byte of each extent, NOT_IN_BLOB if the
        source lacks it.

        fields: those whose extents a blob has; local files have all. may_lack: a missing file is no
        error. tally: counts the bytes that are read from local files. Raises CorruptShardError.
        """
        if self.blob is not None:
            placed, size_bytes = sidecar.blob_extents(fields), self.blob.size_bytes
            if placed.size_bytes != size_bytes:
                raise CorruptShardError(
                    f"{self.blob.shown}: this part of the index records {placed.size_bytes:,} "
                    f"bytes of {list(fields)}, the manifest {size_bytes:,}. {REINDEX}"
                )
            return self.blob, placed.begins
        files, extents = sidecar.files, sidecar.extents
        assert extents is not None
        begins = files.starts[extents.files] + extents.starts
        source = LocalFiles(
            self._folder,
            files.names,
            files.sizes,
            is_below=True,
            may_lack=may_lack,
            used=(begins, begins + extents.sizes),
            tally=tally,
        )
        return source, begins

    @property
    def _folder(self) -> bytes:
        assert self.root is not None
        return self.root
