"""Decide how many requests may be in flight, and when the next one may be sent.

The limit follows the measured rates, a pause follows each failure, only a few requests probe a
remote that doesn't answer, and batches have priority: fills use the connections that batches leave.
All of it is arithmetic without a clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from penstock.cache.base import FetchPolicy


class ConnectionLimit:
    """Adapts how many requests may be in flight: K = 1.25 * (bytes/s) / (bytes a request) * E[T].

    count: the current K.

    By Little's law K is 1.25 times the mean number of requests in flight, so a consumer that needs
    less than the remote can deliver gets what it needs plus a quarter. But batches request in
    bursts, which the mean underestimates: K doesn't shrink while requests wait for a connection. A
    consumer that uses all connections would make K grow without limit, so a larger K is on trial
    for a period and stays if it increased the bytes a second. A throttled request halves K.
    """

    PERIOD_S = 0.25
    GAIN = 1.05
    """The least gain in bytes a second of a larger K; with less, the link is full."""
    HOLD = 20
    """Periods until the next trial after one without gain."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self.count = policy.start_connections
        self._began_s: float | None = None
        self._bytes = 0
        self._busy_s = 0.0
        self._done = 0
        self._throttled = False
        self._halved_s: float | None = None
        self._trial: tuple[int, float] | None = None
        self._hold = 0
        self._was_full = False
        # A pause must not reduce K below what the next burst needs.
        self._standing = max(
            policy.min_connections, min(policy.standing_connections, policy.start_connections)
        )

    def full(self) -> None:
        """Record that a request has to wait for a connection."""
        self._was_full = True

    def done(self, now_s: float, *, size_bytes: int, seconds: float) -> None:
        """Record a request that succeeded."""
        if self._began_s is None:
            self._began_s = now_s - seconds
        self._bytes += size_bytes
        self._busy_s += seconds
        self._done += 1
        if now_s - self._began_s >= self.PERIOD_S and self._done >= self.count:
            self._adapt(now_s - self._began_s)
            self._began_s, self._bytes, self._busy_s, self._done = now_s, 0, 0.0, 0
            self._throttled = False

    def throttled(self, now_s: float) -> None:
        """Record a throttled request: halve K, once for all requests throttled in one period."""
        if self._halved_s is None or now_s - self._halved_s >= self.PERIOD_S:
            self.count = max(self._policy.min_connections, self.count // 2)
            self._trial = None
            self._hold = self.HOLD
            self._halved_s = now_s
        self._throttled = True

    def _adapt(self, elapsed_s: float) -> None:
        rate = self._bytes / elapsed_s
        wanted = math.ceil(1.25 * self._busy_s / elapsed_s)
        was_full, self._was_full = self._was_full, False
        trial, self._trial = self._trial, None
        self._hold = max(0, self._hold - 1)
        if self._throttled:
            return
        if trial is not None and rate < self.GAIN * trial[1]:
            self.count, self._hold = trial[0], self.HOLD
        elif wanted > self.count:
            if not self._hold and self.count < self._policy.max_connections:
                self._trial = self.count, rate
                self.count = min(wanted, self._policy.max_connections)
        elif not was_full:
            # By an eighth at most, because a batch's burst follows every pause.
            least = max(self._standing, self.count - self.count // 8)
            self.count = min(self.count, max(wanted, least))


_THROTTLED_ATTEMPTS = 3
"""Added to the attempts of a throttled request: it needs 8 times the pause of a lost packet."""


def backoff_s(
    policy: FetchPolicy,
    attempts: int,
    jitter: random.Random,
    *,
    throttled: bool = False,
    retry_after_s: float | None = None,
) -> float:
    """Return the pause in seconds after `attempts` failed requests.

    retry_after_s: the pause that the server requested. The jitter is added to it, so that not all
    clients return at once."""
    power = min(attempts + (_THROTTLED_ATTEMPTS if throttled else 0), 64)
    pause = jitter.uniform(0, min(policy.backoff_cap_s, policy.backoff_base_s * 2.0**power))
    return pause + (retry_after_s or 0.0)


class Health:
    """Detects a remote that doesn't answer, by consecutive failures over all ranges.

    While it doesn't answer, only `probes` requests are in flight, with a shared pause after each
    failure; the first success ends this. rounds: the number of pauses since it stopped answering.
    """

    GONE_AFTER = 10
    """At a failure rate of 0.3, ten consecutive failures happen once in 170,000 requests."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self.rounds = 0
        self._next_s = 0.0
        self.last_success_s: float | None = None

    @property
    def is_gone(self) -> bool:
        """True if too many requests have failed in a row to be chance."""
        return self._failures >= self.GONE_AFTER

    def success(self, now_s: float) -> None:
        """Record an answer."""
        self._failures = self.rounds = 0
        self._next_s = 0.0
        self.last_success_s = now_s

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


_QUIET_S = 1.0
"""How long after the last urgent request fills may use all connections again."""


class ConnectionBudget:
    """Counts the connections of all callers and decides who may use another one.

    Not thread-safe: callers hold the fetcher's lock. limit: of all requests in flight.
    fills_beside_urgent: connections of fills while there are urgent requests; may be changed.
    """

    def __init__(self, policy: FetchPolicy, health: Health) -> None:
        self.limit = ConnectionLimit(policy)
        self.in_flight = 0
        self.fills_beside_urgent = policy.fills_beside_urgent
        self._fill_share = policy.fill_share
        self._health = health
        self._granted = 0  # requests granted to fills
        self._urgent_s = -math.inf  # when an urgent request was last sent

    def wait_s(self, now_s: float, *, urgent: bool) -> float:
        """Return the seconds until a request may be sent: 0 for now, inf until one ends."""
        limit = self.limit.count
        if not urgent:
            limit = max(1, int(limit * self._fill_share))
        if self.in_flight >= limit:
            if urgent:
                self.limit.full()
            return math.inf
        return self._health.may_start_s(now_s, self.in_flight)

    def take(self, now_s: float, *, urgent: bool) -> None:
        """Record that a request is sent."""
        self.in_flight += 1
        if urgent:
            self._urgent_s = now_s

    def give_back(self) -> None:
        """Record that an attempt has ended."""
        self.in_flight -= 1

    def grant(self, now_s: float, most: int) -> int:
        """Grant as many requests that aren't urgent as may be sent now, at most `most`; return the
        number granted. The grant lasts until `revoke`."""
        limit = int(self.limit.count * self._fill_share)
        if now_s < self._urgent_s + _QUIET_S:
            limit = min(limit, self.fills_beside_urgent)
        granted = max(0, min(limit - self._granted, most))
        self._granted += granted
        return granted

    def revoke(self, granted: int) -> None:
        """End a grant."""
        self._granted -= granted
