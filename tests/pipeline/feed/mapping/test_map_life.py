"""Loaders with Maps in processes leave nothing behind, however they end."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock import Array, DataLoader, Dataset, Map, Text
from tests import warm
from tests.layers import ROOT
from tests.pipeline.feed.mapping import functions
from tests.pipeline.test_life import descriptors

pytestmark = pytest.mark.filterwarnings("ignore:Labels cluster inside shards")


def make(pack: Path) -> Any:
    returns: Any = {"label": Array("float32", (3,)), "word": Text()}
    op = Map(functions.draw, ("label", "id"), returns=returns, processes=2)
    dataset = Dataset(str(pack), fields=("label", "id"))
    return DataLoader(dataset, 8, shuffle=True, seed=1, augment=[op])


def pids_of(loader: Any) -> list[int]:
    return list(loader._engine.assembly.pipeline.reader.maps.pids)


def closed(loader: Any) -> None:
    next(iter(loader))
    loader.close()


def left_in_the_middle(loader: Any) -> None:
    for _ in loader:
        break


def failed(loader: Any) -> None:
    def loop() -> None:
        with loader:
            for _ in loader:
                raise KeyError

    with pytest.raises(KeyError):
        loop()


@pytest.mark.parametrize("end", [closed, left_in_the_middle, failed])
def test_processes_and_pipes_end_with_their_loader(pack: Path, end: Any) -> None:
    with make(pack) as loader:  # the fork server stays
        next(iter(loader))
    gc.collect()
    before = descriptors()
    loader = make(pack)
    next(iter(loader))
    pids = pids_of(loader)
    end(loader)
    del loader
    gc.collect()
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert descriptors() - before == {}


JOB = """
import os, signal, sys
from pathlib import Path
from penstock.cache.errors import ForkedError
from tests.pipeline.feed.mapping.test_map_life import make, pids_of

if __name__ == "__main__":
    loader = make(Path(sys.argv[1]))
    passing = iter(loader)
    next(passing)
    print(*pids_of(loader), flush=True)
    END
"""
FORK = """
    pid = os.fork()
    if pid == 0:
        try:
            next(passing)
        except ForkedError:
            loader.close()
            sys.exit(0)
        os._exit(3)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(passing)) > 2
"""
FOR_EVER = """
    try:
        while True:
            for _ in loader:
                print("step", flush=True)
    except KeyboardInterrupt:
        raise SystemExit(7)
"""


def job(pack: Path, end: str) -> list[str]:
    return ["-c", JOB.replace("    END", end), str(pack)]


@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), (FORK, 0), ("    os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL)],
    ids=["unclosed", "forked", "killed"],
)
def test_they_end_with_their_program(pack: Path, end: str, code: int) -> None:
    """A reader of the output waits for all processes that have it open, workers included."""
    done = warm.run(job(pack, end), cwd=ROOT, destroys_libraries=True)
    assert (done.returncode, done.stderr) == (code, "")
    assert len(done.stdout.split()) == 2


def test_ctrl_c_is_the_program_s_to_hear(pack: Path) -> None:
    """A terminal tells all processes of it; the workers say nothing."""
    with warm.Warm(job(pack, FOR_EVER), cwd=ROOT, start_new_session=True) as running:
        assert len(running.stdout.readline().split()) == 2
        assert running.stdout.readline() == "step\n"
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate()
    assert running.returncode == 7
    assert said == ""
