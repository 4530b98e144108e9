"""Test the GPU benchmark: the parts that run without a GPU, and, marked gpu, the others."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks import gpu, gpu_watch
from benchmarks.data import Prepared, prepare
from benchmarks.gpu_cases import Answer
from benchmarks.gpu_loaders import GpuWork, Name, dali_decoding, dali_pipeline
from benchmarks.photographs import PHOTOGRAPHS
from benchmarks.resnet import resnet50, training_step
from penstock.augment import imagenet_eval
from penstock.pipeline import DataLoader
from penstock.pipeline.bench import NotTheSameWorkError, TensorFacts
from penstock.readers import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLASSES = len(PHOTOGRAPHS)
TINY = gpu.Size(settle=1, timed=2, stepped=3, looked=2)
NAMES: tuple[Name, ...] = ("synthetic", "penstock", "dali")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("gpu")
    return prepare(folder, train_images=48, eval_images=CLASSES)


@pytest.fixture
def job(prepared: Prepared) -> GpuWork:
    return GpuWork(
        folder=prepared.images.train,
        pack=prepared.pack,
        device="cpu",
        batch_size=8,
        size=32,
        threads=2,
    )


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: threads of tiny operations wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def here(case: dict[str, Any]) -> Answer:
    """A case in this process, by way of JSON."""
    return Answer(told=json.loads(json.dumps(gpu.play_here(json.loads(json.dumps(case))))))


# --- the model -----------------------------------------------------------------------------------


def test_it_is_resnet50() -> None:
    model = resnet50()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    on_the_way = [m for m in convolutions if m.kernel_size != (1, 1) or m.stride == (1, 1)]
    assert len(convolutions) == 53  # 49 in a row and 4 shortcuts
    assert len(on_the_way) == 50  # the stride is in the 3x3 ones: 3 shortcuts have one of 1x1
    with torch.inference_mode():
        assert model.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_a_step_learns() -> None:
    torch.manual_seed(7)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    step = training_step(
        resnet50(classes=8, stem=4), device=torch.device("cpu"), learning_rate=0.02
    )
    losses = [float(step(images, labels)) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]


# --- rounds --------------------------------------------------------------------------------------


def test_rounds_are_played_and_written(prepared: Prepared, tmp_path: Path) -> None:
    path = gpu.measure(
        prepared,
        play=here,
        stem=2,
        device="cpu",
        batch_size=8,
        crop=32,
        names=NAMES,
        rounds=2,
        size=TINY,
        results=tmp_path,
        console=Console(file=io.StringIO(), width=200),
    )
    report = json.loads(path.read_text())
    assert set(report["summary"]) == set(NAMES)
    assert report["summary"]["synthetic"]["training_ratio"]["median"] == 1
    assert report["summary"]["penstock"]["speed_ratio"]["median"] == 1
    assert report["summary"]["dali"]["speed_ratio"]["median"] > 0
    assert all(len(rounds) == 2 for rounds in report["rounds"].values())
    assert str(tmp_path) not in path.read_text()
    assert str(prepared.pack.parent) not in path.read_text()


def test_different_work_is_not_compared(job: GpuWork) -> None:
    looks = {}
    for name, size in (("penstock", 16), ("dali", 32)):
        report = here(case_of("look", name, replace(job, size=size))).told
        looks[name] = TensorFacts(**report)
    with pytest.raises(NotTheSameWorkError, match="shape"):
        gpu.check_same_work(looks)  # type: ignore[arg-type]


def case_of(do: str, name: str, job: GpuWork) -> dict[str, Any]:
    return {"do": do, "name": name, "job": gpu._work_values(job), "size": asdict(TINY)}


def test_a_loader_that_crashes_is_reported_and_the_others_continue(
    prepared: Prepared, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    def crashing(case: dict[str, Any]) -> Answer:
        asked.append((case["do"], case["name"]))
        if case["name"] == "dali" and case["do"] == "round" and asked.count(asked[-1]) == 2:
            return Answer(failed="crashed by SIGSEGV")
        return here(case)

    path = gpu.measure(
        prepared,
        play=crashing,
        stem=2,
        device="cpu",
        batch_size=8,
        crop=32,
        names=NAMES,
        rounds=3,
        size=TINY,
        results=tmp_path,
        console=(console := Console(file=io.StringIO(), width=200)),
    )
    report = json.loads(path.read_text())
    assert report["failed"] == {"dali": "crashed by SIGSEGV"}
    assert set(report["summary"]) == {"synthetic", "penstock"}
    assert len(report["rounds"]["penstock"]) == 3
    assert asked.count(("round", "dali")) == 2
    assert "crashed by SIGSEGV" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_case_is_a_process(job: GpuWork) -> None:
    answer = gpu.in_a_process(case_of("look", "penstock", job))
    assert not answer.failed
    assert answer.told["shape"] == [8, 3, 32, 32]


@pytest.mark.parametrize("windows", ["decoder", "slice"])
def test_the_other_loader_decodes_windows_the_same_way(job: GpuWork, windows: Any) -> None:
    pipe = dali_pipeline(replace(job, windows=windows))
    pipe.build()
    operators = " ".join(operator.name for operator in pipe._ops)
    assert ("RandomResizedCrop" in operators) == (windows == "slice")
    assert ("ImageRandomCrop" in operators) == (windows == "decoder")


rounds = st.lists(
    st.builds(
        gpu.GpuRound,
        images_per_s=st.floats(1, 1e5),
        cpu_s_per_1000=st.floats(0.01, 10),
        trained_per_s=st.floats(1, 1e5),
        wait_p50_ms=st.floats(0, 100),
        wait_p99_ms=st.floats(0, 100),
        first_batch_s=st.floats(0, 10),
        busy=st.just({}),
        busy_training=st.just({}),
    ),
    min_size=3,
    max_size=3,
)


@given(ceiling=rounds, ours=rounds, theirs=rounds)
def test_ratios_are_paired_inside_rounds(
    ceiling: list[gpu.GpuRound], ours: list[gpu.GpuRound], theirs: list[gpu.GpuRound]
) -> None:
    summary = gpu.summarise({"synthetic": ceiling, "penstock": ours, "dali": theirs})
    training = sorted(a.trained_per_s / b.trained_per_s for a, b in zip(ours, ceiling, strict=True))
    assert summary["penstock"]["training_ratio"]["median"] == pytest.approx(training[1])
    speed = sorted(a.images_per_s / b.images_per_s for a, b in zip(ours, theirs, strict=True))
    assert summary["dali"]["speed_ratio"]["median"] == pytest.approx(speed[1])
    assert "speed_ratio" not in summary["synthetic"]


def test_busy_medians_come_from_the_driver() -> None:
    report = "90, 40, [N/A], 0\n80, 30, [N/A], 0\n70, 20, 11, 0\nNo devices were found\n60, 1"
    assert gpu_watch.busy_medians(report) == {"gpu": 80, "memory": 30, "jpeg": 11, "decoder": 0}
    assert gpu_watch.busy_medians("") == {}


@pytest.mark.parametrize("knows_jpeg", [True, False])
def test_the_output_of_the_driver_is_read_while_it_runs(
    knows_jpeg: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, report = tmp_path / "nvidia-smi", tmp_path / "told"
    os.mkfifo(report)
    line = "50, 10, 5, 0" if knows_jpeg else "50, 10"
    refuses = "" if knows_jpeg else 'case "$*" in *jpeg*) exit 2;; esac\n'
    tells = f'case "$*" in *loop*) echo > {report};; esac\n'
    driver.write_text(f"#!/bin/sh\n{refuses}echo {line}\n{tells}")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    fields = gpu_watch.known_fields()
    with gpu_watch.watched(fields) as busy:
        assert busy == {}
        report.read_bytes()  # returns when the line was written
    wanted = {"gpu": 50, "memory": 10, "jpeg": 5, "decoder": 0}
    assert busy == dict(list(wanted.items())[: len(fields)])
    assert len(fields) == (4 if knows_jpeg else 2)


def test_without_a_driver_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert gpu_watch.known_fields() == ()
    with gpu_watch.watched(()) as busy:
        pass
    assert busy == {}


def test_on_a_gpu_the_hardware_decodes_with_room_made_beforehand(job: GpuWork) -> None:
    assert dali_decoding(job) == {}
    report = dali_decoding(replace(job, device="cuda", hw_load=0.8, largest=(400, 500)))
    assert report["device"] == "mixed"
    assert report["hw_decoder_load"] == 0.8
    assert (report["preallocate_height_hint"], report["preallocate_width_hint"]) == (400, 500)


def test_without_a_gpu_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "has_cuda", lambda: False)
    assert gpu.main([]) == 1
    said = capsys.readouterr()
    assert said.err.strip() == "not measured: no CUDA device"
    assert not said.out


# --- with a GPU ----------------------------------------------------------------------------------


def on_device(prepared: Prepared, device: str, *, batch_size: int = 8) -> DataLoader:
    return DataLoader(
        Dataset(prepared.pack),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        seed=7,
        augment=imagenet_eval(32),
        device=device,
    )


@pytest.fixture
def cuda_loader(prepared: Prepared) -> Iterator[DataLoader]:
    with on_device(prepared, "cuda") as loader:
        yield loader


@pytest.mark.gpu
def test_batches_on_cuda_are_the_cpus(prepared: Prepared, cuda_loader: DataLoader) -> None:
    with on_device(prepared, "cpu") as plain:
        for (ours, our_labels), (images, labels) in zip(cuda_loader, plain, strict=True):
            assert ours.device.type == our_labels.device.type == "cuda"
            assert torch.equal(our_labels.cpu(), labels)
            assert (ours.cpu() - images).abs().mean() < 0.05


@pytest.mark.gpu
def test_a_batch_on_cuda_is_the_users(cuda_loader: DataLoader) -> None:
    kept = []
    for images, _ in cuda_loader:
        kept.append((images, images.clone()))
    torch.cuda.synchronize()
    assert len(kept) == len(cuda_loader) > 3
    assert all(torch.equal(images, copy) for images, copy in kept)


@pytest.mark.gpu
def test_a_batch_belongs_to_the_stream_that_is_current(cuda_loader: DataLoader) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sums = [images.sum() for images, _ in cuda_loader]
    stream.synchronize()
    cuda_loader.set_epoch(0)
    torch.cuda.synchronize()
    again = []
    for images, _ in cuda_loader:
        torch.cuda.synchronize()
        again.append(images.sum())
    assert [float(s) for s in sums] == pytest.approx([float(s) for s in again], rel=1e-4, abs=1e-2)


@pytest.mark.gpu
def test_the_benchmark_runs_on_cuda(prepared: Prepared, tmp_path: Path) -> None:
    path = gpu.measure(
        prepared,
        stem=2,
        batch_size=8,
        crop=32,
        rounds=1,
        size=TINY,
        hw_loads=(0.65,),
        results=tmp_path,
        console=Console(file=io.StringIO(), width=200),
    )
    report = json.loads(path.read_text())
    assert report["gpu"]["name"]
    assert set(report["summary"]) == {*NAMES, "penstock-resident"}
