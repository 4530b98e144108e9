"""Store files in a cache folder for a single process, which can create them again.

The catalogue records them as fills that are never published. So they count towards the limit, no
other process finds them, and they are removed like any fill of a dead process.
"""

from __future__ import annotations

import threading
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.cache.base import BlobSource, FileMap, Segment
from penstock.cache.disk.space import PRIVATE

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.disk.cache_folder import CacheFolder
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.fill_files import Fill

MOST_SHARE = 0.5
"""The share of the folder's limit that private files of all processes may use."""


class PrivateFiles:
    """The private files of this process. Safe for several threads.

    cache: the cache in whose folder they are stored. uri: the dataset's URI, for listings.
    """

    def __init__(self, cache: DiskCache, *, uri: str) -> None:
        self._cache, self._uri = cache, uri
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # to be removed once they are unmapped
        self._has_removed_dead = False

    def write(self, data: memoryview) -> tuple[Any, Callable[[], None]] | None:
        """Write bytes to a new file; None if the folder lacks free bytes or can't be used.

        Return the map as a read-only pyarrow buffer, and a function that removes the file once it
        is unmapped; its space is used until then.
        """
        key, size_bytes = uuid.uuid4().hex + uuid.uuid4().hex[:8], data.nbytes
        segment = Segment(path="", size_bytes=size_bytes, version=None)
        source = BlobSource(key=key, uri=self._uri, segments=[segment], size_bytes=size_bytes)

        def begin(folder: CacheFolder) -> tuple[Fill, FileMap] | None:
            if not self._has_removed_dead:
                self._has_removed_dead = True
                folder.space.remove_fills(group=PRIVATE)
            used_bytes = folder.catalogue.group_bytes(PRIVATE)
            if used_bytes + size_bytes > MOST_SHARE * folder.max_bytes:
                return None
            return folder.begin(source, group=PRIVATE, pinned=False)

        self.remove_unmapped()
        begun = self._cache.use(begin)
        if begun is None:
            return None
        fill, mapped = begun
        buffer, remove = mapped.buffer(), partial(self._remove, key)
        del begun, mapped  # else this frame keeps the map
        try:
            fill.write((0, fill.pieces.count), data)
        except OSError:
            del buffer
            remove()
            return None
        finally:
            fill.close()
        return buffer, remove

    def _remove(self, key: str) -> None:
        with self._lock:
            self._waiting.add(key)
        self.remove_unmapped()

    def remove_unmapped(self) -> None:
        """Remove the files that were given up and aren't mapped any more; others are removed after
        this process has ended."""
        with self._lock:
            waiting, self._waiting = self._waiting, set()
        if not waiting:
            return

        def remove(folder: CacheFolder) -> set[str]:
            with folder.catalogue.writing():
                return {key for key in waiting if not folder.space.remove_fill(key)}

        left = self._cache.use(remove)
        with self._lock:
            self._waiting |= waiting if left is None else left
