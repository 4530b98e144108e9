"""Test that the detector of examples/ learns in other people's trainers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.trainers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("trainer", "package"), [("lightning", "lightning"), ("hugging-face", "transformers")]
)
def test_a_detector_learns(trainer: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} isn't installed")
    command = [sys.executable, "examples/detector.py", "--trainer", trainer, "--epochs", "6"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    name, precision = done.stdout.splitlines()[-1].split()[:2]
    assert name == "AP50"
    assert float(precision) > 0.25
