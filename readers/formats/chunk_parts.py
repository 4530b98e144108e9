"""What a batch wants of one remote shard of chunks, and what came of it.

All that the shards of a batch miss is fetched at once, before anything is decoded: so a batch over
many cold shards waits for the remote about once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base.blob import BlobSpans

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base.blob import Blob
    from penstock.readers.formats.arrivals import Coming
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkParts:
    """Bytes of a shard's blob, and of what lies beside it.

    blobs: one or two, which lie end to end here; starts, ends: bytes of them that are wanted,
    ascending, none touching another, int64, shape (parts,); cut: how many of them are of the first.
    begins: of each extent its first byte here, below 0 where nothing of it is wanted. claimed: the
    extents that other batches wait for; others: those that others fetch.
    """

    blobs: Sequence[Blob]
    starts: Ints
    ends: Ints
    cut: int
    begins: Ints
    claimed: Mapping[int, Coming[Any]] = field(default_factory=dict)
    others: Mapping[int, Coming[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, blobs: Sequence[Blob], begins: Ints, starts: Ints, ends: Ints) -> ChunkParts:
        """What lies side by side is asked for as one. starts, ends: in any order, none empty."""
        border = blobs[0].source.size_bytes
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        is_new = np.ones(len(starts), np.bool_)
        is_new[1:] = (starts[1:] > reach[:-1]) | ((starts[1:] >= border) & (starts[:-1] < border))
        first = np.flatnonzero(is_new)
        last = np.append(first[1:], len(starts)) - 1
        merged = starts[first]
        cut = int(np.searchsorted(merged, border))
        return cls(
            blobs=blobs, starts=merged, ends=reach[last[: len(first)]], cut=cut, begins=begins
        )

    def settle(self, holder: object) -> None:
        """Tell who waits for what was claimed. holder: who has it; None: it doesn't come, unless it
        has."""
        for coming in self.claimed.values():
            coming.settle(holder)

    def spans(self) -> list[BlobSpans]:
        """What to load, of each blob."""
        found, offset = [], 0
        parts = (slice(0, self.cut), slice(self.cut, None))
        for blob, mine in zip(self.blobs, parts, strict=False):
            starts, ends = self.starts[mine] - offset, self.ends[mine] - offset
            found.append(BlobSpans(blob=blob, starts=starts.tolist(), ends=ends.tolist()))
            offset += blob.source.size_bytes
        return found

    def find(self, loaded: Sequence[Encoded], extent: int, start: int, end: int) -> Encoded | None:
        """Bytes of an extent among what came; None where they weren't wanted. loaded: of each
        part."""
        begin = int(self.begins[extent])
        if begin < 0 or not len(self.starts):
            return None
        low, high = begin + start, begin + end
        part = int(np.searchsorted(self.starts, low, side="right")) - 1
        if part < 0 or high > self.ends[part]:
            return None
        at = low - int(self.starts[part])
        return loaded[part][at : at + high - low]

    def begin(self, extent: int) -> int:
        """The first byte of an extent in its own blob."""
        begin, border = int(self.begins[extent]), self.blobs[0].source.size_bytes
        return begin if begin < border else begin - border
