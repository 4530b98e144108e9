"""Start and own all worker processes of Penstock.

Worker processes end with their owner. Each has its own pipe and runs one task at a time. The caller
waits for the answer and for the end of the process at the same time, so a killed worker raises an
error at once, without another thread.

A fork server starts them, because a fork of a process with threads would inherit locks that no
thread releases.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache import threads
from penstock.cache.errors import ClosedError, NotPicklableError, StalledError, WorkerError
from penstock.cache.forks import check_process, leave_to_parent, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkServerProcess

LEAVE_S = 1.0
"""Time for a process to end by itself when it has no more tasks; then it is killed."""

_PROTOCOL = 5
_START_REMEDY = (
    "Functions for worker processes must be importable there: define "
    'them in a module, and start the program\'s work under `if __name__ == "__main__":`.'
)

Answer = tuple[Literal["ready", "done", "unusable", "failed"], Any]


def describe_exit(code: int) -> str:
    """Describe how a process ended by its exit status, which is negative for a signal."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def pickle_for_worker(thing: object, *, what: str) -> bytes:
    """Pickle an object for a worker process. what: its name in the error.

    Raises NotPicklableError.
    """
    try:
        return pickle.dumps(thing, protocol=_PROTOCOL)
    except Exception as error:  # pickling runs foreign code, which may raise any error
        raise NotPicklableError(
            f"{what} can't be sent to worker processes ({type(error).__name__}: {error}). Define "
            "the function at the top level of a module (no lambda, not inside a function) and make "
            "all that it refers to picklable; or pass processes=0."
        ) from error


@dataclass(eq=False, slots=True)
class _Worker:
    """A worker process and this end of its pipe. task: a description of its current task."""

    process: ForkServerProcess
    pipe: connection.Connection[Any, Any]
    is_ready: bool = False
    task: str = ""


@dataclass(eq=False, slots=True)
class _Generation:
    """Processes that start and end together. failure: the first error, which ends all of them."""

    workers: list[_Worker] = field(default_factory=list)
    idle: queue.SimpleQueue[_Worker | None] = field(default_factory=queue.SimpleQueue)
    failure: threads.Settled[Exception] = field(default_factory=threads.Settled)


class WorkerProcesses:
    """Worker processes that run tasks, which any thread may submit. close() ends them.

    The first task starts them. A failure ends them, and the next task starts new ones.
    """

    def __init__(
        self, count: int, answer: bytes, *, name: str, timeout_s: float = threads.STALL_TIMEOUT_S
    ) -> None:
        """answer: the function from task to answer, pickled by `pickle_for_worker`. timeout_s: the
        time limit of one task."""
        self._count, self._answer, self._name = count, answer, name
        self._timeout_s, self._pid, self._closed = timeout_s, os.getpid(), False
        self._starting = threading.Lock()
        self._generation: _Generation | None = None
        threads.end_at_exit(self)
        watch(self)

    @property
    def pids(self) -> list[int]:
        """The process ids of all started processes."""
        generation = self._generation
        workers = generation.workers if generation is not None else []
        return [worker.process.pid for worker in workers if worker.process.pid is not None]

    def run(self, tasks: Sequence[Any], *, describe: Callable[[int], str]) -> list[Any]:
        """Run tasks on all free processes and return their answers in the order of the tasks.

        describe: returns a task's description for errors, by its position. Raises WorkerError if a
        process died or its function raised an error, StalledError if a task takes longer than the
        limit, and ClosedError after close().
        """
        check_process(self._pid, f"The worker processes of {self._name}")
        generation = self._started()
        busy: dict[_Worker, int] = {}
        answers: list[Any] = [None] * len(tasks)
        left = list(reversed(range(len(tasks))))
        since = time.monotonic()
        try:
            while left or busy:
                while left and (worker := self._idle(generation, is_wanted=not busy)) is not None:
                    busy[worker] = left.pop()
                    worker.task = describe(busy[worker])
                    _send(worker, tasks[busy[worker]])
                for worker in self._answering(generation, list(busy), since):
                    answers[busy.pop(worker)] = self._answer_of(generation, worker)
                    generation.idle.put(worker)
                    since = time.monotonic()
        except BaseException as error:
            # Else the next tasks would receive the answers to these.
            if busy or isinstance(error, WorkerError | StalledError):
                self._fail(generation, error)
            raise
        return answers

    # -- starting

    def _started(self) -> _Generation:
        if (generation := self._generation) is not None:
            return generation
        with self._starting:
            if self._closed:
                raise self._closed_error()
            if multiprocessing.current_process().daemon:
                raise WorkerError(
                    f"{self._name} needs worker processes, but this process is a daemon, which "
                    "can't start any. Pass processes=0 here."
                )
            if self._generation is None:
                generation = _Generation()
                for number in range(self._count):
                    worker = self._start(number)
                    generation.workers.append(worker)
                    generation.idle.put(worker)
                self._generation = generation
                if self._closed:  # close() was called before these processes were recorded
                    self.end()
                    raise self._closed_error()
            return self._generation

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        pipe, theirs = context.Pipe()
        name, args = f"{threads.NAME_PREFIX}{self._name}_{number}", (theirs, self._answer)
        started = context.Process(target=_work, args=args, name=name, daemon=True)
        try:
            started.start()
        except BaseException:
            pipe.close()
            raise
        finally:
            theirs.close()
        return _Worker(started, pipe)

    # -- one task

    def _idle(self, generation: _Generation, *, is_wanted: bool) -> _Worker | None:
        """Return a process without a task, after waiting for one if is_wanted; else None."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            self._check(generation)
            try:
                worker = generation.idle.get(is_wanted, threads.LONGEST_WAIT_S)
            except queue.Empty:
                if not is_wanted:
                    return None
                if time.monotonic() > deadline_s:
                    raise self._stalled("have all been busy") from None
            else:
                if worker is not None:
                    return worker
                generation.idle.put(None)  # for the other threads: the generation has ended

    def _answering(
        self, generation: _Generation, busy: list[_Worker], since: float
    ) -> list[_Worker]:
        """Wait until at least one busy process has answered or ended; return all such processes."""
        while True:
            left_s = since + self._timeout_s - time.monotonic()
            watched = [end for worker in busy for end in (worker.pipe, worker.process.sentinel)]
            ready = connection.wait(watched, timeout=max(0.0, min(left_s, threads.LONGEST_WAIT_S)))
            if ready:
                return [w for w in busy if w.pipe in ready or w.process.sentinel in ready]
            self._check(generation)
            if left_s <= 0:
                raise self._stalled(f"have run {busy[0].task}")

    def _answer_of(self, generation: _Generation, worker: _Worker) -> Any:
        while True:
            self._answering(generation, [worker], time.monotonic())
            try:
                kind, value = pickle.loads(worker.pipe.recv_bytes())
            except (EOFError, OSError):
                raise self._death(generation, worker) from None
            if kind == "done":
                return value
            if kind != "ready":
                break
            worker.is_ready = True
        if kind == "unusable":
            raise WorkerError(
                f"A worker process of {self._name} can't load its function: {value} {_START_REMEDY}"
            )
        raise WorkerError(f"A worker process of {self._name} failed at {worker.task}: {value}")

    def _death(self, generation: _Generation, worker: _Worker) -> Exception:
        """Return the error for a process that has ended, by itself or after another one failed."""
        worker.process.join(LEAVE_S)
        code = worker.process.exitcode
        failure = generation.failure.value
        if failure is not None:
            return copy.copy(failure)
        how = "ended" if code is None else describe_exit(code)
        about = f"A worker process of {self._name} (pid {worker.process.pid}) {how}"
        if not worker.is_ready and (code is None or code >= 0):
            return WorkerError(
                f"{about} before its first answer. Look for its message on this program's stderr. "
                f"{_START_REMEDY}"
            )
        return WorkerError(
            f"{about} while it ran {worker.task}. Often the machine is short of memory (see "
            "`dmesg`): use fewer processes= or smaller batches; else try that sample with "
            "processes=0."
        )

    def _closed_error(self) -> ClosedError:
        return ClosedError(f"The worker processes of {self._name} are closed.")

    def _stalled(self, state: str) -> StalledError:
        return StalledError(
            f"The worker processes of {self._name} {state} for {self._timeout_s:.0f} s. Check what "
            "the function waits for (`py-spy dump` shows it), or raise timeout=."
        )

    # -- ending

    def _check(self, generation: _Generation) -> None:
        failure = generation.failure.value
        if failure is not None:
            raise copy.copy(failure)  # each thread adds its own traceback

    def _fail(self, generation: _Generation, error: BaseException) -> None:
        """End a generation because of an error, which all threads that wait for it then raise."""
        if not isinstance(error, WorkerError | StalledError):
            error = ClosedError(f"A task for {self._name} was interrupted.")
        if generation.failure.settle(error) is error:
            if self._generation is generation:
                self._generation = None
            _end(generation, leave_s=0.0)

    def end(self) -> None:
        """Kill the processes, so that all waits for them end."""
        self.close(leave_s=0.0)

    def close(self, *, leave_s: float = LEAVE_S) -> None:
        """Let the processes end, and kill those that take longer than leave_s. Safe to call twice,
        and in a forked child, which has none."""
        self._closed = True
        generation, self._generation = self._generation, None
        if generation is not None and os.getpid() == self._pid:
            generation.failure.settle(self._closed_error())
            _end(generation, leave_s=leave_s)

    def disown(self) -> None:
        """Leave the processes to the parent in a forked child, which would end them at its exit."""
        generation, self._generation = self._generation, None
        self._closed = True
        for worker in generation.workers if generation is not None else ():
            leave_to_parent(worker.process)
            worker.pipe.close()


def _send(worker: _Worker, task: Any) -> None:
    # If the other end is closed, reading the pipe raises the error, with its explanation.
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        worker.pipe.send_bytes(pickle.dumps(task, protocol=_PROTOCOL))


def _end(generation: _Generation, *, leave_s: float) -> None:
    """End processes; the threads that still read from the pipes close them."""
    generation.idle.put(None)
    if leave_s > 0:
        for worker in generation.workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(b"")
    deadline_s = time.monotonic() + leave_s
    for worker in generation.workers:
        worker.process.join(max(0.0, deadline_s - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
    for worker in generation.workers:
        worker.process.join(LEAVE_S)


def _work(pipe: connection.Connection[Any, Any], answer: bytes) -> None:
    """Run a worker process: send one answer per task, until an empty task or the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    threads.end_with_parent()
    try:
        function = pickle.loads(answer)
    except Exception as error:  # any error of an import; the parent raises it
        _send_answer(pipe, ("unusable", f"{type(error).__name__}: {error}."))
        return
    _send_answer(pipe, ("ready", None))
    with contextlib.suppress(EOFError, ConnectionError):
        while task := pipe.recv_bytes():
            try:
                result: Answer = ("done", function(pickle.loads(task)))
            except Exception:  # the parent raises it
                result = ("failed", traceback.format_exc())
            _send_answer(pipe, result)


def _send_answer(pipe: connection.Connection[Any, Any], answer: Answer) -> None:
    try:
        data = pickle.dumps(answer, protocol=_PROTOCOL)
    except Exception:  # the answer can't be pickled
        data = pickle.dumps(("failed", traceback.format_exc()), protocol=_PROTOCOL)
    pipe.send_bytes(data)
