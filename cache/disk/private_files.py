"""Keep files in a cache folder for one process alone: what it made, and can make again.

They are entered into the catalogue as fills that nobody publishes, so they count towards the limit,
are never found by another process, and are removed like any fill that a dead process left.
"""

from __future__ import annotations

import os
import threading
import uuid
from typing import TYPE_CHECKING, Any

from penstock.cache.base import BlobSource, Segment
from penstock.cache.disk.eviction import PRIVATE

if TYPE_CHECKING:
    from penstock.cache.base import FileMap
    from penstock.cache.disk.cache_folder import CacheFolder
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.fill_files import Fill

MOST_SHARE = 0.5
"""Of the folder's limit, what such files of all processes take: the rest is the blobs'."""


class PrivateFile:
    """A file that was just made, of zeros. buffer: its map, as a read-only pyarrow buffer."""

    def __init__(self, files: PrivateFiles, key: str, fill: Fill, map: FileMap) -> None:
        self._files, self._key, self._fill = files, key, fill
        self._map: FileMap | None = map
        self.size_bytes = fill.pieces.size_bytes

    def buffer(self) -> Any:
        """Its map, which keeps the file's room as long as anything looks into it."""
        assert self._map is not None
        return self._map.buffer()

    def write(self, data: memoryview, at: int = 0) -> None:
        """Write bytes to their place. Raises OSError."""
        while data:
            done = os.pwrite(self._fill.fd, data, at)
            data, at = data[done:], at + done

    def end(self) -> None:
        """Write no more."""
        self._fill.close()

    def remove(self) -> None:
        """Remove it, now or when nobody looks into its map any more."""
        self._fill.close()
        self._map = None
        self._files.remove(self._key)


class PrivateFiles:
    """Makes such files of one process. Safe for several threads.

    cache: whose folder and limit it is; uri: of what they belong to, for people.
    """

    def __init__(self, cache: DiskCache, *, uri: str) -> None:
        self._cache, self._uri = cache, uri
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # to be removed, and perhaps mapped still
        self._has_swept = False

    def make(self, size_bytes: int) -> PrivateFile | None:
        """A new file; None where the folder has no room for it, or can't be used."""
        key = uuid.uuid4().hex + uuid.uuid4().hex[:8]
        segment = Segment(path="", size_bytes=size_bytes, version=None)
        source = BlobSource(key=key, uri=self._uri, segments=[segment], size_bytes=size_bytes)

        def begin(shelf: CacheFolder) -> tuple[Fill, FileMap] | None:
            if not self._has_swept:
                self._has_swept = True
                shelf.leftovers.remove_private()
            taken = shelf.catalogue.blobs.group_bytes(PRIVATE)
            if taken + size_bytes > MOST_SHARE * shelf.max_bytes:
                return None
            return shelf.filling.begin(source, group=PRIVATE, pinned=False)

        self._remove_waiting()
        found = self._cache.use(begin)
        return None if found is None else PrivateFile(self, key, *found)

    def remove(self, key: str) -> None:
        """Remove a file, as soon as nobody has it mapped."""
        with self._lock:
            self._waiting.add(key)
        self._remove_waiting()

    def _remove_waiting(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        if not waiting:
            return

        def remove(shelf: CacheFolder) -> set[str]:
            blobs = shelf.catalogue.blobs
            with shelf.catalogue.writing():
                rows = {key: blobs.row(key) for key in waiting}
                return {
                    key
                    for key, row in rows.items()
                    if row is not None and not shelf.leftovers.remove_fill(row)
                }

        left = self._cache.use(remove)
        with self._lock:
            self._waiting |= waiting if left is None else left

    def close(self) -> None:
        """Remove what nobody looks into any more; the rest goes as what a dead process left."""
        self._remove_waiting()
