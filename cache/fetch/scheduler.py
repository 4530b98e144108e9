"""What to send next, and what becomes of what came back: decisions without threads, lock or clock.

Times are seconds of one monotonic clock that the caller reads.
"""

from __future__ import annotations

import heapq
import math
import random
from typing import TYPE_CHECKING

from penstock.cache.fetch.backoff import backoff_s
from penstock.cache.fetch.connection_budget import ConnectionBudget
from penstock.cache.fetch.deadlines import Deadlines
from penstock.cache.fetch.failures import fetch_error
from penstock.cache.fetch.health import Health
from penstock.cache.fetch.hedging import Hedging
from penstock.cache.fetch.requests import Attempt

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.base.store import RequestError
    from penstock.cache.fetch.requests import Call, Request

HEDGE_THREADS = 8
"""Attempts beside those of the connections, for hedges."""


class Scheduler:
    """Decides for all calls of a fetcher what is sent, repeated, hedged and given up.

    Not locked: the fetcher's lock is held around every method. changed: called when a caller that
    waits has something to decide. jitter: of the pauses.
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
        self.is_closed = False
        self._deadlines = Deadlines(policy, self.health)
        self._jitter = jitter or random.Random()
        self._waiting: set[Call] = set()  # for a connection
        self._most_in_flight = policy.max_connections + HEDGE_THREADS
        self._changed = changed

    # -- what to send

    def choose(self, call: Call, now_s: float) -> tuple[list[Attempt], float]:
        """Choose the attempts to make now: (them, seconds until the next look). Sets the call's
        error if it has had its time."""
        late = self._deadlines.passed(call, now_s)
        if late is not None:
            call.error = fetch_error(late, call.last_failure, now_s)
        self._waiting.discard(call)
        chosen: list[Attempt] = []
        if call.error is not None:
            return chosen, 0.0
        wait_s = call.limit_s
        while call.is_due(now_s):
            first = self._first_in_line(now_s)
            is_behind = first is not None and first.began_s < call.began_s
            pause_s = math.inf if is_behind else self._wait_s(call, now_s)
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
            self._changed()  # who was behind this one may have looked before it took its turn
        chosen += self._hedges(call, now_s)
        return chosen, self._next_look_s(call, now_s, wait_s)

    def _begin(self, call: Call, request: Request, now_s: float) -> Attempt:
        request.attempts += 1
        request.in_flight += 1
        request.last_s = now_s
        request.first_s = request.first_s or now_s
        request.is_hedged = False
        call.in_flight[request.number] = request
        self.budget.take(now_s, urgent=call.urgent)
        self.hedging.sent(request.size_bytes)
        return Attempt(request)

    def _hedges(self, call: Call, now_s: float) -> list[Attempt]:
        room = self._most_in_flight - self.budget.in_flight
        hedges: list[Attempt] = []
        for request in self.hedging.late(call, now_s, most=room):
            request.in_flight += 1
            self.budget.take(now_s, urgent=False)
            hedges.append(Attempt(request, is_hedge=True))
        return hedges

    def _next_look_s(self, call: Call, now_s: float, wait_s: float) -> float:
        looks = [wait_s, *self._deadlines.next_s(call, now_s)]
        if call.retries:
            looks.append(call.retries[0][0] - now_s)
        for request in call.in_flight.values():
            due_s = self.hedging.due_s(request, now_s)
            if due_s is not None:
                looks.append(due_s)
        return max(0.001, min(looks))

    def leave(self, call: Call) -> None:
        """Begin nothing more for a call."""
        call.is_open = False
        self._waiting.discard(call)
        if self._waiting:
            self._changed()

    # -- what became of an attempt

    def succeeded(
        self, call: Call, attempt: Attempt, now_s: float, *, size_bytes: int, seconds: float
    ) -> bool:
        """Note an answer; whether it is to be delivered, then `delivered` comes next."""
        self.health.success(now_s)
        self.hedging.times.add(size_bytes, seconds)
        self.budget.limit.done(now_s, size_bytes=size_bytes, seconds=seconds)
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
        """Note a delivery; the next attempt for its thread, with the call that it is of. error: of
        the delivery."""
        call.delivering -= 1
        call.undelivered -= 1
        call.error = call.error or error
        self._end(call, attempt)
        following = self._following(now_s)
        # Whoever has to decide or to know something is woken: waking all for each of many small
        # requests would cost more than these do.
        is_over = not call.undelivered or call.error is not None or not call.is_open
        if following is None or is_over or call.retries or self._first_in_line(now_s):
            self._changed()
        return following

    def _following(self, now_s: float) -> tuple[Call, Attempt] | None:
        """The request that gets the connection that is free now."""
        call = None if self.is_closed else self._first_in_line(now_s)
        # A caller alone looks after what has to be repeated, and after its own end.
        if call is None or call.error is not None or not call.unsent or call.is_due_again(now_s):
            return None
        attempt = self._begin(call, call.unsent.popleft(), now_s)
        if not call.unsent:
            self._waiting.discard(call)
        return call, attempt

    def _first_in_line(self, now_s: float) -> Call | None:
        """Of the calls that wait and may send now the one that came first: calls that share the
        connections would all take as long as all of them together, and training waits for one."""
        may_send = (call for call in self._waiting if not self._wait_s(call, now_s))
        return min(may_send, key=lambda call: call.began_s, default=None)

    def _wait_s(self, call: Call, now_s: float) -> float:
        return self.budget.wait_s(now_s, urgent=call.urgent)

    def failed(self, call: Call, attempt: Attempt, now_s: float, failure: RequestError) -> None:
        """Try again later, or give the call its error."""
        throttled = failure.kind == "throttled"
        final = failure.kind not in ("transient", "unreachable", "throttled")
        if final:
            self.health.success(now_s)  # it answers, if only with a no
        else:
            self.health.failure(now_s, self._jitter)
        if throttled:
            self.budget.limit.throttled(now_s)
        self.end(call, attempt)
        request = attempt.request
        if request.is_done or not call.is_open or call.error is not None:
            return
        call.last_failure = failure
        if final or self._is_enough(call, request):
            call.error = fetch_error(request, failure, now_s)
        elif not request.in_flight:  # else its twin may still bring it
            pause_s = backoff_s(
                self.policy,
                request.attempts,
                self._jitter,
                throttled=throttled,
                retry_after_s=failure.retry_after_s,
            )
            heapq.heappush(call.retries, (now_s + pause_s, request.number, request))

    def _is_enough(self, call: Call, request: Request) -> bool:
        """Whether a failed request was tried as often as it may be, or all are failing."""
        call.began_round = min(call.began_round, self.health.rounds)
        tries = max(
            0 if request.in_flight else request.attempts, self.health.rounds - call.began_round
        )
        return tries >= self.policy.max_attempts

    def end(self, call: Call, attempt: Attempt) -> None:
        """Note that an attempt is no longer in flight. Safe to call twice: Ctrl-C may come between
        handing it to its thread and noting that."""
        if self._end(call, attempt):
            self._changed()

    def _end(self, call: Call, attempt: Attempt) -> bool:
        if attempt.has_ended:
            return False
        attempt.has_ended = True
        request = attempt.request
        self.budget.give_back()
        request.in_flight -= 1
        if request.is_done or not request.in_flight:
            call.in_flight.pop(request.number, None)
        return True
