"""Divide the slots of a mixture's global batches among its parts. Pure.

A rank has neighbouring slots, so each part should be spread evenly over any range of slots, in each
batch and over many of them. Therefore sample j of a part's own stream aims at the slot at the
fraction (j·φ + phase) mod 1 of its batch, where φ is the golden ratio: any consecutive samples of
the part, over any number of batches, are then spread evenly, to within about two samples for each
rank at any number of ranks. (With equal distances in each batch, and another phase in each, some
ranks got a third more of a rare part than others after 64 batches: where a rank's slots begin
among its samples varies with the samples of all other parts.)

The parts with the fewest samples of a batch choose first, in rounds that fill about a sixth of the
slots that are left, so that few samples find their slot taken; those get the next free one. The
part with the most samples gets the slots that remain.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan.lanes import Ints

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # φ mod 1, in steps of 2^-64
_PHASE = np.uint64(0xC13FA9A902A6328F)  # from each part to the next: 1 / the plastic number
_HALF = np.uint64(32)  # bits

_FULL_BITS = 20
_ROUNDS = 2**_FULL_BITS - np.array(
    list(accumulate(repeat(6, 64), lambda left, n: left * (n - 1) // n, initial=2**_FULL_BITS))
)
"""The share of a batch's slots that is taken before each round, in steps of 2^-20."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotGroups:
    """The samples of each part in each of some batches, a group for each part and batch.

    part, batch: of each group, int64, shape (groups,). count: its samples, at least 1. before:
    earlier samples of the part in the job's stream. sizes: slots of each batch, int64, shape
    (batches,): the sums of its groups' counts.
    """

    part: Ints
    batch: Ints
    count: Ints
    before: Ints
    sizes: Ints

    def slots(self) -> Ints:
        """Return the slots of the groups' samples, numbered over the batches end to end: int64,
        shape (slots,), group after group, ascending in each."""
        base, filled = np.cumsum(self.sizes) - self.sizes, self.sizes[self.sizes > 0]
        bits = int(self.count.max(initial=1)).bit_length()
        order = ((self.batch << bits) + self.count).argsort(kind="stable")
        batch, count = self.batch[order], self.count[order]
        is_last = np.ones(len(order), np.bool_)
        is_last[:-1] = batch[1:] != batch[:-1]
        taken = np.cumsum(count) - count - base[batch]
        turn = np.searchsorted(_ROUNDS, (taken << _FULL_BITS) // self.sizes[batch], side="right")
        turn[is_last] = 0
        owner = np.repeat(_small(order)[is_last], filled)
        free: Ints | None = None
        is_free = np.ones(len(owner), np.bool_)
        turns = np.flatnonzero(np.bincount(turn)[1:]) + 1
        for each in turns.tolist():
            slots, group = self._chosen(order[turn == each], base, free, is_free)
            owner[slots] = group
            if each != turns[-1]:
                is_free[slots] = False
                free = np.flatnonzero(is_free)
        return owner.argsort(kind="stable")

    def _chosen(
        self, groups: Ints, base: Ints, free: Ints | None, is_free: NDArray[np.bool_]
    ) -> tuple[Ints, Ints]:
        """Return the slots that the samples of some groups choose, and the group of each. free: the
        numbers of the free slots; None if all are."""
        count, batch = self.count[groups], self.batch[groups]
        first = self.before[groups] - (np.cumsum(count) - count)
        begin = first.view(np.uint64) * _GOLDEN + self.part[groups].view(np.uint64) * _PHASE
        aim = np.arange(int(count.sum()), dtype=np.uint64) * _GOLDEN
        aim += np.repeat(begin, count)
        aim >>= _HALF
        aim *= np.repeat(self.sizes[batch].view(np.uint64), count)
        aim >>= _HALF
        # Sorted with the number of their group among the lower bits.
        bits = len(groups).bit_length()
        number = np.repeat((base[batch] << bits) + np.arange(len(groups)), count)
        number += (aim << np.uint64(bits)).view(np.int64)
        number.sort()
        slot, group = number >> bits, groups[number & ((1 << bits) - 1)]
        own = np.bincount(batch, count, len(base)).astype(np.int64)
        ends = np.cumsum(own)
        room, first_free = self.sizes, base
        if free is not None:
            before = np.append(0, np.cumsum(is_free))
            slot, first_free = before[slot], before[base]
            room = np.diff(np.append(first_free, before[-1]))
        # A sample gets the next free slot after that of the one before it, around the batch.
        turns = (ends - own) - first_free + np.arange(len(base)) * (2 * len(is_free))
        turns = np.repeat(turns, own)
        index = np.arange(len(slot))
        index -= turns
        slot -= index
        slot = np.maximum.accumulate(slot)
        most = slot[np.maximum(ends - 1, 0)] - (room - own)
        slot = np.maximum(slot, np.repeat(most, own))
        slot += index
        after = np.repeat(first_free + room, own)
        slot -= np.where(slot >= after, np.repeat(room, own), 0)
        return slot if free is None else free[slot], group


def sorted_by(keys: Ints) -> Ints:
    """Return the places of small integers of 0 or more in their stable order, int64, shape (n,)."""
    return _small(keys).argsort(kind="stable")


def _small(keys: Ints) -> NDArray[Any]:
    """Return integers of 0 or more in a small type: sorts of 8 or 16 bits take a tenth of the
    time."""
    most = int(keys.max(initial=0))
    return keys.astype(np.uint8 if most < 2**8 else np.uint16 if most < 2**16 else np.int64)
