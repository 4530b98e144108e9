"""Open the blobs that the node's cache keeps for one dataset.

Blobs belong to the dataset's group in the folder. The jobs of this process that read the dataset
decide which blobs are kept. A cached blob is read through a map of its file, which is complete or
being filled.

`BlockSums` checks each block of a whole blob at its first read. It serves samples without checksums
of their own: the bytes as they were received are trusted, and later damage by the disk is detected.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.cache.disk import BLOCK_BYTES
from penstock.cache.errors import ClosedError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import BlobSource, FileMap, ReadMode
    from penstock.cache.disk import (
        CacheFolder,
        DiskCache,
        Fill,
        FolderLayout,
        PinnedShare,
        ReadableFolder,
    )

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]
    Ints = NDArray[np.int64]


class DatasetCache:
    """The blobs of a dataset in the node's cache, and the dataset's live jobs.

    cache: the cache; without one nothing is cached. group: the id of the dataset in the folder.
    label: the dataset's name in listings. jobs: those that have joined and not left. Safe for
    several threads.
    """

    def __init__(self, cache: DiskCache | None, *, group: str, label: str) -> None:
        self._cache = cache
        self.group, self.label = group, label
        self._lock = threading.Lock()
        self.jobs: tuple[PinnedShare, ...] = ()
        self._closed = False

    def use(self, act: Callable[[CacheFolder], Any]) -> Any:
        """Return DiskCache.use(act); None without a folder. Raises ClosedError."""
        cache = self._open_cache()
        return cache.use(act) if cache is not None else None

    def look(self, act: Callable[[ReadableFolder], Any]) -> Any:
        """Return DiskCache.look(act); None without a folder. Raises ClosedError."""
        cache = self._open_cache()
        return cache.look(act) if cache is not None else None

    def _open_cache(self) -> DiskCache | None:
        if self._closed:
            raise ClosedError(f"{self.label}: closed; create a new dataset.")
        return self._cache

    def open(
        self, source: BlobSource, *, ensure: Callable[[CachedBlob, Spans], None]
    ) -> CachedBlob | None:
        """Open a cached blob, or begin its fill; None if the cache doesn't keep it. ensure: fetches
        spans of the blob before its buffer is read."""

        def find(folder: ReadableFolder) -> CachedBlob | None:
            mapped = folder.find(source.key, source.size_bytes)
            if mapped is None:
                return None
            return CachedBlob(self, folder.layout, source, mapped, None, ensure=ensure)

        def begin(folder: CacheFolder) -> CachedBlob | None:
            begun = folder.begin(source, group=self.group, pinned=bool(self.jobs))
            if begun is None:
                return None
            fill, mapped = begun
            blob = CachedBlob(self, folder.layout, source, mapped, fill, ensure=ensure)
            blob.settle()  # the process that fetched the last piece may have died before publishing
            return blob

        for _ in range(2):  # the fill may be published between find and begin
            found: CachedBlob | None = self.look(find)
            if found is None and self.keeps(source.key):
                found = self.use(begin)
            if found is not None:
                return found
        return None

    def drop(self, source: BlobSource, *, inode: int | None = None) -> bool:
        """Remove a blob; return False if there was none. inode: remove only the file with this
        inode, not a newer one."""
        return bool(self.use(lambda folder: folder.space.drop(source.key, inode=inode)))

    def give_up(self, error: Exception) -> None:
        """Stop using the folder for a while after one of DISK_ERRORS. Raises the error again if it
        isn't the disk's, or there is no folder."""
        if isinstance(error, PenstockError) or self._cache is None:
            raise error
        self._cache.give_up(error)

    # -- jobs

    def keeps(self, key: str) -> bool:
        """Return True if the cache would keep a blob: a job pins it, or there is no job."""
        jobs = self.jobs
        return self._cache is not None and (not jobs or any(job.pins(key) for job in jobs))

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> PinnedShare | None:
        """Begin a job; None without a cache. See Remote.join."""
        if self._cache is None:
            return None
        job = self._cache.join(self.group, label=self.label, keys=keys, sizes=sizes)
        with self._lock:
            self.jobs = (*self.jobs, job)
        return job

    def leave(self, job: PinnedShare) -> None:
        """End a job. Safe to call twice."""
        with self._lock:
            self.jobs = tuple(other for other in self.jobs if other is not job)
        job.leave()

    def close(self) -> None:
        """End all jobs, and refuse all later calls. Safe to call twice."""
        for job in self.jobs:
            self.leave(job)
        self._closed = True


class CachedBlob:
    """A blob on the local disk, whole or being filled. Its map protects the file from eviction.

    fill: the blob's fill, None if the blob is whole. ensure: fetches spans before the buffer is
    read.
    """

    is_cached = True

    def __init__(
        self,
        cache: DatasetCache,
        layout: FolderLayout,
        source: BlobSource,
        mapped: FileMap,
        fill: Fill | None,
        *,
        ensure: Callable[[CachedBlob, Spans], None],
    ) -> None:
        self.source, self.fill = source, fill
        self.inode = mapped.inode
        self._cache, self._layout, self._ensure = cache, layout, ensure
        self._buffer = mapped.buffer()
        self._address = mapped.address
        self.data: Bytes = np.frombuffer(self._buffer, np.uint8)

    @property
    def is_whole(self) -> bool:
        """True if all bytes are present."""
        fill = self.fill
        return fill is None or fill.is_whole

    @property
    def has_name(self) -> bool:
        """False once the cache has removed the file; its space is free when this map is closed."""
        for folder, name in self._layout.places(self.source.key):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat(name).st_ino == self.inode:
                    return True
        return False

    def settle(self) -> None:
        """Publish the fill if it is complete."""
        fill = self.fill
        if fill is not None and fill.is_whole:
            cache, source, data = self._cache, self.source, self.data
            cache.use(lambda folder: folder.publish(source, fill, data, group=cache.group))
            if self._layout.blobs.has(self.source.key):
                self.fill = None

    def buffer(self, spans: Spans) -> Any:
        """Return a buffer in which at least these spans are filled; see `Blob.buffer`."""
        self._ensure(self, spans)
        return self._buffer

    def address(self) -> int | None:
        """Return the address of the map, for madvise."""
        return self._address

    def views(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Return spans as views of the map."""
        data = self.data
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]

    def copies(self, starts: Sequence[int], ends: Sequence[int]) -> list[Bytes]:
        """Return spans as copies read from the file. Raises OSError, EOFError (the file is too
        short)."""
        found: list[Bytes] = []
        fd = self._reopened()
        if fd is None:  # removed meanwhile: a file without a name can't be truncated
            return [view.copy() for view in self.views(starts, ends)]
        try:
            for start, end in zip(starts, ends, strict=True):
                copy = np.empty(end - start, np.uint8)
                view, got = copy.data, 0
                while got < len(view) and (more := os.preadv(fd, [view[got:]], start + got)):
                    got += more
                if got < len(view):
                    raise EOFError(f"{self.source.uri}: its copy ends before byte {end}")
                copy.flags.writeable = False
                found.append(copy)
        finally:
            os.close(fd)
        return found

    def _reopened(self) -> int | None:
        """Open the mapped file again; None if it was removed."""
        places = self._layout.places(self.source.key)
        for folder, name in (*places, places[0]):  # the fill may be published meanwhile
            with contextlib.suppress(FileNotFoundError):
                fd = folder.open(name)
                if os.fstat(fd).st_ino == self.inode:
                    return fd
                os.close(fd)
        return None


class BlockSums:
    """The checks of the blocks of one blob, each made at its first read.

    crcs: the checksums of the blocks, from the catalogue. Safe for several threads, two of which
    may check the same block.
    """

    def __init__(self, blob: CachedBlob, crcs: bytes) -> None:
        self._blob = blob
        self._wanted = np.frombuffer(crcs, "<u4")
        self._is_right = np.zeros(len(self._wanted), np.bool_)
        self._are_all_right = False

    def are_right(self, starts: Ints, ends: Ints, mode: ReadMode) -> bool:
        """Return True if the blocks that hold bytes [starts, ends) of the blob have right
        checksums.

        starts, ends: int64, shape (n,). mode: "pread" reads the file, and raises OSError, EOFError.
        """
        if self._are_all_right:
            return True
        some = ends > starts
        low, high = starts[some] // BLOCK_BYTES, (ends[some] - 1) // BLOCK_BYTES
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            for block in range(first, last + 1):
                if not self._is_right[block] and not self._check(block, mode):
                    return False
        self._are_all_right = bool(self._is_right.all())
        return True

    def _check(self, block: int, mode: ReadMode) -> bool:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, len(self._blob.data))
        read = self._blob.copies if mode == "pread" else self._blob.views
        (data,) = read([start], [end])
        self._is_right[block] = crc32c(data) == self._wanted[block]
        return bool(self._is_right[block])
