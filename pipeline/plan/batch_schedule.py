"""How large the global batches of a job are, and from which sample on. Pure."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from penstock.cache.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
