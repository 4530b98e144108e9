"""Compute the order of samples: a pure function of (sizes, seed, epoch, position).

    (epoch, p) -> lane = p % L, strand = p % 2L, offset = p // 2L -> window -> (shard, row)

The order is the same on every rank. Shards are distributed over L lanes (`lanes`). In each epoch a
lane has its pieces in another order, and samples are permuted within windows of about W shards
(`windows`). So W·L shards are open at once and each is read once an epoch, whereas a full shuffle
would read each many times. Lanes are fixed, so a node reads the shards that it has cached. Any
position costs the same to compute, at any world size. A global batch is the positions [p, p + B),
so B may change in the middle of an epoch. Each rank reads a slice of it sorted by lane: if the
ranks divide the lanes, two ranks share only shards that extend over two lanes.

Data are often sorted (by class, by day), so neighbours in the index are similar. Two rules keep
them out of one batch. The index is cut into runs, and each lane gets shards of every run, so a lane
is a sample of all data. And a lane has two strands of different shards, one of odd and one of even
runs, which alternate: neighbours in a lane never come from one shard, so mixing may pair neighbours
(`plan.job_order`) without reading another rank's samples.

Rejected: a sequential generator (a resume would replay it); lanes counted in shards (uneven shards
make uneven lanes); a table of highly composite lane numbers (they divide no power-of-two batch);
partners from another lane (another rank reads it) or half a batch away (likewise, if ranks share a
lane).

`JobPlan` is the interface of all plans. If shards are decoded in units, the window is counted in
units. A unit is decoded as a whole and kept until its rows were read, so such a window costs
memory, which a window of shards doesn't. But units are permuted in all of their lane, not just
inside a window: a window only has to be wide enough to spread the rows of one unit.
"""

from __future__ import annotations

import hashlib
import math
import operator
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Required, TypedDict

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash, unit
from penstock.pipeline.plan.lanes import (
    cut_strands,
    deal_shards,
    lanes_of_slots,
    order_pieces,
    ordered_slots,
    own_slots,
    partners,
)
from penstock.pipeline.plan.windows import EpochWindows, units_of, window_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.pipeline.plan.lanes import Ints, LaneLayout, LaneOrder, StrandPieces
    from penstock.readers import Contents

    _Epoch = tuple[LaneLayout, EpochWindows | None]
    """The layout and the windows of one epoch; None for index order."""
    SlotCut = tuple[int, int, int, int]
    """Slots [low, high) of a global batch: its position, its size, low and high."""


class DeliveredSample(NamedTuple):
    """One delivery of a sample, which has random draws of its own. epoch: of its part."""

    sample_id: int
    epoch: int
    occurrence: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """The delivery of each sample of a batch, which keys its random draws beside seed and id.

    epoch: of all samples, or of each, int64, shape (n,). occurrences: how many earlier positions of
    that epoch deliver each sample, int64, shape (n,); None for 0.
    """

    epoch: int | Ints
    occurrences: Ints | None = None

    def take(self, rows: Sequence[int] | Ints | slice) -> Delivery:
        """Return the deliveries of some rows of the batch."""
        epoch = self.epoch if isinstance(self.epoch, int) else self.epoch[rows]
        return Delivery(epoch, None if self.occurrences is None else self.occurrences[rows])

    def of(self, row: int, sample_id: int) -> DeliveredSample:
        """Return the delivery of one row of the batch. sample_id: of the sample that it gets."""
        epoch = self.epoch if isinstance(self.epoch, int) else int(self.epoch[row])
        occurrence = 0 if self.occurrences is None else int(self.occurrences[row])
        return DeliveredSample(sample_id, epoch, occurrence)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotSamples:
    """The samples of a batch, in the order of its slots.

    rows: (shard, row), int64, shape (n, 2). epochs: epoch of the part that each sample comes from,
    int64, shape (n,); None if it is the stream's epoch, as with one part. occurrences: how many
    earlier positions of that epoch deliver each sample, int64, shape (n,); None if each is
    delivered once.
    """

    rows: Ints
    epochs: Ints | None = None
    occurrences: Ints | None = None

    def take(self, some: slice | Ints) -> SlotSamples:
        """Return the samples of some of the slots."""
        epochs = None if self.epochs is None else self.epochs[some]
        occurrences = None if self.occurrences is None else self.occurrences[some]
        return SlotSamples(rows=self.rows[some], epochs=epochs, occurrences=occurrences)

    def delivery(self, epoch: int) -> Delivery:
        """Return the delivery of each sample in an epoch of the stream."""
        return Delivery(epoch if self.epochs is None else self.epochs, self.occurrences)

    @classmethod
    def end_to_end(cls, parts: Sequence[SlotSamples]) -> SlotSamples:
        """Join the samples of one plan end to end."""
        if len(parts) == 1:
            return parts[0]
        rows = [part.rows for part in parts]
        joined = cls(rows=np.concatenate(rows), epochs=_joined([p.epochs for p in parts], rows))
        return replace(joined, occurrences=_joined([p.occurrences for p in parts], rows))


class JobPlan(ABC):
    """The mapping from positions of a job's stream to samples, and from ranks to shards.

    A plan has one part or several. Shards are numbered over all parts, as in `readers.Source`: so
    code that reads, fetches or counts by shard doesn't depend on parts. One dataset (or a selection
    of it, or a concatenation) is a plan of one part: `order.Plan`. A mixture is a plan of several:
    each position belongs to one part, with exact shares in any range of the stream and of a batch's
    slots. Each part has its own epochs, which key the random draws of its samples.

    samples: positions of an epoch of the stream. sizes: samples of each shard, int64, shape
    (shards,). lanes, window: for messages. open_shards: mean number of shards mixed at a time.
    bins: parts of a global batch that aren't divided among ranks (`world.first_slot`); 1: none.
    fingerprint: hash of all that the order depends on, as hex; batch and world aren't part of it.
    """

    samples: int
    sizes: Ints
    lanes: int
    window: int
    bins: int

    @property
    @abstractmethod
    def open_shards(self) -> float: ...

    @property
    @abstractmethod
    def fingerprint(self) -> str: ...

    def places(self, epoch: int, position: int, size: int, *, low: int, high: int) -> SlotSamples:
        """Return slots [low, high) of the global batch [position, position + size), which is cut
        at the end of the epoch. Raises PlanError for slots outside of it."""
        return self.places_together(epoch, [(position, size, low, high)])

    @abstractmethod
    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end, by one computation."""

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """Return the number of each slot of a global batch in the plan's own order of lanes, int64,
        shape (slots,): a permutation. None if that is the slot's number."""
        del epoch, position, size
        return None

    def partner_slots(self, epoch: int, position: int, size: int, *, low: int, high: int) -> Ints:
        """Return the slots of the samples with which slots [low, high) of a global batch are mixed,
        int64, shape (high - low,). They don't depend on the world or the lane order."""
        if (own := self.own_slots(epoch, position, size)) is None:
            return partners(np.arange(low, high), position=position, size=size, lanes=self.lanes)
        slot_of = np.empty_like(own)
        slot_of[own] = np.arange(len(own))
        return slot_of.take(partners(own[low:high], position=position, size=size, lanes=self.lanes))

    def part_counts(self, epoch: int, position: int) -> Ints | None:
        """Return how many samples each part of a mixture has before a position, over all epochs:
        int64, shape (parts,); None for other plans."""
        del epoch, position
        return None

    @abstractmethod
    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards that ranks [first, end) read in any epoch, int64, ascending."""

    def _count(self, position: int, size: int, low: int = 0, high: int = 0) -> int:
        """Return the slots of a global batch: fewer than its size at the end of the epoch. Raises
        PlanError for a position beyond the end, and for slots [low, high) that it doesn't have."""
        position = _integer("position", position, at_least=0)
        size = _integer("size", size, at_least=1)
        if position > self.samples:
            raise PlanError(
                f"position {position} is beyond the epoch's {self.samples} samples. Check that the "
                "state is of this dataset; the next epoch starts at position 0."
            )
        count = min(size, self.samples - position)
        if not 0 <= low <= high <= count:
            raise PlanError(f"slots [{low}, {high}): wanted some within [0, {count}).")
        return count


# Part of every fingerprint. Raise it with any change of the order, so that states of the old order
# are refused instead of continued wrongly. tests/pipeline/plan/test_order.py has golden values.
ORDER_VERSION = 2

SHARDS_PER_LANE = 4  # minimum: with fewer a lane has too few shards to mix
LEAST_WINDOW, LEAST_OPEN = 4, 64  # shards of one lane and of all lanes
MOST_OPEN_ROWS = 2**23
SAMPLES_PER_LANE = 8  # minimum in a batch: with fewer, ranks that share a lane get too small parts

# The purpose of a hash follows the seed among its keys, so that no two purposes share values.
_SHARD, _MOVES, _MOVED, _PIECE, _WINDOW, _STRAND = range(1, 7)

_ONE = np.array(1, dtype=np.int64)  # an array: half the time of a Python number


class PlanArguments(TypedDict, total=False):
    """The arguments of a `Plan` that don't follow from its dataset."""

    seed: Required[int | None]
    lanes: Required[int]
    window: Required[int]
    reshuffle: float
    lane_order: LaneOrder | None


class Plan(JobPlan):
    """The mapping from positions of one dataset's stream to samples. Thread-safe.

    sizes: samples of each shard, integers, shape (shards,); 0 is allowed.
    seed: any int; None: index order without shuffling, which sets lanes, window and reshuffle to 1,
    1 and 0.
    lanes: L, at least 1. window: W, at least 1: mean number of shards that a lane mixes at a time.
    The rest of a lane widens its windows, up to twice; a W of all of a lane's shards or more makes
    the lane one window.
    reshuffle: share of the shards, 0 to 1, that change places among the lanes in each epoch.
    units: if shards are decoded in parts, for every shard the rows of its parts in order, or one
    number if all parts have equally many. Lanes then permute units, W is a number of units, and a
    unit is in one window, unless it extends over two strands. None: each shard is one unit, which
    windows may cut.
    lane_order: the place of each lane among the slots of a batch, which decides the rank that reads
    it; the samples of a batch stay the same. None: lane 0 first.
    dealt: a mask of the shards that get a place among the lanes, of which some may be empty, shape
    (shards,). None: those that aren't empty.

    Memory is O(shards + units + lanes), plus 9 bytes for each sample of W·L mean shards. The
    layouts of two epochs and two windows per strand are cached: readers at distant positions should
    each have their own Plan. Raises PlanError for values out of range.

    Attributes: samples (N), sizes (int64, read-only), seed, lanes, strands (of all lanes: 2L, or L
    if a lane has fewer than 4 shards), window, reshuffle.
    """

    def __init__(
        self,
        sizes: ArrayLike,
        *,
        seed: int | None,
        lanes: int,
        window: int,
        reshuffle: float = 0.0,
        units: Sequence[ArrayLike] | None = None,
        lane_order: LaneOrder | None = None,
        dealt: NDArray[np.bool_] | None = None,
    ) -> None:
        lanes = _integer("lanes", lanes, at_least=1)
        window = _integer("window", window, at_least=1)
        if not 0.0 <= reshuffle <= 1.0:
            raise PlanError(f"reshuffle: got {reshuffle!r}, wanted a share of shards from 0 to 1.")
        self.seed = None if seed is None else _integer("seed", seed)
        if seed is None:
            lanes, window, reshuffle, units, lane_order = 1, 1, 0.0, None, None
        self.lanes, self.window, self.reshuffle = lanes, window, float(reshuffle)
        self.sizes = _checked_sizes(sizes)
        self.samples, self.bins = int(self.sizes.sum()), 1
        self._units = units_of(self.sizes, units)
        self._dealt = None if dealt is None else np.flatnonzero(dealt)
        self._filled = int(np.count_nonzero(self.sizes if dealt is None else dealt))
        self._mixed = self._filled if self._units is None else len(self._units)
        self._lanes = np.array(self.lanes, dtype=np.int64)
        shards = 0 if seed is None else self._filled
        longest = 1 if self._units is None else self._units.longest
        self.strands, self._window_rows = strands_and_window(
            self._mixed, self.samples, shards=shards, lanes=lanes, window=window, longest=longest
        )
        self.lane_order = lane_order
        self._lane_at = np.arange(lanes) if lane_order is None else lane_order.lanes_of(lanes)
        self._cut = self._cut_shards(None)
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return (
            f"Plan(<{self.samples} samples in {len(self.sizes)} shards>, seed={self.seed}, "
            f"lanes={self.lanes}, window={self.window}, reshuffle={self.reshuffle})"
        )

    @property
    def fingerprint(self) -> str:
        """Hash of all that the order depends on (not batch and world), 64 hex digits."""
        settings = (ORDER_VERSION, self.seed, self.lanes, self.window, self.reshuffle)
        digest = hashlib.sha256(repr((*settings, len(self.sizes))).encode())
        digest.update(self.sizes.astype("<i8", copy=False).data)
        if self._units is not None:
            digest.update(self._units.rows.astype("<i8", copy=False).data)
            digest.update(self._units.first.astype("<i8", copy=False).data)
        return digest.hexdigest()

    @property
    def open_shards(self) -> float:
        """Mean number of shards that all lanes mix at a time: W·L, or more if the rest of a lane
        widens its windows; at most all shards. 1 in index order."""
        if self.seed is None:
            return 1.0
        mixed = self._mixed / window_count(self.samples // self.strands, self._window_rows)
        return min(mixed, self._filled)

    def places_together(self, epoch: int, cuts: Sequence[SlotCut]) -> SlotSamples:
        """Return `places` of several batches of an epoch, end to end, by one computation."""
        epoch = _integer("epoch", epoch, at_least=0)
        found = [self._slots(*cut) for cut in (_as_one(cuts) if self.lanes == 1 else cuts)]
        lane, offset = found[0]
        if len(found) > 1:
            lane, offset = (np.concatenate(each) for each in zip(*found, strict=True))
        return SlotSamples(rows=self.rows(epoch, lane, offset))

    def rows(self, epoch: int, lane: Ints, offset: Ints) -> Ints:
        """Return (shard, row) of the samples at offsets of lanes: int64, shape (n, 2).

        The sample at position p of an epoch is at offset p // L of lane p % L. The arguments are
        int64, shape (n,), and the offsets may be changed.
        """
        if not len(lane):
            return np.empty((0, 2), dtype=np.int64)
        strand = lane
        if self.strands > self.lanes:
            strand = offset & _ONE
            strand *= self._lanes
            strand += lane
            offset >>= _ONE
        with self._lock:
            layout, windows = self._epoch(epoch)
            if windows is not None:
                offset = windows.shuffled(strand, offset)
        return layout.rows(layout.strand_start[strand] + offset)

    def samples_at(self, epoch: int, lane: Ints, offset: Ints) -> SlotSamples:
        """Return the samples at offsets of lanes, as `rows`."""
        return SlotSamples(rows=self.rows(epoch, lane, offset))

    def _slots(self, position: int, size: int, low: int, high: int) -> tuple[Ints, Ints]:
        """Return the lanes and offsets of slots [low, high) of a batch."""
        count = self._count(position, size, low, high)
        if self.lanes == 1:  # takes a third of the time, which matters for small batches
            at = np.arange(position + low, position + high, dtype=np.int64)
            return np.zeros_like(at), at
        return ordered_slots(position, count, self._lane_at, low=low, high=high)

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        """Return the number of each slot of a batch with lane 0 first, int64, shape (slots,); None
        if that is the slot's number."""
        if self.lane_order is None:
            return None
        _integer("epoch", epoch, at_least=0)
        return own_slots(position, self._count(position, size), self._lane_at)

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        """Return the shards that ranks [first, end) of a world read in global batches of that size.

        With fixed lanes these are the shards of the ranks' lanes, in any epoch and from any
        position; with `reshuffle` all shards with samples. The shorter last batch of an epoch and
        partners of mixing may read a few others. int64, ascending, shape (shards,).
        """
        world = _integer("world", world, at_least=1)
        if not 0 <= first < end <= world:
            raise PlanError(f"ranks [{first}, {end}): wanted some within [0, {world}).")
        if self.reshuffle or not self.samples:
            return np.flatnonzero(self.sizes)
        count = min(_integer("global_batch", global_batch, at_least=1), self.samples)
        low, high = first * count // world, end * count // world
        begin, stop = lanes_of_slots(low, high, count=count, lanes=self.lanes)
        return self.shards_of_lanes(self._lane_at[begin:stop])

    def shards_of_lanes(self, lanes: Ints) -> Ints:
        """Return the shards that lanes consist of without `reshuffle`, int64, ascending."""
        bounds = np.concatenate([[0], np.cumsum(self._cut.strand_pieces)])
        strand = (np.arange(0, self.strands, self.lanes)[:, None] + lanes).ravel()
        begin, count = bounds[strand], self._cut.strand_pieces[strand]
        before = np.cumsum(count) - count
        pieces = np.repeat(begin - before, count) + np.arange(int(count.sum()))
        return np.unique(self._cut.shard[pieces])

    def plan_of(self, epoch: int) -> Plan:
        """Return the plan of an epoch's lanes and windows, as `WeightedPlan.plan_of`: this one."""
        del epoch
        return self

    def pieces(self, epoch: int) -> StrandPieces:
        """Return the pieces of an epoch: the same in all, unless `reshuffle` moves shards."""
        epoch = _integer("epoch", epoch, at_least=0)
        return self._cut_shards(epoch) if self.reshuffle else self._cut

    def _epoch(self, number: int) -> _Epoch:
        """Return the epoch's layout and windows; the two most recently used are cached."""
        key = number if self.seed is not None else 0
        state = self._epochs.pop(key, None) or self._make_epoch(key)
        self._epochs[key] = state
        while len(self._epochs) > 2:
            del self._epochs[next(iter(self._epochs))]
        return state

    def _make_epoch(self, number: int) -> _Epoch:
        pieces = self.pieces(number)
        if self.seed is None:
            return order_pieces(pieces, None), None
        hashes = keyed_hash(self.seed, _PIECE, number, np.arange(len(pieces.rows)))
        layout = order_pieces(pieces, hashes)
        keys, strand_rows = (self.seed, _WINDOW, number), np.diff(layout.strand_start)
        units = None if self._units is None else (layout, self._units.longest)
        rows = self._window_rows
        return layout, EpochWindows(keys=keys, strand_rows=strand_rows, rows=rows, units=units)

    def _cut_shards(self, epoch: int | None) -> StrandPieces:
        """Return the strands of the job (None), or of an epoch that moves some shards.

        Which shards move depends on the epoch only, not on the epoch before it, so that any epoch
        can be computed directly. Shards that move change places with one another.
        """
        shards = np.flatnonzero(self.sizes) if self._dealt is None else self._dealt
        if self.seed is not None and len(shards):
            pairs = np.arange(max(1, len(shards) // self.strands))
            order = deal_shards(
                keyed_hash(self.seed, _SHARD, shards),
                swaps=keyed_hash(self.seed, _STRAND, pairs),
                halves=self.strands // self.lanes,
            )
            shards = shards[order]
        if self.seed is not None and epoch is not None:
            moves = unit(keyed_hash(self.seed, _MOVES, epoch, shards)) < self.reshuffle
            keys = keyed_hash(self.seed, _MOVED, epoch, shards[moves])
            shards[moves] = shards[moves][np.argsort(keys, kind="stable")]
        if self._dealt is not None:
            shards = shards[self.sizes[shards] > 0]
        if (units := self._units) is None:
            return cut_strands(self.sizes, shards, strands=self.strands)
        pieces = cut_strands(units.rows, units.of_shards(shards), strands=self.strands)
        first_row = pieces.first_row + units.first_row[pieces.shard]
        return replace(pieces, shard=units.shard[pieces.shard], first_row=first_row)


def strands_and_window(
    parts: int, samples: int, *, shards: int, lanes: int, window: int, longest: int = 1
) -> tuple[int, int]:
    """Return the strands of all lanes, and the rows of a strand in a window.

    parts: shards, or units if windows mix these. samples: rows of all parts; longest: of the
    longest unit. shards: those with samples. window: W, a number of parts with mean rows.
    """
    strands = 2 * lanes if shards >= SHARDS_PER_LANE * lanes else lanes
    return strands, max(1, longest, window * samples * lanes // (max(1, parts) * strands))


def default_lanes(global_batch: int, shards: int, *, share: float = 1.0) -> int:
    """Return L: the largest divisor of the global batch that is at most a quarter of the shards and
    an eighth of the batch; at least 1. It doesn't depend on the world. share: of a mixture's part.
    """
    most = most_lanes(global_batch, shards, share=share)
    return next((lanes for lanes in range(most, 1, -1) if global_batch % lanes == 0), 1)


def most_lanes(global_batch: int, shards: int, *, share: float = 1.0) -> int:
    """Return the number of lanes of a batch with many divisors; at least 1."""
    return max(1, min(shards // SHARDS_PER_LANE, int(global_batch * share) // SAMPLES_PER_LANE))


def default_window(
    shards: int,
    lanes: int,
    *,
    global_batch: int,
    icc: float | None,
    shuffled: bool,
    rows: float = 0.0,
) -> int:
    """Return W: the shards per lane with which the W·L open shards mix batches well; at least 1.

    There are √shards open shards for a pack that was shuffled when it was written, else 10·√shards;
    at least 64, so that small datasets are mixed as a whole, and 4 a lane, so that a rank with one
    lane mixes several. If the correlation of labels inside a shard is known (icc, 0 to 1), there
    are at least 100·global_batch·icc, which keeps `label_spread` within 1 %. Data that wasn't
    shuffled counts as shuffled if √shards satisfies that. docs/explanation/mixing.md has the
    resulting mix and its cost.

    rows: mean rows of a shard. Windows that labels don't require open at most MOST_OPEN_ROWS, since
    a plan stores 4 bytes for each, and 8 after the first window: shards of token streams have some
    100,000 rows.
    """
    by_labels = 100 * global_batch * max(icc, 0.0) if icc is not None else 0.0
    root = math.sqrt(shards)
    mixed = shuffled or (icc is not None and by_labels <= root)
    wanted = max(root if mixed else 10 * root, LEAST_OPEN, LEAST_WINDOW * lanes)
    wanted = max(by_labels, min(wanted, MOST_OPEN_ROWS / rows) if rows else wanted)
    return max(1, math.ceil(min(wanted, shards) / lanes))


def label_spread(batch: int, icc: float, open_shards: int, shards: int) -> float:
    """Return the variance of a label's count in a batch over that of a full shuffle; 1 is perfect.

    1 + (batch - 1)·icc·(1/open_shards - 1/shards): the design effect of a cluster sample (Kish,
    "Survey Sampling", 1965) for batch/open_shards samples a shard, less that of drawing from all
    shards, which also affects a full shuffle. open_shards: W·L, or the part of it that one rank
    mixes.
    """
    if not shards:
        return 1.0
    return 1 + (batch - 1) * icc * (1 / min(max(open_shards, 1), shards) - 1 / shards)


def _joined(columns: Sequence[Ints | None], rows: Sequence[Ints]) -> Ints | None:
    """Return columns of some rows end to end, 0 in rows without any; None if all are without."""
    if all(column is None for column in columns):
        return None
    return np.concatenate(
        [np.zeros(len(r), np.int64) if c is None else c for c, r in zip(columns, rows, strict=True)]
    )


def _as_one(cuts: Sequence[SlotCut]) -> Sequence[SlotCut]:
    """Return whole batches that follow one another as one batch, which has the same samples in the
    same order if there is one lane."""
    begin, end = cuts[0][0], cuts[0][0]
    for position, size, low, high in cuts:
        if position != end or low or high != size:
            return cuts
        end += size
    return [(begin, end - begin, 0, end - begin)]


def _checked_sizes(sizes: ArrayLike | Sequence[int]) -> Ints:
    given: NDArray[Any] = np.asarray(sizes)
    if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
        raise PlanError(
            f"sizes: got {given.dtype} of shape {given.shape}, wanted integers of shape (shards,): "
            "the number of samples of each shard."
        )
    if given.size and (given.min() < 0 or float(given.sum(dtype=np.float64)) >= 2.0**62):
        raise PlanError(
            f"sizes: got shards of {given.min()} to {given.max()} samples, wanted 0 or more each "
            "and fewer than 2^62 in total. Build the index again."
        )
    checked = given.astype(np.int64)
    checked.flags.writeable = False
    return checked


def _integer(name: str, value: object, *, at_least: int | None = None) -> int:
    try:
        number = value if type(value) is int else operator.index(value)  # type: ignore[arg-type]  # what isn't whole raises
    except TypeError:
        raise PlanError(f"{name}: got {value!r}, wanted a whole number.") from None
    if at_least is not None and number < at_least:
        raise PlanError(f"{name}: got {number}, wanted {at_least} or more.")
    return number


WINDOW_BYTES = 4 * 2**30
"""Default limit of the decoded units of all windows. It is the same on every machine, since the
order is: a quarter of a small training node's memory, for all of its ranks."""

LEAST_UNITS = 16
"""Minimum of open units, however large they are (docs/explanation/mixing.md)."""

MIXED_BATCHES = 32
"""Global batches that the open units contain at least, if these are small enough."""


def unit_count(contents: Contents) -> int:
    """Return the number of units that windows mix; without any, of the shards with samples."""
    units = contents.units
    return int(np.count_nonzero(contents.sizes)) if units is None else sum(map(len, units))


def live_share(rows: float) -> float:
    """Return the largest share of a window's units that are kept decoded, reached in its middle:
    units of which only some rows were read. rows: rows of a unit; the share is 0 for 1."""
    return max(0.0, 1 - 2 ** (1 - rows))


def windows_of(contents: Contents, *, lanes: int, window: int) -> int:
    """Return the number of windows of each strand of a shuffled job. The rest of a lane widens
    them up to twice, so W·L units are open at a time, or up to twice as many."""
    shards, longest, units = int(np.count_nonzero(contents.sizes)), 1, contents.units or ()
    if any(len(rows) > 1 for rows in units):  # else windows may cut shards
        longest = max(int(rows.max(initial=0)) for rows in units)
    parts, samples = unit_count(contents), contents.samples
    strands, rows = strands_and_window(
        parts, samples, shards=shards, lanes=lanes, window=window, longest=longest
    )
    return window_count(samples // strands, rows)


def open_units(contents: Contents, *, lanes: int, window: int) -> float:
    """Return the units that all lanes of a shuffled job mix at a time."""
    return unit_count(contents) / windows_of(contents, lanes=lanes, window=window)


def window_of(contents: Contents, lanes: int, *, global_batch: int) -> int:
    """Return W for a dataset: in shards as `default_window`, or in units if shards have several.

    There are as many open units as `default_window` opens shards, and they contain `MIXED_BATCHES`
    global batches. Decoded they take at most `WINDOW_BYTES`, but there are at least `LEAST_UNITS`
    in total and `LEAST_WINDOW` in each lane.
    """
    units = unit_count(contents)
    rows, icc, shuffled = contents.samples / max(1, units), contents.icc, contents.shuffled
    as_shards = default_window(
        units, lanes, global_batch=global_batch, icc=icc, shuffled=shuffled, rows=rows
    )
    if contents.units is None:
        return as_shards
    wanted = max(as_shards * lanes, MIXED_BATCHES * global_batch / max(rows, 1.0))
    kept_bytes = contents.unit_bytes * live_share(rows)
    if kept_bytes * wanted > WINDOW_BYTES:
        wanted = max(WINDOW_BYTES / kept_bytes, LEAST_UNITS, LEAST_WINDOW * lanes)
    return max(1, math.ceil(min(wanted, units) / lanes))
