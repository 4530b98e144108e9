"""Test how the way to decode windows on a GPU is chosen: in a child that may crash,
hang or fail."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.augment import (
    Decode,
    Graph,
    Normalize,
    RandomResizedCrop,
    WindowTrial,
    check_recipe,
    devices,
    draw,
    imagenet_train,
    try_window_decoding,
    usable_decoding,
    window_decoding,
)
from penstock.cache import RecipeError
from penstock.readers import ImageRange
from tests.augment.test_graph import defined, jpeg_batch, kinds

SIZES = ImageRange(min_height=40, max_height=120, min_width=40, max_width=120)
CHILD = Path(devices.__file__).with_name("region_child.py")


# -- the child


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"),
        ("import os; os.abort()", "was killed by SIGABRT"),
        ("import sys; sys.exit(7)", "exited with status 7"),
        ("raise RuntimeError('nvImageCodec failure: #8')", "nvImageCodec failure: #8"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
    ],
)
def test_a_child_that_fails_reports_why(code: str, message: str) -> None:
    trial = try_window_decoding(0, child=("-c", code))
    assert not trial.works
    assert message in trial.report


def test_a_child_that_hangs_is_ended() -> None:
    trial = try_window_decoding(
        0, child=("-c", "import threading; threading.Event().wait()"), timeout_s=0.5
    )
    assert trial == WindowTrial(False, "a process that tried it didn't end within 0.5 s")


def test_a_child_that_cant_be_started_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "could be started" in try_window_decoding(0).report


def test_a_child_gets_the_gpu_and_the_paths_of_packages() -> None:
    code = "import sys; told = sys.stdin.read(); print(told)"
    trial = try_window_decoding(3, child=("-c", code))
    assert trial.works
    assert json.loads(trial.report) == {"path": sys.path, "device_id": 3}


def test_the_real_child_compares_pixels_on_the_cpu() -> None:
    asked = json.dumps({"path": sys.path, "device_id": None})
    done = subprocess.run(
        [sys.executable, "-P", str(CHILD)],
        input=asked,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "54 windows differ from whole images by 0.00" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_real_child_without_a_gpu_fails_cleanly() -> None:
    trial = try_window_decoding(0)
    assert not trial.works
    assert "exited with status 1" in trial.report


@pytest.mark.gpu
def test_the_real_child_on_a_gpu_ends_in_time() -> None:
    assert "didn't end" not in try_window_decoding(0).report


# -- the use of the answer


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """GPUs that were tried; those of an odd number crash."""
    report: list[int] = []

    def trial(device_id: int) -> WindowTrial:
        report.append(device_id)
        return WindowTrial(device_id % 2 == 0, f"trial of {device_id}")

    monkeypatch.setattr(devices, "try_window_decoding", trial)
    monkeypatch.setattr(devices, "decoding_by_gpu", {})
    return report


def test_each_gpu_is_tried_once_and_what_was_found_is_logged(
    tried: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "penstock"):
        assert [usable_decoding(number) for number in (0, 1, 0, 1)] == ["decoder", "slice"] * 2
    assert tried == [0, 1]
    assert [(r.levelname, r.getMessage().count("trial of")) for r in caplog.records] == [
        ("INFO", 1),
        ("WARNING", 1),
    ]


@pytest.mark.parametrize("windows", ["decoder", "slice"])
def test_what_was_asked_for_is_not_tried(tried: list[int], windows: Any) -> None:
    recipe = check_recipe((Decode(windows=windows), *imagenet_train(32)[1:]), images=SIZES)
    assert window_decoding(recipe, 1) == windows
    assert window_decoding(recipe, None) == windows
    assert not tried


def test_auto_tries_gpus_only(tried: list[int]) -> None:
    recipe = check_recipe(imagenet_train(32), images=SIZES)
    assert window_decoding(recipe, None) == "decoder"
    assert not tried
    assert window_decoding(recipe, 1) == "slice"
    assert tried == [1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("way", "wanted"), [("decoder", ["ImageSlice"]), ("slice", ["Image", "Slice"])]
)
def test_the_graph_goes_that_way(way: Any, wanted: list[str], device: str) -> None:
    found = kinds(defined(imagenet_train(32), device, windows=way))
    decoding = [kind.removeprefix("decoders__") for kind in found]
    assert [kind for kind in decoding if kind in ("ImageSlice", "Image", "Slice")] == wanted


def test_settings_of_the_gpus_decoder_reach_it_and_nothing_else() -> None:
    def options(decode: Decode, **plan: Any) -> dict[str, Any]:
        from penstock.augment import GraphPlan, decode_options

        made = GraphPlan(
            recipe=check_recipe((decode, *imagenet_train(32)[1:]), images=SIZES),
            batch_size=4,
            threads=1,
            **{"device_id": 0, **plan},
        )
        unsaid = {"output_type", "adjust_orientation", "device"}
        return {k: v for k, v in decode_options(made).items() if k not in unsaid}

    asked = Decode(hw_decoder_load=0.8, preallocate=(400, 500))
    hints = {"preallocate_height_hint": 400, "preallocate_width_hint": 500}
    assert options(Decode()) == {}  # DALI's own
    assert options(asked) == {"hw_decoder_load": 0.8, **hints}
    assert options(asked, device_id=None) == {}
    fixed = {"hw_decoder_load": 0.0, "jpeg_fancy_upsampling": True}
    assert options(asked, deterministic=True) == {**fixed, **hints}


@pytest.mark.parametrize(
    "wrong",
    [
        {"windows": "cut"},
        {"hw_decoder_load": 1.5},
        {"hw_decoder_load": True},
        {"preallocate": (0, 5)},
        {"preallocate": "large"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        Decode(**wrong)


@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_both_ways_give_the_same_bits_on_the_cpu(color: Any) -> None:
    batch, found = jpeg_batch(24), []
    for windows in ("decoder", "slice"):
        decode = Decode(color, windows=windows)  # type: ignore[arg-type]
        normalize = Normalize((0.5,), (0.5,)) if color == "gray" else Normalize()
        recipe = (decode, RandomResizedCrop(32), normalize)
        checked = check_recipe(recipe, images=SIZES)
        graph = Graph(checked, batch_size=24, threads=2)
        graph.feed(batch, draw(checked, ids=batch.ids, dims=batch.dims, seed=3, epoch=0))
        found.append(graph.outputs())
        graph.close()
    assert torch.equal(*found)
