"""`python -m benchmarks.resident`: the first cost and the later savings of `resident=True`.

Two loaders over the same pack take turns, one epoch each: one keeps decoded images in memory, the
other reads and decodes each time. Photographs with the training recipe, and 32 x 32 PNGs. Writes
benchmarks/results/resident.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.console import Console

from benchmarks.data import prepare
from benchmarks.record import RESULTS, write_result

if TYPE_CHECKING:
    from penstock import DataLoader, Operation

SMALL_IMAGES = 10_000
SMALL_CLASSES = 10


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one loader."""

    images_per_s: float
    cpu_s_per_1000: float


def small_pack(out: Path, *, images: int) -> Path:
    """Write a pack of smooth random 32 x 32 PNGs in 10 classes; an earlier call's is kept."""
    from penstock import pack

    source, target = out / f"small-{images}", out / f"small-{images}-pack"
    if target.is_dir():
        return target
    rng = np.random.default_rng(0)
    for number in range(images):
        path = source / f"class-{number % SMALL_CLASSES}" / f"{number:05d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        coarse.resize((32, 32), Image.Resampling.BICUBIC).save(path)
    pack(str(source), str(target), seed=1)
    return target


def epoch(loader: DataLoader) -> Epoch:
    """Run an epoch with a training step that takes no time."""
    began, cpu, images = time.perf_counter(), time.process_time(), 0
    for batch in loader:
        images += len(batch[0])
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return Epoch(images / elapsed_s, 1000 * cpu_s / images)


def play(
    pack: Path, augment: tuple[Operation, ...], *, batch_size: int, rounds: int
) -> dict[str, list[Epoch]]:
    """Run the first epoch and `rounds` more, of a loader without residency and of one with it."""
    from penstock import DataLoader, Dataset

    def make(resident: bool) -> DataLoader:
        return DataLoader(
            Dataset(str(pack)),
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            seed=7,
            augment=augment,
            resident=resident,
        )

    with make(False) as plain, make(True) as resident:
        loaders = {"plain": plain, "resident": resident}
        found: dict[str, list[Epoch]] = {name: [] for name in loaders}
        for _ in range(rounds + 1):
            for name, loader in loaders.items():
                found[name].append(epoch(loader))
    return found


def measure(
    work: Path,
    *,
    rounds: int = 9,
    photographs: int = 3072,
    eval_images: int = 480,
    small: int = SMALL_IMAGES,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Play both datasets, print a line each and write the result. Returns its path.

    photographs, eval_images: of `benchmarks.data.prepare`. small: number of PNGs.
    """
    from penstock import Decode, Normalize, RandomHorizontalFlip, imagenet_train

    prepared = prepare(work, train_images=photographs, eval_images=eval_images)
    small_recipe = (Decode(), RandomHorizontalFlip(), Normalize())
    played = {
        "photographs": play(
            prepared.pack, imagenet_train(224), batch_size=min(128, photographs), rounds=rounds
        ),
        "small": play(
            small_pack(work, images=small), small_recipe, batch_size=min(256, small), rounds=rounds
        ),
    }
    summary: dict[str, Any] = {}
    for what, found in played.items():
        first = {name: epochs[0].cpu_s_per_1000 for name, epochs in found.items()}
        later = {
            name: statistics.median(e.cpu_s_per_1000 for e in epochs[1:])
            for name, epochs in found.items()
        }
        rate = {
            name: statistics.median(e.images_per_s for e in epochs[1:])
            for name, epochs in found.items()
        }
        summary[what] = {
            "cpu_s_per_1000_first": first,
            "cpu_s_per_1000_later": later,
            "images_per_s_later": rate,
        }
        console.print(
            f"{what}: {rate['plain']:,.0f} -> {rate['resident']:,.0f} images/s, "
            f"{later['plain']:.3f} -> {later['resident']:.3f} CPU-s per 1,000; in the first epoch "
            f"{first['plain']:.3f} -> {first['resident']:.3f}.",
            highlight=False,
        )
    rounds_of = {
        what: {name: [asdict(e) for e in epochs] for name, epochs in found.items()}
        for what, found in played.items()
    }
    measured = {"dataset": prepared.record(), "medians": summary, "rounds": rounds_of}
    return write_result("resident", measured, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.resident", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("demo"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        options.work, rounds=3 if options.quick else 9, results=options.results, console=Console()
    )


if __name__ == "__main__":
    main()
