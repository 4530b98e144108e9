"""`--workers N` runs every test once, in N processes, and reports as one process does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.watchdog import MARK, PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent


def run(folder: Path, files: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the project's settings on files of its own, in two workers."""
    for name, code in files.items():
        (folder / f"test_{name}.py").write_text(f"import os, pytest\n{code}\n")
    settings = ["-c", str(ROOT / "pyproject.toml"), "-p", "tests.watchdog", "-p", "tests.workers"]
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", *settings, "-p", "no:cacheprovider"),
            *("--workers", "2", *words, str(folder)),
        ],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != MARK}
        | {"PYTHONPATH": str(ROOT), MARK: f"run-of-{os.getpid()}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


SEEN = """
@pytest.fixture(scope="{scope}")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("{scope}")
    (place / "pid").write_text(str(os.getpid()))
    yield place
    with open({log!r}, "a") as log:
        print("{scope}", os.getpid(), place, file=log)

@pytest.mark.parametrize("number", range(3))
def test_it(number, place, capfd):
    os.write(1, b"%d" % number)
    assert capfd.readouterr().out == str(number)
    assert (place / "pid").read_text() == str(os.getpid())
    with open({log!r}, "a") as log:
        print("test", os.getpid(), place, file=log)
"""


def test_each_test_runs_once_with_the_fixtures_of_its_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    scopes = ("module", "module", "session", "module", "session")
    files = {f"{n}": SEEN.format(scope=s, log=str(log)) for n, s in enumerate(scopes)}
    done = run(tmp_path, files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "15 passed" in done.stdout
    lines = [line.split() for line in log.read_text().splitlines()]
    tests = [(pid, place) for kind, pid, place in lines if kind == "test"]
    assert len(tests) == 15
    assert 1 <= len({pid for pid, _ in tests}) <= 2
    # Each fixture ends once, in the process of its tests, and no two share a folder.
    ends = [(pid, place) for kind, pid, place in lines if kind != "test"]
    assert sorted(ends) == sorted(set(tests))


def test_failures_are_reported_as_in_one_process(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        {
            "good": "def test_good(): pass",
            "bad": "def test_bad():\n    print('said')\n    assert 1 == 2",
            "skipped": "def test_skipped(): pytest.skip('why')",
            "broken": "@pytest.fixture\ndef broken(): raise OSError\ndef test_it(broken): pass",
        },
        *("-rs", "--durations=1"),
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed, 1 skipped, 1 error" in done.stdout
    assert re.search("assert 1 == 2.*Captured stdout call.*said", done.stdout, re.S)
    assert "why" in done.stdout
    assert "slowest 1 durations" in done.stdout


def test_a_run_that_stops_at_the_first_failure_takes_no_more_files(tmp_path: Path) -> None:
    bad = {f"{n}": "def test_it(): assert False\ndef test_more(): assert False" for n in range(9)}
    done = run(tmp_path, bad, "-x")
    assert done.returncode == 1
    found = re.search(r"(\d+) failed", done.stdout)
    assert found is not None
    assert 1 <= int(found[1]) <= 2


def test_a_worker_that_dies_ends_the_run_with_its_test_s_name(tmp_path: Path) -> None:
    done = run(tmp_path, {"it": "def test_it(): os._exit(7)", "other": "def test_it(): pass"})
    assert done.returncode == 1
    assert re.search(r"worker \d ended with 7 in .*test_it\.py::test_it", done.stdout)


def test_a_worker_that_dies_after_its_tests_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, {"it": "import atexit\ndef test_it(): atexit.register(os._exit, 7)"})
    assert done.returncode == 1
    assert "ended with 7 after its tests" in done.stdout


def test_a_forked_process_that_a_test_left_behind_makes_the_run_red(tmp_path: Path) -> None:
    code = "def test_it():\n    if not os.fork():\n        import time\n        time.sleep(600)"
    done = run(tmp_path, {"it": code}, "-o", "step_timeout=1")
    assert done.returncode == 1
    assert "left behind" in done.stderr
