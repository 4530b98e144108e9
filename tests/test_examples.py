"""Run the launch recipes of examples/, as far as one machine permits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image

from penstock.pipeline import Statistics
from penstock.pipeline.cli import app
from tests.pipeline.ranks import free_port, launched_alone, rank_variables
from tests.warm import Warm
from tests.watchdog import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted([*EXAMPLES.glob("*/*.sh"), *EXAMPLES.glob("*/*.sbatch")])
STARTED = sorted(EXAMPLES.glob("*/*.py"))
LAUNCHED = [*SCRIPTS, EXAMPLES / "several-nodes" / "kubernetes.yaml"]


def commands(path: Path, name: str) -> list[list[str]]:
    """Return the words of each command of a name in a script or in the arguments of a manifest."""
    text = "\n".join(
        line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
    )
    if path.suffix == ".yaml":
        yaml = pytest.importorskip("yaml")
        found = [
            one
            for document in yaml.safe_load_all(text)
            if document["kind"] == "Job"
            for kind in ("initContainers", "containers")
            for container in document["spec"]["template"]["spec"][kind]
            for one in container["args"]
        ]
        text = "\n".join(found)
    text = text.replace("\\\n", " ").replace("'", " ")
    lines = [line for line in text.splitlines() if re.search(rf"\b{name}\b", line)]
    return [shlex.split(line[re.search(rf"\b{name}\b", line).end() :]) for line in lines]  # type: ignore[union-attr]


def flags(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_are_shell(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=PATIENCE_S)
    assert "set -euo pipefail" in path.read_text()


@pytest.mark.parametrize("path", LAUNCHED, ids=lambda path: path.name)
def test_their_flags_are_ours(path: Path) -> None:
    warm: Any = typer.main.get_command(app)
    warm = warm.commands["warm"]
    known = {option for one in warm.params for option in one.opts}
    calls = commands(path, "penstock warm")
    assert calls
    for words in calls:
        assert flags(words) <= known
        assert {"--cache", "--global-batch-size"} <= flags(words)
    text = path.read_text()
    assert '--seed "$SEED"' in text
    for flag in re.findall(r"--state|--if-empty", text):
        assert flag in known
    # A node's number comes from its launcher, or is new each time.
    assert ("--state" in text) is ("--node-rank=" in text)
    from torch.distributed.run import get_args_parser

    torchrun = {option for action in get_args_parser()._actions for option in action.option_strings}
    train = set(
        re.findall(
            r'add_argument\(\s*"(--[\w-]+)"', (EXAMPLES / "classification" / "train.py").read_text()
        )
    )
    calls = commands(path, "torchrun")
    assert calls
    for words in calls:
        script = next(i for i, word in enumerate(words) if word.endswith("train.py"))
        assert flags(words[:script]) <= torchrun
        assert {"--node-rank", "--rdzv-id"} & flags(words[:script])
        assert flags(words[script:]) <= train
    assert "--peers" in path.read_text()


def test_the_manifest_is_one_of_kubernetes() -> None:
    yaml = pytest.importorskip("yaml")
    documents = list(
        yaml.safe_load_all((EXAMPLES / "several-nodes" / "kubernetes.yaml").read_text())
    )
    service, job = documents
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    volumes = {one["name"] for one in pod["volumes"]}
    for container in (*pod["initContainers"], *pod["containers"]):
        report = {one["name"]: one.get("value") for one in container["env"]}
        assert report["NODES"] == str(spec["completions"])
        assert {one["name"] for one in container["volumeMounts"]} <= volumes
        used = set(re.findall(r"\$\(?\(?([A-Z_]+)", " ".join(container["args"])))
        assert used <= {*report, "JOB_COMPLETION_INDEX"}


def test_the_manifest_fits_the_api_s_schema() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(
        (EXAMPLES / "several-nodes" / "kubernetes.yaml").read_text()
    ):
        validate.validate(document, validate.latest_version(), strict=True)


@pytest.mark.parametrize("path", STARTED, ids=lambda path: path.name)
def test_scripts_say_how_they_are_started(path: Path) -> None:
    text = path.read_text()
    compile(text, str(path), "exec")
    assert f"python examples/{path.parent.name}/{path.name}" in text.split('"""')[1]


def test_what_prometheus_scrapes_has_names_that_are_served() -> None:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("prometheus_client")
    from penstock.pipeline.report import field_names

    text = (EXAMPLES / "several-nodes" / "prometheus.yaml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    targets = [one for group in job["static_configs"] for one in group["targets"]]
    assert len(set(targets)) == 8
    fields = {field_names(field.name) for field in dataclasses.fields(Statistics)}
    names = {name.removesuffix("_total") for name in re.findall(r"penstock_\w+", text)}
    assert names <= {*fields, "penstock_job_slowest_wait_share"}


def test_training_continues_with_other_ranks(pack: Path, tmp_path: Path) -> None:
    """Stop two processes with torchrun's variables within an epoch; one process resumes from
    their checkpoint."""
    train = [
        *(EXAMPLES / "classification" / "train.py", pack, "--val", pack, "--size", "32"),
        *("--global-batch-size", "40", "--checkpoint", tmp_path / "state.pt"),
    ]

    def run(words: list[object], *ranks: dict[str, str]) -> str:
        with contextlib.ExitStack() as running:
            processes = [
                running.enter_context(Warm(words, env={**launched_alone(), **variables}))
                for variables in ranks
            ]
            for process in processes:
                out, errors = process.communicate()
                assert process.returncode == 0, errors
        return out

    peers = ["--cache", tmp_path / "cache", "--peers", "127.0.0.1:0", "--stop-after", "2"]
    port = free_port()
    run([*train, *peers], *(rank_variables(rank, 2, port) for rank in range(2)))
    assert json.loads((tmp_path / "state.json").read_text())["position"] == 80
    out = run([*train, "--epochs", "1"], {})
    assert "epoch 0: 3 steps" in out  # 203 samples are 5 steps of 40
    assert "accuracy" in out


def test_a_detector_learns_and_its_detections_are_in_coco_s_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = ["--out", str(tmp_path / "found.json"), "--picture", str(tmp_path / "found.png")]
    lines = _printed_by("detector.py", ["--epochs", "6", *files], monkeypatch, capsys)
    losses = [float(line.split()[3].rstrip(",")) for line in lines[:6]]
    assert losses[-1] < 0.5 * losses[0]
    results = json.loads((tmp_path / "found.json").read_text())
    assert lines[-1].endswith(f"of {len(results)} detections")
    assert float(lines[-1].split()[1]) > 0.25
    assert {each["category_id"] for each in results} <= {1, 3, 17}
    assert {each["image_id"] for each in results} <= {*range(1000, 1040)}
    with Image.open(tmp_path / "found.png") as picture:
        assert picture.width > 500


def test_a_segmenter_learns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *rows, last = _printed_by("segmenter.py", ["--epochs", "3"], monkeypatch, capsys)
    losses = [float(line.split()[3].rstrip(",")) for line in rows]
    assert losses[-1] < 0.7 * losses[0]
    assert rows[-1].endswith(last)
    assert float(last.split()[-1]) > 0.7


@pytest.mark.parametrize("flags", [["--peers", "127.0.0.1:0"], ["--peer-token-file", "token"]])
def test_options_that_go_with_another_say_so(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "photos", *flags])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "classification" / "train.py"), run_name="__main__")
    needed = "--cache" if flags[0] == "--peers" else "--peers"
    assert f"pass {needed} too" in capsys.readouterr().err


def _printed_by(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Run a script of examples/ in this process, and return the lines that it prints."""
    monkeypatch.setattr(sys, "argv", [name, *flags])
    monkeypatch.syspath_prepend(EXAMPLES)
    (path,) = EXAMPLES.glob(f"*/{name}")
    runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.splitlines()


def test_a_language_model_learns_from_parts_by_a_schedule(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _printed_by("mix_tokens.py", ["--steps", "64"], monkeypatch, capsys)
    assert "a new loader continues at step 32" in lines.pop(5)
    rows = [[float(cell.rstrip("%")) for cell in line.split()[1:]] for line in lines[1:]]
    assert len(rows) == 8
    shares, losses = [row[::2] for row in rows], [row[1::2] for row in rows]
    assert shares[0] == pytest.approx([82.5, 13.5, 4.0], abs=1.0)
    assert shares[-1] == pytest.approx([33.3, 33.3, 33.3], abs=1.0)
    assert all(last < first - 0.5 for first, last in zip(losses[0], losses[-1], strict=True))


def test_encoders_of_images_and_texts_learn_from_two_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _printed_by("contrastive.py", ["--steps", "32"], monkeypatch, capsys)
    rows = [[float(cell.strip("%,")) for cell in line.split()] for line in lines[1:]]
    assert [row[2::2] for row in rows] == [[67, 33]] * 8
    assert rows[-1][1] < rows[0][1] - 0.5
    assert min(rows[-1][3::2]) > 40


def test_a_student_learns_from_views_of_unlabelled_images(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--batch-size", "24", "--global-size", "24", "--local-size", "12", "--locals", "3"]
    lines = _printed_by("dino.py", ["--steps", "40", *sizes], monkeypatch, capsys)
    rows = [[float(cell.rstrip("%")) for cell in line.split()] for line in lines[1:]]
    assert [row[0] for row in rows] == list(range(5, 41, 5))
    assert rows[-1][1] < rows[0][1] - 0.3
    assert min(row[2] for row in rows) > 5  # by chance 3 %
