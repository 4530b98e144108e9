"""`python -m benchmarks.tokens`: sequences of tokens, compared with a loop of slices and torch's
loader.

All sides take turns within one run, in rotating order: shuffled, flat uint16 files, sequences of
2,048 tokens, 64 per batch, delivered as int64:

- penstock: the loader on `Dataset(format="tokens")`, default settings;
- slices: a plain loop over `numpy.memmap`s: a slice of each sequence as int64, stacked by torch, as
  the training scripts of small language models do, without order, checks or state;
- torch: `torch.utils.data.DataLoader` without workers over a map-style dataset of such slices.

Ratios are computed within a round: penstock's tokens/s divided by the other side's, in wall time
and in CPU time. The loop reads only the first number of each batch. In addition, 10^12 tokens in
2,400 sparse files are opened: the time to index them, to open that index again and to plan a
shuffled job up to its first batch, and the increase of the process's memory. Writes
benchmarks/results/tokens.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
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

LENGTH, BATCH = 2048, 64
SIDES = ("penstock", "slices", "torch")
FILES, CORPUS_TOKENS = 2400, 10**12

# A process of its own: what it takes is what planning takes, with numpy alone imported before.
_PLAN = """
import json, re, sys, time
import numpy
from penstock import Dataset
from penstock.pipeline.plan.job_order import make_plan, first_settings
def peak():  # of this image; what getrusage says begins with that of the parent
    return int(re.search("VmHWM:\\s*([0-9]+)", open("/proc/self/status").read())[1]) / 1e3
before = peak()
began = time.perf_counter()
settings = {"format": "tokens", "dtype": "uint16", "sample": (2048,)}
with Dataset(sys.argv[1], **settings) as dataset:
    dataset.open()
    opened = time.perf_counter()
    plan_settings = first_settings(dataset.contents, seed=7, global_batch=int(sys.argv[2]))
    batch = int(sys.argv[2])
    make_plan(dataset.contents, plan_settings).places(0, 0, batch, low=0, high=batch)
    planned = time.perf_counter()
    samples = len(dataset)
print(json.dumps({"open_s": opened - began, "plan_s": planned - opened, "sequences": samples,
                  "mb": peak(), "mb_more": peak() - before}))
"""


def write_files(folder: Path, *, files: int, sequences: int) -> list[Path]:
    """Write flat files of so many sequences each."""
    folder.mkdir()
    rng = np.random.default_rng(7)
    paths = [folder / f"{number:05d}.bin" for number in range(files)]
    for path in paths:
        rng.integers(0, 50_000, LENGTH * sequences, np.uint16).tofile(path)
    return paths


class Slices:
    """A map-style dataset of slices of mapped files, as users write it."""

    def __init__(self, paths: list[Path], sequences: int) -> None:
        self._files = [np.memmap(path, np.uint16, "r") for path in paths]
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._files) * self._sequences

    def __getitem__(self, i: int) -> Any:
        import torch

        file, nth = divmod(i, self._sequences)
        part = self._files[file][nth * LENGTH : (nth + 1) * LENGTH]
        return torch.from_numpy(part.astype(np.int64))


def by_slices(slices: Slices) -> Iterator[Any]:
    """Yield the batches of one epoch in a new order."""
    import torch

    order = np.random.default_rng().permutation(len(slices))
    for start in range(0, len(order) - BATCH + 1, BATCH):
        yield torch.stack([slices[row] for row in order[start : start + BATCH].tolist()])


def _rounds(paths: list[Path], sequences: int, *, rounds: int) -> dict[str, Any]:
    import torch.utils.data

    from penstock import DataLoader, Dataset

    slices: Any = Slices(paths, sequences)
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    folder = paths[0].parent
    with (
        Dataset(folder, format="tokens", dtype="uint16", sample=(LENGTH,)) as dataset,
        DataLoader(dataset, BATCH, shuffle=True, drop_last=True, seed=7) as loader,
    ):
        theirs = torch.utils.data.DataLoader(slices, BATCH, shuffle=True, drop_last=True)
        plays: dict[str, Callable[[], Iterator[Any]]] = {
            "penstock": lambda: (tokens for (tokens,) in loader),
            "slices": lambda: by_slices(slices),
            "torch": lambda: iter(theirs),
        }
        for side in SIDES:
            _play(plays[side])
        for number in range(rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                rate, rate_cpu = _play(plays[side])
                rates[side].append(rate)
                cpu[side].append(rate_cpu)
    report: dict[str, Any] = {
        side: {
            "tokens_per_s": round(statistics.median(rates[side])),
            "tokens_per_cpu_s": round(statistics.median(cpu[side])),
        }
        for side in SIDES
    }
    for side in SIDES[1:]:
        for what, found in (("", rates), (" by CPU", cpu)):
            pairs = zip(found["penstock"], found[side], strict=True)
            report[f"over {side}{what}"] = asdict(
                Figure.of([mine / other for mine, other in pairs])
            )
    return report


def _play(make: Callable[[], Iterator[Any]]) -> tuple[float, float]:
    """Return tokens per second, and tokens per CPU-second of this process, over an epoch."""
    count, total = 0, 0
    began, used = time.perf_counter(), _cpu_s()
    for tokens in make():
        count += tokens.numel()
        total += int(tokens.view(-1)[0])  # read a value, like a training loop
    assert total >= 0
    return count / (time.perf_counter() - began), count / (_cpu_s() - used)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def plan(folder: Path, *, files: int, tokens: int, batch: int) -> dict[str, Any]:
    """Index, open and plan a corpus of sparse files."""
    folder.mkdir()
    for number in range(files):
        with open(folder / f"{number:05d}.bin", "wb") as file:
            file.truncate(2 * (tokens // files))
    found = []
    for _ in range(2):
        child = subprocess.run(
            [sys.executable, "-c", _PLAN, str(folder), str(batch)],
            check=True,
            capture_output=True,
            text=True,
        )
        found.append(json.loads(child.stdout))
    built, opened = found
    planned: dict[str, Any] = {"files": files, "tokens": tokens, "batch": batch}
    planned |= {"index_s": built["open_s"], **opened}
    return planned


def measure(
    *, files: int, sequences: int, corpus_files: int, rounds: int, results: Path, console: Console
) -> Path:
    """Play the rounds, print the ratios and write the result; return its path."""
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder) / "files", files=files, sequences=sequences)
        found = _rounds(paths, sequences, rounds=rounds)
        console.print(found, highlight=False)
        tokens = CORPUS_TOKENS // FILES * corpus_files
        planned = plan(Path(folder) / "corpus", files=corpus_files, tokens=tokens, batch=1024)
        console.print(planned, highlight=False)
    settings = {"rounds": rounds, "files": files, "sequences": sequences, "batch": BATCH}
    return write_result("tokens", settings | {"rates": found, "plan": planned}, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.tokens", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 short rounds, for a quick check")
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=10_000, help="sequences per file")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        files=options.files,
        sequences=200 if options.quick else options.sequences,
        corpus_files=20 if options.quick else FILES,
        rounds=2 if options.quick else options.rounds,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
