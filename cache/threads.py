"""All threads of Penstock are started here.

`Workers` is a small named pool that is owned, closed, and empties itself at interpreter exit
(concurrent.futures joins its threads there, and nothing here waits for a consumer, so an unclosed
loader can't hang the exit). `ordered` walks a known future: the consumer's own pull submits work,
so no feeder thread exists that could block on a full queue.
"""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from cache.errors import ClosedError, StalledError
from cache.forks import check_process

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

T = TypeVar("T")
U = TypeVar("U")

NAME_PREFIX = "penstock-"

# Longer than any honest read of one batch; a stuck NFS mount or disk is reported, not waited for.
STALL_TIMEOUT_S = 300.0


class Workers:
    """A pool of named threads. Closing cancels what has not started and waits for what has."""

    def __init__(self, count: int, *, name: str) -> None:
        self._pool = futures.ThreadPoolExecutor(count, thread_name_prefix=NAME_PREFIX + name)
        self._closed = False
        self._pid = os.getpid()
        self._started: weakref.WeakSet[futures.Future[Any]] = weakref.WeakSet()

    def submit(self, fn: Callable[[T], U], item: T) -> futures.Future[U]:
        """Run fn(item) on a thread. Raises ClosedError after close(), ForkedError in a child."""
        check_process(self._pid, "This pool of threads")
        if self._closed:
            raise ClosedError("These workers are closed; make a new loader.")
        future = self._pool.submit(fn, item)
        self._started.add(future)
        return future

    def close(self, *, timeout_s: float | None = None) -> None:
        """Safe to call twice. timeout_s: wait no longer for what has started; it ends by itself.
        In a forked child there is nothing to wait for."""
        self._closed = True
        if os.getpid() != self._pid:
            return
        self._pool.shutdown(wait=timeout_s is None, cancel_futures=True)
        if timeout_s is not None:
            running = [future for future in list(self._started) if not future.cancelled()]
            if not futures.wait(running, timeout=timeout_s).not_done:
                self._pool.shutdown(wait=True)


class Ordered(Generic[T, U]):
    """fn(item) in the order of items, at most `ahead` in flight. See `ordered`."""

    def __init__(
        self,
        fn: Callable[[T], U],
        items: Iterable[T],
        *,
        pool: Workers,
        ahead: int,
        timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {ahead}.")
        self._fn = fn
        self._items = iter(items)
        self._pool = pool
        self.ahead = ahead  # may be changed on the way
        self._timeout_s = timeout_s
        self._in_flight: deque[futures.Future[U]] = deque()
        self._closed = False
        self._pid = os.getpid()

    def __iter__(self) -> Iterator[U]:
        return self

    def fill(self) -> None:
        """Submit work until `ahead` results are in flight or the items end; nothing once closed."""
        while not self._closed and len(self._in_flight) < self.ahead:
            try:
                item = next(self._items)
            except StopIteration:
                return
            self._in_flight.append(self._pool.submit(self._fn, item))

    def ready(self) -> bool:
        """Whether pop() would not wait."""
        return not self._in_flight or self._in_flight[0].done()

    def ready_share(self) -> float:
        """Of what is in flight, how much could be popped without a wait; 1.0 for nothing."""
        count = 0
        for future in self._in_flight:
            if not future.done():
                break
            count += 1
        return count / len(self._in_flight) if self._in_flight else 1.0

    def __next__(self) -> U:
        self.fill()
        return self.pop()

    def pop(self) -> U:
        """The next result of what is in flight; submits nothing. StopIteration if nothing is."""
        if not self._in_flight:
            raise StopIteration
        check_process(self._pid, "This walk")
        future = self._in_flight.popleft()
        try:
            return future.result(timeout=self._timeout_s)
        except futures.TimeoutError as error:
            if future.done():  # the work itself raised a TimeoutError: that is the better message
                raise
            future.cancel()
            raise StalledError(
                f"Nothing arrived for {self._timeout_s:.0f} s from {self._fn!r}. The disk or the "
                "network mount under the dataset may hang; look at it with `ls`, or raise timeout=."
            ) from error

    def close(self, *, timeout_s: float | None = None) -> None:
        """Cancel what has not started, wait for what has, forget the results. timeout_s: wait no
        longer than that; what still runs ends by itself. A pop() that waits on another thread ends
        with what it waited for, or with CancelledError. In a forked child nothing is waited for."""
        self._closed = True
        if os.getpid() != self._pid:
            self._in_flight.clear()
            return
        in_flight = list(self._in_flight)
        for future in in_flight:
            future.cancel()
        futures.wait(in_flight, timeout=self._timeout_s if timeout_s is None else timeout_s)
        self._in_flight.clear()


def end_with_parent() -> None:
    """Called in a child process of multiprocessing: kill it as soon as its parent is gone.

    A worker whose parent was killed may wait for ever for somebody to read what it has written.
    The thread is a daemon: it must never be what keeps the process alive.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch(sentinel: int) -> None:
        connection.wait([sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(
        target=watch, args=(parent.sentinel,), name=NAME_PREFIX + "parent", daemon=True
    ).start()


def ordered(
    fn: Callable[[T], U], items: Iterable[T], *, workers: int, ahead: int, name: str = "ordered"
) -> Generator[U, None, None]:
    """Yield fn(item) in the order of items, on `workers` threads, at most `ahead` in flight.

    An error surfaces at its own place in the order. Closing the generator (or leaving it) cancels
    what has not started and waits for what has.
    """
    pool = Workers(workers, name=name)
    run = Ordered(fn, items, pool=pool, ahead=ahead)
    try:
        yield from run
    finally:
        run.close()
        pool.close()
