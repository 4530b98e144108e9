"""Choose the lane order with which nodes read what their caches already hold. Pure.

The ranks of one node read a place of a batch, or those of several nodes read a part of it each. A
lane at that place is worth the bytes that these nodes hold of it, each weighted by its part. The
order with the largest sum is chosen if it gains enough over the last one. A lane that is worth as
much at several places keeps its own.

This is a transportation problem: rows go to bins of limited capacity, and each row has a value in
each bin. It is solved by successive shortest paths (as Jonker and Volgenant's for the assignment
problem, Computing 38, 1987) over the bins rather than over their places, so many equal places cost
as much as one. All figures are whole numbers, so every machine finds the same order. numpy has no
such function, and scipy would become a dependency of every job for this one decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.lanes import LaneGroups, LaneOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_FAR = np.int64(2**62)
_MOST_WORK = 2**27
"""Values that all searches together may read: about a second. A random problem of 2,048 rows and
bins needs somewhat more; its result then has 99.8 % of the largest sum."""
_SCAN = 2**12  # values that can be read in the time that visiting a bin takes
_PRICE_ROUNDS = 24


def best_bins(value: Ints, capacity: Ints, *, most_work: int = _MOST_WORK) -> Ints:
    """Return the bin of each row, so that the sum of value[row, bin] is as large as possible.

    value: of each row in each bin, 0 to 2^40, int64, shape (rows, bins). capacity: rows that each
    bin gets, int64, shape (bins,); they add up to the number of rows. Returns int64, shape (rows,).
    most_work: values that the search may read. If an exact search would read more, the sum may be a
    little below the largest one.
    """
    if not capacity.all():
        used = np.flatnonzero(capacity)
        return used[best_bins(value[:, used], capacity[used], most_work=most_work)]
    search = _BinSearch(value, capacity)
    for full in range(len(capacity)):
        while search.count[full] > capacity[full] and search.work < most_work:
            search.move_row_out(full)
    if (search.count <= capacity).all():
        return search.bin
    return _greedy_bins(value, capacity)


class _BinSearch:
    """A search that starts with each row in its best bin at the bins' prices, so that some bins are
    above their capacity, and moves rows out of these."""

    def __init__(self, value: Ints, capacity: Ints) -> None:
        self._value, self._capacity = value, capacity
        self._price = _start_prices(value, capacity)
        self.bin: Ints = np.argmax(value - self._price, axis=1)
        self.count = np.bincount(self.bin, minlength=len(capacity))
        order = np.argsort(self.bin, kind="stable")
        ends = np.cumsum(self.count)
        self._rows = [order[end - n : end] for n, end in zip(self.count, ends, strict=True)]
        self.work = 0

    def move_row_out(self, full: int) -> None:
        """Move a row out of a bin above its capacity, along the chain of moves that loses least and
        ends in a bin with a free place."""
        bins = len(self._capacity)
        is_full = (self.count >= self._capacity).astype(np.int64)
        far = np.full(bins, _FAR)
        loss, via_bin, via_row = far.copy(), np.zeros(bins, np.int64), np.zeros(bins, np.int64)
        # Twice the loss, and one more for a full bin: so a tie ends the search.
        open_loss = far.copy()
        loss[full], at = 0, full
        done = list[int]()
        is_done = np.zeros(bins, dtype=bool)
        while is_full[at]:
            done.append(at)
            is_done[at] = True
            self.work += _SCAN + len(self._rows[at]) * bins
            rows, new = self._losses(at)
            new += loss[at]
            better = np.flatnonzero((new < loss) & ~is_done)
            loss[better] = new[better]
            open_loss[better] = 2 * new[better] + is_full[better]
            open_loss[at] = _FAR
            via_bin[better] = at
            via_row[better] = rows[better]
            at = int(np.argmin(open_loss))
        self._price[done] += loss[at] - loss[done]
        while at != full:
            before, row = int(via_bin[at]), int(via_row[at])
            self._move(row, before, at)
            at = before

    def _losses(self, at: int) -> tuple[Ints, Ints]:
        """Return for each bin the row of bin `at` that loses least by moving to it at the bins'
        prices, and that loss."""
        rows = self._rows[at]
        worth = self._value[rows] - self._price
        losses = worth[:, at, None] - worth
        if len(rows) == 1:
            return np.broadcast_to(rows, (len(self._capacity),)), losses[0]
        best = np.argmin(losses, axis=0)
        return rows[best], losses[best, np.arange(len(best))]

    def _move(self, row: int, source: int, to: int) -> None:
        self._rows[source] = self._rows[source][self._rows[source] != row]
        self._rows[to] = np.sort(np.append(self._rows[to], row))
        self.bin[row] = to
        self.count[source] -= 1
        self.count[to] += 1


def _start_prices(value: Ints, capacity: Ints) -> Ints:
    """Return prices at which few bins are the best one of more rows than their capacity. The price
    of such a bin rises until the rows beyond its capacity are worth as much elsewhere."""
    price = np.zeros(len(capacity), dtype=np.int64)
    if len(capacity) < 2:
        return price
    row = np.arange(len(value))
    for _ in range(_PRICE_ROUNDS):
        worth = value - price
        wanted = np.argmax(worth, axis=1)
        count = np.bincount(wanted, minlength=len(capacity))
        is_full = count > capacity
        if not is_full.any():
            break
        best = worth[row, wanted]
        worth[row, wanted] = -_FAR
        gap = best - worth.max(axis=1)
        order = np.lexsort((-gap, wanted))
        ends = np.cumsum(count)
        first_beyond = (ends - count + capacity)[is_full]
        price[is_full] += gap[order[first_beyond]] + 1
    return price


def _greedy_bins(value: Ints, capacity: Ints) -> Ints:
    """Return the bin of each row. Rows get their best free bin one after the other, those with the
    largest value first."""
    bins, left = np.empty(len(value), dtype=np.int64), capacity.copy()
    for row in np.argsort(-value.max(axis=1), kind="stable").tolist():
        bins[row] = at = int(np.argmax(np.where(left > 0, value[row], -1)))
        left[at] -= 1
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
    held: NDArray[np.int64], *, nodes: Sequence[int], last: LaneOrder | None, lanes: int
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
    worth = _GroupValues.of(held, nodes, groups)
    largest = int(held.max())
    evened = np.where(held >= largest - largest // _ALIKE, largest, held)
    alike = _GroupValues.of(evened, nodes, groups).value
    value, kind = worth.value, worth.kind
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
    most = int(worth.most.sum())
    last_sum, sum_ = int(stays.sum()), int(goes.sum())
    is_gain = sum_ > last_sum and sum_ - last_sum >= LEAST_GAIN * most
    order = before
    if is_gain:
        order = LaneOrder(tuple(_placed(at, kind, chosen, movable).tolist()), lanes)
    scale = worth.bytes_each
    return LaneChoice(
        order=order, last=int(last_sum * scale), chosen=int((sum_ if is_gain else last_sum) * scale)
    )


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GroupValues:
    """The values of groups of lanes at the places of a batch.

    value: value of each group at each kind of place, int64, shape (groups, kinds); places that the
    same nodes read in the same parts are of one kind. kind: kind of each place, int64, shape
    (groups,). most: value of each group if the node that holds most of it read all of it.
    bytes_each: bytes of a value of 1.
    """

    value: Ints
    kind: Ints
    most: Ints
    bytes_each: float

    @classmethod
    def of(cls, held: Ints, nodes: Sequence[int], groups: LaneGroups) -> _GroupValues:
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
        return cls(
            value=value >> more_bits, kind=kind, most=most >> more_bits, bytes_each=bytes_each
        )
