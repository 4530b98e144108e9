"""Checks a whole blob of the local disk block by block, each when somebody first looks into it.

For samples that have no checksums of their own: what came first is trusted, and what the disk makes
of it later is noticed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.cache.blobs.cached_blob import CachedBlob
from penstock.cache.disk.block_crcs import BLOCK_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob, ReadMode
    from penstock.cache.blobs.dataset_cache import DatasetCache

    Ints = NDArray[np.int64]


class BlockSums:
    """The checksums of one blob's blocks. crcs: as the books have them. Safe for several threads:
    two may check one block."""

    def __init__(self, blob: CachedBlob, crcs: bytes) -> None:
        self._blob = blob
        self._wanted = np.frombuffer(crcs, "<u4")
        self._is_right = np.zeros(len(self._wanted), np.bool_)
        self._are_all_right = False

    def are_right(self, starts: Ints, ends: Ints, mode: ReadMode) -> bool:
        """Whether bytes [start, end) of the blob are those that came. int64, shape (n,). mode:
        "pread" reads the file. Raises OSError, EOFError with it."""
        if self._are_all_right:
            return True
        some = ends > starts
        low, high = starts[some] // BLOCK_BYTES, (ends[some] - 1) // BLOCK_BYTES
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            for block in range(first, last + 1):
                if not self._is_right[block] and not self._check(block, mode):
                    return False
        self._are_all_right = bool(self._is_right.all())
        return True

    def _check(self, block: int, mode: ReadMode) -> bool:
        start = block * BLOCK_BYTES
        end = min(start + BLOCK_BYTES, len(self._blob.data))
        read = self._blob.copies if mode == "pread" else self._blob.views
        (data,) = read([start], [end])
        self._is_right[block] = crc32c(data) == self._wanted[block]
        return bool(self._is_right[block])


def block_sums(blob: Blob, cache: DatasetCache) -> BlockSums | None:
    """As `Remote.block_sums`."""
    if not isinstance(blob, CachedBlob) or blob.fill is not None:
        return None
    row = cache.use(lambda shelf: shelf.catalogue.blobs.row(blob.source.key))
    if row is None or row.crcs is None or len(row.crcs) != -(-len(blob.data) // BLOCK_BYTES) * 4:
        return None
    return BlockSums(blob, row.crcs)
