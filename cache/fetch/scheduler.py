"""Decide which request is sent next, repeated, hedged or given up, without threads, lock or clock.

A call of one caller has several requests, and each request may have several attempts. Times are
seconds of one monotonic clock that the caller reads. A request that takes longer than others of its
size is sent a second time. A request becomes a FetchError that names the remedy if its time limit
or its call's has passed, or if its host has never answered.

The number of requests in flight follows the measured rates, and each failure is followed by a
pause. Only a few requests probe a remote that doesn't answer. Batches have priority: fills use the
connections that batches leave.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cache.base import FetchPolicy, RequestError
from penstock.cache.errors import FetchError, ObjectChangedError, PenstockError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_THROTTLED_ATTEMPTS = 3
"""Added to the attempts of a throttled request: it needs 8 times the pause of a lost packet."""


def backoff_s(policy: FetchPolicy, attempts: int, jitter: random.Random) -> float:
    """Return the pause in seconds after `attempts` failed requests."""
    longest_s = policy.backoff_base_s * 2.0 ** min(attempts, 64)
    return jitter.uniform(0, min(policy.backoff_cap_s, longest_s))


class Health:
    """The consecutive failures of all ranges, which show that the remote doesn't answer.

    While it doesn't answer, only `probes` requests are in flight, with a shared pause after each
    failure; the first success ends this. rounds: the number of pauses since it stopped answering.
    """

    GONE_AFTER = 10
    """At a failure rate of 0.3, ten consecutive failures happen once in 170,000 requests."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._failures = self.rounds = 0
        self._next_s = 0.0
        self.last_success_s: float | None = None

    @property
    def is_gone(self) -> bool:
        """True if too many requests have failed in a row to be chance."""
        return self._failures >= self.GONE_AFTER

    def success(self, now_s: float) -> None:
        """Record an answer."""
        self._failures = self.rounds = 0
        self._next_s, self.last_success_s = 0.0, now_s

    def failure(self, now_s: float, jitter: random.Random) -> None:
        """Record a request that got no answer. jitter: for the pause after it."""
        self._failures += 1
        # Of many simultaneous failures, only one lengthens the pause.
        if self.is_gone and now_s >= self._next_s:
            self.rounds += 1
            self._next_s = now_s + backoff_s(self._policy, self.rounds, jitter)

    def may_start_s(self, now_s: float, in_flight: int) -> float:
        """Return the seconds until another request may start; inf until one in flight ends."""
        if not self.is_gone:
            return 0.0
        if in_flight >= self._policy.probes:
            return math.inf
        return max(0.0, self._next_s - now_s)


class ConnectionBudget:
    """The connections of all callers, and the decision which caller may use another one.

    count: the number of requests that may be in flight. While nearly all connections are busy, a
    number that is a quarter larger is on trial for a period, and stays if it increased the bytes a
    second: on a full link, more connections only slow each other down. A throttled request halves
    the number. fills_beside_urgent: the number of connections of fills while there are urgent
    requests; it may be changed. granted: the requests granted to fills. Not thread-safe: callers
    hold the fetcher's lock.
    """

    PERIOD_S = 0.25
    BUSY = 0.8
    """The mean share of busy connections above which more of them may help."""
    GAIN = 1.05
    """The least gain in bytes a second of a larger number; with less, the link is full."""
    HOLD = 20
    """Periods until the next trial after one without gain, or after a throttled request."""
    QUIET_S = 1.0
    """How long after the last urgent request fills may use all connections again."""

    def __init__(self, policy: FetchPolicy, health: Health) -> None:
        self.count, self.fills_beside_urgent = policy.start_connections, policy.fills_beside_urgent
        self._policy, self._health = policy, health
        self.in_flight = self.granted = 0
        self._urgent_s = self._halved_s = -math.inf  # when one was last sent, or throttled
        self._began_s: float | None = None
        self._bytes = self._done = self._hold = 0
        self._busy_s = 0.0
        self._trial: tuple[int, float] | None = None

    def wait_s(self, now_s: float, *, urgent: bool) -> float:
        """Return the seconds until a request may be sent: 0 for now, inf until one ends."""
        limit = self.count if urgent else max(1, int(self.count * self._policy.fill_share))
        if self.in_flight >= limit:
            return math.inf
        return self._health.may_start_s(now_s, self.in_flight)

    def acquire(self, now_s: float, *, urgent: bool) -> None:
        """Record that an attempt is sent."""
        self.in_flight += 1
        if urgent:
            self._urgent_s = now_s

    def grant(self, now_s: float, most: int) -> int:
        """Grant as many requests that aren't urgent as may be sent now, at most `most`; return the
        number granted. The caller subtracts it from `granted` at the end."""
        limit = int(self.count * self._policy.fill_share)
        if now_s < self._urgent_s + self.QUIET_S:
            limit = min(limit, self.fills_beside_urgent)
        granted = max(0, min(limit - self.granted, most))
        self.granted += granted
        return granted

    def succeeded(self, now_s: float, *, size_bytes: int, seconds: float) -> None:
        """Record a request that succeeded; adapt the number of connections once a period."""
        if self._began_s is None:
            self._began_s = now_s - seconds
        self._bytes += size_bytes
        self._busy_s += seconds
        self._done += 1
        elapsed_s = now_s - self._began_s
        if elapsed_s < self.PERIOD_S or self._done < self.count:
            return
        rate, trial, self._trial = self._bytes / elapsed_s, self._trial, None
        self._hold = max(0, self._hold - 1)
        if trial is not None and rate < self.GAIN * trial[1]:
            self.count, self._hold = trial[0], self.HOLD
        elif self._busy_s > self.BUSY * self.count * elapsed_s and not self._hold:
            self._trial = self.count, rate
            self.count = min(self.count + self.count // 4 + 1, self._policy.max_connections)
        self._began_s, self._bytes, self._busy_s, self._done = now_s, 0, 0.0, 0

    def throttled(self, now_s: float) -> None:
        """Record a throttled request: halve the number, once for all of one period."""
        if now_s >= self._halved_s + self.PERIOD_S:
            self.count = max(self._policy.min_connections, self.count // 2)
            self._trial, self._hold, self._halved_s = None, self.HOLD, now_s


@dataclass(slots=True, eq=False)
class StoreRequest:
    """A request to a store, for which several attempts may be made.

    run: makes one attempt. size_bytes: the expected size of the answer. first_s, last_s: the times
    of the first and the last attempt. in_flight: the number of attempts in flight.
    """

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
class Attempt:
    """One attempt of a request: the first, a retry or a hedge."""

    request: StoreRequest
    is_hedge: bool = False
    has_ended: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """The requests of one caller, and the function that receives their answers.

    unsent: requests that haven't begun. retries: a heap of (time, number, request) to try again.
    undelivered: the number of outstanding answers. in_flight: the requests with attempts in flight,
    by number. delivering: the number of deliveries in progress.
    """

    deliver: Callable[[int, Any], None]
    urgent: bool
    began_s: float
    began_round: int
    limit_s: float
    unsent: deque[StoreRequest] = field(default_factory=deque)
    undelivered: int = 0
    retries: list[tuple[float, int, StoreRequest]] = field(default_factory=list)
    in_flight: dict[int, StoreRequest] = field(default_factory=dict)
    delivering: int = 0
    is_open: bool = True
    error: BaseException | None = None
    last_failure: RequestError | None = None

    def add(self, uri: str, run: Callable[[], Any], *, size_bytes: int, may_hedge: bool) -> None:
        """Add a request, before the call begins; see StoreRequest."""
        number = self.undelivered
        self.unsent.append(StoreRequest(number, uri, run, size_bytes, may_hedge))
        self.undelivered += 1

    def begun(self) -> Iterator[StoreRequest]:
        """Yield the requests that were sent at least once and aren't done."""
        yield from self.in_flight.values()
        for _, _, request in self.retries:
            yield request

    def is_due_again(self, now_s: float) -> bool:
        """Return True if the pause of a failed request has passed."""
        return bool(self.retries) and self.retries[0][0] <= now_s


_REMEDIES = {
    "transient": "Check the server and the network, or raise retry_timeout in storage_options.",
    "unreachable": "Check the host and the port in the URL (or endpoint_url), and that the server "
    "is running.",
    "throttled": "The store asks for fewer requests: use larger shards, fewer jobs at a time, or "
    "raise retry_timeout in storage_options.",
    "missing": "Check the path for a typing error; if the object existed, the dataset changed "
    "after it was indexed: run `{reindex}` again.",
    "denied": "Check the credentials, the region and the endpoint in storage_options; a public "
    "bucket needs anon=True. Without permission to list, a missing object gives the same answer: "
    "check the path, too.",
    "changed": "It was replaced after it was indexed: run `{reindex}` (or upload the pack) "
    "again, and don't write to a dataset while jobs read it.",
    "refused": "Another attempt would not help.",
}


def fetch_error(
    call: Call, request: StoreRequest, failure: RequestError | None, now_s: float, *, reindex: str
) -> PenstockError:
    """Return the FetchError (or ObjectChangedError) of a request that is given up.

    failure: the last one of its call; None if the call only took too long. reindex: the command
    that builds the dataset's index again.
    """
    failure = failure or RequestError("transient", "no answer came")
    took = f"after {request.attempts} attempt{'s' if request.attempts != 1 else ''} in "
    took += f"{now_s - request.first_s:.1f} s"
    if not request.attempts:
        waited_s = now_s - call.began_s
        took = f"in {waited_s:.1f} s, because the server didn't answer the requests before it"
    kind = ObjectChangedError if failure.kind == "changed" else FetchError
    remedy = failure.remedy or _REMEDIES[failure.kind].replace("{reindex}", reindex)
    return kind(
        f"{request.uri}: not fetched {took} ({failure.kind}: {failure}). {remedy}",
        uri=request.uri,
        missing=failure.kind == "missing",
    )


def quantile(ordered: list[float], share: float) -> float:
    """Return the smallest of sorted values that at least `share` of them don't exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Hedging:
    """The choice of requests to send a second time because they take much longer than recent ones
    of their size (by powers of two). Not thread-safe: callers hold the fetcher's lock.
    """

    RECENT = 256
    REFRESH = 16
    """The percentile is computed again after this many requests, because sorting takes 20 us."""

    def __init__(self, policy: FetchPolicy, health: Health) -> None:
        self._policy, self._health = policy, health
        self._times: dict[int, deque[float]] = {}
        self._counts: Counter[int] = Counter()
        self._late: dict[int, tuple[int, float]] = {}
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._requests = self._hedges = 0
        self._bytes = self._hedged_bytes = 0

    def succeeded(self, size_bytes: int, seconds: float) -> None:
        """Record the time of a request that succeeded."""
        name = size_bytes.bit_length()
        self._times.setdefault(name, deque(maxlen=self.RECENT)).append(seconds)
        self._counts[name] += 1
        if size_bytes:
            self._recent.append(seconds)

    def late_after_s(self, size_bytes: int) -> float | None:
        """Return after how many seconds a request of this size is late; None with too few data."""
        name, policy = size_bytes.bit_length(), self._policy
        count = self._counts[name]
        if count < policy.hedge_least:
            return None
        seen, late_s = self._late.get(name, (0, 0.0))
        if not seen or count - seen >= self.REFRESH:
            ordered = sorted(self._times[name])
            late_s = max(
                quantile(ordered, policy.hedge_quantile),
                policy.hedge_factor * quantile(ordered, 0.5),
                policy.hedge_floor_s,
            )
            self._late[name] = count, late_s
        return late_s

    def summary(self) -> tuple[float, float]:
        """Return (mean, 99th percentile) of recent data requests; (0.0, 0.0) without any."""
        if not self._recent:
            return 0.0, 0.0
        return sum(self._recent) / len(self._recent), quantile(sorted(self._recent), 0.99)

    def sent(self, size_bytes: int) -> None:
        """Record that a request was sent, other than a hedge."""
        self._requests += 1
        self._bytes += size_bytes

    def late(self, call: Call, now_s: float, *, most: int) -> Iterator[StoreRequest]:
        """Yield at most `most` requests of a call to send a second time; mark them as hedged."""
        for request in call.in_flight.values():
            due_s = self.due_s(request)
            if most > 0 and due_s is not None and now_s >= due_s:
                request.is_hedged = True
                self._requests += 1
                self._hedges += 1
                self._hedged_bytes += request.size_bytes
                most -= 1
                yield request

    def due_s(self, request: StoreRequest) -> float | None:
        """Return the time at which a request in flight is late; None if it won't be hedged."""
        if not request.may_hedge or request.is_hedged or self._health.is_gone:
            return None
        # Both shares: late ranges are often large, and on a full link all ranges are late.
        share = self._policy.max_hedge_share
        if self._hedges > share * self._requests or self._hedged_bytes > share * self._bytes:
            return None
        late_s = self.late_after_s(request.size_bytes)
        return None if late_s is None else request.last_s + late_s


HEDGE_THREADS = 8
"""The number of attempts for hedges in addition to the connections."""


class Scheduler:
    """The decisions about all calls of a fetcher: which requests to send, repeat, hedge or give up.

    changed: called when waiting callers have to decide again. jitter: draws the pauses. Not
    thread-safe: callers hold the fetcher's lock.
    """

    def __init__(
        self,
        policy: FetchPolicy,
        *,
        jitter: random.Random | None = None,
        changed: Callable[[], None],
    ) -> None:
        self.policy = policy
        self.health = Health(policy)
        self.budget = ConnectionBudget(policy, self.health)
        self.hedging = Hedging(policy, self.health)
        self.is_closed, self.reindex = False, "penstock index"
        self._jitter = jitter or random.Random()
        self._waiting: set[Call] = set()  # for a connection
        self._most_in_flight = policy.max_connections + HEDGE_THREADS
        self._changed = changed

    # -- what to send

    def choose(self, call: Call, now_s: float) -> tuple[list[Attempt], float]:
        """Return (the attempts to make now, the seconds until the next decision). Set the call's
        error if its time limit has passed."""
        late = next((request for due_s, request in self._deadlines(call) if due_s <= now_s), None)
        if late is not None:
            call.error = fetch_error(call, late, call.last_failure, now_s, reindex=self.reindex)
        self._waiting.discard(call)
        chosen: list[Attempt] = []
        if call.error is not None:
            return chosen, 0.0
        wait_s = call.limit_s
        while call.unsent or call.is_due_again(now_s):
            first = self._first_in_line(now_s)
            is_behind = first is not None and first.began_s < call.began_s
            pause_s = math.inf if is_behind else self.budget.wait_s(now_s, urgent=call.urgent)
            if pause_s > 0:
                wait_s = min(wait_s, pause_s)
                self._waiting.add(call)
                break
            if call.is_due_again(now_s):
                request = heapq.heappop(call.retries)[2]
            else:
                request = call.unsent.popleft()
            chosen.append(self._begin(call, request, now_s))
        if chosen and self._first_in_line(now_s) is not None:
            self._changed()  # later calls may have decided before this one's turn
        most = self._most_in_flight - self.budget.in_flight
        chosen += [
            self._sent(Attempt(request, is_hedge=True), now_s, urgent=False)
            for request in self.hedging.late(call, now_s, most=most)
        ]
        return chosen, self._next_look_s(call, now_s, wait_s)

    def _begin(self, call: Call, request: StoreRequest, now_s: float) -> Attempt:
        request.attempts += 1
        request.last_s = now_s
        request.first_s = request.first_s or now_s
        request.is_hedged = False
        call.in_flight[request.number] = request
        self.hedging.sent(request.size_bytes)
        return self._sent(Attempt(request), now_s, urgent=call.urgent)

    def _sent(self, attempt: Attempt, now_s: float, *, urgent: bool) -> Attempt:
        attempt.request.in_flight += 1
        self.budget.acquire(now_s, urgent=urgent)
        return attempt

    def _next_look_s(self, call: Call, now_s: float, wait_s: float) -> float:
        looks = [now_s + wait_s, *(due_s for due_s, _ in self._deadlines(call))]
        if call.retries:
            looks.append(call.retries[0][0])
        hedges = (self.hedging.due_s(request) for request in call.in_flight.values())
        looks += [due_s for due_s in hedges if due_s is not None]
        return max(0.001, min(looks) - now_s)

    def _deadlines(self, call: Call) -> Iterator[tuple[float, StoreRequest]]:
        """Yield the time limits of a call, each with the request that fails then."""
        began, answered_s = list(call.begun()), self.health.last_success_s
        for request in began:
            yield request.first_s + call.limit_s, request
        if waiting := call.unsent or [again for _, _, again in call.retries]:
            yield max(call.began_s, answered_s or 0.0) + call.limit_s, waiting[0]
        # A host that refuses connections and never answered: its name is probably misspelt.
        failure = call.last_failure
        if began and failure is not None and failure.kind == "unreachable" and not answered_s:
            yield call.began_s + self.policy.first_contact_s, began[0]

    def leave(self, call: Call) -> None:
        """Start no more attempts of a call."""
        call.is_open = False
        self._waiting.discard(call)
        if self._waiting:
            self._changed()

    # -- results of attempts

    def succeeded(
        self, call: Call, attempt: Attempt, now_s: float, *, size_bytes: int, seconds: float
    ) -> bool:
        """Record an answer; return True if the caller must deliver it and then call `delivered`."""
        self.health.success(now_s)
        self.hedging.succeeded(size_bytes, seconds)
        self.budget.succeeded(now_s, size_bytes=size_bytes, seconds=seconds)
        request = attempt.request
        is_first = call.is_open and not request.is_done and call.error is None
        request.is_done = True
        call.delivering += is_first
        if not is_first:
            self.end(call, attempt)
        return is_first

    def delivered(
        self, call: Call, attempt: Attempt, now_s: float, error: BaseException | None
    ) -> tuple[Call, Attempt] | None:
        """Record a delivery; return the next attempt for its thread with its call, or None. error:
        the error that the delivery raised, or None."""
        call.delivering -= 1
        call.undelivered -= 1
        call.error = call.error or error
        self._end(call, attempt)
        following = self._following(now_s)
        # Wake callers only if they have to decide something: waking all after each of many small
        # requests would cost more than the requests.
        is_over = not call.undelivered or call.error is not None or not call.is_open
        if following is None or is_over or call.retries or self._first_in_line(now_s):
            self._changed()
        return following

    def _following(self, now_s: float) -> tuple[Call, Attempt] | None:
        """Start the request that gets the connection that is now free."""
        call = None if self.is_closed else self._first_in_line(now_s)
        # Only the caller's thread handles retries and the end of its call.
        if call is None or call.error is not None or not call.unsent or call.is_due_again(now_s):
            return None
        attempt = self._begin(call, call.unsent.popleft(), now_s)
        if not call.unsent:
            self._waiting.discard(call)
        return call, attempt

    def _first_in_line(self, now_s: float) -> Call | None:
        """Return the oldest of the calls that wait and may send now.

        If calls shared the connections equally, each would take as long as all together, and
        training waits for one of them."""
        wait_s = self.budget.wait_s
        may_send = (call for call in self._waiting if not wait_s(now_s, urgent=call.urgent))
        return min(may_send, key=lambda call: call.began_s, default=None)

    def failed(self, call: Call, attempt: Attempt, now_s: float, failure: RequestError) -> None:
        """Record a failure: schedule a retry, or set the call's error."""
        throttled = failure.kind == "throttled"
        final = failure.kind not in ("transient", "unreachable", "throttled")
        if final:
            self.health.success(now_s)  # a refusal is an answer
        else:
            self.health.failure(now_s, self._jitter)
        if throttled:
            self.budget.throttled(now_s)
        self.end(call, attempt)
        request = attempt.request
        if request.is_done or not call.is_open or call.error is not None:
            return
        call.last_failure = failure
        if final or self._is_enough(call, request):
            call.error = fetch_error(call, request, failure, now_s, reindex=self.reindex)
        elif not request.in_flight:  # else its hedge may still succeed
            attempts = request.attempts + _THROTTLED_ATTEMPTS * throttled
            # The jitter is added to the server's pause, so that not all clients return at once.
            asked_s = failure.retry_after_s or 0.0
            pause_s = asked_s + backoff_s(self.policy, attempts, self._jitter)
            heapq.heappush(call.retries, (now_s + pause_s, request.number, request))

    def _is_enough(self, call: Call, request: StoreRequest) -> bool:
        """Return True if a failed request has used all its attempts, or all requests fail."""
        call.began_round = min(call.began_round, self.health.rounds)
        attempts = 0 if request.in_flight else request.attempts
        return max(attempts, self.health.rounds - call.began_round) >= self.policy.max_attempts

    def end(self, call: Call, attempt: Attempt) -> None:
        """Record that an attempt is no longer in flight. Safe to call twice, because a Ctrl-C may
        come between submitting it to its thread and recording that."""
        if self._end(call, attempt):
            self._changed()

    def _end(self, call: Call, attempt: Attempt) -> bool:
        if attempt.has_ended:
            return False
        attempt.has_ended = True
        request = attempt.request
        self.budget.in_flight -= 1
        request.in_flight -= 1
        if request.is_done or not request.in_flight:
            call.in_flight.pop(request.number, None)
        return True
