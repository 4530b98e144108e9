"""Test the commands as users run them: exit codes, output, the examples of each --help, options of
sampling and `--on`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import logging
import shlex
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import penstock
from penstock.cache import ConfigError, FetchError, MissingDependencyError, PenstockError
from penstock.cache.disk import CacheFolder
from penstock.pipeline.cli import EXAMPLES, DatasetOptions, app, executor_on, main, pack_command
from penstock.pipeline.cli import index as index_command
from penstock.readers.fieldtypes import Boxes
from tests import annotated_sets, files, images, warm
from tests.conftest import SAMPLES, write_photographs
from tests.files import files_below
from tests.images import jpeg
from tests.tars import archive, tar_folder
from tests.watchdog import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.readers.formats import Sampling


@dataclasses.dataclass
class Printed:
    """The output of a command."""

    code: int
    stdout: str
    stderr: str


def ran(*arguments: object) -> Printed:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(each) for each in arguments])
    return Printed(code, out.getvalue(), err.getvalue())


def run_penstock(*arguments: object, code: int = 0) -> Printed:
    run = ran(*arguments)
    assert run.code == code, run.stderr
    return run


def test_a_process_prints_and_ends_as_the_function_does(folder: Path, tmp_path: Path) -> None:
    for wanted, arguments in (
        (0, ["inspect", folder, "--json"]),
        (1, ["inspect", "/nowhere/at/all"]),
        (2, ["frobnicate"]),
    ):
        process = warm.run(["-m", "penstock.pipeline.cli", *arguments], cwd=tmp_path)
        here = run_penstock(*arguments, code=wanted)
        assert process.returncode == wanted
        assert "Traceback" not in process.stderr
        if wanted:  # else it took another time
            assert (process.stdout, process.stderr) == (here.stdout, here.stderr)
        else:
            assert json.loads(process.stdout).keys() == json.loads(here.stdout).keys()


def test_pack_index_inspect_as_json(folder: Path, tmp_path: Path) -> None:
    packed = json.loads(run_penstock("pack", folder, tmp_path / "p", "--json").stdout)
    assert set(packed) >= {"samples", "shards", "bytes", "quarantined", "seconds"}
    assert (packed["samples"], packed["quarantined"]) == (SAMPLES, 0)
    report = json.loads(run_penstock("inspect", tmp_path / "p", "--json").stdout)
    assert report["samples"] == SAMPLES
    assert report["shuffled"] is True
    indexed = json.loads(run_penstock("index", folder, "--out", tmp_path / "i", "--json").stdout)
    assert indexed["samples"] == SAMPLES
    report = json.loads(run_penstock("inspect", folder, "--index", tmp_path / "i", "--json").stdout)
    assert list(report["fields"]) == ["image", "label"]
    assert report["fields"]["image"]["codecs"] == ["jpeg"]
    assert report["fields"]["label"]["bounds"] == [0, 6]


def test_annotated_images_are_indexed_packed_and_warmed(tmp_path: Path) -> None:
    coco = annotated_sets.coco_set(tmp_path / "coco", annotated_sets.instances())
    described = annotated_sets.yolo_set(
        tmp_path / "pets",
        {"a": "0 0.5 0.5 0.25 0.25", "b": None},
        "val: images/train\nnames: [cat]\n",
    )
    manifest = ("--manifest", "annotations/instances_train2017.json")
    for url, options, samples, kind in ((coco, manifest, 12, "coco"), (described, (), 2, "yolo")):
        assert (
            json.loads(run_penstock("index", url, *options, "--json").stdout)["samples"] == samples
        )
        assert json.loads(run_penstock("inspect", url, *options, "--json").stdout)["kind"] == kind
        packed = tmp_path / f"{kind}-pack"
        run_penstock("pack", url, packed, *options)
        fields = json.loads(run_penstock("inspect", packed, "--json").stdout)["fields"]
        assert {"image", "boxes", "labels", "image_id", "original_size"} <= {*fields}
    with files.uploaded(coco.parent) as remote:
        cache = ("--cache", tmp_path / "cache", "--max-bytes", "1GiB", "--json")
        done = json.loads(run_penstock("warm", f"{remote}/train2017", *manifest, *cache).stdout)
    assert not done["failed"]
    assert done["bytes"] > 0


def test_tar_files_are_packed_smaller_and_inspected(tmp_path: Path) -> None:
    tar_folder(tmp_path / "set", samples=6, archives=2)
    some = tmp_path / "set" / "train-{000000..000001}.tar"
    options = ("--short-side", "12", "--quality", "80", "--no-shuffle", "--json")
    packed = json.loads(run_penstock("pack", some, tmp_path / "p", *options).stdout)
    assert (packed["samples"], packed["progressive"]) == (6, 0)
    report = json.loads(run_penstock("inspect", tmp_path / "p", "--json").stdout)
    sizes = report["fields"]["image"]["images"]
    assert (sizes["min_height"], sizes["min_width"]) == (12, 12)
    report = json.loads(run_penstock("inspect", tmp_path / "set", "--json").stdout)
    assert (report["kind"], report["passed_over"]) == ("tar", {})
    assert report["fields"]["image"]["progressive"] == 0


def test_some_fields_are_packed_and_some_images_rewritten(tmp_path: Path) -> None:
    files: dict[str, bytes] = {}
    for i in range(4):
        files |= {f"{i}.left.jpg": jpeg(i, 40, 50), f"{i}.right.jpg": jpeg(i, 40, 50)}
        files |= {f"{i}.cls": b"%d" % (i % 2), f"{i}.txt": b"a text"}
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "all.tar").write_bytes(archive(files))
    options = ("--fields", "left,right, label", "--image", "left", "--short-side", "20", "--json")
    packed = json.loads(run_penstock("pack", tmp_path / "set", tmp_path / "p", *options).stdout)
    assert packed["samples"] == 4
    report = json.loads(run_penstock("inspect", tmp_path / "p", "--json").stdout)["fields"]
    assert list(report) == ["left", "right", "label"]
    assert report["left"]["images"]["max_height"] == 20
    assert report["right"]["images"]["min_height"] == 40


def test_people_get_a_summary_and_quarantined_names(tmp_path: Path) -> None:
    folder = write_photographs(tmp_path / "in", samples=12, classes=2)
    (folder / "class-0" / "broken.jpg").write_bytes(b"not an image")
    run = run_penstock("pack", folder, tmp_path / "out")
    assert "12 samples" in run.stdout
    assert "1 quarantined" in run.stdout
    report = (tmp_path / "out/_penstock/quarantine.jsonl").read_text()
    assert json.loads(report)["name"] == "class-0/broken.jpg"
    assert "12" in run_penstock("inspect", tmp_path / "out").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["inspect", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["inspect", "nosuch://bucket/x"], (1, 2), "nosuch"),
        (["pack", "/nowhere/at/all", "OUT"], 1, "/nowhere/at/all"),
        (["pack", "FOLDER", "OUT", "--shard-bytes", "1.5 parsecs"], 2, "1.5 parsecs"),
        (["pack", "FOLDER"], 2, "Missing argument"),
        (["pack", "FOLDER", "FOLDER"], (1, 2), "FOLDER"),
        (["frobnicate"], 2, "frobnicate"),
        (["inspect", "FOLDER", "-o", "novalue"], 2, "KEY=VALUE"),
        (["inspect", r"C:\data\photos"], 1, "(/mnt/c/"),
        (["inspect", "s3:/bucket/photos"], 1, "(s3://bucket/folder)"),
        (["inspect", "FOLDER", "--fields", "image,label"], 2, "the source of each field"),
        (["inspect", "FOLDER", "--batch", "4", "--out", "nofolder/a.png"], 2, "nofolder isn't"),
        (["cache", "stat", "/nowhere/at/all"], 2, "it doesn't exist"),
        (["bench", "FOLDER", "--augment", "penstock:DataLoader"], (1, 2), "without arguments"),
    ],
)
def test_wrong_use_is_reported_with_its_exit_code(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    code: int | tuple[int, int],
    message: str,
) -> None:
    places = {"FOLDER": str(folder), "OUT": str(tmp_path / "out")}
    monkeypatch.setenv("COLUMNS", "200")
    run = ran(*(places.get(a, a) for a in arguments))
    assert run.code in (code if isinstance(code, tuple) else (code,)), run.stderr
    assert places.get(message, message) in run.stderr.replace("\n", "")
    assert run.stdout == ""


def test_a_destination_with_other_data_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    run = run_penstock("pack", folder, tmp_path, code=1)
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
from penstock.pipeline.cli.output import SampleProgress

def interrupt(self, *_):
    os.kill(os.getpid(), {int(signal.SIGINT)})

SampleProgress.__call__ = interrupt
sys.exit(main(["pack", sys.argv[1], sys.argv[2]]))
"""


def test_version() -> None:
    assert run_penstock("--version").stdout == "penstock 0.1.0\n"


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


@pytest.mark.parametrize("words", EXAMPLES)
def test_every_option_has_help(words: str) -> None:
    """It stands in a docstring, where no one else would notice a misspelt name."""
    assert [each.name for each in commands()[words].params if not each.help] == []


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
    first = ("pack", "index")  # they make what others read
    local = [
        example
        for command in sorted(EXAMPLES, key=lambda command: command not in first)
        for example in EXAMPLES[command]
        if "s3://" not in example and (command not in long or "--yes" in example)
    ]
    assert len(local) >= 10
    for example in local:
        assert main(shlex.split(example)[1:]) == 0, (example, capsys.readouterr().err)
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def sampling(**options: Any) -> Sampling:
    return DatasetOptions(**options).sampling()


def test_lengths_by_axis_for_all_arrays_or_by_name() -> None:
    one = sampling(sample=["8,-,256"], stride=["4,-,128"])
    assert one.window("image") == (8, None, 256)
    assert one.step("image") == (4, None, 128)
    two = sampling(sample=["a=8,-", "b=8"], dtype="uint16")
    assert (two.window("a"), two.window("b"), two.window("c")) == ((8, None), (8,), None)
    assert sampling().to_json() == ""


def test_an_option_chooses_files_or_steps_as_samples() -> None:
    for word in ("file", "row"):
        assert sampling(sample=[word]).unit == word
    with pytest.raises(ConfigError, match="--stride"):
        sampling(stride=["file"])


def test_inspect_reports_shapes_and_an_invalid_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No sample is read, but the types contain the known shapes; so does the log."""
    for number, depth in enumerate((3, 5)):
        volume = np.zeros((1, depth, 4), np.float32)
        np.savez(tmp_path / f"{number}.npz", x=volume, names=np.array(["a"] * 1))
    assert main(["inspect", str(tmp_path), "--sample", "file"]) == 0
    report = capsys.readouterr()
    assert "1 x any x 4" in report.out
    assert "2 samples, which are files" in report.err
    assert logging.getLogger("penstock").level == logging.NOTSET


@pytest.mark.parametrize(
    "message", [["8", "9"], ["a=8", "a=9"], ["=8"], ["eight"], ["0"], ["-"], [""], ["a=8", "9"]]
)
def test_an_invalid_window_is_refused(message: list[str]) -> None:
    with pytest.raises(ConfigError, match="sample"):
        sampling(sample=message)


def test_each_command_that_opens_a_dataset_takes_them(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    np.arange(1_000, dtype=np.uint16).tofile(corpus / "a.bin")
    report = ["--format", "tokens", "--dtype", "uint16", "--sample", "64", "--json"]
    runner = CliRunner()
    for command in ("inspect", "index"):
        found = runner.invoke(app, [command, str(corpus), *report])
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout)["samples"] == 15
    found = runner.invoke(app, ["inspect", str(corpus), "--batch", "2", *report])
    assert found.exit_code == 0, found.output


BOXES = '{"boxes": {"kind": "boxes", "of": "image", "format": "xywh"}}'


def test_every_command_takes_the_options_of_a_dataset() -> None:
    options = {each.name for each in dataclasses.fields(DatasetOptions)}
    for name in ("pack", "index", "inspect", "warm", "bench", "plan"):
        assert options <= {each.name for each in commands()[name].params}, name


def test_a_schema_is_json_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(BOXES)
    for text in (BOXES, str(tmp_path / "schema.json")):
        found = DatasetOptions(schema=text).arguments()["schema"]
        assert found == {"boxes": Boxes(of="image", format="xywh")}
    for wrong in ("[]", "{", "nowhere.json", '{"a": "image"}', '{"a": {"kind": "image", "b": 1}}'):
        with pytest.raises(ConfigError, match="--schema"):
            DatasetOptions(schema=wrong).arguments()


def test_commands_use_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_photographs(tmp_path / "in", samples=4, classes=2)
    label = {"kind": "class_label", "names": ["class-1", "class-0"]}
    schema = ("--schema", json.dumps({"label": label}), "--json")
    assert main(["pack", str(folder), str(tmp_path / "pack"), *schema]) == 0
    capsys.readouterr()
    for arguments in ([str(folder), *schema], [str(tmp_path / "pack"), "--json"]):
        assert main(["inspect", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["fields"]["label"]["names"] == label["names"]


def test_options_of_the_command_are_arguments_of_the_function() -> None:
    options = set(inspect.signature(index_command).parameters)
    arguments = set(inspect.signature(penstock.index).parameters)
    assert options - {"on", "storage_option", "as_json"} < arguments


def run(*arguments: object) -> None:
    assert main([str(each) for each in arguments]) == 0


def test_pack_and_index_on_dask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("distributed")
    pytest.importorskip("nvidia.dali")
    folder = images.class_folder(tmp_path / "set", samples=12)
    run("pack", folder, tmp_path / "alone", "--shard-bytes", 9000)
    run("index", folder, "--out", tmp_path / "index-alone")
    capsys.readouterr()
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=":0") as one:
        on = one.scheduler_address.replace("tcp://", "dask://")
        run("pack", folder, tmp_path / "p", "--shard-bytes", 9000, "--on", on, "--json")
        report = capsys.readouterr().out
        run("index", folder, "--out", tmp_path / "index", "--on", on)
    assert json.loads(report)["samples"] == 12
    assert files_below(tmp_path / "p") == files_below(tmp_path / "alone")
    assert files_below(tmp_path / "index") == files_below(tmp_path / "index-alone")


@pytest.mark.parametrize(
    "on", ["", "dask", "dask:", "dask://", "spark://h:1", "dask-scheduler-file:", "dask://h:x"]
)
def test_addresses_that_are_none(on: str) -> None:
    with pytest.raises(ConfigError, match="wanted dask://HOST:PORT"), executor_on(on):
        pass


def test_a_scheduler_file_that_is_not_there(tmp_path: Path) -> None:
    on = f"dask-scheduler-file:{tmp_path / 'none.json'}"
    with pytest.raises(ConfigError, match=r"No such file.*wanted the file"), executor_on(on):
        pass
    for text in ("root:x:0:0", "{}", "[]", '{"address": null}'):
        (tmp_path / "none.json").write_text(text)
        with (
            pytest.raises(ConfigError, match="wanted the file that a running scheduler"),
            executor_on(on),
        ):
            pass


@pytest.mark.parametrize("kind", ["dask", "ray"])
def test_a_scheduler_that_is_not_there(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    wanted = r"--on \w+://127\.0\.0\.1:\d+: no scheduler answers"
    on, errors = f"{kind}://127.0.0.1:{port}", (FetchError, MissingDependencyError)
    with pytest.raises(errors) as caught, executor_on(on):
        pass
    caught.match(wanted if isinstance(caught.value, FetchError) else "Ray isn't installed")
    assert time.monotonic() - began < PATIENCE_S


def test_a_port_where_something_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.cli.pack_command.CONNECT_S", 0.2)
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        on = f"dask://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(FetchError, match="no scheduler answers"), executor_on(on):
            pass


def test_an_address_of_ipv6_keeps_its_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @contextlib.contextmanager
    def dask(_: str, address: str) -> Iterator[None]:
        asked.append(address)
        yield

    monkeypatch.setattr(pack_command, "check_answers", lambda *_, **__: None)
    monkeypatch.setattr(pack_command, "dask_executor", dask)
    for on in ("dask://[fd00::7]:8786", "dask://10.0.0.7"):
        with executor_on(on):
            pass
    assert asked == ["tcp://[fd00::7]:8786", "tcp://10.0.0.7:8786"]


def test_mpi_needs_workers_or_states_what_is_missing() -> None:
    wanted = r"mpi4py isn't installed|mpi4py\.futures"
    with pytest.raises(PenstockError, match=wanted), executor_on("mpi"):
        pass
