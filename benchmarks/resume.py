"""`python -m benchmarks.resume`: the cost of a plan over 10^9 samples, and of resuming anywhere.

Each position is measured in a process of its own, so that time and memory are those of a job that
starts there. Writes benchmarks/results/resume.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import Child, send_to_parent

if TYPE_CHECKING:
    from numpy.typing import NDArray

GLOBAL_BATCH = 4096
LANES = 512
WINDOW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A position to resume at, in a stream of `samples` in `shards` uneven shards."""

    epoch: int
    position: int
    samples: int
    shards: int


def starts(samples: int, shards: int) -> list[Start]:
    """Return the beginning, and positions early, in the middle and late in early and
    late epochs."""
    places = [(0, 0.0), (0, 0.5), (0, 0.999), (3, 0.25), (40, 0.75), (1000, 0.9)]
    return [
        Start(epoch=e, position=int(share * samples), samples=samples, shards=shards)
        for e, share in places
    ]


def uneven_sizes(samples: int, shards: int) -> NDArray[np.int64]:
    """Return the samples of each shard, int64 (shards,): half to one and a half of the
    mean each."""
    cuts = np.random.default_rng(0).uniform(-0.25, 0.25, shards - 1)
    edges = (np.arange(1, shards) + cuts) * (samples / shards)
    bounds = np.concatenate([[0], edges, [samples]]).astype(np.int64)
    return bounds[1:] - bounds[:-1]


def memory_kib(field: str) -> int:
    """Return a line of /proc/self/status: VmRSS, or VmHWM, the maximum since the start."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def resume_at(start: Start) -> dict[str, float]:
    """Return the seconds of Plan(...) and of its first batch, and the rise of the peak memory in
    MB."""
    from penstock.pipeline.plan import Plan

    sizes = uneven_sizes(start.samples, start.shards)
    before = memory_kib("VmRSS")
    began = time.perf_counter()
    plan = Plan(sizes, seed=7, lanes=LANES, window=WINDOW)
    planned = time.perf_counter()
    size = min(GLOBAL_BATCH, plan.samples - start.position)
    rows = plan.places(start.epoch, start.position, size, low=0, high=size).rows
    first = time.perf_counter()
    after = memory_kib("VmHWM")
    return {
        "plan_s": planned - began,
        "first_batch_s": first - planned,
        "total_s": first - began,
        "rose_mb": (after - before) * 1024 / 1e6,
        "rows": len(rows),
    }


def measure(
    *, samples: int, shards: int, rounds: int, results: Path = RESULTS, console: Console
) -> Path:
    """Return the path of the result: medians over interleaved rounds of every start."""
    places = starts(samples, shards)
    heard: list[list[dict[str, float]]] = [[] for _ in places]
    with console.status("planning"):
        for _ in range(rounds):
            for place, answers in zip(places, heard, strict=True):
                with Child("benchmarks.resume", ["--start", json.dumps(asdict(place))]) as child:
                    answers.append(child.receive())
    table = Table("epoch", "position", "plan", "first batch", "both", "memory", box=None)
    medians = []
    for place, answers in zip(places, heard, strict=True):
        middle = {key: statistics.median(a[key] for a in answers) for key in answers[0]}
        medians.append(asdict(place) | middle)
        table.add_row(
            f"{place.epoch:,}",
            f"{place.position:,}",
            f"{middle['plan_s']:.2f} s",
            f"{middle['first_batch_s']:.2f} s",
            f"{middle['total_s']:.2f} s",
            f"{middle['rose_mb']:.0f} MB",
        )
    console.print(f"{samples:,} samples in {shards:,} shards, medians of {rounds} processes each")
    console.print(table)
    settings = {"global_batch": GLOBAL_BATCH, "lanes": LANES, "window": WINDOW, "rounds": rounds}
    return write_result("resume", settings | {"starts": medians}, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure; with --start, run the process that resumes there."""
    parser = argparse.ArgumentParser(prog="benchmarks.resume", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10^6 samples, one round")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.start:
        send_to_parent(resume_at(Start(**json.loads(options.start))))
        return
    scale = (10**6, 10**3, 1) if options.quick else (10**9, 10**6, 3)
    samples, shards, rounds = scale
    measure(
        samples=samples, shards=shards, rounds=rounds, results=options.results, console=Console()
    )


if __name__ == "__main__":
    main()
