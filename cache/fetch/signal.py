"""The lock of a fetcher, and how callers that wait hear that there is something to decide."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Signal:
    """Tells waiting callers of events under a lock. Hold the lock around every method."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.events = 0

    def changed(self) -> None:
        """Wake who waits: there is something to decide."""
        self.events += 1
        self.lock.notify_all()

    def wait(self, seen: int, *, timeout_s: float) -> None:
        """Wait for an event behind those that were seen, so long at most."""
        if self.events == seen:
            self.lock.wait(timeout_s)

    def wait_for(self, done: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until something is so; False if the time was over first."""
        return self.lock.wait_for(done, timeout=timeout_s)
