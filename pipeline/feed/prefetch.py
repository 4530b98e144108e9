"""What a loader of a remote dataset fetches before it is asked: the moving part over `needs`.

No thread waits here. Each batch that is handed out counts as consumption, and where that leaves
room in the pace, a task on the thread penstock-fill fetches whole shards in the order of first need
until the room is used up; then it ends, and a later batch starts the next one. So a loader that
stands still asks the store for nothing, and close() has nothing to wake.

A fill that fails is told to the log only: the batch that needs the bytes raises.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import PenstockError, PenstockWarning
from penstock.cache.threads import Workers
from penstock.pipeline.plan.needs import (
    LookAhead,
    Needs,
    Pace,
    check_room,
    little_room_words,
    node_ranks,
    open_windows_bytes,
    room_for_fills,
)
from penstock.pipeline.report.statistics import RemoteFacts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.cache.base.blob import BlobSource
    from penstock.cache.base.counters import Traffic
    from penstock.cache.blobs.remote import Remote
    from penstock.cache.disk.disk_cache import Membership
    from penstock.cache.outcomes import Outcome
    from penstock.pipeline.plan.order import Plan
    from penstock.pipeline.plan.state import PlanSettings
    from penstock.pipeline.plan.steps import Cursor, Walk
    from penstock.pipeline.plan.world import World
    from penstock.readers import Dataset

log = logging.getLogger("penstock")

# Steps that the walk for fills may go on for each batch that is handed out: it stays ahead of the
# consumer where shards are here already, at about 0.1 ms a step.
_STEPS_A_BATCH = 16
_MOST_STEPS_SAVED = 1024
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


class Share:
    """What this node keeps of a dataset: a loader's own membership of the cache, from join() to
    leave(), beside those of other loaders of the same dataset.

    shards: that this node's ranks read in an epoch, int64, shape (n,). Raises ConfigError for a
    limit below one shard.
    """

    def __init__(
        self,
        remote: Remote,
        dataset: Dataset,
        plan: Plan,
        *,
        global_batch: int,
        world: World,
    ) -> None:
        self._remote = remote
        index = dataset.index
        first, end = node_ranks(world)
        self.shards = plan.shards(global_batch, first=first, end=end, world=world.size)
        self._sizes = index.shard_bytes[self.shards]
        self.node_bytes = int(self._sizes.sum())
        self._tell_room(
            open_windows_bytes(
                open_shards=plan.open_shards,
                shard_bytes=float(index.shard_bytes.mean()),
                share=(end - first) / world.size,
                node_bytes=self.node_bytes,
            ),
            plan,
            is_told=world.rank == first,
        )
        keys = index.keys()
        self._keys = [keys[shard] for shard in self.shards.tolist()]
        self._mine: Membership | None = None

    def _tell_room(self, needed_bytes: int, plan: Plan, *, is_told: bool) -> None:
        """Say what the order opens here: in the log, or where that is too much in a warning.

        is_told: by this rank; one of a node does.
        """
        cache = self._remote.cache
        if cache is None:
            return
        if cache.max_bytes is not None:
            check_room(cache.max_bytes, int(self._sizes.max(initial=0)))
        if not is_told:
            return
        log.info(
            "this node keeps up to %s of its %s open (window=%d, lanes=%d)",
            format_size(needed_bytes),
            format_size(self.node_bytes),
            plan.window,
            plan.lanes,
        )
        if cache.max_bytes is not None and (
            words := little_room_words(
                cache.max_bytes, needed_bytes, window=plan.window, lanes=plan.lanes
            )
        ):
            warnings.warn(words, PenstockWarning, stacklevel=6)

    @property
    def is_cached(self) -> bool:
        """Whether there is a cache at all."""
        return self._remote.cache is not None

    def join(self) -> None:
        """Begin to be a job of the cache. Nothing if it is one."""
        if self._mine is None:
            self._mine = self._remote.join(self._keys, self._sizes.tolist())

    @property
    def kept_bytes(self) -> int:
        """Of `node_bytes`, what the cache keeps or will keep."""
        mine = self._mine
        return min(mine.pinned_bytes, self.node_bytes) if mine is not None else 0

    def keeps(self, key: str) -> bool:
        """Whether the cache keeps a blob of this key for the job."""
        return self._mine is not None and self._mine.pinned(key)

    def refresh(self) -> bool:
        """Look again, as jobs come and go; whether what is kept has changed."""
        return self._mine is not None and self._mine.refresh()

    def leave(self) -> None:
        """End this loader's claims. Safe to call twice."""
        mine, self._mine = self._mine, None
        if mine is not None:
            self._remote.leave(mine)


class Prefetch:
    """Batches ahead and shards ahead, for one loader. One thread calls; close() leaves the cache.

    plan: one that nobody else walks with. least_ahead: batches in flight where all is local.
    """

    def __init__(
        self,
        remote: Remote,
        dataset: Dataset,
        plan: Plan,
        *,
        walk: Walk,
        world: World,
        frozen: PlanSettings,
        least_ahead: int,
    ) -> None:
        self._remote = remote
        self._share = Share(remote, dataset, plan, global_batch=walk.global_batch, world=world)
        self._look_ahead = LookAhead(least=least_ahead)
        self._least = least_ahead
        self._seen = remote.traffic()
        self._handed_out: float | None = None
        self._filler: Filler | None = None
        if self._share.is_cached:
            self._filler = Filler(
                remote,
                dataset,
                self._share,
                needs=Needs(plan, walk, first=world.rank, end=world.rank + 1, world=world.size),
                mine=plan.shards(
                    walk.global_batch, first=world.rank, end=world.rank + 1, world=world.size
                ),
                endless=frozen.shuffle,
                epoch_steps=len(walk),
            )

    @property
    def first_ahead(self) -> int:
        """Batches to begin with: the first one mustn't share the line with many."""
        return min(2, self._least)

    @property
    def is_cold(self) -> bool:
        """Whether batches lately missed bytes on the local disk."""
        return self._look_ahead.is_cold

    def seek(self, cursor: Cursor) -> None:
        """Batches will come from this cursor on. At the first the loader becomes a job."""
        self._handed_out = None
        self._share.join()
        if self._filler is not None:
            self._filler.seek(cursor)

    def ahead(self, size_bytes: int, *, waited_s: float, ready_share: float) -> int:
        """Count a batch that is handed out now, and tell how many shall be in flight.

        size_bytes: of its encoded samples; waited_s: of the time since the last one, for bytes;
        ready_share: of the batches in flight, those that are there.
        """
        now, before = time.perf_counter(), self._handed_out
        self._handed_out = now
        seen, self._seen = self._seen, self._remote.traffic()
        if before is not None:
            self._look_ahead.handed_out(
                size_bytes,
                period_s=now - before,
                waited_s=waited_s,
                missed=self._seen.misses > seen.misses,
            )
        fetcher = self._remote.fetcher
        fetcher.fills_beside_urgent = room_for_fills(
            fetcher.fills_beside_urgent,
            ready_share=ready_share,
            most=fetcher.policy.max_connections,
        )
        mean_s, p99_s = fetcher.request_time()
        return self._look_ahead.batches(mean_s=mean_s, p99_s=p99_s)

    def fill(self, size_bytes: int) -> None:
        """Go on with fills, now that so many bytes more were consumed."""
        if self._filler is not None:
            self._filler.handed_out(size_bytes, self._seen)

    def facts(self) -> RemoteFacts:
        """For the statistics."""
        cache = self._remote.cache
        return RemoteFacts(
            traffic=self._remote.traffic(),
            connections=self._remote.fetcher.policy.max_connections,
            request_p99_s=self._remote.fetcher.request_time()[1],
            wanted_bytes=self._share.node_bytes,
            kept_bytes=self._share.kept_bytes,
            max_bytes=(cache.max_bytes or 0) if cache and not cache.is_temporary else 0,
        )

    def close(self) -> None:
        """Stop fills and leave the cache. Safe to call twice."""
        if self._filler is not None:
            self._filler.close()
        self._share.leave()


class Filler:
    """Fills the pinned shards that a rank will read, in the order of first need, paced.

    mine: shards that this rank reads in any epoch. epoch_steps: the walk goes no further ahead.
    """

    def __init__(
        self,
        remote: Remote,
        dataset: Dataset,
        share: Share,
        *,
        needs: Needs,
        mine: NDArray[np.int64],
        endless: bool,
        epoch_steps: int,
    ) -> None:
        self._remote, self._dataset, self._share = remote, dataset, share
        self._needs, self._mine, self._endless = needs, mine, endless
        self._epoch_steps = epoch_steps
        policy = remote.fetcher.policy
        mean_bytes = int(dataset.index.shard_bytes.mean())
        held = policy.min_connections * min(policy.range_bytes, mean_bytes)
        # The first windows open all at once; beyond a quarter of the data it would be a download.
        most = policy.min_connections * policy.range_bytes
        allowance = max(held, min(most, share.node_bytes // 4))
        self._most_running = max(1, min(held // max(1, mean_bytes), _MOST_FILLS))
        self._pool = Workers(self._most_running, name="fill")
        self._stop = threading.Event()
        # What handed_out() and the tasks share; held for moments only.
        self._lock = threading.Lock()
        self._pace = Pace(allowance_bytes=allowance)
        self._running: deque[Outcome[None]] = deque()
        self._sought: Cursor | None = None
        self._steps_left = 0  # that the walk may go
        self._steps_ahead = 0  # of the consumer
        self._filled_bytes = 0
        self._counted_bytes = remote.traffic().bytes_remote
        self._refresh_at = time.monotonic() + _REFRESH_S
        self._batches = 0  # handed out since the share was looked at
        self._retry_at, self._retry_s = 0.0, _RETRY_S
        self._idle = False  # nothing is left to fill
        self._is_full = (
            False  # the cache had no room for what it should keep, till others give back
        )
        # What belongs to the walk.
        self._walking = threading.Lock()
        self._steps: Iterator[tuple[Cursor, NDArray[np.int64]]] | None = None
        self._pinned: NDArray[np.bool_] | None = None
        self._todo = np.zeros(len(dataset.index.sizes), np.bool_)
        self._left = 0  # in _todo
        self._queue: deque[int] = deque()

    def seek(self, cursor: Cursor) -> None:
        """Walk from this cursor on."""
        with self._lock:
            self._sought = cursor
            self._steps_left, self._steps_ahead = _STEPS_A_BATCH, 0

    def handed_out(self, size_bytes: int, traffic: Traffic) -> None:
        """Count a batch, and start a task if there is something to do. Raises what a task raised
        that isn't of the remote."""
        while self._running and self._running[0].done():
            self._running.popleft().result()
        now = time.monotonic()
        with self._lock:
            fetched = traffic.bytes_remote - self._counted_bytes - self._filled_bytes
            self._counted_bytes, self._filled_bytes = traffic.bytes_remote, 0
            self._pace.handed_out(size_bytes)
            self._pace.fetched_by_batches(max(0, fetched))
            self._steps_left = min(self._steps_left + _STEPS_A_BATCH, _MOST_STEPS_SAVED)
            self._steps_ahead -= 1
            self._batches += 1
            due = (not self._idle and self._may_fill(now)) or self._is_due(now)
        if due and len(self._running) < self._most_running:
            self._running.append(self._pool.submit(self._work, None))

    def close(self) -> None:
        """Stop what runs. Safe to call twice."""
        self._stop.set()
        self._pool.close(timeout_s=_CLOSE_S)

    def _may_fill(self, now: float) -> bool:
        may = self._pace.open and now >= self._retry_at and not self._is_full
        return may and not self._stop.is_set()

    def _is_due(self, now: float) -> bool:
        """Whether to look at the share again."""
        early_s = _REFRESH_S - _REFRESH_LEAST_S if self._batches >= self._epoch_steps else 0
        return now >= self._refresh_at - early_s

    def _work(self, _: None) -> None:
        with self._lock:
            due = self._is_due(time.monotonic())
            if due:
                self._refresh_at = time.monotonic() + _REFRESH_S
                self._batches = 0
                self._is_full = False
        with self._walking:
            if (due and self._share.refresh()) or self._pinned is None:
                self._share_changed()
        if due:
            self._dataset.give_back()
        while (shard := self._next()) is not None:
            self._fill(shard)

    def _next(self) -> int | None:
        """The next shard to fill; None if nothing may or need be filled now."""
        with self._lock:
            if not self._may_fill(time.monotonic()):
                return None
            sought, self._sought = self._sought, None
        with self._walking:
            if sought is not None:
                self._todo[list(self._queue)] = True
                self._left += len(self._queue)
                self._queue.clear()
                self._steps = self._needs.shards(sought, endless=self._endless)
            shard = self._find()
        with self._lock:
            self._idle = shard is None and not self._left
        return shard

    def _find(self) -> int | None:
        assert self._pinned is not None
        while True:
            while self._queue:
                shard = self._queue.popleft()
                if self._pinned[shard] and not self._remote.is_whole(self._source(shard)):
                    return shard
            if not self._left or self._steps is None or not self._may_walk():
                return None
            _, shards = next(self._steps, (None, None))
            if shards is None:
                return None
            new = shards[self._todo[shards]]
            self._todo[new] = False
            self._left -= len(new)
            self._queue.extend(new.tolist())

    def _may_walk(self) -> bool:
        with self._lock:
            if self._steps_left < 1 or self._steps_ahead >= self._epoch_steps:
                return False
            self._steps_left -= 1
            self._steps_ahead += 1
            return True

    def _fill(self, shard: int) -> None:
        size_bytes = int(self._dataset.index.shard_bytes[shard])
        fetched = 0

        def progress(got: int) -> None:
            nonlocal fetched
            with self._lock:
                fetched += got
                self._filled_bytes += got

        with self._lock:
            self._pace.filled(size_bytes)
        try:
            got = self._remote.fill(self._source(shard), progress=progress, stop=self._stop)
        except PenstockError as error:
            if not self._stop.is_set():
                self._failed(shard, error)
        else:
            self._retry_s = _RETRY_S
            if got < 0 and not self._stop.is_set():
                self._no_room(shard)
        finally:
            with self._lock:
                self._pace.filled(fetched - size_bytes)

    def _no_room(self, shard: int) -> None:
        """Others have to give back what is this job's share: asked for again behind that."""
        with self._walking:
            self._queue.append(shard)
        with self._lock:
            self._idle, self._is_full = False, True

    def _failed(self, shard: int, error: PenstockError) -> None:
        log.info("Filled no shard for %.0f s: %s", self._retry_s, error)
        with self._walking:
            self._queue.append(shard)
        with self._lock:
            self._idle = False
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)

    def _source(self, shard: int) -> BlobSource:
        return self._dataset.index.source(shard)

    def _share_changed(self) -> None:
        """Look which of this rank's shards are pinned."""
        keys = self._dataset.index.keys()
        pinned = np.zeros(len(self._todo), np.bool_)
        pinned[[n for n in self._mine.tolist() if self._share.keeps(keys[n])]] = True
        before = self._pinned if self._pinned is not None else np.zeros_like(pinned)
        self._pinned = pinned
        self._todo = (self._todo | (pinned & ~before)) & pinned
        self._left = int(self._todo.sum())
        if self._left:
            with self._lock:
                self._idle = False
