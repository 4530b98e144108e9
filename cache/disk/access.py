"""The way into a cache folder: opened at first use, and left alone for a while when it fails.

Whatever is wrong with the folder's disk (full, read-only, another user's) costs one warning and the
cache's use, never the job: without it every byte comes from the remote.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import warnings
from typing import TYPE_CHECKING, Any

from penstock.cache.base.machine import is_shortage, machine_remedy
from penstock.cache.base.trust import StrangeFileError
from penstock.cache.disk.lookup import Lookup
from penstock.cache.disk.shelf import Shelf
from penstock.cache.errors import ConfigError, PenstockError, PenstockWarning, StalledError

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self.shelf: Shelf | None = None
        self._readable: Lookup | None = None  # in its place, where it can't be written
        self._warned = False
        self._no_writes_until_s = self._no_reads_until_s = 0.0
        self.owner = os.getpid()

    def use(self, act: Callable[[Shelf], Any]) -> Any:
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

    def _try(self, act: Callable[[Any], Any], subject: Shelf | Lookup, shelf: Shelf | None) -> Any:
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

    def _writable(self) -> Shelf | None:
        self._check_process()
        with self._lock:
            if self.shelf is None and time.monotonic() >= self._no_writes_until_s:
                self._open()
            return self.shelf

    def _readable_now(self) -> tuple[Shelf | None, Lookup | None]:
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
            shelf = Shelf(self._path, max_bytes=self._max_bytes, mode=self._mode)
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

    def _warn_of_damage(self, shelf: Shelf) -> None:
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
