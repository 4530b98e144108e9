"""Process 0 of a job without collectives ends: if it is killed, the others end too."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.pipeline.ranks import forked, free_port, rank_variables

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import json, os, signal, sys, warnings
import torch.distributed as dist
from penstock.cache.errors import RankFailedError
from penstock.pipeline import DataLoader
from penstock.readers import Dataset
from tests.torch_datasets import Squares
kind, end, pack = sys.argv[1:4]
dist.init_process_group("gloo")
rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
data = Squares(64) if kind == "torch" else Dataset(pack).select("label")
if rank or end != "absent":
    loader = DataLoader(data, 4, shuffle=kind != "in-order", seed=1, drop_last=True)
elif end == "absent":
    loader = [0] * 9
seen, failed = 0, ""
def ended():
    # This connection to the job's store breaks when the process of rank 0 ends.
    import socket
    line = socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    store.set(f"ready-{rank}", "1")
    line.settimeout(60)
    try:
        line.recv(1)
    except OSError:
        pass
    # A process that dies closes its connections one after the other: wait for the loader's too.
    try:
        while True:
            store.add("asked", 1)
    except dist.DistError:
        pass
def leave():
    store.wait([f"ready-{n}" for n in range(1, dist.get_world_size())])
    if end in ("killed", "between", "absent"):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "finished":
        os._exit(0)
    if end == "raises":
        raise ValueError("on rank 0")
    if end == "closed":
        loader.close()
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    try:
        # As many epochs as the others need until they notice.
        for epoch in range({"finished": 1, "between": 10_000}.get(end, 2)):
            for step, _ in enumerate(loader):
                seen += 1
                if rank == 0 and step == 1 and end not in ("finished", "between"):
                    leave()
                if rank and epoch == 0 and step == 1:
                    ended()
            if rank == 0 and end in ("finished", "between"):
                leave()
    except RankFailedError as error:
        failed = f"{error.rank}: {error}"
said = [str(one.message) for one in heard if "store" in str(one.message)]
print(json.dumps({"seen": seen, "failed": failed, "said": said}), flush=True)
os._exit(0)
"""


def run(pack: Path, kind: str, end: str, *, size: int = 3) -> list[dict[str, object]]:
    """Return the last output of every rank except 0, which ends in the given way."""
    port = free_port()
    children = [([kind, end, str(pack)], rank_variables(n, size, port)) for n in range(size)]
    with forked(SCRIPT, children) as running:
        first, *others = running.done()
    expected = {"exits": 0, "finished": 0, "raises": 1}.get(end, -signal.SIGKILL)
    assert first[0] == expected, first
    return [json.loads(out.splitlines()[-1]) for _, out, _ in others]


KINDS = ["torch", "shuffled", "in-order"]


@pytest.mark.parametrize("end", ["killed", "raises"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_killed_or_fails_ends_the_others(pack: Path, kind: str, end: str) -> None:
    for report in run(pack, kind, end):
        assert report["seen"] == 2
        assert str(report["failed"]).startswith(
            "0: Rank 0 failed, so every rank stops here: it was"
        )
        assert not report["said"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_that_is_killed_between_epochs_ends_the_others_behind_theirs(
    pack: Path, kind: str
) -> None:
    whole = {int(str(report["seen"])) for report in run(pack, kind, "finished")}
    assert len(whole) == 1
    for report in run(pack, kind, "between"):
        assert int(str(report["seen"])) >= min(whole)
        assert str(report["failed"]).startswith("0: Rank 0 failed")


DONE = [(kind, end) for kind in KINDS for end in ("closed", "exits", "finished")]


@pytest.mark.parametrize(("kind", "end"), [*DONE, ("in-order", "absent")])
def test_one_that_is_done_raises_no_alarm(pack: Path, kind: str, end: str) -> None:
    for report in run(pack, kind, end):
        assert not report["failed"]
        assert int(str(report["seen"])) > 4
        assert not report["said"]
