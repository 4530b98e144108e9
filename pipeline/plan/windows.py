"""Shuffle samples inside windows: samples of a strand change places with nearby ones only. Pure.

The window size decides how many shards are open at once. At the end of a window all of its shards
are replaced. If the windows of all strands ended together, the demand for new shards would come in
bursts of 12 times the consumption. So the inner boundaries are shifted by up to half a window:
evenly over all strands and, as a node reads consecutive strands, nearly evenly over those of a
node. The ends of a strand aren't shifted: its first and last windows are 0.5 to 1.5 times as long
as the others, and a strand of one window isn't cut.

A shard may consist of several decode units. Lanes consist of shards, so a node caches complete
shards; inside a lane units are permuted, and windows mix them. A boundary that would cut a unit
moves to its begin: so no unit is in two windows, and each is decoded once and released.

The order within a window is that of keyed hashes, so any window can be computed on its own. Two
windows per strand are cached, as a walk needs.
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

    from penstock.pipeline.plan.lanes import Hashes, Ints, LaneLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeUnits:
    """The decode units of all shards, in order.

    rows: rows of each unit, at least 1. shard: its shard. first_row: its first row in that shard.
    All int64, shape (units,). first: number of units before each shard, then the number of all
    units, int64, shape (shards + 1,).
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
        """Return the indices of these shards' units, shard by shard, int64, shape (n,)."""
        begin, counts = self.first[shards], self.first[shards + 1] - self.first[shards]
        before = np.cumsum(counts) - counts
        return np.repeat(begin - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def units_of(sizes: Ints, given: Sequence[ArrayLike] | None) -> DecodeUnits | None:
    """Check a plan's `units` and return them; None if each shard is one unit.

    given: for each shard the rows of its units, in order, or one number if all units have equally
    many, except for a shorter last one. Raises PlanError for units that don't add up to their
    shards.
    """
    if given is None:
        return None
    if len(given) != len(sizes):
        raise PlanError(
            f"units: got those of {len(given)} shards, wanted a list of rows for each of the "
            f"{len(sizes)} shards."
        )
    each = [_rows(n, units, size) for n, (units, size) in enumerate(zip(given, sizes, strict=True))]
    counts = np.array([len(units) for units in each], np.int64)
    if (counts <= 1).all():
        return None
    rows, shard = np.concatenate(each), np.repeat(np.arange(len(sizes)), counts)
    first_row = np.cumsum(rows) - rows - (np.cumsum(sizes) - sizes)[shard]
    first = np.append(0, np.cumsum(counts))
    return DecodeUnits(rows=rows, shard=shard, first_row=first_row, first=first)


def _rows(shard: int, given: ArrayLike, size: int) -> Ints:
    units: NDArray[Any] = np.asarray(given)
    if units.ndim > 1 or (units.size and (units.dtype.kind not in "iu" or units.min() < 1)):
        raise PlanError(
            f"units: got {given!r:.80} for shard {shard}, wanted the rows of its units: whole "
            "numbers of at least 1."
        )
    if not units.ndim:
        units = np.diff([*range(0, int(size), int(units)), size])
    if (rows := int(units.sum())) != size:
        raise PlanError(
            f"units: those of shard {shard} have {rows} rows, and the shard has {size}. The rows "
            "of a shard's units must add up to its own."
        )
    return units.astype(np.int64)


MAX_WINDOW = 2**32  # samples: a sort key has 32 bits for the index and 32 for the hash

_HIGH = np.uint64(0xFFFFFFFF00000000)
_GROUP = 2**16  # samples that are sorted together: 16 bits of window, 32 of hash, 16 of index


def window_count(shortest: int, rows: int) -> int:
    """Return the number of windows of every strand: as many of `rows` rows as the shortest strand
    has."""
    return max(1, shortest // rows)


_ZERO, _ONE = np.array(0, dtype=np.int64), np.array(1, dtype=np.int64)  # as `_scalar`


class EpochWindows:
    """The permutation of samples within the windows of one epoch's strands, and a cache of the
    windows in use.

    keys: hash keys of the permutations, besides strand and window number.
    strand_rows: samples of each strand, int64, shape (strands,); they differ by at most one.
    rows: minimum samples of a window; the rest of a strand widens its windows. units: the layout,
    no piece of which a window may cut, and the rows of its longest unit, which aren't more than
    those of a window; None: windows may end at any row.
    Raises PlanError for windows of more than 2^32 samples. Not thread-safe: the owner locks.
    """

    def __init__(
        self,
        *,
        keys: tuple[int, ...],
        strand_rows: Ints,
        rows: int,
        units: tuple[LaneLayout, int] | None = None,
    ) -> None:
        self._keys, self._strand_rows = keys, strand_rows
        layout, longest = units or (None, 0)
        self._layout: LaneLayout | None = layout
        strands, shortest = len(strand_rows), int(strand_rows.min())
        windows = window_count(shortest, rows)
        rows = max(1, shortest // windows)
        self._shift = _shifts(strands, rows)
        self._is_one = windows == 1
        # A strand has one part of the table for even and one for odd windows, each as long as its
        # longest window of that kind. The even ones are adjacent, so that the odd half takes no
        # memory (not even of a huge page) until the first window ends.
        length = strand_rows
        if not self._is_one:
            length = np.full(2 * strands, rows, dtype=np.int64)
            length[:strands] += np.maximum(self._shift, 0)
            last = slice(strands, None) if windows % 2 == 0 else slice(strands)
            rest = strand_rows - (windows - 1) * rows - self._shift
            length[last] = np.maximum(length[last], rest)
            length += longest  # a boundary moves by less than one unit
        if length.max() > MAX_WINDOW:
            raise PlanError(
                f"A window opens {length.max()} samples in one lane, and {MAX_WINDOW} is the "
                "limit. Pass a smaller window or more lanes."
            )
        self._begin = np.cumsum(length) - length
        # Windows of up to 2^16 samples take two bytes a sample: with thousands of parts of a
        # mixture, of which each has a window, that is most of the memory of a plan.
        kind = np.uint16 if length.max() <= 2**16 else np.uint32
        self._table: NDArray[Any] = np.empty(int(length.sum()), dtype=kind)
        self._held = np.full(len(length), -1, dtype=np.int64)
        self._are_all_held = False  # every strand is one window, and all are computed
        self._rows, self._last_window = _scalar(rows), _scalar(windows - 1)
        self._strands = _scalar(strands)

    def shuffled(self, strand: Ints, offset: Ints) -> Ints:
        """Return the unshuffled offset of the sample at `offset` of a strand, int64, shape (n,).

        strand, offset: int64, shape (n,), in any order.
        """
        if self._are_all_held:
            return self._table.take(self._begin[strand] + offset).astype(np.int64)
        if self._is_one:
            window, start = np.zeros_like(offset), np.zeros_like(offset)
        else:
            window = offset - self._shift[strand]
            window //= self._rows
            np.maximum(window, _ZERO, out=window)
            np.minimum(window, self._last_window, out=window)
            if self._layout is not None:
                # The next window may begin up to one unit before its unmoved boundary.
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
        """Return the offset in its strand at which a window begins; 0 for the first one."""
        start = window * self._rows
        start += self._shift[strand]
        start *= window > _ZERO
        return start if self._layout is None else self._layout.piece_start(strand, start)

    def _place(self, strand: Ints, window: Ints) -> Ints:
        return strand + (window & _ONE) * self._strands

    def _computed(self, strand: Ints, window: Ints, within: Ints) -> NDArray[Any]:
        """Return permuted indices from windows that aren't cached; cache a strand's last two.

        A batch that spans more than two windows of a strand uses all of the others: computing these
        costs no more than the batch.
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
        found = np.empty(len(order), dtype=self._table.dtype)
        bounds = np.append(first, len(order))
        for group, permuted in _permutations(hashes, sizes):
            part, lengths = slice(bounds[group.start], bounds[group.stop]), sizes[group]
            begin = np.cumsum(lengths) - lengths
            found[order[part]] = permuted[begin[run[part] - group.start] + within[order[part]]]
            # If several windows have one place in the table, numpy keeps the last.
            self._table[_ranges(self._begin[place[group]], lengths)] = permuted
        self._held[place] = window
        self._are_all_held = self._is_one and not self._held.any()
        return found

    def _describe(self, strand: Ints, window: Ints) -> tuple[Hashes, Ints]:
        """Return the hashes and the numbers of samples of windows."""
        is_last = window == self._last_window
        end = self._start(np.where(is_last, window, window + 1), strand)
        end[is_last] = self._strand_rows[strand[is_last]]
        return keyed_hash(*self._keys, strand, window), end - self._start(window, strand)


def _scalar(number: int) -> Ints:
    """Return a zero-dimensional array: numpy processes it in half the time of a Python number,
    which matters for small batches."""
    return np.array(number, dtype=np.int64)


def _shifts(strands: int, rows: int) -> Ints:
    """Return the shift of each strand's window boundaries in rows, int64, shape (strands,): at most
    half a window in each direction.

    Strand s has the phase s·step / strands. The step is near the golden section of the number of
    strands and has no common divisor with it: so the phases of all strands are spread evenly, and
    those of any consecutive strands nearly so.
    """
    golden = max(1, round(strands * (math.sqrt(5) - 1) / 2))
    step = next(step for step in range(golden, 0, -1) if math.gcd(step, strands) == 1)
    phase = np.arange(strands, dtype=np.int64) * step % strands
    # phase * rows // strands without overflow for any rows.
    return phase * (rows // strands) + phase * (rows % strands) // strands - rows // 2


def _permutations(hashes: Hashes, sizes: Ints) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield the permutations of windows, as (slice of the windows, concatenated permutations).

    A permutation of n is range(n) sorted by the upper half of splitmix64(hash ^ i); ties keep their
    order. Small windows are sorted together for speed, large ones one by one to save memory.
    """
    ends = np.cumsum(sizes)
    at = 0
    while at < len(sizes):
        limit = int(ends[at] - sizes[at]) + _GROUP
        until = max(at + 1, int(np.searchsorted(ends, limit, side="right")))
        group = slice(at, until)
        sort = _sorted_one if until == at + 1 else _sorted_together
        yield group, sort(hashes[group], sizes[group])
        at = until


def _sorted_one(window_hash: Hashes, size: Ints) -> NDArray[Any]:
    """Return the permutation of one window, whose hash and size have shape (1,)."""
    hashes = splitmix64(np.arange(size[0], dtype=np.uint64) ^ window_hash)
    # Stable sorts of 16 bits are radix sorts: two take half the time of one sort of 64 bits.
    low, high = ((hashes >> np.uint64(shift)).astype(np.uint16) for shift in (32, 48))
    order = low.argsort(kind="stable")
    return order.take(high[order].argsort(kind="stable"))


def _sorted_together(hashes: Hashes, sizes: Ints) -> NDArray[Any]:
    """Return the concatenated permutations of windows with at most `_GROUP` samples in total."""
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
    """Return the concatenated indices of ranges; a slice for one range, to save memory."""
    if len(starts) == 1:
        return slice(int(starts[0]), int(starts[0] + sizes[0]))
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
