"""`python -m benchmarks.overhead`: CPU time per sample of everything except decoding.

The graph receives the same inputs but returns a constant of the same shape. The remaining cost is
that of order, reading, checksums, draws, feeding and delivery. Writes
benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import threading
import time
from pathlib import Path
from unittest import mock

from rich.console import Console

from benchmarks.data import Prepared, prepare
from benchmarks.record import RESULTS, write_result

_THREADS = ("consumer", "decode", "read")


def measure(
    prepared: Prepared,
    *,
    batch_size: int = 256,
    batches: int = 64,
    rounds: int = 9,
    results: Path = RESULTS,
    console: Console,
) -> Path:
    """Measure the process CPU time, all threads, over `rounds` runs of `batches`. Returns the
    result's path.

    Also reports the parts of the threads that run Python, and the cost of the samples' checksums
    alone.
    """
    parts = _thread_times(prepared, batch_size=batch_size, batches=batches, rounds=rounds)
    parts["checksum"] = [_checksum_us(prepared) for _ in range(rounds)]
    own = zip(*(parts[name] for name in _THREADS), parts["checksum"], strict=True)
    parts["python"] = [sum(threads) - checksum for *threads, checksum in own]
    medians = {name: statistics.median(values) for name, values in parts.items()}
    console.print(
        f"{medians['process']:.2f} us of CPU a sample outside decoding at batch {batch_size} "
        f"({min(parts['process']):.2f} to {max(parts['process']):.2f}, {rounds} rounds of "
        f"{batches} batches). Of that in the training loop's thread {medians['consumer']:.2f}, in "
        f"the one that feeds DALI {medians['decode']:.2f}, in those that read "
        f"{medians['read']:.2f}; these three without the samples' checksum "
        f"({medians['checksum']:.2f}), but with what they call of DALI: {medians['python']:.2f}. "
        "The rest is DALI's own threads.",
        highlight=False,
    )
    measured = {
        "dataset": prepared.record(),
        "batch_size": batch_size,
        "batches": batches,
        "cpu_us_per_sample": medians,
        "rounds": parts,
    }
    return write_result("overhead", measured, folder=results)


def _thread_times(
    prepared: Prepared, *, batch_size: int, batches: int, rounds: int
) -> dict[str, list[float]]:
    """Return CPU microseconds per sample of the process and of the threads that run Python, by
    round."""
    from penstock import DataLoader, Dataset, imagenet_train
    from penstock.augment import GraphPlan

    parts: dict[str, list[float]] = {name: [] for name in ("process", *_THREADS)}
    constant = functools.partial(GraphPlan, constant=True)
    # The loader offers no such switch, rightly: it is put in where the loader finds its graph.
    with (
        mock.patch("penstock.pipeline.feed.image_decoding.GraphPlan", constant),
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
        samples = batches * batch_size
        for number in range(rounds + 1):
            process, threads = time.process_time(), _threads_s()
            for _ in itertools.islice(endless, batches):
                pass
            if number:  # the first round maps files and warms caches
                parts["process"].append(1e6 * (time.process_time() - process) / samples)
                for name, seconds in _threads_s().items():
                    parts[name].append(1e6 * (seconds - threads[name]) / samples)
    return parts


def _threads_s() -> dict[str, float]:
    """Return the CPU seconds of the threads that run Python, by purpose."""
    found = dict.fromkeys(_THREADS, 0.0)
    for thread in threading.enumerate():
        if thread.ident is None:
            continue
        name = next((n for n in _THREADS if thread.name.startswith(f"penstock-{n}")), None)
        if thread is threading.current_thread():
            name = "consumer"
        if name is not None:
            found[name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return found


def _checksum_us(prepared: Prepared, *, samples: int = 256) -> float:
    """Return the CPU microseconds of the CRC-32C of a sample."""
    from crc32c import crc32c

    from penstock import Dataset
    from penstock.pipeline.plan import Plan

    dataset = Dataset(str(prepared.pack))
    plan = Plan(dataset.index.sizes, seed=7, lanes=1, window=1)
    rows = plan.places(0, 0, samples, low=0, high=min(samples, plan.samples)).rows
    encoded = dataset.read(rows).encoded("image").encoded
    began = time.thread_time()
    for view in encoded:
        crc32c(view)
    took_s = time.thread_time() - began
    dataset.close()
    return 1e6 * took_s / len(encoded)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
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
