"""Who may send a request now: batches come first, fills get the connections that they leave."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.cache.fetch.connection_limit import ConnectionLimit

if TYPE_CHECKING:
    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.fetch.health import Health

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
