"""A blob on the local disk, read through a map. It fetches nothing itself."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.disk.fill_marks import part_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.folders import Folder
    from penstock.cache.base.mapping import Map
    from penstock.cache.disk.fills import Fill
    from penstock.cache.disk.layout import Layout

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]


class CachedBlob:
    """A cached blob lies on the local disk, whole or being filled.

    Its map keeps the file from eviction. publish: makes a whole fill a blob that others find;
    ensure: brings spans before the buffer is read. inode: of the file that is mapped.
    """

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
        """Whether every byte is here."""
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
        """The path of the local file, whole or being filled."""
        whole, fill = self._layout.blob(self.source.key), self.fill
        if fill is None or self._layout.blobs.has(self.source.key):
            return os.fsencode(whole)
        return os.fsencode(fill.part)

    def buffer(self, spans: Spans) -> Any:
        """A buffer in which at least these spans are filled, as `Blob.buffer` says."""
        self._ensure(self, spans)
        return self._buffer

    def address(self) -> int | None:
        """Where the file is mapped, for madvise."""
        return self._address

    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Give spans as views of the map."""
        data = self.data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def copies(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Give the same by reading the file. Raises OSError, EOFError (the file is too short)."""
        found: list[Bytes] = []
        fd = self._reopened()
        if fd is None:  # taken out meanwhile: nobody can truncate what has no name
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
