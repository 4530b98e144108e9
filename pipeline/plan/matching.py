"""Who gets what, so that all get the most: a transportation problem in whole numbers. Pure.

Rows are shared out among bins that have room for so many; each row is worth so much in each bin.
Successive shortest paths (as Jonker and Volgenant's for the assignment problem, Computing 38, 1987)
over the bins rather than over their places, so that bins of many like places cost one of them.
Whole numbers, so that every machine finds the same. Not in numpy; scipy would be a dependency of
every job for one decision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
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
    search = _Search(value, room)
    for full in range(len(room)):
        while search.count[full] > room[full] and search.work < _MOST_WORK:
            search.make_room(full)
    if (search.count <= room).all():
        return search.bin
    search.share_out()
    return max(search.bin, _in_turn(value, room), key=lambda bins: _sum(value, bins))


class _Search:
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


def _in_turn(value: Ints, room: Ints) -> Ints:
    """The bins of rows that choose one after another, those that can have most first."""
    bins, left = np.empty(len(value), dtype=np.int64), room.copy()
    for row in np.argsort(-value.max(axis=1), kind="stable").tolist():
        bins[row] = at = int(np.argmax(np.where(left > 0, value[row], -1)))
        left[at] -= 1
    return bins


def _sum(value: Ints, bins: Ints) -> int:
    return int(value[np.arange(len(bins)), bins].sum())
