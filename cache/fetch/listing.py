"""A listing in pages, so that a failure costs a page and not the whole."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from penstock.cache.base.store import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base.store import ObjectInfo, Store

_PAGE = 1000


class ListingPages:
    """Lists a folder page by page, and goes on after a failure without repeating anything."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._left: Iterator[ObjectInfo] | None = None
        self._seen: set[str] = set()

    def next(self) -> list[ObjectInfo]:
        """The next objects; none at the end. Raises RequestError."""
        try:
            if self._left is None:
                self._left = iter(self._store.walk(self._prefix))
            unseen = (info for info in self._left if info.path not in self._seen)
            page = list(islice(unseen, _PAGE))
        except RequestError:
            self._left = None
            raise
        self._seen.update(info.path for info in page)
        return page
