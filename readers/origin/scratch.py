"""Provide the folders that a dataset may write to, the user's or temporary ones.

They are the cache that it reads through, and the folder for indexes that have no better place.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
import weakref
from typing import TYPE_CHECKING

from penstock.cache import ConfigError, PenstockWarning

if TYPE_CHECKING:
    from penstock.cache.disk import DiskCache


class Scratch:
    """The folders that a dataset may write to: a cache's, or temporary ones.

    cache: the user's DiskCache or folder, which stays; None: temporary folders, made when they are
    first needed and removed with this object, at close() or at the interpreter's exit.
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
        """The cache for a remote dataset's bytes; made on first use."""
        from penstock.cache.disk import DiskCache

        if self._disk is None:
            path = self._path
            self._disk = DiskCache.temporary() if path is None else DiskCache.at(path)
        return self._disk

    def folder(self) -> str:
        """The folder's path; makes it (0700)."""
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
            self._own = tempfile.mkdtemp(prefix="penstock-")
            self._finalizer = weakref.finalize(self, _remove, self._own, os.getpid())
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
        """Where the index of the dataset with this key is kept; of a remote one in a temporary
        folder where the cache's can't be used."""
        if self._disk is not None:
            place = self._disk.folder("indexes", key)
        else:
            place = self._checked(self.folder(), key)
        return os.fsencode(place or os.path.join(self._temporary(), key))

    def _checked(self, folder: str, key: str) -> str | None:
        """The same in a folder that isn't open as a cache; None where others have a hand in it."""
        from penstock.cache.base import Folder, StrangeFileError

        try:
            indexes = Folder.at(folder).folder("indexes", make=True)
            return indexes.beneath(key)
        except StrangeFileError as error:
            warnings.warn(
                f"{error.filename}: {error.strerror}, so no index is kept there. Give cache= a "
                "folder that belongs to this user.",
                PenstockWarning,
                stacklevel=2,
            )
            return None
        except OSError:  # read-only: what is there may be read
            return os.path.join(folder, "indexes", key)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child's exit must not take its parent's files away
        shutil.rmtree(path, ignore_errors=True)
