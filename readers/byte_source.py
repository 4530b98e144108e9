"""Read the bytes of a shard from local files. `blob_source` reads them from a blob of the cache. No
other module knows which of them it reads.

A format opens the `ByteSource` of a shard at a `ShardPlace`. Positions count from the shard's first
byte; several files lie end to end, as in a blob.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError, IndexChangedError, ReadError
from penstock.cache.base import FileMap, machine_remedy, read_error
from penstock.readers.files import advise_willneed, below, only_the_tail, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import ReadMode, Segment
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Room = Callable[[tuple[int, ...], np.dtype[Any]], NDArray[Any]]
    Unread: TypeAlias = "Encoded | FileSpan"

REINDEX = "Run `penstock index` on the dataset again."

# A process may have 65,530 maps, and a dataset has 1,024 open shards. If a shard has many small
# files, none is mapped, because reading them costs less.
_MOST_MAPPED, _LEAST_BYTES = 4, 16 * 2**20

STEP_BYTES = 4 * 2**20
"""Bytes that are read, then checksummed while they are in the processor's cache. Smaller steps
would be a little faster (256 KiB: 3 %), but a thread needs the GIL between two steps, which a
training loop may hold for milliseconds."""

_BYTES = np.dtype(np.uint8)
NO_BYTES: Encoded = np.frombuffer(b"", np.uint8)


# -- files


def open_file(path: bytes, name: bytes) -> int:
    """Open a file for reading and return its descriptor. name: in the dataset. Raises
    IndexChangedError if the file is gone, and ReadError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise changed_file_error(name, "it is gone") from None
    except OSError as error:
        raise unreadable_file_error(path, error) from error


def read_up_to(fd: int, into: Encoded, offset: int = 0) -> int:
    """Fill an array from an offset of a file and return the bytes read, fewer if the file ends.
    Raises OSError."""
    view, got = into.data, 0
    while got < len(view) and (more := os.preadv(fd, [view[got:]], offset + got)):
        got += more
    return got


def changed_file_error(name: bytes, what: str) -> IndexChangedError:
    """Return the error for a file that differs from the one that was listed or indexed."""
    return IndexChangedError(
        f"{printable(name)}: changed since it was listed: {what}. Restore it, or use the folder "
        f"as it is now: {REINDEX}"
    )


def unreadable_file_error(path: bytes, error: OSError) -> ReadError | DatasetError:
    """Return the error for a file that exists and can't be read: a fault of the machine, or not a
    file.

    path: absolute, because mounts and permissions are looked up by path.
    """
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return DatasetError(
        f"{printable(path)}: can't be read as a file ({error.strerror or error}). Restore "
        "the file, or remove it from the dataset."
    )


class FileSpan(NamedTuple):  # creating a frozen dataclass takes a microsecond more
    """Bytes [start, start + size_bytes) of a file, which are read later, directly into the memory
    in which they are needed. name: for messages. is_rest: True if the file must end with them; the
    call that reads the end notices a file that has grown.

    Methods raise IndexChangedError if the file is gone or has another size, DatasetError and
    ReadError if it can't be read.
    """

    path: bytes
    name: bytes
    start: int
    size_bytes: int
    is_rest: bool = False

    def read(self) -> Encoded:
        """Return the bytes in memory of their own."""
        slot = np.empty(self.size_bytes + 1, np.uint8)
        fd = open_file(self.path, self.name)
        try:
            got = read_up_to(fd, slot if self.is_rest else slot[:-1], self.start)
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        finally:
            os.close(fd)
        if got != self.size_bytes:
            raise self._changed("more" if got > self.size_bytes else self.start + got)
        slot.flags.writeable = False
        return slot[:-1]

    def copy(self, slot: Encoded, begin: int) -> int:
        """Fill a slot with the bytes from `begin` onwards and return their CRC-32C."""
        crc, fd = 0, open_file(self.path, self.name)
        try:
            for at in range(0, len(slot), STEP_BYTES):
                crc = self._copy_step(fd, slot[at : at + STEP_BYTES], begin + at, crc)
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        finally:
            os.close(fd)
        return crc

    def _copy_step(self, fd: int, slot: Encoded, begin: int, crc: int) -> int:
        size_bytes, view, offset = len(slot), slot.data, self.start + begin
        beyond = bytearray(self.is_rest and begin + size_bytes == self.size_bytes)
        got = os.preadv(fd, [view, beyond], offset)
        while 0 < got < size_bytes and (new := os.preadv(fd, [view[got:], beyond], offset + got)):
            got += new
        if got != size_bytes:
            raise self._changed("more" if got > size_bytes else os.fstat(fd).st_size)
        return int(crc32c(slot, crc))

    def _changed(self, now: int | str) -> IndexChangedError:
        had = self.start + self.size_bytes
        return changed_file_error(self.name, f"it had {had} bytes and now has {now}")


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


# -- sources


class SourceSpans(NamedTuple):
    """Spans [start, end) of the bytes of one source."""

    source: ByteSource
    starts: Sequence[int]
    ends: Sequence[int]


class ByteSource(ABC):
    """The bytes of one shard. Safe for several threads. Views outlive the source.

    shown: its path or address, for messages. size_bytes: of the shard. is_mapped: True if spans are
    views of mapped files, whose bytes may change, unless the mode is "pread". is_kept: True if
    bytes that are read stay on the local disk. may_map: False if `view` always returns None.
    has_lasting_maps: True if views may be read at any time, uncounted. inode: of the cached file;
    None for other sources. remedy: what to do if the shard can't be parsed; "" for files, whose
    format knows it.

    Methods raise IndexChangedError, CorruptShardError, DatasetError, ReadError or FetchError.
    """

    shown: str
    size_bytes: int
    is_mapped: bool = True
    is_kept: bool = True
    may_map: bool = True
    has_lasting_maps: bool = True
    inode: int | None = None
    remedy: str = ""

    @property
    def is_whole(self) -> bool:
        """Return True if all bytes are on the local disk."""
        return True

    @property
    def is_outdated(self) -> bool:
        """Return True if the bytes are read past the cache, and are in the cache by now."""
        return False

    @property
    def is_spare(self) -> bool:
        """Return True if the cache needn't keep the bytes for this process, or has removed them."""
        return False

    # -- spans of samples

    @abstractmethod
    def load(self, wanted: Sequence[SourceSpans], mode: ReadMode) -> list[list[Unread]]:
        """Return the bytes of spans of several sources of one dataset, including this one,
        read-only. What is missing is fetched by one call, in parallel. A span of a file that isn't
        mapped is returned unread, as a `FileSpan`."""

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read these mapped bytes ahead. Returns at once."""
        del starts, ends

    # -- parts of chunks

    @abstractmethod
    def read_parts(self, starts: Ints, ends: Ints, room: Room, mode: ReadMode) -> list[Encoded]:
        """Return bytes [start, end), read-only; empty if the file is missing and may be. room:
        returns memory, into which neighbours are read by one call."""

    @abstractmethod
    def fill(self, starts: Sequence[int], slots: Sequence[Encoded], mode: ReadMode) -> None:
        """Read bytes into slots of their sizes, each by a read of its own."""

    @abstractmethod
    def view(self, start: int, end: int, *, touched_bytes: int) -> Encoded | None:
        """Return a view of mapped bytes; None if they aren't mapped. touched_bytes: the number of
        them that will be accessed, for the statistics."""

    def check(self, starts: Ints, ends: Ints, mode: ReadMode) -> None:
        """Check the blocks of loaded bytes [start, end), each once. Raises CorruptShardError if the
        local disk returned wrong bytes."""
        del starts, ends, mode

    # -- parsing

    @abstractmethod
    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
        """Return a read-only pyarrow buffer of the shard's size that holds at least these spans
        [start, end), after fetching missing ones. For parsing headers and footers."""

    def parsing(self) -> AbstractContextManager[None]:
        """Return a context in which the end of the buffer is parsed: the kernel reads it ahead,
        and little around other bytes."""
        return nullcontext()

    # -- missing and wrong bytes

    def bring(self, wanted: Sequence[SourceSpans], *, here: int) -> None:
        """Fetch spans of kept sources of one dataset, including this one, to the local disk by one
        call. here: the number of other samples that are there, for the statistics."""
        del wanted, here

    def refuse(self, error: Exception, attempt: int) -> None:
        """Raise an error of reading, unless the bytes should be fetched again. attempt: counts the
        errors of one read, from 0."""
        del attempt
        raise error

    def has_other_bytes(self, attempt: int) -> bool:
        """Return True if wrong bytes should be fetched again."""
        del attempt
        return False

    def counted(self, size_bytes: int) -> int:
        """Return the bytes read that the caller counts as read from the local disk."""
        return size_bytes


class FileList(Protocol):
    """The files of a shard, in order. starts: of each file if they lie end to end, and the end."""

    @property
    def names(self) -> Sequence[bytes]: ...

    @property
    def sizes(self) -> Ints: ...

    @property
    def starts(self) -> Ints: ...


class PlacedParts(Protocol):
    """Parts of files that lie end to end in a blob. begins: the first byte of each part of the
    shard, below 0 for a part outside of the blob."""

    begins: Ints
    size_bytes: int

    def segments(self, *, may_lack: bool) -> Sequence[Segment]:
        """Return the objects that make up the blob."""


class PartsSource(NamedTuple):
    """A source of the parts of a shard of chunks. begins: the first byte of each part, below 0 if
    the source lacks it. beyond: opens a source of such parts, which aren't kept."""

    source: ByteSource
    begins: Ints
    beyond: Callable[[PlacedParts], ByteSource] | None


class ShardPlace(Protocol):
    """The place of a shard: a local folder, or a blob of the cache."""

    def file(
        self, name: bytes, size_bytes: int, *, is_below: bool, errors: FileErrors | None = None
    ) -> ByteSource:
        """Open a shard that is one file. is_below: refuse links that lead out of the folder.
        errors: of a local file."""

    def files(self, files: FileList) -> ByteSource:
        """Open a shard of several files."""

    def parts(
        self,
        files: FileList,
        begins: Ints,
        sizes: Ints,
        *,
        placed: Callable[[], PlacedParts],
        may_lack: bool,
    ) -> PartsSource:
        """Open a shard of chunks. begins, sizes: of its parts if its files lie end to end. placed:
        returns where they lie in a blob. may_lack: a missing file is no error. Raises
        CorruptShardError."""


class LocalPlace:
    """A local folder with the files of shards. Implements `ShardPlace`."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def file(
        self, name: bytes, size_bytes: int, *, is_below: bool, errors: FileErrors | None = None
    ) -> ByteSource:
        """Map the file."""
        sizes = np.array([size_bytes], np.int64)
        return LocalFiles(
            self._root, [name], sizes, is_mapped=True, is_below=is_below, errors=errors
        )

    def files(self, files: FileList) -> ByteSource:
        """Return the files, which are opened when they are read."""
        return LocalFiles(self._root, files.names, files.sizes)

    def parts(
        self,
        files: FileList,
        begins: Ints,
        sizes: Ints,
        *,
        placed: Callable[[], PlacedParts],
        may_lack: bool,
    ) -> PartsSource:
        """Return the files, which have all parts."""
        del placed
        source = LocalFiles(
            self._root,
            files.names,
            files.sizes,
            is_below=True,
            may_lack=may_lack,
            used=(begins, begins + sizes),
        )
        return PartsSource(source, begins, None)


class LocalFiles(ByteSource):
    """The bytes of a shard in files of a local folder. It holds no file descriptor.

    One file that is a shard is mapped as a whole. Other files are opened each time that they are
    read, and parts of them are mapped when they are viewed, unless that costs more than reading.
    """

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
        errors: FileErrors | None = None,
    ) -> None:
        """is_mapped: map the only file now. is_below: refuse links that lead out of root. may_lack:
        a missing file is no error. used: bytes [start, end) outside of which files aren't
        mapped."""
        self._folder, self._root = os.path.join(root, b""), root
        self._names, self._sizes = names, sizes
        self.shown = printable(self._folder + names[0]) if len(names) == 1 else printable(root)
        self.is_mapped = is_mapped
        self._bounds = np.zeros(len(names) + 1, np.int64)
        np.cumsum(sizes, out=self._bounds[1:])
        # Indexing a memoryview returns plain integers, and takes 8 bytes for each.
        self._starts = memoryview(self._bounds)  # type: ignore[arg-type]
        self.size_bytes = self._starts[-1]
        self.may_map = len(names) <= _MOST_MAPPED or self.size_bytes >= _LEAST_BYTES
        # Checked once per file, as it costs as much as a read.
        self._is_below = bytearray([not is_below]) * len(names)
        self._may_lack, self._used = may_lack, used
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

    # -- reading

    def load(self, wanted: Sequence[SourceSpans], mode: ReadMode) -> list[list[Unread]]:
        """Return views of maps, and spans of other files."""
        return [each.source._spans(each.starts, each.ends, mode) for each in wanted]  # type: ignore[attr-defined]

    def _spans(self, starts: Sequence[int], ends: Sequence[int], mode: ReadMode) -> list[Unread]:
        if not self.is_mapped:
            return [self._span(start, end) for start, end in zip(starts, ends, strict=True)]
        if mode != "pread":
            data = self._data
            return [data[start:end] for start, end in zip(starts, ends, strict=True)]
        slots = [np.empty(end - start, np.uint8) for start, end in zip(starts, ends, strict=True)]
        self.fill(starts, slots, mode)
        for slot in slots:
            slot.flags.writeable = False
        return [*slots]

    def _span(self, start: int, end: int) -> FileSpan:
        file = self._find(start)
        begin, is_rest = self._starts[file], end == self._starts[file + 1]
        return FileSpan(self._path(file), self._names[file], start - begin, end - start, is_rest)

    def fill(self, starts: Sequence[int], slots: Sequence[Encoded], mode: ReadMode) -> None:
        """Read bytes past any map; each file is opened once. Raises IndexChangedError for a missing
        file even if it may be missing."""
        del mode
        order = sorted(range(len(slots)), key=starts.__getitem__)
        for file, places in _runs(order, [self._find(start) for start in starts]):
            fd = self._open(file)
            try:
                for place in places:
                    self._fill(fd, file, starts[place] - self._starts[file], slots[place])
            finally:
                if fd >= 0:
                    os.close(fd)

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

    def read_parts(self, starts: Ints, ends: Ints, room: Room, mode: ReadMode) -> list[Encoded]:
        """Read parts of files, neighbours and overlapping parts by one call."""
        del mode
        lows: list[int] = starts.tolist()
        highs: list[int] = ends.tolist()
        found: list[Encoded] = [NO_BYTES] * len(lows)
        if len(lows) == 1:
            order, files = [0], [self._find(lows[0])]
        else:
            order = np.argsort(starts, kind="stable").tolist()
            files = np.searchsorted(self._bounds[1:-1], starts, side="right").tolist()
        for file, places in _runs(order, files):
            fd = self._open(file)
            if fd < 0:
                continue
            try:
                at = 0
                while at < len(places):
                    first, end = at, highs[places[at]]
                    at += 1
                    while at < len(places) and lows[places[at]] <= end:
                        end = max(end, highs[places[at]])
                        at += 1
                    low = lows[places[first]]
                    data = room((end - low,), _BYTES)
                    self._fill(fd, file, low - self._starts[file], data)
                    data.flags.writeable = False
                    for place in places[first:at]:
                        found[place] = data[lows[place] - low : highs[place] - low]
            finally:
                os.close(fd)
        return found

    # -- maps

    def advise(self, starts: Ints, ends: Ints) -> None:
        """Ask the kernel to read these pages ahead; files that aren't mapped are read by one
        call."""
        if self.is_mapped:
            advise_willneed(self._address + starts, self._address + ends)

    def buffer(self, spans: Sequence[tuple[int, int]]) -> Any:
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
        mapped = None if start == end else self._map_file(file, start, end)
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


def _runs(order: Sequence[int], files: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return each file with its places, in order. order: places, those of one file together."""
    runs: list[tuple[int, list[int]]] = []
    for place in order:
        if not runs or runs[-1][0] != files[place]:
            runs.append((files[place], []))
        runs[-1][1].append(place)
    return runs
