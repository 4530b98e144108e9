"""What is under way to a store: a caller's requests, each request, and each attempt at one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    from penstock.cache.base.store import RequestError


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One thing to ask for, until an answer came. run: makes the request; size_bytes: expected."""

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
    """A request on its way. has_ended: it isn't any more."""

    request: Request
    is_hedge: bool = False
    has_ended: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """A caller's requests. fresh: not begun; later: (when, number, request) to try again."""

    deliver: Callable[[int, Any], None]
    urgent: bool
    fresh: deque[Request]
    left: int
    began_s: float
    began_round: int
    limit_s: float
    later: list[tuple[float, int, Request]] = field(default_factory=list)
    flying: dict[int, Request] = field(default_factory=dict)
    delivering: int = 0
    is_open: bool = True
    error: BaseException | None = None
    last_failure: RequestError | None = None

    def begun(self) -> Iterator[Request]:
        """Those that were sent at least once and aren't done."""
        yield from self.flying.values()
        for _, _, request in self.later:
            yield request

    def is_due(self, now_s: float) -> bool:
        """Whether a request waits to be sent, for the first time or again."""
        return bool(self.fresh) or self.is_due_again(now_s)

    def is_due_again(self, now_s: float) -> bool:
        """Whether one that failed has had its pause."""
        return bool(self.later) and self.later[0][0] <= now_s
