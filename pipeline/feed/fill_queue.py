"""Which shard to fill next: those that the cache keeps, in the order in which batches need them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.pipeline.plan.needs import Needs
    from penstock.pipeline.plan.steps import Cursor

# Steps that the walk for fills may go on for each batch that is handed out: it stays ahead of the
# consumer where shards are here already, at about 0.1 ms a step.
_STEPS_A_BATCH = 16
_MOST_STEPS_SAVED = 1024
# Shards that are passed over until the walk waits for them.
_MOST_PASSED_OVER = 4096


@dataclass(slots=True)
class WalkBudget:
    """How many steps the walk for fills may go on. Not thread-safe: the owner locks.

    epoch_steps: it goes no further ahead of the consumer. left: steps that it may go; ahead: of the
    consumer.
    """

    epoch_steps: int
    left: int = 0
    ahead: int = 0

    def begin(self) -> None:
        """Begin anew, as the consumer goes on elsewhere."""
        self.left, self.ahead = _STEPS_A_BATCH, 0

    def count_batch(self) -> None:
        """Count a batch of the consumer's."""
        self.left = min(self.left + _STEPS_A_BATCH, _MOST_STEPS_SAVED)
        self.ahead -= 1

    def take(self) -> bool:
        """Whether the walk may go one step on; if so, the step is counted."""
        if self.left < 1 or self.ahead >= self.epoch_steps:
            return False
        self.left -= 1
        self.ahead += 1
        return True


class FillQueue:
    """The shards that are still to be filled, in the order of first need.

    It has no place of its own in the stream: it goes along a walk that begins where `seek` says,
    and remembers which shards it has met. Several threads may call; a step of the walk is long, so
    `seek`, which the consumer calls, waits for none.
    """

    def __init__(
        self,
        needs: Needs,
        *,
        mine: NDArray[np.int64],
        endless: bool,
        may_walk: Callable[[], bool],
    ) -> None:
        """mine: shards that this rank reads in any epoch. may_walk: asked before each step of the
        walk."""
        self._needs, self._mine, self._endless = needs, mine, endless
        self._may_walk = may_walk
        self._lock = threading.Lock()  # of all but _sought
        self._sought: deque[Iterator[tuple[Cursor, NDArray[np.int64]]]] = deque(maxlen=1)
        self._steps: Iterator[tuple[Cursor, NDArray[np.int64]]] | None = None
        self._pinned: NDArray[np.bool_] | None = None
        self._todo = np.zeros(needs.shard_count, np.bool_)
        self._left = 0  # in _todo
        self._queue: deque[int] = deque()

    @property
    def pinned(self) -> list[int]:
        """Shards that the cache keeps, as far as was looked at."""
        return [] if self._pinned is None else np.flatnonzero(self._pinned).tolist()

    @property
    def is_empty(self) -> bool:
        """Whether no shard is left, met by the walk or not."""
        return not self._left and not self._queue

    def seek(self, cursor: Cursor) -> None:
        """Walk from this cursor on, as soon as the next shard is asked for."""
        self._sought.append(self._needs.shards(cursor, endless=self._endless))

    def pin(
        self, kept: Callable[[list[int]], list[int]], *, has_changed: Callable[[], bool]
    ) -> bool:
        """Look which of this rank's shards the cache keeps, the first time or where that has
        changed; whether it was looked at and some are left to fill."""
        with self._lock:
            if not has_changed() and self._pinned is not None:
                return False
            pinned = np.zeros(len(self._todo), np.bool_)
            pinned[kept(self._mine.tolist())] = True
            before = self._pinned if self._pinned is not None else np.zeros_like(pinned)
            self._pinned = pinned
            self._todo = (self._todo | (pinned & ~before)) & pinned
            self._left = int(self._todo.sum())
            return self._left > 0

    def next(
        self, is_whole: Callable[[int], bool], may_fill: Callable[[int], bool] | None = None
    ) -> int | None:
        """The next shard that isn't here; None if the walk may go no further or none is left.
        may_fill: those that it refuses are passed over, and keep their places."""
        with self._lock:
            if self._sought:
                self._steps = self._sought.pop()
                self._todo[list(self._queue)] = True
                self._left += len(self._queue)
                self._queue.clear()
            passed_over: list[int] = []
            try:
                return self._find(is_whole, may_fill, passed_over)
            finally:
                self._queue.extendleft(reversed(passed_over))

    def put_back(self, shard: int) -> None:
        """Have a shard that couldn't be filled come again, behind the others."""
        with self._lock:
            self._queue.append(shard)

    def _find(
        self,
        is_whole: Callable[[int], bool],
        may_fill: Callable[[int], bool] | None,
        passed_over: list[int],
    ) -> int | None:
        assert self._pinned is not None
        while True:
            while self._queue:
                shard = self._queue.popleft()
                if not self._pinned[shard]:
                    continue
                if may_fill is not None and not may_fill(shard):
                    passed_over.append(shard)
                elif not is_whole(shard):
                    return shard
            if not self._left or self._steps is None or len(passed_over) >= _MOST_PASSED_OVER:
                return None
            if not self._may_walk():
                return None
            _, shards = next(self._steps, (None, None))
            if shards is None:
                return None
            new = shards[self._todo[shards]]
            self._todo[new] = False
            self._left -= len(new)
            self._queue.extend(new.tolist())
