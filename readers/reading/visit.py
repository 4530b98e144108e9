"""The samples of one batch, sorted by the shards that they lie in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.formats.shard import END, START

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.readers.formats.shard import OpenShard


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """The samples of one batch, shard by shard.

    numbers: of the shards; bounds: where each shard's samples start, and the end; rows: int64,
    shape (n,); table: int64, shape (n, 6).
    """

    numbers: list[int]
    shards: list[OpenShard]
    bounds: list[int]
    rows: NDArray[np.int64]
    table: NDArray[np.int64]

    @classmethod
    def of(
        cls, numbers: list[int], shards: list[OpenShard], bounds: list[int], rows: NDArray[np.int64]
    ) -> Visit:
        """Gather the samples' rows of their shards' tables."""
        spans = zip(shards, bounds, bounds[1:], strict=False)
        pieces = [shard.table.take(rows[a:b], axis=0) for shard, a, b in spans]
        table = np.concatenate(pieces) if pieces else np.empty((0, 6), np.int64)
        return cls(numbers=numbers, shards=shards, bounds=bounds, rows=rows, table=table)

    def pieces(self) -> Iterator[tuple[OpenShard, int, int]]:
        """Each shard and its samples [a, b)."""
        return zip(self.shards, self.bounds, self.bounds[1:], strict=False)

    def advise(self) -> None:
        """Let the kernel read ahead what is on the local disk."""
        starts, ends = self.table[:, START], self.table[:, END]
        for shard, a, b in self.pieces():
            shard.advise(starts[a:b], ends[a:b])
