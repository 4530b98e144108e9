"""Share the work of one large batch, such as copies of its arrays, between several threads."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import TYPE_CHECKING, TypeVar

from penstock.cache import STALL_TIMEOUT_S, ClosedError, Outcome, StalledError, Workers
from penstock.cache.base import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


T = TypeVar("T")

MOST_COPY_THREADS = 4
"""Threads that work on one batch, including the one that reads it. Each copies and checksums some
10 GB/s from memory: this many saturate a GPU's link and leave the other cores free."""

SHARED_BYTES = 8 * 2**20
"""Batches of fewer bytes are copied by one thread: waking another takes as long as copying a
MiB."""


class CopyThreads:
    """A pool for work that is done part by part, shared by all readers of a dataset. It starts its
    threads when they are first needed."""

    def __init__(self) -> None:
        self._count = max(0, min(MOST_COPY_THREADS, usable_cores()) - 1)
        self._pool: Workers | None = None
        self._closed = False

    def run(self, work: Callable[[T], object], parts: Sequence[T]) -> None:
        """Call work for each part, on this thread and on free ones. Raises its first error; some
        parts may be skipped then, and no thread works on any part after the call."""
        left = deque(parts)

        def work_on(_: None) -> None:
            while True:
                try:
                    part = left.popleft()
                except IndexError:
                    return
                work(part)

        helpers = min(self._count, len(parts) - 1)
        pool = self._workers() if helpers > 0 else None
        outcomes: list[Outcome[None]] = []
        try:
            if pool is not None:
                # If the pool is closed meanwhile, this thread finishes its batch alone.
                with contextlib.suppress(ClosedError):
                    outcomes.extend(pool.submit(work_on, None) for _ in range(helpers))
            work_on(None)
        finally:
            left.clear()
            running = [outcome for outcome in outcomes if not outcome.cancel()]
            for outcome in running:
                if not outcome.wait(STALL_TIMEOUT_S):
                    raise StalledError(
                        f"A part of a batch wasn't read for {STALL_TIMEOUT_S:.0f} s. The disk or "
                        "the network mount under the dataset may hang: check it with `ls`."
                    )
        for outcome in running:
            outcome.result()

    def _workers(self) -> Workers | None:
        """Return the threads, which a forked child starts again; None once closed."""
        if self._closed:
            return None
        if self._pool is None or self._pool.pid != os.getpid():
            self._pool = Workers(self._count, name="move")
        return self._pool

    def close(self) -> None:
        """End the threads when they have finished their parts. Safe to call twice."""
        self._closed = True
        if self._pool is not None:
            self._pool.close()
