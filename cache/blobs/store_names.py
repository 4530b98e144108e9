"""What a store says of a name, and said last while it is away."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from penstock.cache.base.store import ObjectInfo
from penstock.cache.errors import FetchError, PenstockWarning

if TYPE_CHECKING:
    from penstock.cache.blobs.dataset_cache import DatasetCache
    from penstock.cache.fetch.fetcher import Fetcher

# A store that doesn't answer is waited for so long where its last answer is known.
_KNOWN_LIMIT_S = 5.0


class StoreNames:
    """Looks objects up by name; the cache remembers each answer for when the store is away."""

    def __init__(self, fetcher: Fetcher, cache: DatasetCache) -> None:
        self._fetcher, self._cache = fetcher, cache
        self._warned = False

    def find(self, path: str) -> ObjectInfo | None:
        """Look a name up, as `Remote.find` says."""
        name = "\0".join((self._fetcher.store.scope, self._fetcher.store.url, path))
        known, before = self._cache.look(lambda lookup: lookup.recall(name)) or (False, None)
        try:
            found = self._fetcher.info(path, limit_s=_KNOWN_LIMIT_S if known else None)
        except FetchError as error:
            if not known:
                raise
            self._warn(error)
            if before is None:
                return None
            return ObjectInfo(path=path, size_bytes=before[0], version=before[1])
        answer = None if found is None else (found.size_bytes, found.version)
        if not known or answer != before:
            self._cache.use(lambda shelf: shelf.catalogue.names.remember(name, answer))
        return found

    def _warn(self, error: FetchError) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._cache.label}: the remote can't be asked whether it has changed, so the "
                f"cached index is used as it is. {error}",
                PenstockWarning,
                stacklevel=5,
            )
