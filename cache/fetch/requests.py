"""The requests that are under way to a store: of one caller, one by one, and attempt by attempt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    from penstock.cache.base.store import RequestError


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A request asks a store for one thing, as often as it takes.

    run: makes the request once; size_bytes: of the answer, as expected.
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
    """An attempt is one request on its way, for the first time, again or as a hedge."""

    request: Request
    is_hedge: bool = False
    has_ended: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A call is what one caller asks for: some requests, and where their answers go.

    unsent: not begun; retries: (when, number, request) to try again; undelivered: how many answers
    are still to come.
    """

    deliver: Callable[[int, Any], None]
    urgent: bool
    unsent: deque[Request]
    undelivered: int
    began_s: float
    began_round: int
    limit_s: float
    retries: list[tuple[float, int, Request]] = field(default_factory=list)
    in_flight: dict[int, Request] = field(default_factory=dict)
    delivering: int = 0
    is_open: bool = True
    error: BaseException | None = None
    last_failure: RequestError | None = None

    def begun(self) -> Iterator[Request]:
        """The requests that were sent at least once and aren't done."""
        yield from self.in_flight.values()
        for _, _, request in self.retries:
            yield request

    def is_due(self, now_s: float) -> bool:
        """Whether a request waits to be sent, for the first time or again."""
        return bool(self.unsent) or self.is_due_again(now_s)

    def is_due_again(self, now_s: float) -> bool:
        """Whether one that failed has had its pause."""
        return bool(self.retries) and self.retries[0][0] <= now_s
