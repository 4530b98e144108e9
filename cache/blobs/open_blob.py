"""Open blobs: cached ones, which are read through a map, and passing ones, which are kept nowhere.

Neither fetches: `cache.blobs.remote` does, for many blobs at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.disk.fills import part_name
from penstock.cache.fetch.object_range import ObjectRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.folders import Folder
    from penstock.cache.base.mapping import Map
    from penstock.cache.disk.fills import Fill
    from penstock.cache.disk.layout import Layout

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]

_MAP_NORESERVE = 0x4000  # Linux; Python's module names it from 3.12 on


class CachedBlob:
    """A blob on the local disk, whole or being filled. The map keeps its file from eviction."""

    is_cached = True

    def __init__(
        self,
        layout: Layout,
        source: BlobSource,
        mapped: Map,
        fill: Fill | None,
        *,
        inode: int,
        publish: Callable[[Fill, Bytes], None],
        ensure: Callable[[CachedBlob, Spans], None],
    ) -> None:
        self.source = source
        self.fill = fill
        self.inode = inode
        self._layout = layout
        self._publish, self._ensure = publish, ensure
        self._buffer = mapped.buffer()
        self._address = mapped.address
        self.data: Bytes = np.frombuffer(self._buffer, np.uint8)

    @property
    def is_whole(self) -> bool:
        fill = self.fill
        return fill is None or fill.is_whole

    @property
    def has_name(self) -> bool:
        """False once it was taken out of the cache: its room is free when this is let go."""
        return any(
            _inode(folder, name) == self.inode
            for folder, name in (
                (self._layout.blobs, self.source.key),
                (self._layout.fills, part_name(self.source.key)),
            )
        )

    def settle(self) -> None:
        """If the fill has become whole, publish it and forget it."""
        fill = self.fill
        if fill is not None and fill.is_whole:
            self._publish(fill, self.data)
            if self._layout.blobs.has(self.source.key):
                self.fill = None

    @property
    def path(self) -> bytes | None:
        whole, fill = self._layout.blob(self.source.key), self.fill
        if fill is None or self._layout.blobs.has(self.source.key):
            return os.fsencode(whole)
        return os.fsencode(fill.part)

    def buffer(self, spans: Spans) -> Any:
        """See Blob."""
        self._ensure(self, spans)
        return self._buffer

    def address(self) -> int | None:
        """See Blob."""
        return self._address

    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Views of the map."""
        data = self.data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def copies(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """The same by reading the file. Raises OSError, EOFError (the file is too short)."""
        found: list[Bytes] = []
        fd = self._reopened()
        if fd is None:  # taken out meanwhile: nobody can cut what has no name
            return [view.copy() for view in self.views(starts, ends)]
        try:
            for start, end in zip(starts, ends, strict=True):
                room = np.empty(end - start, np.uint8)
                view, got = room.data, 0
                while got < len(view) and (more := os.preadv(fd, [view[got:]], start + got)):
                    got += more
                if got < len(view):
                    raise EOFError(f"{self.source.uri}: its copy ends before byte {end}")
                room.flags.writeable = False
                found.append(room)
        finally:
            os.close(fd)
        return found

    def _reopened(self) -> int | None:
        """A descriptor of the file that is mapped; None if it has no name any more."""
        key = self.source.key
        # It may be published between the two looks.
        for folder, name in (
            (self._layout.blobs, key),
            (self._layout.fills, part_name(key)),
            (self._layout.blobs, key),
        ):
            with contextlib.suppress(FileNotFoundError):
                fd = folder.open(name)
                if os.fstat(fd).st_ino == self.inode:
                    return fd
                os.close(fd)
        return None


def _inode(folder: Folder, name: str) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return folder.stat(name).st_ino
    return None


class PassingBlob:
    """A blob that isn't kept: its bytes come from the remote each time."""

    is_cached = False
    is_whole = False
    path: bytes | None = None

    def __init__(self, source: BlobSource, fetch: Callable[[PassingBlob, Spans], None]) -> None:
        self.source = source
        self.version: str | None = None  # of the first answer, where the source doesn't say
        self._fetch = fetch
        self._memory: mmap.mmap | None = None
        sizes = (
            [segment.size_bytes for segment in source.segments] if len(source.segments) > 1 else [0]
        )
        self._starts = np.cumsum([0, *sizes[:-1]])  # where each segment begins

    def spans(self, start: int, end: int) -> Iterator[ObjectRange]:
        """Bytes [start, end) of the blob as spans of its segments."""
        segments = self.source.segments
        place = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < end:
            segment, begin = segments[place], int(self._starts[place])
            upto = min(end, begin + segment.size_bytes) if len(segments) > 1 else end
            version = segment.version or (self.version if len(segments) == 1 else None)
            if upto > start:
                yield ObjectRange(
                    path=segment.path, start=start - begin, end=upto - begin, version=version
                )
            start, place = max(start, upto), place + 1

    def buffer(self, spans: Spans) -> Any:
        """See Blob. Pages that nobody asked for take no memory."""
        import pyarrow as pa

        if self._memory is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, self.source.size_bytes, flags=flags)
        self._fetch(self, spans)
        return pa.py_buffer(memoryview(self._memory).toreadonly())

    def put(self, start: int, data: Any) -> None:
        """Bytes for the buffer."""
        assert self._memory is not None
        view = memoryview(data)
        self._memory[start : start + len(view)] = view

    def address(self) -> int | None:
        """See Blob."""
        return None
