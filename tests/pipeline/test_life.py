"""Nothing is left behind: threads, file descriptors, shared memory; and Ctrl-C ends a job soon."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from penstock.augment import imagenet_train
from penstock.cache import CorruptSampleError
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from tests import warm
from tests.warm import Warm
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class Resources(NamedTuple):
    threads: int
    native_threads: Counter[str]
    descriptors: Counter[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Resources:
        gc.collect()
        return cls(
            threading.active_count(),
            native_threads(),
            descriptors(),
            # The folder is the machine's: tests that run at the same time make semaphores of
            # multiprocessing there, which Penstock never does.
            frozenset(n for n in os.listdir("/dev/shm") if not n.startswith("sem.mp-")),
        )


def descriptors() -> Counter[str]:
    """Count what this process has open: paths of files, `socket:[number]`.

    Without files of /proc: the tests' watchdog opens them at any moment, to see whether a test
    computes, and the listing itself is one.
    """
    found = Counter[str]()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
        except FileNotFoundError:  # closed since: so it isn't left
            continue
    return Counter({path: count for path, count in found.items() if not path.startswith("/proc/")})


def native_threads() -> Counter[str]:
    """The threads of this process that have a name of their own, DALI's above all.

    Without those that Python starts, which `threading` counts: one that was joined is gone for
    Python before it is for the system. Nor those of Arrow's allocator, which come late and stay.
    """
    names = Counter[str]()
    for thread in os.listdir("/proc/self/task"):
        try:
            names[Path(f"/proc/self/task/{thread}/comm").read_text().strip()] += 1
        except FileNotFoundError:  # gone since: so it isn't left
            continue
    del names[Path("/proc/self/comm").read_text().strip()], names["jemalloc_bg_thd"]
    return names


def make(path: Path) -> DataLoader:
    return DataLoader(
        Dataset(str(path)), batch_size=16, shuffle=True, seed=1, augment=imagenet_train(32)
    )


@pytest.fixture
def nothing_left(pack: Path) -> Iterator[None]:
    with make(pack) as loader:  # DALI and torch keep process-wide threads after their first use
        next(iter(loader))
    before = Resources.now()
    yield
    after = Resources.now()
    assert after.threads <= before.threads
    assert after.native_threads - before.native_threads == Counter()
    assert after.descriptors - before.descriptors == Counter()
    assert after.shared_memory == before.shared_memory


def test_a_thread_of_dali_is_counted_by_its_name(pack: Path) -> None:
    with make(pack) as loader:
        next(iter(loader))
        assert any(name.startswith("[DALI]") for name in native_threads())


def test_descriptors_that_the_watchdog_opens_are_not_taken_for_left_ones(tmp_path: Path) -> None:
    """The watchdog reads /proc at any moment; its open files are recognised by name."""
    with open("/proc/self/stat"), open(tmp_path / "left", "w"):
        assert descriptors()[str(tmp_path / "left")] == 1
        assert not [path for path in descriptors() if path.startswith("/proc/")]


@pytest.mark.usefixtures("nothing_left")
class TestNothingIsLeft:
    def test_after_close(self, pack: Path) -> None:
        loader = make(pack)
        next(iter(loader))
        loader.close()

    def test_after_an_exception_in_the_loop(self, pack: Path) -> None:
        def fail() -> None:
            with make(pack) as loader:
                for _ in loader:
                    raise KeyError

        with pytest.raises(KeyError):
            fail()

    def test_after_an_abandoned_iterator(self, pack: Path) -> None:
        for _ in make(pack):
            break

    def test_after_an_abandoned_loader(self, pack: Path) -> None:
        loader = make(pack)
        iter(loader)
        del loader

    def test_after_a_failing_read(self, pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object, **__: object) -> None:
            raise CorruptSampleError("planted", sample_id=3)

        with make(pack) as loader:
            monkeypatch.setattr(Dataset, "read", fail)
            with pytest.raises(CorruptSampleError, match="planted"):
                next(iter(loader))


def test_an_error_surfaces_at_its_own_batch_and_asking_again_continues(
    pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = Dataset.read, 0

    with make(pack) as loader:
        whole = [labels.tolist() for _, labels in loader]
        loader.set_epoch(5)
        loader.set_epoch(0)
        damaged = Dataset(str(pack)).rows(loader.samples_of(2))[0]

        def fail_once(self: Dataset, rows: Any, **options: Any) -> Any:
            if not failures and (rows == damaged).all(axis=1).any():
                raise OSError("planted")
            return read(self, rows, **options)

        monkeypatch.setattr(Dataset, "read", fail_once)
        found: list[list[int]] = []
        batches = iter(loader)
        while len(found) < len(whole):
            try:
                found.append(next(batches)[1].tolist())
            except OSError:
                assert len(found) == 2
                failures += 1
        assert failures == 1
        assert found == whole


JOB = """
import sys, threading
from penstock.augment import imagenet_train
from penstock.pipeline import DataLoader
from penstock.readers import Dataset

def train(path):
    loader = DataLoader(
        Dataset(path), batch_size=16, shuffle=True, seed=1, augment=imagenet_train(32)
    )
    {body}

try:
    train(sys.argv[1])
except KeyboardInterrupt:
    ours = [t.name for t in threading.enumerate() if t.name.startswith("penstock")]
    print("left", ours, flush=True)
    raise SystemExit(7)
"""
FOR_EVER = """
    with loader:
        while True:
            for _ in loader:
                print("step\\n", end="", flush=True)  # whole, or not at all
"""
UNCLOSED = """
    for _ in loader:
        break
    sys.leaked = loader
"""


# The promise is 5 s; on a busy machine the end alone is looked at.
@pytest.mark.parametrize("patience_s", [PATIENCE_S, pytest.param(5.0, marks=pytest.mark.timed)])
def test_ctrl_c_ends_the_job_within_5_s(pack: Path, patience_s: float) -> None:
    with Warm(["-c", JOB.format(body=FOR_EVER), pack], destroys_libraries=True) as job:
        assert job.stdout.readline() == "step\n"
        job.send_signal(signal.SIGINT)
        out, _ = job.communicate(timeout=patience_s)
    assert job.returncode == 7
    assert out.splitlines()[-1] == "left []"


def test_an_unclosed_loader_does_not_hang_the_exit(pack: Path) -> None:
    code = JOB.format(body=UNCLOSED)
    run = warm.run(["-c", code, pack], destroys_libraries=True)
    assert (run.returncode, run.stderr) == (0, "")
