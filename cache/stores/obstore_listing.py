"""Listing a bucket by obstore: every object below a folder, or what lies directly in it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.cache.base.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.stores.obstore_failures import ObstoreFailures

_PAGE = 1000
_NO_TIME = datetime.fromtimestamp(0, UTC)


class ObstoreListing:
    """An ObstoreListing lists the objects of a bucket below a root.

    store, retrying: obstore's, without retries and with: later pages are too many to begin anew,
    and only obstore can fetch one again. root: of obstore's keys.
    """

    def __init__(self, store: Any, retrying: Any, *, root: str, failures: ObstoreFailures) -> None:
        self._store, self._retrying = store, retrying
        self._root = root
        self._failures = failures

    def walk(self, key: str, folder: str) -> Iterator[ObjectInfo]:
        """All objects below a key. folder: its path below the root. Raises RequestError."""
        import obstore

        # The first page says at once what is wrong.
        page = self._page(iter(obstore.list(self._store, key or None, chunk_size=_PAGE)))
        yield from without_markers([self._info(meta) for meta in page], folder)
        if len(page) < _PAGE:
            return
        after = str(page[-1]["path"])
        rest = iter(obstore.list(self._retrying, key or None, offset=after, chunk_size=_PAGE))
        while page := self._page(rest):
            yield from without_markers([self._info(meta) for meta in page], folder)

    def _page(self, listing: Iterator[Any]) -> list[Any]:
        with self._failures.explaining():
            return list(next(listing, ()))

    def top(self, key: str, folder: str) -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly at a key, and names of folders there. Raises RequestError."""
        import obstore

        with self._failures.explaining():
            found = obstore.list_with_delimiter(self._store, key or None)
        folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
        markers = {folder, *(f"{folder}/{name}".lstrip("/") for name in folders)}
        infos = [self._info(meta) for meta in found["objects"]]
        return [info for info in infos if info.size_bytes or info.path not in markers], folders

    def _info(self, meta: Any) -> ObjectInfo:
        path = str(meta["path"])
        if self._root:
            path = path.removeprefix(self._root).lstrip("/")
        return ObjectInfo(path=path, size_bytes=int(meta["size"]), version=meta_version(meta))


def meta_version(meta: Any) -> str:
    """Tell an object's version: its etag without quotes (weak ones with W/), else size and time.

    "" where neither is there.
    """
    if tag := meta.get("e_tag"):
        return str(tag).replace('"', "")
    when = meta.get("last_modified")
    return f"{meta['size']}-{when.timestamp():.6f}" if when and when != _NO_TIME else ""


def without_markers(infos: list[ObjectInfo], folder: str) -> list[ObjectInfo]:
    """Leave out the empty objects that some tools put in a folder's place. Pure.

    obstore cuts the "/" off their names, and a store's listing has a folder's marker right
    before what is in it.
    """
    if not infos:
        return []
    following = [*infos[1:], None]
    return [
        info
        for info, after in zip(infos, following, strict=True)
        if info.size_bytes
        or not (
            info.path in ("", folder)
            or (after is not None and after.path.startswith(f"{info.path}/"))
        )
    ]
