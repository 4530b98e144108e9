"""Shuffling inside windows: a lane's samples change places only with S neighbours. Pure but cached.

A lane's window decides how many shards are open at once, and it turns over as a whole. Were all
lanes to turn over together, the demand for new shards would come in bursts of 11 times the
consumption; so lane l's boundaries lie l/L of a window earlier. The order in a window is that of
keyed hashes, so any window can be computed alone; two windows a lane are kept, as a walk needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cache.hashing import keyed_hash, splitmix64

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Hashes = NDArray[np.uint64]
    Ints = NDArray[np.int64]

MAX_WINDOW = 2**32  # samples: an index within a window has 32 bits, beside 32 of its hash

_HIGH, _LOW = np.uint64(0xFFFFFFFF00000000), np.uint64(0xFFFFFFFF)
_GROUP = 2**16  # samples that are sorted together: 16 bits of window, 32 of hash, 16 of index


def spans(lane_rows: Ints, lane_pieces: Ints, *, window: int) -> Ints:
    """Samples of each lane's full window: `window` mean pieces of that lane, rounded, at least 1.

    lane_rows, lane_pieces: int64, shape (lanes,). A window of all pieces or more is the whole lane.
    """
    pieces = np.maximum(lane_pieces, 1)
    wide = np.minimum(pieces, min(window, np.iinfo(np.int64).max))
    # In floats the product can't overflow, and 53 bits are more than a window's 32.
    return np.maximum(1, np.rint(wide * (lane_rows / pieces))).astype(np.int64)


class Windows:
    """The windows of one epoch's lanes, and the permutations of those in use.

    keys: what the permutations depend on, beside lane and window number.
    lane_rows, span: samples of each lane and of its full window, int64, shape (lanes,).
    Not thread-safe: the owner locks.
    """

    def __init__(self, *, keys: tuple[int, ...], lane_rows: Ints, span: Ints) -> None:
        lanes = len(span)
        self._keys = keys
        self._lane_rows = lane_rows
        self._span = span
        # l * span // lanes without overflow for any span.
        number = np.arange(lanes, dtype=np.int64)
        self._shift = number * (span // lanes) + number * (span % lanes) // lanes
        # A lane has a place for even and one for odd windows. The even ones lie together, so that
        # the odd half takes no memory (not even of a huge page) before the first turnover.
        begin = np.cumsum(span) - span
        self._place = np.concatenate([begin, begin + int(span.sum())])
        self._table = np.empty(int(2 * span.sum()), dtype=np.uint32)
        self._held = np.full(2 * lanes, -1, dtype=np.int64)

    def shuffled(self, lane: Ints, offset: Ints) -> Ints:
        """Where in its lane the sample comes from that stands at `offset`: int64, shape (n,).

        lane, offset: int64, shape (n,), sorted by (lane, offset), each lane's offsets without gaps.
        """
        span, shift = self._span[lane], self._shift[lane]
        window = (offset + shift) // span
        start: Ints = np.maximum(window * span - shift, 0)
        slot = self._slot(lane, window)
        within = offset - start
        index = self._place[slot] + within
        stale = self._held[slot] != window
        if stale.any():
            runs = _Runs(lane, window)
            self._fill(runs, stale)
            start += self._look_up(runs, index, within)
        else:
            start += self._table[index]
        return start

    def _fill(self, runs: _Runs, stale: NDArray[np.bool_]) -> None:
        """Compute the missing windows of those lanes that need no more than two."""
        chosen = np.flatnonzero(stale[runs.first] & ~runs.crowded)
        lane, window = runs.lane[chosen], runs.window[chosen]
        slot = self._slot(lane, window)
        hashes, sizes = self._describe(lane, window)
        self._held[slot] = -1  # an error midway must not leave half a window
        for group, order in _permutations(hashes, sizes):
            self._table[_ranges(self._place[slot[group]], sizes[group])] = order
        self._held[slot] = window

    def _slot(self, lane: Ints, window: Ints) -> Ints:
        slot: Ints = lane + (window & 1) * len(self._span)
        return slot

    def _look_up(self, runs: _Runs, index: Ints, within: Ints) -> Ints:
        """The batch's permuted indices; windows of crowded lanes are computed for it alone.

        A lane that passes through three windows uses up the middle ones, so that costs O(batch).
        """
        crowded = runs.crowded[runs.of]
        found = np.empty(len(index), dtype=np.int64)
        found[~crowded] = self._table[index[~crowded]]
        if crowded.any():
            hashes, sizes = self._describe(runs.lane[runs.crowded], runs.window[runs.crowded])
            orders = np.concatenate([order for _, order in _permutations(hashes, sizes)])
            begin = np.zeros(len(runs.lane), dtype=np.int64)
            begin[runs.crowded] = np.cumsum(sizes) - sizes
            found[crowded] = orders[begin[runs.of[crowded]] + within[crowded]]
        return found

    def _describe(self, lane: Ints, window: Ints) -> tuple[Hashes, Ints]:
        """Hash and samples of windows; a lane's first one may be shorter, and its last one."""
        span, shift = self._span[lane], self._shift[lane]
        start = np.maximum(window * span - shift, 0)
        end = np.minimum((window + 1) * span - shift, self._lane_rows[lane])
        return keyed_hash(*self._keys, lane, window), end - start


class _Runs:
    """The windows that a batch touches: runs of equal (lane, window).

    first: index of each run's first sample. of: each sample's run. crowded: whether the run's lane
    has more than two runs, so that the table can't hold them all.
    """

    def __init__(self, lane: Ints, window: Ints) -> None:
        change = np.empty(len(lane), dtype=np.bool_)
        change[0] = True
        np.logical_or(lane[1:] != lane[:-1], window[1:] != window[:-1], out=change[1:])
        self.first = np.flatnonzero(change)
        self.of = np.cumsum(change) - 1
        self.lane, self.window = lane[self.first], window[self.first]
        _, inverse, counts = np.unique(self.lane, return_inverse=True, return_counts=True)
        self.crowded = counts[inverse] > 2


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
