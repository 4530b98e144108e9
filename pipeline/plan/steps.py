"""The walk of a loader through its epochs: which positions each step takes, and its number. Pure.

A cursor is the global state of a job: what all ranks together have been handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.batch_schedule import BatchSchedule


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in a job's stream of samples, the same on all ranks.

    position: samples of this epoch's stream that are consumed, over all ranks.
    """

    epoch: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One global batch: positions [start.position, start.position + size) of an epoch."""

    start: Cursor
    size: int
    then: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Global batches of one size in a row, in one epoch: `count` of them from a position on."""

    position: int
    size: int
    count: int

    def before(self, position: int) -> int:
        """How many of its batches begin before a position."""
        return min(self.count, max(0, -(-(position - self.position) // self.size)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """How epochs of `samples` are cut into global batches, and how these are numbered.

    A step's number counts the global batches since the job's start, from 0 on. It follows from the
    place in the stream, and the place from it, in closed form: what that costs depends on the
    schedule's entries, never on steps or epochs.

    drop_last: leave out what doesn't fill a global batch (the positions count as consumed).
    """

    samples: int
    schedule: BatchSchedule
    drop_last: bool

    def __len__(self) -> int:
        """Steps of the first epoch; the same on every rank."""
        return self.left(Cursor(0, 0))

    def step(self, start: Cursor) -> Step | None:
        """The step that begins at a cursor; None where the epoch has none left."""
        size = self.step_size(start)
        if not size:
            return None
        end = self.normalise(Cursor(start.epoch, start.position + size))
        return Step(start=start, size=size, then=end)

    def step_size(self, at: Cursor) -> int:
        """Samples of the step that begins at a cursor; 0 where the epoch has none left."""
        entries = self.schedule.entries  # asked twice a step: a batch of one size takes no search
        wanted = entries[0][1] if len(entries) == 1 else self.full_size(at)
        size = min(wanted, self.samples - at.position)
        return 0 if size < (wanted if self.drop_last else 1) else size

    def full_size(self, at: Cursor) -> int:
        """Samples of the step that begins at a cursor, had its epoch as many left."""
        return self.schedule.size_at(self.sample(at))

    def sample(self, at: Cursor) -> int:
        """The place of a cursor in the job's stream: its samples before, over all epochs."""
        return at.epoch * self.samples + at.position

    def left(self, cursor: Cursor, *, most: int | None = None) -> int:
        """Steps from a cursor to the end of its epoch. most: who asks needs no more, None: all."""
        count = 0
        for run in self.runs(cursor):
            count += run.count
            if most is not None and count >= most:
                return most
        return count

    @property
    def usual_steps(self) -> int:
        """Steps of an epoch, about; at least 1."""
        return max(1, self.samples // self.schedule.smallest)

    def normalise(self, cursor: Cursor) -> Cursor:
        """A cursor from which no step is left stands for the start of the next epoch."""
        return cursor if self.step_size(cursor) else Cursor(cursor.epoch + 1, 0)

    def steps(self, start: Cursor, *, endless: bool) -> Iterator[Step]:
        """Steps from a cursor on: to the end of its epoch, or through all epochs if endless."""
        cursor = self.normalise(start)
        epoch = cursor.epoch
        while endless or cursor.epoch == epoch:
            step = self.step(cursor)
            if step is None:
                return
            yield step
            cursor = step.then

    def runs(self, cursor: Cursor) -> Iterator[Run]:
        """The steps from a cursor to the end of its epoch, those of one size together."""
        at, samples, start = cursor.position, self.samples, cursor.epoch * self.samples
        while at < samples:
            size = self.schedule.size_at(start + at)
            change = self.schedule.next_change(start + at)
            end = samples if change is None else min(samples, change - start)
            count = min(-(-(end - at) // size), (samples - at) // size)
            if count:
                yield Run(position=at, size=size, count=count)
            elif self.drop_last:
                return
            else:
                yield Run(position=at, size=samples - at, count=1)
            at += max(1, count) * size

    # -- numbers

    def step_number(self, cursor: Cursor) -> int:
        """The number of the first step that begins at or behind a cursor: how many were before.

        Raises PlanError for a place that lies before all that the schedule remembers.
        """
        first = self._first
        if cursor < first:
            raise PlanError(
                f"step: {cursor} lies before what is known of this job's batches, which begins at "
                f"step {self.schedule.first_step:,} ({first}): older ones were forgotten."
            )
        number = self.schedule.first_step
        if cursor.epoch == first.epoch:
            return number + self._before(first, cursor.position)
        number += self.left(first)
        for begin, end, each in self._stretches():
            if end is None or cursor.epoch < end:
                number += (cursor.epoch - begin) * each
                break
            number += (end - begin) * each
        return number + self._before(Cursor(cursor.epoch, 0), cursor.position)

    def cursor_of(self, step: int) -> Cursor:
        """Where a step begins, by its number. Raises PlanError for one that is not known any more,
        or that no epoch has."""
        number = step - self.schedule.first_step
        if number < 0:
            raise PlanError(
                f"step: got {step:,}, wanted {self.schedule.first_step:,} or later: which samples "
                "older ones had is not known any more."
            )
        first = self._first
        if number < (count := self.left(first)):
            return self._within(first, number)
        number -= count
        for begin, end, each in self._stretches():
            if end is None or number < (end - begin) * each:
                if not each:
                    break
                whole, rest = divmod(number, each)
                return self._within(Cursor(begin + whole, 0), rest)
            number -= (end - begin) * each
        raise PlanError(f"step: got {step:,}, and this job's epochs end without it.")

    def know(self, cursor: Cursor, step: int | None) -> None:
        """Note the number of the step at a cursor, where numbers have to be counted: not here."""

    def learn(self, other: Walk) -> None:
        """Take over what the walk before has counted; here nothing is."""

    @property
    def _first(self) -> Cursor:
        """Where the schedule begins."""
        first = self.schedule.entries[0][0]
        return Cursor(*divmod(first, max(1, self.samples))) if first else Cursor(0, 0)

    def _stretches(self) -> Iterator[tuple[int, int | None, int]]:
        """Epochs [begin, end) behind the schedule's first, of equally many steps each; the last
        stretch has no end."""
        begin, inside = self._first.epoch + 1, set[int]()
        for first, _ in self.schedule.entries[1:]:
            epoch = first // max(1, self.samples)
            inside |= {epoch, epoch + 1}
        for end in (*sorted(epoch for epoch in inside if epoch > begin), None):
            yield begin, end, self.left(Cursor(begin, 0))
            begin = begin if end is None else end

    def _before(self, start: Cursor, position: int) -> int:
        """Steps from a cursor on that begin before a position of its epoch."""
        count = 0
        for run in self.runs(start):
            if run.position >= position:
                break
            count += run.before(position)
        return count

    def _within(self, start: Cursor, number: int) -> Cursor:
        """Where the step begins that comes so many steps behind a cursor, in its epoch."""
        for run in self.runs(start):
            if number < run.count:
                return Cursor(start.epoch, run.position + number * run.size)
            number -= run.count
        raise AssertionError("an epoch has as many steps as were counted")
