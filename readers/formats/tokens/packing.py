"""Packing: whole pieces of documents put together to sequences of one length.

First-fit decreasing: the longest piece first, each into the first sequence that has room for it
(D. S. Johnson, Near-optimal bin packing algorithms, 1973). Pieces of one length are taken together:
a run is how many neighbouring sequences have the same room, so that a shard of any number of pieces
takes as many steps as there are lengths.

The result follows from the lengths alone: no seed, no epoch, no world. So packed sequences are rows
like others: whoever asks for a row gets the same tokens, and an epoch has as many each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.readers.formats.tokens.cutting import ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Which pieces make up which sequence. pieces: their numbers, sequence by sequence, int64,
    shape (pieces,); bounds: where each sequence's begin, and the end, int64, shape (n + 1,)."""

    pieces: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1


def pack(lengths: Ints, *, room: int) -> Packing:
    """Pack pieces into sequences of `room` tokens. lengths: of each, 1 to room, shape (pieces,).

    Sequences stand in the order of their first pieces, and pieces of a sequence in the order of a
    hash of their numbers, as that of their lengths would teach a model what comes last.
    """
    if not len(lengths):
        return Packing(np.empty(0, np.int64), np.zeros(1, np.int64))
    hashes = _hashes(len(lengths))
    # The longest first; of one length by the hash, so that neighbours part.
    order = np.lexsort((hashes, -lengths))
    bins = np.empty(len(lengths), np.int64)
    bins[order] = _first_fit(lengths[order], room)
    # A sequence's number follows its first piece, not when it was opened.
    first = np.full(int(bins.max()) + 1, len(lengths), np.int64)
    np.minimum.at(first, bins, np.arange(len(lengths)))
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    bins = number[bins]
    counts = np.bincount(bins, minlength=len(first))
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return Packing(np.lexsort((hashes, bins)), bounds)


def _first_fit(lengths: Ints, room: int) -> Ints:
    """The bin of each piece, by first fit. lengths: descending."""
    borders = np.flatnonzero(np.diff(lengths)) + 1
    begins = np.concatenate(([0], borders))
    ends = np.concatenate((borders, [len(lengths)]))
    runs = _Runs()
    found = [
        runs.put(int(length), int(count), room)
        for length, count in zip(lengths[begins].tolist(), (ends - begins).tolist(), strict=True)
    ]
    return np.concatenate(found)


class _Runs:
    """Bins in the order in which they were opened, as runs of the same room left."""

    def __init__(self) -> None:
        self._firsts = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._rooms = np.empty(0, np.int64)
        self._opened = 0

    def put(self, length: int, count: int, room: int) -> Ints:
        """The bins of so many pieces of one length, int64, shape (count,)."""
        each = self._rooms // length
        sums = np.cumsum(each * self._counts)
        here = int(np.searchsorted(sums, count))  # the run that takes the last piece
        if here == len(sums):
            more = count - (int(sums[-1]) if len(sums) else 0)
            self._open(-(-more // (room // length)), room)
            each = np.append(each, room // length)
        used = np.flatnonzero(each[: here + 1])
        bins = ranges(self._firsts[used], self._counts[used])
        taken = np.repeat(bins, np.repeat(each[used], self._counts[used]))[:count]
        full, last = int(taken[-1]) if count else 0, here
        in_last = count - int(np.searchsorted(taken, full))
        self._rooms[: last + 1] -= each[: last + 1] * length
        self._split(last, full, each=int(each[last]), in_last=in_last, length=length)
        if len(self._rooms) > 64:  # what has no room for the shortest is never asked again
            kept = self._rooms > 0
            if not kept.all():
                self._firsts, self._counts = self._firsts[kept], self._counts[kept]
                self._rooms = self._rooms[kept]
        return taken

    def _open(self, count: int, room: int) -> None:
        self._firsts = np.append(self._firsts, self._opened)
        self._counts = np.append(self._counts, count)
        self._rooms = np.append(self._rooms, room)
        self._opened += count

    def _split(self, run: int, full: int, *, each: int, in_last: int, length: int) -> None:
        """Give back what the last run's bins behind bin `full` have not got, nor that one all."""
        first, count, left = (int(c[run]) for c in (self._firsts, self._counts, self._rooms))
        parts = [(first, full - first, left), (full, 1, left + (each - in_last) * length)]
        parts.append((full + 1, first + count - full - 1, left + each * length))
        parts = [part for part in parts if part[1]]
        for name, place in (("_firsts", 0), ("_counts", 1), ("_rooms", 2)):
            old, new = getattr(self, name), [part[place] for part in parts]
            setattr(self, name, np.concatenate((old[:run], new, old[run + 1 :])).astype(np.int64))


def _hashes(count: int) -> NDArray[np.uint64]:
    """A number for each piece that looks random: splitmix64 (Steele, Lea, Flood, Fast splittable
    pseudorandom number generators, 2014) of its own."""
    with np.errstate(over="ignore"):
        x = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
