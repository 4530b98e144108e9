"""Find whole blobs in a cache folder and map them: all that a hit needs, and no database.

The last use of a blob is noted at each hit, and written to the catalogue now and then.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from typing import TYPE_CHECKING
from urllib.parse import quote

from penstock.cache.base import FileMap, StrangeFileError, wait_for
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
    """A UseLog has the last uses by this process that the books don't have yet."""

    def __init__(self, blobs: BlobTable) -> None:
        self._blobs = blobs
        self._used_s: dict[str, float] = {}

    def note(self, key: str) -> None:
        """Note that a blob is used now. Books that can't be written miss it."""
        self._used_s[key] = time.time()
        if len(self._used_s) >= _MOST_NOTED:
            with contextlib.suppress(OSError, sqlite3.Error):
                self.flush()

    def flush(self) -> None:
        """Write last uses down. Raises OSError, sqlite3.Error."""
        if self._used_s:
            used_s, self._used_s = self._used_s, {}
            self._blobs.touch(used_s)


_EVICTOR_S = 5.0


class Lookup:
    """A Lookup finds whole blobs of a folder that this process can't write, where nobody evicts.

    It takes no locks and changes nothing.
    """

    def __init__(self, layout: FolderLayout) -> None:
        self.layout = layout

    @classmethod
    def at(cls, root: str, *, mode: int = 0o700) -> Lookup | None:
        """The lookup of a folder of this user's, or of root's alone; None if it isn't a cache or
        can't be read. Raises ConfigError for a newer format."""
        try:
            layout = FolderLayout(root, mode=mode, reads_roots=True)
            layout.check_format()
        except OSError:
            return None
        return cls(layout)

    def has(self, key: str) -> bool:
        """Whether a whole blob is there."""
        return self.layout.blobs.has(key)

    def held(self) -> dict[str, float]:
        """What is here of each blob, by key: 1.0 is all of it; blobs of before a reboot count, as
        most of them are still right. Lists names, and opens what is being filled alone."""
        layout = self.layout
        found = {key: layout.fill_share(key) for key in layout.filling_keys()}
        found |= dict.fromkeys(layout.names("unverified"), 1.0)
        return found | dict.fromkeys(layout.names("blobs"), 1.0)

    def find(self, key: str, size_bytes: int | None) -> FileMap | None:
        """Map a whole blob; None if it isn't there. One of another size isn't that blob."""
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
        """What a store said last of a name."""
        # Read as they lie: a log that nobody has put into the books is left out.
        place = os.path.join(os.readlink(f"/proc/self/fd/{self.layout.top.fd}"), "catalogue.db")
        with contextlib.suppress(sqlite3.Error, OSError), as_database_errors():
            self.layout.top.check("catalogue.db")
            books = sqlite3.connect(f"file:{quote(place)}?immutable=1", uri=True)
            with contextlib.closing(books):
                return read_name_row(books.execute(NAME_QUERY, (path,)).fetchone(), path)
        return False, None

    def _map(self, key: str, fd: int, inode: int) -> FileMap | None:
        """Map an open blob."""
        del key, inode
        return FileMap(fd)

    def _refuse(self, key: str) -> None:
        """What stands there isn't the blob."""

    def _find_unopenable(self, key: str, size_bytes: int | None, error: OSError) -> FileMap | None:
        """What to give for a blob that can't be opened."""
        del size_bytes
        if isinstance(error, StrangeFileError):
            self._refuse(key)
        return None


class LockedLookup(Lookup):
    """A LockedLookup finds whole blobs of a folder that others evict from, and holds each it maps.

    readers: held by this process; drop: takes out what isn't the blob; take_over: makes a blob of
    before a reboot one of now, if it is still right.
    """

    def __init__(
        self,
        layout: FolderLayout,
        *,
        catalogue: Catalogue,
        readers: ReaderLocks,
        uses: UseLog,
        drop: Callable[[str], object],
        take_over: Callable[[str], bool],
    ) -> None:
        super().__init__(layout)
        self._catalogue, self._readers, self._uses = catalogue, readers, uses
        self._drop, self._take_over = drop, take_over

    def recall(self, path: str) -> Known:
        """What a store said last of a name."""
        return self._catalogue.names.recall(path)

    def _map(self, key: str, fd: int, inode: int) -> FileMap | None:
        readers = self._readers
        # An evictor holds it for a moment only, whether it takes the file or not.
        what = self.layout.blob(key)
        try:
            wait_for(lambda: readers.acquire(inode), timeout_s=_EVICTOR_S, what=what)
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
            return self.find(key, size_bytes) if self._take_over(key) else None
        if not isinstance(error, StrangeFileError):
            raise error
        return super()._find_unopenable(key, size_bytes, error)
