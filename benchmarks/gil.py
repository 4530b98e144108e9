"""`python -m benchmarks.gil`: how much a training step that holds the GIL is slowed by the loader.

The step is pure Python, so it holds the GIL all the time, and every moment that the loader's
threads spend in Python comes out of it. The same steps are timed with and without the loader
running, in turn; only the steps count, not the waits for batches. Decoding has one thread, so that
there are cores enough and the GIL is what is shared. Writes benchmarks/results/gil.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

from rich.console import Console

from benchmarks.data import Prepared, prepare
from benchmarks.measure import RESULTS, write_result


def _count(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn & 3
    return total


def _step_s(turns: int) -> float:
    began = time.perf_counter()
    _count(turns)
    return time.perf_counter() - began


def measure(
    prepared: Prepared,
    *,
    batch_size: int = 32,
    steps: int = 20,
    step_s: float = 0.2,
    rounds: int = 9,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Median slowdown over `rounds` pairs of `steps` steps of about step_s seconds each."""
    from augment import imagenet_train
    from pipeline import DataLoader
    from readers import Dataset

    turns = max(1, int(step_s / min(_step_s(100_000) for _ in range(5)) * 100_000))
    pairs: list[tuple[float, float]] = []
    with DataLoader(
        Dataset(str(prepared.pack)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        seed=7,
        num_workers=1,
        augment=imagenet_train(224),
    ) as loader:
        for _ in range(rounds):
            # A new pass stands still until its first batch is asked for, so the two don't overlap.
            alone = statistics.median(_step_s(turns) for _ in range(steps))
            endless = itertools.chain.from_iterable(itertools.repeat(loader))
            beside = statistics.median(_step_s(turns) for _ in itertools.islice(endless, steps))
            pairs.append((alone, beside))
    slowdowns = [beside / alone - 1 for alone, beside in pairs]
    slowdown = statistics.median(slowdowns)
    console.print(
        f"A step of {1e3 * statistics.median(a for a, _ in pairs):.0f} ms that holds the GIL takes "
        f"{slowdown:+.1%} with the loader beside it ({min(slowdowns):+.1%} to "
        f"{max(slowdowns):+.1%}, {rounds} pairs of {steps} steps, batch {batch_size}).",
        highlight=False,
    )
    measured = {
        "dataset": prepared.record(),
        "batch_size": batch_size,
        "steps": steps,
        "slowdown": slowdown,
        "pairs_s": pairs,
    }
    return write_result("gil", measured, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.gil", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, help="your own image folder, <class>/*.jpg")
    parser.add_argument("--work", type=Path, default=Path("demo"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    measure(
        prepare(options.work, data=options.data),
        rounds=3 if options.quick else 9,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
