"""`python -m benchmarks.native_arrays`: large and medium float32 arrays, compared with torch and a
loop.

All sides read the same samples, shuffled, with a warm page cache. They take turns within one run,
in rotating order:

- penstock files: the loader on a folder of .npy files with labels, default settings: each checked
  against its CRC-32C when it is read;
- penstock pack: the same as a pack, checked when it is first read;
- penstock array: the same as one .npy file, if the format "npy" exists;
- torch 0, torch 2: `torch.utils.data.DataLoader` without and with two workers, over a map-style
  dataset of `torch.from_numpy(np.load(path))`, with its default collate;
- readinto: a plain loop that reads each file into its row of a new tensor, without order, checks,
  state or prefetching.

Ratios are computed within a round: penstock's GB/s divided by the other side's. The loop reads only
the first number of each batch. CPU time includes the workers, page faults don't. Writes
benchmarks/results/native_arrays.json.

With `--step-ms 4`, the loop sleeps after each batch, as it waits for a GPU. "au" is the share of
the time that it sleeps, and "loop_ms" is the CPU time of its thread for a batch. Writes
native_arrays_steps.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks.record import RESULTS, write_result
from penstock.cache import ConfigError
from penstock.pipeline.bench import Figure, tree_cpu_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OURS = ("penstock files", "penstock pack", "penstock array")
OTHERS = ("torch 0", "torch 2", "readinto")
WORKERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arrays of one size. numbers: float32 values in each."""

    name: str
    numbers: int
    batch: int
    samples: int

    def smaller(self, factor: int) -> Case:
        """Return a smaller case for quick runs."""
        return Case(
            name=self.name,
            numbers=max(64, self.numbers // factor),
            batch=self.batch,
            samples=4 * self.batch,
        )


CASES = (
    Case(name="147 MB, batch 2", numbers=36_750_000, batch=2, samples=8),
    Case(name="2.8 MB, batch 1", numbers=700_000, batch=1, samples=200),
    Case(name="64 kB, batch 64", numbers=16_000, batch=64, samples=4096),
)


def write_data(folder: Path, case: Case) -> None:
    """Write a folder of files, one file of all, and a pack."""
    from penstock import pack

    files = folder / "files"
    files.mkdir()
    base = np.random.default_rng(7).standard_normal(case.numbers, np.float32)
    whole = np.lib.format.open_memmap(
        folder / "array.npy", "w+", np.dtype(np.float32), (case.samples, case.numbers)
    )
    with (files / "metadata.jsonl").open("w") as lines:
        for number in range(case.samples):
            whole[number] = base + np.float32(number)
            np.save(files / f"{number:06d}.npy", whole[number])
            lines.write(json.dumps({"file_name": f"{number:06d}.npy", "label": number}) + "\n")
    del whole
    pack(files, folder / "pack")


class Files:
    """A map-style dataset over files, as users write it."""

    def __init__(self, folder: Path, samples: int) -> None:
        self._folder, self._samples = folder, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Any:
        import torch

        return torch.from_numpy(np.load(self._folder / f"{i:06d}.npy")), i


def readinto(folder: Path, case: Case) -> Iterator[Any]:
    """Yield the batches of one epoch in a new order, each file read into its row."""
    import torch

    order = np.random.default_rng().permutation(case.samples)
    for start in range(0, case.samples - case.batch + 1, case.batch):
        rows = order[start : start + case.batch]
        values = torch.empty((case.batch, case.numbers))
        for place, row in enumerate(rows.tolist()):
            with open(folder / f"{row:06d}.npy", "rb", buffering=0) as file:
                file.seek(128)  # numpy's header of one dimension
                file.readinto(values[place].numpy().data)
        yield values, torch.from_numpy(rows)


def measure(
    cases: tuple[Case, ...],
    *,
    rounds: int,
    seconds: float,
    step_s: float,
    results: Path,
    console: Console,
) -> Path:
    """Play the rounds, print the ratios and write the result; return its path."""
    found: dict[str, Any] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder), case)
            found[case.name] = {
                **asdict(case),
                **_rounds(Path(folder), case, rounds, seconds, step_s),
            }
        console.print(case.name, found[case.name], highlight=False)
    settings = {"rounds": rounds, "seconds": seconds, "workers": WORKERS, "step_s": step_s}
    name = "native_arrays_steps" if step_s else "native_arrays"
    return write_result(name, settings | {"cases": found}, folder=results)


def _rounds(folder: Path, case: Case, rounds: int, seconds: float, step_s: float) -> dict[str, Any]:
    plays: dict[str, Callable[[], Iterator[Any]]] = {}
    with ExitStack() as stack:
        for side, name in zip(OURS, ("files", "pack", "array.npy"), strict=True):
            loader = _ours(folder / name, case, stack)
            if loader is not None:
                plays[side] = loader.__iter__
        plays |= _others(folder / "files", case)
        figures: dict[str, list[dict[str, float]]] = {side: [] for side in plays}
        for make in plays.values():
            _play(make, case, 0, step_s)
        sides = [*plays]
        for number in range(rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                figures[side].append(_play(plays[side], case, seconds, step_s))
    report: dict[str, Any] = {
        side: {what: _rounded([play[what] for play in each]) for what in each[0]}
        for side, each in figures.items()
    }
    for side in plays:
        if side in OURS:
            for other in OTHERS:
                pairs = zip(figures[side], figures[other], strict=True)
                ratios = [mine["gb_per_s"] / theirs["gb_per_s"] for mine, theirs in pairs]
                report[f"{side} over {other}"] = asdict(Figure.of(ratios))
    return report


def _rounded(each: list[float]) -> float:
    return float(f"{statistics.median(each):.4g}")


def _ours(place: Path, case: Case, stack: ExitStack) -> Any:
    from penstock import DataLoader, Dataset

    if place.suffix == ".npy":
        try:
            dataset = Dataset(place, format="npy")
        except ConfigError:  # a Penstock that hasn't this format
            return None
    else:
        dataset = Dataset(place, fields=("array", "label"))
    stack.enter_context(dataset)
    return stack.enter_context(
        DataLoader(dataset, case.batch, shuffle=True, drop_last=True, seed=7)
    )


def _others(files: Path, case: Case) -> dict[str, Callable[[], Iterator[Any]]]:
    import torch.utils.data

    theirs: Any = Files(files, case.samples)
    common: dict[str, Any] = {"batch_size": case.batch, "shuffle": True, "drop_last": True}
    alone = torch.utils.data.DataLoader(theirs, **common)
    workers = torch.utils.data.DataLoader(
        theirs, num_workers=WORKERS, persistent_workers=True, **common
    )
    return {
        "torch 0": lambda: iter(alone),
        "torch 2": lambda: iter(workers),
        "readinto": lambda: readinto(files, case),
    }


def _play(
    make: Callable[[], Iterator[Any]], case: Case, seconds: float, step_s: float
) -> dict[str, float]:
    """Iterate over whole epochs for at least some seconds."""
    batches, total, elapsed, slept = 0, 0.0, 0.0, 0.0
    in_loop = time.thread_time()
    before, used = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, tree_cpu_s()
    began = time.perf_counter()
    while not batches or elapsed < seconds:
        for batch in make():
            values = batch[0] if isinstance(batch, tuple | list) else batch
            batches += 1
            total += float(values.reshape(-1)[0])  # read a value, like a training loop
            if step_s:
                asleep = time.perf_counter()
                time.sleep(step_s)
                slept += time.perf_counter() - asleep
        elapsed = time.perf_counter() - began
    assert total == total
    cpu_s = tree_cpu_s() - used
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    gigabytes = 4e-9 * case.numbers * case.batch * batches
    return {
        "gb_per_s": gigabytes / elapsed,
        "batches_per_s": batches / elapsed,
        "cpu_s_per_gb": cpu_s / gigabytes,
        "page_faults_per_gb": faults / gigabytes,
        "loop_ms": 1e3 * (time.thread_time() - in_loop) / batches,
        **({"au": slept / elapsed} if step_s else {}),
    }


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.native_arrays", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 short rounds of small arrays")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of a play")
    parser.add_argument("--step-ms", type=float, default=0.0, help="sleep after each batch")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        tuple(case.smaller(1000) for case in CASES) if options.quick else CASES,
        rounds=2 if options.quick else options.rounds,
        seconds=0.0 if options.quick else options.seconds,
        step_s=options.step_ms / 1e3,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
