"""The layout under an order: shards cut into lanes, a lane's pieces in an epoch's order. Pure.

A *stream coordinate* counts samples of the shards laid end to end; a lane is a range of it. Where
a lane's boundary falls inside a shard, both lanes hold a *piece* of it, so that uneven shards give
lanes whose lengths differ by at most one sample. Everything here is O(shards + lanes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cut:
    """Pieces in stream order, grouped by lane.

    shard, first_row, rows: int64, shape (pieces,); rows is at least 1.
    lane_pieces: pieces of each lane, int64, shape (lanes,).
    lane_start: stream coordinates where lanes begin, and the end, int64, shape (lanes + 1,).
    """

    shard: NDArray[np.int64]
    first_row: NDArray[np.int64]
    rows: NDArray[np.int64]
    lane_pieces: NDArray[np.int64]
    lane_start: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """One epoch's pieces, laid end to end in the order in which lanes take them.

    begin: stream coordinate of each piece, ascending. shard: its shard. to_row: what turns a
    coordinate into a row of that shard. All int64, shape (pieces,).
    """

    begin: NDArray[np.int64]
    shard: NDArray[np.int64]
    to_row: NDArray[np.int64]

    def rows(self, coordinates: NDArray[np.int64]) -> NDArray[np.int64]:
        """(shard, row) of stream coordinates: int64, shape (n, 2) for shape (n,)."""
        piece = np.searchsorted(self.begin, coordinates, side="right") - 1
        found = np.empty((len(coordinates), 2), dtype=np.int64)
        found[:, 0] = self.shard[piece]
        found[:, 1] = coordinates + self.to_row[piece]
        return found


def cut(sizes: NDArray[np.int64], shards: NDArray[np.int64], *, lanes: int) -> Cut:
    """Lay shards end to end and cut the stream into lanes of N // lanes samples, the first
    N % lanes of them one longer: so p -> (p % lanes, p // lanes) is a bijection.

    sizes: samples of every shard, shape (all,). shards: those to lay, in order, none of them empty.
    """
    ends = np.cumsum(sizes[shards])
    starts = ends - sizes[shards]
    total = int(ends[-1]) if len(ends) else 0
    lane = np.arange(lanes + 1, dtype=np.int64)
    lane_start = lane * (total // lanes) + np.minimum(lane, total % lanes)
    inner = lane_start[lane_start < total]
    at = np.searchsorted(starts, inner)
    new = at == len(starts)
    new[~new] = starts[at[~new]] != inner[~new]  # a lane that begins with a shard cuts none
    begin = np.insert(starts, at[new], inner[new])
    place = np.searchsorted(starts, begin, side="right") - 1
    return Cut(
        shard=shards[place],
        first_row=begin - starts[place],
        rows=np.diff(begin, append=total),
        lane_pieces=np.diff(np.searchsorted(begin, lane_start)),
        lane_start=lane_start,
    )


def lay(pieces: Cut, hashes: NDArray[np.uint64] | None) -> Layout:
    """Put each lane's pieces in the order of their hashes: uint64, shape (pieces,), or None."""
    if hashes is None:
        order = np.arange(len(pieces.rows), dtype=np.int64)
    else:
        order = np.argsort(_keys_by_lane(pieces.lane_pieces, hashes), kind="stable")
    rows = pieces.rows[order]
    begin = np.cumsum(rows) - rows
    return Layout(begin=begin, shard=pieces.shard[order], to_row=pieces.first_row[order] - begin)


def lanes_of_slots(low: int, high: int, *, count: int, lanes: int) -> tuple[int, int]:
    """Lanes [first, end) that slots [low, high) of `count` consecutive positions sorted by lane may
    fall into, wherever the positions begin; exactly those where the lanes divide the count.

    The lanes get count // lanes positions each and count % lanes of them, a circular range, one
    more: so a lane's slots begin and end where the number of longer lanes before them says.
    """
    if low >= high:
        return 0, 0
    whole, more = divmod(count, lanes)
    lane = np.arange(lanes, dtype=np.int64)
    latest_end = (lane + 1) * whole + np.minimum(lane + 1, more)
    earliest_start = lane * whole + np.maximum(0, more - (lanes - lane))
    first = int(np.searchsorted(latest_end, low, side="right"))
    return first, int(np.searchsorted(earliest_start, high, side="left"))


def _keys_by_lane(lane_pieces: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Keys that sort pieces by lane, then by as many bits of the hash as there is room for.

    One sort of 64-bit keys costs half of a lexsort; what still ties keeps its stream order.
    """
    bits = (len(lane_pieces) - 1).bit_length()
    if not bits:
        return hashes
    lane = np.repeat(np.arange(len(lane_pieces), dtype=np.uint64), lane_pieces)
    return (lane << np.uint64(64 - bits)) | (hashes >> np.uint64(bits))
