"""Decide which blobs each live job pins in a cache, as jobs start and end.

Jobs share the limit evenly; jobs that read the same blobs count as one, and a share that a job
doesn't need goes to the others. A job pins the blobs with the lowest keys that fit into its share,
so all processes agree on the pinned blobs. `ReadSet` and `fair_shares` are pure.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from dataclasses import replace
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
"""A threshold above every hexadecimal key: all blobs are pinned."""


class ReadSet:
    """The blobs that a job reads in an epoch.

    keys, sizes: the keys of the blobs, and their sizes in bytes. reads: a hash that names the set.
    largest_bytes: the size of the largest blob.
    """

    def __init__(self, group: str, keys: Sequence[str], sizes: Iterable[int]) -> None:
        order = sorted(zip(keys, sizes, strict=True))
        self._keys = [key for key, _ in order]
        self._ends = np.cumsum([disk_bytes(size) for _, size in order], dtype=np.int64)
        self.reads = hashlib.sha256("\0".join((group, *self._keys)).encode()).hexdigest()[:32]
        self.largest_bytes = max((size for _, size in order), default=0)

    @property
    def disk_bytes(self) -> int:
        """The bytes of all blobs on the disk."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def has(self, key: str) -> bool:
        """Return True if the set contains a blob."""
        place = bisect.bisect_left(self._keys, key)
        return place < len(self._keys) and self._keys[place] == key

    def threshold(self, share_bytes: int) -> str:
        """Return the key below which the blobs fit into a share."""
        fits = int(np.searchsorted(self._ends, share_bytes, side="right"))
        return ALL_KEYS if fits == len(self._keys) else self._keys[fits]

    def bytes_below(self, threshold: str) -> int:
        """Return the bytes on the disk of the blobs with keys below a threshold."""
        count = int(np.searchsorted(np.asarray(self._keys), threshold)) if self._keys else 0
        return int(self._ends[count - 1]) if count else 0


def fair_shares(jobs: Sequence[JobRow], budget_bytes: int) -> dict[str, int]:
    """Divide bytes among the sets of blobs that live jobs read: max-min fair, by set name."""
    wanted = {job.reads: job.wanted_bytes for job in jobs}
    shares: dict[str, int] = {}
    left = budget_bytes
    for place, (reads, want) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        shares[reads] = min(want, left // (len(wanted) - place))
        left -= shares[reads]
    return shares


def guess_threshold(job: JobRow, share_bytes: int) -> str:
    """Estimate the threshold of another job for a smaller share.

    The job's own process knows its blobs and computes the exact threshold at its next refresh.
    """
    part = share_bytes / job.wanted_bytes if job.wanted_bytes else 1.0
    return min(job.below, f"{int(part * 0xFFFFFFFF):08x}" if part < 1 else ALL_KEYS)


# Left free for manifests, sidecars and fills in progress.
_MARGIN_SHARE = 0.002
_FILLS_AT_ONCE = 16
# Another job's row is changed only if its share shrinks by more; the job refreshes it as well.
_LEAST_CHANGE = 0.02


class PinnedShare:
    """A live job of this process in a cache, and its pinned blobs, until leave().

    It holds a lock that the system releases with the process, so a dead process's job is deleted.
    use: DiskCache.use. group: the id of the dataset. label: the dataset's name in listings. keys,
    sizes: the keys of the blobs that this node reads in an epoch, and their sizes in bytes.
    """

    def __init__(
        self, use: Use, *, group: str, label: str, keys: Sequence[str], sizes: Iterable[int]
    ) -> None:
        self._use, self._label = use, label
        self._read_set = ReadSet(group, keys, sizes)
        self._lock: ByteLocks | None = None
        reads, wanted_bytes = self._read_set.reads, self._read_set.disk_bytes
        self._job = JobRow(group=group, reads=reads, wanted_bytes=wanted_bytes, pid=os.getpid())
        use(self._join)

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the pinned blobs, filled or not."""
        return self._read_set.bytes_below(self._job.below)

    def pins(self, key: str) -> bool:
        """Return True if the job reads this blob and the cache keeps it."""
        return key < self._job.below and self._read_set.has(key)

    def refresh(self) -> bool:
        """Compute the share again for the current jobs; return True if the pinned set changed."""
        before = self._job.below
        self._use(self._share if self._job.id else self._join)
        return self._job.below != before

    def leave(self) -> None:
        """End the job; its blobs stay until other jobs need their space. Safe to call twice."""
        job, self._job = self._job, replace(self._job, id=0)
        if job.id and os.getpid() == job.pid:
            self._use(lambda folder: folder.catalogue.remove_job(job.id))
            self._use(lambda folder: folder.space.flush_uses())
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _join(self, folder: CacheFolder) -> None:
        with folder.catalogue.writing():
            lock, job = folder.layout.locks("jobs"), new_job_id()
            while not lock.lock(job + 1):
                job = new_job_id()
            self._lock, self._job = lock, replace(self._job, id=job)
            self._share(folder)

    def _share(self, folder: CacheFolder) -> None:
        """Compute this job's share, and reduce the shares of other jobs where necessary."""
        catalogue, own = folder.catalogue, self._job
        with catalogue.writing():
            folder.space.forget_dead_jobs()
            # Written each time, because the catalogue may have been rebuilt or damaged.
            catalogue.add_job(own)
            catalogue.set_label(own.group, self._label)
            catalogue.claim(own.group, self._read_set.has)
            jobs = catalogue.jobs()
            groups = {job.group for job in jobs}
            kept = sum(catalogue.group_bytes(group, kept=True) for group in groups)
            budget, largest = folder.space.steady_budget_bytes, self._read_set.largest_bytes
            margin = int(budget * _MARGIN_SHARE)
            margin += _FILLS_AT_ONCE * max(0, fill_disk_bytes(largest) - largest)
            share = fair_shares(jobs, max(0, budget - kept - margin))
            below = self._read_set.threshold(share[own.reads])
            self._job = replace(own, share_bytes=share[own.reads], below=below)
            for job in jobs:
                job_bytes = share[job.reads]
                if job.reads == own.reads:  # this job, or another rank of it
                    catalogue.set_share(job.id, share_bytes=job_bytes, below=below)
                elif job_bytes < (1 - _LEAST_CHANGE) * job.share_bytes:
                    guess = guess_threshold(job, job_bytes)
                    catalogue.set_share(job.id, share_bytes=job_bytes, below=guess)
