"""A run that hangs ends by itself, wherever it hangs, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.watchdog import MARK, left_behind

ROOT = Path(__file__).resolve().parent.parent
# A step of the run may take so long here.
STEP_S = 1
# Only so that a watchdog that doesn't bark ends this test.
PATIENCE_S = 300.0

FOR_EVER = "threading.Event().wait()"
PLANTED = {
    "in a test": f"def test_it(): {FOR_EVER}",
    "with the GIL": "import ctypes\ndef test_it(): ctypes.PyDLL(None).sleep(600)",
    "in a fixture": f"@pytest.fixture\ndef stuck(): {FOR_EVER}\ndef test_it(stuck): pass",
    "in a tear-down": (
        f"@pytest.fixture\ndef stuck():\n    yield\n    {FOR_EVER}\ndef test_it(stuck): pass"
    ),
    "at import": FOR_EVER,
    "at exit": (
        "def test_it(): threading.Thread(target=threading.Event().wait, daemon=False).start()"
    ),
}


def run(folder: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """pytest with the project's settings on a file of its own."""
    (folder / "test_planted.py").write_text(f"import pytest, threading\n{code}\n")
    settings = ["-c", str(ROOT / "pyproject.toml"), "-o", f"step_timeout={STEP_S}"]
    plugins = ["-p", "tests.watchdog", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment.pop(MARK)  # a run of its own
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *settings, *plugins, *words, str(folder)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize("where", PLANTED)
def test_a_deadlock_ends_the_run_with_a_traceback(where: str, tmp_path: Path) -> None:
    done = run(tmp_path, PLANTED[where])
    assert done.returncode != 0
    assert "Timeout (0:00:01)!" in done.stderr


def test_a_worker_that_hangs_ends_the_run_with_its_child(tmp_path: Path) -> None:
    child = "import subprocess\ndef test_it():\n    subprocess.Popen(['sleep', '600'])"
    done = run(tmp_path, f"{child}\n    {FOR_EVER}", "-n", "2", "--max-worker-restart=0")
    assert done.returncode != 0
    assert "Timeout (0:00:01)!" in done.stderr
    assert "test_it" in done.stdout
    assert "sleep 600" in done.stderr


COMPUTES = "end = time.process_time() + 2.5\nwhile time.process_time() < end: pass"


@pytest.mark.parametrize(
    "code",
    [
        "def test_it():\n    exec(COMPUTES)",
        "def test_it():\n    subprocess.run([sys.executable, '-c', 'import time\\n' + COMPUTES])",
    ],
    ids=["itself", "in a child"],
)
def test_a_test_that_computes_longer_continues(code: str, tmp_path: Path) -> None:
    """Also one that other programs leave little of a core."""
    code = f"import subprocess, sys, time\nCOMPUTES = {COMPUTES!r}\n{code}"
    assert run(tmp_path, code, "-o", "step_timeout=2").returncode == 0


def test_a_test_that_computes_for_ever_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "def test_it():\n    while True: pass", "-o", "step_timeout=0.2")
    assert done.returncode != 0
    assert "Timeout (" in done.stderr


def test_a_process_that_a_test_left_behind_makes_the_run_red(tmp_path: Path) -> None:
    done = run(tmp_path, "import subprocess\ndef test_it(): subprocess.Popen(['sleep', '600'])")
    assert done.returncode == 1
    assert "left behind" in done.stderr


def test_a_run_that_leaves_nothing_is_green(tmp_path: Path) -> None:
    code = "import subprocess\ndef test_it(): subprocess.Popen(['true']).wait()"
    assert run(tmp_path, code, "-o", "step_timeout=30").returncode == 0


def test_a_process_that_is_about_to_end_is_waited_for() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=os.environ | {MARK: "brief"}
    )
    assert [pid for pid, _ in left_behind("brief", grace_s=0.0)] == [child.pid]
    assert child.stdin is not None
    child.stdin.close()
    try:
        assert not list(left_behind("brief", grace_s=30.0))
    finally:
        child.wait(30)


def test_the_command_of_make_test_restarts_no_worker() -> None:
    """Else every test that hangs would take its minute."""
    lines = (ROOT / "Makefile").read_text().splitlines()
    runs = [line for line in lines if "pytest" in line and " -n " in line]
    assert runs
    assert all("--max-worker-restart=0" in line for line in runs)
