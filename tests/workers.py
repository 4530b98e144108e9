"""Pytest plugin: `--workers N` collects all tests once and runs their files in N forked processes.

Collecting takes as long as a hundred tests: it imports torch, DALI and all test files. Here one
process does so and forks its workers, which share what it imported. Each worker takes the next
file when it has run the last one, in the order of collection, so that no worker idles while files
are left. The parent reports. A worker that dies in a test, such as one that the watchdog ended,
ends the run.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import struct
import sys
from multiprocessing.connection import Pipe, wait
from typing import TYPE_CHECKING, Any

import pytest

from tests import warm, watchdog

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

KERNELS = (
    "augment.view_kernels",
    "readers.fieldtypes.mask_kernels",
    "readers.fieldtypes.mask_warps",
)
_PLACE = struct.Struct("=I")  # a file's place in the order, in the pipe of files that wait
_MOST_WAITING = 8192  # of what a pipe holds, 64 KiB


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers", type=int, default=0, metavar="N", help="Run test files in N forked processes"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers. In a worker, return when no file is left: pytest then ends it as it
    ends any process, with all finalizers."""
    workers: int = session.config.getoption("workers")
    if not workers or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    workers = min(workers, len(files))
    _import_kernels()
    places = Places(len(files))
    links = warm.start(workers)
    watchdog.pause(session.config)
    running: list[Worker] = []
    for number in range(workers):
        theirs, ours = Pipe(duplex=False)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if not pid:
            theirs.close()
            for worker in running:
                worker.forget()
            places.only_take()
            warm.adopt(links, number)
            _become_worker(session.config, number, ours)
            _run(session, files, places.take)
            return True
        ours.close()
        running.append(Worker(number, pid, theirs))
    places.only_take()
    warm.adopt(links, None)
    _watch(session, running, places)
    return True


def _import_kernels() -> None:
    """Compile numba's kernels, or load what was compiled, for all workers."""
    for name in KERNELS:
        with contextlib.suppress(ImportError):  # without numba, which is optional
            importlib.import_module(f"penstock.{name}")


class Places:
    """The files that no worker has taken yet, in a pipe that all of them read."""

    def __init__(self, count: int) -> None:
        assert count <= _MOST_WAITING
        self._read, self._write = os.pipe()
        os.write(self._write, b"".join(map(_PLACE.pack, range(count))))

    def only_take(self) -> None:
        """Close the end that is written to, so that `take` ends."""
        os.close(self._write)

    def take(self) -> int | None:
        """Return the place of the next file; None after the last one."""
        place = os.read(self._read, _PLACE.size)  # the kernel lets one reader at a time read
        return _PLACE.unpack(place)[0] if place else None

    def close(self) -> None:
        """Close this process's end; what waits is lost when all have done so."""
        os.close(self._read)


class Worker:
    """A worker, as the parent sees it."""

    def __init__(self, number: int, pid: int, reports: Connection) -> None:
        self.number, self.pid = number, pid
        self.test: str | None = None
        """The test that runs; None between two tests."""
        self._reports = reports
        self._handle = os.pidfd_open(pid)

    def sources(self) -> list[int | Connection]:
        """Return what is ready to be read when it has sent something, or has ended."""
        return [self._handle] if self._reports.closed else [self._handle, self._reports]

    def has_ended(self) -> bool:
        """Return True if it has ended, even if processes that it forked hold its pipe."""
        return bool(wait([self._handle], 0))

    def received(self) -> Iterator[Any]:
        """Return the reports that are here."""
        while not self._reports.closed and self._reports.poll():
            try:
                self.test, report = self._reports.recv()
            except EOFError:
                self._reports.close()
                return
            if report is not None:
                yield report

    def forget(self) -> None:
        """Close what is read of it, in another worker: it notices when its parent ends."""
        self._reports.close()
        os.close(self._handle)

    def close(self) -> int:
        """Wait until it has ended, and return its exit status, negative for a signal."""
        self.forget()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _watch(session: pytest.Session, running: list[Worker], places: Places) -> None:
    """Report what the workers send until all have ended. Raises Failed or Interrupted."""
    hook, config = session.config.hook, session.config
    try:
        while running:
            wait([source for worker in running for source in worker.sources()])
            for worker in list(running):
                ended = worker.has_ended()  # what it sent until then is here
                for data in worker.received():
                    report = hook.pytest_report_from_serializable(config=config, data=data)
                    hook.pytest_runtest_logreport(report=report)
                if ended:
                    running.remove(worker)
                    if fault := _fault(worker, worker.close()):
                        session.shouldfail = fault  # what pytest prints at the end
                        raise session.Failed(fault)
            if session.shouldfail or session.shouldstop:
                while places.take() is not None:  # so that workers end after their files
                    pass
    finally:
        places.close()
        for worker in running:
            os.kill(worker.pid, signal.SIGKILL)
            worker.close()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _fault(worker: Worker, code: int) -> str | None:
    """Return why a worker that has ended didn't run to its end, if so."""
    if worker.test is not None:
        return f"worker {worker.number} ended with {code} in {worker.test}"
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return f"worker {worker.number} ended with {code} after its tests"
    return None


def _become_worker(config: pytest.Config, number: int, link: Connection) -> None:
    """Send reports to the parent, and share neither outputs nor folders with other workers."""
    config.workerinput = {"workerid": f"worker-{number}"}  # type: ignore[attr-defined]
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    manager.register(_Sender(config, link), "worker-reports")
    capture: Any = manager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    watchdog.revive(config)
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker-{number}"
    folders._basetemp.mkdir(mode=0o700)


class _Sender:
    """Sends each report, with the test that runs."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config = config
        self._link = link

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._link.send((nodeid, None))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send((report.nodeid, data))

    def pytest_runtest_logfinish(self) -> None:
        self._link.send((None, None))


def _run(
    session: pytest.Session, files: Sequence[Sequence[pytest.Item]], take: Callable[[], int | None]
) -> None:
    hook = session.config.hook
    for place in iter(take, None):
        items = files[place]
        # Before the next file, of whichever folder, all fixtures end but those of the session.
        for item, following in zip(items, [*items[1:], session], strict=True):
            hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail or session.shouldstop:
                return
