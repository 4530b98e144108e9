"""All threads of Penstock are started here.

`Workers` is a small named pool that is owned and closed. `ordered` walks a known future: the
consumer's own pull submits work, so no feeder thread exists that could block on a full queue.

The threads are daemons, and not `concurrent.futures`' own: its exit waits for whatever runs, and a
request to a server that hangs runs for minutes. Instead `_end_all` is the exit: who waits for a
network is told to stop (`end_at_exit`), and all threads have a short time to end.
"""

from __future__ import annotations

import atexit
import concurrent.futures as futures
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
import weakref
from collections import deque
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.forks import check_process

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

T = TypeVar("T")
U = TypeVar("U")

NAME_PREFIX = "penstock-"

# Longer than any honest read of one batch; a stuck NFS mount or disk is reported, not waited for.
STALL_TIMEOUT_S = 300.0


EXIT_TIMEOUT_S = 2.0
"""So long the interpreter's end waits for threads in all. What is left then is stuck in a system
call, and is cut off: the cache and the writers of files stand a kill at any moment."""

LEAVE_TIMEOUT_S = 1.0
"""So long who leaves early (an error, Ctrl-C) waits for what has started."""

LONGEST_WAIT_S = 1.0
"""A Ctrl-C that lands just before a wait begins is noticed only when the wait ends."""

_pools: weakref.WeakSet[Workers] = weakref.WeakSet()
_closers: list[Callable[[], object]] = []
_enders: weakref.WeakSet[Ender] = weakref.WeakSet()


class Ender(Protocol):
    """Something that threads may wait for longer than anybody wants to wait for them."""

    def end(self) -> None:
        """Let nobody wait any more: at once, from any thread, safe to call twice."""


def end_at_exit(ender: Ender) -> None:
    """Have `ender` ended before the interpreter's end waits for threads. It isn't kept alive."""
    _enders.add(ender)


def close_at_exit(close: Callable[[], object]) -> None:
    """Have `close` called at the interpreter's end, behind all enders, the newest first."""
    _closers.append(close)
    # The newest hook runs first: DALI's wants its pipelines gone, torch's its own things alive.
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def not_at_exit(close: Callable[[], object]) -> None:
    """It is closed already. Safe to call twice."""
    with contextlib.suppress(ValueError):
        _closers.remove(close)


def result_of(future: futures.Future[T], *, timeout_s: float) -> T:
    """A future's result, in waits that Ctrl-C ends. Raises futures.TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= LONGEST_WAIT_S:
            return future.result(timeout=max(0.0, left_s))
        if futures.wait([future], timeout=LONGEST_WAIT_S).done:
            return future.result()


class _Exit:
    """Whether the interpreter is ending: its daemon threads may never get on again."""

    has_begun = False


@atexit.register
def _end_all() -> None:
    pid = os.getpid()
    _Exit.has_begun = True
    for ender in list(_enders):
        ender.end()
    while _closers:
        _closers.pop()()
    deadline_s = time.monotonic() + EXIT_TIMEOUT_S
    pools = [pool for pool in list(_pools) if pool.pid == pid]
    for pool in pools:
        pool.close(timeout_s=0.0)
    for pool in pools:
        pool.join(deadline_s)


# What a parent's threads wait for is nothing to a forked child, and may be shared with it.
os.register_at_fork(after_in_child=_enders.clear)


class _Task(Generic[T, U]):
    """A call and what becomes of it."""

    def __init__(self, fn: Callable[[T], U], item: T) -> None:
        self.future: futures.Future[U] = futures.Future()
        self._fn, self._item = fn, item

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn(self._item)
        except BaseException as error:  # raised again where the result is asked for
            self.future.set_exception(error)
            del self  # an exception's traceback holds this frame, and that the exception
        else:
            self.future.set_result(result)


def _work(tasks: queue.SimpleQueue[_Task[Any, Any] | None], idle: threading.Semaphore) -> None:
    """A thread's life. None: the end, for all."""
    while True:
        task = tasks.get()
        if task is None:
            tasks.put(None)
            return
        task.run()
        del task  # its result is others' from here on
        idle.release()


class Workers:
    """A pool of named threads. Closing cancels what has not started and waits for what has."""

    def __init__(self, count: int, *, name: str) -> None:
        self._count = count
        self._name = NAME_PREFIX + name
        self._tasks: queue.SimpleQueue[_Task[Any, Any] | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self.pid = os.getpid()
        _pools.add(self)
        weakref.finalize(self, self._tasks.put, None).atexit = False

    def submit(self, fn: Callable[[T], U], item: T) -> futures.Future[U]:
        """Run fn(item) on a thread. Raises ClosedError after close(), ForkedError in a child."""
        check_process(self.pid, "This pool of threads")
        task = _Task(fn, item)
        with self._lock:
            if self._closed:
                raise ClosedError("These workers are closed; make a new loader.")
            if len(self._threads) < self._count and not self._idle.acquire(blocking=False):
                thread = threading.Thread(
                    target=_work,
                    args=(self._tasks, self._idle),
                    name=f"{self._name}_{len(self._threads)}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
            self._tasks.put(task)
        return task.future

    def close(self, *, timeout_s: float | None = None) -> None:
        """Safe to call twice. timeout_s: wait no longer for what has started; it ends by itself.
        In a forked child there is nothing to wait for."""
        if os.getpid() != self.pid:
            self._closed = True
            return
        with self._lock:
            self._closed = True
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None and task.future.cancel():
                task.future.set_running_or_notify_cancel()  # who waits for it goes on
        self._tasks.put(None)
        if _Exit.has_begun:
            timeout_s = 0.0
        self.join(None if timeout_s is None else time.monotonic() + timeout_s)

    def join(self, deadline_s: float | None) -> None:
        """Wait for the threads of a closed pool, at most until a time of the monotonic clock."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                thread.join(left_s)


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
            return result_of(future, timeout_s=self._timeout_s)
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
        if _Exit.has_begun:
            timeout_s = 0.0
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
    fn: Callable[[T], U],
    items: Iterable[T],
    *,
    workers: int,
    ahead: int,
    name: str = "ordered",
    leave_s: float | None = LEAVE_TIMEOUT_S,
) -> Generator[U, None, None]:
    """Yield fn(item) in the order of items, on `workers` threads, at most `ahead` in flight.

    An error surfaces at its own place in the order. Closing the generator (or leaving it) cancels
    what has not started and waits for what has, for `leave_s` at most: then it ends by itself.
    None: to its end, where it writes what its caller cleans up.
    """
    pool = Workers(workers, name=name)
    run = Ordered(fn, items, pool=pool, ahead=ahead)
    try:
        # Not `yield from`, which would close `run` in its own time.
        for result in run:  # noqa: UP028
            yield result
    except BaseException:
        run.close(timeout_s=leave_s)
        pool.close(timeout_s=leave_s)
        raise
    else:
        pool.close()
