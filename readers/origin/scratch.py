"""Provide the folders that a dataset may write to: the user's, or temporary ones.

These are the cache for remote data and the folder for indexes that have no better place.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, PenstockWarning

if TYPE_CHECKING:
    from penstock.cache.disk import DiskCache


class Scratch:
    """The folders that a dataset may write to: a cache's, or temporary ones.

    cache: the user's DiskCache or folder, which is kept. None means temporary folders, created on
    first use and removed by `close`, with this object, or at the interpreter's exit. path: of the
    user's folder, None if there is none.
    """

    def __init__(self, cache: DiskCache | str | os.PathLike[str] | None = None) -> None:
        self.is_kept = cache is not None
        self.path: str | None = None
        self._disk: DiskCache | None = None
        self._owned: list[DiskCache] = []
        self._temporary: DiskCache | None = None
        if cache is None:
            return
        if isinstance(cache, str | os.PathLike):
            self.path = os.path.abspath(os.fspath(cache))
            return
        from penstock.cache.disk import DiskCache

        if not isinstance(cache, DiskCache):
            raise ConfigError(
                f"cache: got {cache!r}, wanted a DiskCache(path, max_bytes=…) or the path of a "
                "folder on a local disk."
            )
        self._disk, self.path = cache, cache.path

    def disk_cache(self) -> DiskCache:
        """Return the cache for a remote dataset's bytes. It is created on first use."""
        if self._disk is None:
            self._disk = self._own(self.path)
        return self._disk

    def _own(self, path: str | None) -> DiskCache:
        """Return a new cache in a folder, or in a temporary one, which `close` closes."""
        from penstock.cache.disk import DiskCache

        cache = DiskCache.temporary() if path is None else DiskCache.at(path)
        self._owned.append(cache)
        return cache

    def close(self) -> None:
        """Close a cache of our own and remove a temporary folder. Safe to call twice."""
        for cache in self._owned:
            cache.close()
        if self._disk in self._owned:
            self._disk = None
        self._owned, self._temporary = [], None

    def index_folder(self, key: str) -> bytes:
        """Return the folder for the index of the dataset with this key. If the cache's folder can't
        be trusted, return a temporary one."""
        place = None
        if self._disk is not None:
            place = self._disk.folder("indexes", key)
        elif self.path is not None:
            place = _index_folder(self.path, key)
        if place is None:
            self._temporary = self._temporary or self._own(None)
            place = os.path.join(self._temporary.path, "indexes", key)
        return os.fsencode(place)


def _index_folder(path: str, key: str) -> str | None:
    """Return the index's folder in a folder that isn't open as a cache, or None if another user can
    write to it."""
    from penstock.cache.base import Folder, StrangeFileError, make_private_folder

    make_private_folder(path)
    try:
        return Folder.at(path).folder("indexes", make=True).beneath(key)
    except StrangeFileError as error:
        warnings.warn(
            f"{error.filename}: {error.strerror}, so the index isn't stored in it. Give cache= a "
            "folder that belongs to this user.",
            PenstockWarning,
            stacklevel=2,
        )
        return None
    except OSError:  # read-only: an existing index can be read
        return os.path.join(path, "indexes", key)
