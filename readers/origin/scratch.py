"""Provide the folders that a dataset may write to: the user's, or temporary ones.

These are the cache for remote data and the folder for indexes that have no better place.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, PenstockWarning

if TYPE_CHECKING:
    from penstock.cache.disk import DiskCache


class Scratch:
    """The folders that a dataset may write to: a cache's, or temporary ones.

    cache: the user's DiskCache or folder, which is kept. None means temporary folders, created on
    first use and removed by `close`, with this object, or at the interpreter's exit.
    """

    def __init__(self, cache: DiskCache | str | os.PathLike[str] | None = None) -> None:
        self.is_kept = cache is not None
        self._disk: DiskCache | None = None
        self._owns_disk = True
        self._path: str | None = None
        self._own: str | None = None
        self._finalizer: weakref.finalize[..., Scratch] | None = None
        if cache is None:
            return
        if isinstance(cache, str | os.PathLike):
            self._path = os.path.abspath(os.fspath(cache))
            return
        from penstock.cache.disk import DiskCache

        if not isinstance(cache, DiskCache):
            raise ConfigError(
                f"cache: got {cache!r}, wanted a DiskCache(path, max_bytes=…) or the path of a "
                "folder on a local disk."
            )
        self._disk, self._owns_disk, self._path = cache, False, cache.path

    def disk_cache(self) -> DiskCache:
        """Return the cache for a remote dataset's bytes. It is created on first use."""
        from penstock.cache.disk import DiskCache

        if self._disk is None:
            path = self._path
            self._disk = DiskCache.temporary() if path is None else DiskCache.at(path)
        return self._disk

    def folder(self) -> str:
        """Return the folder's path. Creates the folder with mode 0700."""
        if self._disk is not None:
            self._disk.open()
            return self._disk.path
        if self._path is None:
            return self._temporary()
        from penstock.cache.base import make_private_folder

        make_private_folder(self._path)
        return self._path

    def _temporary(self) -> str:
        if self._own is None:
            from penstock.cache.base import remove_own_folder

            self._own = tempfile.mkdtemp(prefix="penstock-")
            self._finalizer = weakref.finalize(self, remove_own_folder, self._own, os.getpid())
        return self._own

    def close(self) -> None:
        """Close a cache of our own and remove a temporary folder. Safe to call twice."""
        if self._disk is not None and self._owns_disk:
            self._disk.close()
            self._disk = None
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer, self._own = None, None

    def index_folder(self, key: str) -> bytes:
        """Return the folder for the index of the dataset with this key. If the cache's folder can't
        be trusted, return a temporary one."""
        if self._disk is not None:
            place = self._disk.folder("indexes", key)
        else:
            place = self._checked(self.folder(), key)
        return os.fsencode(place or os.path.join(self._temporary(), key))

    def _checked(self, folder: str, key: str) -> str | None:
        """Return the index's folder in a folder that isn't open as a cache, or None if another user
        can write to it."""
        from penstock.cache.base import Folder, StrangeFileError

        try:
            indexes = Folder.at(folder).folder("indexes", make=True)
            return indexes.beneath(key)
        except StrangeFileError as error:
            warnings.warn(
                f"{error.filename}: {error.strerror}, so the index isn't stored in it. Give cache= "
                "a folder that belongs to this user.",
                PenstockWarning,
                stacklevel=2,
            )
            return None
        except OSError:  # read-only: an existing index can be read
            return os.path.join(folder, "indexes", key)
