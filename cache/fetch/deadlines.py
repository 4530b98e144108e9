"""When a request has had its time: alone, with its whole call, or at a host that nobody knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.base.fetch_policy import FetchPolicy
    from penstock.cache.fetch.health import Health
    from penstock.cache.fetch.requests import Call, Request


class Deadlines:
    """Says which request a call has waited for long enough, and when to look again."""

    def __init__(self, policy: FetchPolicy, health: Health) -> None:
        self._first_contact_s = policy.first_contact_s
        self._health = health

    def passed(self, call: Call, now_s: float) -> Request | None:
        """Find the request that a call fails with, as it or the whole call has had its time."""
        for request in call.begun():
            if now_s - request.first_s >= call.limit_s:
                return request
        if now_s - self._moved_s(call) >= call.limit_s and (
            waiting := call.unsent or [again for _, _, again in call.retries]
        ):
            return waiting[0]
        contact_s = self._contact_s(call, now_s)
        if contact_s is not None and contact_s <= 0:
            return next(call.begun(), None)
        return None

    def next_s(self, call: Call, now_s: float) -> Iterator[float]:
        """Give the seconds until each of a call's deadlines."""
        if call.unsent or call.retries:
            yield self._moved_s(call) + call.limit_s - now_s
        else:
            yield call.limit_s
        if contact_s := self._contact_s(call, now_s):
            yield contact_s
        for request in call.in_flight.values():
            yield request.first_s + call.limit_s - now_s

    def _contact_s(self, call: Call, now_s: float) -> float | None:
        """Seconds that a host has left which nobody listens at, and which never answered: it is
        rather misspelt than down. None where that isn't so."""
        failure = call.last_failure
        if failure is None or failure.kind != "unreachable" or self._health.last_success_s:
            return None
        return call.began_s + self._first_contact_s - now_s

    def _moved_s(self, call: Call) -> float:
        """When the remote last answered this fetcher, or the call began."""
        return max(call.began_s, self._health.last_success_s or 0.0)
