"""SIGKILL a rank of a job over a mixture: the job continues from its last state, on more ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from penstock import DataLoader, Dataset, World, mix
from tests.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"web": 300, "code": 90, "math": 31}
WEIGHTS = {"web": 0.5, "code": 0.3, "math": 0.2}
OTHER = {"web": 0.1, "code": 0.1, "math": 0.8}
KILLED_AT = 8

RANK = """
import json, os, signal, sys
import torch.distributed as dist
from tests.pipeline.test_mixture_killed import KILLED_AT, OTHER, loader_of

folder = sys.argv[1]
dist.init_process_group("gloo")
with loader_of(folder) as job:
    while True:
        for (numbers,) in job:
            print(json.dumps([job.step - 1, numbers.tolist()]), flush=True)
            if job.step == 3:
                job.set_weights(OTHER, step=5)
            saved = job.state_dict()
            if dist.get_rank() == 0:
                with open(f"{folder}/next", "w") as file:
                    json.dump(saved, file)
                os.replace(f"{folder}/next", f"{folder}/state{job.step}")
            elif job.step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()  # all ranks have this batch
"""


def loader_of(folder: Path | str, world: World | None = None) -> DataLoader:
    parts = {name: Dataset(f"{folder}/{name}.npy") for name in SIZES}
    return DataLoader(
        mix(parts, weights=WEIGHTS, epoch=120),
        shuffle=True,
        seed=5,
        global_batch_size=24,
        drop_last=True,
        world=world,
    )


def delivered_by_ranks(folder: Path, size: int) -> dict[int, list[int]]:
    """Run a process for each rank, of which the second kills itself, until all have ended; return
    the numbers that they delivered, by step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks, delivered = list[subprocess.Popen[bytes]](), dict[int, list[int]]()
    for rank in range(size):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        env |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env["GLOO_SOCKET_IFNAME"] = "lo"
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-c", RANK, str(folder)]
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, **pipes))
    try:
        for text in [rank.communicate(timeout=PATIENCE_S)[0].decode() for rank in ranks]:
            for step, numbers in map(json.loads, text.splitlines()):
                delivered.setdefault(step, []).extend(numbers)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    codes = [rank.returncode for rank in ranks]
    assert codes.pop(1) == -signal.SIGKILL
    assert {0, -signal.SIGKILL}.isdisjoint(codes)
    return delivered


def test_a_job_continues_after_a_rank_is_killed(tmp_path: Path) -> None:
    for number, (name, size) in enumerate(SIZES.items()):
        np.save(tmp_path / f"{name}.npy", 1000 * number + np.arange(size))
    wanted: list[list[int]] = []
    with loader_of(tmp_path, World(0, 1)) as alone:
        for (numbers,) in chain(alone, alone, alone):
            wanted.append(numbers.tolist())
            if alone.step == 3:
                alone.set_weights(OTHER, step=5)
    found = delivered_by_ranks(tmp_path, 2)
    saved = max(int(path.name[5:]) for path in tmp_path.glob("state*"))
    assert KILLED_AT - 1 <= saved <= KILLED_AT
    state = json.loads((tmp_path / f"state{saved}").read_text())
    found = {step: numbers for step, numbers in found.items() if step < saved}
    for rank in range(3):
        with loader_of(tmp_path, World(rank, 3)) as job:
            job.load_state_dict(state)
            for (numbers,) in chain(job, job):
                found.setdefault(job.step - 1, []).extend(numbers.tolist())
    assert [found[step] for step in range(len(wanted))] == wanted
