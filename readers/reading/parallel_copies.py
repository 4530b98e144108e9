"""Copy the large arrays of one batch on several threads."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import STALL_TIMEOUT_S, ClosedError, CorruptShardError, StalledError, Workers
from penstock.cache.base import usable_cores
from penstock.readers.formats import RowsOut

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache import Outcome
    from penstock.readers.formats import RowRequest
    from penstock.readers.reading.batch_plan import BatchRows

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


LARGE_ROW_BYTES = 2**20
"""Smaller rows aren't worth a call of their own, which costs 20 us."""


def gather_large(
    visit: BatchRows,
    requests: Sequence[RowRequest],
    outs: Mapping[str, NDArray[Any]],
    wrong: Sequence[dict[int, str]],
    *,
    threads: Callable[[], CopyThreads],
) -> Collection[str]:
    """Read large rows one by one, on several threads. Return the fields that were read; none if
    bytes from a cache are wrong, which must be fetched and read again.

    outs: the batch's arrays, by field. wrong: receives the reasons against bad samples, for each
    shard by position in it. Raises what reading raises.
    """
    large = [
        name
        for name, out in outs.items()
        if out.nbytes >= SHARED_BYTES and out.nbytes // len(out) >= LARGE_ROW_BYTES
    ]
    if not large:
        return ()
    pieces, positions = list(visit.pieces()), visit.positions

    def gather(part: tuple[str, int, int]) -> None:
        name, piece, row = part
        shard, begin, _ = pieces[piece]
        rows, place = visit.rows[row : row + 1], int(positions[row])
        request = replace(requests[piece], rows=rows, dense=(name,), others=())
        out = RowsOut(arrays=outs, places=slice(place, place + 1))
        shard.read(request, out)
        if out.wrong:
            wrong[piece].setdefault(row - begin, out.wrong[0])

    rows = [(piece, row) for piece, (_, a, b) in enumerate(pieces) for row in range(a, b)]
    source = visit.shards[0].source
    try:
        threads().run(gather, [(name, *each) for name in large for each in rows])
    except (CorruptShardError, OSError, EOFError) as error:
        source.refuse(error, 0)
        return ()
    if any(wrong) and source.is_fetched:
        for each in wrong:
            each.clear()
        return ()
    return large
