"""The walk of a loader through its epochs: which positions each step takes. Pure.

A cursor is the global state of a job: what all ranks together have been handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
class Walk:
    """How an epoch of `samples` is cut into global batches.

    drop_last: leave out what doesn't fill a global batch (the positions count as consumed).
    """

    samples: int
    global_batch: int
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
        size = min(self.global_batch, self.samples - at.position)
        return 0 if size < (self.global_batch if self.drop_last else 1) else size

    def left(self, cursor: Cursor, *, most: int | None = None) -> int:
        """Steps from a cursor to the end of its epoch. most: who asks needs no more, None: all."""
        whole, rest = divmod(max(0, self.samples - cursor.position), self.global_batch)
        count = whole + (rest > 0 and not self.drop_last)
        return count if most is None else min(count, most)

    @property
    def usual_steps(self) -> int:
        """Steps of an epoch, about; at least 1."""
        return max(1, self.samples // self.global_batch)

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
