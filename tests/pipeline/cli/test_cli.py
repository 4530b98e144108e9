"""The commands as a user types them: in a process of their own, by exit code and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import typer

from penstock.pipeline.cli import app
from tests import warm
from tests.conftest import SAMPLES, write_photographs
from tests.images import jpeg
from tests.tars import archive, tar_folder
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def penstock(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    run = warm.run(["-m", "penstock.pipeline.cli", *arguments])
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
    return run


def test_pack_index_inspect_as_json(folder: Path, tmp_path: Path) -> None:
    packed = json.loads(penstock("pack", folder, tmp_path / "p", "--json").stdout)
    assert set(packed) >= {"samples", "shards", "bytes", "quarantined", "seconds"}
    assert (packed["samples"], packed["quarantined"]) == (SAMPLES, 0)
    told = json.loads(penstock("inspect", tmp_path / "p", "--json").stdout)
    assert told["samples"] == SAMPLES
    assert told["shuffled"] is True
    indexed = json.loads(penstock("index", folder, "--out", tmp_path / "i", "--json").stdout)
    assert indexed["samples"] == SAMPLES
    told = json.loads(penstock("inspect", folder, "--index", tmp_path / "i", "--json").stdout)
    assert list(told["fields"]) == ["image", "label"]
    assert told["fields"]["image"]["codecs"] == ["jpeg"]
    assert told["fields"]["label"]["bounds"] == [0, 6]


def test_tar_files_are_packed_smaller_and_inspected(tmp_path: Path) -> None:
    tar_folder(tmp_path / "set", samples=6, archives=2)
    some = tmp_path / "set" / "train-{000000..000001}.tar"
    options = ("--short-side", "12", "--quality", "80", "--no-shuffle", "--json")
    packed = json.loads(penstock("pack", some, tmp_path / "p", *options).stdout)
    assert (packed["samples"], packed["progressive"]) == (6, 0)
    told = json.loads(penstock("inspect", tmp_path / "p", "--json").stdout)
    sizes = told["fields"]["image"]["images"]
    assert (sizes["min_height"], sizes["min_width"]) == (12, 12)
    told = json.loads(penstock("inspect", tmp_path / "set", "--json").stdout)
    assert (told["kind"], told["passed_over"]) == ("tar", {})
    assert told["fields"]["image"]["progressive"] == 0


def test_some_fields_are_packed_and_some_images_rewritten(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for i in range(4):
        files |= {f"{i}.left.jpg": jpeg(i, 40, 50), f"{i}.right.jpg": jpeg(i, 40, 50)}
        files |= {f"{i}.cls": b"%d" % (i % 2), f"{i}.txt": b"a text"}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "all.tar").write_bytes(archive(files))
    options = ("--fields", "left,right, label", "--image", "left", "--short-side", "20", "--json")
    packed = json.loads(penstock("pack", tmp_path / "set", tmp_path / "p", *options).stdout)
    assert packed["samples"] == 4
    told = json.loads(penstock("inspect", tmp_path / "p", "--json").stdout)["fields"]
    assert list(told) == ["left", "right", "label"]
    assert told["left"]["images"]["max_height"] == 20
    assert told["right"]["images"]["min_height"] == 40


def test_people_get_a_summary_and_quarantined_names(tmp_path: Path) -> None:
    folder = write_photographs(tmp_path / "in", samples=12, classes=2)
    (folder / "class-0" / "broken.jpg").write_bytes(b"not an image")
    run = penstock("pack", folder, tmp_path / "out")
    assert "12 samples" in run.stdout
    assert "1 quarantined" in run.stdout
    report = (tmp_path / "out/_penstock/quarantine.jsonl").read_text()
    assert json.loads(report)["name"] == "class-0/broken.jpg"
    assert "12" in penstock("inspect", tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["inspect", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["inspect", "nosuch://bucket/x"], (1, 2), "nosuch"),
        (["pack", "/nowhere/at/all", "OUT"], 1, "/nowhere/at/all"),
        (["pack", "FOLDER", "OUT", "--shard-bytes", "1.5 parsecs"], 2, "1.5 parsecs"),
        (["pack", "FOLDER"], 2, "Missing argument"),
        (["pack", "FOLDER", "FOLDER"], (1, 2), "FOLDER"),
        (["frobnicate"], 2, "frobnicate"),
        (["inspect", "FOLDER", "-o", "novalue"], 2, "KEY=VALUE"),
        (["inspect", r"C:\data\photos"], 1, "/mnt/c/data/photos."),
        (["inspect", "s3:/bucket/photos"], 1, "s3://bucket/photos."),
        (["inspect", "FOLDER", "--fields", "image,label"], 2, "the source of each field"),
        (["inspect", "FOLDER", "--batch", "4", "--out", "nofolder/a.png"], 2, "nofolder isn't"),
        (["cache", "stat", "/nowhere/at/all"], 2, "it doesn't exist"),
        (["bench", "FOLDER", "--augment", "penstock:DataLoader"], (1, 2), "without arguments"),
    ],
)
def test_wrong_use_is_told_with_its_exit_code(
    folder: Path, tmp_path: Path, arguments: list[str], code: int | tuple[int, int], told: str
) -> None:
    places = {"FOLDER": str(folder), "OUT": str(tmp_path / "out")}
    run = warm.run(
        ["-m", "penstock.pipeline.cli", *(places.get(a, a) for a in arguments)],
        env={**os.environ, "COLUMNS": "200"},
    )
    assert run.returncode in (code if isinstance(code, tuple) else (code,)), run.stderr
    assert places.get(told, told) in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_a_destination_with_other_data_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    run = penstock("pack", folder, tmp_path, code=1)
    assert "thesis.tex" in run.stderr.replace("\n", "")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_interrupted_is_130(folder: Path, tmp_path: Path) -> None:
    job = warm.run(["-c", INTERRUPTED, folder, tmp_path / "out"])
    assert job.returncode == 130
    assert "The same command resumes" in job.stderr.replace("\n", " ")


# A packer that gets Ctrl-C as soon as it reports its first progress.
INTERRUPTED = f"""
import os, sys
from penstock.pipeline.cli import main
from penstock.pipeline.cli.progress_bars import SampleProgress

def interrupt(self, *_):
    os.kill(os.getpid(), {int(signal.SIGINT)})

SampleProgress.__call__ = interrupt
sys.exit(main(["pack", sys.argv[1], sys.argv[2]]))
"""


def test_version() -> None:
    assert penstock("--version").stdout == "penstock 0.1.0\n"


def test_the_command_starts_without_what_only_some_commands_need():
    """Completion in a shell and --help wait for all that is imported."""
    code = (
        "import sys, penstock.pipeline.cli\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'obstore', 'PIL', 'fsspec'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize("name", ["pack", "index", "inspect", "warm", "bench", "plan", "doctor"])
def test_help_breaks_lines_where_the_terminal_does(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert all("\n" not in paragraph for paragraph in command.help.split("\n\n"))
