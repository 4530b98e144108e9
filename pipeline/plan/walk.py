"""Walk through a job's epochs: the positions of each step, its number, and the batch sizes. Pure.

A cursor is the global position of a job: everything before it was delivered to some rank. A
schedule says how large the global batches are, and from which sample on.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.cache import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MOST_ENTRIES = 128
"""Of a user's schedule: a ramp has room in it, and a state stays small."""

MOST_KEPT = 160
"""With those of the past; the oldest are forgotten beyond it."""

_FIRST = itemgetter(0)


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Sizes of a job's global batches, each from a sample of the job's stream on.

    Samples are counted from the job's start over all epochs: epoch * samples + position; those that
    drop_last skips count as consumed. A size holds from the first batch that begins at or behind
    its sample. What lies behind a loader is history: the schedule that the job really had, however
    often it was resumed with another batch, so that its steps can be numbered.

    entries: (first sample, size), ascending by sample. history: how many of the first entries no
    batch of this loader has any more. first_step: number of the global batch that begins at the
    first entry; above 0 where older entries were forgotten. Raises PlanError for what can't be.
    """

    entries: tuple[tuple[int, int], ...]
    history: int = 0
    first_step: int = 0

    def __post_init__(self) -> None:
        if not self.entries:
            raise PlanError("batch schedule: got no entry, wanted one at sample 0.")
        for number in (each for entry in self.entries for each in entry):
            if type(number) is not int:
                raise PlanError(f"batch schedule: got {number!r}, wanted whole numbers.")
        firsts = [first for first, _ in self.entries]
        if firsts[0] < 0 or any(b <= a for a, b in itertools.pairwise(firsts)):
            raise PlanError(f"batch schedule: first samples must ascend from 0 on, got {firsts}.")
        if (least := min(size for _, size in self.entries)) < 1:
            raise PlanError(f"batch schedule: a global batch has 1 sample or more, got {least}.")
        if not 0 <= self.history < len(self.entries) or self.first_step < 0:
            raise PlanError("batch schedule: its history is not a part of it.")

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """One size for all of a job."""
        return cls(((0, size),))

    @classmethod
    def of(cls, sizes: Mapping[int, int]) -> BatchSchedule:
        """The schedule of sizes by first sample."""
        return cls(_merged(sizes.items()))

    @property
    def first_size(self) -> int:
        """Samples of the job's first global batches, as far as is known."""
        return self.entries[0][1]

    @property
    def size(self) -> int:
        """Samples of the global batch that this loader begins with."""
        return self.entries[self.history][1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that this loader's global batches have, in order, each once."""
        return tuple(dict.fromkeys(size for _, size in self.entries[self.history :]))

    @property
    def largest(self) -> int:
        """The largest of `sizes`."""
        return max(self.sizes)

    @property
    def smallest(self) -> int:
        """The smallest of `sizes`."""
        return min(self.sizes)

    def as_given(self) -> dict[int, int]:
        """What a user gives for `global_batch_size` to have these batches from here on."""
        return {0: self.size, **dict(self.entries[self.history + 1 :])}

    def size_at(self, sample: int) -> int:
        """The size of a batch that begins at a sample of the job's stream."""
        return self.entries[self._place(sample)][1]

    def next_change(self, sample: int) -> int | None:
        """The first sample behind one where another entry begins; None: no more does."""
        place = bisect_right(self.entries, sample, key=_FIRST)
        return self.entries[place][0] if place < len(self.entries) else None

    def continued(self, sample: int, wanted: BatchSchedule | None = None) -> BatchSchedule:
        """What was up to a sample, and from there on what is wanted; None: what was planned.

        Where `wanted` says nothing else than was planned it stays as it is. For who went back to
        before all that is remembered, it is as if `wanted` had held from the start.
        """
        wanted = self if wanted is None else wanted
        if sample < self.entries[0][0]:
            entries = ((0, wanted.first_size), *wanted.entries[1:])
            return BatchSchedule(entries, history=wanted._place(sample))
        past = [entry for entry in self.entries if entry[0] < sample]
        before = wanted.entries[wanted._place(sample)][1]
        coming = [entry for entry in wanted.entries if entry[0] > sample]
        # An entry's own sample stays where nothing changes there.
        entries = _merged([*past, (sample, before), *coming])
        joined = BatchSchedule(entries, first_step=self.first_step)
        return BatchSchedule(entries, history=joined._place(sample), first_step=self.first_step)

    def forgotten_before(self, sample: int, step: int) -> BatchSchedule:
        """The schedule from a batch on: it begins at a sample and has a number."""
        entries = [entry for entry in self.entries if entry[0] > sample]
        history = max(0, self.history - (len(self.entries) - len(entries) - 1))
        return BatchSchedule(
            ((sample, self.size_at(sample)), *entries), history=history, first_step=step
        )

    def _place(self, sample: int) -> int:
        """The entry that holds at a sample; the first one before it, too."""
        if len(self.entries) == 1:
            return 0
        return max(0, bisect_right(self.entries, sample, key=_FIRST) - 1)


def _merged(entries: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Entries without those that change nothing."""
    kept: list[tuple[int, int]] = []
    for first, size in entries:
        if not kept or kept[-1][1] != size:
            kept.append((first, size))
    return tuple(kept)


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
class BatchRun:
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

    def runs(self, cursor: Cursor) -> Iterator[BatchRun]:
        """The steps from a cursor to the end of its epoch, those of one size together."""
        at, samples, start = cursor.position, self.samples, cursor.epoch * self.samples
        while at < samples:
            size = self.schedule.size_at(start + at)
            change = self.schedule.next_change(start + at)
            end = samples if change is None else min(samples, change - start)
            count = min(-(-(end - at) // size), (samples - at) // size)
            if count:
                yield BatchRun(position=at, size=size, count=count)
            elif self.drop_last:
                return
            else:
                yield BatchRun(position=at, size=samples - at, count=1)
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
