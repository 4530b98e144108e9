"""Maps in worker processes give the same results; the death of a process is reported at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from penstock.augment import Map
from penstock.cache import ClosedError, MapError, NotPicklableError, StalledError, WorkerError
from penstock.readers.fieldtypes import Array, FieldType, Text, Tokens, Value
from tests.layers import ROOT
from tests.pipeline.feed.mapping import functions
from tests.pipeline.feed.mapping.batches import batch_of, mapped, mapper, values_of
from tests.watchdog import PATIENCE_S

JITTERED: dict[str, FieldType] = {"vector": Array("float32", (4,)), "s": Text()}


def ops(processes: int) -> list[Map]:
    return [
        Map(functions.jitter, ("vector", "number"), returns=JITTERED, processes=processes),
        Map(
            functions.tokens_of_all,
            "caption",
            returns={"new": Tokens()},
            batched=True,
            processes=processes,
        ),
        Map(functions.odd_is_bad, "number", processes=processes),
    ]


@pytest.mark.parametrize("processes", [1, 3])
def test_any_number_of_processes_gives_the_same(processes: int) -> None:
    batches = [batch_of(range(start, start + 7)) for start in (0, 100)]
    with_processes = mapper(*ops(processes))
    try:
        for number, batch in enumerate(batches):
            alone, bad = mapped(batch, *ops(0), epoch=number)
            found: dict[int, str] = {}
            there = with_processes(batch, epoch=number, bad=found)
            assert found == bad
            assert bad
            for field in ("vector", "s", "new", "number"):
                assert values_of(there, field) == values_of(alone, field)
        assert len(with_processes.pids) == 3 * processes
        assert with_processes.threads == processes
    finally:
        with_processes.close()


def test_threads_share_the_processes() -> None:
    one = mapper(Map(functions.tokens, "caption", returns={"n": Tokens()}, processes=2))
    found: dict[int, Any] = {}

    def run(number: int) -> None:
        batch = batch_of([number, number + 1, number + 2])
        found[number] = values_of(one(batch, epoch=0, bad={}), "n")

    threads = [threading.Thread(target=run, args=(10 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one.close()
    for number in range(0, 40, 10):
        expected, _ = mapped(
            batch_of([number, number + 1, number + 2]),
            Map(functions.tokens, "caption", returns={"n": Tokens()}),
        )
        assert found[number] == values_of(expected, "n")


class TestErrors:
    def test_what_cannot_be_sent_is_said_before_any_work(self) -> None:
        with pytest.raises(NotPicklableError, match=r"The function of Map\(.*lambda"):
            mapper(Map(lambda x: x, "number", processes=1))

    def test_a_function_s_own_error_comes_back_with_its_sample(self) -> None:
        with pytest.raises(KeyError, match="seven") as caught:
            mapped(batch_of(range(9)), Map(functions.fail_at_seven, "number", processes=2))
        process, at = caught.value.__notes__
        assert "In the worker process:\nTraceback" in process
        assert "in fail_at_seven" in process
        assert at == "while Map(fail_at_seven) was processing sample 7 (sample-7.png)"

    def test_an_error_that_cannot_be_sent_is_told_in_words(self) -> None:
        with pytest.raises(WorkerError, match="UnsendableError in a worker process: 1 and 3"):
            mapped(batch_of([3]), Map(functions.fail_unsendably, "number", processes=1))

    def test_what_does_not_fit_is_the_same_error(self) -> None:
        op = Map(functions.tokens, "caption", returns={"n": Value("int64")}, processes=1)
        with pytest.raises(
            MapError, match=r"At sample 2 \(sample-2.png\): Map\(tokens\)"
        ) as caught:
            mapped(batch_of([2]), op)
        assert caught.value.sample_id == 2

    def test_a_process_that_dies_is_named_and_the_next_task_has_others(self) -> None:
        one = mapper(Map(functions.killed_at_seven, "number", processes=2))
        with pytest.raises(
            WorkerError,
            match=r"(?s)Map\(killed_at_seven\) \(pid \d+\) was killed by SIGKILL.*of the samples 7",
        ):
            one(batch_of([5, 6, 7, 8]), epoch=0, bad={})
        assert values_of(one(batch_of([8, 9]), epoch=0, bad={}), "number") == [8, 9]
        one.close()

    def test_a_process_that_is_killed_while_all_wait_for_it(self) -> None:
        """Not by itself: by the system, when it is short of memory."""
        one = mapper(Map(functions.wait_for_ever, "number", processes=2))
        errors: list[Exception] = []

        def run() -> None:
            try:
                one(batch_of([1]), epoch=0, bad={})
            except WorkerError as error:
                errors.append(error)

        waiting = [threading.Thread(target=run) for _ in range(3)]  # one waits for a free process
        for thread in waiting:
            thread.start()
        while len(one.pids) < 2:
            threading.Event().wait(0.01)
        os.kill(one.pids[0], signal.SIGKILL)
        for thread in waiting:
            thread.join(PATIENCE_S)
        assert len(errors) == 3
        assert len({str(error) for error in errors}) == 1
        one.close()

    def test_a_function_that_hangs_is_said_and_its_processes_end(self) -> None:
        one = mapper(Map(functions.wait_for_ever, "number", processes=1), timeout_s=0.2)
        with pytest.raises(StalledError, match=r"Map\(wait_for_ever\) of the samples 1"):
            one(batch_of([1]), epoch=0, bad={})
        assert one.pids == []

    def test_after_close_there_is_an_error_and_no_process(self) -> None:
        one = mapper(Map(functions.tokens, "caption", returns={"n": Tokens()}, processes=1))
        one(batch_of([1]), epoch=0, bad={})
        (pid,) = one.pids
        one.close()
        one.close()
        assert not os.path.exists(f"/proc/{pid}")
        with pytest.raises(ClosedError):
            one(batch_of([1]), epoch=0, bad={})


FORKING = """
import os, sys
from penstock.augment import Map
from penstock.cache.errors import ForkedError
from tests.pipeline.feed.mapping import functions
from tests.pipeline.feed.mapping.batches import batch_of, mapper, values_of

if __name__ == "__main__":
    one = mapper(Map(functions.odd_is_bad, "number", processes=2))
    batch = batch_of([2, 4])
    one(batch, epoch=0, bad={})
    before = one.pids
    pid = os.fork()
    if pid == 0:
        try:
            one(batch, epoch=0, bad={})
        except ForkedError:
            one.close()
            sys.exit(0)  # Python's own exit ends the children that it knows of
        os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    assert values_of(one(batch, epoch=0, bad={}), "number") == [2, 4]
    assert one.pids == before
    print(*before)
"""

ORPHANING = """
import os, signal
from penstock.augment import Map
from tests.pipeline.feed.mapping import functions
from tests.pipeline.feed.mapping.batches import batch_of, mapper

if __name__ == "__main__":
    one = mapper(Map(functions.odd_is_bad, "number", processes=2))
    one(batch_of([2, 4]), epoch=0, bad={})
    print(*one.pids, flush=True)
    END
"""


def run(script: str, tmp_path: Any) -> list[int]:
    """Runs a script; the process ids that it printed."""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == ""
    return [int(word) for word in done.stdout.split()]


def gone(pid: int) -> bool:
    """Return True if a process ends in time. It is polled, as only a parent can wait for it."""
    for _ in range(int(PATIENCE_S * 100)):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        threading.Event().wait(0.01)
    return False


def test_a_forked_child_is_refused_and_leaves_them_alone(tmp_path: Any) -> None:
    assert len(run(FORKING, tmp_path)) == 2


@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_they_end_with_their_process(tmp_path: Any, end: str) -> None:
    pids = run(ORPHANING.replace("END", end), tmp_path)
    assert len(pids) == 2
    assert all(map(gone, pids))
