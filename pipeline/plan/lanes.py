"""Divide shards into lanes and strands, and order the lanes within a job's batches. Pure.

A *stream coordinate* numbers the samples of all shards, concatenated in the order of the stream. A
strand is a range of coordinates; a lane is one strand, or two that are half of the stream apart. If
the boundary of two strands falls inside a shard, each of them has a *piece* of it: so the lengths
of strands differ by at most one sample, however uneven shards are. Layout costs O(shards + lanes).

The *lane order* decides which rank reads a lane, and nothing else. It is decided and stored for
groups of neighbouring lanes, so that a state stays small whatever the number of lanes.
"""

from __future__ import annotations

import base64
import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.cache import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]
_ONE = np.array(1, dtype=np.int64)  # an array: half the time of a Python number
_MANY = 1024  # samples: fewer are searched for in one call


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StrandPieces:
    """The pieces of shards in stream order, grouped by strand.

    shard, first_row, rows: int64, shape (pieces,); rows is at least 1.
    strand_pieces: number of pieces of each strand, int64, shape (strands,).
    strand_start: stream coordinates of the strands' boundaries, int64, shape (strands + 1,).
    """

    shard: Ints
    first_row: Ints
    rows: Ints
    strand_pieces: Ints
    strand_start: Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneLayout:
    """One epoch's pieces in the order of its stream.

    begin: first stream coordinate of each piece, ascending. shard: its shard. to_row: the row of a
    coordinate in that shard, less the coordinate. All int64, shape (pieces,). strand_start: stream
    coordinates of the strands' boundaries, int64, shape (strands + 1,).
    """

    begin: Ints
    shard: Ints
    to_row: Ints
    strand_start: Ints

    def piece_start(self, strand: Ints, offset: Ints) -> Ints:
        """Return the offset in its strand at which the piece of an offset begins, int64, shape
        (n,)."""
        first = self.strand_start.take(strand)
        piece = np.searchsorted(self.begin, first + offset, side="right") - 1
        return self.begin.take(piece) - first

    def rows(self, coordinates: Ints) -> Ints:
        """Return (shard, row) of n stream coordinates, int64, shape (n, 2)."""
        if len(coordinates) < _MANY:
            piece = self.begin.searchsorted(coordinates, side="right")
        else:
            # Neighbours are of two strands, half of the stream apart, and searchsorted is 3 times
            # as fast if each value is close to the one before it.
            piece = np.empty(len(coordinates), dtype=np.int64)
            for strand in (slice(0, None, 2), slice(1, None, 2)):
                piece[strand] = self.begin.searchsorted(coordinates[strand], side="right")
        piece -= _ONE
        found = np.empty((len(coordinates), 2), dtype=np.int64)
        found[:, 0] = self.shard[piece]
        found[:, 1] = coordinates + self.to_row[piece]
        return found


def deal_shards(hashes: Hashes, *, swaps: Hashes, halves: int) -> Ints:
    """Return the order of shards in the stream, as indices, int64, shape (shards,).

    Every range of the stream gets shards from all parts of the index: the index is cut into equal
    runs, each run is shuffled, and the stream has one shard of each run in turn. With two halves,
    the first half has one run of each pair of neighbours and the second half the other: a range of
    one half and a range of the other have no run in common.

    hashes: shuffle keys, shape (shards,). halves: 1 or 2. swaps: a hash for each run, or pair of
    runs; its lowest bit decides which run of a pair is in the first half.
    """
    count, runs = len(hashes), halves * len(swaps)
    run = np.arange(runs + 1, dtype=np.int64)
    size = np.diff(-(-run * count // runs))
    order = np.argsort(_grouped_keys(size, hashes), kind="stable")
    swapped = np.repeat((swaps & np.uint64(1)).astype(np.int64), halves)
    half = (run[:-1] + swapped) % halves
    # One sort key from half, turn and run.
    place = np.arange(count, dtype=np.int64)
    place -= np.repeat(np.cumsum(size) - size, size)
    place *= runs
    place += np.repeat(half * int(size.max()) * runs + run[:-1], size)
    return order[np.argsort(place, kind="stable")]


def cut_strands(sizes: Ints, shards: Ints, *, strands: int) -> StrandPieces:
    """Cut the concatenated shards into strands of N // strands samples, of which the first
    N % strands have one more: so p -> (p % strands, p // strands) is a bijection.

    sizes: samples of every shard, shape (all,). shards: shards in stream order, none of them empty.
    """
    ends = np.cumsum(sizes[shards])
    starts = ends - sizes[shards]
    total = int(ends[-1]) if len(ends) else 0
    strand = np.arange(strands + 1, dtype=np.int64)
    strand_start = strand * (total // strands) + np.minimum(strand, total % strands)
    inner = strand_start[strand_start < total]
    at = np.searchsorted(starts, inner)
    new = at == len(starts)
    new[~new] = starts[at[~new]] != inner[~new]  # a boundary between two shards cuts none
    begin = np.insert(starts, at[new], inner[new])
    place = np.searchsorted(starts, begin, side="right") - 1
    return StrandPieces(
        shard=shards[place],
        first_row=begin - starts[place],
        rows=np.diff(begin, append=total),
        strand_pieces=np.diff(np.searchsorted(begin, strand_start)),
        strand_start=strand_start,
    )


def order_pieces(pieces: StrandPieces, hashes: Hashes | None) -> LaneLayout:
    """Return the layout with each strand's pieces sorted by hash; None keeps the stream's order.

    hashes: uint64, shape (pieces,).
    """
    if hashes is None:
        order = np.arange(len(pieces.rows), dtype=np.int64)
    else:
        order = np.argsort(_grouped_keys(pieces.strand_pieces, hashes), kind="stable")
    rows = pieces.rows[order]
    begin, shard, start = np.cumsum(rows) - rows, pieces.shard[order], pieces.strand_start
    to_row = pieces.first_row[order] - begin
    return LaneLayout(begin=begin, shard=shard, to_row=to_row, strand_start=start)


def lanes_of_slots(low: int, high: int, *, count: int, lanes: int) -> tuple[int, int]:
    """Return the lanes [first, end) that slots [low, high) of `count` consecutive positions, sorted
    by lane, may belong to, for any first position; the exact lanes if their number divides `count`.

    Each lane has count // lanes positions, and count % lanes of them, a circular range, have one
    more. So the first slot of a lane depends on how many of these longer lanes come before it.
    """
    if low >= high:
        return 0, 0
    whole, more = divmod(count, lanes)
    lane = np.arange(lanes, dtype=np.int64)
    latest_end = (lane + 1) * whole + np.minimum(lane + 1, more)
    earliest_start = lane * whole + np.maximum(0, more - (lanes - lane))
    first = int(np.searchsorted(latest_end, low, side="right"))
    return first, int(np.searchsorted(earliest_start, high, side="left"))


def _grouped_keys(sizes: Ints, hashes: Hashes) -> Hashes:
    """Return sort keys by group and, in the remaining bits of 64, by hash.

    sizes: elements of each group, in order. One sort of 64-bit keys takes half the time of a
    lexsort; it must be stable.
    """
    bits = (len(sizes) - 1).bit_length()
    if not bits:
        return hashes
    group = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    return (group << np.uint64(64 - bits)) | (hashes >> np.uint64(bits))


def packed(numbers: Ints | Sequence[int]) -> str:
    """Return integers as a short text: most of them are often equal."""
    return base64.b64encode(zlib.compress(np.array(numbers, "<i8").tobytes())).decode()


def unpacked(text: object, count: int, *, least: int = 0) -> Ints:
    """Return the integers of a `packed` text, int64, shape (count,). Raises ValueError unless there
    are `count` of them, at least `least` and below 2^53."""
    if not isinstance(text, str) or len(text) > 64 + 16 * count:
        raise ValueError("numbers")
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 8 * count + 1)
    except zlib.error:
        raise ValueError("numbers") from None
    numbers = np.frombuffer(data, "<i8").astype(np.int64)
    if len(numbers) != count or (count and not least <= numbers.min() <= numbers.max() < 2**53):
        raise ValueError(f"{len(numbers)} numbers")
    return numbers


MOST_GROUPS = 2048
"""Upper limit of groups in a lane order."""

_TEXT = re.compile(r"groups:(\d{1,10}):([A-Za-z0-9+/]*={0,2})", re.ASCII)
_MOST_TEXT = 9000  # characters; 2,048 groups take 5,500


@dataclass(frozen=True, slots=True)
class LaneGroups:
    """The division of a job's lanes into groups of neighbours, which any lane order keeps together.

    lanes: at least 1. Groups have equal sizes, as small as `MOST_GROUPS` allows; a last group with
    fewer lanes keeps the last place.
    """

    lanes: int

    @property
    def size(self) -> int:
        """The number of lanes of each group, except for a shorter last one."""
        return -(-self.lanes // MOST_GROUPS)

    def __len__(self) -> int:
        """Return the number of groups."""
        return -(-self.lanes // self.size)

    @property
    def movable(self) -> int:
        """The number of groups that may have any place: all but a shorter last one."""
        return self.lanes // self.size


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The group of lanes at each place of a job's batches.

    groups: a permutation of 0, 1, 2, … in which a shorter group is last. lanes: of the job. Raises
    PlanError for any other values.
    """

    groups: tuple[int, ...]
    lanes: int

    def __post_init__(self) -> None:
        division = LaneGroups(self.lanes)
        stays = range(division.movable, len(division))
        is_order = sorted(self.groups) == list(range(len(division)))
        if not is_order or any(self.groups[group] != group for group in stays):
            raise PlanError(
                f"lane order: got {len(self.groups)} groups, wanted each of the {len(division)} "
                f"groups of {self.lanes} lanes once, and a shorter one last."
            )

    @classmethod
    def identity(cls, lanes: int) -> LaneOrder:
        """Return the order in which lane n has place n, for every lane."""
        return cls(tuple(range(len(LaneGroups(lanes)))), lanes)

    @property
    def is_identity(self) -> bool:
        """True if lane n has place n, for every lane."""
        return self == LaneOrder.identity(self.lanes)

    @property
    def text(self) -> str:
        """The order as a text of at most 9,000 characters for any number of lanes."""
        packed = base64.b64encode(np.array(self.groups, "<u2").tobytes())
        return f"groups:{self.lanes}:{packed.decode()}"

    @classmethod
    def parse(cls, text: object, *, lanes: int) -> LaneOrder:
        """Return the order of a text; raise ValueError for one that `text` doesn't write."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else None
        if found is None or found[1] != str(lanes):
            raise ValueError(f"lane order {text!r:.60}, wanted 'groups:{lanes}:' and base64")
        data = base64.b64decode(found[2], validate=True)
        order = cls(tuple(np.frombuffer(data, dtype="<u2").tolist()), lanes)
        if order.text != text:  # the base64 has spare bits, which the property leaves 0
            raise ValueError(f"lane order {text!r:.60}")
        return order

    def lanes_of(self, lanes: int) -> Ints:
        """Return the lane at each place, int64, shape (lanes,). Raises PlanError for an order of
        another number of lanes."""
        if self.lanes != lanes:
            raise PlanError(f"lane order: got one of {self.lanes} lanes, wanted {lanes}.")
        size = LaneGroups(lanes).size
        lane = np.array(self.groups, np.int64)[:, None] * size + np.arange(size)
        return lane.ravel()[:lanes]


def ordered_slots(
    position: int, count: int, lane_at: Ints, *, low: int, high: int
) -> tuple[Ints, Ints]:
    """Return the lanes and offsets of slots [low, high) of a batch, int64, shape (high - low,).

    Slots number the positions [position, position + count), sorted by (place of the lane, offset).
    lane_at: the lane at each place, int64, shape (lanes,). Costs O(high - low), and O(lanes) if
    some lanes have one sample more.
    """
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    turn, start = divmod(position, lanes)
    slots = np.arange(low, high, dtype=np.int64)
    if not more:
        place, nth = np.divmod(slots, max(1, each))
    else:
        first = first_slots(position, count, lane_at)
        place = first.searchsorted(slots, side="right") - _ONE
        nth = slots - first[place]
    lane = lane_at[place]
    return lane, nth + turn + (lane < start)


def own_slots(position: int, count: int, lane_at: Ints) -> Ints:
    """Return for each slot of `ordered_slots` its number in the plan's own order, which begins with
    lane 0: int64, shape (count,)."""
    lanes = len(lane_at)
    turn, start = divmod(position, lanes)
    lane, offset = ordered_slots(position, count, lane_at, low=0, high=count)
    first = first_slots(position, count, np.arange(lanes))[:-1] - turn
    first[:start] -= 1
    return offset + first.take(lane)


def first_slots(position: int, count: int, lane_at: Ints) -> Ints:
    """Return the first slot of the lane at each place, then `count`: int64, shape (lanes + 1,). A
    circular range of lanes has one sample more than the others."""
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    first = np.zeros(lanes + 1, dtype=np.int64)
    np.cumsum(each + ((lane_at - position) % lanes < more), out=first[1:])
    return first


def partners(slots: Ints, *, position: int, size: int, lanes: int) -> Ints:
    """Return the slot of each slot's partner in the global batch [position, position + size).

    Slots number the batch's samples sorted by (lane, offset). int64, shape (slots,).
    """
    begin = first_slots(position, size, np.arange(lanes))
    of = np.searchsorted(begin, slots, side="right") - 1
    low, high = begin[of], begin[of + 1]
    is_only = high - low == 1
    low, high = np.where(is_only, 0, low), np.where(is_only, size, high)
    other = low + ((slots - low) ^ 1)
    return np.where(other < high, other, np.maximum(slots - 1, 0))
