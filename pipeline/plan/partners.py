"""Who is mixed with whom: MixUp's and CutMix's partners, neighbours in the plan's own order. Pure.

The samples of a global batch stand by (lane, offset), as the plan numbers lanes and wherever those
are read. Within a lane the first and the second are each other's partners, the third and the
fourth, and so on; the last of an odd number takes the one before it. So a partner is always a
neighbour: a rank that has whole lanes reads nothing for it, any other at most two samples. And as
neighbours in a lane come from different strands they don't share a shard, so that on data that is
sorted by class partners are of one class no more often than by chance.

A batch with fewer than two samples for some lane (the last one of an epoch, or as many lanes as
samples) pairs what is alone with the neighbouring lane's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

PARTNERS_ELSEWHERE = 2
"""Samples of other ranks that a rank reads as partners, at most, in the plan's own order of lanes
and wherever each of its lanes has two samples of a batch or more."""


def most_elsewhere(batch: int, *, lanes: int, ranks: int) -> int:
    """Samples of other ranks that a rank reads as partners, at most, beyond the room that a batch
    shorter than usual leaves, where lanes have any order: a lane's only sample has its partner in
    a lane that may be anybody's.

    batch: samples of the usual global batch. Of a batch of under two samples a lane the rest makes
    less than half of the usual one, if that has four.
    """
    return PARTNERS_ELSEWHERE if batch >= 4 * lanes else max(PARTNERS_ELSEWHERE, -(-batch // ranks))


def partners(slots: Ints, *, position: int, size: int, lanes: int) -> Ints:
    """Partners' slots of these slots of the global batch [position, position + size).

    Slots count the batch's samples as they stand by (lane, offset). int64, shape (slots,).
    """
    each, more = divmod(size, lanes)
    # Lanes [first, first + more), modulo lanes, have one sample more than the others.
    first = position % lanes
    lane = np.arange(lanes + 1)
    begin = lane * each + _longer_before(lane, first, more, lanes)
    of = np.searchsorted(begin, slots, side="right") - 1
    low, high = begin[of], begin[of + 1]
    alone = high - low == 1
    low, high = np.where(alone, 0, low), np.where(alone, size, high)
    other = low + ((slots - low) ^ 1)
    return np.where(other < high, other, np.maximum(slots - 1, 0))


def with_partners(
    low: int, high: int, *, position: int, size: int, lanes: int, own_slots: Ints | None = None
) -> tuple[Ints, Ints]:
    """What a rank with the slots [low, high) of the global batch [position, position + size) reads.

    own_slots: what the batch's slots are in the plan's own order, int64, shape (size,); None: they
    are as they stand. Returns the slots, its own first and then a few more (`most_elsewhere`), and
    for each of its own the place of the partner among them.
    """
    own = np.arange(low, high)
    if own_slots is None:
        wanted = partners(own, position=position, size=size, lanes=lanes)
    else:
        stands = np.empty(size, dtype=np.int64)
        stands[own_slots] = np.arange(size)
        wanted = stands[partners(own_slots[low:high], position=position, size=size, lanes=lanes)]
    outside = (wanted < low) | (wanted >= high)
    more = np.unique(wanted[outside])
    place = np.where(outside, len(own) + np.searchsorted(more, wanted), wanted - low)
    return np.concatenate([own, more]), place


def _longer_before(lane: Ints, first: int, more: int, lanes: int) -> Ints:
    """How many of the `more` longer lanes from `first` on, a circular range, come before a lane."""
    behind = np.clip(lane - first, 0, more)
    wrapped = max(0, first + more - lanes)
    return behind + np.minimum(lane, wrapped)
