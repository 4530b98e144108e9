"""After os.fork() with a live loader the child gets an error and ends; the parent continues."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from penstock.cache import ForkedError, Ordered, Workers
from penstock.pipeline import DataLoader
from tests import warm
from tests.torch_datasets import Squares, Streams
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import os, sys, warnings
import fsspec
from penstock.augment import imagenet_train
from penstock.cache import DiskCache
from penstock.cache.errors import ForkedError
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from tests.torch_datasets import Squares

# Of forking where threads run, Python 3.12 on.
warnings.simplefilter("ignore", DeprecationWarning)
kind, pack, folder = sys.argv[1:4]

def make():
    if kind == "workers":
        return DataLoader(Squares(200, "int"), 8, num_workers=2, persistent_workers=True)
    if kind == "cached":
        cache = DiskCache(folder + "/cache", max_bytes="64MiB")
        files = fsspec.filesystem("file", skip_instance_cache=True)
        dataset = Dataset(pack, fields=("label", "id"), filesystem=files, cache=cache)
        return DataLoader(dataset, 8, shuffle=True, seed=1, num_workers=1)
    dataset = Dataset(pack, fields=("image", "label", "id"))
    return DataLoader(dataset, 8, shuffle=True, seed=1, augment=imagenet_train(32), num_workers=2)

def child(passing, loader):
    if kind == "workers":  # torch's workers may be restarted; those that exist are the parent's
        steps = [lambda: next(passing)]
    else:
        steps = [lambda: next(passing), lambda: iter(loader), loader.state_dict]
    for step in steps:
        try:
            step()
        except ForkedError as error:
            assert str(os.getppid()) in str(error) and "forked child" in str(error), error
        else:
            raise AssertionError("a forked child was let in")
    loader.close()
    if kind != "cached":
        with make() as own:
            assert next(iter(own)) is not None
    sys.exit(0)

if __name__ == "__main__":
    loader = make()
    reference = [batch for batch in loader]
    loader.set_epoch(0)
    passing = iter(loader)
    first = [next(passing), next(passing)]
    pid = os.fork()
    if pid == 0:
        child(passing, loader)
    _, status = os.waitpid(pid, 0)
    assert status == 0, status
    if kind == "cached":  # its claims stayed, and its locks
        folder = loader.dataset.remote.cache.use(lambda folder: folder)
        assert folder.space.forget_dead_jobs() == 0
        assert len(folder.catalogue.jobs()) == 1
    found = first + list(passing)
    def ids_of(batch):
        return (batch[-1] if isinstance(batch, tuple) else batch).tolist()
    assert list(map(ids_of, found)) == list(map(ids_of, reference))
    print("went on")
"""


@pytest.mark.parametrize("kind", ["native", "cached", "workers"])
def test_a_forked_child_is_refused_and_ends(kind: str, pack: Path, tmp_path: Path) -> None:
    done = warm.run(["-c", SCRIPT, kind, pack, tmp_path], cwd=warm.ROOT, destroys_libraries=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "went on\n"
    assert not done.stderr


def test_idle_persistent_workers_live_through_the_fork_of_others(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for dataset in (Squares(8, "int"), Streams([4, 4])):
        train: Any = DataLoader(
            dataset, 2, num_workers=2, persistent_workers=True, timeout=PATIENCE_S
        )
        epochs = []
        for _ in range(3):
            epochs.append([batch.tolist() for batch in train])
            validation: Any = DataLoader(Squares(4, "int"), 2, num_workers=2, timeout=PATIENCE_S)
            assert len(list(validation)) == 2
            assert in_child(lambda: None) == 0
        assert epochs == [epochs[0]] * 3
        train.close()
    assert not capfd.readouterr().err


def in_child(act: object) -> int:
    """act() in a forked child; its exit status: 3 for a ForkedError."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()  # type: ignore[operator]
            status = 0
        except ForkedError:
            status = 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_threads_are_not_waited_for_in_a_child() -> None:
    pool = Workers(1, name="test")
    run = Ordered(lambda item: item + 1, iter(range(6)), pool=pool, ahead=2)
    assert next(run) == 1
    assert in_child(lambda: next(run)) == 3
    assert in_child(lambda: pool.submit(str, 1)) == 3
    assert in_child(run.close) == 0
    assert in_child(pool.close) == 0
    assert list(run) == [2, 3, 4, 5, 6]
    pool.close()
