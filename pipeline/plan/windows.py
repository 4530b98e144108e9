"""Shuffle samples inside windows: samples of a strand change places with near ones only. Pure.

A window decides how many shards are open at once, and it turns over as a whole. If all strands
turned over together, the demand for new shards would come in bursts of 12 times the consumption. So
their inner boundaries are shifted by up to half a window: evenly over all strands and, as a node
reads strands in a row, nearly so over a node's. A strand's ends stay where they are: its first and
last windows are half to one and a half times as long as the others, and a strand that is one window
isn't cut at all.

A shard may consist of decode units, which have to be decoded as a whole. Lanes run over shards, so
that what a node owns stays whole; inside a lane units are permuted and windows mix them. A window's
boundary moves to the begin of the unit that it would cut: so no unit is in two windows, and each is
decoded once and released.

The order in a window is that of keyed hashes, so any window can be computed alone. Two windows a
strand are cached, as a walk needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash, splitmix64

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]
    Hashes = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeUnits:
    """The units of all shards, end to end.

    rows: of each unit, at least 1. shard: that it is of. first_row: of it in its shard. All int64,
    shape (units,). first: units before each shard, and of all, int64, shape (shards + 1,).
    """

    rows: Ints
    shard: Ints
    first_row: Ints
    first: Ints

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Rows of the longest unit."""
        return int(self.rows.max(initial=0))

    def of_shards(self, shards: Ints) -> Ints:
        """The units of these shards, shard after shard: numbers, int64, shape (n,)."""
        begin, counts = self.first[shards], self.first[shards + 1] - self.first[shards]
        before = np.cumsum(counts) - counts
        return np.repeat(begin - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def units_of(sizes: Ints, given: Sequence[ArrayLike] | None) -> DecodeUnits | None:
    """Check what a plan was given as `units`; None where each shard is one unit.

    given: for each shard the rows of its units, in the order of the rows; or one number where all
    have as many, but for a shorter last one. Raises PlanError for units that don't add up to their
    shards.
    """
    if given is None:
        return None
    if len(given) != len(sizes):
        raise PlanError(
            f"units: got those of {len(given)} shards, wanted those of each of the {len(sizes)}: "
            "a list of rows for every shard."
        )
    each = [_rows(n, units, size) for n, (units, size) in enumerate(zip(given, sizes, strict=True))]
    counts = np.array([len(units) for units in each], np.int64)
    if (counts <= 1).all() and all(u.sum() == n for u, n in zip(each, sizes, strict=True)):
        return None
    rows = np.concatenate(each)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shard = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    ends = np.cumsum(rows)
    total = np.concatenate([[0], ends])[first]
    if (wrong := np.flatnonzero(np.diff(total) != sizes)).size:
        at = int(wrong[0])
        raise PlanError(
            f"units: those of shard {at} have {int(total[at + 1] - total[at])} rows, and the shard "
            f"has {int(sizes[at])}. Units cover their shard, each row once."
        )
    return DecodeUnits(rows=rows, shard=shard, first_row=ends - rows - total[shard], first=first)


def _rows(shard: int, given: ArrayLike, size: int) -> Ints:
    units: NDArray[Any] = np.asarray(given)
    if units.ndim > 1 or (units.size and (units.dtype.kind not in "iu" or units.min() < 1)):
        raise PlanError(
            f"units: got {given!r:.80} for shard {shard}, wanted the rows of its units: whole "
            "numbers from 1 on."
        )
    if not units.ndim:
        return np.diff([*range(0, int(size), int(units)), size]).astype(np.int64)
    return units.astype(np.int64)


MAX_WINDOW = 2**32  # samples: an index within a window has 32 bits, beside 32 of its hash

_HIGH, _LOW = np.uint64(0xFFFFFFFF00000000), np.uint64(0xFFFFFFFF)
_GROUP = 2**16  # samples that are sorted together: 16 bits of window, 32 of hash, 16 of index


def window_count(shortest: int, rows: int) -> int:
    """EpochWindows of every strand: as many of so many rows as the shortest one has room for."""
    return max(1, shortest // rows)


_ZERO, _ONE = np.array(0, dtype=np.int64), np.array(1, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitBorders:
    """Where units begin, and strands, in stream coordinates: int64, ascending. longest: rows of the
    longest unit."""

    begin: Ints
    strand_start: Ints
    longest: int

    def before(self, strand: Ints, offset: Ints) -> Ints:
        """Where in its strand the unit begins that stands at an offset: int64, shape (n,)."""
        first = self.strand_start[strand]
        unit = np.searchsorted(self.begin, first + offset, side="right") - 1
        before: Ints = self.begin[unit] - first
        return before


class EpochWindows:
    """The windows of one epoch's strands, and the permutations of those in use.

    keys: what the permutations depend on, beside strand and window number.
    strand_rows: samples of each strand, int64, shape (strands,), as equal as can be.
    rows: samples of a window, at least; what is left of a strand widens its windows. borders: of
    units that no window may cut, none of them longer than a window; None: rows may part anywhere.
    Raises PlanError for windows of more samples than 32 bits count. Not thread-safe: the owner
    locks.
    """

    def __init__(
        self,
        *,
        keys: tuple[int, ...],
        strand_rows: Ints,
        rows: int,
        borders: UnitBorders | None = None,
    ) -> None:
        self._keys, self._borders = keys, borders
        self._strand_rows = strand_rows
        strands, shortest = len(strand_rows), int(strand_rows.min())
        windows = window_count(shortest, rows)  # of every strand
        rows = max(1, shortest // windows)
        self._shift = _shifts(strands, rows)
        self._is_one = windows == 1
        # A strand has a place for even and one for odd windows, so long as its longest of either
        # kind. The even ones lie together, so that the odd half takes no memory (not even of a huge
        # page) before the first turnover.
        if self._is_one:
            room = strand_rows
        else:
            room = np.full(2 * strands, rows, dtype=np.int64)
            room[:strands] += np.maximum(self._shift, 0)
            last = slice(strands, None) if windows % 2 == 0 else slice(strands)
            room[last] = np.maximum(room[last], strand_rows - (windows - 1) * rows - self._shift)
            if borders is not None:
                room += borders.longest  # a window begins as much earlier at most
        if room.max() > MAX_WINDOW:
            raise PlanError(
                f"A window opens {room.max()} samples in one lane, and {MAX_WINDOW} is the limit. "
                "Pass a smaller window or more lanes."
            )
        self._begin = np.cumsum(room) - room
        self._table = np.empty(int(room.sum()), dtype=np.uint32)
        self._held = np.full(len(room), -1, dtype=np.int64)
        self._are_all_held = False  # for good: every strand is one window, and is held
        self._rows, self._last_window = _scalar(rows), _scalar(windows - 1)
        self._strands = _scalar(strands)

    def shuffled(self, strand: Ints, offset: Ints) -> Ints:
        """Where in its strand the sample comes from that stands at `offset`: int64, shape (n,).

        strand, offset: int64, shape (n,), in any order.
        """
        if self._are_all_held:
            held: Ints = self._table[self._begin[strand] + offset].astype(np.int64)
            return held
        if self._is_one:
            window, start = np.zeros_like(offset), np.zeros_like(offset)
        else:
            window = offset - self._shift[strand]
            window //= self._rows
            np.maximum(window, _ZERO, out=window)
            np.minimum(window, self._last_window, out=window)
            if self._borders is not None:
                # What stands before a boundary may be of the unit behind which it has gone.
                after = np.minimum(window + _ONE, self._last_window)
                window = np.where(offset >= self._start(after, strand), after, window)
            start = self._start(window, strand)
        within = offset - start
        place = self._place(strand, window)
        index = self._table[self._begin[place] + within]
        stale = self._held[place] != window
        if np.count_nonzero(stale):
            index[stale] = self._computed(strand[stale], window[stale], within[stale])
        start += index
        return start

    def _start(self, window: Ints, strand: Ints) -> Ints:
        """Where in its strand a window begins; of the first one 0."""
        start: Ints = window * self._rows
        start += self._shift[strand]
        start *= window > _ZERO
        return start if self._borders is None else self._borders.before(strand, start)

    def _place(self, strand: Ints, window: Ints) -> Ints:
        place: Ints = strand + (window & _ONE) * self._strands
        return place

    def _computed(self, strand: Ints, window: Ints, within: Ints) -> NDArray[np.uint32]:
        """Permuted indices from windows that aren't held; a strand's last two are held from now on.

        A batch may pass through more windows of a strand. It uses those up, and they cost no more
        than the batch.
        """
        order = np.lexsort((window, strand))
        strand, window = strand[order], window[order]
        new = np.ones(len(order), dtype=np.bool_)
        new[1:] = (strand[1:] != strand[:-1]) | (window[1:] != window[:-1])
        first = np.flatnonzero(new)
        run = np.cumsum(new) - 1
        strand, window = strand[first], window[first]
        place = self._place(strand, window)
        self._held[place] = -1  # an error midway must not leave half a window
        hashes, sizes = self._describe(strand, window)
        found = np.empty(len(order), dtype=np.uint32)
        bounds = np.append(first, len(order))
        for group, permuted in _permutations(hashes, sizes):
            here, lengths = slice(bounds[group.start], bounds[group.stop]), sizes[group]
            begin = np.cumsum(lengths) - lengths
            found[order[here]] = permuted[begin[run[here] - group.start] + within[order[here]]]
            # Of several windows for one place the last stays: so numpy assigns.
            self._table[_ranges(self._begin[place[group]], lengths)] = permuted
        self._held[place] = window
        self._are_all_held = self._is_one and not self._held.any()
        return found

    def _describe(self, strand: Ints, window: Ints) -> tuple[Hashes, Ints]:
        """Hash and samples of windows."""
        is_last = window == self._last_window
        end = self._start(np.where(is_last, window, window + 1), strand)
        end[is_last] = self._strand_rows[strand[is_last]]
        return keyed_hash(*self._keys, strand, window), end - self._start(window, strand)


def _scalar(number: int) -> Ints:
    """A zero-dimensional array: numpy takes it in half of the time that Python's numbers take, and
    a small batch costs little else."""
    return np.array(number, dtype=np.int64)


def _shifts(strands: int, rows: int) -> Ints:
    """By how much the boundaries of each strand's windows are shifted: int64, shape (strands,), up
    to half of a window's rows either way.

    Strand s has the phase s·step / strands. With a step near the golden section of all strands, and
    without a common divisor, any strands in a row have phases that are spread about evenly, and all
    of them exactly so.
    """
    golden = max(1, round(strands * (math.sqrt(5) - 1) / 2))
    step = next(step for step in range(golden, 0, -1) if math.gcd(step, strands) == 1)
    phase = np.arange(strands, dtype=np.int64) * step % strands
    # phase * rows // strands without overflow for any rows.
    return phase * (rows // strands) + phase * (rows % strands) // strands - rows // 2


def _permutations(hashes: Hashes, sizes: Ints) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
    """Permutations of windows, as (slice of the windows, their permutations end to end).

    A permutation of n is range(n) sorted by the upper half of splitmix64(hash ^ i); ties keep their
    order. Windows are sorted in groups: small ones for speed, large ones alone for little memory.
    """
    ends = np.cumsum(sizes)
    at = 0
    while at < len(sizes):
        room = int(ends[at] - sizes[at]) + _GROUP
        until = max(at + 1, int(np.searchsorted(ends, room, side="right")))
        group = slice(at, until)
        if until == at + 1:
            yield group, _sorted_alone(hashes[at : at + 1], int(sizes[at]))
        else:
            yield group, _sorted_together(hashes[group], sizes[group])
        at = until


def _sorted_alone(window_hash: Hashes, size: int) -> NDArray[np.uint64]:
    index = np.arange(size, dtype=np.uint64)
    # Hash and index share one key: sorting in place is 3 times as fast as argsort, and stable.
    keys = splitmix64(index ^ window_hash)
    keys &= _HIGH
    keys |= index
    keys.sort()
    keys &= _LOW
    return keys


def _sorted_together(hashes: Hashes, sizes: Ints) -> NDArray[np.uint64]:
    window = np.repeat(np.arange(len(sizes), dtype=np.uint64), sizes)
    begin = (np.cumsum(sizes) - sizes).astype(np.uint64)
    index = np.arange(len(window), dtype=np.uint64) - np.repeat(begin, sizes)
    keys = splitmix64(index ^ np.repeat(hashes, sizes))
    keys &= _HIGH
    keys >>= np.uint64(16)
    keys |= window << np.uint64(48)
    keys |= index
    keys.sort()
    keys &= np.uint64(_GROUP - 1)
    return keys


def _ranges(starts: Ints, sizes: Ints) -> slice | Ints:
    """Indices of ranges end to end; a slice where there is one, which spares 8 bytes a sample."""
    if len(starts) == 1:
        return slice(int(starts[0]), int(starts[0] + sizes[0]))
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
