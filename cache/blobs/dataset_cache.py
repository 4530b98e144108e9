"""The node's cache as one dataset uses it: under its own name, until the dataset is closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.cache.errors import ClosedError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.lookup import Lookup
    from penstock.cache.disk.shelf import Shelf


class DatasetCache:
    """Acts on the folder that keeps a dataset's blobs; without a folder nothing is kept.

    group: names the dataset in the folder; label: the same for people.
    """

    def __init__(self, cache: DiskCache | None, *, group: str, label: str) -> None:
        self._cache = cache
        self.group, self.label = group, label
        self._closed = False

    def use(self, act: Callable[[Shelf], Any]) -> Any:
        """Act on the cache as `DiskCache.use` does; None without a folder. Raises ClosedError."""
        cache = self._open()
        return cache.use(act) if cache is not None else None

    def look(self, act: Callable[[Lookup], Any]) -> Any:
        """Look into the cache as `DiskCache.look` does, even where it can't be written."""
        cache = self._open()
        return cache.look(act) if cache is not None else None

    def _open(self) -> DiskCache | None:
        if self._closed:
            raise ClosedError(f"{self.label}: closed; make a new dataset.")
        return self._cache

    def has(self, source: BlobSource) -> bool:
        """Whether a blob is on the local disk, all of it."""
        return bool(self.look(lambda lookup: lookup.has(source.key)))

    def held(self) -> dict[str, float]:
        """What is on the local disk of each blob of the folder, by key: 1.0 is all of it."""
        found: dict[str, float] | None = self.look(lambda lookup: lookup.held())
        return found or {}

    def drop(self, source: BlobSource, *, inode: int | None = None) -> bool:
        """Forget a blob; False if it wasn't there. inode: of the file that was wrong, so that
        another's fresh one stays."""
        return bool(self.use(lambda shelf: shelf.trash.drop(source.key, inode=inode)))

    def give_up(self, error: Exception) -> None:
        """Go on without the folder for a while, after one of DISK_ERRORS. Raises it again where it
        isn't the disk's, or there is no folder."""
        if isinstance(error, PenstockError) or self._cache is None:
            raise error
        self._cache.give_up(error)

    def close(self) -> None:
        """Refuse what comes behind this. Safe to call twice."""
        self._closed = True
