"""`python -m benchmarks.gpu --data DIR`: loaders on a GPU beside DALI's own best pipeline.

Each round plays, one after the other, in turning order: batches as fast as they come; then a
ResNet-50 training step (bfloat16 autocast, channels-last, batch 256, SGD) on each batch, beside the
same step on tensors that are there. Images/s, CPU-seconds per 1,000 images, the step's wait for
data, what the GPU and its JPEG decoder were busy, and, paired inside the rounds, training with a
loader to training without one. Writes benchmarks/results/gpu.json. Without a GPU nothing is
measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.data import Prepared, prepare
from benchmarks.gpu_loaders import HW_LOADS, TITLES, Job, Name, opened
from benchmarks.gpu_watch import gpu_facts, known_fields, watched
from benchmarks.record import RESULTS, write_result
from pipeline.bench.cpu import tree_cpu_s
from pipeline.bench.machine import machine, versions
from pipeline.bench.rounds import Figure
from pipeline.bench.sameness import NotTheSameWorkError, differences, look

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from benchmarks.gpu_loaders import Batches
    from pipeline.bench.sameness import Pixels

    Step = Callable[[torch.Tensor, torch.Tensor], Any]

NOT_MEASURED = "not measured: no CUDA device"
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many batches a round has. settle: taken before each measured part; timed: as fast as they
    come; stepped: each with a training step; looked: at the pixels of so many, once."""

    settle: int = 12
    timed: int = 100
    stepped: int = 60
    looked: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRound:
    """What one loader did in one round.

    images_per_s, cpu_s_per_1000: as fast as batches come (0 for tensors that are there).
    trained_per_s: images/s with a step. wait_p50_ms, wait_p99_ms: how long the host waited for a
    batch then; it runs ahead of the device, so a wait isn't yet a loss, trained_per_s is.
    first_batch_s: from before the constructor. busy, busy_training: medians of per cent, by name.
    """

    images_per_s: float
    cpu_s_per_1000: float
    trained_per_s: float
    wait_p50_ms: float
    wait_p99_ms: float
    first_batch_s: float
    busy: Mapping[str, float]
    busy_training: Mapping[str, float]


def measure(
    prepared: Prepared,
    *,
    make_step: Callable[[], Step],
    device: str = "cuda",
    batch_size: int = 256,
    crop: int = 224,
    names: Sequence[Name] = get_args(Name),
    rounds: int = ROUNDS,
    size: Size | None = None,
    hw_loads: Sequence[float] = HW_LOADS,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Play the rounds, print the table, write the result. Returns its path.

    make_step: called once, gives the training step. Raises NotTheSameWorkError where loaders'
    tensors differ.
    """
    size = size or Size()
    job = Job(
        folder=prepared.images.train.absolute(),
        pack=prepared.pack.absolute(),
        device=device,
        batch_size=batch_size,
        size=crop,
        threads=int(machine()["cores"]),
        largest=_largest(prepared),
    )
    told = prepared.record()
    gpu = gpu_facts() if device.startswith("cuda") else {}
    console.print(f"{machine()}\n{gpu}\n{versions()}\n{told}", highlight=False, style="dim")
    step = make_step()
    watch = known_fields() if device.startswith("cuda") else ()
    epoch = prepared.images.train_images // batch_size + 1
    tried: dict[str, float] = {}
    if "dali" in names:
        job, tried = _tuned(job, size, hw_loads)
    _check_same_work(names, job, size)
    played: dict[Name, list[GpuRound]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 == 0 else list(reversed(names)):
            with console.status(f"round {number + 1} of {rounds}: {TITLES[name]}"):
                asked = replace(job, seed=job.seed + number)
                # What stays in memory is decoded in the first epoch; later ones are measured.
                settle = max(size.settle, epoch if name == "penstock-resident" else 0)
                sized = replace(size, settle=settle)
                played[name].append(_round(name, asked, sized, step, watch=watch))
    summary = summarise(played)
    console.print(_table(summary))
    record = {
        "gpu": gpu,
        "dataset": told,
        "work": {
            "batch_size": batch_size,
            "size": crop,
            "threads": job.threads,
            "hw_decoder_load": job.hw_load,
            "hw_decoder_loads_tried": tried,
        },
        "round": asdict(size),
        "summary": summary,
        "rounds": {name: [asdict(r) for r in rows] for name, rows in played.items()},
    }
    return write_result("gpu", record, folder=results)


def summarise(played: Mapping[Name, Sequence[GpuRound]]) -> dict[str, dict[str, Any]]:
    """Medians and spreads by loader, and ratios paired inside the rounds: Penstock's speed to the
    loader's (speed_ratio), training with the loader to training on tensors that are there
    (training_ratio). Pure."""
    ceiling, ours = played.get("synthetic"), played.get("penstock")
    summary: dict[str, dict[str, Any]] = {}
    for name, rows in played.items():
        figures = {
            what: asdict(Figure.of([getattr(row, what) for row in rows]))
            for what in (
                "images_per_s",
                "cpu_s_per_1000",
                "trained_per_s",
                "wait_p50_ms",
                "wait_p99_ms",
                "first_batch_s",
            )
        }
        if ceiling is not None:
            pairs = zip(rows, ceiling, strict=True)
            figures["training_ratio"] = asdict(
                Figure.of([row.trained_per_s / top.trained_per_s for row, top in pairs])
            )
        if ours is not None and name != "synthetic":
            pairs = zip(ours, rows, strict=True)
            figures["speed_ratio"] = asdict(
                Figure.of([mine.images_per_s / row.images_per_s for mine, row in pairs])
            )
        summary[name] = figures
    return summary


def _round(name: Name, job: Job, size: Size, step: Step, *, watch: Sequence[str]) -> GpuRound:
    began = time.perf_counter()
    with opened(name, job) as batches:
        next(batches)
        _synchronise(job)
        first_s = time.perf_counter() - began
        images = took_s = cpu_s = 0.0
        busy: dict[str, float] = {}
        if name != "synthetic":
            with watched(watch) as busy:
                images, took_s, cpu_s = _take(batches, job, size)
        with watched(watch) as busy_training:
            trained, trained_s, waits = _train(batches, job, size, step)
    cuts = statistics.quantiles(waits, n=100, method="inclusive")
    return GpuRound(
        images_per_s=images / took_s if took_s else 0.0,
        cpu_s_per_1000=1000 * cpu_s / images if images else 0.0,
        trained_per_s=trained / trained_s,
        wait_p50_ms=1000 * cuts[49],
        wait_p99_ms=1000 * cuts[98],
        first_batch_s=first_s,
        busy=busy,
        busy_training=busy_training,
    )


def _take(batches: Batches, job: Job, size: Size) -> tuple[float, float, float]:
    for _ in range(size.settle):
        next(batches)
    _synchronise(job)
    images = 0
    began, cpu_s = time.perf_counter(), tree_cpu_s()
    for _ in range(size.timed):
        images += len(next(batches)[1])
    _synchronise(job)
    return images, time.perf_counter() - began, tree_cpu_s() - cpu_s


def _train(batches: Batches, job: Job, size: Size, step: Step) -> tuple[int, float, list[float]]:
    """Images, seconds and the host's waits of the steps behind the first few."""
    for _ in range(size.settle):
        step(*next(batches))
    _synchronise(job)
    images, waits = 0, []
    began = time.perf_counter()
    for _ in range(size.stepped):
        asked = time.perf_counter()
        inputs, labels = next(batches)
        waits.append(time.perf_counter() - asked)
        step(inputs, labels)
        images += len(labels)
    _synchronise(job)
    return images, time.perf_counter() - began, waits


def _synchronise(job: Job) -> None:
    if job.device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(job.device)


def _tuned(job: Job, size: Size, hw_loads: Sequence[float]) -> tuple[Job, dict[str, float]]:
    """The job with the share for the hardware decoder at which DALI is fastest, and what was
    tried: images/s by share."""
    if not job.device.startswith("cuda") or not hw_loads:
        return job, {}
    tried = {}
    for load in hw_loads:
        with opened("dali", replace(job, hw_load=load)) as batches:
            images, took_s, _ = _take(batches, job, size)
            tried[load] = images / took_s
    best = max(tried, key=lambda load: tried[load])
    return replace(job, hw_load=best), {str(load): rate for load, rate in tried.items()}


def _check_same_work(names: Sequence[Name], job: Job, size: Size) -> None:
    looks: dict[Name, Pixels] = {}
    for name in names:
        if name != "synthetic":
            with opened(name, job) as batches:
                looks[name] = look([_copied(next(batches)) for _ in range(size.looked)])
    for name, pixels in looks.items():
        reference = next(iter(looks.values()))
        pooled = pixels.samples >= 256  # statistics of fewer say nothing
        for what, mine, wanted, same in differences(pixels, reference, pooled=pooled):
            if not same:
                raise NotTheSameWorkError(
                    f"{TITLES[name]}: {what} of its batches is {mine}, but {wanted} at "
                    f"{TITLES[next(iter(looks))]}. They don't do the same work, so they aren't "
                    "compared."
                )


def _copied(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch[0].cpu(), batch[1].cpu()


def _largest(prepared: Prepared) -> tuple[int, int]:
    """Height and width of the largest image: what a decoder that makes room beforehand needs."""
    from readers import Dataset

    with Dataset(prepared.pack) as dataset:
        images = dataset.index.images
        return (0, 0) if images is None else (images.max_height, images.max_width)


def _table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("loader", "images/s", "CPU-s/1000", "trained/s", "to the ceiling", "wait p50 ms")
    for name, row in summary.items():
        ratio = row.get("training_ratio")
        table.add_row(
            TITLES[name],  # type: ignore[index]
            f"{row['images_per_s']['median']:,.0f}" if name != "synthetic" else "",
            f"{row['cpu_s_per_1000']['median']:.2f}" if name != "synthetic" else "",
            f"{row['trained_per_s']['median']:,.0f}",
            f"{ratio['median']:.3f} ({ratio['low']:.3f}..{ratio['high']:.3f})" if ratio else "",
            f"{row['wait_p50_ms']['median']:.2f}",
        )
    return table


def has_cuda() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 short rounds: a look, no evidence")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--work", type=Path, default=Path("demo"), help="where images and pack go")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--loaders", nargs="+", choices=get_args(Name), default=get_args(Name))
    options = parser.parse_args(argv)
    if not has_cuda():
        print(NOT_MEASURED, file=sys.stderr)
        return 1
    path = measure(
        prepare(options.work, data=options.data),
        make_step=_resnet50_step,
        batch_size=options.batch_size,
        names=options.loaders,
        rounds=2 if options.quick else options.rounds,
        size=Size(settle=4, timed=12, stepped=12) if options.quick else Size(),
        results=options.results,
        console=(console := Console()),
    )
    console.print(f"   {path}", highlight=False)
    return 0


def _resnet50_step() -> Step:
    import torch

    from benchmarks.resnet import resnet50, training_step

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(7)
    return training_step(resnet50(), device=torch.device("cuda"))


if __name__ == "__main__":
    sys.exit(main())
