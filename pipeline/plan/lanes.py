"""The layout under an order: shards dealt, cut into strands, and put in an epoch's order there.

A *stream coordinate* counts samples of the shards laid end to end; a strand is a range of it, and a
lane is one strand or two that lie half of the stream apart. Where a strand's boundary falls inside
a shard, both strands hold a *piece* of it, so that uneven shards give strands whose lengths differ
by at most one sample. Everything here is pure and O(shards + lanes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


_ONE = np.array(1, dtype=np.int64)  # an array: half the time of a Python number
_MANY = 1024  # samples of a batch; fewer are looked up at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrandPieces:
    """Pieces of shards in stream order, grouped by strand.

    shard, first_row, rows: int64, shape (pieces,); rows is at least 1.
    strand_pieces: pieces of each strand, int64, shape (strands,).
    strand_start: stream coordinates where strands begin, and the end, int64, shape (strands + 1,).
    """

    shard: NDArray[np.int64]
    first_row: NDArray[np.int64]
    rows: NDArray[np.int64]
    strand_pieces: NDArray[np.int64]
    strand_start: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneLayout:
    """One epoch's pieces, laid end to end in the order in which strands take them.

    begin: stream coordinate of each piece, ascending. shard: its shard. to_row: what turns a
    coordinate into a row of that shard. All int64, shape (pieces,).
    """

    begin: NDArray[np.int64]
    shard: NDArray[np.int64]
    to_row: NDArray[np.int64]

    def rows(self, coordinates: NDArray[np.int64]) -> NDArray[np.int64]:
        """(shard, row) of stream coordinates: int64, shape (n, 2) for shape (n,)."""
        if len(coordinates) < _MANY:
            piece = self.begin.searchsorted(coordinates, side="right")
        else:
            # Neighbours are of two strands, half of the stream apart, and a search is 3 times as
            # fast from near the last place that it found.
            piece = np.empty(len(coordinates), dtype=np.int64)
            for strand in (slice(0, None, 2), slice(1, None, 2)):
                piece[strand] = self.begin.searchsorted(coordinates[strand], side="right")
        piece -= _ONE
        found = np.empty((len(coordinates), 2), dtype=np.int64)
        found[:, 0] = self.shard[piece]
        found[:, 1] = coordinates + self.to_row[piece]
        return found


def deal(
    hashes: NDArray[np.uint64], *, swaps: NDArray[np.uint64], halves: int
) -> NDArray[np.int64]:
    """The order in which shards lie in the stream, so that every stretch of it holds what the whole
    index holds: places in the index, int64, shape (shards,).

    The index is cut into equal runs, each run is shuffled, and the stream takes a shard of each run
    in turn, again and again. With two halves it takes one run of every pair of neighbours, and the
    others in its second half: a stretch of one half and one of the other have no run in common.

    hashes: to shuffle by, shape (shards,). halves: 1 or 2. swaps: a hash for each run, or pair of
    runs, whose lowest bit says which of a pair is in the first half.
    """
    count, runs = len(hashes), halves * len(swaps)
    run = np.arange(runs + 1, dtype=np.int64)
    size = np.diff(-(-run * count // runs))
    order = np.argsort(_grouped_keys(size, hashes), kind="stable")
    swapped = np.repeat((swaps & np.uint64(1)).astype(np.int64), halves)
    half = (run[:-1] + swapped) % halves
    # The place in the stream: half, turn and run as one number.
    place = np.arange(count, dtype=np.int64)
    place -= np.repeat(np.cumsum(size) - size, size)
    place *= runs
    place += np.repeat(half * int(size.max()) * runs + run[:-1], size)
    return order[np.argsort(place, kind="stable")]


def cut(sizes: NDArray[np.int64], shards: NDArray[np.int64], *, strands: int) -> StrandPieces:
    """Lay shards end to end and cut the stream into strands of N // strands samples, the first
    N % strands of them one longer: so p -> (p % strands, p // strands) is a bijection.

    sizes: samples of every shard, shape (all,). shards: those to lay, in order, none of them empty.
    """
    ends = np.cumsum(sizes[shards])
    starts = ends - sizes[shards]
    total = int(ends[-1]) if len(ends) else 0
    strand = np.arange(strands + 1, dtype=np.int64)
    strand_start = strand * (total // strands) + np.minimum(strand, total % strands)
    inner = strand_start[strand_start < total]
    at = np.searchsorted(starts, inner)
    new = at == len(starts)
    new[~new] = starts[at[~new]] != inner[~new]  # a strand that begins with a shard cuts none
    begin = np.insert(starts, at[new], inner[new])
    place = np.searchsorted(starts, begin, side="right") - 1
    return StrandPieces(
        shard=shards[place],
        first_row=begin - starts[place],
        rows=np.diff(begin, append=total),
        strand_pieces=np.diff(np.searchsorted(begin, strand_start)),
        strand_start=strand_start,
    )


def lay(pieces: StrandPieces, hashes: NDArray[np.uint64] | None) -> LaneLayout:
    """Put each strand's pieces in the order of their hashes: uint64, shape (pieces,), or None."""
    if hashes is None:
        order = np.arange(len(pieces.rows), dtype=np.int64)
    else:
        order = np.argsort(_grouped_keys(pieces.strand_pieces, hashes), kind="stable")
    rows = pieces.rows[order]
    begin = np.cumsum(rows) - rows
    return LaneLayout(
        begin=begin, shard=pieces.shard[order], to_row=pieces.first_row[order] - begin
    )


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


def _grouped_keys(sizes: NDArray[np.int64], hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Keys that sort what lies in groups of these sizes by group, then by as many bits of the hash
    as there is room for.

    One sort of 64-bit keys costs half of a lexsort; what still ties keeps its order.
    """
    bits = (len(sizes) - 1).bit_length()
    if not bits:
        return hashes
    group = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    return (group << np.uint64(64 - bits)) | (hashes >> np.uint64(bits))
