"""Fill the shards that this node's cache keeps for a loader, in the order of first need.

`NodeShare` says which shards the node reads and which of them its cache keeps, `FillQueue` which
one is next, and `Filler` fetches them at the pace of the loader's consumption.

No thread waits here. Where a delivered batch leaves room in the pace, a task on the thread
penstock-fill fetches shards until the room is used up; then it ends, and a later batch starts the
next one. So a loader that stands still asks the store for nothing, and close() has nothing to wake.

A fill that fails is only logged: the batch that needs the bytes raises.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PenstockError, PenstockWarning, Workers
from penstock.cache.base import format_size
from penstock.pipeline.plan import (
    Pace,
    check_room,
    little_room_words,
    node_ranks,
    open_windows_bytes,
    shards_of_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.cache import Outcome
    from penstock.cache.base import Traffic
    from penstock.cache.disk import DiskCache
    from penstock.pipeline.plan import Cursor, JobPlan, Needs, World
    from penstock.readers import Contents, RemoteJobs, RemoteShards, Source

log = logging.getLogger("penstock")


class NodeShare:
    """What this node reads of a dataset, and what its cache keeps of that for one loader.

    It is a job of the cache from join() to leave(), beside other loaders' of the same dataset.

    shards: that this node's ranks read in an epoch, int64, shape (n,). batches: sizes of the job's
    global batches. Raises ConfigError for a limit below one shard.
    """

    def __init__(
        self,
        remote: RemoteShards,
        contents: Contents,
        plan: JobPlan,
        *,
        batches: Sequence[int],
        world: World,
    ) -> None:
        self._remote = remote
        first, end = node_ranks(world)
        self.shards = shards_of_ranks(plan, batches, first=first, end=end, world=world.size)
        self._sizes = contents.shard_bytes[self.shards]
        self.node_bytes = int(self._sizes.sum())
        self._mine: RemoteJobs | None = None
        for cache in remote.caches:
            self._look_at_room(
                cache,
                contents,
                plan,
                share=(end - first) / world.size,
                speaks=world.is_first_on_node,
            )

    def _look_at_room(
        self, cache: DiskCache, contents: Contents, plan: JobPlan, *, share: float, speaks: bool
    ) -> None:
        """Say what the order opens here: in the log, or where that is too much in a warning.

        share: of the ranks, on this node; speaks: this process does, as one of a node.
        """
        kept = self._remote.kept_by(cache)
        sizes = self._sizes[np.isin(self.shards, kept)]
        node_bytes, shard_bytes = int(sizes.sum()), contents.shard_bytes[kept]
        if cache.max_bytes is not None:
            check_room(cache.max_bytes, int(sizes.max(initial=0)))
        if not speaks:
            return
        needed_bytes = open_windows_bytes(
            open_shards=plan.open_shards * len(kept) / len(contents.sizes),
            shard_bytes=float(shard_bytes.mean()),
            share=share,
            node_bytes=node_bytes,
        )
        log.info(
            "this node keeps up to %s of its %s open (window=%d, lanes=%d)",
            format_size(needed_bytes),
            format_size(node_bytes),
            plan.window,
            plan.lanes,
        )
        if cache.max_bytes is not None and (
            words := little_room_words(
                cache.max_bytes, needed_bytes, window=plan.window, lanes=plan.lanes
            )
        ):
            warnings.warn(words, PenstockWarning, stacklevel=6)
        elif cache.max_bytes is not None and cache.max_bytes < node_bytes:
            from penstock.pipeline.plan.sizing import small_cache_words  # others need none

            if words := small_cache_words(cache.max_bytes, node_bytes):
                warnings.warn(words, PenstockWarning, stacklevel=6)

    @property
    def is_cached(self) -> bool:
        """Whether there is a cache at all."""
        return bool(self._remote.caches)

    def join(self) -> None:
        """Become a job of the cache, if it isn't one."""
        if self._mine is None:
            self._mine = self._remote.join(self.shards, self._sizes)

    @property
    def kept_bytes(self) -> int:
        """Those of `node_bytes` that the cache keeps or will keep."""
        mine = self._mine
        return min(mine.pinned_bytes, self.node_bytes) if mine is not None else 0

    def keeps(self, shard: int) -> bool:
        """Whether the cache keeps a shard for the job."""
        return self._mine is not None and self._mine.pins(shard)

    def refresh(self) -> bool:
        """Look again, as jobs come and go; whether what is kept has changed."""
        return self._mine is not None and self._mine.refresh()

    def leave(self) -> None:
        """End this loader's claims. Safe to call twice."""
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.leave()


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
        self, needs: Needs, *, mine: NDArray[np.int64], endless: bool, may_walk: Callable[[], bool]
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
class FillSource:
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
        self._supplies = [FillSource(is_near=False, pace=Pace(allowance_bytes=allowance))]
        if any(cache.peers is not None for cache in remote.caches):
            self._supplies.append(FillSource(is_near=True, pace=Pace(allowance_bytes=allowance)))
        for supply in self._supplies:
            supply.counted_bytes = supply.received(remote.traffic())
        self._pool = Workers(self._most_running * len(self._supplies), name="fill")
        self._stop = threading.Event()
        self.queue = FillQueue(needs, mine=mine, endless=endless, may_walk=self._may_walk)
        # What handed_out() and the tasks share; held for moments only.
        self._lock = threading.Lock()
        self._budget = WalkBudget(epoch_steps)
        self._decided: dict[int, FillSource | None] = {}
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

    def _may_fill(self, supply: FillSource, now: float) -> bool:
        may = supply.pace.open and now >= self._retry_at and not self._is_full
        return may and not self._stop.is_set()

    def _may_walk(self) -> bool:
        with self._lock:
            return self._budget.take()

    def _is_due(self, now: float) -> bool:
        """Whether to look at the share again."""
        early_s = _REFRESH_S - _REFRESH_LEAST_S if self._batches >= self._budget.epoch_steps else 0
        return now >= self._refresh_at - early_s

    def _work(self, supply: FillSource) -> None:
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

    def _next(self, supply: FillSource) -> int | None:
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

    def _supply_of(self, shard: int) -> FillSource | None:
        """Where a shard comes from; None while another node is about to fetch it."""
        decided = self._decided
        if shard in decided:
            return decided[shard]
        far, near = self._supplies
        found: FillSource | None = far
        if self._remote.is_near(shard):
            found = near
        elif self._remote.is_left_to_others(shard):
            found = None
        decided[shard] = found
        return found

    def _fill(self, shard: int, supply: FillSource) -> None:
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
