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
from dataclasses import dataclass, field
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
# So long it stays decided where a shard comes from: what other nodes hold changes slowly.
_DECIDED_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Supply:
    """A supply is where shards are filled from: the remote, or the caches of other nodes.

    Each has a pace of its own: while the remote gives little, what other nodes hold comes all the
    same. running: tasks; filled_bytes: since the last batch; counted_bytes: of all that came.
    """

    is_near: bool
    pace: Pace
    running: deque[Outcome[None]] = field(default_factory=deque)
    filled_bytes: int = 0
    counted_bytes: int = 0

    def count_batch(self, size_bytes: int, traffic: Traffic) -> None:
        """Count a batch, and what batches have fetched since the one before."""
        received = self.received(traffic)
        fetched = received - self.counted_bytes - self.filled_bytes
        self.counted_bytes, self.filled_bytes = received, 0
        self.pace.count_batch(size_bytes)
        self.pace.spend_for_batches(max(0, fetched))

    def received(self, traffic: Traffic) -> int:
        """All bytes that came from here."""
        return traffic.bytes_peers if self.is_near else traffic.bytes_remote


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
        self._supplies = [Supply(is_near=False, pace=Pace(allowance_bytes=allowance))]
        if any(cache.peers is not None for cache in remote.caches):
            self._supplies.append(Supply(is_near=True, pace=Pace(allowance_bytes=allowance)))
        for supply in self._supplies:
            supply.counted_bytes = supply.received(remote.traffic())
        self._pool = Workers(self._most_running * len(self._supplies), name="fill")
        self._stop = threading.Event()
        self.queue = FillQueue(
            needs,
            mine=mine,
            endless=endless,
            may_walk=self._may_walk,
        )
        # What handed_out() and the tasks share; held for moments only.
        self._lock = threading.Lock()
        self._budget = WalkBudget(epoch_steps)
        self._decided: dict[int, Supply | None] = {}
        self._decided_until = 0.0
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
        now = time.monotonic()
        with self._lock:
            for supply in self._supplies:
                supply.count_batch(size_bytes, traffic)
            self._budget.count_batch()
            self._batches += 1
            is_due, is_idle = self._is_due(now), self._idle
            due = [
                supply
                for supply in self._supplies
                if (is_due and not supply.is_near) or (not is_idle and self._may_fill(supply, now))
            ]
        for supply in self._supplies:
            while supply.running and supply.running[0].done():
                supply.running.popleft().result()
            if supply in due and len(supply.running) < self._most_running:
                supply.running.append(self._pool.submit(self._work, supply))

    def wait(self, *, timeout_s: float) -> None:
        """Wait until the tasks that run now have ended. Raises what they raised."""
        for supply in self._supplies:
            for task in list(supply.running):
                task.result(timeout=timeout_s)

    def close(self) -> None:
        """Stop what runs. Safe to call twice."""
        self._stop.set()
        self._pool.close(timeout_s=_CLOSE_S)

    def _may_fill(self, supply: Supply, now: float) -> bool:
        may = supply.pace.open and now >= self._retry_at and not self._is_full
        return may and not self._stop.is_set()

    def _may_walk(self) -> bool:
        with self._lock:
            return self._budget.take()

    def _is_due(self, now: float) -> bool:
        """Whether to look at the share again."""
        early_s = _REFRESH_S - _REFRESH_LEAST_S if self._batches >= self._budget.epoch_steps else 0
        return now >= self._refresh_at - early_s

    def _work(self, supply: Supply) -> None:
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
        while (shard := self._next(supply)) is not None:
            self._fill(shard, supply)

    def _next(self, supply: Supply) -> int | None:
        """The next shard to fill from there; None if nothing may or need be filled now."""
        now = time.monotonic()
        with self._lock:
            if not self._may_fill(supply, now):
                return None
            self._forget_decisions(now)
        has_choice = len(self._supplies) > 1
        shard = self.queue.next(
            self._remote.is_whole,
            (lambda shard: self._supply_of(shard) is supply) if has_choice else None,
        )
        with self._lock:
            self._idle = shard is None and self.queue.is_empty
        return shard

    def _forget_decisions(self, now: float) -> None:
        """Decide anew where shards come from, once in a while. Another thread may be looking at
        what was decided, so that stays as it is."""
        if now >= self._decided_until:
            self._decided = {}
            self._decided_until = now + _DECIDED_S

    def _supply_of(self, shard: int) -> Supply | None:
        """Where a shard comes from; None while another node is about to fetch it."""
        decided = self._decided
        if shard in decided:
            return decided[shard]
        far, near = self._supplies
        found: Supply | None = far
        if self._remote.is_near(shard):
            found = near
        elif self._remote.is_left_to_others(shard):
            found = None
        decided[shard] = found
        return found

    def _fill(self, shard: int, supply: Supply) -> None:
        size_bytes = int(self._shard_bytes[shard])
        fetched = 0

        def progress(got: int) -> None:
            nonlocal fetched
            with self._lock:
                fetched += got
                supply.filled_bytes += got

        with self._lock:
            supply.pace.spend(size_bytes)
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
                supply.pace.spend(fetched - size_bytes)

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
