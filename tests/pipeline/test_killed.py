"""SIGKILL of a worker, of a rank, of the parent: the others end with the reason, nothing stays."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.utils.data

from penstock.cache import WorkerError
from penstock.pipeline import DataLoader
from penstock.pipeline.report import Meter
from penstock.readers import Dataset
from tests.pipeline.ranks import forked, free_port, rank_variables
from tests.torch_datasets import Noisy, Squares
from tests.warm import ROOT, Warm
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def shared_memory() -> set[str]:
    """Return the files that ended torch processes left; other programs use the folder, too."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    return {name for name in names if not psutil.pid_exists(int(name.split("_")[1]))}


def children() -> list[Any]:
    return list(psutil.Process().children(recursive=True))


class _Deadly(Squares):
    """Reading sample 9 kills the process that reads it."""

    def __getitem__(self, index: int) -> object:
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def _is_worker(process: psutil.Process) -> bool:
    """Alive, and none of the helpers that multiprocessing keeps for the next start."""
    try:
        command = " ".join(process.cmdline())
        is_alive = process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    return is_alive and "resource_tracker" not in command and "forkserver" not in command


# torch's handler of dead children raises in whatever runs when the signal comes, its own clean-up
# included.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_a_killed_worker_ends_the_pass_with_the_reason(context: str) -> None:
    before, memory = children(), shared_memory()
    loader = DataLoader(_Deadly(64), 2, num_workers=2, multiprocessing_context=context)
    said = r"worker 0 \(pid \d+\) was killed by SIGKILL while it was reading samples .*8, 9"
    with pytest.raises(WorkerError, match=said):
        list(loader)
    loader.close()
    del loader
    left = [p for p in children() if p not in before and _is_worker(p)]
    assert not psutil.wait_procs(left, timeout=PATIENCE_S)[1]
    assert shared_memory() <= memory


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_while_no_batch_is_waited_for_ends_the_pass_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children()

    def killed(*_: object, **__: object) -> None:
        (worker,) = (p for p in children() if p not in before and _is_worker(p))
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # torch's handler runs behind it

    monkeypatch.setattr(Meter, "count_batch", killed)
    loader = DataLoader(Squares(64), 2, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(WorkerError, match=r"worker 0 \(pid \d+\) was killed by SIGKILL"):
        next(iter(loader))
    loader.close()


class _DeadlyStream(torch.utils.data.IterableDataset[int]):
    """Its worker 1 dies in its third batch of two."""

    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        for number in range(20):
            if worker is not None and worker.id == 1 and number == 5:
                os._exit(7)
            yield number


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_of_a_stream_that_dies_names_its_batch() -> None:
    loader = DataLoader(_DeadlyStream(), 2, num_workers=2)
    with pytest.raises(WorkerError) as caught:
        list(loader)
    said = (
        r"worker 1 \(pid \d+\) exited with status 7 while it was reading batches (\d+) to (\d+) of"
    )
    found = re.search(said, str(caught.value))
    assert found is not None, caught.value
    # It has two requests at a time, and how soon it gets the next one is the main process's affair.
    assert int(found[1]) <= 2 <= int(found[2]) <= int(found[1]) + 2
    loader.close()


PARENT = """
import sys
from penstock.pipeline import DataLoader
from tests.torch_datasets import Noisy
import psutil
loader = DataLoader(Noisy(100_000), 4, num_workers=2, shuffle=True, seed=1)
batches = iter(loader)
next(batches)
print(*[p.pid for p in psutil.Process().children()], flush=True)
for _ in batches:
    pass
"""


def test_workers_of_a_killed_parent_end() -> None:
    memory = shared_memory()
    with Warm(["-c", PARENT], cwd=ROOT) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        workers = [psutil.Process(pid) for pid in pids]
        assert len(workers) == 2
    assert not psutil.wait_procs(workers, timeout=PATIENCE_S)[1]
    assert shared_memory() <= memory


RANK = """
import os, signal, sys
import torch.distributed as dist
from penstock.pipeline import DataLoader
from tests.torch_datasets import Squares
import torch
dist.init_process_group("gloo")
loader = DataLoader(Squares(4096, "int"), 4, shuffle=True, seed=1, drop_last=True, num_workers=1)
for step, batch in enumerate(loader):
    if step == 3 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(batch)
"""


def test_a_killed_rank_takes_the_others_with_it() -> None:
    port = free_port()
    with forked(RANK, [([], rank_variables(rank, 2, port)) for rank in range(2)]) as ranks:
        (code, _, report), _ = ranks.done()
    assert code not in (0, -signal.SIGKILL)
    assert "closed by peer" in report or "Connection" in report


@pytest.mark.parametrize("context", [None, "fork"])
def test_workers_with_a_used_native_loader(pack: Path, context: str | None) -> None:
    """A process with threads of ours must not fork unasked: locks would be copied as they stand."""
    from penstock.augment import imagenet_train

    with DataLoader(Dataset(pack), 16, seed=1, augment=imagenet_train(32)) as native:
        batches = iter(native)
        next(batches)
        loader = DataLoader(
            Noisy(8), 2, num_workers=1, seed=1, multiprocessing_context=context
        )  # fmt: skip
        assert len(list(loader)) == 4
        assert torch.is_tensor(next(batches)[0])
