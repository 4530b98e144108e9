"""Bytes of a store, in parallel: retried, hedged, limited and counted.

Retry-After is honoured where a store can tell it (`RequestError.retry_after_s`).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base.counters import TrafficMeter
from penstock.cache.base.fetch_policy import FetchPolicy
from penstock.cache.base.store import ABSENT, Answer, ObjectInfo, RequestError, Store
from penstock.cache.errors import FetchError
from penstock.cache.fetch.dispatcher import Dispatcher
from penstock.cache.fetch.failures import FORKED
from penstock.cache.fetch.listing import ListingPages
from penstock.cache.fetch.requests import Call, Request
from penstock.cache.fetch.signal import Signal
from penstock.cache.threads import end_at_exit

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.fetch.object_range import ObjectRange

T = TypeVar("T")


class Fetcher:
    """Makes requests to one store for any number of threads, which share the connections.

    policy: limits; meter: counts what came; jitter: of the pauses, for tests. Owns the store and
    the threads (named penstock-fetch, started when needed): close() ends both. Not across fork.
    """

    def __init__(
        self,
        store: Store,
        *,
        policy: FetchPolicy | None = None,
        meter: TrafficMeter | None = None,
        jitter: random.Random | None = None,
    ) -> None:
        self.store = store
        self.policy = policy or FetchPolicy()
        self.meter = meter or TrafficMeter()
        signal = Signal()
        self._lock = signal.lock
        self._dispatcher = Dispatcher(
            self.policy, signal=signal, url=store.url, meter=self.meter, jitter=jitter
        )
        self._scheduler = self._dispatcher.scheduler
        self._pid = os.getpid()
        end_at_exit(self)

    # -- bytes

    def fetch(
        self,
        ranges: Sequence[ObjectRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """Fetch ranges of objects; returns when all are delivered.

        deliver(number, answer): called once for each range (number: its place in `ranges`), on a
        fetch thread, in any order and several at a time. Its exception stops the rest and is
        raised here. It is never running any more when this returns or raises.
        urgent: False for a fill in the background, which leaves some connections to the others.

        Ranges are fetched as they are: merging near ones is the caller's. Raises FetchError (with
        .missing), ObjectChangedError, ClosedError, StalledError.
        """
        requests = (
            Request(
                number=number,
                uri=self.uri(one.path),
                run=partial(self._read, one),
                size_bytes=one.end - one.start,
                # A late range of a fill delays nobody, and is many bytes to ask for twice.
                may_hedge=urgent,
            )
            for number, one in enumerate(ranges)
        )
        self._run(deque(requests), deliver, urgent=urgent)

    def _read(self, one: ObjectRange) -> Answer:
        try:
            return one.read(self.store)
        except RequestError as error:
            if one.may_lack and error.kind == "missing":
                return ABSENT
            raise

    def whole(
        self, path: str, *, version: str | None = None, size_bytes: int | None = None
    ) -> Answer:
        """Fetch a small object, all of it. size_bytes: what it must have, else
        ObjectChangedError. Raises FetchError."""

        def read() -> Answer:
            answer = self.store.read(path, version=version, most_bytes=size_bytes)
            if size_bytes is not None and answer.object_bytes != size_bytes:
                raise RequestError(
                    "changed", f"it has {answer.object_bytes} bytes, wanted {size_bytes}"
                )
            return answer

        return self._one(read, path, size_bytes=size_bytes or 0)

    # -- names

    def info(self, path: str, *, limit_s: float | None = None) -> ObjectInfo | None:
        """Look an object up; None if it isn't there. limit_s: for all attempts, less than the
        policy's. Raises FetchError."""
        return self._one(lambda: self.store.info(path), path, limit_s=limit_s)

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """List the objects directly in a folder, and its folders by name. Raises FetchError."""
        return self._one(lambda: self.store.top(prefix), prefix)

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """List all objects below a folder, each once. Raises FetchError."""
        pages = ListingPages(self.store, prefix)
        while page := self._one(pages.next, prefix, may_hedge=False):
            yield from page

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises FetchError."""
        self._one(lambda: self.store.put(local, path), path, may_hedge=False)

    def uri(self, path: str) -> str:
        """An object's name in errors."""
        shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return f"{self.store.url.rstrip('/')}/{shown}" if shown else self.store.url

    # -- rates and connections

    def request_time(self) -> tuple[float, float]:
        """(mean, 99th percentile) seconds of recent requests for bytes; (0, 0) before the first."""
        with self._lock:
            return self._scheduler.hedging.times.summary()

    @property
    def in_flight(self) -> int:
        """Requests on their way now, of all callers."""
        return self._scheduler.budget.in_flight

    @property
    def fills_beside_urgent(self) -> int:
        """Connections of what isn't urgent while something is; may be set."""
        return self._scheduler.budget.fills_beside_urgent

    @fills_beside_urgent.setter
    def fills_beside_urgent(self, connections: int) -> None:
        self._scheduler.budget.fills_beside_urgent = connections

    @contextlib.contextmanager
    def room_for_fills(self, most: int) -> Iterator[int]:
        """How many requests that aren't urgent may be sent now, of the `most` that the caller has
        to send; the room is the caller's inside.

        To be asked before pieces are claimed: were the limit kept where requests are sent, a batch
        could wait for a claimed piece, and its fill for the batches to be done.
        """
        with self._lock:
            granted = self._scheduler.budget.grant(time.monotonic(), most)
        try:
            yield granted
        finally:
            with self._lock:
                self._scheduler.budget.revoke(granted)

    # -- the end

    def end(self) -> None:
        """End all waits with a ClosedError, and interrupt requests in flight where the store can:
        at once. Safe to call twice."""
        if os.getpid() != self._pid:  # a forked child: all this is its parent's
            return
        self._dispatcher.end()
        abort = getattr(self.store, "abort", None)
        if abort is not None:
            abort()

    def close(self) -> None:
        """End the threads and the store; who waits gets ClosedError. Safe to call twice.

        A request that can't be interrupted and hangs is not waited for: its thread ends by itself.
        """
        if os.getpid() != self._pid:
            return
        self.end()
        self._dispatcher.close()
        self.store.close()

    # -- one call

    def _one(
        self,
        run: Callable[[], T],
        path: str,
        *,
        size_bytes: int = 0,
        may_hedge: bool = True,
        limit_s: float | None = None,
    ) -> T:
        answers: list[T] = []
        request = Request(
            number=0, uri=self.uri(path), run=run, size_bytes=size_bytes, may_hedge=may_hedge
        )
        self._run(
            deque([request]),
            lambda _, answer: answers.append(answer),
            urgent=True,
            limit_s=limit_s,
        )
        return answers[0]

    def _run(
        self,
        requests: deque[Request],
        deliver: Callable[[int, Any], None],
        *,
        urgent: bool,
        limit_s: float | None = None,
    ) -> None:
        if os.getpid() != self._pid:
            raise FetchError(f"{self.store.url}: not fetched: {FORKED}.", uri=self.store.url)
        self._dispatcher.run(
            Call(
                deliver=deliver,
                urgent=urgent,
                unsent=requests,
                undelivered=len(requests),
                began_s=time.monotonic(),
                began_round=self._scheduler.health.rounds,
                limit_s=min(limit_s or math.inf, self.policy.retry_timeout_s),
            )
        )
