"""`python -m benchmarks.reading --data DIR`: the cost of a private copy of each sample.

A loader's CPU-seconds (imagenet_train at 224 pixels, on the CPU) with read="copy" and "pread",
compared with "mmap" and paired within rounds, on a local pack and on the same pack through a cache.
Also the cost of reading alone, in microseconds of a thread per sample. Writes
benchmarks/results/reading.json.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
from rich.console import Console

from benchmarks.cache import slow_store
from benchmarks.data import prepare
from benchmarks.record import RESULTS, write_result
from penstock import DiskCache
from penstock.cache.base import ReadMode
from penstock.pipeline.bench import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock import Dataset

MODES: tuple[ReadMode, ...] = get_args(ReadMode)
BATCH = 64
HELD = 6  # batches that are alive at a time in a loader


def loader_ms(open_dataset: Callable[[], Dataset], mode: ReadMode, *, epochs: int) -> float:
    """Return CPU-milliseconds per image, over whole epochs after the first."""
    from penstock import DataLoader, imagenet_train

    with (
        open_dataset() as dataset,
        DataLoader(
            dataset,
            batch_size=BATCH,
            shuffle=True,
            seed=7,
            drop_last=True,
            augment=imagenet_train(224),
            read=mode,
        ) as loader,
    ):
        _epoch(loader)
        began = _cpu_s()
        images = sum(_epoch(loader) for _ in range(epochs))
        return 1000 * (_cpu_s() - began) / images


def _epoch(loader: Any) -> int:
    return sum(len(labels) for _, labels in loader)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def reading_us(dataset: Dataset, mode: ReadMode, *, passes: int = 6) -> float:
    """Return thread-microseconds per sample for reading and checking, in random order."""
    index = dataset.index
    ids = np.random.default_rng(0).permutation(index.samples)
    shards = np.searchsorted(index.starts, ids, side="right") - 1
    rows = np.stack([shards, ids - index.starts[shards]], axis=1)
    held: deque[Any] = deque(maxlen=HELD)
    began = time.thread_time()
    for _ in range(passes):
        for first in range(0, len(rows), BATCH):
            held.append(dataset.read(rows[first : first + BATCH], mode=mode))
    return 1e6 * (time.thread_time() - began) / (passes * len(rows))


def measure(pack: Path, *, rounds: int, epochs: int, results: Path, console: Console) -> Path:
    """Play the rounds in rotating order, print the ratios and write the result.
    Returns its path."""
    from penstock import Dataset

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, slow_store(pack.parent, bytes_per_s=1e9) as store:
        cache = DiskCache(Path(folder) / "cache", max_bytes="8GiB")
        url = f"{store}/{pack.name}"
        opens: dict[str, Callable[[], Dataset]] = {
            "local": lambda: Dataset(pack),
            "cached": lambda: Dataset(url, cache=cache),
        }
        for what, open_dataset in opens.items():
            played: dict[str, list[float]] = {mode: [] for mode in MODES}
            read: dict[str, list[float]] = {mode: [] for mode in MODES}
            for number in range(rounds):
                for mode in MODES if number % 2 == 0 else MODES[::-1]:
                    played[mode].append(loader_ms(open_dataset, mode, epochs=epochs))
                    with open_dataset() as dataset:
                        reading_us(dataset, mode, passes=1)
                        read[mode].append(reading_us(dataset, mode))
            found[what] = {mode: _summary(played, read, mode) for mode in MODES}
            for mode, report in found[what].items():
                console.print(what, mode, report, highlight=False)
        cache.close()
    with Dataset(pack) as dataset:
        mean_bytes = round(float(dataset.index.shard_bytes.sum()) / len(dataset))
        report = {"images": len(dataset), "mean_bytes": mean_bytes}
    settings = {"rounds": rounds, "epochs": epochs, "batch": BATCH, "dataset": report}
    return write_result("reading", settings | {"modes": found}, folder=results)


def _summary(
    played: dict[str, list[float]], read: dict[str, list[float]], mode: str
) -> dict[str, Any]:
    pairs = zip(played[mode], played["mmap"], strict=True)
    return {
        "cpu_ms_per_image": round(statistics.median(played[mode]), 4),
        "cpu_ratio_to_mmap": asdict(Figure.of([mine / views for mine, views in pairs])),
        "reading_us": round(statistics.median(read[mode]), 2),
    }


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.reading", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 short rounds, for a quick check")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--pack", type=Path, help="your own local pack instead of --data")
    parser.add_argument(
        "--work", type=Path, default=Path("demo"), help="folder for images and packs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(argv)
    quick = options.quick
    measure(
        options.pack or prepare(options.work, data=options.data).pack,
        rounds=2 if quick else options.rounds,
        epochs=1 if quick else 3,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
