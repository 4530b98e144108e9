"""Opens blobs of the cache: whole ones where they lie, others as fills where there is room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.blobs.cached_blob import CachedBlob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.mapping import Map
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.blobs.memberships import Memberships
    from penstock.cache.disk.fills import Fill
    from penstock.cache.disk.layout import Layout
    from penstock.cache.disk.lookup import Lookup
    from penstock.cache.disk.shelf import Shelf


class BlobOpener:
    """Makes cached blobs of what a folder holds. ensure: brings spans of a blob before its buffer
    is read."""

    def __init__(
        self,
        cache: DatasetCache,
        memberships: Memberships,
        *,
        ensure: Callable[[CachedBlob, Sequence[tuple[int, int]]], None],
    ) -> None:
        self._cache, self._memberships, self._ensure = cache, memberships, ensure

    def open(self, source: BlobSource) -> CachedBlob | None:
        """Open a blob that is here or has room here; None if the cache doesn't keep it."""
        for _ in range(2):  # it may be published between the two looks
            found: CachedBlob | None = self._cache.look(lambda lookup: self._find(lookup, source))
            if found is None and self._memberships.keeps(source.key):
                found = self._cache.use(lambda shelf: self._begin(shelf, source))
            if found is not None:
                return found
        return None

    def _find(self, lookup: Lookup, source: BlobSource) -> CachedBlob | None:
        mapped = lookup.find(source.key, source.size_bytes)
        return None if mapped is None else self._blob(lookup.layout, source, mapped, None)

    def _begin(self, shelf: Shelf, source: BlobSource) -> CachedBlob | None:
        begun = shelf.filling.begin(source, group=self._cache.group, pinned=bool(self._memberships))
        if begun is None:
            return None
        fill, mapped = begun
        blob = self._blob(shelf.layout, source, mapped, fill)
        blob.settle()  # who fetched the last piece may have died before it published
        return blob

    def _blob(
        self, layout: Layout, source: BlobSource, mapped: Map, fill: Fill | None
    ) -> CachedBlob:
        cache = self._cache

        def publish(fill: Fill, data: Any) -> None:
            cache.use(
                lambda shelf: shelf.filling.publish(
                    source, fill, data, group=cache.group, kept=False
                )
            )

        return CachedBlob(
            layout,
            source,
            mapped,
            fill,
            inode=mapped.inode,
            publish=publish,
            ensure=self._ensure,
        )
