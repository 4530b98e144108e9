"""`python -m benchmarks.overhead`: CPU a sample of everything but decoding.

The graph takes the same inputs but hands out a constant of the same shape; what is left is order,
reading, checksums, draws, feeding and handing over. Writes benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from pathlib import Path
from unittest import mock

from rich.console import Console

from benchmarks.data import Prepared, prepare
from benchmarks.measure import RESULTS, write_result


def measure(
    prepared: Prepared,
    *,
    batch_size: int = 256,
    batches: int = 64,
    rounds: int = 9,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Process CPU time, all threads, over `rounds` runs of `batches`. Returns the result's path."""
    from augment import imagenet_train
    from augment.graph import Graph
    from pipeline import DataLoader
    from readers import Dataset

    constant = functools.partial(Graph, constant_decode=True)
    # The loader offers no such switch, rightly: it is put in where the loader finds its graph.
    with (
        mock.patch("pipeline.build.Graph", constant),
        DataLoader(
            Dataset(str(prepared.pack)),
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            seed=7,
            augment=imagenet_train(224),
        ) as loader,
    ):
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        costs = []
        for number in range(rounds + 1):
            began = time.process_time()
            for _ in itertools.islice(endless, batches):
                pass
            cost_us = 1e6 * (time.process_time() - began) / (batches * batch_size)
            if number:  # the first round maps files and warms caches
                costs.append(cost_us)
    median = statistics.median(costs)
    console.print(
        f"{median:.2f} us of CPU a sample outside decoding at batch {batch_size} "
        f"({min(costs):.2f} to {max(costs):.2f}, {rounds} rounds of {batches} batches)"
    )
    measured = {
        "dataset": prepared.record(),
        "batch_size": batch_size,
        "batches": batches,
        "cpu_us_per_sample": {"median": median, "rounds": costs},
    }
    return write_result("overhead", measured, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.overhead", description=__doc__)
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
