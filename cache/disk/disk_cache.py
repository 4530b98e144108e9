"""Open the node's cache: a folder on a local disk with a size limit, opened at first use.

Invalid arguments raise an error. A problem with the folder's disk (full, read-only, owned by
another user) gives one warning and stops the use of the cache for a while, but never ends the job:
all data then comes from the remote.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from penstock.cache.base import (
    Peers,
    StrangeFileError,
    format_size,
    is_shortage,
    machine_remedy,
    parse_size,
    remove_own_folder,
)
from penstock.cache.disk.cache_folder import CacheFolder, ReadableFolder
from penstock.cache.errors import ConfigError, PenstockError, StalledError, warn
from penstock.cache.forks import check_process

if TYPE_CHECKING:
    from collections.abc import Callable

DISK_ERRORS = (OSError, sqlite3.Error, StalledError)
"""Errors of the cache's disk, including a catalogue whose lock isn't acquired in time."""
RETRY_S = 30.0
"""Seconds without writes after an error of the disk."""


class DiskCache:
    """A folder on a local disk that caches remote objects for all processes of a node.

    ```python
    from penstock import Dataset, DiskCache

    train = Dataset("s3://bucket/packs/train", cache=DiskCache("/nvme/penstock", max_bytes="1GB"))
    ```

    path: the folder, which is created with the permission bits `mode` at first use. max_bytes: an
    int or a string such as "1.5TB"; all processes and jobs together stay below it. Several datasets
    and jobs may share a folder if they pass the same limit. peers: lets the nodes of a job serve
    cached data to each other. Safe for several threads; not across fork.

    Raises ConfigError for invalid arguments; at first use if the folder is on a network file
    system, has a newer format, or is in use with another limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | str,
        mode: int = 0o700,
        peers: Peers | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"cache: got {path!r}, wanted the path of a folder on a local disk.")
        if not isinstance(peers, Peers | None):
            raise ConfigError(f'peers: got {peers!r}, wanted Peers("HOST:PORT") or None.')
        self.path = os.path.abspath(os.fspath(path))
        # None: the limit that the folder records.
        self._max_bytes: int | None = parse_size(max_bytes, what="max_bytes")
        self.mode, self.peers = mode, peers
        self._lock = threading.RLock()
        self._folder: CacheFolder | None = None
        self._readable: ReadableFolder | None = None  # replaces the folder if it can't be written
        self._warned = False
        self._no_writes_until_s = self._no_reads_until_s = 0.0
        self._owner = os.getpid()
        self._remove: weakref.finalize[..., DiskCache] | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, peers: Peers | None = None) -> DiskCache:
        """Return the cache in a folder, with the limit that the folder records; a new folder gets
        90 % of the free bytes."""
        return _made(path, None, 0o700, peers)

    @classmethod
    def temporary(cls) -> DiskCache:
        """Create a cache in a temporary folder, which is removed at close() or at the interpreter's
        exit."""
        path = tempfile.mkdtemp(prefix="penstock-")
        cache = cls.at(path)
        cache._remove = weakref.finalize(cache, remove_own_folder, path, os.getpid())
        return cache

    @property
    def is_temporary(self) -> bool:
        """True if close() removes the folder."""
        return self._remove is not None

    @property
    def max_bytes(self) -> int | None:
        """The limit in bytes; None before first use if the folder's recorded limit applies."""
        return self._folder.max_bytes if self._folder is not None else self._max_bytes

    def __repr__(self) -> str:
        limit = format_size(self.max_bytes) if self.max_bytes else "the folder's own"
        return f"DiskCache({self.path!r}, max_bytes={limit!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, because a spawned worker opens the folder itself."""
        return _made, (self.path, self._max_bytes, self.mode, self.peers)

    def open(self) -> None:
        """Open the folder now instead of at first use. Raises ConfigError; an error of the disk is
        one PenstockWarning."""
        self._opened(writes=True)

    def use(self, act: Callable[[CacheFolder], Any]) -> Any:
        """Return act(folder), or None if the folder can't be written. Raises what `act` raises,
        except errors of the disk."""
        if time.monotonic() < self._no_writes_until_s:
            return None
        return self._try(act, self._opened(writes=True))

    def look(self, act: Callable[[ReadableFolder], Any]) -> Any:
        """Return act(folder), also if the folder is full or read-only; None if it can't be read.
        Raises as `use` does."""
        if time.monotonic() < self._no_reads_until_s:
            return None
        return self._try(act, self._opened(writes=False))

    def _opened(self, *, writes: bool) -> ReadableFolder | None:
        check_process(self._owner, f"The cache in {self.path}")
        with self._lock:
            is_open = self._folder is not None or (self._readable is not None and not writes)
            if not is_open and time.monotonic() >= self._no_writes_until_s:
                self._open()
            return self._folder if writes else self._folder or self._readable

    def _try(self, act: Callable[[Any], Any], folder: ReadableFolder | None) -> Any:
        try:
            if not isinstance(folder, CacheFolder):
                return None if folder is None else act(folder)
            try:
                return folder.repairing(lambda: act(folder))
            finally:
                self._warn_of_damage(folder)
        except DISK_ERRORS as error:
            self.give_up(error)
            return None

    def _open(self) -> None:
        try:
            folder = CacheFolder(self.path, max_bytes=self._max_bytes, mode=self.mode)
            exposed = folder.layout.others_may_write()
        except DISK_ERRORS as error:
            if self._readable is None:  # published blobs can be read without the catalogue
                self._readable = ReadableFolder.at(self.path, mode=self.mode)
            self.give_up(error)
            return
        self._folder, self._readable = folder, None
        self._warn_of_damage(folder)
        if exposed is not None:
            warn(
                f"{exposed}: other users may write to this cache, so they can remove and replace "
                "its files. Their files aren't used. Run `chmod go-w` on the folder, or pass "
                "mode=0o770 for a cache that a group shares."
            )

    def give_up(self, error: BaseException, *, reads: bool = False) -> None:
        """Stop writing for a while, and warn once. reads: stop reading, too. Raises the error again
        if it isn't the disk's."""
        if isinstance(error, PenstockError) and not isinstance(error, StalledError):
            raise error
        self._no_writes_until_s = time.monotonic() + RETRY_S
        if reads:
            self._no_reads_until_s = self._no_writes_until_s
        if self._warned:
            return
        self._warned = True
        reason = getattr(error, "strerror", None) or str(error)
        name = error.filename if isinstance(error, OSError) else None
        if isinstance(name, str | bytes) and name != self.path:
            reason = f"{os.fsdecode(name)}: {reason}"
        remedy = machine_remedy(error)
        if isinstance(error, StrangeFileError):
            remedy = "Give each user a separate folder, or share one with DiskCache(mode=0o770)."
        remedy = remedy or "Check the disk's space, inodes and permissions."
        if not is_shortage(error):
            remedy += f" `penstock doctor {self.path}` shows more."
        warn(
            f"{self.path}: the cache can't be used ({reason}), so data that it doesn't hold is "
            f"fetched from the remote each time. {remedy} Penstock tries the cache again every "
            f"{RETRY_S:.0f} s."
        )

    def _warn_of_damage(self, folder: CacheFolder) -> None:
        if folder.damage and (text := folder.pop_damage()) is not None:
            warn(text)

    @property
    def can_be_used(self) -> bool:
        """True if the folder opens, and no disk error occurred recently."""
        return bool(self.use(lambda _: True))

    def folder(self, name: str, key: str) -> str | None:
        """Return the path NAME/KEY in the cache for other modules' files (indexes), and create
        NAME. In a read-only cache NAME must exist; None if it doesn't."""

        def find(folder: ReadableFolder) -> str | None:
            top = folder.layout.top
            return top.folder(name).beneath(key) if top.is_folder(name) else None

        made: str | None = self.use(
            lambda folder: folder.layout.top.folder(name, make=True).beneath(key)
        )
        return made or self.look(find)

    def close(self) -> None:
        """Close the folder; open blobs stay readable. Safe to call twice."""
        with self._lock:
            if self._folder is not None and os.getpid() == self._owner:
                self._folder.close()
            self._folder = self._readable = None
        if self._remove is not None:
            self._remove()


def _made(
    path: str | os.PathLike[str], max_bytes: int | None, mode: int, peers: Peers | None
) -> DiskCache:
    """Create a cache. max_bytes: None for the limit that the folder records."""
    cache = DiskCache(path, max_bytes=max_bytes or 1, mode=mode, peers=peers)
    cache._max_bytes = max_bytes
    return cache
