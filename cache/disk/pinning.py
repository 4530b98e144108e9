"""Decide which blobs each live job pins in a cache, as jobs come and go.

Jobs share the limit evenly, those that read the same blobs as one; what one doesn't need goes to
the others. Of its share a job pins the blobs with the lowest keys, so that every process and job
agrees on which. `ReadSet` and `fair_shares` are pure.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.disk.catalogue import JobRow, new_job_id
from penstock.cache.disk.fill_files import fill_disk_bytes
from penstock.cache.disk.folder_layout import disk_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.cache.base import ByteLocks
    from penstock.cache.disk.cache_folder import CacheFolder

    Use = Callable[[Callable[[CacheFolder], Any]], Any]

ALL_KEYS = "g"
"""A threshold above every hex key: everything is pinned."""


class ReadSet:
    """A ReadSet is the blobs that a job reads in an epoch, by key.

    keys, sizes: and their bytes; reads: names the set; largest_bytes: of the largest blob.
    """

    def __init__(self, group: str, keys: Sequence[str], sizes: Iterable[int]) -> None:
        order = sorted(zip(keys, sizes, strict=True))
        self._keys = [key for key, _ in order]
        self._ends = np.cumsum([disk_bytes(size) for _, size in order], dtype=np.int64)
        self.reads = hashlib.sha256("\0".join((group, *self._keys)).encode()).hexdigest()[:32]
        self.largest_bytes = max((size for _, size in order), default=0)

    @property
    def disk_bytes(self) -> int:
        """What all of them take of the disk."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def has(self, key: str) -> bool:
        """Whether a blob is one of them."""
        place = bisect.bisect_left(self._keys, key)
        return place < len(self._keys) and self._keys[place] == key

    def threshold(self, share_bytes: int) -> str:
        """The key below which blobs fit into a share."""
        fits = int(np.searchsorted(self._ends, share_bytes, side="right"))
        return ALL_KEYS if fits == len(self._keys) else self._keys[fits]

    def bytes_below(self, threshold: str) -> int:
        """What the blobs with keys below a threshold take of the disk."""
        count = int(np.searchsorted(np.asarray(self._keys), threshold)) if self._keys else 0
        return int(self._ends[count - 1]) if count else 0

    def margin_bytes(self, fills: int) -> int:
        """What so many fills at once may take beyond the blobs that they become."""
        size_bytes = self.largest_bytes
        return fills * max(0, fill_disk_bytes(size_bytes, size_bytes // 4096) - size_bytes)


def fair_shares(jobs: Sequence[JobRow], budget_bytes: int) -> dict[str, int]:
    """Share bytes among the sets of blobs that live jobs read, by their names.

    Equal parts, and what one doesn't need goes to the others (max-min fairness).
    """
    wanted = {job.reads: job.wanted_bytes for job in jobs}
    shares: dict[str, int] = {}
    left = budget_bytes
    for place, (reads, want) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[reads] = min(want, left // (len(wanted) - place))
        left -= shares[reads]
    return shares


def guess_threshold(job: JobRow, share_bytes: int) -> str:
    """Guess where another job's pins end in a smaller share.

    Its own process, which knows its blobs, will say exactly.
    """
    part = share_bytes / job.wanted_bytes if job.wanted_bytes else 1.0
    return min(job.below, f"{int(part * 0xFFFFFFFF):08x}" if part < 1 else ALL_KEYS)


# Manifests, sidecars and fills in flight, beside what is pinned.
_MARGIN_SHARE = 0.002
_FILLS_AT_ONCE = 16
# Another job's row gets its smaller share from this much on; it looks again by itself, too.
_NOTED_SHARE = 0.02


class PinnedShare:
    """A PinnedShare is a live job of this process in a cache, until leave().

    It holds a lock that ends with the process, so that the job of a dead one is forgotten. use: of
    the cache. group: of the dataset; label: for people. keys, sizes: blobs that this node reads in
    an epoch, and their bytes. share_bytes: what may be pinned.
    """

    def __init__(
        self, use: Use, *, group: str, label: str, keys: Sequence[str], sizes: Iterable[int]
    ) -> None:
        self._use = use
        self._group, self._label = group, label
        self._read_set = ReadSet(group, keys, sizes)
        self._below = ""
        self._lock: ByteLocks | None = None
        self._job: int | None = None
        self._owner = os.getpid()
        self.share_bytes = 0
        use(self._join)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of all that this node reads in an epoch."""
        return self._read_set.disk_bytes

    @property
    def pinned_bytes(self) -> int:
        """Those of `wanted_bytes` that the cache keeps or will keep."""
        return self._read_set.bytes_below(self._below)

    def pins(self, key: str) -> bool:
        """Whether the cache keeps this blob for the job; never one that the job doesn't read."""
        return key < self._below and self._read_set.has(key)

    @property
    def fits(self) -> bool:
        """Whether everything is pinned."""
        return self._below == ALL_KEYS

    def refresh(self) -> bool:
        """Look again, as jobs come and go; whether what is pinned has changed."""
        before = self._below
        self._use(self._join if self._job is None else self._share)
        return self._below != before

    def leave(self) -> None:
        """End the job's claims; what it pinned stays until others need the room. Safe to call
        twice."""
        job, self._job = self._job, None
        if job is not None and os.getpid() == self._owner:
            self._use(lambda shelf: shelf.catalogue.jobs.remove(job))
            self._use(lambda shelf: shelf.uses.flush())
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _join(self, shelf: CacheFolder) -> None:
        with shelf.catalogue.writing():
            lock, job = shelf.layout.locks("jobs"), new_job_id()
            while not lock.lock(job + 1):
                job = new_job_id()
            self._lock, self._job = lock, job
            self._share(shelf)

    def _share(self, shelf: CacheFolder) -> None:
        """Take this job's share, and make room for it in the rows of the others."""
        table, blobs = shelf.catalogue.jobs, shelf.catalogue.blobs
        with shelf.catalogue.writing():
            shelf.leftovers.forget_dead_jobs()
            jobs = table.rows()
            if self._job is not None:
                # Each time: the books may be new, or not what was written.
                mine = self._row(self._job)
                table.add(mine)
                shelf.catalogue.labels.set(self._group, self._label)
                blobs.claim(self._group, self._read_set.has)
                jobs = [mine, *(job for job in jobs if job.id != self._job)]
            kept = sum(map(blobs.kept_bytes, {job.group for job in jobs}))
            budget = shelf.room.steady_budget_bytes
            margin = int(budget * _MARGIN_SHARE) + self._read_set.margin_bytes(_FILLS_AT_ONCE)
            share = fair_shares(jobs, max(0, budget - kept - margin))
            self.share_bytes = share[self._read_set.reads]
            self._below = self._read_set.threshold(self.share_bytes)
            for job in jobs:
                below = self._threshold_of(job, share[job.reads])
                if below is not None:
                    table.set_share(job.id, share_bytes=share[job.reads], below=below)

    def _row(self, job: int) -> JobRow:
        return JobRow(
            id=job,
            group=self._group,
            reads=self._read_set.reads,
            wanted_bytes=self.wanted_bytes,
            share_bytes=self.share_bytes,
            below=self._below,
            pid=os.getpid(),
        )

    def _threshold_of(self, job: JobRow, share_bytes: int) -> str | None:
        """A job's threshold for a new share; None where it stays."""
        if job.reads == self._read_set.reads:  # this one, or another rank of the same job
            return self._below
        if share_bytes >= (1 - _NOTED_SHARE) * job.share_bytes:
            return None
        return guess_threshold(job, share_bytes)
