"""`make demo`: photographs, a pack, a training job that is killed and resumed, a table, two
pictures.

It writes everything below `--out` (demo/), runs on the CPU and takes about two minutes on two
cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from benchmarks.photographs import ImageSet, borrow_images, make_photographs
from benchmarks.proof import Verdict, kill_and_resume, train
from benchmarks.record import comparison_record, write_result
from benchmarks.train import Job
from penstock.cache import ConfigError, PenstockError
from penstock.cache.base import format_size, usable_cores
from penstock.pipeline.bench import ACCELERATOR_SHARE, RoundSize, compare, machine
from penstock.pipeline.bench.adapters import TITLES, Work

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.pipeline.bench import Comparison


LOADERS: tuple[str, ...] = ("penstock", "torch")
SHEET_IMAGES = 32
# Small shards, so that a few thousand photographs make a real plan; the default is 64 MiB.
SHARD_BYTES = "4MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of the demo. epochs: of the training job. rounds: of the comparison. size: of a
    round."""

    train_images: int = 2560
    eval_images: int = 320
    epochs: int = 4
    batch_size: int = 64
    rounds: int = 5
    size: RoundSize = field(default_factory=lambda: RoundSize(timed=12, stepped=8))
    crop: int = 224
    workers: int = 2


def demo(out: Path, *, data: Path | None, scale: Scale, console: Console) -> bool:
    """Run the demo. Returns True if the resumption was exact; raises PenstockError."""
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    images = _photographs(out, data, scale, console)
    pack = _pack(images.train, out / "pack", console)
    job = Job(
        train=str(pack.absolute()),
        eval=str(images.eval.absolute()),
        out=(out / "run" / "whole").absolute(),
        classes=len(images.classes),
        epochs=scale.epochs,
        batch_size=min(scale.batch_size, images.train_images),
    )
    shutil.rmtree(out / "run", ignore_errors=True)
    _train(job, console)
    verdict = _kill_and_resume(job, console)
    work = Work(
        folder=images.train.absolute(),
        pack=pack.absolute(),
        scratch=(out / "loaders").absolute(),
        batch_size=job.batch_size,
        size=scale.crop,
        workers=scale.workers,
    )
    done = _compare(work, scale, console)
    dataset = {
        "images": images.train_images,
        "bytes": images.image_bytes,
        "origin": images.origin if data is None else "the user's own folder",
    }
    result = write_result("demo", comparison_record(done, work, dataset), folder=out)
    pictures = _pictures(out, done, work, images)
    _summary(out, verdict, pictures, result, began, console)
    return verdict.exact


def _heading(console: Console, number: int, text: str) -> None:
    console.print(f"\n[bold]{number}. {text}[/bold]")


def _photographs(out: Path, data: Path | None, scale: Scale, console: Console) -> ImageSet:
    if data is not None:
        _heading(console, 1, "Your images")
        images = borrow_images(data, out / "yours")
    else:
        _heading(console, 1, "Photographs, cut from what scikit-image and scikit-learn ship")
        with _CountBar(console, "images") as bar:
            images = make_photographs(
                out / "photographs",
                train_images=scale.train_images,
                eval_images=scale.eval_images,
                workers=scale.workers,
                progress=bar,
            )
    total = images.train_images + images.eval_images
    console.print(
        f"   {images.train_images:,} to train on and {images.eval_images:,} to evaluate with, of "
        f"{len(images.classes)} classes, {format_size(images.image_bytes / total)} each: "
        f"{images.train}"
    )
    if data is None:
        console.print(
            "   A class is a photograph. Evaluation uses a part of it that training never sees."
        )
    return images


def _pack(src: Path, dst: Path, console: Console) -> Path:
    shutil.rmtree(dst, ignore_errors=True)
    words = ["penstock", "pack", str(src), str(dst), "--shard-bytes", SHARD_BYTES]
    _heading(console, 2, " ".join([command(), *words[1:]]))
    done = subprocess.run([command(), *words[1:], "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ConfigError(
            f"`{' '.join(words)}` ended with {done.returncode}, wanted 0; see the output above."
        )
    report = json.loads(done.stdout)
    console.print(
        f"   {report['samples']:,} images, each decoded once to check it, in {report['shards']} "
        f"shards ({format_size(report['bytes'])}), {report['quarantined']} quarantined, "
        f"{report['seconds']:.1f} s"
    )
    return dst


def command() -> str:
    """Return the `penstock` command of this environment, relative to the current folder."""
    script = Path(sys.executable).with_name("penstock")
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def _train(job: Job, console: Console) -> None:
    _heading(console, 3, f"A small CNN learns on the CPU, {job.size} x {job.size} pixels a crop")
    console.print("   epoch    loss  accuracy  images/s", style="dim")
    statistics = ""
    for event in train(job):
        if event["event"] == "epoch":
            console.print(
                f"   {event['epoch'] + 1:5}  {event['loss']:6.3f}  {event['accuracy']:8.1%}"
                f"  {event['images_per_s']:8,.0f}",
                highlight=False,
            )
        elif event["event"] == "statistics":
            statistics = event["text"]
    for line in statistics.splitlines():
        console.print(f"   {line}", highlight=False)


def _kill_and_resume(whole: Job, console: Console) -> Verdict:
    """Run the job again, killed in the middle of its second epoch (of its first if it has only
    one)."""
    from penstock import Dataset

    epochs = min(2, whole.epochs)
    which = f"the first {epochs} epochs" if epochs > 1 else "the first epoch"
    _heading(console, 4, f"Again {which} of that job: SIGKILL in mid-epoch, then resumed")
    steps = len(Dataset(whole.train)) // whole.batch_size
    kill_at = max(1, round((epochs - 0.5) * steps))
    # An interval that doesn't divide the kill's step: the resumed job then has steps to do again.
    job = Job(
        train=whole.train,
        eval=whole.eval,
        out=whole.out.with_name("killed"),
        classes=whole.classes,
        epochs=whole.epochs,
        stop_after=epochs,
        batch_size=whole.batch_size,
        save_every=next((k for k in (7, 8, 9) if kill_at % k and k < kill_at), 1),
    )
    with console.status("training until the kill, and from the checkpoint on"):
        verdict = kill_and_resume(job, whole, kill_at=kill_at)
    console.print(
        f"   killed after step {verdict.killed_after} of {epochs * steps}; resumed after step "
        f"{verdict.resumed_after}, its last checkpoint\n"
        f"   {verdict.steps} steps before and after the kill, compared with the uninterrupted "
        f"job: sample ids {_same(verdict.same_ids)}, losses {_same(verdict.same_losses)}, weights "
        f"{_same(verdict.same_weights)}, each sample once an epoch: "
        f"{'yes' if verdict.each_once else '[red]no[/red]'}"
    )
    colour, word = ("green", "exact") if verdict.exact else ("red", "NOT exact")
    console.print(f"   [bold {colour}]The resumption is {word}.[/bold {colour}]")
    return verdict


def _same(same: bool) -> str:
    return "identical" if same else "[red]different[/red]"


def _compare(work: Work, scale: Scale, console: Console) -> Comparison:
    _heading(
        console,
        5,
        f"Compared with torch's DataLoader with Pillow: crops of {work.size} x {work.size}",
    )
    with _CountBar(console, "rounds") as bar:
        total = scale.rounds * len(LOADERS)
        done = compare(
            LOADERS,
            work,
            rounds=scale.rounds,
            size=scale.size,
            progress=lambda played: bar(played, total),
        )
    console.print(comparison_table(done))
    for line in ratio_lines(done):
        console.print(line, highlight=False)
    here = machine()
    console.print(
        f"   Medians of {scale.rounds} interleaved rounds on {here['cores']} cores "
        f"({here['processor']}); the same images, which Penstock reads from the pack. "
        "Waits: share of "
        f"the time with an emulated accelerator whose step on {work.batch_size} images takes "
        f"{done.size.step_ms:.0f} ms, {ACCELERATOR_SHARE:.0%} of what the fastest loader can feed.",
        style="dim",
        highlight=False,
    )
    return done


def comparison_table(done: Comparison) -> Table:
    """Return the medians as a table for the terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("   loader")
    for title in ("images/s", "CPU-s per 1,000", "first batch", "waits"):
        table.add_column(title, justify="right")
    for name, summary in done.summaries.items():
        table.add_row(
            f"   {TITLES[name]}",
            f"{summary.images_per_s.median:,.0f}",
            f"{summary.cpu_s_per_1000.median:.2f}",
            f"{summary.first_batch_s.median:.2f} s",
            f"{summary.wait_share.median:.0%}" if done.size.stepped else "",
        )
    return table


def ratio_lines(done: Comparison) -> list[str]:
    """Compare the first loader with each other one: medians of paired ratios and their range."""
    first, *others = done.summaries
    lines = []
    for name in others:
        speed, cpu = done.summaries[name].speed_ratio, done.summaries[name].cpu_ratio
        lines.append(
            f"   {TITLES[first]} to {TITLES[name]}: {speed.median:.2f} times as fast "
            f"({speed.low:.2f} to {speed.high:.2f}), CPU efficiency {cpu.median:.2f} "
            f"({cpu.low:.2f} to {cpu.high:.2f})"
        )
    return lines


def _pictures(out: Path, done: Comparison, work: Work, images: ImageSet) -> Sequence[Path]:
    from benchmarks.pictures import contact_sheet, where_time_went
    from penstock import DataLoader, Dataset, imagenet_train

    dataset = Dataset(str(work.pack))
    with DataLoader(
        dataset,
        batch_size=min(SHEET_IMAGES, images.train_images),
        shuffle=True,
        drop_last=True,
        seed=work.seed,
        augment=imagenet_train(work.size),
    ) as loader:
        pixels, labels = next(iter(loader))
    names = [dataset.classes[label] for label in labels.tolist()]
    sheet = contact_sheet(
        pixels,
        names,
        out / "batch.png",
        title=f"The first {len(names)} samples of epoch 1, seed {work.seed}: "
        f"random resized crop to {work.size} x {work.size} pixels, random flip",
    )
    bars = where_time_went(
        done,
        out / "where-time-went.png",
        batch_size=work.batch_size,
        subtitle=f"Medians of interleaved rounds on {machine()['cores']} cores, "
        f"{images.train_images:,} images, random crops to {work.size} x {work.size} pixels. "
        "The accelerator is emulated. Thin lines: lowest to highest round.",
    )
    return sheet, bars


def _summary(
    out: Path,
    verdict: Verdict,
    pictures: Sequence[Path],
    result: Path,
    began: float,
    console: Console,
) -> None:
    console.rule()
    penstock = command()
    exact = "bit for bit" if verdict.exact else "[red]NOT exactly[/red]"
    console.print(
        f"Packed, trained, killed and resumed {exact}, and compared, in "
        f"{time.perf_counter() - began:.0f} s.\n"
        f"  a batch              {pictures[0]}\n"
        f"  where the time went  {pictures[1]}\n"
        f"  the figures          {result}\n"
        f"  checkpoints, logs    {out / 'run'}\n"
        "Look closer:\n"
        f"  {penstock} inspect {out / 'pack'} --batch 16 --out {out / 'seen.png'}\n"
        f"  {penstock} bench {out / 'pack'} --step-ms 125\n"
        "The same with your own images (one folder a class):\n"
        "  make demo DATA=/path/to/images",
        highlight=False,
        soft_wrap=True,  # a command is copied whole
    )


class _CountBar:
    """A progress bar as a context manager; it is called with (done, total)."""

    def __init__(self, console: Console, unit: str) -> None:
        self._progress = Progress(
            TextColumn("  "),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TextColumn(unit),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task(unit, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self._progress.start()
        return lambda done, total: self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def main(argv: list[str] | None = None) -> int:
    """Return the exit code: 0 on success, 1 if a part failed or the resumption was not exact."""
    parser = argparse.ArgumentParser(prog="benchmarks.demo", description=__doc__)
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    options = parser.parse_args(argv)
    # Into a file or a log: wide enough for the table, where rich would take 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 120)
    workers = usable_cores()
    try:
        exact = demo(options.out, data=options.data, scale=Scale(workers=workers), console=console)
    except PenstockError as error:
        console.print(f"[bold red]{type(error).__name__}[/bold red] {error}", highlight=False)
        return 1
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
