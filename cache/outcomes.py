"""What becomes of calls on other threads, and a Ctrl-C that hurts none of them.

A Ctrl-C may land behind any call of the main thread, those inside Python's own Condition, Event,
Semaphore and Future included: its lock then stays taken, and who has something to tell it waits for
ever. So nothing here holds a lock: what several threads decide on is decided in one call in C, and
they wait for queues, which are in C whole.
"""

from __future__ import annotations

import contextlib
import queue
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
U = TypeVar("U")

# Longer than any honest read of one batch; a stuck NFS mount or disk is reported, not waited for.
STALL_TIMEOUT_S = 300.0

LONGEST_WAIT_S = 0.5
"""A Ctrl-C that lands just before a wait begins is noticed only when the wait ends."""


class Settled(Generic[T]):
    """A value that the first who comes settles, for all, in one call in C."""

    def __init__(self) -> None:
        self._values: dict[None, T] = {}

    def settle(self, value: T) -> T:
        """The value that holds: this one, or another's that came first."""
        return self._values.setdefault(None, value)

    @property
    def value(self) -> T | None:
        """The value; None while it isn't settled."""
        return self._values.get(None)


class Outcome(Generic[T]):
    """What becomes of a call on another thread. Any thread may ask, wait and cancel."""

    def __init__(self) -> None:
        # Annotated: to call a class with its type in brackets takes 4 us.
        self._fate: Settled[Literal["runs", "cancelled"]] = Settled()
        self._has_ended = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, fn: Callable[[U], T], item: U) -> None:
        """Make the call, here and now, unless it was cancelled. For one thread, once."""
        if self._fate.settle("runs") != "runs":
            return
        try:
            self._results.append(fn(item))
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
            self._end()
            del self, fn, item  # a traceback holds this frame, and that the error
        else:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._news.put(None)

    def cancel(self) -> bool:
        """Keep the call from being made; False if it runs or has run."""
        is_cancelled = self._fate.settle("cancelled") == "cancelled"
        if is_cancelled:
            self._news.put(None)
        return is_cancelled

    def done(self) -> bool:
        """Whether result() would not wait."""
        return self._has_ended or self._fate.value == "cancelled"

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done, in waits that Ctrl-C ends; False: it is not, in that time."""
        deadline_s = time.monotonic() + timeout_s
        while not self.done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self._news.get(timeout=min(left_s, LONGEST_WAIT_S))
                self._news.put(None)  # for whoever else waits; lost to a Ctrl-C, they look soon
        return True

    def result(self, timeout: float = STALL_TIMEOUT_S) -> T:
        """What the call returned, or raise what it raised; CancelledError if it was cancelled.
        timeout: seconds, then TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError(f"No result after {timeout:g} s.")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # as in run()
        if not self._results:
            raise CancelledError
        return self._results[0]
