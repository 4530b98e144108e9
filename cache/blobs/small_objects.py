"""Small objects that are fetched whole: manifests and sidecars of an index."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from penstock.cache.base.blob import BlobSource, Segment, blob_key
from penstock.cache.blobs.process_folder import ProcessFolder
from penstock.cache.errors import FetchError

if TYPE_CHECKING:
    from penstock.cache.base.mapping import Map
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.fill_failures import FillFailures
    from penstock.cache.disk.lookup import Lookup
    from penstock.cache.disk.pieces import PieceSpan
    from penstock.cache.disk.shelf import Shelf
    from penstock.cache.fetch.fetcher import Fetcher

_MOST_HELD = 1024

_ALL: PieceSpan = (0, 1)
"""The one piece of an object that is fetched whole."""


class SmallObjects:
    """Keeps small objects in the cache, fetched once a node, else in a folder of this process.

    Safe for several threads.
    """

    def __init__(self, fetcher: Fetcher, cache: DatasetCache, *, failures: FillFailures) -> None:
        self._fetcher, self._cache, self._failures = fetcher, cache, failures
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Map] = OrderedDict()
        self._own = ProcessFolder()

    def path(self, path: str, *, size_bytes: int | None, version: str) -> bytes:
        """The local path of a small object, as `Remote.object` says."""
        source = self._source(path, size_bytes, version)
        kept: str | None = self._cache.look(
            lambda lookup: self._find(lookup, source, size_bytes)
        ) or self._cache.use(lambda shelf: self._keep(shelf, source, size_bytes))
        if kept is None:
            kept = self._fetch_own(source, size_bytes)
        return os.fsencode(kept)

    def drop(self, path: str, *, size_bytes: int | None, version: str) -> bool:
        """Forget a small object whose bytes were wrong; whether the cache had it."""
        source = self._source(path, size_bytes, version)
        with self._lock:
            self._held.pop(source.key, None)
        dropped = self._cache.drop(source)
        self._own.remove(source.key)
        return dropped

    def close(self) -> None:
        """Let all go. Safe to call twice."""
        self._held.clear()
        self._own.close()

    def _source(self, path: str, size_bytes: int | None, version: str) -> BlobSource:
        uri = f"{self._fetcher.store.url}/{path}"
        key = blob_key(scope=self._fetcher.store.scope, uri=uri, version=version)
        segment = Segment(path=path, size_bytes=size_bytes or 0, version=None)
        return BlobSource(key=key, uri=uri, segments=(segment,), size_bytes=size_bytes or 0)

    def _find(self, lookup: Lookup, source: BlobSource, size_bytes: int | None) -> str | None:
        """The path of an object that is here; its map is held, so that it stays."""
        path = lookup.layout.blob(source.key)
        with self._lock:
            if source.key in self._held and lookup.has(source.key):
                return path
        mapped = lookup.find(source.key, size_bytes)
        if mapped is None:
            return None
        with self._lock:
            self._held[source.key] = mapped
            while len(self._held) > _MOST_HELD:
                self._held.popitem(last=False)
        return path

    def _keep(self, shelf: Shelf, source: BlobSource, size_bytes: int | None) -> str | None:
        # One of the node fetches it, the others wait: longer than that one can take.
        began_s = time.monotonic()
        patience_s = 2 * self._fetcher.policy.retry_timeout_s
        with shelf.keys.holding(source.key, timeout_s=patience_s):
            found = self._find(shelf.lookup, source, size_bytes)
            if found is not None:
                return found
            if (failed := self._failures.since(began_s, [(source.key, [_ALL])])) is not None:
                raise failed
            try:
                answer = self._fetcher.whole(source.segments[0].path, size_bytes=size_bytes)
            except FetchError as error:
                self._failures.note([(source.key, _ALL)], error)
                raise
            data = memoryview(answer.data)
            if not shelf.filling.put(source, data, group=self._cache.group, kept=True):
                return self._own.write(source.key, data)
            self._fetcher.meter.add(bytes_filled=len(data))
            return self._find(shelf.lookup, source, size_bytes)

    def _fetch_own(self, source: BlobSource, size_bytes: int | None) -> str:
        """Without a cache: a file of this process."""
        path = self._own.path(source.key)
        if not os.path.exists(path):
            answer = self._fetcher.whole(source.segments[0].path, size_bytes=size_bytes)
            self._own.write(source.key, memoryview(answer.data))
        return path
