"""`python -m benchmarks.gpu --data DIR`: loaders on a GPU, compared with the best DALI pipeline.

Loaders take turns in each round, in rotating order: first batches without a step, then a ResNet-50
training step (bfloat16 autocast, channels-last, batch 256, SGD) on each batch, compared with the
same step on tensors that are ready. Reported are images/s, CPU-seconds per 1,000 images, the step's
wait for data, the utilisation of the GPU and of its JPEG decoder, and, paired within rounds,
training with a loader relative to training without one. Each loader's round is a process of its
own: if one crashes, it is reported and excluded, and the others continue. Writes
benchmarks/results/gpu.json. Without a GPU nothing is measured, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.data import Prepared, prepare
from benchmarks.gpu_cases import Answer, Budget, ask, facts, has_cuda, refused
from benchmarks.gpu_loaders import HW_LOADS, TITLES, GpuWork, Name, opened
from benchmarks.gpu_watch import known_fields, watched
from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import (
    Figure,
    NotTheSameWorkError,
    TensorFacts,
    differences,
    look,
    machine,
    send_to_parent,
    tree_cpu_s,
    versions,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from benchmarks.gpu_loaders import Batches

    TrainingStep = Callable[[torch.Tensor, torch.Tensor], Any]
    Case = dict[str, Any]

ROUNDS = 5
ROUND_S = 180.0  # a round's process; on a GPU one takes 20 to 40 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of batches in a round.

    settle: excluded before each measured part. timed: without a step. stepped: each with a training
    step. looked: batches whose pixels are compared once.
    """

    settle: int = 12
    timed: int = 100
    stepped: int = 60
    looked: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRound:
    """The measurements of one loader in one round.

    images_per_s, cpu_s_per_1000: without a step (0 for tensors that are ready). trained_per_s:
    images/s with a step. wait_p50_ms, wait_p99_ms: the host's waits for a batch then. The host runs
    ahead of the device, so that a wait isn't always a loss; trained_per_s shows the loss.
    first_batch_s: since before the constructor. busy, busy_training: medians in per cent, by name.
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
    play: Callable[[Case], Answer] | None = None,
    stem: int = 64,
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
    """Play the rounds, print the table and write the result. Returns its path.

    play: runs a case, by default in a process of its own. stem: of the ResNet-50, 64; fewer for
    tests. Raises NotTheSameWorkError if the tensors of the loaders differ.
    """
    size = size or Size()
    work = GpuWork(
        folder=prepared.images.train.absolute(),
        pack=prepared.pack.absolute(),
        device=device,
        batch_size=batch_size,
        size=crop,
        threads=int(machine()["cores"]),
        largest=_largest(prepared),
        windows="slice" if device.startswith("cuda") else "decoder",
    )
    gpu, dataset = facts(), prepared.record()
    console.print(f"{machine()}\n{gpu}\n{versions()}\n{dataset}", highlight=False, style="dim")
    loaders = _Loaders(play or in_a_process, size, console)
    rates = loaders.hw_rates(names, work, hw_loads)
    if rates:
        work = replace(work, hw_load=float(max(rates, key=lambda load: rates[load])))
    check_same_work(loaders.looks(names, work))
    epoch = prepared.images.train_images // batch_size + 1
    played = loaders.play_rounds(names, work, rounds=rounds, stem=stem, epoch=epoch)
    summary = summarise(played)
    console.print(_table(summary))
    record = {
        "gpu": gpu,
        "dataset": dataset,
        "work": {
            "batch_size": batch_size,
            "size": crop,
            "threads": work.threads,
            "windows": work.windows,
            "hw_decoder_load": work.hw_load,
            "hw_decoder_loads_tried": rates,
        },
        "round": asdict(size),
        "failed": loaders.failed,
        "summary": summary,
        "rounds": {name: [asdict(r) for r in rows] for name, rows in played.items()},
    }
    return write_result("gpu", record, folder=results)


class _Loaders:
    """The loaders. Those that have failed are not played again. failed: the reasons, by name."""

    def __init__(self, play: Callable[[Case], Answer], size: Size, console: Console) -> None:
        self._play, self._size, self._console = play, size, console
        self.failed: dict[Name, str] = {}

    def _answer(self, do: str, name: Name, work: GpuWork, **more: Any) -> dict[str, Any] | None:
        """Return the answer of a case; None if the loader has failed."""
        if name in self.failed:
            return None
        case = {"do": do, "name": name, "job": _work_values(work), "size": asdict(self._size)}
        found = self._play({**case, **more})
        if found.failed:
            self.failed[name] = found.failed
            self._console.print(f"{TITLES[name]}: {found.failed}", highlight=False)
            return None
        return dict(found.told)

    def hw_rates(
        self, names: Sequence[Name], work: GpuWork, hw_loads: Sequence[float]
    ) -> dict[str, float]:
        """Return DALI's images/s with each share of its hardware decoder; 0 if it failed, empty if
        it doesn't run on a GPU."""
        rates: dict[str, float] = {}
        if "dali" not in names or not work.device.startswith("cuda"):
            return rates
        for load in hw_loads:
            rate = self._answer("rate", "dali", replace(work, hw_load=load))
            rates[str(load)] = rate["images_per_s"] if rate else 0.0
        return rates

    def looks(self, names: Sequence[Name], work: GpuWork) -> dict[Name, TensorFacts]:
        """Return a description of the tensors of each loader."""
        looks = {name: self._answer("look", name, work) for name in names if name != "synthetic"}
        return {name: TensorFacts(**found) for name, found in looks.items() if found}

    def play_rounds(
        self, names: Sequence[Name], work: GpuWork, *, rounds: int, stem: int, epoch: int
    ) -> dict[Name, list[GpuRound]]:
        """Play rounds of all loaders in rotating order. epoch: batches of one."""
        watch = known_fields() if work.device.startswith("cuda") else ()
        played: dict[Name, list[GpuRound]] = {name: [] for name in names}
        for number in range(rounds):
            for name in names if number % 2 == 0 else list(reversed(names)):
                with self._console.status(f"round {number + 1} of {rounds}: {TITLES[name]}"):
                    seeded = replace(work, seed=work.seed + number)
                    # What stays in memory is decoded in the first epoch; later ones are measured.
                    settle = max(self._size.settle, epoch if name == "penstock-resident" else 0)
                    sized = asdict(replace(self._size, settle=settle))
                    found = self._answer(
                        "round", name, seeded, watch=list(watch), stem=stem, size=sized
                    )
                    if found:
                        played[name].append(GpuRound(**found))
        # A loader that crashed in a later round has no pairs there.
        return {name: rows for name, rows in played.items() if name not in self.failed}


def summarise(played: Mapping[Name, Sequence[GpuRound]]) -> dict[str, dict[str, Any]]:
    """Return medians and spreads by loader, and ratios paired within rounds: Penstock's speed to
    the loader's (speed_ratio), training with the loader to training on tensors that are ready
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


def _round(
    name: Name, work: GpuWork, size: Size, step: TrainingStep, *, watch: Sequence[str]
) -> GpuRound:
    began = time.perf_counter()
    with opened(name, work) as batches:
        next(batches)
        _synchronise(work)
        first_s = time.perf_counter() - began
        images = took_s = cpu_s = 0.0
        busy: dict[str, float] = {}
        if name != "synthetic":
            with watched(watch) as busy:
                images, took_s, cpu_s = _take(batches, work, size)
        with watched(watch) as busy_training:
            trained, trained_s, waits = _train(batches, work, size, step)
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


def _take(batches: Batches, work: GpuWork, size: Size) -> tuple[float, float, float]:
    for _ in range(size.settle):
        next(batches)
    _synchronise(work)
    images = 0
    began, cpu_s = time.perf_counter(), tree_cpu_s()
    for _ in range(size.timed):
        images += len(next(batches)[1])
    _synchronise(work)
    return images, time.perf_counter() - began, tree_cpu_s() - cpu_s


def _train(
    batches: Batches, work: GpuWork, size: Size, step: TrainingStep
) -> tuple[int, float, list[float]]:
    """Return the images, the seconds and the host's waits of the steps after the first few."""
    for _ in range(size.settle):
        step(*next(batches))
    _synchronise(work)
    images, waits = 0, []
    began = time.perf_counter()
    for _ in range(size.stepped):
        asked = time.perf_counter()
        inputs, labels = next(batches)
        waits.append(time.perf_counter() - asked)
        step(inputs, labels)
        images += len(labels)
    _synchronise(work)
    return images, time.perf_counter() - began, waits


def _synchronise(work: GpuWork) -> None:
    if work.device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(work.device)


def check_same_work(looks: Mapping[Name, TensorFacts]) -> None:
    """Raise NotTheSameWorkError if tensors of loaders differ from the first one's."""
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
    """Return the height and width of the largest image, for decoders that preallocate."""
    from penstock import Dataset

    with Dataset(prepared.pack) as dataset:
        images = dataset.index.images["image"]
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


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and measure. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 short rounds, for a quick check")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument(
        "--work", type=Path, default=Path("demo"), help="folder for images and packs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--loaders", nargs="+", choices=get_args(Name), default=get_args(Name))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        send_to_parent(play_here(json.loads(options.case)))
        return 0
    if not has_cuda():
        return refused()
    path = measure(
        prepare(options.work, data=options.data),
        batch_size=options.batch_size,
        names=options.loaders,
        rounds=2 if options.quick else options.rounds,
        size=Size(settle=4, timed=12, stepped=12) if options.quick else Size(),
        results=options.results,
        console=(console := Console()),
    )
    console.print(f"   {path}", highlight=False)
    return 0


def in_a_process(case: Case) -> Answer:
    """Run a case in a process of its own."""
    return ask("benchmarks.gpu", case, budget=Budget(None), timeout_s=ROUND_S)


def play_here(case: Case) -> dict[str, Any]:
    """Run a case in this process: JSON values in and out."""
    name, size = case["name"], Size(**case["size"])
    report = case["job"]
    work = GpuWork(
        **{
            **report,
            "folder": Path(report["folder"]),
            "pack": Path(report["pack"]),
            "largest": tuple(report["largest"]),
        }
    )
    if case["do"] == "rate":
        with opened(name, work) as batches:
            images, took_s, _ = _take(batches, work, size)
        return {"images_per_s": images / took_s}
    if case["do"] == "look":
        with opened(name, work) as batches:
            return asdict(look([_copied(next(batches)) for _ in range(size.looked)]))
    step = _resnet50_step(work, stem=case["stem"])
    return asdict(_round(name, work, size, step, watch=case["watch"]))


def _work_values(work: GpuWork) -> dict[str, Any]:
    return {**asdict(work), "folder": str(work.folder), "pack": str(work.pack)}


def _resnet50_step(work: GpuWork, *, stem: int) -> TrainingStep:
    import torch

    from benchmarks.resnet import resnet50, training_step

    torch.backends.cudnn.benchmark = True
    torch.manual_seed(7)
    return training_step(resnet50(stem=stem), device=torch.device(work.device))


if __name__ == "__main__":
    sys.exit(main())
