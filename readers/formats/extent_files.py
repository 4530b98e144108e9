"""Reading extents of local files: a file is opened once for what is wanted of it, or mapped."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.mapping import Map
from penstock.cache.errors import IndexChangedError
from penstock.readers.files.names import below
from penstock.readers.formats.local_files import changed, open_file, read_up_to, unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.readers.formats.chunk_memory import ChunkMemory
    from penstock.readers.formats.chunked_shard import Extents
    from penstock.readers.formats.shard import Ints
    from penstock.readers.formats.shard_files import ShardFiles
    from penstock.readers.types import Encoded

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
            raise changed(name, "it is gone")
        try:
            got = read_up_to(fd, into, begin)
        except OSError as error:
            raise unreadable(self._path(file), error) from error
        if got < len(into):
            raise changed(name, f"it had {begin + len(into)} bytes or more and has {begin + got}")
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
                raise changed(name, f"it had {size_bytes} bytes, now {now}")
            mapped = Map(fd, span=(start, end))
        except OSError as error:
            raise unreadable(self._path(file), error) from error
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
