"""Bytes of a store, in parallel: retried, hedged, limited and counted.

A call's own thread coordinates: it starts requests on the fetcher's threads, waits for the next
thing that can happen, and raises what went wrong. So there is no manager thread that could die or
outlive its callers, and Ctrl-C lands where the wait is. All callers share the connections. Every
wait has a limit.

Retry-After is honoured where a store can tell it (`RequestError.retry_after_s`).
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.base.counters import TrafficMeter
from penstock.cache.base.fetch_policy import (
    Connections,
    FetchPolicy,
    Health,
    RequestTimes,
    backoff_s,
)
from penstock.cache.base.store import Answer, ObjectInfo, RequestError, Store
from penstock.cache.errors import (
    ClosedError,
    FetchError,
    ObjectChangedError,
    PenstockError,
    StalledError,
)
from penstock.cache.outcomes import STALL_TIMEOUT_S
from penstock.cache.threads import Workers, end_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.fetch.object_range import ObjectRange

T = TypeVar("T")

_PAGE = 1000
_QUIET_S = 1.0
"""So long after an urgent request fills have all connections again."""
_LONGEST_WAIT_S = 1.0
"""A Ctrl-C that lands just before a wait begins is noticed only when the wait ends."""
_CLOSE_S = 1.0
"""So long close() waits for requests that it has cut; what hangs on is left to its own timeout."""
_HEDGE_THREADS = 8
"""Threads beside those of the connections, for hedges."""

FORKED = (
    "its connections belong to the process that opened them, and this is a forked child. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and make the dataset inside the worker'
)

_REMEDIES = {
    "transient": "Check that the server is up and the network, or raise retry_timeout in "
    "storage_options.",
    "unreachable": "Check the host and the port in the URL (or endpoint_url), and that the server "
    "is up.",
    "throttled": "The store asks for fewer requests: use larger shards, fewer jobs at a time, or "
    "raise retry_timeout in storage_options.",
    "missing": "Check the path for a typing error; if it was there, the dataset changed since it "
    "was indexed: run `penstock index` again.",
    "denied": "Check the credentials, the region and the endpoint in storage_options; a public "
    "bucket wants anon=True.",
    "changed": "It was replaced after it was indexed: run `penstock index` (or upload the pack) "
    "again, and don't write to a dataset in training.",
    "refused": "Trying again would not help.",
}


@dataclass(slots=True, kw_only=True, eq=False)
class _Request:
    """One thing to ask for, until an answer came. run: makes the request; size_bytes: expected."""

    number: int
    uri: str
    run: Callable[[], Any]
    size_bytes: int
    may_hedge: bool
    attempts: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    in_flight: int = 0
    is_hedged: bool = False
    is_done: bool = False


@dataclass(slots=True, eq=False)
class _Flight:
    """A request on its way. has_landed: it isn't any more."""

    request: _Request
    is_hedge: bool = False
    has_landed: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """A caller's requests. fresh: not begun; later: (when, number, request) to try again."""

    deliver: Callable[[int, Any], None]
    urgent: bool
    fresh: deque[_Request]
    left: int
    began_s: float
    began_round: int
    limit_s: float
    later: list[tuple[float, int, _Request]] = field(default_factory=list)
    flying: dict[int, _Request] = field(default_factory=dict)
    delivering: int = 0
    is_open: bool = True
    error: BaseException | None = None
    last_failure: RequestError | None = None


class Fetcher:
    """Requests to one store, for any number of threads.

    fills_beside_urgent: connections of what isn't urgent while something is; may be changed.
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
        self._jitter = jitter or random.Random()
        self._news = threading.Condition()
        self._events = 0
        self._in_flight = 0
        self.fills_beside_urgent = self.policy.fills_beside_urgent
        self._fills = 0  # requests that fills were granted
        self._urgent_s = -math.inf  # when an urgent request was last sent
        self._requests = 0
        self._hedges = 0
        self._times = RequestTimes(self.policy)
        self._connections = Connections(self.policy)
        self._health = Health(self.policy)
        self._threads = self.policy.max_connections + _HEDGE_THREADS
        self._pool = Workers(self._threads, name="fetch")
        self._is_closed = False
        self._waiting: set[_Call] = set()
        self._pid = os.getpid()
        end_at_exit(self)

    def fetch(
        self,
        spans: Sequence[ObjectRange],
        deliver: Callable[[int, Answer], None],
        *,
        urgent: bool = True,
    ) -> None:
        """Fetch spans; returns when all are delivered.

        deliver(number, answer): called once for each span (number: its place in `spans`), on a
        fetch thread, in any order and several at a time. Its exception stops the rest and is
        raised here. It is never running any more when this returns or raises.
        urgent: False for a fill in the background, which leaves some connections to the others.

        Spans are fetched as they are: merging near ones is the caller's. Raises FetchError (with
        .missing), ObjectChangedError, ClosedError, StalledError.
        """
        requests = (
            _Request(
                number=number,
                uri=self.uri(span.path),
                run=partial(
                    self.store.read, span.path, (span.start, span.end), version=span.version
                ),
                size_bytes=span.end - span.start,
                # A late range of a fill delays nobody, and is many bytes to ask for twice.
                may_hedge=urgent,
            )
            for number, span in enumerate(spans)
        )
        self._run(deque(requests), deliver, urgent=urgent)

    def whole(
        self, path: str, *, version: str | None = None, size_bytes: int | None = None
    ) -> Answer:
        """One small object, all of it. size_bytes: what it must have, else ObjectChangedError.
        Raises FetchError."""

        def read() -> Answer:
            answer = self.store.read(path, version=version, most_bytes=size_bytes)
            if size_bytes is not None and answer.object_bytes != size_bytes:
                raise RequestError(
                    "changed", f"it has {answer.object_bytes} bytes, wanted {size_bytes}"
                )
            return answer

        return self._one(read, path, size_bytes=size_bytes or 0)

    def info(self, path: str, *, limit_s: float | None = None) -> ObjectInfo | None:
        """What is known of an object; None if it isn't there. limit_s: for all attempts, less than
        the policy's. Raises FetchError."""
        return self._one(lambda: self.store.info(path), path, limit_s=limit_s)

    def top(self, prefix: str = "") -> tuple[list[ObjectInfo], list[str]]:
        """Objects directly in a folder, and names of its folders. Raises FetchError."""
        return self._one(lambda: self.store.top(prefix), prefix)

    def walk(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a folder, each once. Raises FetchError."""
        pages = _Pages(self.store, prefix)
        while page := self._one(pages.next, prefix, may_hedge=False):
            yield from page

    def put(self, local: str, path: str) -> None:
        """Upload a local file. Raises FetchError."""
        self._one(lambda: self.store.put(local, path), path, may_hedge=False)

    def request_time(self) -> tuple[float, float]:
        """(mean, 99th percentile) seconds of recent requests for bytes; (0, 0) before the first."""
        with self._news:
            return self._times.summary()

    @contextlib.contextmanager
    def room_for_fills(self) -> Iterator[int]:
        """How many requests that aren't urgent may be sent now; the room is the caller's inside.

        To be asked before pieces are claimed: were the limit kept where requests are sent, a batch
        could wait for a claimed piece, and its fill for the batches to be done.
        """
        with self._news:
            limit = int(self._connections.limit * self.policy.fill_share)
            if time.monotonic() < self._urgent_s + _QUIET_S:
                limit = min(limit, self.fills_beside_urgent)
            granted = max(0, limit - self._fills)
            self._fills += granted
        try:
            yield granted
        finally:
            with self._news:
                self._fills -= granted

    def end(self) -> None:
        """Who waits gets ClosedError, and requests in flight are cut where the store can: at once.
        Safe to call twice."""
        if os.getpid() != self._pid:  # a forked child: all this is its parent's
            return
        with self._news:
            self._is_closed = True
            self._changed()
        cut = getattr(self.store, "cut", None)
        if cut is not None:
            cut()

    def close(self) -> None:
        """End the threads and the store; who waits gets ClosedError. Safe to call twice.

        A request that can't be cut and hangs is not waited for: its thread ends by itself.
        """
        if os.getpid() != self._pid:
            return
        self.end()
        self._pool.close(timeout_s=_CLOSE_S)
        self.store.close()

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
        request = _Request(
            number=0,
            uri=self.uri(path),
            run=run,
            size_bytes=size_bytes,
            may_hedge=may_hedge,
        )
        self._run(
            deque([request]),
            lambda _, answer: answers.append(answer),
            urgent=True,
            limit_s=limit_s,
        )
        return answers[0]

    def uri(self, path: str) -> str:
        """An object's name in errors."""
        shown = path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return f"{self.store.url.rstrip('/')}/{shown}" if shown else self.store.url

    # -- the caller's thread ---------------------------------------------------------------------

    def _run(
        self,
        requests: deque[_Request],
        deliver: Callable[[int, Any], None],
        *,
        urgent: bool,
        limit_s: float | None = None,
    ) -> None:
        if os.getpid() != self._pid:
            raise FetchError(f"{self.store.url}: not fetched: {FORKED}.", uri=self.store.url)
        call = _Call(
            deliver=deliver,
            urgent=urgent,
            fresh=requests,
            left=len(requests),
            began_s=time.monotonic(),
            began_round=self._health.rounds,
            limit_s=min(limit_s or math.inf, self.policy.retry_timeout_s),
        )
        try:
            self._coordinate(call)
        finally:
            self._leave(call)

    def _coordinate(self, call: _Call) -> None:
        while True:
            with self._news:
                if self._is_closed:
                    raise ClosedError(f"{self.store.url}: closed while it was read.")
                if call.error is not None:
                    raise call.error
                if not call.left:
                    return
                seen = self._events
                starting, wait_s = self._choose(call, time.monotonic())
            self._submit(call, starting)
            with self._news:
                if self._events == seen:
                    self._news.wait(min(wait_s, _LONGEST_WAIT_S))

    def _submit(self, call: _Call, starting: list[_Flight]) -> None:
        sent = 0
        try:
            for flight in starting:
                self._pool.submit(partial(self._fly, call), flight)
                sent += 1
        except BaseException:  # closed meanwhile, or Ctrl-C: the rest is not in flight
            with self._news:
                for flight in starting[sent:]:
                    self._land(call, flight)
            raise

    def _leave(self, call: _Call) -> None:
        """No deliver runs or begins any more after this."""
        with self._news:
            call.is_open = False
            self._waiting.discard(call)
            done = self._news.wait_for(lambda: not call.delivering, timeout=STALL_TIMEOUT_S)
        if not done:
            raise StalledError(
                f"{self.store.url}: what was fetched could not be put away for "
                f"{STALL_TIMEOUT_S:.0f} s. The local disk hangs; look at it with `ls`."
            )

    def _choose(self, call: _Call, now_s: float) -> tuple[list[_Flight], float]:
        """Requests to send now; seconds until the next look."""
        self._give_up_late(call, now_s)
        self._waiting.discard(call)
        starting: list[_Flight] = []
        if call.error is not None:
            return starting, 0.0
        wait_s = self._moved_s(call) + call.limit_s - now_s
        if not call.fresh and not call.later:
            wait_s = call.limit_s
        while call.fresh or (call.later and call.later[0][0] <= now_s):
            pause_s = self._room_s(call, now_s)
            if pause_s > 0:
                wait_s = min(wait_s, pause_s)
                self._waiting.add(call)
                break
            again = bool(call.later) and call.later[0][0] <= now_s
            request = heapq.heappop(call.later)[2] if again else call.fresh.popleft()
            self._start(call, request, now_s)
            starting.append(_Flight(request))
        starting += [_Flight(request, True) for request in self._late_ones(call, now_s)]
        if call.later:
            wait_s = min(wait_s, call.later[0][0] - now_s)
        wait_s = min(wait_s, self._contact_s(call, now_s) or wait_s)
        wait_s = min([wait_s, *self._deadlines_s(call, now_s)])
        return starting, max(0.001, wait_s)

    def _room_s(self, call: _Call, now_s: float) -> float:
        """Seconds until this call may start a request; 0 now, inf when one in flight is done."""
        limit = self._connections.limit
        if not call.urgent:
            limit = max(1, int(limit * self.policy.fill_share))
        if self._in_flight >= limit:
            if call.urgent:
                self._connections.full()
            return math.inf
        return self._health.may_start_s(now_s, self._in_flight)

    def _start(self, call: _Call, request: _Request, now_s: float) -> None:
        request.attempts += 1
        request.in_flight += 1
        request.last_s = now_s
        request.first_s = request.first_s or now_s
        request.is_hedged = False
        call.flying[request.number] = request
        if call.urgent:
            self._urgent_s = now_s
        self._in_flight += 1
        self._requests += 1

    def _late_ones(self, call: _Call, now_s: float) -> list[_Request]:
        """Requests to send a second time."""
        hedges: list[_Request] = []
        for request in call.flying.values():
            allowed = self.policy.max_hedge_share * self._requests + 1
            if self._hedges + 1 > allowed or self._in_flight >= self._threads:
                break
            late_s = self._late_after_s(request)
            if late_s is not None and now_s - request.last_s >= late_s:
                request.is_hedged = True
                request.in_flight += 1
                self._in_flight += 1
                self._requests += 1
                self._hedges += 1
                hedges.append(request)
        return hedges

    def _late_after_s(self, request: _Request) -> float | None:
        if not request.may_hedge or request.is_hedged or self._health.is_gone:
            return None
        return self._times.late_after_s(request.size_bytes)

    def _deadlines_s(self, call: _Call, now_s: float) -> Iterator[float]:
        """Seconds until each request in flight is late or has to be given up."""
        for request in call.flying.values():
            yield request.first_s + call.limit_s - now_s
            late_s = self._late_after_s(request)
            if late_s is not None and self._hedges <= self.policy.max_hedge_share * self._requests:
                yield request.last_s + late_s - now_s

    def _give_up_late(self, call: _Call, now_s: float) -> None:
        """Sets the call's error if a request, or the whole call, had its time."""
        limit_s = call.limit_s
        for request in (*call.flying.values(), *(entry[2] for entry in call.later)):
            if now_s - request.first_s >= limit_s:
                call.error = self._error(request, call.last_failure, now_s)
                return
        if now_s - self._moved_s(call) >= limit_s and (
            waiting := call.fresh or [e[2] for e in call.later]
        ):
            call.error = self._error(waiting[0], call.last_failure, now_s)
            return
        left_s = self._contact_s(call, now_s)
        tried = [*call.flying.values(), *(entry[2] for entry in call.later)]
        if left_s is not None and left_s <= 0 and tried:
            call.error = self._error(tried[0], call.last_failure, now_s)

    def _contact_s(self, call: _Call, now_s: float) -> float | None:
        """Seconds that a host has left which nobody listens at, and which never answered: it is
        rather misspelt than down. None where that isn't so."""
        failure = call.last_failure
        if failure is None or failure.kind != "unreachable" or self._health.last_success_s:
            return None
        return call.began_s + self.policy.first_contact_s - now_s

    def _moved_s(self, call: _Call) -> float:
        """When the remote last answered this fetcher, or the call began."""
        return max(call.began_s, self._health.last_success_s or 0.0)

    def _error(
        self, request: _Request, failure: RequestError | None, now_s: float
    ) -> PenstockError:
        failure = failure or RequestError("transient", "no answer came")
        tries = f"{request.attempts} attempt{'s' if request.attempts != 1 else ''}"
        took_s = now_s - request.first_s if request.first_s else 0.0
        kind = ObjectChangedError if failure.kind == "changed" else FetchError
        return kind(
            f"{request.uri}: not fetched after {tries} in {took_s:.1f} s "
            f"({failure.kind}: {failure}). {failure.remedy or _REMEDIES[failure.kind]}",
            uri=request.uri,
            missing=failure.kind == "missing",
        )

    # -- a fetch thread --------------------------------------------------------------------------

    def _fly(self, call: _Call, flight: _Flight) -> None:
        """A request, and others of the call behind it: waking the caller for each of many small
        ones would cost more than the requests do."""
        following: _Flight | None = flight
        while following is not None:
            following = self._fly_once(call, following)

    def _fly_once(self, call: _Call, flight: _Flight) -> _Flight | None:
        """One request, and what becomes of it; the next one for this thread."""
        began_s = time.monotonic()
        request = flight.request
        again = request.attempts > 1 and not flight.is_hedge
        self.meter.add(requests=1, retries=int(again), hedges=int(flight.is_hedge))
        answer, failure = None, None
        try:
            answer = request.run()
        except RequestError as error:
            failure = error
        # Not a failed request but a mistake in a store: it surfaces in the caller's thread.
        except BaseException as error:
            with self._news:
                call.error = call.error or error
                self._land(call, flight)
            return None
        if failure is not None:
            self._failed(call, flight, failure)
            return None
        return self._succeeded(call, flight, answer, time.monotonic() - began_s)

    def _succeeded(
        self, call: _Call, flight: _Flight, answer: Any, seconds: float
    ) -> _Flight | None:
        request = flight.request
        size_bytes = memoryview(answer.data).nbytes if isinstance(answer, Answer) else 0
        self.meter.add(bytes_remote=size_bytes)
        self.meter.request(seconds)
        with self._news:
            now_s = time.monotonic()
            self._health.success(now_s)
            self._times.add(size_bytes, seconds)
            self._connections.done(now_s, size_bytes=size_bytes, seconds=seconds)
            is_first = call.is_open and not request.is_done and call.error is None
            request.is_done = True
            call.delivering += is_first
            if not is_first:
                self._land(call, flight)
                return None
        error: BaseException | None = None
        try:
            call.deliver(request.number, answer)
        except BaseException as raised:  # raised again in the caller's thread
            error = raised
        with self._news:
            call.delivering -= 1
            call.left -= 1
            call.error = call.error or error
            self._land(call, flight, tell=False)
            return self._following(call)

    def _following(self, call: _Call) -> _Flight | None:
        """The call's next request if nobody else has to decide or to know anything. The lock is
        held."""
        now_s = time.monotonic()
        others_wait = len(self._waiting) > (call in self._waiting)
        may_go_on = call.is_open and call.error is None and not self._is_closed
        flight = None
        if may_go_on and call.fresh and not others_wait and not self._room_s(call, now_s):
            flight = _Flight(call.fresh.popleft())
            self._start(call, flight.request, now_s)
        # More room than this one needs: K has grown, and the caller starts more.
        if flight is None or call.later or (call.fresh and not self._room_s(call, now_s)):
            self._changed()
        return flight

    def _failed(self, call: _Call, flight: _Flight, failure: RequestError) -> None:
        request = flight.request
        throttled = failure.kind == "throttled"
        self.meter.add(failed=1, throttled=int(throttled))
        with self._news:
            now_s = time.monotonic()
            final = failure.kind not in ("transient", "unreachable", "throttled")
            if final:
                self._health.success(now_s)  # it answers, if only with a no
            else:
                self._health.failure(now_s, self._jitter)
            if throttled:
                self._connections.throttled(now_s)
            self._land(call, flight)
            if request.is_done or not call.is_open or call.error is not None:
                return
            call.last_failure = failure
            if final or self._is_enough(call, request):
                call.error = self._error(request, failure, now_s)
            elif not request.in_flight:  # else its twin may still bring it
                pause_s = backoff_s(
                    self.policy,
                    request.attempts,
                    self._jitter,
                    throttled=throttled,
                    retry_after_s=failure.retry_after_s,
                )
                heapq.heappush(call.later, (now_s + pause_s, request.number, request))

    def _is_enough(self, call: _Call, request: _Request) -> bool:
        """Whether a failed request was tried as often as it may be, or all are failing."""
        call.began_round = min(call.began_round, self._health.rounds)
        tries = max(
            0 if request.in_flight else request.attempts, self._health.rounds - call.began_round
        )
        return tries >= self.policy.max_attempts

    def _land(self, call: _Call, flight: _Flight, *, tell: bool = True) -> None:
        """A request is no longer in flight. The lock is held. Safe to call twice: Ctrl-C may come
        between handing a flight to its thread and noting that."""
        if flight.has_landed:
            return
        flight.has_landed = True
        request = flight.request
        self._in_flight -= 1
        request.in_flight -= 1
        if request.is_done or not request.in_flight:
            call.flying.pop(request.number, None)
        if tell:
            self._changed()

    def _changed(self) -> None:
        self._events += 1
        self._news.notify_all()


class _Pages:
    """A listing in pages, begun again after a failure without repeating what was handed out."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix
        self._left: Iterator[ObjectInfo] | None = None
        self._seen: set[str] = set()

    def next(self) -> list[ObjectInfo]:
        """The next objects; none at the end."""
        try:
            if self._left is None:
                self._left = iter(self._store.walk(self._prefix))
            unseen = (info for info in self._left if info.path not in self._seen)
            page = list(islice(unseen, _PAGE))
        except RequestError:
            self._left = None
            raise
        self._seen.update(info.path for info in page)
        return page
