"""Start and own all threads of Penstock, and return the results of their calls.

`Workers` is a small named pool that its owner closes. `ordered` runs a function over a sequence:
the consumer submits work when it requests the next result, so no feeder thread exists that could
block on a full queue. `Outcome` is the result of a call on another thread.

The threads are daemons. Those of `concurrent.futures` delay the interpreter's exit until every
running call has ended, and a request to a hanging server runs for minutes. Instead `_end_all` runs
at exit: it stops the threads that wait for a network (`end_at_exit`) and gives all threads a short
time to end.

This module holds no locks. A Ctrl-C may interrupt any call of the main thread, including those in
Python's own Condition, Event, Semaphore and Future; then nothing releases the lock, and every
thread that needs it waits forever. So each decision that threads share is one call in C, and
threads wait for queues that are implemented entirely in C.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
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
from dataclasses import KW_ONLY, InitVar, dataclass
from itertools import takewhile
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from penstock.cache.errors import ClosedError, StalledError, log
from penstock.cache.forks import check_process

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

T = TypeVar("T")
U = TypeVar("U")

# Longer than any read of one batch on a working disk, so a longer wait means that the disk hangs.
STALL_TIMEOUT_S = 300.0

LONGEST_WAIT_S = 0.5
"""A Ctrl-C that arrives just before a wait begins is noticed only when the wait ends."""


class Settled(Generic[T]):
    """A value that the first thread sets for all threads, in one call in C."""

    def __init__(self) -> None:
        self._values: dict[None, T] = {}

    def settle(self, value: T) -> T:
        """Set the value unless it is set already; return the value in effect."""
        return self._values.setdefault(None, value)

    @property
    def value(self) -> T | None:
        """The value; None while it isn't set."""
        return self._values.get(None)


class Outcome(Generic[T]):
    """The result of a call on another thread. Any thread may read, wait for and cancel it."""

    def __init__(self) -> None:
        # Annotated, because calling a subscripted class takes 4 us.
        self._fate: Settled[Literal["runs", "cancelled"]] = Settled()
        self._has_ended = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, fn: Callable[[U], T], item: U) -> None:
        """Make the call on this thread unless it was cancelled. For one thread, once."""
        if self._fate.settle("runs") != "runs":
            return
        try:
            self._results.append(fn(item))
        except BaseException as error:  # result() raises it
            self._error = error
            self._end()
            del self, fn, item  # else the error's traceback keeps them alive
        else:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._ended.put(None)

    def cancel(self) -> bool:
        """Prevent the call; return False if it runs or has run."""
        is_cancelled = self._fate.settle("cancelled") == "cancelled"
        if is_cancelled:
            self._ended.put(None)
        return is_cancelled

    def done(self) -> bool:
        """Return True if result() would not wait."""
        return self._has_ended or self._fate.value == "cancelled"

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done, interruptibly by Ctrl-C; return False if time runs out first."""
        deadline_s = time.monotonic() + timeout_s
        while not self.done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=min(left_s, LONGEST_WAIT_S))
                self._ended.put(None)  # for other waiting threads; after a Ctrl-C they poll
        return True

    def result(self, timeout: float = STALL_TIMEOUT_S) -> T:
        """Return the call's result or raise its error; raise CancelledError if it was cancelled,
        and TimeoutError after `timeout` seconds."""
        if not self._has_ended and not self.wait(timeout):
            raise TimeoutError(f"No result after {timeout:g} s.")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # as in run
        if not self._results:
            raise CancelledError
        return self._results[0]


NAME_PREFIX = "penstock-"

EXIT_TIMEOUT_S = 2.0
"""The time that the interpreter's exit waits for all threads. A thread that still runs after that
hangs in a system call and is killed, against which the cache and the writers of files are safe."""

LEAVE_TIMEOUT_S = 1.0
"""The time for which a consumer that ends early (by an error or Ctrl-C) waits for running calls."""

INTERRUPTED_TIMEOUT_S = 0.5
"""The time that the interpreter's exit waits for threads after a Ctrl-C."""

_pools: weakref.WeakSet[Workers] = weakref.WeakSet()
_closers: list[Callable[[], object]] = []
_enders: weakref.WeakSet[Ender] = weakref.WeakSet()


class Ender(Protocol):
    """An object whose waits can be ended from another thread."""

    def end(self) -> None:
        """End all waits at once. Safe from any thread and to call twice."""


def end_at_exit(ender: Ender) -> None:
    """Call ender.end() at exit before the interpreter waits for threads. It isn't kept alive."""
    _enders.add(ender)


def close_at_exit(close: Callable[[], object]) -> None:
    """Call `close` at the interpreter's exit, after all enders, the newest first."""
    _closers.append(close)
    # The newest hook runs first: DALI's needs its pipelines closed, torch's its own objects alive.
    atexit.unregister(_end_all)
    atexit.register(_end_all)


def not_at_exit(close: Callable[[], object]) -> None:
    """Undo `close_at_exit` for an object that is already closed. Safe to call twice."""
    with contextlib.suppress(ValueError):
        _closers.remove(close)


class _Exit:
    """The state of the interpreter's exit; once it begins, daemon threads may never run again.

    was_interrupted: a Ctrl-C was caught, and the process returns its exit status.
    """

    has_begun = False
    was_interrupted = False


def end_interrupted() -> None:
    """Make the interpreter's exit quick, because a caught Ctrl-C ends the process."""
    _Exit.was_interrupted = True


def is_exiting() -> bool:
    """Return True if the interpreter is exiting."""
    return _Exit.has_begun


def is_impatient() -> bool:
    """Return True if the caller shouldn't wait for a call that hangs: the interpreter is exiting,
    or the caller is handling a Ctrl-C."""
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
        # The last garbage collection, over all of torch's and DALI's objects, takes 1 s to 3 s.
        gc.freeze()


# A forked child must not end its parent's waits, which may concern shared objects.
os.register_at_fork(after_in_child=_enders.clear)


def _let_others_finish() -> None:
    """Let this thread wait for a core until the thread that woke it gives its core up.

    A kernel may wake a thread on the core of the thread that submits its task. The woken thread
    would run first: a training loop that starts a read would then wait for up to 3 ms. Threads and
    processes that this thread starts get the same policy.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on Linux, or not allowed
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


_Task = tuple[Outcome[Any], "Callable[[Any], Any]", Any]
"""A call that waits for a thread: its outcome, the function and its argument."""


class _PoolState:
    """The state that a pool's threads share, separate from the pool so that they don't keep it
    alive.

    idle: one entry per thread that waits for a task and has none assigned.
    """

    def __init__(self, count: int, *, lets_others_finish: bool) -> None:
        self.tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self.idle: deque[None] = deque(maxlen=count)
        self._lets_others_finish = lets_others_finish

    def work(self, started: Settled[bool]) -> None:
        """Run tasks on a thread until the task None, which ends all threads. started: True if the
        thread may run, False if its start was given up."""
        if not started.settle(True):
            return
        if self._lets_others_finish:
            _let_others_finish()
        while True:
            task = self.tasks.get()
            if task is None:
                self.tasks.put(None)
                return
            outcome, fn, item = task
            outcome.run(fn, item)
            del task, outcome, fn, item  # else this frame keeps its result alive
            self.idle.append(None)


class Workers:
    """A pool of named threads. Closing it cancels calls that haven't started and waits for those
    that have."""

    def __init__(self, count: int, *, name: str, lets_others_finish: bool = True) -> None:
        """lets_others_finish: a thread waits for a core that another one uses; False if other
        threads keep all cores busy."""
        self.count = count
        self._name = NAME_PREFIX + name
        self._state = _PoolState(count, lets_others_finish=lets_others_finish)
        self._numbered: dict[int, threading.Thread] = {}
        self._threads: list[threading.Thread] = []
        self._cancelled: list[_Task] = []
        self._closed = False
        self.pid = os.getpid()
        _pools.add(self)
        weakref.finalize(self, self._state.tasks.put, None).atexit = False

    def submit(
        self, fn: Callable[[T], U], item: T, *, outcome: Outcome[U] | None = None
    ) -> Outcome[U]:
        """Run fn(item) on a thread. Raises ClosedError after close(), ForkedError in a child.

        outcome: the outcome to use instead of a new one, for a caller that needs it even if an
        interrupt ends this call."""
        check_process(self.pid, "This pool of threads")
        outcome = Outcome() if outcome is None else outcome
        if not self._closed:
            self._grow()
            self._state.tasks.put((outcome, fn, item))
        # If another thread closed the pool meanwhile, no thread may be left to run it.
        if self._closed and outcome.cancel():
            raise ClosedError("These workers are closed. Create a new loader.")
        return outcome

    def _grow(self) -> None:
        """Start a thread unless an idle one can run the task or all threads exist."""
        if len(self._numbered) >= self.count:
            return
        with contextlib.suppress(IndexError):
            self._state.idle.pop()
            return
        for number in range(self.count):
            if number not in self._numbered:
                self._start(number)
                return

    def _start(self, number: int) -> None:
        started = Settled[bool]()
        thread = threading.Thread(
            target=self._state.work, args=(started,), name=f"{self._name}_{number}", daemon=True
        )
        try:
            if self._numbered.setdefault(number, thread) is thread:
                self._threads.append(thread)
                thread.start()
        except BaseException as error:
            # A thread whose start was interrupted may hang in Thread.start(): replace it.
            if self._numbered.get(number) is thread and not started.settle(False):
                del self._numbered[number]
            cause = error.__context__
            if isinstance(error, RuntimeError) and isinstance(cause, KeyboardInterrupt):
                raise cause from None  # Condition.wait converts a Ctrl-C at its beginning
            raise

    def close(self, *, timeout_s: float | None = None) -> bool:
        """Cancel waiting tasks and wait for running ones; return True if all threads have ended.

        Safe to call twice. timeout_s: the longest wait, after which running tasks end by
        themselves. None waits STALL_TIMEOUT_S and logs the threads that still run. In a forked
        child it waits for nothing."""
        self._closed = True
        if os.getpid() != self.pid:
            return True
        try:
            self._cancel_waiting()
        except BaseException:
            self._cancel_waiting()  # a Ctrl-C may have interrupted it anywhere
            raise
        is_patient = timeout_s is None and not _Exit.has_begun
        if _Exit.has_begun:
            timeout_s = 0.0
        wait_s = STALL_TIMEOUT_S if timeout_s is None else timeout_s
        left = self.join(time.monotonic() + wait_s)
        if left and is_patient:
            names = ", ".join(thread.name for thread in left)
            log.warning(
                "Still running after %.0f s: %s. The disk or network mount that it reads may hang: "
                "check it with `ls`.",
                STALL_TIMEOUT_S,
                names,
            )
        return not left

    def _cancel_waiting(self) -> None:
        """Cancel all tasks that wait, and let the threads end. A second call completes one that was
        interrupted."""
        with contextlib.suppress(queue.Empty):
            # In one call in C, so that a Ctrl-C loses no task.
            self._cancelled.extend(iter(self._state.tasks.get_nowait, None))
        self._state.tasks.put(None)
        while self._cancelled:
            self._cancelled[-1][0].cancel()
            self._cancelled.pop()

    def join(self, deadline_s: float) -> list[threading.Thread]:
        """Wait for the threads of a closed pool until a time of the monotonic clock; return those
        that still run."""
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


@dataclass(eq=False, repr=False)
class Ordered(Generic[T, U]):
    """An iterator over fn(item) in the order of items, with at most `ahead` calls in flight.

    pool: the threads that run the calls. ahead: may change during the iteration. timeout_s: the
    time limit of one result. See `ordered`.
    """

    fn: Callable[[T], U]
    items: InitVar[Iterable[T]]
    _: KW_ONLY
    pool: Workers
    ahead: int
    timeout_s: float = STALL_TIMEOUT_S

    def __post_init__(self, items: Iterable[T]) -> None:
        if self.ahead < 1:
            raise ValueError(f"ahead must be at least 1, got {self.ahead}.")
        self._items = iter(items)
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
            self._in_flight.append(self.pool.submit(self.fn, item))

    def ready(self) -> bool:
        """Return True if pop() would not wait."""
        return not self._in_flight or self._in_flight[0].done()

    def __len__(self) -> int:
        """Return the number of results in flight."""
        return len(self._in_flight)

    def ready_share(self) -> float:
        """Return the share of results in flight that pop() returns at once; 1.0 without any."""
        ready = sum(1 for _ in takewhile(Outcome.done, self._in_flight))
        return ready / len(self._in_flight) if self._in_flight else 1.0

    def __next__(self) -> U:
        self.fill()
        return self.pop()

    def pop(self) -> U:
        """Return the next result in flight without submitting work. StopIteration if none is."""
        if not self._in_flight:
            raise StopIteration
        check_process(self._pid, "This iterator")
        outcome = self._in_flight.popleft()
        if not (outcome.done() or outcome.wait(self.timeout_s)):
            outcome.cancel()
            raise StalledError(
                f"{self.fn!r} returned nothing for {self.timeout_s:.0f} s. The disk or the "
                "network mount of the dataset may hang: check it with `ls`, or raise timeout=."
            )
        try:
            return outcome.result()
        finally:
            del outcome  # else the error's traceback refers to this frame, and it to the error

    def close(self, *, timeout_s: float | None = None) -> None:
        """Cancel calls that haven't started, wait for those that have, and drop the results.

        timeout_s: the longest wait, after which running calls end by themselves. A pop() that waits
        on another thread returns its result or raises CancelledError. In a forked child it waits
        for nothing."""
        self._closed = True
        if os.getpid() != self._pid:
            self._in_flight.clear()
            return
        in_flight = list(self._in_flight)
        for outcome in in_flight:
            outcome.cancel()
        if _Exit.has_begun:
            timeout_s = 0.0
        deadline_s = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        for outcome in in_flight:
            if not outcome.wait(deadline_s - time.monotonic()):
                break
        self._in_flight.clear()


def end_with_parent() -> None:
    """Kill this child process of multiprocessing as soon as its parent has ended.

    A worker whose parent was killed may wait forever for a reader of its pipe. The thread is a
    daemon, because it must not keep the process alive.
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

    An error is raised at its position in the order. Closing the generator cancels calls that
    haven't started and waits for those that have, for at most `leave_s`; later they end by
    themselves. None waits until they end, for calls that write files that the caller then removes.
    """
    pool = Workers(workers, name=name)
    try:
        # Not `yield from`, which would close the iterator with its own time limit.
        for result in Ordered(fn, items, pool=pool, ahead=ahead):  # noqa: UP028
            yield result
    except BaseException:
        pool.close(timeout_s=leave_s)
        raise
    else:
        pool.close()
