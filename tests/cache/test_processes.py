"""Crews of processes: none is left where one is closed while its processes start."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cache import ClosedError, WorkerProcesses, pickle_for_worker


def test_a_close_while_processes_start_ends_them(monkeypatch: Any) -> None:
    """Who closes sees none of them yet: whoever starts them has to end them."""
    crew, started = WorkerProcesses(1, pickle_for_worker(abs, what="abs"), name="abs"), []
    start = crew._start

    def closed_meanwhile(number: int) -> Any:
        worker = start(number)
        started.append(worker.process)
        crew.close()
        return worker

    monkeypatch.setattr(crew, "_start", closed_meanwhile)
    with pytest.raises(ClosedError):
        crew.run([-1], words=str)
    assert [process.is_alive() for process in started] == [False]
    assert not crew.pids
