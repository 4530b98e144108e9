"""How live jobs share a cache, and which blobs of its share a job pins. Pure.

Jobs share the limit evenly, those that read the same blobs as one; what one doesn't need goes to
the others. Of its share a job pins the blobs with the lowest keys, so that every process and job
agrees on which.
"""

from __future__ import annotations

import bisect
import hashlib
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.disk.fills import fill_disk_bytes
from penstock.cache.disk.layout import disk_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.cache.disk.job_table import JobRow

ALL = "g"
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
        return ALL if fits == len(self._keys) else self._keys[fits]

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
    return min(job.below, f"{int(part * 0xFFFFFFFF):08x}" if part < 1 else ALL)
