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
"""Samples of other ranks that a rank reads as partners, at most."""


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
    low: int, high: int, *, position: int, size: int, lanes: int
) -> tuple[Ints, Ints]:
    """What a rank with the slots [low, high) of the global batch [position, position + size) reads.

    Returns the slots, its own first and then at most two more, and for each of its own the place of
    the partner among them.
    """
    own = np.arange(low, high)
    wanted = partners(own, position=position, size=size, lanes=lanes)
    outside = (wanted < low) | (wanted >= high)
    more = np.unique(wanted[outside])
    place = np.where(outside, len(own) + np.searchsorted(more, wanted), wanted - low)
    return np.concatenate([own, more]), place


def _longer_before(lane: Ints, first: int, more: int, lanes: int) -> Ints:
    """How many of the `more` longer lanes from `first` on, a circular range, come before a lane."""
    behind = np.clip(lane - first, 0, more)
    wrapped = max(0, first + more - lanes)
    return behind + np.minimum(lane, wrapped)
