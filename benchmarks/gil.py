"""`python -m benchmarks.gil`: by how much the loader slows a training step that holds the GIL.

The step is pure Python and holds the GIL all the time, so that Python code on the loader's threads
delays it. Two equal steps follow each batch: during the first one the loader replaces the delivered
batch; when the second one starts, the loader is idle. The two are compared in close pairs because
the machine drifts. Decoding has one thread, so that enough cores are free.

Two hyperthreads of one core slow each other, and so would a decoder without any Python. The result
is therefore the time in which the step's thread was ready to run and did not; the difference in
wall time is reported as well. Writes benchmarks/results/gil.json.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

from rich.console import Console

from benchmarks.data import Prepared, prepare
from benchmarks.record import RESULTS, write_result


def _count(turns: int) -> int:
    total = 0
    for turn in range(turns):
        total += turn & 3
    return total


def _step_s(turns: int) -> tuple[float, float]:
    """Return the wall seconds of a step, and the part in which its thread didn't run."""
    began, ran = time.perf_counter(), time.thread_time()
    _count(turns)
    wall_s = time.perf_counter() - began
    return wall_s, wall_s - (time.thread_time() - ran)


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
    """Return the median slowdown over `rounds` of `steps` pairs of steps of about step_s seconds
    each."""
    from penstock import DataLoader, Dataset, imagenet_train

    turns = max(1, int(step_s / min(_step_s(100_000)[0] for _ in range(5)) * 100_000))
    pairs: list[tuple[float, float]] = []
    waits: list[float] = []
    with DataLoader(
        Dataset(str(prepared.pack)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        seed=7,
        num_workers=1,
        augment=imagenet_train(224),
    ) as loader:
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        for _ in range(rounds):
            timed = [(_step_s(turns), _step_s(turns)) for _ in itertools.islice(endless, steps)]
            beside, alone = (
                statistics.median(w for w, _ in side) for side in zip(*timed, strict=True)
            )
            held = [sum(waited for _, waited in side) for side in zip(*timed, strict=True)]
            pairs.append((alone, beside))
            waits.append((held[0] - held[1]) / sum(wall for (wall, _), _ in timed))
    slowdowns = [beside / alone - 1 for alone, beside in pairs]
    slowdown, waiting = statistics.median(slowdowns), statistics.median(waits)
    console.print(
        f"A step of {1e3 * statistics.median(a for a, _ in pairs):.0f} ms that holds the GIL waits "
        f"for it {waiting:.2%} of the time with the loader beside it ({min(waits):.2%} to "
        f"{max(waits):.2%}, {rounds} rounds of {steps} pairs, batch {batch_size}). In all it takes "
        f"{slowdown:+.1%} ({min(slowdowns):+.1%} to {max(slowdowns):+.1%}): the rest is what two "
        "busy cores do to each other.",
        highlight=False,
    )
    measured = {
        "dataset": prepared.record(),
        "batch_size": batch_size,
        "steps": steps,
        "gil_share": waiting,
        "gil_shares": waits,
        "slowdown": slowdown,
        "pairs_s": pairs,
    }
    return write_result("gil", measured, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
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
