"""Whether the remote answers at all: arithmetic, no clock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.cache.fetch.backoff import backoff_s

if TYPE_CHECKING:
    import random

    from penstock.cache.base.fetch_policy import FetchPolicy


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
