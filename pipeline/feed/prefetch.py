"""Decide how far ahead of a loader the bytes of a remote dataset are fetched: batches and shards.

The delivered batches and the measured request times determine how many batches to read ahead
(`Prefetch`, `plan.needs.LookAhead`). At the same time, the shards that this node's cache keeps are
filled as a whole, in the order of first need. `NodeShare` lists the shards that the node reads and
those that its cache keeps, `FillQueue` orders them, and `Filler` fetches them at the pace of the
loader's consumption.

No thread waits. If a delivered batch leaves room in the pace, a task on a thread penstock-fill_N
fetches shards until the room is used up, and then ends; a later batch starts the next task. A
loader that isn't iterated therefore sends no requests, and close() has no waiting thread to notify.

A fill that fails is only logged: the batch that needs the bytes raises the error.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache import PenstockError, PenstockWarning, Workers
from penstock.cache.base import format_size
from penstock.pipeline.plan import (
    LookAhead,
    Needs,
    Pace,
    check_room,
    node_ranks,
    open_windows_bytes,
    room_for_fills,
    shards_of_ranks,
    widening,
    window_room_warning,
)
from penstock.pipeline.report import TierFacts
from penstock.readers.fieldtypes import stored_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.augment import ArrayDraws
    from penstock.cache import JobStore, Outcome
    from penstock.cache.base import Traffic
    from penstock.cache.disk import DiskCache
    from penstock.pipeline.feed.peer_links import PeerLinks
    from penstock.pipeline.plan import Cursor, JobOrder, JobPlan, World
    from penstock.readers import RemoteJobs, RemoteShards, Source

    Check = Callable[[int], bool]

log = logging.getLogger("penstock")


class NodeShare:
    """The shards that this node reads, and those that its cache keeps for one loader.

    From join() to leave() it is a job of the cache, like other loaders of the same dataset, and
    linked to the job's other nodes if a cache has peers.

    shards: those that this node's ranks read in an epoch, int64, shape (n,). node_bytes: their
    size. Raises ConfigError if a cache's limit is below the size of one shard.
    """

    def __init__(
        self,
        remote: RemoteShards,
        order: JobOrder,
        plan: JobPlan,
        world: World,
        *,
        store: JobStore | None = None,
        asks_peers: bool = True,
    ) -> None:
        """store: the part of the job's store that all loaders of this dataset and order share."""
        self.remote, self.contents = remote, order.source.contents
        batches, (first, end) = order.walk.schedule.sizes, node_ranks(world)
        self.shards = shards_of_ranks(plan, batches, first=first, end=end, world=world.size)
        self._sizes = self.contents.shard_bytes[self.shards]
        self.node_bytes = int(self._sizes.sum())
        self._mine: RemoteJobs | None = None
        for cache in remote.caches:
            self._check_room(cache, plan, (end - first) / world.size, world.is_first_on_node)
        self.peers: PeerLinks | None = None
        if asks_peers and any(cache.peers is not None for cache in remote.caches):
            from penstock.pipeline.feed.peer_links import PeerLinks  # not needed on a single node

            self.peers = PeerLinks(remote, order, world=world, store=store)

    def _check_room(self, cache: DiskCache, plan: JobPlan, share: float, reports: bool) -> None:
        """Log the bytes of the order's open windows, and warn if they hardly fit into the cache.

        share: of the job's ranks, those on this node. reports: this process logs and warns for the
        node. Raises ConfigError if the cache's limit is below the size of one shard.
        """
        contents, kept = self.contents, self.remote.kept_by(cache)
        sizes = self._sizes[np.isin(self.shards, kept)]
        node_bytes, shard_bytes = int(sizes.sum()), contents.shard_bytes[kept]
        if cache.max_bytes is not None:
            check_room(cache.max_bytes, int(sizes.max(initial=0)))
        if not reports:
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
        if (most := cache.max_bytes) is None:
            return
        words = window_room_warning(most, needed_bytes, window=plan.window, lanes=plan.lanes)
        if not words and most < node_bytes:
            from penstock.pipeline.plan.sizing import small_cache_warning  # rarely needed

            words = small_cache_warning(most, node_bytes)
        if words:
            warnings.warn(words, PenstockWarning, stacklevel=6)

    def join(self, epoch: int) -> None:
        """Become a job of the cache, unless it is one already, and begin to ask other nodes."""
        if self.peers is not None:
            self.peers.begin(epoch)
        if self._mine is None:
            self._mine = self.remote.join(self.shards, self._sizes)

    @property
    def kept_bytes(self) -> int:
        """The part of `node_bytes` that the cache keeps or will keep."""
        mine = self._mine
        return min(mine.pinned_bytes, self.node_bytes) if mine is not None else 0

    def keeps(self, shard: int) -> bool:
        """Return True if the cache keeps a shard for the job."""
        return self._mine is not None and self._mine.pins(shard)

    def refresh(self) -> bool:
        """Read again which shards are kept, as jobs come and go; return True if that changed."""
        return self._mine is not None and self._mine.refresh()

    def leave(self) -> None:
        """Leave the cache. Safe to call twice."""
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.leave()
        if self.peers is not None:
            self.peers.close()


# Steps that the walk for fills may advance per delivered batch. It so stays ahead of the consumer
# even if shards are cached already; a step takes about 0.1 ms.
_STEPS_PER_BATCH = 16
_MOST_STEPS_SAVED = 1024


class FillQueue:
    """The shards that are still to be filled, in the order of first need.

    It has no position of its own in the stream: it follows a walk that begins at the cursor of
    `seek`, and records the shards that it has met. Several threads may call it. A step of the walk
    takes long, so `seek` and `count_batch`, which the consumer calls, don't wait for one.
    most_passed_over: shards that other sources fill until the walk waits for them.
    """

    most_passed_over = 4096

    def __init__(
        self, needs: Needs, *, mine: NDArray[np.int64], endless: bool, most_ahead: int
    ) -> None:
        """mine: shards that this rank reads in any epoch. most_ahead: steps that the walk may be
        ahead of the consumer."""
        self._needs, self._mine, self._endless = needs, mine, endless
        self._most_ahead = most_ahead
        # The consumer counts its batches and the steps that the walk may reach; the walk its steps.
        self._batches, self._reach, self._walked = 0, 0, 0
        self._lock = threading.Lock()  # protects all but these and _sought
        self._sought: deque[Iterator[tuple[Cursor, NDArray[np.int64]]]] = deque(maxlen=1)
        self._steps: Iterator[tuple[Cursor, NDArray[np.int64]]] | None = None
        self._pinned: NDArray[np.bool_] | None = None
        self._todo = np.zeros(needs.shard_count, np.bool_)
        self._left = 0  # shards in _todo
        self._queue: deque[int] = deque()

    @property
    def pinned(self) -> list[int]:
        """The shards that the cache keeps, as of the last `pin`."""
        return [] if self._pinned is None else np.flatnonzero(self._pinned).tolist()

    @property
    def is_empty(self) -> bool:
        """True if no shard is left to fill."""
        return not self._left and not self._queue

    def seek(self, cursor: Cursor) -> None:
        """Walk from a cursor on, beginning with the next call of `next`."""
        self._batches, self._reach = 0, _STEPS_PER_BATCH
        self._sought.append(self._needs.shards(cursor, endless=self._endless))

    def count_batch(self) -> None:
        """Count a batch that the consumer received: the walk may advance."""
        self._batches += 1
        self._reach = min(self._reach + _STEPS_PER_BATCH, self._walked + _MOST_STEPS_SAVED)

    def pin(self, keeps: Check, *, has_changed: Callable[[], bool]) -> bool:
        """Read which of this rank's shards the cache keeps, the first time and after changes.

        Returns True if that was read and some of them are left to fill.
        """
        with self._lock:
            if not has_changed() and self._pinned is not None:
                return False
            pinned = np.zeros(len(self._todo), np.bool_)
            pinned[[shard for shard in self._mine.tolist() if keeps(shard)]] = True
            before = self._pinned if self._pinned is not None else np.zeros_like(pinned)
            self._pinned = pinned
            self._todo = (self._todo | (pinned & ~before)) & pinned
            self._left = int(self._todo.sum())
            return self._left > 0

    def next(self, is_whole: Check, may_fill: Check | None = None) -> int | None:
        """Return the next shard that isn't cached; None if there is none or the walk must wait.

        is_whole: True for a cached shard. may_fill: shards for which it returns False are passed
        over and stay in the queue.
        """
        with self._lock:
            if self._sought:
                self._steps, self._walked = self._sought.pop(), 0
                self._todo[list(self._queue)] = True
                self._left += len(self._queue)
                self._queue.clear()
            passed_over: list[int] = []
            try:
                return self._find(is_whole, may_fill, passed_over)
            finally:
                self._queue.extendleft(reversed(passed_over))

    def put_back(self, shard: int) -> None:
        """Append a shard that couldn't be filled to the queue."""
        with self._lock:
            self._queue.append(shard)

    def _find(self, is_whole: Check, may_fill: Check | None, passed_over: list[int]) -> int | None:
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
            is_over = not self._left or len(passed_over) >= self.most_passed_over
            must_wait = self._walked >= min(self._reach, self._batches + self._most_ahead)
            if is_over or must_wait or self._steps is None:
                return None
            self._walked += 1
            _, shards = next(self._steps, (None, None))
            if shards is None:
                return None
            new = shards[self._todo[shards]]
            self._todo[new] = False
            self._left -= len(new)
            self._queue.extend(new.tolist())


# The pause after a failed fill, doubled after each further failure in a row.
_RETRY_S, _MOST_RETRY_S = 1.0, 60.0
# close() waits this long for fills to stop. A fill whose request hangs ends later with the request;
# it only writes to the cache.
_CLOSE_S = 1.0
# Shards that are smaller than the bytes in flight are filled several at a time, up to this number.
_MOST_FILLS = 8


@dataclass(slots=True, kw_only=True, eq=False)
class FillSource:
    """A source from which shards are filled: the remote, or the caches of other nodes.

    Each source has its own pace, so that a slow remote doesn't delay fills from other nodes.
    is_near: the source is other nodes. running: its tasks. filled_bytes: received by fills since
    the last batch. counted_bytes: received in total as of the last batch.
    """

    is_near: bool
    pace: Pace
    running: deque[Outcome[None]] = field(default_factory=deque)
    filled_bytes: int = 0
    counted_bytes: int = 0

    def count_batch(self, size_bytes: int, traffic: Traffic) -> None:
        """Count a batch, and the bytes that batches fetched since the batch before."""
        received = self.received(traffic)
        fetched = received - self.counted_bytes - self.filled_bytes
        self.counted_bytes, self.filled_bytes = received, 0
        self.pace.count_batch(size_bytes)
        self.pace.spend_for_batches(max(0, fetched))

    def received(self, traffic: Traffic) -> int:
        """Return all bytes received from this source."""
        return traffic.bytes_peers if self.is_near else traffic.bytes_remote


class Filler:
    """Fills the pinned shards that a rank will read, paced, in the order of first need.

    refresh_s: the kept shards are read again after this time, because other jobs come and go.
    choice_s: the source of a shard is chosen again only after this time, because the holdings of
    nodes change slowly.
    """

    refresh_s = 5.0
    choice_s = 1.0

    def __init__(
        self, remote: RemoteShards, share: NodeShare, order: JobOrder, plan: JobPlan, world: World
    ) -> None:
        self._remote, self._source, self._share = remote, order.source, share
        self._shard_bytes = order.source.contents.shard_bytes
        walk, (first, end, size) = order.walk, (world.rank, world.rank + 1, world.size)
        mine = shards_of_ranks(plan, walk.schedule.sizes, first=first, end=end, world=size)
        mean_bytes = int(self._shard_bytes.mean())
        # The first windows open at once. More than a quarter of the data would be a download.
        held, most = remote.in_flight_bytes(mean_bytes)
        allowance = max(held, min(most, share.node_bytes // 4))
        self._most_running = max(1, min(held // max(1, mean_bytes), _MOST_FILLS))
        self.sources = [FillSource(is_near=False, pace=Pace(allowance_bytes=allowance))]
        if any(cache.peers is not None for cache in remote.caches):
            self.sources.append(FillSource(is_near=True, pace=Pace(allowance_bytes=allowance)))
        for each in self.sources:
            each.counted_bytes = each.received(remote.traffic())
        self._pool = Workers(self._most_running * len(self.sources), name="fill")
        self._stop = threading.Event()
        self.queue = FillQueue(
            Needs(plan, walk, first=first, end=end, world=size),
            mine=mine,
            endless=order.settings.shuffle,
            most_ahead=walk.usual_steps,
        )
        # Protects what count_batch() and the tasks share. It is held for moments only.
        self._lock = threading.Lock()
        self._choices: dict[int, FillSource | None] = {}
        self._choices_until = 0.0
        self._refresh_at = time.monotonic() + self.refresh_s
        self._retry_at, self._retry_s = 0.0, _RETRY_S
        self._idle = False  # nothing is left to fill
        self._is_full = False  # the cache has no room until other jobs give up theirs

    def count_batch(self, size_bytes: int, traffic: Traffic) -> None:
        """Count a delivered batch, and start a task if there is something to fill.

        size_bytes: of the batch. Raises the errors of ended tasks that aren't the remote's.
        """
        now = time.monotonic()
        self.queue.count_batch()
        with self._lock:
            for each in self.sources:
                each.count_batch(size_bytes, traffic)
            is_due, is_idle = now >= self._refresh_at, self._idle
            due = [each for each in self.sources if is_due and not each.is_near]
            due += [each for each in self.sources if not is_idle and self._may_fill(each, now)]
        for each in self.sources:
            while each.running and each.running[0].done():
                each.running.popleft().result()
            if each in due and len(each.running) < self._most_running:
                each.running.append(self._pool.submit(self._work, each))

    def close(self) -> None:
        """Stop the running fills. Safe to call twice."""
        self._stop.set()
        self._pool.close(timeout_s=_CLOSE_S)

    def _may_fill(self, source: FillSource, now: float) -> bool:
        may = source.pace.open and now >= self._retry_at and not self._is_full
        return may and not self._stop.is_set()

    def _work(self, source: FillSource) -> None:
        with self._lock:
            due = (now := time.monotonic()) >= self._refresh_at
            if due:
                self._refresh_at, self._is_full = now + self.refresh_s, False
        if self.queue.pin(self._share.keeps, has_changed=lambda: due and self._share.refresh()):
            with self._lock:
                self._idle = False
        if due:
            self._source.give_back()
        while (shard := self._next(source)) is not None:
            self._fill(shard, source)

    def _next(self, source: FillSource) -> int | None:
        """Return the next shard to fill from a source; None if there is none now."""
        now = time.monotonic()
        with self._lock:
            if not self._may_fill(source, now):
                return None
            if now >= self._choices_until:  # a new table: another thread may still read the old one
                self._choices, self._choices_until = {}, now + self.choice_s

        def may_fill(shard: int) -> bool:
            return self.source_of(shard) is source

        has_choice = len(self.sources) > 1
        shard = self.queue.next(self._remote.is_whole, may_fill if has_choice else None)
        with self._lock:
            self._idle = shard is None and self.queue.is_empty
        return shard

    def source_of(self, shard: int) -> FillSource | None:
        """Choose the source of a shard; None while another node is about to fetch it."""
        choices = self._choices
        if shard in choices:
            return choices[shard]
        remote, nodes = self.sources
        chosen: FillSource | None = remote
        if self._remote.is_near(shard):
            chosen = nodes
        elif self._remote.is_left_to_others(shard):
            chosen = None
        choices[shard] = chosen
        return chosen

    def _fill(self, shard: int, source: FillSource) -> None:
        size_bytes = int(self._shard_bytes[shard])
        fetched = 0

        def progress(got: int) -> None:
            nonlocal fetched
            with self._lock:
                fetched += got
                source.filled_bytes += got

        with self._lock:
            source.pace.spend(size_bytes)
        try:
            got = self._remote.fill(shard, progress=progress, stop=self._stop)
        except PenstockError as error:
            if not self._stop.is_set():
                log.info("A shard could not be filled; retry in %.0f s: %s", self._retry_s, error)
                self.queue.put_back(shard)
                with self._lock:
                    self._idle = False
                    self._retry_at = time.monotonic() + self._retry_s
                    self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)
        else:
            self._retry_s = _RETRY_S
            if got < 0 and not self._stop.is_set():
                # No room: other jobs first have to give up what is this job's share.
                self.queue.put_back(shard)
                with self._lock:
                    self._idle, self._is_full = False, True
        finally:
            with self._lock:
                source.pace.spend(fetched - size_bytes)


FILLED_SHARE = 0.9
"""Shards are filled as a whole if an epoch's crops need at least this share of their bytes. Below
it, only the ranges of the next batches are fetched and cached."""

_SAMPLED_SHARDS = 3


def wanted_share(source: Source, remote: RemoteShards, crops: ArrayDraws) -> float:
    """Estimate the share of the shards' bytes that an epoch's crops of arrays need."""
    count = len(source.contents.sizes)
    shards = np.unique(np.linspace(0, count - 1, _SAMPLED_SHARDS).astype(np.int64)).tolist()
    fields = stored_fields(source.fields, source.schema)
    shares = [
        remote.wanted_share(shard, fields, lambda numbers: crops.before(numbers, 0))
        for shard in shards
    ]
    return float(np.mean(shares))


class Prefetch:
    """Decides how far ahead of one loader bytes are fetched. One thread may call it.

    least_ahead: batches in flight if all bytes are local.
    """

    def __init__(
        self,
        remote: RemoteShards,
        order: JobOrder,
        *,
        world: World,
        least_ahead: int,
        store: JobStore | None = None,
        fills: bool = True,
    ) -> None:
        """store: this loader's part of the job's store. fills: also fill whole shards."""
        plan = order.plan()
        self._remote = remote
        self._share = NodeShare(remote, order, plan, world, store=store)
        self._look_ahead = LookAhead(least=least_ahead, connections=remote.max_connections)
        self._least = least_ahead
        self._seen = remote.traffic()
        self._delivered_at: float | None = None
        self._filler: Filler | None = None
        if remote.caches and fills:
            self._filler = Filler(remote, self._share, order, plan, world)

    @property
    def first_ahead(self) -> int:
        """Batches to read ahead at first, few so that the first one gets enough bandwidth."""
        return min(2, self._least)

    @property
    def is_cold(self) -> bool:
        """True if recent batches missed bytes on the local disk."""
        return self._look_ahead.is_cold

    def seek(self, cursor: Cursor) -> None:
        """Prepare for batches from a cursor on. The first call joins the cache."""
        self._delivered_at = None
        self._share.join(cursor.epoch)
        if self._filler is not None:
            self._filler.queue.seek(cursor)

    def ahead(self, size_bytes: int, *, waited_s: float, ready_share: float) -> int:
        """Count a batch that is being delivered, and return how many shall be in flight.

        size_bytes: of its encoded samples; waited_s: the wait for bytes since the last batch;
        ready_share: share of the batches in flight whose reads have ended.
        """
        now, before = time.perf_counter(), self._delivered_at
        self._delivered_at = now
        seen, self._seen = self._seen, self._remote.traffic()
        misses = self._seen.misses - seen.misses
        self._look_ahead.count_misses(misses)
        if before is not None:
            self._look_ahead.count_batch(
                size_bytes, period_s=now - before, waited_s=waited_s, missed=misses > 0
            )
        # If shards aren't filled, the bytes next to a range may never be needed.
        widens = None if self._filler is None else partial(widening, ready_share=ready_share)
        self._remote.limit_fills(
            lambda now, most: room_for_fills(now, ready_share=ready_share, most=most),
            widening=widens,
        )
        mean_s, p99_s = self._remote.request_time()
        return self._look_ahead.batches(mean_s=mean_s, p99_s=p99_s)

    def fill(self, size_bytes: int, *, epoch: int) -> None:
        """Continue fills after a batch of an epoch was consumed. size_bytes: of the batch."""
        if self._share.peers is not None:
            self._share.peers.set_epoch(epoch)
        if self._filler is not None:
            self._filler.count_batch(size_bytes, self._seen)

    def facts(self) -> TierFacts:
        """Return the facts of the remote and the cache, for statistics."""
        return TierFacts(
            traffic=self._remote.traffic(),
            connections=self._remote.max_connections,
            request_p99_s=self._remote.request_time()[1],
            wanted_bytes=self._share.node_bytes,
            kept_bytes=self._share.kept_bytes,
            max_bytes=self._remote.max_bytes,
        )

    def close(self) -> None:
        """Stop fills and leave the cache. Safe to call twice."""
        if self._filler is not None:
            self._filler.close()
        self._share.leave()
