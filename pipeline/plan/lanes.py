"""Lay shards out in lanes and strands, and give each lane its place in the job's batches. Pure.

A *stream coordinate* counts samples of the shards laid end to end; a strand is a range of it, and a
lane is one strand or two that lie half of the stream apart. Where a strand's boundary falls inside
a shard, both strands hold a *piece* of it, so that uneven shards give strands whose lengths differ
by at most one sample. Layout costs O(shards + lanes).

The *lane order* decides which rank reads a lane, and nothing else. It is decided and stored over
groups of neighbouring lanes, so that thousands of nodes have some choice and a state stays small
whatever the number of lanes.
"""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError, ResumeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

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


def deal_shards(
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


def cut_strands(
    sizes: NDArray[np.int64], shards: NDArray[np.int64], *, strands: int
) -> StrandPieces:
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


def order_pieces(pieces: StrandPieces, hashes: NDArray[np.uint64] | None) -> LaneLayout:
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


MOST_GROUPS = 2048
"""Groups of lanes that an order is made of, at most."""

_TEXT = re.compile(r"groups:(\d{1,10}):([A-Za-z0-9+/]*={0,2})", re.ASCII)
_MOST_TEXT = 9000  # characters; 2,048 groups take 5,500


@dataclass(frozen=True, slots=True)
class LaneGroups:
    """The lanes of a job in groups of neighbours, which any lane order keeps together.

    lanes: at least 1. Groups are of equally many, as small as `MOST_GROUPS` allow; where that
    leaves fewer for the last group, it keeps the last place.
    """

    lanes: int

    @property
    def size(self) -> int:
        """Lanes of a group, but for a shorter last one."""
        return -(-self.lanes // MOST_GROUPS)

    def __len__(self) -> int:
        """How many groups there are."""
        return -(-self.lanes // self.size)

    @property
    def movable(self) -> int:
        """Groups that may have any place: those before a shorter last one."""
        return self.lanes // self.size


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The lane at each place of a job's batches: a permutation of 0, 1, 2, ….

    Raises PlanError for what isn't one.
    """

    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.places) != list(range(len(self.places))):
            raise PlanError(
                f"lane order: got {len(self.places)} places that don't hold each lane once."
            )

    @classmethod
    def of_groups(cls, groups: Sequence[int], *, lanes: int) -> LaneOrder:
        """The order that has a group of lanes at each place: a permutation of 0, 1, 2, ….

        Raises PlanError for what isn't one, or where a shorter group isn't last.
        """
        told = LaneGroups(lanes)
        given = np.asarray(groups, dtype=np.int64)
        if sorted(given.tolist()) != list(range(len(told))):
            raise PlanError(
                f"lane order: got {len(given)} groups, wanted each of the {len(told)} groups of "
                f"{lanes} lanes once."
            )
        if told.movable < len(told) and given[-1] != told.movable:
            raise PlanError(f"lane order: the shorter group {told.movable} isn't last.")
        lane = given[:, None] * told.size + np.arange(told.size)
        return cls(tuple(lane.ravel()[:lanes].tolist()))

    @property
    def groups(self) -> Ints:
        """The group of lanes at each place, int64, shape (groups,). Raises PlanError for an order
        that tears some apart."""
        told = LaneGroups(len(self.places))
        places = np.array(self.places, dtype=np.int64)
        groups: Ints = places[:: told.size] // told.size
        lane = groups[:, None] * told.size + np.arange(told.size)
        if not np.array_equal(lane.ravel()[: len(places)], places):
            raise PlanError(
                f"lane order: wanted groups of {told.size} lanes in a row, got one that tears some "
                f"apart. At most {MOST_GROUPS} groups of lanes can be put in another order."
            )
        return groups

    @property
    def text(self) -> str:
        """The order as a short text, at most 9,000 characters for any number of lanes. Raises
        PlanError for an order that isn't one of groups."""
        packed = binascii.b2a_base64(self.groups.astype("<u2").tobytes(), newline=False)
        return f"groups:{len(self.places)}:{packed.decode()}"

    @classmethod
    def parse(cls, text: object, *, lanes: int) -> LaneOrder:
        """Read an order of so many lanes back; ResumeError for what `text` can't have written."""
        found = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else None
        if found is None or found[1] != str(lanes):
            raise ResumeError(
                f"lane order: got {_shown(text)}, wanted a text that begins with "
                f"'groups:{lanes}:' and goes on in base64, as a state of this job has it. {_REMEDY}"
            )
        try:
            data = binascii.a2b_base64(found[2], strict_mode=True)
            order = cls.of_groups(np.frombuffer(data, dtype="<u2").tolist(), lanes=lanes)
        except (binascii.Error, ValueError) as error:
            raise ResumeError(f"State is damaged: {error} {_REMEDY}") from None
        if order.text != text:  # bits that say nothing: nobody wrote them
            raise ResumeError(f"State is damaged: lane order {_shown(text)}. {_REMEDY}")
        return order

    @property
    def is_identity(self) -> bool:
        """Whether every lane has its own number's place."""
        return self.places == tuple(range(len(self.places)))

    def lanes_of(self, lanes: int) -> Ints:
        """The lane at each place, int64, shape (lanes,). Raises PlanError for an order of another
        number of lanes."""
        if len(self.places) != lanes:
            raise PlanError(f"lane order: got one of {len(self.places)} lanes, wanted {lanes}.")
        return np.array(self.places, dtype=np.int64)


_REMEDY = "Start from an older checkpoint, or without a state."


def _shown(text: object) -> str:
    if not isinstance(text, str):
        return f"a {type(text).__name__}"
    return repr(text) if len(text) <= 60 else f"{text[:40]!r}… ({len(text)} characters)"


def ordered_slots(
    position: int, count: int, lane_at: Ints, *, low: int, high: int
) -> tuple[Ints, Ints]:
    """Slots [low, high) of the positions [position, position + count) sorted by (place of the lane,
    offset).

    lane_at: the lane at each place, int64, shape (lanes,). Returns their lanes and offsets, int64,
    shape (high - low,). Costs O(high - low), and O(lanes) where some lanes have a sample more.
    """
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    turn, start = divmod(position, lanes)
    slots = np.arange(low, high, dtype=np.int64)
    if not more:
        place, nth = np.divmod(slots, max(1, each))
    else:
        ends = np.cumsum(each + ((lane_at - start) % lanes < more))
        place = ends.searchsorted(slots, side="right")
        nth = slots - np.where(place > 0, ends[place - 1], 0)
    lane = lane_at[place]
    return lane, nth + turn + (lane < start)


def own_slots(position: int, count: int, lane_at: Ints) -> Ints:
    """The number that each slot of the positions [position, position + count), as `ordered_slots`
    has them, has in the plan's own order, where lane 0 comes first. int64, shape (count,)."""
    lanes = len(lane_at)
    each, more = divmod(count, lanes)
    turn, start = divmod(position, lanes)
    lane, offset = ordered_slots(position, count, lane_at, low=0, high=count)
    numbers = np.arange(lanes, dtype=np.int64)
    rows = each + ((numbers - start) % lanes < more)
    first = np.cumsum(rows) - rows - turn - (numbers < start)
    slots: Ints = offset + first[lane]
    return slots
