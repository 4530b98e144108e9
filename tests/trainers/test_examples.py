"""Test that the detector, the segmenter and DINO of examples/ learn in other people's trainers what
they learn in a plain loop."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).resolve().parents[2]
JOBS = {
    "detection/detector": ["--epochs", "6"],
    "segmentation/segmenter": ["--epochs", "2"],
    "self-supervised/dino": ["--steps", "24"],
}


@functools.cache
def printed(name: str, trainer: str) -> list[str]:
    """Return the lines that a job prints about its model, and nothing that a trainer prints."""
    command = [sys.executable, f"examples/{name}.py", "--trainer", trainer, *JOBS[name]]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith(("AP50", "mean IoU", "   "))]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(
    ("trainer", "package"), [("lightning", "lightning"), ("hugging-face", "transformers")]
)
def test_a_job_learns_what_it_learns_in_a_plain_loop(name: str, trainer: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")
    found = printed(name, trainer)
    assert found == printed(name, "plain")
    if name == "detector":
        assert float(found[-1].split()[1]) > 0.25
