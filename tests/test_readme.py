"""Test that the code in the README runs as it is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from penstock.pipeline.cli import main

README = Path(__file__).resolve().parent.parent / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, pack: Path) -> Path:
    """Return the folder in which `make demo` and `penstock pack` ran."""
    (tmp_path / "demo" / "photographs").mkdir(parents=True)
    (tmp_path / "demo" / "photographs" / "train").symlink_to(folder)
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "train").symlink_to(pack)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_training_loop_runs_and_continues_from_its_checkpoint(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = (text for text in blocks("python") if "checkpoint" in text)
    assert "batch_size=256" in code  # more than the fixture has
    code = code.replace("batch_size=256", "batch_size=32, order=Order(lanes=1)")
    code = code.replace("import DataLoader", "import DataLoader, Order")
    shorter = code.replace("range(loader.epoch, 3)", "range(loader.epoch, 1)")
    report = []
    for text in (shorter, code):
        exec(compile(text, str(README), "exec"), {})
        report.append(capsys.readouterr().out)
        state = torch.load(place / "checkpoint.pt")["loader"]
        assert (state["epoch"], state["position"]) == (1 if text is shorter else 3, 0)
    assert f"{192:,} samples in 6 batches" in report[0]
    assert f"{2 * 192:,} samples in 12 batches" in report[1]


@pytest.mark.parametrize("name", ["pack", "inspect", "bench", "doctor"])
def test_the_commands_that_need_no_store_run(
    place: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for text in blocks("") for line in text.splitlines()]
    (line,) = (line for line in lines if line.startswith(f"penstock {name}"))
    words = shlex.split(line, comments=True)[1:]
    if name == "pack":
        words[-1] = "packs/again"
    if name == "bench":
        words += ["--seconds", "1", "--batch-size", "32"]
    code = main(words)
    printed = capsys.readouterr()
    assert code in ((0, 1) if name == "doctor" else (0,)), printed.err
    assert printed.out
    if "--out" in words:
        assert (place / words[words.index("--out") + 1]).stat().st_size > 1000
