"""`python -m benchmarks.arrays`: small arrays of a pack, compared with torch's DataLoader and plain
loops.

All sides read the same samples, shuffled. They take turns within one run, in rotating order:

- penstock: the loader on a pack of arrays and labels, with default settings;
- torch: `torch.utils.data.DataLoader` with workers over a map-style dataset that slices a mapped
  .npy file, with its default collate;
- by sample: a plain loop that reads each sample from the same mapped .npy file and stacks them, as
  a map-style dataset does in the process of the training loop;
- by batch: a plain loop that reads the rows of a batch by one index expression and makes tensors of
  them: the best that numpy and torch can do here, without order, checks or state.

Ratios are computed within a round: penstock's samples/s divided by the other side's. The loop reads
only the first number of each batch, so work on its own thread and work on other threads cost the
same here; in a training loop only the former delays the step. Writes
benchmarks/results/arrays.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHAPES = ((64,), (256,), (3, 32, 32), (3, 64, 64))
WORKERS = 2
SIDES = ("penstock", "torch", "by sample", "by batch")


def write_pack(folder: Path, shape: tuple[int, ...], samples: int) -> tuple[Path, Path, Path]:
    """Write a pack of float32 arrays with labels, and the same as .npy files (values, labels)."""
    from penstock import pack

    rng = np.random.default_rng(7)
    values = rng.standard_normal((samples, *shape), np.float32)
    labels = rng.integers(0, 10, samples)
    np.save(folder / "values.npy", values)
    np.save(folder / "labels.npy", labels)
    source = folder / "source"
    source.mkdir()
    with open(source / "metadata.jsonl", "w") as lines:
        for number in range(samples):
            lines.write(
                json.dumps({"file_name": f"{number:06d}.npy", "label": int(labels[number])})
            )
            lines.write("\n")
            np.save(source / f"{number:06d}.npy", values[number])
    pack(source, folder / "pack")
    return folder / "pack", folder / "values.npy", folder / "labels.npy"


class Mapped:
    """A map-style dataset over mapped files, as users write it."""

    def __init__(self, values: Path, labels: Path) -> None:
        self._paths = values, labels
        self._open: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(np.load(self._paths[1], mmap_mode="r"))

    def __getitem__(self, i: int) -> Any:
        import torch

        if self._open is None:  # in the worker
            first, second = (np.load(path, mmap_mode="r") for path in self._paths)
            self._open = first, second
        values, labels = self._open
        return torch.from_numpy(values[i].copy()), int(labels[i])


def by_batch(values: Path, labels: Path, batch: int) -> Iterator[Any]:
    """Yield the batches of one epoch in a new order, each read by one index expression."""
    import torch

    first, second = np.load(values, mmap_mode="r"), np.load(labels, mmap_mode="r")
    order = np.random.default_rng().permutation(len(second))
    for start in range(0, len(order) - batch + 1, batch):
        rows = order[start : start + batch]
        yield torch.from_numpy(first[rows]), torch.from_numpy(second[rows])


def by_sample(values: Path, labels: Path, batch: int) -> Iterator[Any]:
    """Yield the batches of one epoch in a new order, read sample by sample."""
    import torch

    first, second = np.load(values, mmap_mode="r"), np.load(labels, mmap_mode="r")
    order = np.random.default_rng().permutation(len(second))
    for start in range(0, len(order) - batch + 1, batch):
        rows = order[start : start + batch].tolist()
        images = torch.stack([torch.from_numpy(first[row].copy()) for row in rows])
        yield images, torch.tensor([int(second[row]) for row in rows])


def measure(
    *, samples: int, batch: int, rounds: int, epochs: int, results: Path, console: Console
) -> Path:
    """Play the rounds, print the ratios and write the result; return its path."""
    found: dict[str, Any] = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            count = max(16 * batch, samples // max(1, int(np.prod(shape)) // 1024))
            paths = write_pack(Path(folder), shape, count)
            name = " x ".join(map(str, shape))
            found[name] = {"samples": count, **_rounds(paths, batch, rounds=rounds, epochs=epochs)}
            console.print(name, found[name], highlight=False)
    settings = {"rounds": rounds, "epochs": epochs, "batch": batch, "workers": WORKERS}
    return write_result("arrays", settings | {"shapes": found}, folder=results)


def _rounds(paths: tuple[Path, Path, Path], batch: int, *, rounds: int, epochs: int) -> Any:
    import torch.utils.data

    from penstock import DataLoader, Dataset

    pack, values, labels = paths
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    with (
        Dataset(pack, fields=("array", "label")) as dataset,
        DataLoader(dataset, batch, shuffle=True, drop_last=True, seed=7) as loader,
    ):
        mapped: Any = Mapped(values, labels)
        theirs = torch.utils.data.DataLoader(
            mapped,
            batch,
            shuffle=True,
            drop_last=True,
            num_workers=WORKERS,
            persistent_workers=True,
        )
        plays: dict[str, Callable[[], Iterator[Any]]] = {
            "penstock": lambda: iter(loader),
            "torch": lambda: iter(theirs),
            "by sample": lambda: by_sample(values, labels, batch),
            "by batch": lambda: by_batch(values, labels, batch),
        }
        for side in SIDES:
            _play(plays[side], 1)
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                rate, cpu_us = _play(plays[side], epochs)
                rates[side].append(rate)
                cpu[side].append(cpu_us)
    report: dict[str, Any] = {
        side: {
            "samples_per_s": round(statistics.median(rates[side])),
            "cpu_us_per_sample": round(statistics.median(cpu[side]), 3),
        }
        for side in SIDES
    }
    for side in SIDES[1:]:
        pairs = zip(rates["penstock"], rates[side], strict=True)
        report[f"over {side}"] = asdict(Figure.of([mine / other for mine, other in pairs]))
    return report


def _play(make: Callable[[], Iterator[Any]], epochs: int) -> tuple[float, float]:
    """Return the samples per second, and this process's CPU-microseconds per sample."""
    count, total = 0, 0.0
    began, used = time.perf_counter(), _cpu_s()
    for _ in range(epochs):
        for values, _ in make():
            count += len(values)
            total += float(values.view(-1)[0])  # read a value, like a training loop
    assert total == total
    return count / (time.perf_counter() - began), 1e6 * (_cpu_s() - used) / count


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.arrays", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 short rounds, for a quick check")
    parser.add_argument("--samples", type=int, default=60_000, help="samples of the smallest shape")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        samples=4_000 if options.quick else options.samples,
        batch=options.batch_size,
        rounds=2 if options.quick else options.rounds,
        epochs=1 if options.quick else 3,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
