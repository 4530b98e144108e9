"""Start and own all worker processes of Penstock.

Worker processes are owned, and end with their owner. Each has a pipe of its own and does one task
at a time; the caller waits for the answer and for the end of the process alike, so a killed worker
is an error at once. No thread is needed for that.

They come from a fork server: a fork of a process with threads would inherit locks that nobody
releases.
"""

from __future__ import annotations

import contextlib
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

from penstock.cache.errors import ClosedError, NotPicklableError, StalledError, WorkerError
from penstock.cache.forks import check_process, leave_to_parent, watch
from penstock.cache.threads import (
    LONGEST_WAIT_S,
    NAME_PREFIX,
    STALL_TIMEOUT_S,
    Settled,
    end_at_exit,
    end_with_parent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import ForkServerProcess

LEAVE_S = 1.0
"""So long a process may take to end by itself, once nobody has a task for it."""

_PROTOCOL = 5
_START_REMEDY = (
    "Functions for worker processes must be importable there: define "
    'them in a module, and start the program\'s work under `if __name__ == "__main__":`.'
)

Answer = tuple[Literal["ready", "done", "unusable", "failed"], Any]


def describe_exit(code: int) -> str:
    """How a process ended, by its exit status: a signal's number is negative."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def pickle_for_worker(thing: object, *, what: str) -> bytes:
    """A thing as bytes for a worker process. Raises NotPicklableError. what: it is, for people."""
    try:
        return pickle.dumps(thing, protocol=_PROTOCOL)
    except Exception as error:  # pickling runs code of anybody's, which raises anything
        raise NotPicklableError(
            f"{what} can't be sent to worker processes ({type(error).__name__}: {error}). Define "
            "the function at the top level of a module (no lambda, nothing inside of a function), "
            "and let what it holds be picklable; or pass processes=0."
        ) from error


@dataclass(eq=False, slots=True)
class _Worker:
    """A process, and our end of its pipe. task: the words for what it is at."""

    process: ForkServerProcess
    pipe: connection.Connection[Any, Any]
    is_ready: bool = False
    task: str = ""


@dataclass(eq=False, slots=True)
class _Generation:
    """Processes that were started together, and end so. failure: of one of them, which ends all."""

    workers: list[_Worker] = field(default_factory=list)
    idle: queue.SimpleQueue[_Worker | None] = field(default_factory=queue.SimpleQueue)
    failure: Settled[Exception] = field(default_factory=Settled)


class WorkerProcesses:
    """Worker processes that answer tasks. Any thread may give them some; close() ends them.

    They are started by the first task. After a failure they are ended, and the next task starts
    others.
    """

    def __init__(
        self, count: int, answer: bytes, *, name: str, timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        """answer: a function from task to answer, by `sendable`. timeout_s: of one task."""
        self._count, self._answer, self._name = count, answer, name
        self._timeout_s = timeout_s
        self._starting = threading.Lock()
        self._generation: _Generation | None = None
        self._closed = False
        self._pid = os.getpid()
        end_at_exit(self)
        watch(self)

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started."""
        generation = self._generation
        workers = generation.workers if generation is not None else []
        return [worker.process.pid for worker in workers if worker.process.pid is not None]

    def run(self, tasks: Sequence[Any], *, words: Callable[[int], str]) -> list[Any]:
        """The answers to some tasks, in their order, by as many processes as are free.

        words: what a task is about, by its place, for errors. Raises WorkerError where a process
        died, StalledError where a task takes longer than the limit, ClosedError after close(); what
        the answering function raises is a WorkerError too.
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
                    worker.task = words(busy[worker])
                    _send(worker, tasks[busy[worker]])
                for worker in self._answering(generation, list(busy), since):
                    answers[busy.pop(worker)] = self._answer_of(generation, worker)
                    generation.idle.put(worker)
                    since = time.monotonic()
        except BaseException as error:
            # Answers that nobody waits for would be taken for those to the next tasks.
            if busy or isinstance(error, WorkerError | StalledError):
                self._fail(generation, error)
            raise
        return answers

    # -- starting

    def _started(self) -> _Generation:
        generation = self._generation
        if generation is not None:
            return generation
        with self._starting:
            if self._closed:
                raise ClosedError(f"The worker processes of {self._name} are closed.")
            if multiprocessing.current_process().daemon:
                raise WorkerError(
                    f"{self._name} wants worker processes, and this is one itself, which may start "
                    "none. Pass processes=0 here."
                )
            if self._generation is None:
                generation = _Generation()
                for number in range(self._count):
                    worker = self._start(number)
                    generation.workers.append(worker)
                    generation.idle.put(worker)
                self._generation = generation
                if self._closed:  # meanwhile: who closed saw none of these, and has left
                    self._close(leave_s=0.0)
                    raise ClosedError(f"The worker processes of {self._name} are closed.")
            return self._generation

    def _start(self, number: int) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        pipe, theirs = context.Pipe()
        started = context.Process(
            target=_work,
            args=(theirs, self._answer),
            name=f"{NAME_PREFIX}{self._name}_{number}",
            daemon=True,
        )
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
        """A process without a task; None where none is free and it isn't wanted that much."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            self._check(generation)
            with contextlib.suppress(queue.Empty):
                worker = (
                    generation.idle.get(timeout=LONGEST_WAIT_S)
                    if is_wanted
                    else generation.idle.get_nowait()
                )
                if worker is not None:
                    return worker
                generation.idle.put(None)  # the end, for all
                continue
            if not is_wanted:
                return None
            if time.monotonic() > deadline_s:
                raise self._stalled("wait for a free one")

    def _answering(
        self, generation: _Generation, busy: list[_Worker], since: float
    ) -> list[_Worker]:
        """Those of the busy processes that have answered or ended: one at least."""
        while True:
            left_s = since + self._timeout_s - time.monotonic()
            watched = [thing for one in busy for thing in (one.pipe, one.process.sentinel)]
            found = connection.wait(watched, timeout=max(0.0, min(left_s, LONGEST_WAIT_S)))
            told = [one for one in busy if one.pipe in found or one.process.sentinel in found]
            if told:
                return told
            self._check(generation)
            if left_s <= 0:
                raise self._stalled(f"be at {busy[0].task}")

    def _answer_of(self, generation: _Generation, worker: _Worker) -> Any:
        kind, value = self._received(generation, worker)
        if kind == "ready":
            worker.is_ready = True
            kind, value = self._received(generation, worker)
        if kind == "done":
            return value
        if kind == "unusable":
            raise WorkerError(
                f"A worker process of {self._name} can't load its function: {value} {_START_REMEDY}"
            )
        raise WorkerError(f"A worker process of {self._name} failed at {worker.task}: {value}")

    def _received(self, generation: _Generation, worker: _Worker) -> Answer:
        self._answering(generation, [worker], time.monotonic())
        try:
            answer: Answer = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death(generation, worker) from None
        return answer

    def _death(self, generation: _Generation, worker: _Worker) -> Exception:
        """The error for a process that has ended: ours ended it where another one failed."""
        worker.process.join(LEAVE_S)
        code = worker.process.exitcode
        told = generation.failure.value
        if told is not None:
            return _again(told)
        how = "ended" if code is None else describe_exit(code)
        about = f"A worker process of {self._name} (pid {worker.process.pid}) {how}"
        if not worker.is_ready and (code is None or code >= 0):
            return WorkerError(
                f"{about} before its first answer. It wrote to this program's stderr "
                f"what ended it, if anything. {_START_REMEDY}"
            )
        return WorkerError(
            f"{about} while it was at {worker.task}. Often the machine is short of memory (see "
            "`dmesg`): use fewer processes= or smaller batches; else try that sample with "
            "processes=0."
        )

    def _stalled(self, doing: str) -> StalledError:
        return StalledError(
            f"The worker processes of {self._name} have been seen to {doing} for "
            f"{self._timeout_s:.0f} s. Look at what the function waits for (`py-spy dump` tells), "
            "or raise timeout=."
        )

    # -- ending

    def _check(self, generation: _Generation) -> None:
        failure = generation.failure.value
        if failure is not None:
            raise _again(failure)

    def _fail(self, generation: _Generation, error: BaseException) -> None:
        """End a generation for an error: all who wait for it are told the same."""
        is_ours = isinstance(error, WorkerError | StalledError)
        told = error if is_ours else ClosedError(f"A task for {self._name} was broken off.")
        assert isinstance(told, Exception)
        if generation.failure.settle(told) is told:
            if self._generation is generation:
                self._generation = None
            _end(generation, leave_s=0.0)

    def end(self) -> None:
        """Let nobody wait any more: the processes are killed."""
        self._close(leave_s=0.0)

    def close(self) -> None:
        """End the processes: by themselves within a short time, else by a kill. Safe to call
        twice, and in a forked child, which has none."""
        self._close(leave_s=LEAVE_S)

    def _close(self, *, leave_s: float) -> None:
        self._closed = True
        generation, self._generation = self._generation, None
        if generation is not None and os.getpid() == self._pid:
            closed = ClosedError(f"The worker processes of {self._name} are closed.")
            generation.failure.settle(closed)
            _end(generation, leave_s=leave_s)

    def disown(self) -> None:
        """Leave the processes to the parent, in a forked child: Python would end them at exit."""
        generation, self._generation = self._generation, None
        self._closed = True
        for worker in generation.workers if generation is not None else ():
            leave_to_parent(worker.process)
            worker.pipe.close()


def _again(failure: Exception) -> Exception:
    """An error that several threads raise, for one of them: a traceback is one thread's."""
    again = type(failure)(*failure.args)
    again.__cause__ = failure.__cause__
    return again


def _send(worker: _Worker, task: Any) -> None:
    # A pipe whose other end is gone says so when it is read: there the end is told in words.
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        worker.pipe.send_bytes(pickle.dumps(task, protocol=_PROTOCOL))


def _end(generation: _Generation, *, leave_s: float) -> None:
    """End processes; pipes are closed by whoever still reads them."""
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
    """A process's life: one answer a task, until an empty one or the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to decide on
    end_with_parent()
    try:
        function = pickle.loads(answer)
    except Exception as error:  # whatever imports raise is told where it can be read
        _tell(pipe, ("unusable", f"{type(error).__name__}: {error}."))
        return
    _tell(pipe, ("ready", None))
    with contextlib.suppress(EOFError, ConnectionError):
        while task := pipe.recv_bytes():
            try:
                told: Answer = ("done", function(pickle.loads(task)))
            except Exception:  # told to the parent, which raises
                told = ("failed", traceback.format_exc())
            _tell(pipe, told)


def _tell(pipe: connection.Connection[Any, Any], answer: Answer) -> None:
    try:
        data = pickle.dumps(answer, protocol=_PROTOCOL)
    except Exception:  # what can't be sent is told in words
        data = pickle.dumps(("failed", traceback.format_exc()), protocol=_PROTOCOL)
    pipe.send_bytes(data)
