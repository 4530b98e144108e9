"""Decide how many requests may be in flight, and when the next one may be sent.

The limit follows the measured rates, a pause follows each failure, few requests probe a remote that
answers nothing, and batches come first: fills get the connections that they leave. All of it is
arithmetic, without a clock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from penstock.cache.base import FetchPolicy


class ConnectionLimit:
    """Adapts how many requests may be in flight: K = 1.25 * (bytes/s) / (bytes a request) * E[T].

    count: K, as it is now.

    By Little's law that is 1.25 times what was in flight on average, so a consumer that takes
    less than the remote can give gets what it needs and a quarter more. But batches come in bursts,
    whose mean says too little: K doesn't shrink while requests have had to wait for it. A consumer
    that takes all would grow K without end; so a larger K is on trial for a period, and stays if it
    brought more bytes a second. A throttled moment halves K.
    """

    PERIOD_S = 0.25
    GAIN = 1.05
    """What growing must bring; otherwise the link is full and more requests only wait longer."""
    HOLD = 20
    """Periods until the next trial after one that brought nothing."""

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
        # A burst after a pause mustn't find that the pause has cost it its connections.
        self._standing = max(
            policy.min_connections, min(policy.standing_connections, policy.start_connections)
        )

    def full(self) -> None:
        """Note that a request has to wait for one of these connections."""
        self._was_full = True

    def done(self, now_s: float, *, size_bytes: int, seconds: float) -> None:
        """Note a request that succeeded."""
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
        """Note that the remote said "slow down": K is halved, once for all requests of a moment."""
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
            # Down by an eighth at most: a batch's burst follows every pause.
            least = max(self._standing, self.count - self.count // 8)
            self.count = min(self.count, max(wanted, least))


_THROTTLED_ATTEMPTS = 3
"""A store that says "slow down" wants more than a packet that got lost: 8 times the pause."""


def backoff_s(
    policy: FetchPolicy,
    attempts: int,
    jitter: random.Random,
    *,
    throttled: bool = False,
    retry_after_s: float | None = None,
) -> float:
    """The pause after `attempts` failed requests. retry_after_s: what the server asked for; the
    pause is never shorter, and the jitter comes on top, so that not all come back at once."""
    power = min(attempts + (_THROTTLED_ATTEMPTS if throttled else 0), 64)
    pause = jitter.uniform(0, min(policy.backoff_cap_s, policy.backoff_base_s * 2.0**power))
    return pause + (retry_after_s or 0.0)


class Health:
    """Judges whether the remote answers at all, by failures in a row over all ranges.

    While it doesn't, few requests go out (`probes`), with a pause after each failure that all
    share; the first success opens the way again. rounds: pauses since it went.
    """

    GONE_AFTER = 10
    """At a failure rate of 0.3, ten in a row come by chance once in 170,000 requests."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self.rounds = 0
        self._next_s = 0.0
        self.last_success_s: float | None = None

    @property
    def is_gone(self) -> bool:
        """Whether so many have failed that it can't be chance."""
        return self._failures >= self.GONE_AFTER

    def success(self, now_s: float) -> None:
        """Note an answer."""
        self._failures = self.rounds = 0
        self._next_s = 0.0
        self.last_success_s = now_s

    def failure(self, now_s: float, jitter: random.Random) -> None:
        """Note a request that got no answer. jitter: of the pause behind it."""
        self._failures += 1
        # Of many that fail at one moment, one makes the pause longer.
        if self.is_gone and now_s >= self._next_s:
            self.rounds += 1
            self._next_s = now_s + backoff_s(self._policy, self.rounds, jitter)

    def may_start_s(self, now_s: float, in_flight: int) -> float:
        """Seconds until another request may start; inf: not before one in flight is done."""
        if not self.is_gone:
            return 0.0
        if in_flight >= self._policy.probes:
            return math.inf
        return max(0.0, self._next_s - now_s)


_QUIET_S = 1.0
"""So long after an urgent request fills have all connections again."""


class ConnectionBudget:
    """Counts the connections of all callers and says who may use another one.

    Not locked: the fetcher's lock is held around it. limit: of all that is in flight.
    fills_beside_urgent: connections of what isn't urgent while something is; may be changed.
    """

    def __init__(self, policy: FetchPolicy, health: Health) -> None:
        self.limit = ConnectionLimit(policy)
        self.in_flight = 0
        self.fills_beside_urgent = policy.fills_beside_urgent
        self._fill_share = policy.fill_share
        self._health = health
        self._granted = 0  # requests that fills were granted
        self._urgent_s = -math.inf  # when an urgent request was last sent

    def wait_s(self, now_s: float, *, urgent: bool) -> float:
        """Seconds until a request may be sent; 0 now, inf when one in flight is done."""
        limit = self.limit.count
        if not urgent:
            limit = max(1, int(limit * self._fill_share))
        if self.in_flight >= limit:
            if urgent:
                self.limit.full()
            return math.inf
        return self._health.may_start_s(now_s, self.in_flight)

    def take(self, now_s: float, *, urgent: bool) -> None:
        """Note that a request is sent."""
        self.in_flight += 1
        if urgent:
            self._urgent_s = now_s

    def give_back(self) -> None:
        """Note that an attempt has ended."""
        self.in_flight -= 1

    def grant(self, now_s: float, most: int) -> int:
        """Grant requests that aren't urgent, as many as may be sent now and `most` of them, until
        `revoke`."""
        limit = int(self.limit.count * self._fill_share)
        if now_s < self._urgent_s + _QUIET_S:
            limit = min(limit, self.fills_beside_urgent)
        granted = max(0, min(limit - self._granted, most))
        self._granted += granted
        return granted

    def revoke(self, granted: int) -> None:
        """Take back what was granted."""
        self._granted -= granted
