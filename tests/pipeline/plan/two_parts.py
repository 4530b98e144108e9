"""A plan of two parts, like that of a mixture of datasets, which shows that the interface fits."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PlanError
from penstock.pipeline.plan import SlotSamples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan import Plan

    Ints = NDArray[np.int64]


class TwoParts:
    """Mixes two plans by whole-number weights; an epoch of the stream is `samples` positions.

    Of the first p positions of the job's stream p·w // W are the second part's, so that any stretch
    has the shares but for one sample; each part is read on and on, through epochs of its own. The
    slots of a batch take the parts in turn, by the same rule.
    """

    def __init__(self, parts: tuple[Plan, Plan], weights: tuple[int, int], *, samples: int) -> None:
        self.parts, self.weights, self.samples = parts, weights, samples
        self.sizes = np.concatenate([part.sizes for part in parts])
        self.first_shard = (0, len(parts[0].sizes))
        self.lanes, self.window = parts[0].lanes, parts[0].window
        self.bins = 1

    @property
    def open_shards(self) -> float:
        return sum(part.open_shards for part in self.parts)

    @property
    def fingerprint(self) -> str:
        said = (*(part.fingerprint for part in self.parts), self.weights, self.samples)
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def before(self, place: int) -> tuple[int, int]:
        """Samples of each part among the first so many of the job's stream."""
        second = place * self.weights[1] // sum(self.weights)
        return place - second, second

    def own_slots(self, epoch: int, position: int, size: int) -> Ints | None:
        del epoch, position, size
        return None

    def places(self, epoch: int, position: int, size: int, *, low: int, high: int) -> SlotSamples:
        count = min(size, self.samples - position)
        if not 0 <= low <= high <= count:
            raise PlanError(f"slots [{low}, {high}): wanted some within [0, {count}).")
        place = epoch * self.samples + position
        begin, end = self.before(place), self.before(place + count)
        slots = np.arange(low, high + 1)
        second = slots * (end[1] - begin[1]) // max(count, 1)
        is_second = np.diff(second) > 0
        rows, epochs = np.empty((high - low, 2), np.int64), np.empty(high - low, np.int64)
        for part, turns in enumerate((slots - second, second)):
            mine = is_second == bool(part)
            drawn = self._part(part, begin[part], end[part], int(turns[0]), int(turns[-1]))
            rows[mine], epochs[mine] = drawn
        return SlotSamples(rows=rows, epochs=epochs)

    def _part(self, part: int, begin: int, end: int, low: int, high: int) -> tuple[Ints, Ints]:
        """Slots [low, high) of a part's own stretch, which may reach over its epochs."""
        plan, rows, epochs, done = self.parts[part], [], [], 0
        while begin < end:
            epoch, position = divmod(begin, plan.samples)
            size = min(end - begin, plan.samples - position)
            inner = (min(max(low - done, 0), size), min(max(high - done, 0), size))
            found = plan.places(epoch, position, size, low=inner[0], high=inner[1]).rows
            rows.append(found + np.array([self.first_shard[part], 0]))
            epochs.append(np.full(len(found), epoch))
            begin, done = begin + size, done + size
        return (
            np.concatenate([*rows, np.empty((0, 2), np.int64)]),
            np.concatenate([*epochs, np.empty(0, np.int64)]),
        )

    def shards(self, global_batch: int, *, first: int, end: int, world: int) -> Ints:
        del global_batch, first, end, world  # a part's batches differ by a sample
        return np.flatnonzero(self.sizes)
