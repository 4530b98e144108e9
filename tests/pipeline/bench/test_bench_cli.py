"""Test `penstock bench`: errors before any measurement, the printed report, and the picture."""

from __future__ import annotations

import datetime
import importlib.util
import io
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
from PIL import Image
from rich.console import Console

from penstock.augment import CenterCrop, Resize, imagenet_train
from penstock.cache import ConfigError, MissingDependencyError, PlanError, RecipeError
from penstock.cache.base import usable_cores
from penstock.pipeline.bench import (
    Axis,
    BenchResult,
    DatasetFacts,
    LoaderComparison,
    LoaderFigures,
    LoaderSettings,
    MeasuredRun,
    NotTheSameWorkError,
    RunFigures,
    SearchResult,
    Workload,
    accelerator,
    as_json,
    bars_of,
    check_plot,
    plot,
    recipe_named,
    reopened,
    show_result,
    step_of,
)
from penstock.pipeline.cli import main
from penstock.pipeline.plan import World
from penstock.pipeline.report import Ceilings, Diagnosis, LoaderFacts, Rate
from penstock.readers import Dataset, Source
from penstock.readers.formats import check_sampling
from tests import warm
from tests.conftest import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[3]
# What scripts read, by the project's list of fixed names.
FIXED = {
    "samples_per_s",
    "cpu_s_per_1000",
    "first_batch_s",
    "wait_p50_s",
    "wait_p99_s",
    "au",
    "bytes_by_tier",
    "verdict",
    "against",
}

# --- wrong use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["nosuch://bucket/x"], 2, "nosuch"),
        (["PACK", "--batch-size", "1000"], 2, f"--batch-size {SAMPLES} or less"),
        (["PACK", "--accelerator", "h100-resnet50"], 2, "400 (h100-resnet50's)"),
        (["PACK", "--batch-size", "0"], 2, "greater than or equal to 1"),
        (["PACK", "--device", "cuda:99"], 2, "CUDA device"),
        (["PACK", "--seconds", "0"], 2, "--seconds: got 0"),
        (["PACK", "--seconds", "inf"], 2, "--seconds: got inf"),
        (["PACK", "--step-ms", "-1"], 2, "--step-ms: got -1"),
        (["PACK", "--step-ms", "1", "--accelerator", "h100-resnet50"], 2, "one of them"),
        (["PACK", "--accelerator", "abacus"], 2, "h100-resnet50, "),
        (["PACK", "--augment", "imagnet"], 2, "imagenet-eval, none"),
        (["PACK", "--augment", "tests.pipeline.bench.test_bench_cli:nobody"], 2, "nobody"),
        (["PACK", "--augment", "no_such_module:recipe"], 2, "no_such_module"),
        (
            ["PACK", "--augment", "tests.pipeline.bench.test_bench_cli:OF_AUDIO"],
            2,
            "'mel spectrogram'",
        ),
        (["PACK", "--against", "frobnicate"], 2, "webdataset"),
        (["PACK", "--against", "torch", "--augment", "none"], 2, "`--augment imagenet`"),
        (["PACK", "--against", ","], 2, "--against: got nothing"),
        (["PACK", "--plot", "/nowhere/at/all/b.png"], 2, "/nowhere/at/all isn't"),
        (["PACK", "--plot", "b.gif"], 2, "ends in .png"),
        (["PACK", "-o", "novalue"], 2, "KEY=VALUE"),
    ],
)
def test_wrong_use_is_reported_before_anything_is_measured(
    pack: Path,
    arguments: list[str],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(
        "penstock.pipeline.bench.measurement.play", lambda *_, **__: pytest.fail("it played")
    )
    given = [str(pack) if argument == "PACK" else argument for argument in arguments]
    # A recipe is compared with the images when the loader is built, which is in the first run.
    if "OF_AUDIO" in arguments[-1]:
        monkeypatch.undo()
    assert main(["bench", *given, "--json"]) == code
    out, err = capsys.readouterr()
    assert message in " ".join(err.split())
    assert "Traceback" not in err
    assert out == ""


OF_AUDIO = ["mel spectrogram"]
RECIPE = [Resize(32), CenterCrop(24)]


def made_recipe() -> tuple[Any, ...]:
    return imagenet_train(32)


def test_a_picture_without_matplotlib_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"penstock\[plot\]"):
        check_plot(tmp_path / "b.png")


def test_a_folder_that_may_not_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root
    with pytest.raises(ConfigError, match="isn't writable"):
        check_plot(tmp_path / "b.png")


def test_a_folder_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "b.png").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        check_plot(tmp_path / "b.png")


def test_ctrl_c_ends_with_130_and_no_thread_is_left(pack: Path) -> None:
    workload = warm.run(["-c", INTERRUPTED, pack], destroys_libraries=True)
    assert workload.returncode == 130, workload.stderr
    assert "Traceback" not in workload.stderr
    assert workload.stdout.split() == ["MainThread"]


# A bench that gets Ctrl-C when its first run is a quarter done.
INTERRUPTED = f"""
import os, sys, threading
from penstock.pipeline.cli import bench_command, main

def interrupt(self, what, share=None, /):
    if share:
        os.kill(os.getpid(), {int(signal.SIGINT)})

bench_command.MeasuringBar.__call__ = interrupt
code = main(["bench", sys.argv[1], "--seconds", "4", "--batch-size", "16"])
print(*(thread.name for thread in threading.enumerate()))
sys.exit(code)
"""


# --- recipes and steps ---------------------------------------------------------------------------


def test_recipes_by_name() -> None:
    assert recipe_named("imagenet").operations == tuple(imagenet_train(224))
    assert recipe_named("none").reads_only
    auto = recipe_named("auto")
    assert auto.settled(has_images=True) == recipe_named("imagenet")
    assert auto.settled(has_images=False).operations == ()
    with pytest.raises(RecipeError, match="have none"):
        recipe_named("imagenet-eval").settled(has_images=False)
    mine = recipe_named("tests.pipeline.bench.test_bench_cli:RECIPE")
    assert (mine.operations, mine.line) == (tuple(RECIPE), "RECIPE")
    made = recipe_named("tests.pipeline.bench.test_bench_cli:made_recipe")
    assert (made.operations, made.line) == (tuple(imagenet_train(32)), "made_recipe()")
    assert made.imports == ("from tests.pipeline.bench.test_bench_cli import made_recipe",)


@pytest.mark.parametrize("name", ["json:loads", "os:sep", "sys:maxsize"])
def test_an_invalid_recipe_is_refused(name: str) -> None:
    with pytest.raises((RecipeError, TypeError)):
        recipe_named(name)


def test_an_accelerators_step_scales_with_the_batch() -> None:
    known = accelerator("h100-resnet50")
    assert step_of(step_ms=None, accelerator=known.name, batch_size=None) == (known.step_s, 400)
    assert step_of(step_ms=None, accelerator=known.name, batch_size=200) == (known.step_s / 2, 200)
    assert step_of(step_ms=125.0, accelerator=None, batch_size=None) == (0.125, None)
    assert step_of(step_ms=None, accelerator=None, batch_size=64) == (0.0, 64)


# --- settings ------------------------------------------------------------------------------------


def a_workload(url: Path | str, **changes: Any) -> Workload:
    fields: dict[str, Any] = {"recipe": recipe_named("imagenet"), "device": "cpu", "seconds": 1.0}
    return Workload(url=str(url), **(fields | changes))


def test_a_small_set_gives_the_batch_that_it_has(pack: Path) -> None:
    with Dataset(pack) as dataset:
        assert a_workload(pack).setup(dataset).batch_size == SAMPLES
        assert a_workload(pack, batch_size=7).setup(dataset).batch_size == 7
        with pytest.raises(PlanError, match=f"{SAMPLES} samples"):
            a_workload(pack, batch_size=SAMPLES + 1).setup(dataset)


@pytest.mark.parametrize("recipe", ["imagenet", "imagenet-eval"])
@pytest.mark.parametrize("changes", [{}, {"num_workers": 3, "prefetch_factor": 4, "read": "pread"}])
def test_the_line_of_python_builds_the_same_loader(
    pack: Path, recipe: str, changes: dict[str, Any]
) -> None:
    workload = a_workload(pack, recipe=recipe_named(recipe))
    with workload.dataset() as dataset:
        setup = replace(workload.setup(dataset), batch_size=16, **changes)
        names: dict[str, Any] = {}
        exec(workload.imports, names)  # all that is printed runs
        with (
            workload.loader(dataset, setup) as measured,
            eval(workload.line(setup), names) as report,
        ):
            assert report.batch_size == measured.batch_size
            mine: Any = report.dataset
            assert mine.fields == dataset.fields
            assert _settings(report) == _settings(measured)
            mine.close()


def _settings(loader: Any) -> dict[str, Any]:
    kept = loader._engine.options
    names = ("shuffle", "augment", "device", "depth", "read", "schedule", "drop_last")
    facts = {name: getattr(kept, name) for name in names}
    return facts | {"threads": kept.num_workers or World(0, 1).threads(usable_cores())}


def test_secrets_stay_out_of_the_line() -> None:
    workload = a_workload("s3://key:secret@bucket/x", data={"storage_options": {"secret": "hush"}})
    line = workload.line(LoaderSettings(batch_size=8, num_workers=2))
    assert "secret@" not in line
    assert "hush" not in line


def test_what_a_sample_is_stands_in_the_line() -> None:
    report = check_sampling(sample=(64,), stride=(32,), dtype="uint16")
    line = a_workload("corpus", data=report.arguments()).line(
        LoaderSettings(batch_size=8, num_workers=2)
    )
    assert "Dataset('corpus', sample=(64,), stride=(32,), dtype='uint16')" in line


def test_uncounted_bytes_are_not_zero() -> None:
    played = a_result().raw
    uncounted = replace(played, figures=replace(played.figures, bytes=0, bytes_by_tier={"disk": 0}))
    result = a_result(raw=uncounted)
    console = Console(record=True, width=120)
    show_result(result, console)
    assert "0.0 MB/s" not in (text := console.export_text())
    assert "not counted" in text


# --- reports -------------------------------------------------------------------------------------


def a_result(**changes: Any) -> BenchResult:
    measured = RunFigures(
        samples=2560,
        batches=10,
        seconds=3.0,
        bytes=100_000_000,
        cpu_s=5.5,
        first_batch_s=0.61,
        wait_p50_s=0.29,
        wait_p99_s=0.41,
        wait_share=1.0,
        step_s=0.0,
        au=0.0,
        bytes_by_tier={"remote": 0, "disk": 100_000_000, "memory": 0},
    )
    played = MeasuredRun(figures=measured, facts=FACTS, waits_s=(0.3,) * 9 + (0.41,))
    rate = Rate(samples_per_s=900.0, bytes_per_s=4e7, cpu_s_per_1000=2.1)
    setup = LoaderSettings(batch_size=256, num_workers=2)
    fields: dict[str, Any] = {
        "workload": a_workload("/data/pack"),
        "setup": setup,
        "dataset": DatasetFacts(samples=3072, bytes=122_000_000, kind="pack"),
        "raw": played,
        "stepped": None,
        "floor_au": None,
        "ceilings": Ceilings(
            read=replace(rate, samples_per_s=9e4),
            decode=replace(rate, samples_per_s=1300.0),
            augment=rate,
        ),
        "diagnosis": Diagnosis(
            limit="decode",
            cause="slow-decode",
            of_ceiling=0.95,
            advice="More cores.",
            predicted_samples_per_s=1700.0,
            assumes="they share the work evenly",
            basis="two of them",
            verdict="Decoding is the limit.",
        ),
        "search": None,
        "date": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    }
    return BenchResult(**(fields | changes))


FACTS = LoaderFacts(
    samples=2560,
    batches=10,
    step_s=0.0,
    wait_s=3.0,
    wait_read_s=0.0,
    wait_decode_s=3.0,
    read_s=0.1,
    load_s=0.1,
    elapsed_s=3.6,
    decode_threads=2,
    usable_cores=2,
    device="cpu",
)


def with_a_step() -> BenchResult:
    result = a_result(workload=a_workload("/data/pack", step_s=0.143, accelerator="h100-resnet50"))
    measured = replace(result.raw.figures, au=67.1, step_s=0.1431, wait_p50_s=0.11)
    return replace(result, stepped=replace(result.raw, figures=measured), floor_au=99.98)


def with_all() -> BenchResult:
    setup = LoaderSettings(batch_size=256, num_workers=2)
    trials = {setup: [850.0, 860.0], replace(setup, num_workers=1): [430.0]}
    return replace(
        with_a_step(),
        search=SearchResult(best=setup, runs=trials, noise=0.02),
        loaders=LoaderComparison(
            results={"torch": LoaderFigures(samples_per_s=230.0, cpu_s_per_1000=8.0, ratio=3.7)},
            ours=LoaderFigures(samples_per_s=850.0, cpu_s_per_1000=2.2, ratio=1.0),
            skipped={"ffcv": "pip install ffcv"},
            note="All read the image folder where it lies.",
        ),
    )


@pytest.mark.parametrize("make", [a_result, with_a_step, with_all])
def test_json_has_the_fixed_fields_and_is_documented(make: Callable[[], BenchResult]) -> None:
    report = json.loads(json.dumps(as_json(make())))
    assert set(report) >= FIXED
    documented = (ROOT / "docs" / "reference" / "bench.md").read_text()
    assert [name for name in report if f"`{name}`" not in documented] == []


def test_json_reports_a_steps_waits_and_the_free_runs_rate() -> None:
    report = as_json(with_a_step())
    assert (report["wait_p50_s"], report["au"], report["floor_au"]) == (0.11, 67.1, 99.98)
    assert report["fed_step_ms"] == pytest.approx(1000 * 256 / (2560 / 3))
    assert report["step_ms"] == pytest.approx(143)
    without = as_json(a_result())
    assert (without["wait_p50_s"], without["au"], without["step_ms"]) == (0.29, None, None)


def written(result: BenchResult) -> str:
    text = io.StringIO()
    show_result(result, Console(width=120, file=text))
    return text.getvalue()


def test_the_report_gives_advice() -> None:
    text = written(a_result())
    for report in ("853/s", "33.3 MB/s", "Decoding is the limit.", "--tune", "--accelerator"):
        assert report in text
    assert "loader = DataLoader(Dataset('/data/pack')" in text
    text = written(with_all())
    for report in ("67.10 %", "99.98 %", "h100-resnet50", "3.70 x", "ffcv was left out", "chosen"):
        assert report in text
    assert "--tune" not in text


@pytest.mark.parametrize("make", [a_result, with_a_step, with_all])
def test_one_share_of_the_ceiling_is_shown(make: Callable[[], BenchResult]) -> None:
    """The verdict's: of the stage that is the limit, by the run that is judged."""
    result = make()
    text = written(result)
    assert re.findall(r"reached (\d+)%", text) == ["95"]
    assert [line.split("  ")[0] for line in text.splitlines() if "reached 95%" in line] == [
        "decode + augment"
    ]
    drawn = [bar.note for bar in bars_of(result) if bar.note]
    assert drawn == ["the limit: reached 95%"]
    assert as_json(result)["of_ceiling"] == 0.95


def test_a_run_that_waits_for_no_stage_shows_no_share() -> None:
    found = replace(a_result().diagnosis, limit="model", of_ceiling=1.0)
    assert "reached" not in written(a_result(diagnosis=found))


def test_a_machine_that_others_use_is_reported() -> None:
    free = a_result()
    assert "another program" not in written(free)
    busy = replace(free, raw=replace(free.raw, figures=replace(free.raw.figures, cpu_s=0.6)))
    assert "another program used the cores" in written(busy)
    reading = replace(busy.raw.facts, wait_decode_s=0.0, wait_read_s=3.0)  # waiting takes no core
    assert "another program" not in written(replace(busy, raw=replace(busy.raw, facts=reading)))


def test_a_search_on_a_busy_machine_is_called_that() -> None:
    result = with_all()
    assert result.search is not None
    assert "busy" not in written(result)
    assert "busy" in written(replace(result, search=replace(result.search, noise=0.2)))


def test_the_change_stands_on_a_line_of_its_own() -> None:
    found = replace(a_result().diagnosis, verdict="It is slow. More cores. Predicted: 3.")
    lines = written(a_result(diagnosis=found)).splitlines()
    assert lines[lines.index("It is slow.") + 1] == "More cores. Predicted: 3."


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_picture_is_written(tmp_path: Path) -> None:
    plot(with_all(), tmp_path / "b.png")
    with Image.open(tmp_path / "b.png") as picture:
        assert picture.width > 1000


# --- whole runs ----------------------------------------------------------------------------------


def bench(*arguments: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["bench", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def test_a_pack_is_measured(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(pack, "--seconds", 0.3, "--batch-size", 16, "--step-ms", 1, capsys=capsys)
    assert set(report) >= FIXED
    assert report["samples_per_s"] > 0
    assert 0 < report["au"] <= 100
    assert report["floor_au"] > 0
    assert report["bytes_by_tier"]["disk"] > 0
    assert {"read", "decode"} <= set(report["ceilings"])
    assert report["verdict"]


def test_a_folder_is_read_without_decoding(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(folder, "--augment", "none", "--seconds", 0.2, "--batch-size", 16, capsys=capsys)
    assert report["samples_per_s"] > 0
    assert "decode" not in report["ceilings"]


def test_tuning_reports_what_it_tried(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.bench.measurement._LEAST_SEARCH_RUN_S", 0.05)
    axes = (Axis(name="num_workers", values=(1, 2), tie=True),)
    monkeypatch.setattr("penstock.pipeline.bench.measurement.axes_for", lambda *_, **__: axes)
    given = ("--seconds", 0.1, "--batch-size", 16, "--num-workers", 2, "--tune")
    report = bench(pack, *given, capsys=capsys)
    assert [trial["num_workers"] for trial in report["tried"]] == [2, 1]
    chosen = {name: report[name] for name in ("batch_size", "num_workers", "read")}
    assert any(chosen.items() <= trial.items() for trial in report["tried"])


def test_a_loader_that_isnt_installed_is_named_and_left_out(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.pipeline.bench.adapters.adapter.is_importable", lambda _: False)
    given = ("--seconds", 0.1, "--batch-size", 16, "--against", "webdataset, dali")
    report = bench(pack, *given, capsys=capsys)
    assert report["against"] == {}
    assert set(report["skipped"]) == {"webdataset", "dali"}
    assert "penstock[" in report["skipped"]["dali"]


def test_a_loader_that_fails_leaves_what_was_measured(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise NotTheSameWorkError("they differ")

    monkeypatch.setattr("penstock.pipeline.bench.measurement.compare_loaders", fail)
    given = ("--seconds", "0.1", "--batch-size", "16", "--against", "torch", "--json")
    assert main(["bench", str(pack), *given]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["samples_per_s"] > 0
    assert json.loads(out)["failed"] == "they differ"
    assert "they differ" in err


@pytest.mark.filterwarnings("ignore:.*is remote and cache= isn't given")
def test_a_remote_set_is_opened_for_each_run(
    pack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(pack), "/bench-remote", recursive=True)
    opened, real = [], Workload.dataset

    def count(workload: Workload) -> Source:
        opened.append(workload)
        return real(workload)

    monkeypatch.setattr(Workload, "dataset", count)
    given = ("--seconds", 0.1, "--batch-size", 16, "--step-ms", 1)
    report = bench("memory://bench-remote", *given, capsys=capsys)
    assert report["samples_per_s"] > 0
    # To look at, with the step, without, and for the stages.
    assert len(opened) == 4


@pytest.mark.parametrize(
    ("kind", "remote", "cache", "index", "anew"),
    [
        ("pack", True, None, None, True),
        ("pack", False, None, None, False),  # a local one
        ("pack", True, "there", None, False),  # the user's cache is what is asked about
        ("folder", True, None, None, False),  # it would be indexed again
        ("folder", True, None, "there", True),
    ],
)
def test_a_set_is_reopened_where_that_makes_it_cold(
    kind: str,
    remote: bool,
    cache: str | None,
    index: str | None,
    anew: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared: Any = SimpleNamespace(is_self_contained=kind == "pack", remote_shards=remote or None)
    fresh = MagicMock()
    monkeypatch.setattr(Workload, "dataset", lambda _: fresh)
    workload = a_workload("x", data={"cache": cache, "index": index})
    with reopened(workload, shared) as own:
        assert (own is not shared) == anew
    assert fresh.__enter__.called == anew
