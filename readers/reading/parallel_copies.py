"""Copy the large arrays of one batch on several threads."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.cache import STALL_TIMEOUT_S, ClosedError, StalledError, Workers
from penstock.cache.base import usable_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.reading.batch_plan import BatchRows

T = TypeVar("T")

MOST_COPY_THREADS = 4
"""Threads that work on one batch, the one that reads it among them. Each copies and sums some 10
GB/s of what lies in memory: this many do what a GPU's link takes, and leave the cores to others."""

SHARED_BYTES = 8 * 2**20
"""From so many bytes on a batch is shared out: waking a thread takes as long as copying a MiB."""


class CopyThreads:
    """A pool for what can be done part by part, shared by all who read. It has no thread before it
    is needed."""

    def __init__(self) -> None:
        self._count = max(0, min(MOST_COPY_THREADS, usable_cores()) - 1)
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


LARGE_ROW_BYTES = 2**20
"""From so many bytes on a row is worth a call of its own: it takes 20 us more."""


def large_fields(outs: Mapping[str, NDArray[Any]]) -> list[str]:
    """Those fields whose rows are shared out, of what a batch is gathered into."""
    return [
        name
        for name, out in outs.items()
        if len(out) > 1 and out.nbytes >= SHARED_BYTES and out.nbytes // len(out) >= LARGE_ROW_BYTES
    ]


def gather_large(
    visit: BatchRows, outs: Mapping[str, NDArray[Any]], *, movers: CopyThreads
) -> list[dict[int, str]]:
    """Gather rows that can be had alone, by several threads. Returns what is wrong, for each piece
    of the visit by place in it. Raises what gathering raises."""
    pieces = list(visit.pieces())
    wrong: list[dict[int, str]] = [{} for _ in pieces]
    order = np.arange(len(visit.rows)) if visit.order is None else visit.order
    each = [(piece, row) for piece, (_, a, b) in enumerate(pieces) for row in range(a, b)]

    def gather(one: tuple[str, int, int]) -> None:
        name, piece, row = one
        shard, begin, _ = pieces[piece]
        place, found = int(order[row]), dict[int, str]()
        here = slice(place, place + 1)
        shard.gather(name, visit.rows[row : row + 1], outs[name], here, found)
        if found:
            wrong[piece].setdefault(row - begin, found[0])

    movers.run(gather, [(name, piece, row) for name in outs for piece, row in each])
    return wrong
