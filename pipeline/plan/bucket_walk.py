"""The steps of a job whose batches are cut by tokens, and their numbers. Pure.

How many batches a pool has follows from the lengths of its samples, so a step's number has no
closed form: it is counted from a step whose number is known, pool by pool. Pools that the job went
through are counted by the way; others cost what their samples' lengths cost (0.5 us a sample), up
to a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import PlanError
from penstock.pipeline.plan.buckets import MOST_COUNTED, too_far
from penstock.pipeline.plan.steps import Cursor, Walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan.buckets import Buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketWalk(Walk):
    """How an epoch is cut into global batches by tokens. schedule: of one size, a usual one's."""

    buckets: Buckets

    def step_size(self, at: Cursor) -> int:
        """Samples of the step that begins at a cursor: to the end of the batch that it lies in."""
        if at.position >= self.samples:
            return 0
        pool = self.buckets.pool(at.epoch, at.position)
        within = at.position - pool.start
        return int(pool.ends[np.searchsorted(pool.ends, within, side="right")]) - within

    def left(self, cursor: Cursor, *, most: int | None = None) -> int:
        """Steps from a cursor to the end of its epoch; most: who asks needs no more."""
        count, at = 0, cursor
        while at.position < self.samples and (most is None or count < most):
            pool = self.buckets.pool(at.epoch, at.position)
            count += int((pool.ends > at.position - pool.start).sum())
            at = Cursor(at.epoch, pool.start + len(pool.rows))
        return count if most is None else min(count, most)

    # -- numbers

    def step_number(self, cursor: Cursor) -> int:
        """The number of the first step that begins at or behind a cursor.

        Raises PlanError where too many samples' lengths lie between it and what is known.
        """
        place, number = self.buckets.known
        if cursor < place:
            return number - self._between(cursor, place)
        return number + self._between(place, cursor)

    def cursor_of(self, step: int) -> Cursor:
        """Where a step begins, by its number. Raises PlanError for a negative one, and for one that
        is too far from what is known."""
        if step < 0:
            raise PlanError(f"step: got {step:,}, wanted 0 or more.")
        buckets = self.buckets
        place, number = buckets.known
        epoch, pool, looked = place.epoch, buckets.number(place.position), 0
        # Steps from the pool's first one on.
        wanted = step - number + self._in_pool(epoch, place.position)
        while wanted < 0:
            if pool == 0:
                epoch, pool = epoch - 1, buckets.pools
                if epoch < 0:
                    raise PlanError(f"step: got {step:,}, which no epoch of this job has.")
                if (total := buckets.total(epoch)) is not None and wanted + total < 0:
                    wanted, pool = wanted + total, 0
                    continue
            pool -= 1
            count, more = buckets.count(epoch, pool, pool + 1)
            wanted, looked = wanted + count, _added(looked, more)
        while True:
            if pool == 0 and (total := buckets.total(epoch)) is not None and wanted >= total:
                wanted, epoch = wanted - total, epoch + 1
                continue
            count, more = buckets.count(epoch, pool, pool + 1)
            if wanted < count:
                found = buckets.pool(epoch, pool * buckets.settings.pool)
                return Cursor(epoch, found.start + int(_begins(found.ends)[wanted]))
            wanted, looked, pool = wanted - count, _added(looked, more), pool + 1
            if pool == buckets.pools:
                epoch, pool = epoch + 1, 0

    def know(self, cursor: Cursor, step: int | None) -> None:
        """Note the number of the step at a cursor, to count from there."""
        if step is not None:
            self.buckets.known = cursor, step

    def learn(self, other: Walk) -> None:
        """Take over what was counted by the walk before."""
        if isinstance(other, BucketWalk):
            self.buckets.learn(other.buckets)

    def _between(self, begin: Cursor, end: Cursor) -> int:
        """Steps that begin at or behind one cursor and before another."""
        if begin.epoch == end.epoch:
            return self._count(begin.epoch, begin.position, end.position)[0]
        total, looked = self._count(begin.epoch, begin.position, self.samples)
        for epoch in range(begin.epoch + 1, end.epoch):
            count, more = self._count(epoch, 0, self.samples)
            total, looked = total + count, _added(looked, more)
        return total + self._count(end.epoch, 0, end.position)[0]

    def _count(self, epoch: int, begin: int, end: int) -> tuple[int, int]:
        """Steps of an epoch that begin in positions [begin, end), and samples looked at for it."""
        buckets = self.buckets
        if begin >= self.samples or begin >= end:
            return 0, 0
        if begin == 0 and end >= self.samples:
            return buckets.count(epoch, 0, buckets.pools)
        first, last = buckets.number(begin), buckets.number(end)
        count, looked = buckets.count(epoch, first, last)
        return count + self._in_pool(epoch, end) - self._in_pool(epoch, begin), looked

    def _in_pool(self, epoch: int, position: int) -> int:
        """Batches of a position's pool that begin before it."""
        if self.buckets.number(position) * self.buckets.settings.pool == position:
            return 0
        pool = self.buckets.pool(epoch, position)
        return int(np.searchsorted(_begins(pool.ends), position - pool.start, side="left"))


def _begins(ends: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], ends[:-1]])


def _added(looked: int, more: int) -> int:
    if looked + more > MOST_COUNTED:
        raise too_far(looked + more)
    return looked + more
