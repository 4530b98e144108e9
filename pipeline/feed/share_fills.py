"""Fills of a node's shards before the job, on several threads; what came of each is counted."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.cache.errors import ClosedError, PenstockError
from penstock.cache.threads import LEAVE_TIMEOUT_S, Ordered, Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.pipeline.feed.node_share import NodeShare
    from penstock.readers.contents import Contents
    from penstock.readers.remote_shards import RemoteShards

_Fate = Literal["fetched", "there", "no room", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmState:
    """How far a warm-up is, in bytes.

    wanted_bytes: what it shall keep; of that, what came from the remote in this run, what was
    there, what failed. left_out_bytes: what the node reads beside that.
    """

    wanted_bytes: int
    fetched_bytes: int = 0
    there_bytes: int = 0
    failed_bytes: int = 0
    left_out_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmResult:
    """What a warm-up has done.

    bytes, objects: fetched in this run (of a dry run: what would be). skipped: objects that were
    there, or that others fetched meanwhile. failed: URI and reason of each object that didn't come.

    node_bytes: what the node reads in an epoch; kept_bytes: of that, what the cache keeps for the
    job; left_out: objects that it doesn't: they come from the remote in each epoch.
    """

    bytes: int
    objects: int
    seconds: float
    skipped: int
    failed: tuple[tuple[str, str], ...]
    node_bytes: int
    kept_bytes: int
    left_out: int


class ShareFills:
    """Fills given shards on several threads, and counts what came of each."""

    def __init__(
        self,
        contents: Contents,
        remote: RemoteShards,
        share: NodeShare,
        *,
        processes: int,
        dry_run: bool,
        progress: Callable[[WarmState], None] | None,
    ) -> None:
        """processes: of this node, which share its shards out; each reports about its own.
        dry_run: fetch nothing. progress: called from several threads."""
        self._shard_bytes, self._remote, self._share = contents.shard_bytes, remote, share
        self.kept = [shard for shard in share.shards.tolist() if share.keeps(shard)]
        self._kept_bytes = int(self._shard_bytes[self.kept].sum())
        self._processes, self._dry_run, self._progress = processes, dry_run, progress
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._fetched_bytes = self._there_bytes = self._failed_bytes = 0
        self._count: dict[_Fate, int] = {"fetched": 0, "there": 0, "no room": 0, "failed": 0}
        self._failed: list[tuple[str, str]] = []

    def result(self, seconds: float) -> WarmResult:
        """What the fills came to, in so many seconds."""
        return WarmResult(
            bytes=self._fetched_bytes,
            objects=self._count["fetched"],
            seconds=seconds,
            skipped=self._count["there"],
            failed=tuple(self._failed),
            node_bytes=self._share.node_bytes,
            kept_bytes=self._kept_bytes,
            left_out=len(self._share.shards) - len(self.kept) + self._count["no room"],
        )

    def run(self, shards: Iterator[int], *, workers: int, stop: threading.Event) -> None:
        """Fill the shards, the first ones first, so many at a time. stop: ends it early."""
        self._stop = stop
        pool = Workers(workers, name="warm")
        # A large shard may take any time; its requests have limits of their own.
        no_limit_s = threading.TIMEOUT_MAX
        fills = Ordered(self._one, shards, pool=pool, ahead=2 * workers, timeout_s=no_limit_s)
        try:
            for _ in fills:
                if self._stop.is_set():
                    break
        except BaseException:
            self._stop.set()  # before the pool is closed, which waits for what has started
            raise
        finally:
            pool.close(timeout_s=LEAVE_TIMEOUT_S)  # a request that hangs ends by itself

    def _one(self, shard: int) -> None:
        outcome = self._fill(shard)
        if outcome is not None:
            with self._lock:
                self._count[outcome] += 1

    def _fill(self, shard: int) -> _Fate | None:
        """Fill a shard; None where it was stopped."""
        if self._stop.is_set():
            return None
        size_bytes = int(self._shard_bytes[shard])
        if self._remote.is_whole(shard):
            self._tell(there_bytes=size_bytes)
            return "there"
        if self._dry_run:
            self._tell(fetched_bytes=size_bytes)
            return "fetched"
        came = 0

        def progress(got: int) -> None:
            nonlocal came
            came += got
            self._tell(fetched_bytes=got)

        try:
            fetched = self._remote.fill(shard, progress=progress, stop=self._stop)
        except ClosedError:
            raise
        except PenstockError as error:
            if self._stop.is_set():
                return None
            self._failed.append((self._remote.uri(shard), str(error)))
            self._tell(failed_bytes=size_bytes - came)
            return "failed"
        if self._stop.is_set() and not self._remote.is_whole(shard):
            return None
        if fetched < 0:
            return "no room"
        self._tell(there_bytes=size_bytes - came)  # the job, or another warm-up, brought the rest
        return "fetched" if came else "there"

    def _tell(self, *, fetched_bytes: int = 0, there_bytes: int = 0, failed_bytes: int = 0) -> None:
        with self._lock:
            self._fetched_bytes += fetched_bytes
            self._there_bytes += there_bytes
            self._failed_bytes += failed_bytes
            state = WarmState(
                wanted_bytes=self._kept_bytes // self._processes,
                fetched_bytes=self._fetched_bytes,
                there_bytes=self._there_bytes,
                failed_bytes=self._failed_bytes,
                left_out_bytes=self._share.node_bytes - self._kept_bytes,
            )
        if self._progress is not None:
            self._progress(state)
