"""A live job's part in a cache: what of it is pinned, as jobs come and go."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from penstock.cache.disk.job_table import JobRow, new_job_id
from penstock.cache.disk.shares import ALL, ReadSet, fair_shares, guess_threshold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from penstock.cache.base.locks import ByteLocks
    from penstock.cache.disk.shelf import Shelf

    Use = Callable[[Callable[[Shelf], Any]], Any]

# Manifests, sidecars and fills in flight, beside what is pinned.
_MARGIN_SHARE = 0.002
_FILLS_AT_ONCE = 16
# Another job's row gets its smaller share from this much on; it looks again by itself, too.
_NOTED_SHARE = 0.02


class Membership:
    """A Membership is a live job of this process in a cache, until leave().

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
        return self._below == ALL

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

    def _join(self, shelf: Shelf) -> None:
        with shelf.catalogue.writing():
            lock, job = shelf.layout.locks("jobs"), new_job_id()
            while not lock.lock(job + 1):
                job = new_job_id()
            self._lock, self._job = lock, job
            self._share(shelf)

    def _share(self, shelf: Shelf) -> None:
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
