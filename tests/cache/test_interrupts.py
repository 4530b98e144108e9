"""Test that a Ctrl-C at any line of the code that waits for threads leaves no thread waiting."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.watchdog import PATIENCE_S

# In a separate process: an interrupted start may leave a thread, and a hang ends the process.
JOB = """
import contextlib, faulthandler, queue, sys

from penstock.cache import threads
from penstock.cache.errors import ClosedError
from penstock.cache.threads import Ordered, Workers

HANGS_S = float(sys.argv[2])
OURS = {threads.__file__}
WAITS = {"Barrier", "Condition", "Event", "Future", "Semaphore"}  # Python's own


class CtrlC:
    def __init__(self, at):
        self.left, self.place = at, None

    def __call__(self, frame, event, _):
        code = frame.f_code
        if code.co_filename not in OURS and code.co_qualname.split(".")[0] not in WAITS:
            return None
        if event in ("line", "return"):
            self.left -= 1
            if not self.left:
                self.place = f"{code.co_qualname}, line {frame.f_lineno}, {event}"
                print(self.place, flush=True)
                raise KeyboardInterrupt
        return self


def work(_):
    with contextlib.suppress(queue.Empty):
        queue.SimpleQueue().get(timeout=0.002)  # the main thread comes to wait for it
    return 1


def job(pool, interrupt):
    run = Ordered(work, range(3), pool=pool, ahead=2)
    waiting, is_closing = [], False
    try:
        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            assert next(run) == 1
            run.close()
            while len(waiting) < 5:
                waiting.append(pool.submit(work, None))
            is_closing = True
            pool.close()
    finally:
        sys.settrace(None)
    if is_closing and pool._closed:  # nobody waits for a call that never comes
        assert all(outcome.wait(HANGS_S / 2) for outcome in waiting)
    run.close()


at = 0
while True:
    at += 1
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    pool, interrupt = Workers(int(sys.argv[1]), name="test"), CtrlC(at)
    job(pool, interrupt)
    if not interrupt.place:
        break
    try:  # the pool still works or is closed
        assert pool.submit(work, None).result(HANGS_S) == 1
    except ClosedError:
        pass
    pool.close()
    assert not [thread for thread in pool._threads if thread.is_alive()]
print("places", at)
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_ctrl_c_at_any_place_leaves_a_pool_that_works_and_ends(workers: int) -> None:
    job = subprocess.run(
        [sys.executable, "-c", JOB, str(workers), "40"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert job.returncode == 0, (job.stdout.splitlines()[-1:], job.stderr)
    word, places = job.stdout.splitlines()[-1].split()
    assert word == "places"
    assert int(places) > 50
