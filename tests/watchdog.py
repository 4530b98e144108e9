"""Pytest plugin: end a run that makes no progress, and find processes that tests leave behind.

step_timeout (seconds, in the pytest section of pyproject.toml) is the time that one step may take
without computing. Steps are: importing a test module, a fixture, a test, its tear-down, leaving the
process. After it, the stacks of all threads are written and the process ends, even if a thread
holds the GIL. Computing is CPU time of this process and its children: a test that other programs
slow down continues, one that waits for ever ends, and one that computes for ever ends after ten
times as long. Under xdist this ends the worker, and with --max-worker-restart=0 the run.

Every process of a run has a mark in its environment. Processes that have it after the run are
listed and killed, and the run fails.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK = "PENSTOCK_TEST_RUN"
NAME = "watchdog"
# Helpers of multiprocessing, which end with the process that they serve.
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
PATIENCE_S = 300.0
"""For waits of tests that end by themselves: step_timeout ends one that doesn't, much sooner."""
_GRACE_S = 10.0  # processes that are about to end may
_LOOKS = 5  # in the time that a step has
_COMPUTES = 0.02  # of a core: waits that wake up to look at a flag take a tenth of that
_MOST_STEPS = 10
_DOG = pytest.StashKey["Watchdog"]()
_RUN = pytest.StashKey[str]()


def on_the_watchdogs_thread() -> bool:
    """Return True on the watchdog's thread, to which injected faults don't apply."""
    return threading.current_thread().name == NAME


class Watchdog:
    """A thread that ends this process if a step neither ends nor computes. It reads the CPU time;
    the process is ended by faulthandler, which needs no GIL."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._stderr = os.dup(2)
        self._lock = threading.Lock()
        self._began_s: float | None = None
        self._over = threading.Event()
        if step_s:
            threading.Thread(target=self._look, name=NAME, daemon=True).start()

    def step(self) -> None:
        """Start a step."""
        with self._lock:
            self._began_s = time.monotonic()
            self._wind()

    def rest(self) -> None:
        """End a step; the time between two steps is not limited."""
        with self._lock:
            self._began_s = None
            faulthandler.cancel_dump_traceback_later()

    def last(self) -> None:
        """Start the last step, which ends with the process."""
        self._over.set()
        self.step()

    def say(self, report: str) -> None:
        """Write a message to where tracebacks are written."""
        os.write(self._stderr, report.encode())

    def _wind(self) -> None:
        if self._step_s:
            faulthandler.dump_traceback_later(self._step_s, file=self._stderr, exit=True)

    def _look(self) -> None:
        every_s = self._step_s / _LOOKS
        before_s = _others_cpu_s()
        while not self._over.wait(every_s):
            try:
                now_s = _others_cpu_s()
            except OSError:  # a fault of the disk that a test injects hit this look
                continue
            computes = now_s - before_s > _COMPUTES * every_s
            before_s = now_s
            with self._lock:
                if self._over.is_set() or self._began_s is None or not computes:
                    continue
                if time.monotonic() - self._began_s < _MOST_STEPS * self._step_s:
                    self._wind()


def _others_cpu_s() -> float:
    """Return the CPU-seconds of this process and its children, without this thread."""
    from penstock.pipeline.bench import tree_cpu_s

    return tree_cpu_s() - time.thread_time()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("step_timeout", "Seconds that a step of a test may take idle", default="0")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RUN] = os.environ.setdefault(MARK, uuid.uuid4().hex)
    config.stash[_DOG] = Watchdog(float(config.getini("step_timeout")))  # stderr isn't captured yet


@pytest.hookimpl(tryfirst=True)
def pytest_collectstart(collector: pytest.Collector) -> None:
    collector.config.stash[_DOG].step()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_DOG].rest()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.config.stash[_DOG].step()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(request: pytest.FixtureRequest) -> None:
    request.config.stash[_DOG].step()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    item.config.stash[_DOG].step()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    item.config.stash[_DOG].step()
    try:
        return (yield)
    finally:
        item.config.stash[_DOG].rest()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Start the last step: leaving the process waits for all threads."""
    config.stash[_DOG].last()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # the controller looks, when all workers are gone
        return
    grace_s = min(_GRACE_S, float(session.config.getini("step_timeout")))
    left = dict(left_behind(session.config.stash[_RUN], grace_s=grace_s))
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if left:
        report = "\n".join(f"  {pid}: {command}" for pid, command in left.items())
        session.config.stash[_DOG].say(
            f"\nProcesses that tests left behind, killed now:\n{report}\n"
        )
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def left_behind(mark: str, *, grace_s: float) -> Iterator[tuple[int, str]]:
    """Return the ids and commands of processes with the mark, other than this one and helpers, that
    still run after `grace_s`."""
    end = time.monotonic() + grace_s
    for pid, command in _marked(mark):
        try:
            handle = os.pidfd_open(pid)
        except OSError:  # it has ended
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                yield pid, command
        finally:
            os.close(handle)


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:  # others' processes, and those that end meanwhile
            continue
        if not any(helper in command for helper in HELPERS):
            yield int(folder.name), command.strip()
