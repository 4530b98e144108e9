"""Choose the lane order that suits what the nodes' caches hold: slots follow the data. Pure.

A place of a batch is read by the node whose ranks have its slots, or by two and more in parts; a
lane there is worth what they hold of it, each by its part. The order that is worth most is chosen
if it gains something over the last one; what is worth as much anywhere stays where it was.

This is a transportation problem: rows are shared out among bins with limited room, and each row is
worth so much in each bin. It is solved by successive shortest paths (as Jonker and Volgenant's for
the assignment problem, Computing 38, 1987) over the bins rather than over their places, so that
bins of many like places cost one of them. All figures are whole numbers, so every machine finds the
same. It is not in numpy, and scipy would be a dependency of every job for one decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.pipeline.plan.lanes import LaneGroups, LaneOrder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_FAR = np.int64(2**62)
_MOST_WORK = 2**27
"""Values that all searches together look at: about a second. Random values of 2,048 rows and bins
take somewhat more, and get 99.8 % of the most that there is."""
_SCAN = 2**12  # as much time as so many values: a look at a bin
_ROUNDS = 24  # of prices


def best_bins(value: Ints, room: Ints) -> Ints:
    """The bin of each row, so that the sum of values[row, bin] is the largest there is.

    value: of each row in each bin, 0 to 2^40, int64, shape (rows, bins). room: rows of each bin,
    int64, shape (bins,), whose sum is the number of rows. Returns int64, shape (rows,). Where a
    problem is so hard that it would take many seconds the sum may be a little less.
    """
    if not room.all():
        has_room = np.flatnonzero(room)
        return has_room[best_bins(value[:, has_room], room[has_room])]
    search = _BinSearch(value, room)
    for full in range(len(room)):
        while search.count[full] > room[full] and search.work < _MOST_WORK:
            search.make_room(full)
    if (search.count <= room).all():
        return search.bin
    search.share_out()
    return max(search.bin, _greedy_bins(value, room), key=lambda bins: _sum(value, bins))


class _BinSearch:
    """Rows in bins that are best for them at the bins' prices, some bins too full as yet."""

    def __init__(self, value: Ints, room: Ints) -> None:
        self._value, self._room = value, room
        self._price = _start_prices(value, room)
        self.bin: Ints = np.argmax(value - self._price, axis=1)
        self.count = np.bincount(self.bin, minlength=len(room))
        order = np.argsort(self.bin, kind="stable")
        ends = np.cumsum(self.count)
        self._rows = [order[end - n : end] for n, end in zip(self.count, ends, strict=True)]
        self.work = 0

    def make_room(self, full: int) -> None:
        """Move a row out of a bin that is too full, and others on in its turn, to where there is
        room: along the path that loses least."""
        bins = len(self._room)
        has_no_room = (self.count >= self._room).astype(np.int64)
        far = np.full(bins, _FAR)
        loss, via_bin, via_row = far.copy(), np.zeros(bins, np.int64), np.zeros(bins, np.int64)
        open_loss = far.copy()  # twice, and one more where there is no room: ties end the search
        loss[full], at = 0, full
        done = list[int]()
        is_done = np.zeros(bins, dtype=bool)
        while has_no_room[at]:
            done.append(at)
            is_done[at] = True
            self.work += _SCAN + len(self._rows[at]) * bins
            rows, new = self._losses(at)
            new += loss[at]
            better = np.flatnonzero((new < loss) & ~is_done)
            loss[better] = new[better]
            open_loss[better] = 2 * new[better] + has_no_room[better]
            open_loss[at] = _FAR
            via_bin[better] = at
            via_row[better] = rows[better]
            at = int(np.argmin(open_loss))
        self._price[done] += loss[at] - loss[done]
        while at != full:
            before, row = int(via_bin[at]), int(via_row[at])
            self._move(row, before, at)
            at = before

    def share_out(self) -> None:
        """Move what is too much in a bin to where it loses least of what has room, one by one."""
        for full in np.flatnonzero(self.count > self._room).tolist():
            rows = self._rows[full]
            worth = self._value[rows] - self._price
            own = worth[:, full].copy()
            worth[:, full] = -_FAR
            for row in rows[np.argsort(worth.max(axis=1) - own, kind="stable")][::-1].tolist():
                if self.count[full] <= self._room[full]:
                    break
                has_room = self.count < self._room
                worth_there = np.where(has_room, self._value[row] - self._price, -_FAR)
                self._move(row, full, int(np.argmax(worth_there)))

    def _losses(self, at: int) -> tuple[Ints, Ints]:
        """For each bin the row of this one that loses least there at the bins' prices, and what it
        loses."""
        rows = self._rows[at]
        worth = self._value[rows] - self._price
        losses = worth[:, at, None] - worth
        if len(rows) == 1:
            return np.broadcast_to(rows, (len(self._room),)), losses[0]
        best = np.argmin(losses, axis=0)
        return rows[best], losses[best, np.arange(len(best))]

    def _move(self, row: int, source: int, to: int) -> None:
        self._rows[source] = self._rows[source][self._rows[source] != row]
        self._rows[to] = np.sort(np.append(self._rows[to], row))
        self.bin[row] = to
        self.count[source] -= 1
        self.count[to] += 1


def _start_prices(value: Ints, room: Ints) -> Ints:
    """Prices at which few bins are wanted by more rows than they have room for: a bin that is gets
    dearer until the rows beyond its room are as well off elsewhere."""
    price = np.zeros(len(room), dtype=np.int64)
    if len(room) < 2:
        return price
    row = np.arange(len(value))
    for _ in range(_ROUNDS):
        worth = value - price
        wanted = np.argmax(worth, axis=1)
        count = np.bincount(wanted, minlength=len(room))
        is_full = count > room
        if not is_full.any():
            break
        best = worth[row, wanted]
        worth[row, wanted] = -_FAR
        gap = best - worth.max(axis=1)
        order = np.lexsort((-gap, wanted))
        ends = np.cumsum(count)
        first_beyond = (ends - count + room)[is_full]
        price[is_full] += gap[order[first_beyond]] + 1
    return price


def _greedy_bins(value: Ints, room: Ints) -> Ints:
    """The bins of rows that choose one after another, those that can have most first."""
    bins, left = np.empty(len(value), dtype=np.int64), room.copy()
    for row in np.argsort(-value.max(axis=1), kind="stable").tolist():
        bins[row] = at = int(np.argmax(np.where(left > 0, value[row], -1)))
        left[at] -= 1
    return bins


def _sum(value: Ints, bins: Ints) -> int:
    return int(value[np.arange(len(bins)), bins].sum())


LEAST_GAIN = 0.01
"""Of the bytes that are held, that another order must have where they are read: less is noise (a
shard that one node has finished and its neighbour hasn't), and not worth other sums of floats."""

_ALIKE = 32
"""Lanes that are held but for one part in so many count as held alike, as whole lanes have a few
bytes more or less. By bytes alone a node would keep the largest of its lanes, here and there one,
and each that is torn from its neighbour leaves a shard that lies in both to two nodes."""

_VALUE_BITS = 24  # of the most that a group is worth: what differs by less is alike


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneChoice:
    """The order that was chosen, and what it is worth: all as bytes that nodes hold of what they
    read with it.

    held: if every group that a node holds were read by the one that holds most of it. last: with
    the last order. chosen: with `order`.
    """

    order: LaneOrder
    held: int
    last: int
    chosen: int


def choose_lane_order(
    held: NDArray[np.int64], *, nodes: Sequence[int], last: LaneOrder | None, lanes: int
) -> LaneChoice:
    """Choose the order of lanes with which nodes hold the most bytes of what they read.

    held: bytes that each node holds of each group of lanes (`LaneGroups`), whole numbers, shape
    (nodes, groups); what is about as much counts as alike. nodes: how many ranks each has, in the
    order of their ranks; at least 1. last: the order so far, None for the identity; it stays unless
    another one gains `LEAST_GAIN` of what is held. Equal arguments give equal answers on every
    machine. Raises PlanError for what doesn't fit together.
    """
    groups = LaneGroups(lanes)
    _check(held, nodes, len(groups))
    held = held.astype(np.int64, copy=False)
    before = LaneOrder(tuple(range(lanes))) if last is None else last
    at = before.groups if len(before.places) == lanes else _unfit_order(before, lanes)
    worth = _GroupValues.of(held, nodes, groups)
    alike = _GroupValues.of(_evened(held), nodes, groups).value
    value, kind = worth.value, worth.kind
    kind_before = np.empty(len(at), np.int64)  # of the place that a group had
    kind_before[at] = kind
    movable = groups.movable
    stays = value[np.arange(len(at)), kind_before]
    room = np.bincount(kind[:movable], minlength=value.shape[1])
    # What is worth as much elsewhere stays: it counts for less than the least difference in value.
    wished = alike[:movable] * (movable + 1)
    wished[np.arange(movable), kind_before[:movable]] += 1
    taken = kind_before.copy()
    taken[:movable] = best_bins(wished, room)
    goes = value[np.arange(len(at)), taken]
    most = int(worth.most.sum())
    last_sum, sum_ = int(stays.sum()), int(goes.sum())
    is_gain = sum_ > last_sum and sum_ - last_sum >= LEAST_GAIN * most
    order = before
    if is_gain:
        order = LaneOrder.of_groups(_placed(at, kind, taken, movable).tolist(), lanes=lanes)
    scale = worth.bytes_each
    return LaneChoice(
        order=order,
        held=int(most * scale),
        last=int(last_sum * scale),
        chosen=int((sum_ if is_gain else last_sum) * scale),
    )


def _evened(held: Ints) -> Ints:
    """What is held, where nearly all of the largest is as much as that."""
    most = int(held.max())
    return np.where(held >= most - most // _ALIKE, most, held)


def _placed(at: Ints, kind: Ints, taken: Ints, movable: int) -> Ints:
    """The group at each place, where places of a kind are alike: who has one of them keeps it, the
    others fill them in the order of the places that they had."""
    placed = np.full(len(at), -1, dtype=np.int64)
    stays = taken[at] == kind
    placed[stays] = at[stays]
    placed[movable:] = at[movable:]
    free = np.flatnonzero(placed < 0)
    moving = at[~stays]
    free = free[np.argsort(kind[free], kind="stable")]
    placed[free] = moving[np.argsort(taken[moving], kind="stable")]
    return placed


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _GroupValues:
    """What groups of lanes are worth at the places of a batch.

    value: of each group at each kind of place, int64, shape (groups, kinds): places that the same
    nodes read by the same parts are of one kind. kind: of each place, int64, shape (groups,). most:
    of each group where all of it were read by who holds most. bytes_each: of a value of 1.
    """

    value: Ints
    kind: Ints
    most: Ints
    bytes_each: float

    @classmethod
    def of(cls, held: Ints, nodes: Sequence[int], groups: LaneGroups) -> _GroupValues:
        # Slots in units that cut both lanes and ranks: lane x has [x·R, (x + 1)·R), and a rank L.
        ranks, lanes, count = int(sum(nodes)), groups.lanes, len(groups)
        node_end = np.cumsum(np.asarray(nodes, np.int64)) * lanes
        node_begin = node_end - np.asarray(nodes, np.int64) * lanes
        place_end = np.minimum(np.arange(1, count + 1) * groups.size, lanes) * ranks
        place_begin = np.concatenate([[0], place_end[:-1]])
        first = np.searchsorted(node_end, place_begin, side="right")
        end = np.searchsorted(node_begin, place_end, side="left")
        width = groups.size * ranks
        # Sums of value below 2^63: bytes lose what a group's largest holding has beyond that.
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


def _check(held: NDArray[np.int64], nodes: Sequence[int], groups: int) -> None:
    if held.shape != (len(nodes), groups) or not len(nodes):
        raise PlanError(
            f"lane order: got held bytes of shape {held.shape}, wanted one row for each of the "
            f"{len(nodes)} nodes and one column for each of the {groups} groups of lanes."
        )
    if held.dtype.kind not in "iu" or int(held.min()) < 0 or int(held.max()) >= 2**62:
        raise PlanError(
            "lane order: wanted held bytes as whole numbers from 0 to 2^62, got "
            f"{held.dtype} from {held.min()} to {held.max()}."
        )
    if min(nodes) < 1:
        raise PlanError(f"lane order: got a node of {min(nodes)} ranks, wanted 1 or more.")


def _unfit_order(order: LaneOrder, lanes: int) -> Ints:
    raise PlanError(f"lane order: got one of {len(order.places)} lanes, wanted {lanes}.")
