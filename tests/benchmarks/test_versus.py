"""Test comparisons of two checkouts: ratios, limits, and a run of this one against itself."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import versus, versus_child
from benchmarks.versus import FIGURES, HERE, Gain, Load, below, gains
from penstock.pipeline.bench import ChildFailedError, Figure
from tests.watchdog import PATIENCE_S


def figures(**more: float) -> dict[str, float]:
    usual = {name: 100.0 for name in FIGURES}
    return usual | more


def test_a_ratio_is_this_checkouts_gain_for_every_figure() -> None:
    fast = figures(samples_per_s=200.0, cpu_s_per_1000=50.0, first_batch_s=25.0)
    found = gains([(fast, figures()), (figures(), figures()), (fast, figures())])
    assert found["samples_per_s"].ratio.median == 2.0
    assert found["cpu_s_per_1000"].ratio.median == 2.0
    assert found["first_batch_s"].ratio.median == 4.0
    assert found["samples_per_s"].ratio.low == 1.0
    assert (found["samples_per_s"].ours, found["samples_per_s"].theirs) == (200.0, 100.0)


def test_a_ratio_is_taken_inside_its_pair() -> None:
    """A machine that halves its speed between two pairs changes nothing."""
    slow = figures(samples_per_s=50.0)
    found = gains([(figures(), figures()), (slow, slow), (slow, slow)])
    assert found["samples_per_s"].ratio == Figure(median=1.0, low=1.0, high=1.0)


def test_a_median_below_the_limit_is_named() -> None:
    found: dict[str, dict[str, Gain]] = {
        "pack": gains([(figures(cpu_s_per_1000=103.0), figures())] * 3)
    }
    assert below(found, 0.98) == ["pack: CPU s/1,000 0.971"]
    assert below(found, 0.95) == []


def test_this_checkout_plays_against_itself(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    words = [str(HERE), "--quick", "--cases", "torch", "--work", str(tmp_path)]
    assert versus.main([*words, "--results", str(tmp_path)], console=console) == 0
    report = json.loads((tmp_path / "versus.json").read_text())
    assert report["pairs"] == 1
    assert set(report["gains"]["torch"]) == set(FIGURES)
    ((ours, theirs),) = report["played"]["torch"]
    assert ours["samples"] == theirs["samples"] == 16
    assert "CPU s/1,000" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.timed
def test_every_case_is_played_by_both(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=160)
    words = [str(HERE), "--quick", "--work", str(tmp_path), "--results", str(tmp_path)]
    assert versus.main(words, console=console) == 0
    report = json.loads((tmp_path / "versus.json").read_text())
    assert list(report["gains"]) == list(versus.CASES)


@pytest.mark.parametrize("case", ["pack", "folder"])
def test_a_side_counts_what_it_was_asked_for(case: str, folder: Path, tmp_path: Path) -> None:
    task: dict[str, Any] = {
        "case": case,
        "folder": str(folder),
        "pack": str(tmp_path / "pack"),
        "batch_size": 8,
        "size": 32,
        "workers": 1,
        "settle": 1,
        "timed": 3,
    }
    versus_child.prepare(task, HERE)
    found = versus_child.play(task, HERE)
    assert found["samples"] == 24
    assert all(found[name] > 0 for name in FIGURES)


def test_a_checkout_that_python_would_not_import_is_refused(tmp_path: Path) -> None:
    """An installed copy would be measured in its place."""
    (tmp_path / "readers").mkdir()
    with pytest.raises(SystemExit, match="wanted it from"):
        versus_child.public("Dataset", tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["nowhere"], "isn't a checkout"), (["nowhere", "--pairs", "3"], "at least 9")],
)
def test_what_cant_be_played_is_refused(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versus, "make_photographs", lambda *_, **__: pytest.fail("worked first"))
    console = Console(file=io.StringIO(), width=160)
    assert versus.main([*words, "--work", str(tmp_path)], console=console) == 2
    assert message in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_side_that_fails_reports_it(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (tmp_path / "other" / "readers").mkdir(parents=True)
    side = versus.Side(tmp_path / "other", images, tmp_path / "place", Load())
    with pytest.raises(ChildFailedError, match="wanted it from"):
        side.play("torch")


def test_a_side_finds_its_own_entry_points(tmp_path: Path) -> None:
    """Not those of what is installed where the benchmark runs."""
    (tmp_path / "other").mkdir()
    project = '[project]\n[project.entry-points."penstock.verify"]\nimage = "its_own:verify"\n'
    (tmp_path / "other" / "pyproject.toml").write_text(project)
    found = versus.write_entry_points(tmp_path / "other", tmp_path / "metadata")
    code = "from importlib.metadata import entry_points as e; print(*e(group='penstock.verify'))"
    report = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(found)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout
    assert "its_own:verify" in report
    assert report.count("value=") == 1


OLD_LAYOUT = """
class Dataset:
    def __init__(self, place):
        self.place = place
"""


def test_a_release_before_the_move_is_played_by_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "readers").mkdir()
    (tmp_path / "readers" / "__init__.py").write_text(OLD_LAYOUT)
    code = (
        "import sys, pathlib, runpy\n"
        f"child = runpy.run_path({str(Path(versus_child.__file__))!r})\n"
        "print(child['public']('Dataset', pathlib.Path(sys.argv[1]))('there').place)"
    )
    report = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout
    assert report.split() == ["there"]
