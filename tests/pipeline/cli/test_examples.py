"""The examples of each command's help: there, parsed by the command itself, and run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
import typer

from penstock.cache.disk import CacheFolder
from penstock.pipeline.cli import EXAMPLES, app, main
from tests.conftest import write_photographs

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

# As typer builds it; its click may be one of its own, so nothing is imported from there.
ROOT: Any = typer.main.get_command(app)
LONGEST = 78  # a line of help in a terminal of 80 columns


def commands(group: Any = ROOT, before: str = "") -> dict[str, Any]:
    """Every command by its words."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        words = f"{before} {name}".strip()
        found |= commands(command, words) if hasattr(command, "commands") else {words: command}
    return found


def test_every_command_has_one_to_three_examples() -> None:
    assert set(EXAMPLES) == set(commands())
    assert all(1 <= len(some) <= 3 for some in EXAMPLES.values())


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_them_whole(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), flag]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "Examples" in lines
    assert set(EXAMPLES[command]) <= set(lines)


@pytest.mark.parametrize("example", [one for some in EXAMPLES.values() for one in some])
def test_they_parse(example: str) -> None:
    """Every option exists, every choice is one, nothing that is wanted is missing."""
    assert len(example) <= LONGEST
    program, *arguments = shlex.split(example)
    assert program == "penstock"
    words = next(w for w in EXAMPLES if example in EXAMPLES[w]).split()
    assert arguments[: len(words)] == words
    command = commands()[" ".join(words)]
    context = command.make_context(words[-1], arguments[len(words) :])
    assert not context.args
    context.close()


def test_an_option_that_does_not_exist_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--no-such"):
        commands()["cache gc"].make_context("gc", ["cached", "--no-such"])


def test_those_on_local_data_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("nvidia.dali")
    monkeypatch.chdir(tmp_path)
    write_photographs(tmp_path / "photos", samples=12, classes=2)
    CacheFolder("cached", max_bytes=2**24).close()
    long = ("bench", "doctor", "cache clear")  # minutes, a look at the machine, a question
    local = [
        example
        for command, some in EXAMPLES.items()
        for example in some
        if "s3://" not in example and (command not in long or "--yes" in example)
    ]
    assert len(local) >= 10
    for example in local:
        assert main(shlex.split(example)[1:]) == 0, (example, capsys.readouterr().err)
    assert (tmp_path / "sheet.png").stat().st_size > 1000
