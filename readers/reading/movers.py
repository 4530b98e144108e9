"""Threads that help a reading thread with a batch of large arrays."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.cache.threads import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

MOST_MOVERS = 4
"""Threads that work on one batch, the one that reads it among them. Each copies and sums some 10
GB/s of what lies in memory: this many do what a GPU's link takes, and leave the cores to others."""

SHARED_BYTES = 8 * 2**20
"""From so many bytes on a batch is shared out: waking a thread takes as long as copying a MiB."""


class Movers:
    """A pool for what can be done part by part, shared by all who read. It has no thread before it
    is needed."""

    def __init__(self) -> None:
        self._count = max(0, min(MOST_MOVERS, usable_cores()) - 1)
        self._pool: Workers | None = None
        self._closed = False

    def run(self, work: Callable[[T], object], parts: Sequence[T]) -> None:
        """Call work for each part, here and on what threads are free. Raises what it raises first;
        then some parts may be left out, and none is worked on any more."""
        left = deque(parts)

        def go_on(_: None) -> None:
            while True:
                try:
                    part = left.popleft()
                except IndexError:
                    return
                work(part)

        helpers = min(self._count, len(parts) - 1)
        pool = self._workers() if helpers > 0 else None
        outcomes = []
        try:
            try:
                for _ in range(helpers if pool is not None else 0):
                    assert pool is not None
                    outcomes.append(pool.submit(go_on, None))
            except ClosedError:
                pass  # who closed it meanwhile wants no thread any more, and this batch is begun
            go_on(None)
        finally:
            left.clear()
            running = [outcome for outcome in outcomes if not outcome.cancel()]
            for outcome in running:
                if not outcome.wait(STALL_TIMEOUT_S):
                    raise StalledError(
                        f"A part of a batch wasn't read for {STALL_TIMEOUT_S:.0f} s. The disk or "
                        "the network mount under the dataset may hang: look at it with `ls`."
                    )
        for outcome in running:
            outcome.result()

    def _workers(self) -> Workers | None:
        """The threads; a forked child has its own. None once closed."""
        if self._closed:
            return None
        if self._pool is None or self._pool.pid != os.getpid():
            self._pool = Workers(self._count, name="move")
        return self._pool

    def close(self) -> None:
        """End the threads, behind what they do. Safe to call twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
