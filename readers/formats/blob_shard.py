"""Shards of remote data: a table of where the samples lie in a blob, and the blob.

Whatever the container, a blob's samples are loaded alike, so one class serves files and, with
columns of its own, packs. The bytes come through `Remote.load`, for one
shard here, for all shards of a batch in `readers.dataset`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.base.blob import BlobSpans
from penstock.readers.files.pages import advise_willneed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, ReadMode
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.types import Encoded


class BlobShard:
    """Samples in a blob of the cache. table: START and END count from the blob's first byte."""

    is_mapped = True
    is_file_per_sample = False

    def __init__(self, remote: Remote, blob: Blob, table: NDArray[np.int64]) -> None:
        self.blob, self.table = blob, table
        self._remote = remote

    def views(self, starts: list[int], ends: list[int]) -> list[Encoded]:
        """Views of a cached blob, else fresh memory. Raises FetchError."""
        return self._load(starts, ends, "mmap")

    def read_into(self, rows: list[int], starts: list[int], slots: list[Encoded]) -> None:
        """Read the samples and copy them into their slots."""
        del rows
        ends = [start + len(slot) - 1 for start, slot in zip(starts, slots, strict=True)]
        for slot, sample in zip(slots, self._load(starts, ends, "pread"), strict=True):
            slot[:-1] = sample

    def _load(self, starts: list[int], ends: list[int], mode: ReadMode) -> list[Encoded]:
        (samples,) = self._remote.load(
            [BlobSpans(blob=self.blob, starts=starts, ends=ends)], mode=mode
        )
        return samples

    def advise(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Ask the kernel to read ahead what is on the local disk."""
        address = self.blob.address()
        if address is not None:
            advise_willneed(address + starts, address + ends)
