"""Test trainers as users run them: every sample once per epoch, other epochs, exact resume.

Each job runs in a process of its own (or two, under torchrun), which contains the warnings, patches
and leftovers of the frameworks. `drive` documents the three ways of training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.images import class_folder
from tests.trainers.common import EPOCHS, SAMPLES, STEPS, STOP

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).resolve().parents[2]
Batches = list[list[int]]


@dataclass(frozen=True, slots=True)
class Job:
    """A module of `jobs`, on how many ranks, and the packages that it needs."""

    module: str
    ranks: int
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}-{self.ranks}"


JOBS = (
    Job("plain", 1),
    Job("ddp", 2),
    Job("lightning_fit", 1, ("lightning",)),
    Job("lightning_fit", 2, ("lightning",)),
    Job("accelerate_loop", 1, ("accelerate",)),
    Job("accelerate_loop", 2, ("accelerate",)),
    Job("hf_trainer", 1, ("transformers", "accelerate")),
    Job("ignite_engine", 1, ("ignite",)),
    Job("ignite_deterministic", 1, ("ignite",)),
    Job("keras_fit", 1, ("keras",)),
    Job("skorch_fit", 1, ("skorch",)),
    Job("fastai_fit", 1, ("fastai", "torchvision")),
    Job("timm_loop", 1, ("timm", "torchvision")),
)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An image folder of 64 small JPEGs, indexed by its first reader."""
    return class_folder(tmp_path_factory.mktemp("images") / "photographs", SAMPLES)


@pytest.mark.parametrize("kind", ["native", "torch"])
@pytest.mark.parametrize("job", JOBS, ids=str)
def test_every_sample_once_an_epoch_and_exact_resume(
    job: Job, kind: str, images: Path, tmp_path: Path
) -> None:
    for package in job.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed (or doesn't fit this torch)")
    ranks = [report["whole"] for report in run(job, kind, images, tmp_path)]
    epochs = [[rank[e * STEPS : (e + 1) * STEPS] for rank in ranks] for e in range(EPOCHS)]
    assert [len(rank) for rank in ranks] == [EPOCHS * STEPS] * job.ranks
    for epoch in epochs:
        assert sorted(i for rank in epoch for batch in rank for i in batch) == list(range(SAMPLES))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("made", ["script", "hook"])
@pytest.mark.parametrize("kind", ["native", "torch", "plain"])
def test_a_trainer_that_starts_its_processes_itself(
    kind: str, made: str, images: Path, tmp_path: Path
) -> None:
    """`python train.py` with Lightning's devices=2: a rank is known in fit() only."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning isn't installed")
    script = ROOT / "tests" / "trainers" / "jobs" / "lightning_script.py"
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
    clean = {name: value for name, value in os.environ.items() if name not in launchers}
    ways = ("whole",) if kind == "plain" else ("whole", "stopped", "resumed")
    for way in ways:
        done = subprocess.run(
            [sys.executable, str(script), kind, str(images), str(tmp_path), way, made],
            cwd=ROOT,
            env={**clean, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-8000:]
    ranks = [
        {way: json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for way in ways}
        for rank in (0, 1)
    ]
    for epoch in range(EPOCHS):
        part = slice(epoch * STEPS, (epoch + 1) * STEPS)
        batches = [batch for rank in ranks for batch in rank["whole"]["batches"][part]]
        assert sorted(i for batch in batches for i in batch) == list(range(SAMPLES))
    for rank in ranks:
        assert {report["steps"] for report in rank.values()} == {STEPS}
        assert len(rank["whole"]["batches"]) == EPOCHS * STEPS
        if "resumed" in rank:
            parts = rank["stopped"]["batches"] + rank["resumed"]["batches"]
            assert parts == rank["whole"]["batches"]


def run(job: Job, kind: str, images: Path, out: Path) -> list[dict[str, Batches]]:
    """Return the records of each rank; the resumed job must continue where the stopped
    one ended."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"]
    command = [sys.executable, *(launcher if job.ranks > 1 else [])]
    command += ["-m", "tests.trainers.drive", job.module, kind, str(images), str(out)]
    environment = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    report = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(job.ranks)]
    for rank in report:
        assert rank["steps"] == STEPS
        assert len(rank["stopped"]) == STOP
        assert rank["stopped"] + rank["resumed"] == rank["whole"]
    return report
