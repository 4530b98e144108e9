"""Fetch the small objects of a dataset (manifests and sidecars of an index), and look names up.

Small objects are fetched whole, into the cache once per node, or into a temporary folder of the
process. The cache also stores the store's last answer about each name, which is used while the
store can't be reached.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from penstock.cache.base import BlobSource, Folder, ObjectInfo, Segment, blob_key, remove_own_folder
from penstock.cache.errors import FetchError, PenstockWarning

if TYPE_CHECKING:
    from penstock.cache.base import FileMap
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.upstream import FillFailures
    from penstock.cache.disk import CacheFolder, PieceSpan, ReadableFolder
    from penstock.cache.fetch import Fetcher

_MOST_HELD = 1024
_KNOWN_LIMIT_S = 5.0
"""Seconds to wait for the store if its last answer is known."""

_ALL: PieceSpan = (0, 1)
"""The single piece of an object that is fetched whole."""


class SmallObjects:
    """The small objects and the names of a dataset. Safe for several threads."""

    def __init__(self, fetcher: Fetcher, cache: DatasetCache, *, failures: FillFailures) -> None:
        self._fetcher, self._cache, self._failures = fetcher, cache, failures
        self._lock = threading.Lock()
        self._held: OrderedDict[str, FileMap] = OrderedDict()
        self._own: Folder | None = None  # a temporary folder of this process
        self._remove: weakref.finalize[..., SmallObjects] | None = None
        self._warned = False

    def path(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """Return the local path of a small object; see `Remote.object`."""
        source = self._source(path, size_bytes, version)
        kept: str | None = self._cache.look(
            lambda folder: self._find(folder, source, size_bytes)
        ) or self._cache.use(lambda folder: self._keep(folder, source, size_bytes))
        if kept is None:
            kept = os.path.join(self._own_folder().path, source.key)
            if not os.path.exists(kept):
                answer = self._fetcher.fetch_object(path, size_bytes=size_bytes)
                self._own_folder().write_whole(source.key, memoryview(answer.data))
        return os.fsencode(kept)

    def drop(self, path: str, *, size_bytes: int | None, version: str) -> bool:
        """Remove a small object whose bytes were wrong; return True if the cache had it."""
        source = self._source(path, size_bytes, version)
        with self._lock:
            self._held.pop(source.key, None)
        dropped = self._cache.drop(source)
        if self._own is not None:
            self._own.remove(source.key)
        return dropped

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up; see `Remote.find`."""
        name = "\0".join((self._fetcher.store.scope, self._fetcher.store.url, path))
        known, before = self._cache.look(lambda folder: folder.recall(name)) or (False, None)
        try:
            found = self._fetcher.info(path, limit_s=_KNOWN_LIMIT_S if known else None)
        except FetchError as error:
            if not known:
                raise
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._cache.label}: the remote can't be reached to check for changes, so "
                    f"the cached index is used. {error}",
                    PenstockWarning,
                    stacklevel=4,
                )
            if before is None:
                return None
            return ObjectInfo(path=path, size_bytes=before[0], version=before[1])
        answer = None if found is None else (found.size_bytes, found.version)
        if not known or answer != before:
            self._cache.use(lambda folder: folder.catalogue.remember(name, answer))
        return found

    def close(self) -> None:
        """Release the maps and remove the folder. Safe to call twice."""
        self._held.clear()
        if self._remove is not None:
            self._remove()

    def _own_folder(self) -> Folder:
        """Return a folder that is removed at close() or when the process ends."""
        with self._lock:
            if self._own is None:
                path = tempfile.mkdtemp(prefix="penstock-objects-")
                self._remove = weakref.finalize(self, remove_own_folder, path, os.getpid())
                self._own = Folder(os.open(path, os.O_DIRECTORY | os.O_CLOEXEC), path, 0o700)
            return self._own

    def _source(self, path: str, size_bytes: int | None, version: str) -> BlobSource:
        uri = f"{self._fetcher.store.url}/{path}"
        key = blob_key(scope=self._fetcher.store.scope, uri=uri, version=version)
        segment = Segment(path=path, size_bytes=size_bytes or 0, version=None)
        return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=size_bytes or 0)

    def _find(
        self, folder: ReadableFolder, source: BlobSource, size_bytes: int | None
    ) -> str | None:
        """Return the path of a cached object, and hold its map, which protects it from eviction."""
        path = folder.layout.blob(source.key)
        with self._lock:
            if source.key in self._held and folder.has(source.key):
                return path
        mapped = folder.find(source.key, size_bytes)
        if mapped is None:
            return None
        with self._lock:
            self._held[source.key] = mapped
            while len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
        return path

    def _keep(self, folder: CacheFolder, source: BlobSource, size_bytes: int | None) -> str | None:
        # One process of the node fetches it; the others wait longer than that can take.
        began_s = time.monotonic()
        patience_s = 2 * self._fetcher.policy.retry_timeout_s
        with folder.layout.holding(source.key, timeout_s=patience_s):
            found = self._find(folder, source, size_bytes)
            if found is not None:
                return found
            if (failed := self._failures.since(began_s, [(source.key, [_ALL])])) is not None:
                raise failed
            try:
                answer = self._fetcher.fetch_object(source.segments[0].path, size_bytes=size_bytes)
            except FetchError as error:
                self._failures.note([(source.key, _ALL)], error)
                raise
            data = memoryview(answer.data)
            if not folder.put(source, data, group=self._cache.group, kept=True):
                own = self._own_folder()
                own.write_whole(source.key, data)
                return os.path.join(own.path, source.key)
            self._fetcher.meter.add(bytes_filled=len(data))
            return self._find(folder, source, size_bytes)
