"""Find whole blobs in a cache folder and map them, without the catalogue.

Each hit records the blob's last use in memory; many uses are written to the catalogue at once.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.cache.base import FileMap, StrangeFileError
from penstock.cache.disk.catalogue import NAME_QUERY, read_name_row
from penstock.cache.disk.catalogue_file import as_database_errors
from penstock.cache.disk.folder_layout import FolderLayout
from penstock.cache.errors import StalledError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base import ReaderLocks
    from penstock.cache.disk.catalogue import BlobTable, Catalogue, Known

_MOST_NOTED = 256


class UseLog:
    """The last uses by this process that aren't in the catalogue yet."""

    def __init__(self, blobs: BlobTable) -> None:
        self._blobs = blobs
        self._used_s: dict[str, float] = {}

    def note(self, key: str) -> None:
        """Record that a blob is used now. Errors of the catalogue are ignored."""
        self._used_s[key] = time.time()
        if len(self._used_s) >= _MOST_NOTED:
            with contextlib.suppress(OSError, sqlite3.Error):
                self.flush()

    def flush(self) -> None:
        """Write the last uses to the catalogue. Raises OSError, sqlite3.Error."""
        if self._used_s:
            used_s, self._used_s = self._used_s, {}
            self._blobs.touch(used_s)


class Lookup:
    """The whole blobs of a folder that this process can't write and from which no process evicts.

    It acquires no locks and changes nothing.
    """

    def __init__(self, layout: FolderLayout) -> None:
        self.layout = layout

    @classmethod
    def at(cls, root: str, *, mode: int = 0o700) -> Lookup | None:
        """Return the lookup of a folder that belongs to this user or root; None if it isn't a cache
        or can't be read. Raises ConfigError for a newer format."""
        try:
            layout = FolderLayout(root, mode=mode, reads_roots=True)
            layout.check_format()
        except OSError:
            return None
        return cls(layout)

    def has(self, key: str) -> bool:
        """Return True if the folder has a whole blob."""
        return self.layout.blobs.has(key)

    def held(self) -> dict[str, float]:
        """Return the present share of each blob by key, in [0, 1]. Unverified blobs count as whole,
        because most of them are right. Lists names, and opens only files that are being filled."""
        layout = self.layout
        found = {key: layout.fill_share(key) for key in layout.filling_keys()}
        found |= dict.fromkeys(layout.names("unverified"), 1.0)
        return found | dict.fromkeys(layout.names("blobs"), 1.0)

    def find(self, key: str, size_bytes: int | None) -> FileMap | None:
        """Map a whole blob; None if the folder has none of this size."""
        try:
            fd = self.layout.blobs.open(key)
        except (FileNotFoundError, StrangeFileError, PermissionError) as error:
            return self._find_unopenable(key, size_bytes, error)
        try:
            found = os.fstat(fd)
            if found.st_size == 0 or (size_bytes is not None and found.st_size != size_bytes):
                self._refuse(key)
                return None
            return self._map(key, fd, found.st_ino)
        finally:
            os.close(fd)

    def recall(self, path: str) -> Known:
        """Return a store's last answer about a name."""
        # immutable=1 reads the file without its log, which can't be replayed in a read-only folder.
        place = os.path.join(os.readlink(f"/proc/self/fd/{self.layout.top.fd}"), "catalogue.db")
        with contextlib.suppress(sqlite3.Error, OSError), as_database_errors():
            self.layout.top.check("catalogue.db")
            db = sqlite3.connect(f"file:{quote(place)}?immutable=1", uri=True)
            with contextlib.closing(db):
                return read_name_row(db.execute(NAME_QUERY, (path,)).fetchone(), path)
        return False, None

    def _map(self, key: str, fd: int, inode: int) -> FileMap | None:
        """Map an open file; None if it was removed."""
        del key, inode
        return FileMap(fd)

    def _refuse(self, key: str) -> None:
        """Handle a file that has a blob's name and isn't that blob."""

    def _find_unopenable(self, key: str, size_bytes: int | None, error: OSError) -> FileMap | None:
        """Return the map of a blob that can't be opened as published, or None."""
        del size_bytes
        if isinstance(error, StrangeFileError):
            self._refuse(key)
        return None


class LockedLookup(Lookup):
    """The whole blobs of a folder from which processes evict; each mapped blob is locked.

    readers: the reader locks of this process. drop: removes a file that isn't the blob. adopt:
    verifies and publishes a blob from before a reboot.
    """

    def __init__(
        self,
        layout: FolderLayout,
        *,
        catalogue: Catalogue,
        readers: ReaderLocks,
        uses: UseLog,
        drop: Callable[[str], object],
        adopt: Callable[[str], bool],
    ) -> None:
        super().__init__(layout)
        self._catalogue, self._readers, self._uses = catalogue, readers, uses
        self._drop, self._adopt = drop, adopt

    def recall(self, path: str) -> Known:
        """Return a store's last answer about a name."""
        return self._catalogue.names.recall(path)

    def _map(self, key: str, fd: int, inode: int) -> FileMap | None:
        readers = self._readers
        try:
            readers.wait(inode, what=self.layout.blob(key))
        except StalledError:
            return None
        try:
            is_linked = bool(os.fstat(fd).st_nlink)
            mapped = FileMap(fd, on_unmap=lambda: readers.release(inode)) if is_linked else None
        except BaseException:
            readers.release(inode)
            raise
        if mapped is None:
            readers.release(inode)
        else:
            self._uses.note(key)
        return mapped

    def _refuse(self, key: str) -> None:
        self._drop(key)

    def _find_unopenable(self, key: str, size_bytes: int | None, error: OSError) -> FileMap | None:
        if isinstance(error, FileNotFoundError):
            return self.find(key, size_bytes) if self._adopt(key) else None
        if not isinstance(error, StrangeFileError):
            raise error
        return super()._find_unopenable(key, size_bytes, error)
