"""Derive which nodes hold or fetch a shard, and choose the lane order that follows from it. Pure.

Processes with the same cache folder belong to one node, whatever a launcher's variables say. Each
process publishes one report; all reports together give the nodes and the bytes that each of them
holds of each group of lanes.

Nodes don't report again during the job: a cache fills with what its node's ranks read, which
follows from the plan for any epoch.

The ranks of one node read a place of a batch, or those of several nodes read a part of it each. A
lane at that place is worth the bytes that these nodes hold of it, each weighted by its part. The
lane order with the largest sum is chosen if it gains enough over the last one. A lane that is worth
as much at several places keeps its own. Groups get places in the order of their values, the largest
first. That holds 97 to 100 % of what an exact assignment does (caches after any change of nodes, or
filled at random), at a fraction of its code. All figures are whole numbers, so every machine finds
the same order.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash
from penstock.pipeline.plan.lanes import LaneGroups, LaneOrder, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.order import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProcessReport:
    """The report that one process of a job publishes to the others.

    rank: this process's rank. cache: identity of its cache folder, the same for all processes of a
    node. resume_point: state from which the job continues, which must be the same for all. held:
    bytes of each group of lanes in the cache, int64, shape (groups,); None if another process
    reports for the node.
    """

    rank: int
    cache: str
    resume_point: str = ""
    held: Ints | None = None

    def text(self) -> str:
        """Return the report as JSON."""
        held = None if self.held is None else packed(self.held)
        return json.dumps([self.rank, self.cache, self.resume_point, held])

    @classmethod
    def parse(cls, text: str, *, groups: int) -> ProcessReport:
        """Return the report of a text. Raises PlanError for an invalid one, and for another number
        of groups."""
        try:
            rank, cache, resume_point, held = json.loads(text)
            held = None if held is None else unpacked(held, groups)
            return cls(rank=int(rank), cache=str(cache), resume_point=str(resume_point), held=held)
        except (ValueError, TypeError) as error:
            raise PlanError(
                f"The report of a rank is invalid ({error}): wanted the cached bytes of {groups} "
                "groups of lanes. Run the same Penstock with the same arguments on every rank."
            ) from None


def nodes_of_reports(
    reports: Sequence[ProcessReport], *, size: int, groups: int
) -> tuple[list[int], Ints] | None:
    """Return the nodes of the processes 0, 1, 2, … that sent these reports: the number of ranks of
    each, in the order of the ranks, and the bytes that they hold of each group of lanes, int64,
    shape (nodes, groups).

    Nodes with the same ranks, over which a model is split, count as one that holds the bytes of
    all. Returns None if the ranks of a node aren't consecutive, since no lane order helps then.
    size: number of the job's ranks.
    """
    caches: dict[str, list[ProcessReport]] = {}
    for report in reports:
        caches.setdefault(report.cache, []).append(report)
    held: dict[tuple[int, ...], Ints] = {}
    for own in caches.values():
        ranks = tuple(sorted({report.rank for report in own}))
        known = [report.held for report in own if report.held is not None]
        held[ranks] = held.get(ranks, 0) + np.max([np.zeros(groups, np.int64), *known], axis=0)
    nodes = sorted(held)
    if [rank for ranks in nodes for rank in ranks] != list(range(size)):
        return None
    return [len(ranks) for ranks in nodes], np.stack([held[ranks] for ranks in nodes])


def held_bytes_of_lanes(plan: Plan, epoch: int, held: Ints) -> Ints:
    """Return the held bytes of each group of lanes in an epoch (all epochs are the same without
    `reshuffle`), int64, shape (groups,).

    held: held bytes of each shard, int64, shape (shards,). The bytes of a shard in two lanes are
    divided by its rows in each. Raises PlanError for another number of shards.
    """
    if held.shape != plan.sizes.shape:
        raise PlanError(f"held: got shape {held.shape}, wanted {plan.sizes.shape}: bytes a shard.")
    pieces = plan.pieces(epoch)
    groups = LaneGroups(plan.lanes)
    strand = np.repeat(np.arange(plan.strands), pieces.strand_pieces)
    group = strand % plan.lanes // groups.size
    size, own = plan.sizes[pieces.shard], held[pieces.shard]
    # own · rows // size without leaving 64 bits.
    part = own // size * pieces.rows + own % size * pieces.rows // size
    lanes = np.zeros(len(groups), dtype=np.int64)
    np.add.at(lanes, group, part)
    return lanes


_OWNER = 0x0E4E7B05  # keeps these hashes apart from those of order and draws
_EPOCHS_KEPT = 3


class ShardReaders:
    """The nodes that read and fetch each shard in the epochs of a job. Thread-safe.

    plan: has the job's lane order. nodes: number of ranks of each node, in the order of the ranks;
    at least 1. Memory is O(shards) for each of the three most recently used epochs; for one if
    lanes are fixed.
    """

    def __init__(self, plan: Plan, *, nodes: Sequence[int]) -> None:
        self._plan = plan
        self._first, self._end = _readers(plan, nodes)
        self._tables: dict[int, tuple[Ints, Ints]] = {}
        self._lock = threading.Lock()

    def readers(self, shard: int, epoch: int) -> tuple[int, ...]:
        """Return the nodes whose ranks read a shard in an epoch, ascending; () for a shard without
        samples."""
        lanes = self._lanes_of(shard, epoch)
        found = {n for lane in lanes.tolist() for n in range(self._first[lane], self._end[lane])}
        return tuple(sorted(found))

    def owner(self, shard: int, epoch: int) -> int | None:
        """Return the node that fetches a shard from the store for all others; None if none reads
        it.

        It is the node with the highest hash of those that read the shard in this epoch (rendezvous:
        Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6, 1998).
        """
        readers = self.readers(shard, epoch)
        if len(readers) < 2:
            return readers[0] if readers else None
        hashes = keyed_hash(_OWNER, shard, np.array(readers, dtype=np.int64))
        return readers[int(np.argmax(hashes))]

    def _lanes_of(self, shard: int, epoch: int) -> Ints:
        """Return the lanes of a shard in an epoch, ascending."""
        key = epoch if self._plan.reshuffle else 0
        with self._lock:
            table = self._tables.pop(key, None) or _shard_lanes(self._plan, key)
            self._tables[key] = table
            while len(self._tables) > _EPOCHS_KEPT:
                del self._tables[next(iter(self._tables))]
        lanes, begin = table
        return lanes[begin[shard] : begin[shard + 1]]


def _readers(plan: Plan, nodes: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the nodes [first, end) whose ranks have slots of each lane: int64, shape (lanes,)."""
    lanes, ranks = plan.lanes, np.asarray(nodes, dtype=np.int64)
    node_end = np.cumsum(ranks) * lanes
    place = np.arange(lanes, dtype=np.int64) * int(ranks.sum())
    first = np.searchsorted(node_end, place, side="right")
    end = np.searchsorted(node_end - ranks * lanes, place + int(ranks.sum()), side="left")
    if plan.lane_order is None:
        return first, end
    lane_at = plan.lane_order.lanes_of(lanes)
    of_lane = np.empty((2, lanes), dtype=np.int64)
    of_lane[:, lane_at] = first, end
    return of_lane[0], of_lane[1]


def _shard_lanes(plan: Plan, epoch: int) -> tuple[Ints, Ints]:
    """Return the lanes of all shards in an epoch, ascending for each, int64, shape (pairs,), and
    the place at which those of each shard begin, int64, shape (shards + 1,)."""
    pieces = plan.pieces(epoch)
    strand = np.repeat(np.arange(plan.strands, dtype=np.int64), pieces.strand_pieces)
    pairs = np.unique(pieces.shard * plan.lanes + strand % plan.lanes)
    begin = np.searchsorted(pairs, np.arange(len(plan.sizes) + 1) * plan.lanes)
    return pairs % plan.lanes, begin


def best_bins(value: Ints, capacity: Ints) -> Ints:
    """Return the bin of each row, int64, shape (rows,): the sum of value[row, bin] shall be large.

    value: of each row in each bin, 0 or more, int64, shape (rows, bins). capacity: rows that each
    bin gets, int64, shape (bins,); they add up to the number of rows. Of all rows and bins, the
    pairs with the largest values come first, and rows without a value fill what is left.
    """
    bins, left, missing = np.full(len(value), -1, dtype=np.int64), capacity.tolist(), len(value)
    pairs = np.argsort(-value, axis=None, kind="stable")[: np.count_nonzero(value)]
    for row, at in zip(*(each.tolist() for each in np.divmod(pairs, len(left))), strict=True):
        if left[at] and bins[row] < 0:
            bins[row] = at
            left[at] -= 1
            missing -= 1
            if not missing:
                break
    bins[bins < 0] = np.repeat(np.arange(len(left)), left)
    return bins


LEAST_GAIN = 0.01
"""Share of the held bytes that another order must gain. Less is noise (a shard that one node has
finished and its neighbour hasn't), and another order changes the rounding of sums over ranks."""

_ALIKE = 32
"""Lanes that are held except for 1/32 count as equal, since complete lanes differ by a few bytes.
By exact bytes a node would keep its largest lanes, which aren't neighbours, and separated lanes
have more borders, at which two nodes read the same shard."""

_VALUE_BITS = 24  # precision of a group's value: smaller differences count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneChoice:
    """The chosen order, and the bytes that nodes hold of what they read with the last order and
    with the chosen one."""

    order: LaneOrder
    last: int
    chosen: int


def choose_lane_order(
    held: Ints, *, nodes: Sequence[int], last: LaneOrder | None, lanes: int
) -> LaneChoice:
    """Choose the order of lanes with which nodes hold the most bytes of what they read.

    held: bytes that each node holds of each group of lanes (`LaneGroups`), int64, 0 to 2^62, shape
    (nodes, groups); nearly equal values count as equal. nodes: number of ranks of each node, in the
    order of the ranks, at least 1. last: the order so far, None for the identity; it stays unless
    another one gains `LEAST_GAIN` of the held bytes. Equal arguments give equal results on every
    machine. Raises PlanError for a last order of other lanes.
    """
    groups = LaneGroups(lanes)
    before = LaneOrder.identity(lanes) if last is None else last
    before.lanes_of(lanes)  # raises for another number of lanes
    at = np.array(before.groups, np.int64)
    value, kind, most, scale = _group_values(held, nodes, groups)
    largest = int(held.max())
    evened = np.where(held >= largest - largest // _ALIKE, largest, held)
    alike, *_ = _group_values(evened, nodes, groups)
    kind_before = np.empty(len(at), np.int64)  # of the place that a group had
    kind_before[at] = kind
    movable = groups.movable
    stays = value[np.arange(len(at)), kind_before]
    capacity = np.bincount(kind[:movable], minlength=value.shape[1])
    # A tie keeps the group's kind of place: the bonus is below the least difference in value.
    wished = alike[:movable] * (movable + 1)
    wished[np.arange(movable), kind_before[:movable]] += 1
    chosen = kind_before.copy()
    chosen[:movable] = best_bins(wished, capacity)
    goes = value[np.arange(len(at)), chosen]
    last_sum, sum_ = int(stays.sum()), int(goes.sum())
    is_gain = sum_ > last_sum and sum_ - last_sum >= LEAST_GAIN * int(most.sum())
    last_bytes = int(last_sum * scale)
    if not is_gain:
        return LaneChoice(order=before, last=last_bytes, chosen=last_bytes)
    order = LaneOrder(tuple(_placed(at, kind, chosen, movable).tolist()), lanes)
    return LaneChoice(order=order, last=last_bytes, chosen=int(sum_ * scale))


def _placed(at: Ints, kind: Ints, chosen: Ints, movable: int) -> Ints:
    """Return the group at each place. Places of one kind are equal: a group that has one of its
    chosen kind keeps it, the others fill the free ones in the order of their old places."""
    placed = np.full(len(at), -1, dtype=np.int64)
    stays = chosen[at] == kind
    placed[stays] = at[stays]
    placed[movable:] = at[movable:]
    free = np.flatnonzero(placed < 0)
    moving = at[~stays]
    free = free[np.argsort(kind[free], kind="stable")]
    placed[free] = moving[np.argsort(chosen[moving], kind="stable")]
    return placed


def _group_values(
    held: Ints, nodes: Sequence[int], groups: LaneGroups
) -> tuple[Ints, Ints, Ints, float]:
    """Return the values of groups of lanes at the places of a batch.

    The value of each group at each kind of place, int64, shape (groups, kinds): places that the
    same nodes read in the same parts are of one kind. The kind of each place, int64, shape
    (groups,). The value of each group if the node that holds most of it read all of it. The bytes
    of a value of 1.
    """
    # A batch has L·R units, which lanes and ranks divide: lane x has [x·R, (x + 1)·R), and a
    # rank has L.
    ranks, lanes, count = int(sum(nodes)), groups.lanes, len(groups)
    node_end = np.cumsum(np.asarray(nodes, np.int64)) * lanes
    node_begin = node_end - np.asarray(nodes, np.int64) * lanes
    place_end = np.minimum(np.arange(1, count + 1) * groups.size, lanes) * ranks
    place_begin = np.concatenate([[0], place_end[:-1]])
    first = np.searchsorted(node_end, place_begin, side="right")
    end = np.searchsorted(node_begin, place_end, side="left")
    width = groups.size * ranks
    # Sums of values stay below 2^63: bytes lose as many low bits as the largest one requires.
    lost_bits = max(0, int(held.max(initial=0)).bit_length() + width.bit_length() - 62)
    parts: dict[tuple[tuple[int, int], ...], int] = {}
    kind = np.empty(count, np.int64)
    columns: list[Ints] = []
    for place in range(count):
        readers = []
        for node in range(int(first[place]), int(end[place])):
            low = max(int(node_begin[node]), int(place_begin[place]))
            high = min(int(node_end[node]), int(place_end[place]))
            readers.append((node, high - low))
        key = tuple(readers)
        if key not in parts:
            parts[key] = len(parts)
            columns.append(sum((held[n] >> lost_bits) * part for n, part in readers))
        kind[place] = parts[key]
    value = np.stack(columns, axis=1)
    most = (held.max(axis=0) >> lost_bits) * width
    more_bits = max(0, int(most.max(initial=0)).bit_length() - _VALUE_BITS)
    bytes_each = 2.0 ** (lost_bits + more_bits) / width
    return value >> more_bits, kind, most >> more_bits, bytes_each
