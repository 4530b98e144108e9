"""Movers: threads that share out the parts of one batch."""

from __future__ import annotations

import threading

import pytest

from penstock.readers.reading import MOST_COPY_THREADS, CopyThreads
from penstock.readers.reading import parallel_copies as module


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> CopyThreads:
    monkeypatch.setattr(module, "usable_cores", lambda: 64)
    return CopyThreads()


def test_each_part_is_worked_on_once_and_several_threads_do_it(movers: CopyThreads) -> None:
    together, done, names = threading.Barrier(MOST_COPY_THREADS), list[int](), set[str]()

    def work(part: int) -> None:
        if part < MOST_COPY_THREADS:
            together.wait(60)  # nobody gets on before all have come
        names.add(threading.current_thread().name)
        done.append(part)

    movers.run(work, range(40))
    movers.close()
    assert sorted(done) == list(range(40))
    assert len(names) == MOST_COPY_THREADS
    assert (
        len([name for name in names if name.startswith("penstock-move")]) == MOST_COPY_THREADS - 1
    )


def test_what_one_part_raises_is_raised_and_the_rest_is_left(movers: CopyThreads) -> None:
    begun = []

    def work(part: int) -> None:
        begun.append(part)
        raise OSError(f"part {part}")

    with pytest.raises(OSError, match="part"):
        movers.run(work, range(1000))
    assert len(begun) <= MOST_COPY_THREADS
    movers.run(begun.append, [7])
    assert begun[-1] == 7
    movers.close()


def test_closed_movers_leave_the_work_to_who_asks(movers: CopyThreads) -> None:
    movers.close()
    movers.close()
    done: list[int] = []
    movers.run(done.append, range(10))
    assert done == list(range(10))


def test_a_machine_of_one_core_has_no_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: 1)
    movers, names = CopyThreads(), set()
    movers.run(lambda _: names.add(threading.current_thread().name), range(10))
    assert names == {threading.current_thread().name}
    movers.close()
