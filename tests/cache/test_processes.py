"""Test that no worker process is left if its owner is closed while it starts."""

from __future__ import annotations

from multiprocessing.context import ForkServerProcess

import pytest

from penstock.cache import ClosedError, WorkerProcesses, pickle_for_worker


def test_a_close_while_processes_start_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """close() can't see them yet, so the thread that starts them has to end them."""
    workers = WorkerProcesses(1, pickle_for_worker(abs, what="abs"), name="abs")
    started: list[ForkServerProcess] = []
    start = ForkServerProcess.start

    def start_and_close(process: ForkServerProcess) -> None:
        start(process)
        started.append(process)
        workers.close()

    monkeypatch.setattr(ForkServerProcess, "start", start_and_close)
    with pytest.raises(ClosedError):
        workers.run([-1], describe=str)
    assert [process.is_alive() for process in started] == [False]
    assert not workers.pids
