"""Compute the positions, the number and the batch size of each step of a job. Pure.

A cursor is the global position of a job: every sample before it was delivered to some rank. A
schedule has the sizes of global batches, each with the sample from which it holds.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MOST_ENTRIES = 128
"""Upper limit of a user's schedule: enough for a ramp, and a state stays small."""

MOST_KEPT = 160
"""Upper limit of the entries in a state, with those of past batches: the oldest are dropped."""

_FIRST = itemgetter(0)


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The sizes of a job's global batches, each with the sample from which it holds.

    Samples are counted from the job's start over all epochs: epoch * samples + position; those that
    drop_last skips count as consumed. A size holds from the first batch that begins at or after its
    sample. Past entries record the sizes that the job had, however often it was resumed with
    another batch: they are needed to number its steps.

    entries: (first sample, size), ascending by sample. history: number of entries before the one
    that this loader begins with. first_step: number of the global batch that begins at the first
    entry; above 0 if older entries were dropped. Raises PlanError for invalid values.
    """

    entries: tuple[tuple[int, int], ...]
    history: int = 0
    first_step: int = 0

    def __post_init__(self) -> None:
        firsts, sizes = [first for first, _ in self.entries], [size for _, size in self.entries]
        are_whole = all(type(number) is int for number in (*firsts, *sizes))
        if not firsts or not are_whole or sorted({-1, *firsts}) != [-1, *firsts] or min(sizes) < 1:
            raise PlanError(
                f"batch schedule: got {self.entries!r:.200}, wanted pairs of whole numbers: a "
                "first sample of 0 or more, ascending, and a global batch of 1 or more."
            )
        if not 0 <= self.history < len(self.entries) or self.first_step < 0:
            raise PlanError(
                f"batch schedule: got a history of {self.history} entries and first step "
                f"{self.first_step}, wanted fewer than its {len(self.entries)} entries and a step "
                "of 0 or more."
            )

    @classmethod
    def constant(cls, size: int) -> BatchSchedule:
        """Return the schedule with one size for all of a job."""
        return cls(((0, size),))

    @classmethod
    def of(cls, sizes: Mapping[int, int]) -> BatchSchedule:
        """Return the schedule with these sizes by first sample."""
        return cls(_merged(sizes.items()))

    @property
    def first_size(self) -> int:
        """Samples of the first global batches that this schedule records."""
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
        """Return the `global_batch_size` that gives a new job this loader's batches."""
        return {0: self.size, **dict(self.entries[self.history + 1 :])}

    def size_at(self, sample: int) -> int:
        """Return the size of a batch that begins at a sample of the job's stream."""
        return self.entries[self._place(sample)][1]

    def continued(self, sample: int, wanted: BatchSchedule | None = None) -> BatchSchedule:
        """Return this schedule up to a sample, and `wanted` from there on; None: unchanged.

        If `sample` is before all that this schedule records, `wanted` counts from the job's start.
        """
        wanted = self if wanted is None else wanted
        if sample < self.entries[0][0]:
            entries = ((0, wanted.first_size), *wanted.entries[1:])
            return BatchSchedule(entries, history=wanted._place(sample))
        past = [entry for entry in self.entries if entry[0] < sample]
        before = wanted.entries[wanted._place(sample)][1]
        coming = [entry for entry in wanted.entries if entry[0] > sample]
        # Entries that change no size are merged with the one before.
        entries = _merged([*past, (sample, before), *coming])
        joined = BatchSchedule(entries, first_step=self.first_step)
        return BatchSchedule(entries, history=joined._place(sample), first_step=self.first_step)

    def forgotten_before(self, sample: int, step: int) -> BatchSchedule:
        """Return the schedule from the batch at `sample` on, whose number is `step`."""
        entries = [entry for entry in self.entries if entry[0] > sample]
        history = max(0, self.history - (len(self.entries) - len(entries) - 1))
        first = sample, self.size_at(sample)
        return BatchSchedule((first, *entries), history=history, first_step=step)

    def _place(self, sample: int) -> int:
        """Return the index of the entry that holds at a sample; 0 before the first entry."""
        if len(self.entries) == 1:
            return 0
        return max(0, bisect_right(self.entries, sample, key=_FIRST) - 1)


def _merged(entries: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the entries without those that repeat the size before them."""
    kept: list[tuple[int, int]] = []
    for first, size in entries:
        if not kept or kept[-1][1] != size:
            kept.append((first, size))
    return tuple(kept)


class Cursor(NamedTuple):  # a frozen dataclass takes a microsecond more, twice a batch
    """A position in a job's stream of samples, the same on all ranks.

    position: samples of this epoch's stream that all ranks together have consumed.
    """

    epoch: int
    position: int


class Step(NamedTuple):
    """One global batch: positions [start.position, start.position + size) of an epoch.

    then: the cursor of the next batch.
    """

    start: Cursor
    size: int
    then: Cursor


@dataclass(frozen=True, slots=True)
class BatchRun:
    """`count` consecutive global batches of one size in an epoch, from a position on."""

    position: int
    size: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The division of epochs of `samples` into global batches, and the numbers of these.

    The number of a step counts the global batches since the job's start, from 0. Number and
    position follow from each other in closed form: the cost depends on the schedule's entries, not
    on steps or epochs.

    drop_last: skip the samples that don't fill a global batch (they count as consumed).
    """

    samples: int
    schedule: BatchSchedule
    drop_last: bool

    def __len__(self) -> int:
        """Return the number of steps of the first epoch; the same on every rank."""
        return self.left(Cursor(0, 0))

    def step(self, start: Cursor) -> Step | None:
        """Return the step that begins at a cursor; None at the end of the epoch."""
        size = self.step_size(start)
        if not size:
            return None
        end = self.normalise(Cursor(start.epoch, start.position + size))
        return Step(start=start, size=size, then=end)

    def step_size(self, at: Cursor) -> int:
        """Return the samples of the step that begins at a cursor; 0 at the end of the epoch."""
        entries = self.schedule.entries  # called twice a step: no search for a constant size
        wanted = entries[0][1] if len(entries) == 1 else self.full_size(at)
        size = min(wanted, self.samples - at.position)
        return 0 if size < (wanted if self.drop_last else 1) else size

    def full_size(self, at: Cursor) -> int:
        """Return the scheduled size of the step at a cursor, ignoring the end of the epoch."""
        return self.schedule.size_at(self.sample(at))

    def sample(self, at: Cursor) -> int:
        """Return the number of samples of the job's stream before a cursor, over all epochs."""
        return at.epoch * self.samples + at.position

    def change_sample(self, at: Cursor) -> int:
        """Return the first sample of the job's stream that may be another one if its order changes
        at a cursor."""
        return self.sample(at)

    def left(self, cursor: Cursor, *, most: int | None = None) -> int:
        """Return the number of steps from a cursor to the end of its epoch, at most `most`."""
        count = 0
        for run in self.runs(cursor):
            count += run.count
            if most is not None and count >= most:
                return most
        return count

    @property
    def usual_steps(self) -> int:
        """The approximate number of steps of an epoch; at least 1."""
        return max(1, self.samples // self.schedule.smallest)

    def normalise(self, cursor: Cursor) -> Cursor:
        """Return the cursor, or the start of the next epoch if no step is left after it."""
        return cursor if self.step_size(cursor) else Cursor(cursor.epoch + 1, 0)

    def steps(self, start: Cursor, *, endless: bool) -> Iterator[Step]:
        """Yield the steps from a cursor to the end of its epoch; if endless, of all epochs."""
        cursor = self.normalise(start)
        epoch = cursor.epoch
        while endless or cursor.epoch == epoch:
            step = self.step(cursor)
            if step is None:
                return
            yield step
            cursor = step.then

    def runs(self, cursor: Cursor) -> Iterator[BatchRun]:
        """Yield the steps from a cursor to the end of its epoch, as runs of one size."""
        at, samples, start = cursor.position, self.samples, cursor.epoch * self.samples
        while at < samples:
            size = self.schedule.size_at(start + at)
            later = (first - start for first, _ in self.schedule.entries if first > start + at)
            end = min(next(later, samples), samples)
            count = min(-(-(end - at) // size), (samples - at) // size)
            if count:
                yield BatchRun(at, size, count)
            elif self.drop_last:
                return
            else:
                yield BatchRun(at, samples - at, 1)
            at += max(1, count) * size

    def step_number(self, cursor: Cursor) -> int:
        """Return the number of the first step that begins at or after a cursor.

        Raises PlanError for a cursor before the schedule's first entry.
        """
        first = self._first
        if cursor < first:
            raise PlanError(
                f"step: {cursor} is before step {self.schedule.first_step:,} ({first}): this job's "
                "state has no record of older batches."
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
        """Return the cursor at which a step begins. Raises PlanError if the schedule doesn't record
        that step, and if no epoch has it."""
        number = step - self.schedule.first_step
        if number < 0:
            raise PlanError(
                f"step: got {step:,}, wanted {self.schedule.first_step:,} or later: this job's "
                "state has no record of older batches."
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
        raise PlanError(f"step: got {step:,}, and no epoch of this job has that step.")

    def know(self, cursor: Cursor, step: int | None) -> None:
        """Store the number of the step at a cursor; only walks that count numbers need it."""

    def learn(self, other: Walk) -> None:
        """Copy the counts of another walk; only walks that count numbers have any."""

    @property
    def _first(self) -> Cursor:
        """The cursor of the schedule's first entry."""
        first = self.schedule.entries[0][0]
        return Cursor(*divmod(first, max(1, self.samples))) if first else Cursor(0, 0)

    def _stretches(self) -> Iterator[tuple[int, int | None, int]]:
        """Yield (begin, end, steps of each) of epochs after the schedule's first one that have
        equally many steps; the last range has no end."""
        begin, inside = self._first.epoch + 1, set[int]()
        for first, _ in self.schedule.entries[1:]:
            epoch = first // max(1, self.samples)
            inside |= {epoch, epoch + 1}
        for end in (*sorted(epoch for epoch in inside if epoch > begin), None):
            yield begin, end, self.left(Cursor(begin, 0))
            begin = begin if end is None else end

    def _before(self, start: Cursor, position: int) -> int:
        """Return how many steps from a cursor on begin before a position of its epoch."""
        count = 0
        for run in self.runs(start):
            if run.position >= position:
                break
            count += min(run.count, -(-(position - run.position) // run.size))
        return count

    def _within(self, start: Cursor, number: int) -> Cursor:
        """Return the cursor of the step that is `number` steps after another one in its epoch."""
        for run in self.runs(start):
            if number < run.count:
                return Cursor(start.epoch, run.position + number * run.size)
            number -= run.count
        raise AssertionError("an epoch has as many steps as were counted")
