"""Run a tiny case of every benchmark and of the demo. No timing is asserted."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from benchmarks import (
    cache,
    compare,
    demo,
    detection,
    memory,
    native_arrays,
    overhead,
    peers,
    resume,
    tokens,
    views,
    zarr_chunks,
)
from benchmarks.data import Prepared, prepare
from benchmarks.photographs import PHOTOGRAPHS, borrow_images, make_photographs
from benchmarks.proof import judge
from benchmarks.record import write_result
from penstock.cache import ConfigError, DatasetNotFoundError
from penstock.pipeline.bench import (
    Child,
    ChildFailedError,
    Figure,
    NotTheSameWorkError,
    Round,
    RoundSize,
    StepTimes,
    TensorFacts,
    check_same_work,
    machine,
    tree_cpu_s,
)
from penstock.pipeline.bench.adapters import AREA, RATIO, crop_window, normalised
from penstock.readers import Dataset
from tests.properties import examples
from tests.servers import NGINX

if TYPE_CHECKING:
    from pathlib import Path


CLASSES = len(PHOTOGRAPHS)


QUICK = RoundSize(looked=6, settle=1, timed=2, stepped=1)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return prepare(tmp_path_factory.mktemp("data"), train_images=64, eval_images=CLASSES)


# --- photographs ---------------------------------------------------------------------------------


def test_photographs_are_the_same_bytes_for_the_same_seed(tmp_path: Path) -> None:
    def bytes_of(folder: Path, seed: int, workers: int) -> dict[str, bytes]:
        make_photographs(
            folder, train_images=CLASSES, eval_images=CLASSES, seed=seed, workers=workers
        )
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.jpg")}

    first = bytes_of(tmp_path / "a", 7, 1)
    assert len(first) == 2 * CLASSES
    assert bytes_of(tmp_path / "b", 7, 2) == first
    assert bytes_of(tmp_path / "c", 8, 1) != first


def test_photographs_that_are_complete_are_not_made_again(tmp_path: Path) -> None:
    made = make_photographs(tmp_path, train_images=CLASSES, eval_images=CLASSES, workers=1)
    some = next(made.train.rglob("*.jpg"))
    some.write_bytes(b"untouched")
    again = make_photographs(tmp_path, train_images=CLASSES, eval_images=CLASSES, workers=1)
    assert again == made
    assert some.read_bytes() == b"untouched"
    make_photographs(tmp_path, train_images=CLASSES + 1, eval_images=CLASSES, workers=1)
    assert some.read_bytes() != b"untouched"


def test_photographs_refuse_fewer_images_than_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one a photograph"):
        make_photographs(tmp_path, train_images=3, eval_images=CLASSES)


def folder_of(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(root / name / f"{i}.png")
    return root


def test_borrowed_images_are_links_split_into_train_and_eval(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "own", {"a": 20, "b": 20, ".hidden": 3})
    images = borrow_images(folder, tmp_path / "out", most_images=30)
    train = {p.resolve() for p in images.train.rglob("*.png")}
    test = {p.resolve() for p in images.eval.rglob("*.png")}
    assert not train & test
    assert (len(train), len(test)) == (images.train_images, images.eval_images)
    assert len(train) + len(test) <= 31
    assert images.classes == ("a", "b")
    assert all(p.is_symlink() for p in images.train.rglob("*.png"))


def test_borrowed_images_keep_the_users_own_split(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder_of(folder / "train", {"a": 3, "b": 3})
    folder_of(folder / "val", {"a": 2, "b": 1, "c": 1})
    images = borrow_images(folder, tmp_path / "out")
    assert (images.train_images, images.eval_images) == (6, 3)  # c was never trained


def test_borrowed_images_need_two_classes(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match="two classes"):
        borrow_images(folder_of(tmp_path / "own", {"a": 20}), tmp_path / "out")


# --- other loaders and measuring -----------------------------------------------------------------


@examples(200)
@given(width=st.integers(1, 3000), height=st.integers(1, 3000), seed=st.integers(0, 2**32))
def test_crop_windows_lie_inside_the_image(width: int, height: int, seed: int) -> None:
    left, top, w, h = crop_window(width, height, np.random.default_rng(seed))
    assert w >= 1
    assert h >= 1
    assert 0 <= left <= width - w
    assert 0 <= top <= height - h
    if min(width, height) > 300 and RATIO[0] < width / height < RATIO[1]:
        assert AREA[0] * 0.98 <= w * h / (width * height) <= AREA[1]
        assert RATIO[0] * 0.97 <= w / h <= RATIO[1] * 1.03


def test_normalised_is_channels_first_with_imagenets_mean_at_zero() -> None:
    grey = np.full((2, 3, 3), [124, 116, 104], np.uint8)
    planes = normalised(grey)
    assert planes.shape == (3, 2, 3)
    assert planes.dtype == np.float32
    assert np.abs(planes).max() < 0.01


def test_tree_cpu_counts_children_that_still_run() -> None:
    before = tree_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        assert tree_cpu_s() - before >= 0.29
        child.communicate("\n")
    assert tree_cpu_s() - before >= 0.29  # and once it has ended


def a_round(pixels: TensorFacts) -> Round:
    timed = StepTimes(samples=10, elapsed_s=1.0)
    fed = StepTimes(waits_s=[0.4, 0.6], computes_s=[1.0, 2.0])
    return Round.of(timed, fed, cpu_s=2.0, first_batch_s=0.2, pixels=pixels)


PIXELS = TensorFacts(
    shape=(8, 3, 32, 32),
    dtype="torch.float32",
    label_dtype="torch.int64",
    samples=1280,
    label_mean=7.5,
    label_deviation=4.6,
    spread=0.6,
    mean=(0.0, 0.0, 0.0),
    deviation=(1.0, 1.0, 1.0),
    detail=0.1,
)


def test_a_rounds_figures() -> None:
    done = a_round(PIXELS)
    assert (done.images_per_s, done.cpu_s_per_1000, done.wait_share) == (10, 200, 0.25)
    assert (done.batch_wait_ms, done.batch_step_ms) == (500, 1500)
    assert Figure.of([3, 1, 2]) == Figure(median=2, low=1, high=3)


@pytest.mark.parametrize(
    "other",
    [
        replace(PIXELS, shape=(8, 32, 32, 3)),
        replace(PIXELS, dtype="torch.uint8"),
        replace(PIXELS, label_dtype="torch.int32"),
        replace(PIXELS, mean=(0.0, 0.4, 0.0)),
        replace(PIXELS, deviation=(1.0, 1.0, 1.3)),
        replace(PIXELS, detail=0.2),
        replace(PIXELS, label_mean=8.6),
        replace(PIXELS, label_deviation=3.5),
    ],
)
def test_unequal_work_is_not_compared(other: TensorFacts) -> None:
    with pytest.raises(NotTheSameWorkError, match="torch"):
        check_same_work({"penstock": [PIXELS], "torch": [other]}, pooled=True)


def test_equal_work_is_compared() -> None:
    near = replace(PIXELS, mean=(0.05, -0.05, 0.0), detail=0.11, label_mean=7.7)
    check_same_work({"penstock": [PIXELS], "torch": [near]}, pooled=True)


@pytest.mark.parametrize(("samples", "refused"), [(128, False), (12800, True)])
def test_few_samples_may_differ_by_chance(samples: int, refused: bool) -> None:
    ours = replace(PIXELS, samples=samples)
    other = replace(ours, mean=(0.2, -0.2, 0.0), label_mean=6.3)
    with pytest.raises(NotTheSameWorkError, match="ffcv") if refused else nullcontext():
        check_same_work({"penstock": [ours], "ffcv": [other]}, pooled=True)


def test_a_child_that_fails_reports_why() -> None:
    with (
        Child("penstock.pipeline.bench.rounds", ["penstock", "not json"]) as child,
        pytest.raises(ChildFailedError, match="JSONDecodeError"),
    ):
        child.receive()


def test_results_say_when_where_and_with_what(tmp_path: Path) -> None:
    report = json.loads(write_result("what", {"x": 1}, folder=tmp_path).read_text())
    assert report["x"] == 1
    assert report["machine"]["cores"] == machine()["cores"]
    assert {"python", "torch", "penstock"} <= report["versions"].keys()
    assert "T" in report["date"]


# --- the proof of an exact resumption ------------------------------------------------------------

WHOLE = {n: ([2 * n, 2 * n + 1], 1 / n) for n in range(1, 9)}


def lives(
    *, killed: int, checkpoint: int
) -> tuple[dict[int, tuple[list[int], float]], dict[int, tuple[list[int], float]]]:
    first = {n: step for n, step in WHOLE.items() if n <= killed}
    return first, {n: step for n, step in WHOLE.items() if n > checkpoint}


def test_an_exact_resumption_is_found_exact() -> None:
    first, second = lives(killed=5, checkpoint=3)
    verdict = judge(WHOLE, first, second, resumed_after=3, same_weights=True, epoch_steps=4)
    assert verdict.exact
    assert (verdict.killed_after, verdict.resumed_after, verdict.steps) == (5, 3, 10)


@pytest.mark.parametrize("what", ["ids", "loss", "weights", "a step twice", "a step lost"])
def test_an_inexact_resumption_is_found_out(what: str) -> None:
    first, second = lives(killed=5, checkpoint=3)
    resumed_after, same_weights = 3, what != "weights"
    if what == "ids":
        second[6] = ([0, 1], second[6][1])
    elif what == "loss":
        second[6] = (second[6][0], second[6][1] + 1e-16)
    elif what == "a step twice":
        second[5] = second[6]
    elif what == "a step lost":
        del second[4]
    verdict = judge(
        WHOLE, first, second, resumed_after=resumed_after, same_weights=same_weights, epoch_steps=4
    )
    assert not verdict.exact


# --- one tiny run of each ------------------------------------------------------------------------


@pytest.mark.timed
def test_the_demo_shows_everything(tmp_path: Path) -> None:
    scale = demo.Scale(
        train_images=64, eval_images=CLASSES, epochs=2, batch_size=8, rounds=1, size=QUICK, crop=32
    )
    console = quiet()
    exact = demo.demo(tmp_path / "demo", data=None, scale=scale, console=console)
    text = written(console)
    assert exact, text
    assert "The resumption is exact." in text
    assert "penstock pack" in text
    for name in ("batch.png", "where-time-went.png"):
        with Image.open(tmp_path / "demo" / name) as picture:
            assert picture.width > 600
    report = json.loads((tmp_path / "demo" / "demo.json").read_text())
    assert set(report["summary"]) == {"penstock", "torch"}


@pytest.mark.timed
def test_the_comparison_writes_figures_and_the_chart(prepared: Prepared, tmp_path: Path) -> None:
    console = quiet()
    path = compare.measure(
        compare.original(prepared),
        loaders=("dali", "penstock"),
        rounds=1,
        size=replace(QUICK, stepped=0),
        scratch=tmp_path / "scratch",
        batch_size=8,
        crop=32,
        results=tmp_path,
        console=console,
    )
    report = json.loads(path.read_text())
    assert list(report["summary"]) == ["penstock", "dali"]
    assert report["summary"]["dali"]["cpu_ratio"]["median"] > 0
    assert "Penstock (pack) to DALI" in written(console)
    assert str(tmp_path) not in path.read_text()
    assert (tmp_path / "throughput.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--rounds", "2"], "at least 5"), (["--quick", "--loaders", "dali", "tourch"], "webdataset")],
)
def test_the_comparison_refuses_what_it_cannot_show_before_it_works(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert compare.main([*words, "--work", str(tmp_path)]) == 2
    assert message in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_short_side_256_gives_others_the_packs_own_bytes(
    prepared: Prepared, tmp_path: Path
) -> None:
    case = compare.short_side_256(prepared, tmp_path / "short")
    with Dataset(case.pack) as dataset:
        rows = np.array([[0, row] for row in range(4)])
        stored = {sample.tobytes() for sample in dataset.read(rows).columns["image"].samples}
        assert min(dataset.read(rows).columns["image"].dims.min(axis=1)) == compare.SHORT_SIDE
    files = [path.read_bytes() for path in case.folder.rglob("*.jpg")]
    assert len(files) == prepared.images.train_images
    assert stored <= set(files)
    assert case.name == "throughput-256"


@pytest.mark.timed
@pytest.mark.skipif(NGINX is None, reason="nginx isn't installed")
def test_the_cache_is_measured_on_stores_of_this_machine(
    prepared: Prepared, tmp_path: Path
) -> None:
    path = cache.measure(
        prepared,
        rounds=1,
        batch_size=8,
        shard_bytes="64KiB",
        fill_bytes=2**20,
        results=tmp_path,
        console=quiet(),
    )
    found = json.loads(path.read_text())
    assert set(found) >= {"fill", "epochs", "bytes", "slow", "date", "machine", "versions"}
    (counted,) = found["bytes"]["rounds"]
    assert counted["again"] == 0
    assert counted["whole"] <= 1.2 * found["pack"]["bytes"]


def test_overhead_reports_microseconds(prepared: Prepared, tmp_path: Path) -> None:
    path = overhead.measure(
        prepared, batch_size=16, batches=4, rounds=1, results=tmp_path, console=quiet()
    )
    assert json.loads(path.read_text())["cpu_us_per_sample"]["process"] > 0


@pytest.mark.timed
def test_resume_reports_every_start(tmp_path: Path) -> None:
    path = resume.measure(samples=10**5, shards=100, rounds=1, results=tmp_path, console=quiet())
    report = json.loads(path.read_text())
    assert [s["rows"] for s in report["starts"][:2]] == [resume.GLOBAL_BATCH] * 2


def test_synthetic_shards_are_uneven_and_complete() -> None:
    sizes = resume.uneven_sizes(10**5, 100)
    assert sizes.sum() == 10**5
    assert sizes.min() > 0
    assert len(set(sizes.tolist())) > 50


def test_native_arrays_are_compared_with_torch_and_a_loop(tmp_path: Path) -> None:
    native_arrays.main(["--quick", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "native_arrays.json").read_text())
    assert len(found["cases"]) == 3
    for case in found["cases"].values():
        for side in ("penstock files", "penstock pack", *native_arrays.OTHERS):
            assert case[side]["gb_per_s"] > 0
        for other in native_arrays.OTHERS:
            assert case[f"penstock files over {other}"]["median"] > 0
    native_arrays.main(["--quick", "--step-ms", "0.1", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "native_arrays_steps.json").read_text())
    assert all(0 < case["penstock files"]["au"] < 1 for case in found["cases"].values())


def test_tokens_are_compared_with_slices_and_torch(tmp_path: Path) -> None:
    tokens.main(["--quick", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "tokens.json").read_text())
    for other in tokens.SIDES[1:]:
        assert found["rates"][f"over {other}"]["median"] > 0
        assert found["rates"][f"over {other} by CPU"]["median"] > 0
    assert found["plan"]["sequences"] > 4_000_000


@pytest.mark.timed
@pytest.mark.filterwarnings("ignore")
def test_zarr_is_compared_with_other_readers(tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    zarr_chunks.main(["--quick", "--chunks", "8", "--results", str(tmp_path)])
    found = json.loads((tmp_path / "zarr_chunks.json").read_text())
    assert set(found["arrays"]) == {"8 a chunk", "8 a chunk, in shards"}
    for report in found["arrays"].values():
        assert set(report) >= {"penstock", "bare", "zarr", "cpu over bare", "over zarr by sample"}
        assert all(report[side]["samples_per_s"] > 0 for side in ("penstock", "bare", "zarr"))


@pytest.mark.timed
def test_memory_reports_a_slope(tmp_path: Path) -> None:
    path = memory.measure(tmp_path / "data", images=32, epochs=3, results=tmp_path, console=quiet())
    assert len(json.loads(path.read_text())["resident_mib"]) == 3


@pytest.mark.filterwarnings("ignore")
def test_views_are_compared_with_pillow_and_dali(tmp_path: Path) -> None:
    small: dict[str, Any] = {"rounds": 1, "batches": 1, "batch_size": 8, "threads": 1}
    path = views.measure(
        tmp_path / "data",
        photographs=32,
        eval_images=16,
        results=tmp_path,
        console=quiet(),
        **small,
    )
    found = json.loads(path.read_text())
    assert set(found["ratios"]) == set(views.SIDES)
    assert all(one["cpu_s_per_1000"] > 0 for each in found["rounds"].values() for one in each)


def test_growth_of_a_leak_is_seen_by_every_reading() -> None:
    slopes = memory.growth([100.0 + 0.5 * i for i in range(10)])
    assert list(slopes.values()) == pytest.approx([0.5] * 4)


def test_growth_that_stops_is_not_in_the_last_half() -> None:
    slopes = memory.growth([100.0] * 4 + [160.0] * 6)
    assert slopes["last_half"] == pytest.approx(0)
    assert slopes["least_squares"] > 1


@pytest.mark.timed
def test_both_sides_costs_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NGINX", None)
    monkeypatch.setattr(peers, "BLOB_BYTES", 20 * peers.MIB)  # ranges of 16 MiB lie in it
    place = peers.measure(
        rounds=1, total_bytes=peers.MIB, results=tmp_path, console=Console(quiet=True)
    )
    report = json.loads(place.read_text())["cpu_s_per_gb"]
    assert set(report) == {"penstock, plain", "penstock, TLS"}
    for figures in report.values():
        assert set(figures) >= set(peers.RANGES)
        for one in figures.values():
            assert one["both"]["median"] > 0


def test_photographs_with_objects_are_the_same_for_each_loader(tmp_path: Path) -> None:
    annotations = detection.make_set(tmp_path, images=16)
    content = annotations.read_bytes()
    assert detection.make_set(tmp_path, images=16).read_bytes() == content
    with detection.penstock_loader(annotations, case="masks") as loader:
        ((images, boxes, labels, masks),) = loader
    assert images.shape == (16, 3, detection.SIDE, detection.SIDE)
    assert [len(each) for each in boxes] == [len(each) for each in labels]
    assert [len(each) for each in boxes] == [len(each) for each in masks]
    for box, mask in zip(boxes.values.tolist(), masks.values, strict=True):
        columns = mask.any(dim=0).nonzero()
        assert not len(columns) or abs(float(columns.min()) - box[0]) <= 2
