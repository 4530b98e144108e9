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

from penstock.cache.disk import BLOCK_BYTES, part_name
from penstock.cache.errors import ClosedError, CorruptShardError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob, BlobSource, FileMap, ReadMode
    from penstock.cache.disk import CacheFolder, DiskCache, Fill, FolderLayout, Lookup, PinnedShare

    Bytes = NDArray[np.uint8]
    Spans = Sequence[tuple[int, int]]
    Ints = NDArray[np.int64]


class DatasetCache:
    """Access to the folder that caches a dataset's blobs; without a folder nothing is cached.

    group: the id of the dataset in the folder. label: the dataset's name in listings.
    """

    def __init__(self, cache: DiskCache | None, *, group: str, label: str) -> None:
        self._cache = cache
        self.group, self.label = group, label
        self._closed = False

    def use(self, act: Callable[[CacheFolder], Any]) -> Any:
        """Return DiskCache.use(act); None without a folder. Raises ClosedError."""
        cache = self._open()
        return cache.use(act) if cache is not None else None

    def look(self, act: Callable[[Lookup], Any]) -> Any:
        """Return DiskCache.look(act); None without a folder. Raises ClosedError."""
        cache = self._open()
        return cache.look(act) if cache is not None else None

    def _open(self) -> DiskCache | None:
        if self._closed:
            raise ClosedError(f"{self.label}: closed; create a new dataset.")
        return self._cache

    def has(self, source: BlobSource) -> bool:
        """Return True if the whole blob is on the local disk."""
        return bool(self.look(lambda lookup: lookup.has(source.key)))

    def held(self) -> dict[str, float]:
        """Return the present share of each blob of the folder by key, in [0, 1]."""
        found: dict[str, float] | None = self.look(lambda lookup: lookup.held())
        return found or {}

    def drop(self, source: BlobSource, *, inode: int | None = None) -> bool:
        """Remove a blob; return False if there was none. inode: remove only the file with this
        inode, not a newer one."""
        return bool(self.use(lambda folder: folder.trash.drop(source.key, inode=inode)))

    def give_up(self, error: Exception) -> None:
        """Stop using the folder for a while after one of DISK_ERRORS. Raises the error again if it
        isn't the disk's, or there is no folder."""
        if isinstance(error, PenstockError) or self._cache is None:
            raise error
        self._cache.give_up(error)

    def close(self) -> None:
        """Refuse all later calls. Safe to call twice."""
        self._closed = True


class DatasetJobs:
    """A dataset's live jobs in the node's cache. Safe for several threads.

    cache: the cache; None caches nothing. group, label: see DatasetCache.
    """

    def __init__(self, cache: DiskCache | None, *, group: str, label: str) -> None:
        self._cache, self._group, self._label = cache, group, label
        self._lock = threading.Lock()
        self._jobs: tuple[PinnedShare, ...] = ()

    def __len__(self) -> int:
        """Return the number of jobs that have joined and not left."""
        return len(self._jobs)

    def keeps(self, key: str) -> bool:
        """Return True if the cache would keep a blob: a job pins it, or there is no job."""
        jobs = self._jobs
        return self._cache is not None and (not jobs or any(job.pins(key) for job in jobs))

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> PinnedShare | None:
        """Begin a job; None without a cache. See Remote.join."""
        if self._cache is None:
            return None
        job = self._cache.join(self._group, label=self._label, keys=keys, sizes=sizes)
        with self._lock:
            self._jobs = (*self._jobs, job)
        return job

    def leave(self, job: PinnedShare) -> None:
        """End a job. Safe to call twice."""
        with self._lock:
            self._jobs = tuple(other for other in self._jobs if other is not job)
        job.leave()

    def close(self) -> None:
        """End all jobs. Safe to call twice."""
        for job in self._jobs:
            self.leave(job)


class CachedBlob:
    """A blob on the local disk, whole or being filled. Its map protects the file from eviction.

    fill: the blob's fill, None if the blob is whole. publish: publishes a complete fill. ensure:
    fetches spans before the buffer is read.
    """

    is_cached = True

    def __init__(
        self,
        layout: FolderLayout,
        source: BlobSource,
        mapped: FileMap,
        fill: Fill | None,
        *,
        publish: Callable[[Fill, Bytes], None],
        ensure: Callable[[CachedBlob, Spans], None],
    ) -> None:
        self.source = source
        self.fill = fill
        self.inode = mapped.inode
        self._layout = layout
        self._publish, self._ensure = publish, ensure
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
        layout, key = self._layout, self.source.key
        for folder, name in ((layout.blobs, key), (layout.fills, part_name(key))):
            with contextlib.suppress(FileNotFoundError):
                if folder.stat(name).st_ino == self.inode:
                    return True
        return False

    def settle(self) -> None:
        """Publish the fill if it is complete."""
        fill = self.fill
        if fill is not None and fill.is_whole:
            self._publish(fill, self.data)
            if self._layout.blobs.has(self.source.key):
                self.fill = None

    @property
    def path(self) -> bytes | None:
        """The path of the local file: the blob's, or its fill's."""
        whole, fill = self._layout.blob(self.source.key), self.fill
        if fill is None or self._layout.blobs.has(self.source.key):
            return os.fsencode(whole)
        return os.fsencode(fill.part)

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
        key = self.source.key
        # The fill may be published between the first two attempts.
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


class BlobOpener:
    """The opening of a dataset's blobs in the cache.

    ensure: fetches spans of a blob before its buffer is read.
    """

    def __init__(
        self,
        cache: DatasetCache,
        jobs: DatasetJobs,
        *,
        ensure: Callable[[CachedBlob, Sequence[tuple[int, int]]], None],
    ) -> None:
        self._cache, self._jobs, self._ensure = cache, jobs, ensure

    def open(self, source: BlobSource) -> CachedBlob | None:
        """Open a cached blob, or begin its fill; None if the cache doesn't keep it."""
        for _ in range(2):  # the fill may be published between _find and _begin
            found: CachedBlob | None = self._cache.look(lambda lookup: self._find(lookup, source))
            if found is None and self._jobs.keeps(source.key):
                found = self._cache.use(lambda folder: self._begin(folder, source))
            if found is not None:
                return found
        return None

    def _find(self, lookup: Lookup, source: BlobSource) -> CachedBlob | None:
        mapped = lookup.find(source.key, source.size_bytes)
        return None if mapped is None else self._blob(lookup.layout, source, mapped, None)

    def _begin(self, folder: CacheFolder, source: BlobSource) -> CachedBlob | None:
        begun = folder.writer.begin(source, group=self._cache.group, pinned=bool(self._jobs))
        if begun is None:
            return None
        fill, mapped = begun
        blob = self._blob(folder.layout, source, mapped, fill)
        blob.settle()  # the process that fetched the last piece may have died before publishing
        return blob

    def _blob(
        self, layout: FolderLayout, source: BlobSource, mapped: FileMap, fill: Fill | None
    ) -> CachedBlob:
        cache = self._cache

        def publish(fill: Fill, data: Any) -> None:
            cache.use(
                lambda folder: folder.writer.publish(
                    source, fill, data, group=cache.group, kept=False
                )
            )

        return CachedBlob(layout, source, mapped, fill, publish=publish, ensure=self._ensure)


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


def block_sums(blob: Blob, cache: DatasetCache) -> BlockSums | None:
    """Return the checks of a blob's blocks; see `Remote.block_sums`."""
    if not isinstance(blob, CachedBlob) or blob.fill is not None:
        return None
    row = cache.use(lambda folder: folder.catalogue.blobs.row(blob.source.key))
    if row is None or not blob.has_name:  # another thread may have found damage and dropped it
        raise CorruptShardError(
            f"{blob.source.uri}: its copy was removed from the cache before it was checked."
        )
    if row.crcs is None or len(row.crcs) != -(-len(blob.data) // BLOCK_BYTES) * 4:
        return None
    return BlockSums(blob, row.crcs)
