"""Fills of whole shards ahead of a loader's batches, paced by what these consume.

No thread waits here. Where a batch that is handed out leaves room in the pace, a task on the thread
penstock-fill fetches shards until the room is used up; then it ends, and a later batch starts the
next one. So a loader that stands still asks the store for nothing, and close() has nothing to wake.

A fill that fails is told to the log only: the batch that needs the bytes raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.cache.errors import PenstockError
from penstock.cache.threads import Workers
from penstock.pipeline.feed.fill_queue import FillQueue, WalkBudget
from penstock.pipeline.plan.needs import Pace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.base.counters import Traffic
    from penstock.cache.outcomes import Outcome
    from penstock.pipeline.feed.node_share import NodeShare
    from penstock.pipeline.plan.needs import Needs
    from penstock.pipeline.plan.steps import Cursor
    from penstock.readers.remote_shards import RemoteShards
    from penstock.readers.source import Source

log = logging.getLogger("penstock")

# Other jobs come and go: the node's share is looked at again in each epoch, but not more often than
# this and not less.
_REFRESH_LEAST_S, _REFRESH_S = 1.0, 5.0
# After a failed fill; doubled each time in a row.
_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
# close() waits so long for a fill to stop. One whose request hangs ends by itself, unseen, when the
# request does; it only ever writes to the cache.
_CLOSE_S = 1.0
# Shards smaller than what the connections hold are filled several at a time, up to so many.
_MOST_FILLS = 8


class Filler:
    """Fills the pinned shards that a rank will read, in the order of first need, paced.

    mine: shards that this rank reads in any epoch. epoch_steps: the walk goes no further ahead.
    """

    def __init__(
        self,
        remote: RemoteShards,
        source: Source,
        share: NodeShare,
        *,
        needs: Needs,
        mine: NDArray[np.int64],
        endless: bool,
        epoch_steps: int,
    ) -> None:
        self._remote, self._source, self._share = remote, source, share
        self._shard_bytes = source.contents.shard_bytes
        mean_bytes = int(self._shard_bytes.mean())
        # The first windows open all at once; beyond a quarter of the data it would be a download.
        held, most = remote.in_flight_bytes(mean_bytes)
        allowance = max(held, min(most, share.node_bytes // 4))
        self._most_running = max(1, min(held // max(1, mean_bytes), _MOST_FILLS))
        self._pool = Workers(self._most_running, name="fill")
        self._stop = threading.Event()
        self.queue = FillQueue(
            needs,
            mine=mine,
            endless=endless,
            may_walk=self._may_walk,
        )
        # What handed_out() and the tasks share; held for moments only.
        self._lock = threading.Lock()
        self._pace = Pace(allowance_bytes=allowance)
        self._budget = WalkBudget(epoch_steps)
        self._running: deque[Outcome[None]] = deque()
        self._filled_bytes = 0
        self._counted_bytes = remote.traffic().bytes_received
        self._refresh_at = time.monotonic() + _REFRESH_S
        self._batches = 0  # handed out since the share was looked at
        self._retry_at, self._retry_s = 0.0, _RETRY_S
        self._idle = False  # nothing is left to fill
        # The cache had no room for what it should keep, till others give back.
        self._is_full = False

    def seek(self, cursor: Cursor) -> None:
        """Fill what batches need from this cursor on."""
        with self._lock:
            self.queue.seek(cursor)
            self._budget.begin()

    def count_batch(self, size_bytes: int, traffic: Traffic) -> None:
        """Count a batch, and start a task if there is something to do. Raises what a task raised
        that isn't of the remote."""
        while self._running and self._running[0].done():
            self._running.popleft().result()
        now = time.monotonic()
        with self._lock:
            fetched = traffic.bytes_received - self._counted_bytes - self._filled_bytes
            self._counted_bytes, self._filled_bytes = traffic.bytes_received, 0
            self._pace.count_batch(size_bytes)
            self._pace.spend_for_batches(max(0, fetched))
            self._budget.count_batch()
            self._batches += 1
            due = (not self._idle and self._may_fill(now)) or self._is_due(now)
        if due and len(self._running) < self._most_running:
            self._running.append(self._pool.submit(self._work, None))

    def wait(self, *, timeout_s: float) -> None:
        """Wait until the tasks that run now have ended. Raises what they raised."""
        for task in list(self._running):
            task.result(timeout=timeout_s)

    def close(self) -> None:
        """Stop what runs. Safe to call twice."""
        self._stop.set()
        self._pool.close(timeout_s=_CLOSE_S)

    def _may_fill(self, now: float) -> bool:
        may = self._pace.open and now >= self._retry_at and not self._is_full
        return may and not self._stop.is_set()

    def _may_walk(self) -> bool:
        with self._lock:
            return self._budget.take()

    def _is_due(self, now: float) -> bool:
        """Whether to look at the share again."""
        early_s = _REFRESH_S - _REFRESH_LEAST_S if self._batches >= self._budget.epoch_steps else 0
        return now >= self._refresh_at - early_s

    def _work(self, _: None) -> None:
        with self._lock:
            due = self._is_due(time.monotonic())
            if due:
                self._refresh_at = time.monotonic() + _REFRESH_S
                self._batches = 0
                self._is_full = False
        if self.queue.pin(self._kept, has_changed=lambda: due and self._share.refresh()):
            with self._lock:
                self._idle = False
        if due:
            self._source.give_back()
        later: list[int] = []
        while (shard := self._next()) is not None:
            if self._remote.is_left_to_others(shard):
                later.append(shard)
            else:
                self._fill(shard)
        for shard in later:
            self.queue.put_back(shard)
        if later:
            with self._lock:
                self._idle = False

    def _next(self) -> int | None:
        """The next shard to fill; None if nothing may or need be filled now."""
        with self._lock:
            if not self._may_fill(time.monotonic()):
                return None
        shard = self.queue.next(self._remote.is_whole)
        with self._lock:
            self._idle = shard is None and self.queue.is_empty
        return shard

    def _fill(self, shard: int) -> None:
        size_bytes = int(self._shard_bytes[shard])
        fetched = 0

        def progress(got: int) -> None:
            nonlocal fetched
            with self._lock:
                fetched += got
                self._filled_bytes += got

        with self._lock:
            self._pace.spend(size_bytes)
        try:
            got = self._remote.fill(shard, progress=progress, stop=self._stop)
        except PenstockError as error:
            if not self._stop.is_set():
                self._failed(shard, error)
        else:
            self._retry_s = _RETRY_S
            if got < 0 and not self._stop.is_set():
                self._no_room(shard)
        finally:
            with self._lock:
                self._pace.spend(fetched - size_bytes)

    def _no_room(self, shard: int) -> None:
        """Others have to give back what is this job's share: asked for again behind that."""
        self.queue.put_back(shard)
        with self._lock:
            self._idle, self._is_full = False, True

    def _failed(self, shard: int, error: PenstockError) -> None:
        log.info("A shard could not be filled; retry in %.0f s: %s", self._retry_s, error)
        self.queue.put_back(shard)
        with self._lock:
            self._idle = False
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)

    def _kept(self, shards: list[int]) -> list[int]:
        return [shard for shard in shards if self._share.keeps(shard)]
