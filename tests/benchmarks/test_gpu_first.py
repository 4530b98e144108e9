"""Test the first check of a GPU without one: its cases, processes and graphs."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any, get_args

import pytest
from rich.console import Console

from benchmarks import gpu_first
from benchmarks.data import Prepared, prepare
from benchmarks.gpu_cases import Answer, Budget, ask
from benchmarks.photographs import PHOTOGRAPHS
from penstock.augment import load_dali
from penstock.pipeline.bench import MARK

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("first")
    return prepare(folder, train_images=32, eval_images=len(PHOTOGRAPHS))


@pytest.fixture
def base(prepared: Prepared) -> gpu_first.Case:
    made = gpu_first.base_case(prepared.pack, device="cpu", batch_size=8, size=32, quick=True)
    return {**made, "settle": 1, "timed": 2, "stem": 2, "threads": 2}


def here(case: dict[str, Any], _: Budget) -> Answer:
    return Answer(told=json.loads(json.dumps(gpu_first.PLAY[case["what"]](case))))


@pytest.mark.parametrize("what", get_args(gpu_first.What))
def test_everything_plays_on_the_cpu(what: Any, base: gpu_first.Case, tmp_path: Path) -> None:
    path = gpu_first.measure(
        what, base, threads=(2,), results=tmp_path, console=Console(file=io.StringIO()), play=here
    )
    report = json.loads(path.read_text())
    assert path.name == f"gpu-{what}.json"
    assert report["cases"]
    assert all(case["images_per_s"] > 0 for case in report["cases"])
    assert {"date", "machine", "versions", "gpu"} <= set(report)
    assert base["pack"] not in path.read_text()


def test_settings_are_tried_one_after_the_other(base: gpu_first.Case) -> None:
    played: list[gpu_first.Case] = []

    def rate(case: gpu_first.Case) -> float:
        played.append(case)
        off = (case["windows"] != "slice") + (case["hw_load"] != 0.8) + (case["threads"] != 14)
        return float(1000 - 100 * off + 10 * case["preallocate"])

    best = gpu_first.decoding_one_by_one(base, (8, 14, 16), rate)
    assert (best["windows"], best["hw_load"], best["threads"]) == ("slice", 0.8, 14)
    assert best["preallocate"]
    assert len(played) == 9  # 1 + 1 + 4 + 2 + 1
    assert len({json.dumps(case) for case in played}) == len(played)


def test_a_setting_that_crashes_is_never_the_best(base: gpu_first.Case) -> None:
    best = gpu_first.decoding_one_by_one(
        base, (8,), lambda case: 0.0 if case["windows"] == "decoder" else 5.0
    )
    assert best["windows"] == "slice"


def test_the_grid_has_everything(base: gpu_first.Case) -> None:
    assert len(gpu_first.decoding_grid(base, (8, 14, 16))) == 2 * 5 * 3 * 2


@pytest.mark.parametrize("name", gpu_first.CANARY)
def test_canaries_have_a_graph_for_cuda(name: str) -> None:
    pipe = load_dali().Pipeline(batch_size=2, num_threads=1, device_id=None)
    with pipe:
        nodes = gpu_first.canary_nodes(name, "cuda")
        assert nodes.device == "gpu"
        pipe.set_outputs(nodes)
    assert pipe.serialize()


def test_a_case_reaches_its_process_and_comes_back(base: gpu_first.Case) -> None:
    case = gpu_first.canary_cases({**base, "batch_size": 2})[1]
    answer = ask("benchmarks.gpu_first", {**case, "batches": 1}, budget=Budget(None))
    assert not answer.failed
    assert answer.told["images_per_s"] > 0


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Python in whose place something else runs."""

    python = sys.executable

    def runs(code: str) -> None:
        script = tmp_path / "python"
        script.write_text(f"#!{python}\n{code}\n")
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return runs


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed by SIGSEGV"),
        ("raise ValueError('no such decoder')", "failed: ValueError: no such decoder"),
        ("import threading; threading.Event().wait()", "hung: no answer within 1 s"),
        ("pass", "ended without an answer"),
    ],
)
def test_a_case_that_fails_reports_why(child: Any, code: str, message: str) -> None:
    child(code)
    assert ask("some.module", {}, budget=Budget(None), timeout_s=1.0).failed == message


def test_the_answer_of_a_case_is_read(child: Any) -> None:
    child(f"print('noise'); print({MARK!r} + '{{\"rate\": 3}}')")
    assert ask("some.module", {}, budget=Budget(None)) == Answer(told={"rate": 3})


def test_what_is_over_time_is_left_out(child: Any) -> None:
    child("raise SystemExit(9)")
    assert "left out" in ask("some.module", {}, budget=Budget(0.0)).failed


@pytest.mark.parametrize("what", get_args(gpu_first.What))
def test_without_a_gpu_that_is_reported(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_first, "has_cuda", lambda: False)
    assert gpu_first.main([what]) == 1
    said = capsys.readouterr()
    assert said.err.strip() == "not measured: no CUDA device"
    assert not said.out


def test_it_asks_what_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_first.main([])
    assert ended.value.code == 2
    assert "canary" in capsys.readouterr().err
