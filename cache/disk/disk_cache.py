"""Offer users the node's cache: a folder on a local disk with a limit, opened at first use.

Wrong arguments are an error. Whatever is wrong with the folder's disk (full, read-only, another
user's) costs one warning and, for a while, the use of the cache, but never the job: without the
cache every byte comes from the remote.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
import threading
import time
import warnings
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
from penstock.cache.disk.cache_folder import CacheFolder
from penstock.cache.disk.lookup import Lookup
from penstock.cache.disk.pinning import PinnedShare
from penstock.cache.errors import ConfigError, PenstockError, PenstockWarning, StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DISK_ERRORS = (OSError, sqlite3.Error, StalledError)
"""What a disk can do to us. A catalogue that can't be had in time counts as one of these."""

# After a failed write the disk is left alone for a while: a full one doesn't empty by asking.
_RETRY_DISK_S = 30.0


class FolderAccess:
    """A FolderAccess opens a cache folder for whoever wants to act on it.

    Safe for several threads, not across fork. path, max_bytes, mode: see DiskCache; max_bytes: None
    takes the folder's own.
    """

    def __init__(self, path: str, *, max_bytes: int | None, mode: int) -> None:
        self._path, self._max_bytes, self._mode = path, max_bytes, mode
        self._lock = threading.RLock()
        self.shelf: CacheFolder | None = None
        self._readable: Lookup | None = None  # in its place, where it can't be written
        self._warned = False
        self._no_writes_until_s = self._no_reads_until_s = 0.0
        self.owner = os.getpid()

    def use(self, act: Callable[[CacheFolder], Any]) -> Any:
        """Return act(shelf), or None where the folder can't be written. Raises what act raises
        beside what a disk does."""
        shelf = self._writable() if time.monotonic() >= self._no_writes_until_s else None
        return None if shelf is None else self._try(act, shelf, shelf)

    def look(self, act: Callable[[Lookup], Any]) -> Any:
        """Return act(lookup) for what a folder may still do that is full or can't be written; None
        where it can't be read. Raises as `use` does."""
        if time.monotonic() < self._no_reads_until_s:
            return None
        shelf, lookup = self._readable_now()
        return None if lookup is None else self._try(act, lookup, shelf)

    def _try(
        self, act: Callable[[Any], Any], subject: CacheFolder | Lookup, shelf: CacheFolder | None
    ) -> Any:
        try:
            if shelf is None:
                return act(subject)
            try:
                return shelf.mending(lambda: act(subject))
            finally:
                self._warn_of_damage(shelf)
        except DISK_ERRORS as error:
            if isinstance(error, PenstockError) and not isinstance(error, StalledError):
                raise
            self.give_up(error)
            return None

    def open(self) -> None:
        """Open the folder now. Raises ConfigError; a disk that fails is one PenstockWarning."""
        self._writable()

    def _writable(self) -> CacheFolder | None:
        self._check_process()
        with self._lock:
            if self.shelf is None and time.monotonic() >= self._no_writes_until_s:
                self._open()
            return self.shelf

    def _readable_now(self) -> tuple[CacheFolder | None, Lookup | None]:
        self._check_process()
        with self._lock:
            is_open = self.shelf is not None or self._readable is not None
            if not is_open and time.monotonic() >= self._no_writes_until_s:
                self._open()
            shelf = self.shelf
            return shelf, shelf.lookup if shelf is not None else self._readable

    def _check_process(self) -> None:
        if os.getpid() != self.owner:
            raise ConfigError(
                f"DiskCache({self._path!r}) was made before this process was forked, and its locks "
                'are its parent\'s. Pass multiprocessing_context="forkserver" (or "spawn"), or '
                "make the dataset in the worker."
            )

    def _open(self) -> None:
        try:
            shelf = CacheFolder(self._path, max_bytes=self._max_bytes, mode=self._mode)
            exposed = shelf.layout.others_may_write()
        except DISK_ERRORS as error:
            if isinstance(error, PenstockError) and not isinstance(error, StalledError):
                raise
            if self._readable is None:  # what was published needs no database
                self._readable = Lookup.at(self._path, mode=self._mode)
            self.give_up(error)
            return
        self.shelf, self._readable = shelf, None
        self._warn_of_damage(shelf)
        if exposed is not None:
            self._warn(
                f"{exposed}: other users may write into this cache, so they can take files out of "
                "it and put others in. Their files aren't used. `chmod go-w` mends it; for a "
                "cache that a group shares pass mode=0o770."
            )

    def give_up(self, error: BaseException, *, reads: bool = False) -> None:
        """Write nothing for a while, and say so once. reads: read nothing, either."""
        self._no_writes_until_s = time.monotonic() + _RETRY_DISK_S
        if reads:
            self._no_reads_until_s = self._no_writes_until_s
        if self._warned:
            return
        self._warned = True
        reason = getattr(error, "strerror", None) or str(error)
        name = error.filename if isinstance(error, OSError) else None
        if isinstance(name, str | bytes) and name != self._path:
            reason = f"{os.fsdecode(name)}: {reason}"
        remedy = machine_remedy(error)
        if isinstance(error, StrangeFileError):
            remedy = "Give each user a folder of their own, or share one: DiskCache(mode=0o770)."
        remedy = remedy or "Check the disk's space, inodes and rights."
        if not is_shortage(error):
            remedy += f" `penstock doctor {self._path}` shows more."
        self._warn(
            f"{self._path}: the cache can't be used ({reason}): what isn't in it comes from the "
            f"remote each time. {remedy} It is tried again every {_RETRY_DISK_S:.0f} s."
        )

    def _warn_of_damage(self, shelf: CacheFolder) -> None:
        if shelf.damage and (text := shelf.take_damage()) is not None:
            self._warn(text)

    def _warn(self, text: str) -> None:
        warnings.warn(text, PenstockWarning, stacklevel=2)

    def close(self) -> None:
        """Let the folder go; open blobs stay readable. Safe to call twice."""
        with self._lock:
            if self.shelf is not None and os.getpid() == self.owner:
                self.shelf.close()
            self.shelf = self._readable = None


class DiskCache:
    """A folder on a local disk that keeps remote objects, shared by every process of a node.

    path: the folder; it is made (mode) when it is first used. max_bytes: int or such as "1.5TB";
    never passed, by any number of processes and jobs. Several datasets and jobs may share one
    folder; all give the same limit. peers: has the nodes of a job serve one another what they hold.

    Raises ConfigError here for arguments that can't be; at first use for a folder on a network
    file system, of a newer format, or in use with another limit.
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
        self.peers = peers
        self._begin(os.path.abspath(os.fspath(path)), parse_size(max_bytes, what="max_bytes"), mode)

    def _begin(self, path: str, max_bytes: int | None, mode: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._mode = mode
        self._access = FolderAccess(path, max_bytes=max_bytes, mode=mode)
        self._remove: weakref.finalize[..., DiskCache] | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str], *, peers: Peers | None = None) -> DiskCache:
        """The cache in a folder with the limit that it has; a new one gets 90 % of what is free."""
        return _unlimited(cls(path, max_bytes=1, peers=peers))

    @classmethod
    def temporary(cls) -> DiskCache:
        """Make a cache in a folder of its own, removed at close() or at the interpreter's exit."""
        path = tempfile.mkdtemp(prefix="penstock-")
        cache = cls.at(path)
        cache._remove = weakref.finalize(cache, remove_own_folder, path, os.getpid())
        return cache

    @property
    def is_temporary(self) -> bool:
        """Whether close() removes it."""
        return self._remove is not None

    @property
    def max_bytes(self) -> int | None:
        """The limit; None before the first use of a cache that takes the folder's own."""
        shelf = self._access.shelf
        return shelf.max_bytes if shelf is not None else self._max_bytes

    @property
    def mode(self) -> int:
        """The mode of the folder."""
        return self._mode

    def __repr__(self) -> str:
        limit = format_size(self.max_bytes) if self.max_bytes else "the folder's own"
        return f"DiskCache({self.path!r}, max_bytes={limit!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned worker opens the folder anew."""
        return _again, (self.path, self._max_bytes, self._mode, self.peers)

    def open(self) -> None:
        """Open the folder now instead of at first use. Raises ConfigError; a disk that fails is one
        PenstockWarning."""
        self._access.open()

    def use(self, act: Callable[[CacheFolder], Any]) -> Any:
        """Return act(shelf), or None where the folder can't be written. Raises what act raises
        beside what a disk does."""
        return self._access.use(act)

    def look(self, act: Callable[[Lookup], Any]) -> Any:
        """Return act(lookup) for what a folder may still do that is full or can't be written; None
        where it can't be read. Raises as `use` does."""
        return self._access.look(act)

    def give_up(self, error: BaseException, *, reads: bool = False) -> None:
        """Write nothing for a while, and say so once. reads: read nothing, either."""
        self._access.give_up(error, reads=reads)

    @property
    def can_be_used(self) -> bool:
        """Whether the folder opens, and wasn't given up a moment ago."""
        return bool(self.use(lambda _: True))

    def folder(self, name: str, key: str) -> str | None:
        """Path of the folder NAME/KEY inside for other modules' files (indexes), NAME made; of a
        cache that can't be written only what is there. None if there is none."""

        def make(shelf: CacheFolder) -> str:
            return shelf.layout.top.folder(name, make=True).beneath(key)

        def find(lookup: Lookup) -> str | None:
            top = lookup.layout.top
            return top.folder(name).beneath(key) if top.is_folder(name) else None

        found: str | None = self.use(make) or self.look(find)
        return found

    def join(
        self, group: str, *, label: str, keys: Sequence[str], sizes: Iterable[int]
    ) -> PinnedShare:
        """Make a live job of this process, whose share of the limit is pinned until leave().

        group: of the dataset. label: for people. keys, sizes: blobs that this node reads in an
        epoch, and their bytes.
        """
        return PinnedShare(self.use, group=group, label=label, keys=keys, sizes=sizes)

    def close(self) -> None:
        """Let the folder go; open blobs stay readable. Safe to call twice."""
        self._access.close()
        if self._remove is not None:
            self._remove()


def _again(path: str, max_bytes: int | None, mode: int, peers: Peers | None) -> DiskCache:
    cache = DiskCache(path, max_bytes=max_bytes or 1, mode=mode, peers=peers)
    return cache if max_bytes is not None else _unlimited(cache)


def _unlimited(cache: DiskCache) -> DiskCache:
    """The same cache with the limit that its folder has."""
    cache._begin(cache.path, None, cache._mode)
    return cache
