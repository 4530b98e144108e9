"""Fetch bytes of a store's objects in parallel, with retries, hedges, limits and counts.

The caller's thread coordinates its call, and the fetcher's threads make the requests. So no manager
thread exists that could die or outlive its callers, and Ctrl-C interrupts the caller's wait. Every
wait has a limit.

The fetcher obeys Retry-After if a store reports it (`RequestError.retry_after_s`). It lists folders
in pages, so that a failure repeats a page and not the entire listing.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base import FORKED, Answer, FetchPolicy, RequestError, TrafficMeter
from penstock.cache.errors import ClosedError, FetchError, StalledError
from penstock.cache.fetch.scheduler import HEDGE_THREADS, Attempt, Call, Scheduler
from penstock.cache.threads import LONGEST_WAIT_S, STALL_TIMEOUT_S, Workers, end_at_exit

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base import Deliver, ObjectInfo, ObjectRange, Store


_CLOSE_S = 1.0
"""How long close() waits for the requests that it interrupted; others end by their own timeouts."""


_PAGE = 1000

T = TypeVar("T")


class Fetcher:
    """A client of one store, whose connections any number of threads share. Not across fork.

    policy: the limits. meter: counts the traffic. jitter: draws the pauses, for tests. It owns the
    store and the threads (named penstock-fetch, started when needed), which close() ends.
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
        self._lock = threading.Condition()  # protects the scheduler, and wakes waiting callers
        self._scheduler = Scheduler(self.policy, jitter=jitter, changed=self._changed)
        self._events = 0  # changes about which waiting callers were notified
        self._workers = Workers(self.policy.max_connections + HEDGE_THREADS, name="fetch")
        self._pid = os.getpid()
        end_at_exit(self)

    @property
    def reindex(self) -> str:
        """The command that builds the dataset's index again, for errors."""
        return self._scheduler.reindex

    @reindex.setter
    def reindex(self, command: str) -> None:
        self._scheduler.reindex = command

    # -- bytes

    def fetch(
        self, ranges: Sequence[ObjectRange], deliver: Deliver, *, urgent: bool = True
    ) -> None:
        """Fetch ranges of objects; return when all are delivered.

        deliver(number, answer): called once for each range (number: its position in `ranges`), on
        fetch threads, in any order and concurrently. If it raises an error, the call ends with that
        error. No delivery is running when this method returns or raises.
        urgent: False for a fill in the background, which leaves some connections to other calls.

        Neighbouring ranges aren't merged, which is the caller's task. Raises FetchError (with
        .missing), ObjectChangedError, ClosedError, StalledError.
        """
        with self._calling(deliver, ranges, urgent=urgent) as call:
            self._coordinate(call)

    @contextlib.contextmanager
    def fetching(
        self, ranges: Sequence[ObjectRange], deliver: Deliver, *, urgent: bool = True
    ) -> Iterator[Callable[[], None]]:
        """Fetch ranges as `fetch` does, while the caller's thread does other work in the with
        statement; the yielded function waits for the rest. No delivery is running after the
        statement."""
        with self._calling(deliver, ranges, urgent=urgent) as call:
            self._advance(call)
            yield partial(self._coordinate, call)

    def fetch_object(self, path: str, *, size_bytes: int | None = None) -> Answer:
        """Fetch all of a small object. size_bytes: its expected size, or None; another size raises
        ObjectChangedError. Raises FetchError."""
        read = partial(self.store.read, path, size_bytes=size_bytes)
        return self._one(read, path, size_bytes=size_bytes or 0)

    # -- names

    def info(self, path: str, *, limit_s: float | None = None) -> ObjectInfo | None:
        """Return the size and version of an object; None if it is missing. limit_s: the limit of
        all attempts, if it is below the policy's. Raises FetchError."""
        return self._one(lambda: self.store.info(path), path, limit_s=limit_s)

    def list_folder(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Return the objects directly in a folder, and the names of its subfolders. Raises
        FetchError."""
        return self._one(lambda: self.store.list_folder(prefix), prefix)

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects below a folder, each once. Raises FetchError."""
        seen: set[str] = set()
        left: Iterator[ObjectInfo] | None = None

        def next_page() -> list[ObjectInfo]:
            nonlocal left
            try:
                left = left or iter(self.store.walk(prefix))
                page = list(islice((info for info in left if info.path not in seen), _PAGE))
            except RequestError:
                left = None  # the next attempt begins again, without repeating objects
                raise
            seen.update(info.path for info in page)
            return page

        while page := self._one(next_page, prefix, may_hedge=False):
            yield from page

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises FetchError."""
        self._one(lambda: self.store.put(local, path), path, may_hedge=False)

    def uri(self, path: str) -> str:
        """Return the name of an object in errors."""
        shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return f"{self.store.url.rstrip('/')}/{shown}" if shown else self.store.url

    # -- rates and connections

    def request_time(self) -> tuple[float, float]:
        """Return (mean, 99th percentile) seconds of recent data requests; (0, 0) without any."""
        with self._lock:
            return self._scheduler.hedging.summary()

    def limit_fills(self, room: Callable[[int, int], int]) -> None:
        """Set the number of connections of fills while there are urgent requests: room(now, most),
        by the current number and the limit of all connections."""
        budget = self._scheduler.budget
        now, most = budget.fills_beside_urgent, self.policy.max_connections
        budget.fills_beside_urgent = room(now, most)

    @contextlib.contextmanager
    def reserve_fills(self, most: int) -> Iterator[int]:
        """Yield how many requests that aren't urgent, at most `most`, may be sent inside the with
        statement.

        Call it before claiming pieces: if the limit applied when requests are sent, a batch could
        wait for a claimed piece whose fill waits for the batches.
        """
        with self._lock:
            granted = self._scheduler.budget.grant(time.monotonic(), most)
        try:
            yield granted
        finally:
            with self._lock:
                self._scheduler.budget.granted -= granted

    # -- the end

    def end(self) -> None:
        """End all waits with a ClosedError at once, and interrupt requests in flight if the store
        can. Safe to call twice."""
        if os.getpid() != self._pid:  # a forked child owns none of this
            return
        with self._lock:
            self._scheduler.is_closed = True
            self._changed()
        self.store.close()

    def close(self) -> None:
        """End the threads and the store; waiting callers raise ClosedError. Safe to call twice.

        It doesn't wait for a hanging request that can't be interrupted: its thread ends by itself.
        """
        self.end()
        self._workers.close(timeout_s=_CLOSE_S)

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
        with self._calling(lambda _, answer: answers.append(answer), limit_s=limit_s) as call:
            call.add(self.uri(path), run, size_bytes=size_bytes, may_hedge=may_hedge)
            self._coordinate(call)
        return answers[0]

    @contextlib.contextmanager
    def _calling(
        self,
        deliver: Callable[[int, Any], None],
        ranges: Sequence[ObjectRange] = (),
        *,
        urgent: bool = True,
        limit_s: float | None = None,
    ) -> Iterator[Call]:
        """Begin a call for ranges, and end it after the with statement."""
        if os.getpid() != self._pid:
            raise FetchError(f"{self.store.url}: not fetched: {FORKED}.", uri=self.store.url)
        call = Call(
            deliver=deliver,
            urgent=urgent,
            began_s=time.monotonic(),
            began_round=self._scheduler.health.rounds,
            limit_s=min(limit_s or math.inf, self.policy.retry_timeout_s),
        )
        delivering = partial(self._delivering, call)
        for wanted in ranges:
            run = partial(wanted.read, self.store, delivering)
            size_bytes = wanted.end - wanted.start
            # A late range of a fill delays no batch, and is too many bytes to request twice.
            call.add(self.uri(wanted.path), run, size_bytes=size_bytes, may_hedge=urgent)
        try:
            yield call
        finally:
            self._leave(call)

    @contextlib.contextmanager
    def _delivering(self, call: Call) -> Iterator[None]:
        """Keep a call from ending during the with statement, which delivers bytes of a request in
        flight. Raises ClosedError if the call has ended."""
        with self._lock:
            if not call.is_open or call.error is not None:
                raise ClosedError(f"{self.store.url}: these ranges aren't wanted any more.")
            call.delivering += 1
        try:
            yield
        finally:
            with self._lock:
                call.delivering -= 1
                if not call.is_open:
                    self._changed()

    def _coordinate(self, call: Call) -> None:
        """Run a call on its caller's thread until its answers are delivered; raise its error."""
        while (found := self._advance(call)) is not None:
            events, wait_s = found
            with self._lock:
                if self._events == events:
                    self._lock.wait(min(wait_s, LONGEST_WAIT_S))

    def _advance(self, call: Call) -> tuple[int, float] | None:
        """Send the requests that a call may send now; return the number of changes so far and the
        seconds until the next decision, or None if all is delivered. Raises the call's error."""
        with self._lock:
            if self._scheduler.is_closed:
                raise ClosedError(f"{self.store.url}: closed while it was being read.")
            if call.error is not None:
                raise call.error
            if not call.undelivered:
                return None
            events = self._events
            chosen, wait_s = self._scheduler.choose(call, time.monotonic())
        self._submit(call, chosen)
        return events, wait_s

    def _changed(self) -> None:
        self._events += 1
        self._lock.notify_all()

    def _submit(self, call: Call, chosen: list[Attempt]) -> None:
        sent = 0
        try:
            for attempt in chosen:
                self._workers.submit(partial(self._work, call), attempt)
                sent += 1
        except BaseException:  # closed meanwhile, or Ctrl-C: the other attempts aren't in flight
            with self._lock:
                for attempt in chosen[sent:]:
                    self._scheduler.end(call, attempt)
            raise

    def _leave(self, call: Call) -> None:
        """End a call; after that none of its deliveries is running or begins."""
        with self._lock:
            self._scheduler.leave(call)
            done = self._lock.wait_for(lambda: not call.delivering, timeout=STALL_TIMEOUT_S)
        if not done:
            raise StalledError(
                f"{self.store.url}: the fetched bytes could not be stored for "
                f"{STALL_TIMEOUT_S:.0f} s. The local disk may hang: try to list the cache folder."
            )

    # -- a fetch thread

    def _work(self, call: Call, attempt: Attempt) -> None:
        """Run an attempt, and after it others that wait for a connection."""
        following: tuple[Call, Attempt] | None = (call, attempt)
        while following is not None:
            following = self._make(*following)

    def _make(self, call: Call, attempt: Attempt) -> tuple[Call, Attempt] | None:
        """Make one attempt and handle its result; return the next attempt for this thread."""
        began_s = time.monotonic()
        request = attempt.request
        again = request.attempts > 1 and not attempt.is_hedge
        self.meter.add(requests=1, retries=int(again), hedges=int(attempt.is_hedge))
        try:
            answer = request.run()
        except RequestError as failure:
            self.meter.add(failed=1, throttled=int(failure.kind == "throttled"))
            with self._lock:
                self._scheduler.failed(call, attempt, time.monotonic(), failure)
            return None
        # This isn't a failed request but a bug in a store: the caller's thread raises it.
        except BaseException as error:
            with self._lock:
                call.error = call.error or error
                self._scheduler.end(call, attempt)
            return None
        seconds = time.monotonic() - began_s
        size_bytes = answer.size_bytes if isinstance(answer, Answer) else 0
        self.meter.add(bytes_remote=size_bytes, request_s=seconds)
        with self._lock:
            is_first = self._scheduler.succeeded(
                call, attempt, time.monotonic(), size_bytes=size_bytes, seconds=seconds
            )
        if not is_first:
            return None
        raised: BaseException | None = None
        try:
            call.deliver(request.number, answer)
        except BaseException as error:  # the caller's thread raises it
            raised = error
        with self._lock:
            return self._scheduler.delivered(call, attempt, time.monotonic(), raised)
