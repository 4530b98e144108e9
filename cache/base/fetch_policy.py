"""How requests to a remote are retried, hedged and limited: arithmetic, no threads and no clock.

`cache.fetch.fetcher` holds the lock, asks these and obeys. Times are seconds of one monotonic
clock that the caller reads.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    import random


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """Limits of the requests to one store.

    retry_timeout_s: from the first request of a range to its FetchError at the latest.
    max_attempts: requests for one range, hedges aside.
    backoff_base_s, backoff_cap_s: the pause before attempt n+1 is uniform in
        [0, min(cap, base * 2^n)] (full jitter); throttled requests count as three attempts more.
    first_contact_s: so long a host that has never answered may be unknown or refuse connections (it
        may just be starting); then that is the error.
    connect_timeout_s, read_timeout_s: a connection that isn't made, or brings nothing, for this
        long is a failed request.
    hedge_quantile, hedge_least, hedge_factor, hedge_floor_s: a range is asked for a second time
        when it takes longer than this quantile of the recent requests of a similar size, given
        at least `hedge_least` of them, and than `hedge_factor` medians, and than the floor.
    max_hedge_share: hedges over requests, plus one.
    range_bytes: large objects are fetched in ranges of this size. 8 MiB: throughput levels off at
        4 to 8 MiB a request.
    min_connections, start_connections, max_connections: requests in flight, of all callers;
        standing_connections: fewer than that only where the store throttles.
    fill_share: of the connections, for what isn't urgent; fills_beside_urgent: connections for that
        while urgent requests come, to begin with.
    probes: requests in flight while the remote answers nothing.
    """

    retry_timeout_s: float = 120.0
    max_attempts: int = 12
    backoff_base_s: float = 0.1
    backoff_cap_s: float = 10.0
    first_contact_s: float = 6.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 20.0
    hedge_quantile: float = 0.97
    hedge_least: int = 20
    hedge_factor: float = 3.0
    hedge_floor_s: float = 0.25
    max_hedge_share: float = 0.02
    range_bytes: int = 8 * 2**20
    min_connections: int = 8
    standing_connections: int = 32
    start_connections: int = 64
    max_connections: int = 96
    fill_share: float = 0.75
    fills_beside_urgent: int = 4
    probes: int = 2

    def __post_init__(self) -> None:
        for name in ("retry_timeout_s", "connect_timeout_s", "read_timeout_s", "range_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                got = getattr(self, name)
                raise ConfigError(f"{name.removesuffix('_s')}: got {got}, wanted more than 0.")
        if self.max_attempts < 1:
            raise ConfigError(f"max_attempts: got {self.max_attempts}, wanted at least 1.")
        if not 1 <= self.min_connections <= self.start_connections <= self.max_connections:
            raise ConfigError(
                "connections: wanted 1 <= min <= start <= max, got "
                f"{self.min_connections}, {self.start_connections}, {self.max_connections}."
            )


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


class RequestTimes:
    """Times of recent requests by size class (powers of two), for hedges and for look-ahead."""

    RECENT = 256
    REFRESH = 16
    """A class's quantile is worked out again after so many more requests: sorting costs 20 us."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._classes: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._late: dict[int, tuple[int, float]] = {}
        self._recent: deque[float] = deque(maxlen=self.RECENT)

    def add(self, size_bytes: int, seconds: float) -> None:
        """Note a request that succeeded."""
        name = size_bytes.bit_length()
        self._classes.setdefault(name, deque(maxlen=self.RECENT)).append(seconds)
        self._counts[name] = self._counts.get(name, 0) + 1
        if size_bytes:
            self._recent.append(seconds)

    def late_after_s(self, size_bytes: int) -> float | None:
        """How long a request of this size may take before it is hedged; None: too few seen."""
        name = size_bytes.bit_length()
        count = self._counts.get(name, 0)
        if count < self._policy.hedge_least:
            return None
        seen, late = self._late.get(name, (0, 0.0))
        if not seen or count - seen >= self.REFRESH:
            times = sorted(self._classes[name])
            late = max(
                quantile(times, self._policy.hedge_quantile),
                self._policy.hedge_factor * quantile(times, 0.5),
                self._policy.hedge_floor_s,
            )
            self._late[name] = count, late
        return late

    def summary(self) -> tuple[float, float]:
        """(mean, 99th percentile) of recent requests for bytes; (0.0, 0.0) before the first."""
        if not self._recent:
            return 0.0, 0.0
        return sum(self._recent) / len(self._recent), quantile(sorted(self._recent), 0.99)


def quantile(ordered: list[float], share: float) -> float:
    """The smallest of sorted values that at least `share` of them don't pass."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Connections:
    """How many requests may be in flight: K = 1.25 * (bytes/s) / (bytes a request) * E[T].

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
        self.limit = policy.start_connections
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
        """A request has to wait for one of these connections."""
        self._was_full = True

    def done(self, now_s: float, *, size_bytes: int, seconds: float) -> None:
        """A request succeeded."""
        if self._began_s is None:
            self._began_s = now_s - seconds
        self._bytes += size_bytes
        self._busy_s += seconds
        self._done += 1
        if now_s - self._began_s >= self.PERIOD_S and self._done >= self.limit:
            self._adapt(now_s - self._began_s)
            self._began_s, self._bytes, self._busy_s, self._done = now_s, 0, 0.0, 0
            self._throttled = False

    def throttled(self, now_s: float) -> None:
        """The remote said "slow down": that halves K, once for all requests of one moment."""
        if self._halved_s is None or now_s - self._halved_s >= self.PERIOD_S:
            self.limit = max(self._policy.min_connections, self.limit // 2)
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
            self.limit, self._hold = trial[0], self.HOLD
        elif wanted > self.limit:
            if not self._hold and self.limit < self._policy.max_connections:
                self._trial = self.limit, rate
                self.limit = min(wanted, self._policy.max_connections)
        elif not was_full:
            # Down by an eighth at most: a batch's burst follows every pause.
            least = max(self._standing, self.limit - self.limit // 8)
            self.limit = min(self.limit, max(wanted, least))


class Health:
    """Whether the remote answers at all, judged by failures in a row over all ranges.

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
        return self._failures >= self.GONE_AFTER

    def success(self, now_s: float) -> None:
        self._failures = self.rounds = 0
        self._next_s = 0.0
        self.last_success_s = now_s

    def failure(self, now_s: float, jitter: random.Random) -> None:
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
