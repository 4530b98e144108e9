"""Threads that copy the parts of one batch."""

from __future__ import annotations

import threading

import pytest

from penstock.readers.reading import MOST_COPY_THREADS, CopyThreads
from penstock.readers.reading import parallel_copies as module


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> CopyThreads:
    monkeypatch.setattr(module, "usable_cores", lambda: 64)
    return CopyThreads()


def test_each_part_is_worked_on_once_and_several_threads_do_it(threads: CopyThreads) -> None:
    together, done, names = threading.Barrier(MOST_COPY_THREADS), list[int](), set[str]()

    def work(part: int) -> None:
        if part < MOST_COPY_THREADS:
            together.wait(60)  # no thread continues before all have started
        names.add(threading.current_thread().name)
        done.append(part)

    threads.run(work, range(40))
    threads.close()
    assert sorted(done) == list(range(40))
    assert len(names) == MOST_COPY_THREADS
    assert (
        len([name for name in names if name.startswith("penstock-move")]) == MOST_COPY_THREADS - 1
    )


def test_the_error_of_one_part_is_raised_and_the_rest_is_skipped(threads: CopyThreads) -> None:
    begun = []

    def work(part: int) -> None:
        begun.append(part)
        raise OSError(f"part {part}")

    with pytest.raises(OSError, match="part"):
        threads.run(work, range(1000))
    assert len(begun) <= MOST_COPY_THREADS
    threads.run(begun.append, [7])
    assert begun[-1] == 7
    threads.close()


def test_closed_threads_leave_the_work_to_the_caller(threads: CopyThreads) -> None:
    threads.close()
    threads.close()
    done: list[int] = []
    threads.run(done.append, range(10))
    assert done == list(range(10))


def test_a_machine_of_one_core_has_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 1)
    threads, names = CopyThreads(), set()
    threads.run(lambda _: names.add(threading.current_thread().name), range(10))
    assert names == {threading.current_thread().name}
    threads.close()
