"""The cache that users make: a folder of the node's own disk, and a limit.

Whatever is wrong with the folder's disk (full, read-only, another user's) costs one warning and the
cache's use, never the job: without it every byte comes from the remote. What is wrong with the
arguments is an error.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import shutil
import sqlite3
import tempfile
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from penstock.cache.base.folders import StrangeFileError
from penstock.cache.base.sizes import format_size, parse_size
from penstock.cache.disk.catalogue import Job, is_damage, new_job
from penstock.cache.disk.fills import fill_disk_bytes
from penstock.cache.disk.layout import disk_bytes
from penstock.cache.disk.published import Published
from penstock.cache.disk.shelf import Shelf
from penstock.cache.errors import ConfigError, PenstockError, PenstockWarning, StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.cache.base.locks import ByteLocks

# What a disk can do to us. A catalogue that can't be had in time counts as one of these.
TROUBLE = (OSError, sqlite3.Error, StalledError)

# After a failed write the disk is left alone for a while: a full one doesn't empty by asking.
_RETRY_DISK_S = 30.0
# Manifests, sidecars and fills in flight, beside what is pinned.
_MARGIN_SHARE = 0.002
_FILLS_AT_ONCE = 16
# Another job is told of a smaller share from this much on; it looks again by itself, too.
_TOLD_SHARE = 0.02
_ALL = "g"  # above every hex key


class DiskCache:
    """A folder on a local disk that keeps remote objects, shared by every process of a node.

    path: the folder; it is made (mode) when it is first used. max_bytes: int or such as "1.5TB";
    never passed, by any number of processes and jobs. Several datasets and jobs may share one
    folder; all give the same limit.

    Raises ConfigError here for arguments that can't be; at first use for a folder on a network
    file system, of a newer format, or in use with another limit.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int | str, mode: int = 0o700
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ConfigError(f"cache: got {path!r}, wanted the path of a folder on a local disk.")
        self._begin(os.path.abspath(os.fspath(path)), parse_size(max_bytes, what="max_bytes"), mode)

    def _begin(self, path: str, max_bytes: int | None, mode: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._mode = mode
        self._lock = threading.RLock()
        self._shelf: Shelf | None = None
        self._readable: Published | None = None  # in its place, where it can't be written
        self._warned = self._told_damage = False
        self._resting_until = self._unread_until = 0.0
        self._owner = os.getpid()
        self._remove: weakref.finalize[..., DiskCache] | None = None

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> DiskCache:
        """The cache in a folder with the limit that it has; a new one gets 90 % of what is free."""
        cache = cls(path, max_bytes=1)
        cache._max_bytes = None
        return cache

    @classmethod
    def temporary(cls) -> DiskCache:
        """A cache in a folder of its own, removed at close() or at the interpreter's exit."""
        path = tempfile.mkdtemp(prefix="penstock-")
        cache = cls.at(path)
        cache._remove = weakref.finalize(cache, _remove_folder, path, os.getpid())
        return cache

    @property
    def is_temporary(self) -> bool:
        """Whether close() removes it."""
        return self._remove is not None

    @property
    def max_bytes(self) -> int | None:
        """The limit; None before the first use of a cache that takes the folder's own."""
        return self._shelf.max_bytes if self._shelf is not None else self._max_bytes

    def __repr__(self) -> str:
        limit = format_size(self.max_bytes) if self.max_bytes else "the folder's own"
        return f"DiskCache({self.path!r}, max_bytes={limit!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """A spawned worker opens the folder anew."""
        return _again, (self.path, self._max_bytes, self._mode)

    def open(self) -> None:
        """Open the folder now instead of at first use. Raises ConfigError; a disk that fails is one
        PenstockWarning."""
        self._opened(writes=True)

    def use(self, act: Callable[[Shelf], Any]) -> Any:
        """act(shelf), or None where the folder can't be written. Raises what act raises beside what
        a disk does."""
        shelf = None if time.monotonic() < self._resting_until else self._opened(writes=True)
        return None if shelf is None else self._try(act, shelf)

    def look(self, act: Callable[[Published], Any]) -> Any:
        """act(cache) for what a folder may still do that is full or can't be written; None where it
        can't be read. Raises as `use` does."""
        cache = None if time.monotonic() < self._unread_until else self._opened(writes=False)
        return None if cache is None else self._try(act, cache)

    def _try(self, act: Callable[[Any], Any], cache: Published) -> Any:
        try:
            try:
                return act(cache)
            except sqlite3.DatabaseError as error:
                if not is_damage(error) or not isinstance(cache, Shelf):
                    raise
                with self._lock:
                    cache.heal(error)
                self._tell_damage(cache)
                return act(cache)
        except TROUBLE as error:
            if isinstance(error, PenstockError) and not isinstance(error, StalledError):
                raise
            self.give_up(error)
            return None

    @overload
    def _opened(self, *, writes: Literal[True]) -> Shelf | None: ...
    @overload
    def _opened(self, *, writes: Literal[False]) -> Published | None: ...
    def _opened(self, *, writes: bool) -> Published | None:
        """The open folder, opened if it isn't; None where it can't be used that way."""
        if os.getpid() != self._owner:
            raise ConfigError(
                f"{self!r} was made before this process was forked, and its locks are its "
                'parent\'s. Pass multiprocessing_context="forkserver" (or "spawn"), or make the '
                "dataset in the worker."
            )
        with self._lock:
            known = self._shelf or self._readable
            may_try = time.monotonic() >= self._resting_until
            if self._shelf is None and may_try and (writes or known is None):
                self._open_shelf()
            return self._shelf if writes else self._shelf or self._readable

    def _open_shelf(self) -> None:
        try:
            shelf = Shelf(self.path, max_bytes=self._max_bytes, mode=self._mode)
            exposed = shelf.layout.others_may_write()
        except TROUBLE as error:
            if isinstance(error, PenstockError) and not isinstance(error, StalledError):
                raise
            if self._readable is None:  # what was published needs no database
                self._readable = Published.at(self.path, mode=self._mode)
            self.give_up(error)
            return
        self._shelf, self._readable = shelf, None
        self._tell_damage(shelf)
        if exposed is not None:
            self._warn(
                f"{exposed}: other users may write into this cache, so they can take files out of "
                "it and put others in. Files of theirs aren't used. `chmod go-w` mends it; for a "
                "cache that a group shares pass mode=0o770."
            )

    def _tell_damage(self, shelf: Shelf) -> None:
        damage, shelf.damage[:] = tuple(shelf.damage), ()
        if damage and not self._told_damage:
            self._told_damage = True
            self._warn(
                f"{self.path}: the cache's own notes were damaged ({'; '.join(damage)}), and are "
                "made anew from its files. If that happens again, look at the disk."
            )

    def _warn(self, text: str) -> None:
        warnings.warn(text, PenstockWarning, stacklevel=2)

    def give_up(self, error: BaseException, *, reads: bool = False) -> None:
        """Write nothing for a while, and say so once. reads: read nothing, either."""
        self._resting_until = time.monotonic() + _RETRY_DISK_S
        if reads:
            self._unread_until = self._resting_until
        if self._warned:
            return
        self._warned = True
        reason = getattr(error, "strerror", None) or str(error)
        if isinstance(error, StrangeFileError) and error.filename != self.path:
            reason = f"{error.filename}: {reason}"
        warnings.warn(
            f"{self.path}: the cache can't be used ({reason}): what isn't in it comes from the "
            "remote each time. Look at the disk's space, inodes and rights (`penstock doctor "
            f"{self.path}`); it is tried again every {_RETRY_DISK_S:.0f} s.",
            PenstockWarning,
            stacklevel=2,
        )

    @property
    def can_be_used(self) -> bool:
        """Whether the folder opens and isn't resting after trouble."""
        return bool(self.use(lambda _: True))

    def folder(self, name: str, key: str) -> str | None:
        """Path of the folder NAME/KEY inside for other modules' files (indexes), NAME made; of a
        cache that can't be written only what is there. None if there is none."""

        def make(shelf: Shelf) -> str:
            return shelf.layout.top.folder(name, make=True).beneath(key)

        def find(cache: Published) -> str | None:
            top = cache.layout.top
            return top.folder(name).beneath(key) if top.is_folder(name) else None

        found: str | None = self.use(make) or self.look(find)
        return found

    def join(
        self, group: str, *, label: str, keys: Sequence[str], sizes: Iterable[int]
    ) -> Membership:
        """Make a live job of this process, whose share of the limit is pinned until leave().

        group: of the dataset. label: for people. keys, sizes: blobs that this node reads in an
        epoch, and their bytes.
        """
        return Membership(self, group, label, keys, sizes)

    def close(self) -> None:
        """Let the folder go; open blobs stay readable. Safe to call twice."""
        with self._lock:
            if self._shelf is not None and os.getpid() == self._owner:
                self._shelf.close()
            self._shelf = self._readable = None
            if self._remove is not None:
                self._remove()


class Membership:
    """A live job's part in a cache.

    Live jobs share the limit evenly, those that read the same blobs as one; what one doesn't need
    goes to the others. Of its share a job pins the blobs with the lowest keys, so that every
    process and job agrees on which.
    """

    def __init__(
        self,
        cache: DiskCache,
        group: str,
        label: str,
        keys: Sequence[str],
        sizes: Iterable[int],
    ) -> None:
        self._cache = cache
        self._group, self._label = group, label
        order = sorted(zip(keys, sizes, strict=True))
        self._keys = [key for key, _ in order]
        self._reads = hashlib.sha256("\0".join((group, *self._keys)).encode()).hexdigest()[:32]
        self._ends = np.cumsum([disk_bytes(size) for _, size in order], dtype=np.int64)
        self._largest = max((size for _, size in order), default=0)
        self._below = ""
        self._marks: ByteLocks | None = None
        self._job: int | None = None
        self.share_bytes = 0
        cache.use(self._join)

    @property
    def wanted_bytes(self) -> int:
        """All that this node reads in an epoch."""
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def pinned_bytes(self) -> int:
        """Of that, what is or will be kept."""
        count = int(np.searchsorted(np.asarray(self._keys), self._below)) if self._keys else 0
        return int(self._ends[count - 1]) if count else 0

    def pinned(self, key: str) -> bool:
        """Whether the cache keeps this blob for the job; never one that the job doesn't read."""
        if key >= self._below:
            return False
        place = bisect.bisect_left(self._keys, key)
        return place < len(self._keys) and self._keys[place] == key

    @property
    def fits(self) -> bool:
        """Whether everything is pinned."""
        return self._below == _ALL

    def _join(self, shelf: Shelf) -> None:
        with shelf.catalogue.writing():
            shelf.catalogue.label(self._group, self._label)
            marks, job = shelf.layout.locks("jobs"), new_job()
            while not marks.lock(job + 1):
                job = new_job()
            self._marks, self._job = marks, job
            self._share(shelf)

    def refresh(self) -> bool:
        """Look again, as jobs come and go; whether what is pinned has changed."""
        before = self._below
        if self._job is None:
            self._cache.use(self._join)
        else:
            self._cache.use(self._share)
        return self._below != before

    def _share(self, shelf: Shelf) -> None:
        with shelf.catalogue.writing():
            shelf.bury_dead_jobs()
            jobs = shelf.catalogue.jobs()
            if self._job is not None:
                # Each time: the books may be new, or not what was written.
                mine = self._as_job(self._job)
                shelf.catalogue.add_job(mine)
                jobs = [mine, *(job for job in jobs if job.id != self._job)]
            kept = sum(map(shelf.catalogue.kept_bytes, {job.group for job in jobs}))
            extra = fill_disk_bytes(self._largest, self._largest // 4096) - self._largest
            budget = shelf.steady_budget_bytes
            margin = int(budget * _MARGIN_SHARE) + _FILLS_AT_ONCE * max(0, extra)
            share = fair_shares(jobs, max(0, budget - kept - margin))
            self.share_bytes = share[self._reads]
            self._below = self._threshold(self.share_bytes)
            for job in jobs:
                below = self._told(job, share[job.reads])
                if below is not None:
                    shelf.catalogue.set_share(job.id, share_bytes=share[job.reads], below=below)

    def _as_job(self, number: int) -> Job:
        return Job(
            id=number,
            group=self._group,
            reads=self._reads,
            wanted_bytes=self.wanted_bytes,
            share_bytes=self.share_bytes,
            below=self._below,
            pid=os.getpid(),
        )

    def _told(self, job: Job, share: int) -> str | None:
        """A job's threshold for a new share; None where it stays."""
        if job.reads == self._reads:  # this one, or another rank of the same job
            return self._below
        if share >= (1 - _TOLD_SHARE) * job.share_bytes:
            return None
        # Its own process knows its blobs and will say exactly; until then, about.
        part = share / job.wanted_bytes if job.wanted_bytes else 1.0
        return min(job.below, f"{int(part * 0xFFFFFFFF):08x}" if part < 1 else _ALL)

    def _threshold(self, share: int) -> str:
        fits = int(np.searchsorted(self._ends, share, side="right"))
        return _ALL if fits == len(self._keys) else self._keys[fits]

    def leave(self) -> None:
        """End the job's claims; what it pinned stays until others need the room. Safe to call
        twice."""
        job, self._job = self._job, None
        if job is not None and os.getpid() == self._cache._owner:
            self._cache.use(lambda shelf: shelf.catalogue.remove_job(job))
            self._cache.use(lambda shelf: shelf.flush_uses())
        if self._marks is not None:
            self._marks.close()
            self._marks = None


def fair_shares(jobs: Sequence[Job], budget: int) -> dict[str, int]:
    """Bytes for each set of blobs that live jobs read, by its name: equal parts, and what one
    doesn't need goes to the others (max-min fairness). Pure."""
    wanted = {job.reads: job.wanted_bytes for job in jobs}
    shares: dict[str, int] = {}
    left = budget
    for place, (reads, want) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[reads] = min(want, left // (len(wanted) - place))
        left -= shares[reads]
    return shares


def _again(path: str, max_bytes: int | None, mode: int) -> DiskCache:
    cache = DiskCache(path, max_bytes=max_bytes or 1, mode=mode)
    cache._max_bytes = max_bytes
    return cache


def _remove_folder(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child's exit must not take its parent's files away
        shutil.rmtree(path, ignore_errors=True)
