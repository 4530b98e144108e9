"""Test the order, limits, errors and exits of threads, and of worker processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from multiprocessing.context import ForkServerProcess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import (
    ClosedError,
    Ordered,
    Outcome,
    StalledError,
    WorkerProcesses,
    Workers,
    ordered,
    pickle_for_worker,
)
from tests.properties import examples
from tests.watchdog import PATIENCE_S


@examples(25)
@given(st.lists(st.integers(), max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_results_come_in_order(items: list[int], workers: int, ahead: int) -> None:
    assert list(ordered(lambda x: x * 2, items, workers=workers, ahead=ahead)) == [
        x * 2 for x in items
    ]


def test_at_most_ahead_items_are_read_early() -> None:
    taken: list[int] = []

    def items():
        for i in range(100):
            taken.append(i)
            yield i

    run = ordered(lambda x: x, items(), workers=2, ahead=3)
    assert next(run) == 0
    assert len(taken) <= 4
    run.close()


def test_an_error_is_raised_at_its_position() -> None:
    def work(x: int) -> int:
        if x == 3:
            raise KeyError("three")
        return x

    run = ordered(work, range(6), workers=3, ahead=6)
    assert [next(run) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        next(run)


def test_closing_ends_the_threads() -> None:
    before = threading.active_count()
    run = ordered(lambda x: x, range(100), workers=4, ahead=8)
    next(run)
    run.close()
    assert threading.active_count() == before


def test_a_stalled_read_raises_with_the_reason() -> None:
    never = threading.Event()
    pool = Workers(1, name="test")
    run = Ordered(lambda _: never.wait(30), [1], pool=pool, ahead=1, timeout_s=0.05)
    with pytest.raises(StalledError, match="timeout="):
        next(run)
    never.set()
    run.close()
    pool.close()


def test_a_timeout_of_the_work_itself_is_passed_on() -> None:
    def work(_: int) -> None:
        raise TimeoutError("the store's own")

    with pytest.raises(TimeoutError, match="the store's own"):
        list(ordered(work, [1], workers=1, ahead=1))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the policy is Linux's")
@pytest.mark.parametrize("lets_others_finish", [True, False])
def test_threads_do_not_run_before_the_thread_that_wakes_them(lets_others_finish: bool) -> None:
    pool = Workers(1, name="test", lets_others_finish=lets_others_finish)
    policy = pool.submit(lambda _: os.sched_getscheduler(0), None).result()
    pool.close()
    wanted = os.SCHED_BATCH if lets_others_finish else os.SCHED_OTHER
    assert (policy, os.sched_getscheduler(0)) == (wanted, os.SCHED_OTHER)


def test_closed_workers_refuse() -> None:
    pool = Workers(1, name="test")
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.submit(len, "x")


def test_an_unclosed_pool_does_not_hang_the_exit() -> None:
    code = (
        "from penstock.cache.threads import ordered\n"
        "run = ordered(lambda x: x, iter(int, 1), workers=2, ahead=4)\n"
        "next(run)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_close_logs_a_thread_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cache.threads.STALL_TIMEOUT_S", 0.05)
    begun, never = threading.Event(), threading.Event()
    pool = Workers(1, name="stuck")

    def hang(_: object) -> bool:
        begun.set()
        return never.wait(30)

    hanging = pool.submit(hang, None)
    assert begun.wait(30)
    waiting = pool.submit(len, "x")
    assert not pool.close()
    assert "penstock-stuck_0" in caplog.text
    with pytest.raises(CancelledError):
        waiting.result()
    never.set()
    assert hanging.result(30)
    assert pool.close()


def test_several_threads_may_wait_for_an_outcome_and_read_it_repeatedly() -> None:
    go = threading.Event()
    pool = Workers(4, name="test")
    slow = pool.submit(lambda _: go.wait(30), None)
    others = [pool.submit(slow.result, 30) for _ in range(3)]
    assert not slow.wait(0.0)
    with pytest.raises(TimeoutError, match=r"No result after 0\.01 s"):
        slow.result(0.01)
    assert not slow.cancel()
    go.set()
    assert [other.result() for other in (*others, slow, slow)] == [True] * 5
    pool.close()


def test_an_outcome_is_run_or_cancelled_never_both() -> None:
    done: list[int] = []
    outcome = Outcome[None]()
    assert outcome.cancel()
    assert outcome.cancel()
    outcome.run(done.append, 1)
    assert not done
    assert outcome.done()
    other = Outcome[None]()
    other.run(done.append, 2)
    assert not other.cancel()
    assert other.result() is None
    assert done == [2]


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
