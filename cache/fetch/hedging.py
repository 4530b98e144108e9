"""Which late requests are sent a second time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.fetch.request_times import RequestTimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.fetch.health import Health
    from penstock.cache.fetch.requests import Call, Request


class Hedging:
    """Finds requests that take much longer than others did, and keeps their hedges few.

    Not locked: the fetcher's lock is held around it. times: of the requests that succeeded.
    """

    def __init__(self, policy: FetchPolicy, health: Health) -> None:
        self.times = RequestTimes(policy)
        self._most_share = policy.max_hedge_share
        self._health = health
        self._requests = self._hedges = 0
        self._bytes = self._hedged_bytes = 0

    def sent(self, size_bytes: int) -> None:
        """Note that a request was sent that is no hedge."""
        self._requests += 1
        self._bytes += size_bytes

    def late(self, call: Call, now_s: float, *, most: int) -> Iterator[Request]:
        """Pick at most so many requests of a call to be sent again now; each counts as hedged."""
        for request in call.in_flight.values():
            if most <= 0 or not self._may_hedge:
                return
            late_s = self._late_after_s(request)
            if late_s is not None and now_s - request.last_s >= late_s:
                request.is_hedged = True
                self._requests += 1
                self._hedges += 1
                self._hedged_bytes += request.size_bytes
                most -= 1
                yield request

    def due_s(self, request: Request, now_s: float) -> float | None:
        """Seconds until a request in flight is late; None if it won't be hedged."""
        late_s = self._late_after_s(request)
        if late_s is None or not self._may_hedge:
            return None
        return request.last_s + late_s - now_s

    @property
    def _may_hedge(self) -> bool:
        # Both shares: late ranges are rather large ones, and over a link that is full all are late.
        share = self._most_share
        is_in_count = self._hedges <= share * self._requests
        return is_in_count and self._hedged_bytes <= share * self._bytes

    def _late_after_s(self, request: Request) -> float | None:
        if not request.may_hedge or request.is_hedged or self._health.is_gone:
            return None
        return self.times.late_after_s(request.size_bytes)
