"""Start and own all threads of Penstock, and hand over what their calls return.

`Workers` is a small named pool that is owned and closed. `ordered` runs a function over a known
sequence: the consumer's own pull submits work, so no feeder thread exists that could block on a
full queue. `Outcome` is the result of a call on another thread.

The threads are daemons, and not those of `concurrent.futures`: its exit waits for whatever runs,
and a request to a server that hangs runs for minutes. Instead `_end_all` is the exit: those that
wait for a network are told to stop (`end_at_exit`), and all threads have a short time to end.

Nothing here holds a lock. A Ctrl-C may interrupt any call of the main thread, those inside
Python's own Condition, Event, Semaphore and Future included; the lock then stays taken, and every
thread that needs it waits for ever. So what several threads decide on is decided in one call in C,
and threads wait for queues, which are implemented in C entirely.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import CancelledError
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from penstock.cache.errors import ClosedError, StalledError
from penstock.cache.forks import check_process

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

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


_log = logging.getLogger("penstock")
NAME_PREFIX = "penstock-"

EXIT_TIMEOUT_S = 2.0
"""So long the interpreter's end waits for threads in all. What is left then is stuck in a system
call, and is cut off: the cache and the writers of files stand a kill at any moment."""

LEAVE_TIMEOUT_S = 1.0
"""So long who leaves early (an error, Ctrl-C) waits for what has started."""

INTERRUPTED_TIMEOUT_S = 0.5
"""So long the interpreter's end waits behind a Ctrl-C, which its user wants to be quick."""

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
    """Take back `close_at_exit`: it is closed already. Safe to call twice."""
    with contextlib.suppress(ValueError):
        _closers.remove(close)


class _Exit:
    """Note that the interpreter is exiting; its daemon threads may never run again.

    was_interrupted: a Ctrl-C was caught, and its exit status is being returned.
    """

    has_begun = False
    was_interrupted = False


def end_interrupted() -> None:
    """Let the interpreter's end be quick: a Ctrl-C was caught, and the process ends for it."""
    _Exit.was_interrupted = True


def is_exiting() -> bool:
    """Whether the interpreter is ending."""
    return _Exit.has_begun


def is_impatient() -> bool:
    """Return True if nobody should wait for a call that hangs: the interpreter is exiting, or the
    caller is handling a Ctrl-C."""
    return _Exit.has_begun or isinstance(sys.exc_info()[1], KeyboardInterrupt)


@atexit.register
def _end_all() -> None:
    pid = os.getpid()
    _Exit.has_begun = True
    for ender in list(_enders):
        ender.end()
    while _closers:
        _closers.pop()()
    last = getattr(sys, "last_value", None)
    is_interrupted = _Exit.was_interrupted or isinstance(last, KeyboardInterrupt)
    deadline_s = time.monotonic() + (INTERRUPTED_TIMEOUT_S if is_interrupted else EXIT_TIMEOUT_S)
    pools = [pool for pool in list(_pools) if pool.pid == pid]
    for pool in pools:
        pool.close(timeout_s=0.0)
    for pool in pools:
        pool.join(deadline_s)
    if is_interrupted:
        # The last search for cycles, among all of torch's and DALI's objects, takes 1 s to 3 s.
        gc.freeze()


# What a parent's threads wait for is nothing to a forked child, and may be shared with it.
os.register_at_fork(after_in_child=_enders.clear)


class _Task(NamedTuple):
    """A call that waits for a thread."""

    outcome: Outcome[Any]
    fn: Callable[[Any], Any]
    item: Any


class _PoolState:
    """What the threads of a pool share: they don't keep the pool alive.

    idle: as many as wait for a task, but for those that a waiting task is meant for.
    """

    def __init__(self, count: int) -> None:
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.idle: deque[None] = deque(maxlen=count)

    def work(self, birth: Settled[bool]) -> None:
        """A thread's life. None: the end, for all. birth: whether the thread counts."""
        if not birth.settle(True):
            return
        while True:
            task = self.tasks.get()
            if task is None:
                self.tasks.put(None)
                return
            task.outcome.run(task.fn, task.item)
            del task  # its result is others' from here on
            self.idle.append(None)


class Workers:
    """A pool of named threads. Closing cancels what has not started and waits for what has."""

    def __init__(self, count: int, *, name: str) -> None:
        self._count = count
        self._name = NAME_PREFIX + name
        self._desk = _PoolState(count)
        self._places: dict[int, threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self.pid = os.getpid()
        _pools.add(self)
        weakref.finalize(self, self._desk.tasks.put, None).atexit = False

    def submit(
        self, fn: Callable[[T], U], item: T, *, outcome: Outcome[U] | None = None
    ) -> Outcome[U]:
        """Run fn(item) on a thread. Raises ClosedError after close(), ForkedError in a child.
        outcome: the one to tell, of a caller who wants to know it whatever interrupts this."""
        check_process(self.pid, "This pool of threads")
        outcome = Outcome() if outcome is None else outcome
        if not self._closed:
            self._grow()
            self._desk.tasks.put(_Task(outcome, fn, item))
        # Closed by another thread meanwhile, nobody may be left to run it.
        if self._closed and outcome.cancel():
            raise ClosedError("These workers are closed; make a new loader.")
        return outcome

    def _grow(self) -> None:
        """Start a thread, unless one waits for a task or all are there."""
        if len(self._places) >= self._count:
            return
        with contextlib.suppress(IndexError):
            self._desk.idle.pop()
            return
        for place in range(self._count):
            if place not in self._places:
                self._start(place)
                return

    def _start(self, place: int) -> None:
        birth = Settled[bool]()
        thread = threading.Thread(
            target=self._desk.work, args=(birth,), name=f"{self._name}_{place}", daemon=True
        )
        try:
            if self._places.setdefault(place, thread) is thread:
                self._threads.append(thread)
                thread.start()
        except BaseException as error:
            # A thread whose start was interrupted may hang in telling it: another takes its place.
            if self._places.get(place) is thread and not birth.settle(False):
                del self._places[place]
            cause = error.__context__
            if isinstance(error, RuntimeError) and isinstance(cause, KeyboardInterrupt):
                raise cause from None  # Condition.wait makes that of one at its very beginning
            raise

    def close(self, *, timeout_s: float | None = None) -> bool:
        """Whether all threads have ended. Safe to call twice. timeout_s: wait no longer for what
        has started; it ends by itself. None: so long that what is left then hangs, and is logged.
        In a forked child there is nothing to wait for."""
        self._closed = True
        if os.getpid() != self.pid:
            return True
        waiting: list[_Task] = []
        try:
            with contextlib.suppress(queue.Empty):
                # In one call in C: no task is taken out and lost to a Ctrl-C.
                waiting.extend(iter(self._desk.tasks.get_nowait, None))
        finally:
            for task in waiting:
                task.outcome.cancel()
            self._desk.tasks.put(None)
        is_patient = timeout_s is None and not _Exit.has_begun
        if _Exit.has_begun:
            timeout_s = 0.0
        left = self.join(time.monotonic() + (STALL_TIMEOUT_S if timeout_s is None else timeout_s))
        if left and is_patient:
            names = ", ".join(thread.name for thread in left)
            _log.warning(
                "Left behind after %.0f s: %s. What it waits for hangs: look at the disk or the "
                "network mount with `ls`.",
                STALL_TIMEOUT_S,
                names,
            )
        return not left

    def join(self, deadline_s: float) -> list[threading.Thread]:
        """Wait for the threads of a closed pool, at most until a time of the monotonic clock.
        Returns those that are left."""
        left = []
        for thread in list(self._threads):
            if thread is threading.current_thread():
                continue
            while thread.is_alive():
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    left.append(thread)
                    break
                thread.join(min(left_s, LONGEST_WAIT_S))
        return left


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
        self._in_flight: deque[Outcome[U]] = deque()
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
        """The share of what is in flight that could be popped at once; 1.0 where nothing is."""
        count = 0
        for outcome in self._in_flight:
            if not outcome.done():
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
        outcome = self._in_flight.popleft()
        if not outcome.wait(self._timeout_s):
            outcome.cancel()
            raise StalledError(
                f"Nothing arrived for {self._timeout_s:.0f} s from {self._fn!r}. The disk or the "
                "network mount under the dataset may hang; look at it with `ls`, or raise timeout=."
            )
        try:
            return outcome.result()
        finally:
            del outcome  # an error's traceback holds this frame, and the outcome the error

    def close(self, *, timeout_s: float | None = None) -> None:
        """Cancel what has not started, wait for what has, forget the results. timeout_s: wait no
        longer than that; what still runs ends by itself. A pop() that waits on another thread ends
        with what it waited for, or with CancelledError. In a forked child nothing is waited for."""
        self._closed = True
        if os.getpid() != self._pid:
            self._in_flight.clear()
            return
        in_flight = list(self._in_flight)
        for outcome in in_flight:
            outcome.cancel()
        if _Exit.has_begun:
            timeout_s = 0.0
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        for outcome in in_flight:
            if not outcome.wait(deadline_s - time.monotonic()):
                break
        self._in_flight.clear()


def end_with_parent() -> None:
    """Kill this child process of multiprocessing as soon as its parent is gone.

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
        began_s = time.monotonic()
        run.close(timeout_s=leave_s)
        left_s = None if leave_s is None else max(0.0, leave_s - (time.monotonic() - began_s))
        pool.close(timeout_s=left_s)
        raise
    else:
        pool.close()
