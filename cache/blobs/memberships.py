"""The jobs of this process that read a dataset: what they pin is what the cache keeps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cache.disk.disk_cache import DiskCache
    from penstock.cache.disk.membership import Membership


class Memberships:
    """Holds a dataset's live jobs in the node's cache. Safe for several threads.

    cache: None keeps nothing. group, label: see DatasetCache.
    """

    def __init__(self, cache: DiskCache | None, *, group: str, label: str) -> None:
        self._cache, self._group, self._label = cache, group, label
        self._lock = threading.Lock()
        self._jobs: tuple[Membership, ...] = ()

    def __len__(self) -> int:
        """How many were joined and not left."""
        return len(self._jobs)

    def keeps(self, key: str) -> bool:
        """Whether the cache would keep a blob of this key: for one of the jobs, or without any."""
        jobs = self._jobs
        return self._cache is not None and (not jobs or any(job.pins(key) for job in jobs))

    def join(self, keys: Sequence[str], sizes: Iterable[int]) -> Membership | None:
        """Begin a job; None without a cache. See Remote.join."""
        if self._cache is None:
            return None
        job = self._cache.join(self._group, label=self._label, keys=keys, sizes=sizes)
        with self._lock:
            self._jobs = (*self._jobs, job)
        return job

    def leave(self, job: Membership) -> None:
        """End a job. Safe to call twice."""
        with self._lock:
            self._jobs = tuple(other for other in self._jobs if other is not job)
        job.leave()

    def close(self) -> None:
        """End all jobs. Safe to call twice."""
        for job in self._jobs:
            self.leave(job)
