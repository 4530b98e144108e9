"""`python -m benchmarks.memory`: by how much resident memory grows per epoch, over many epochs.

One process iterates a loader over 1,000 images for 50 epochs. The result is the slope of a
least-squares line through the resident sizes at the ends of the epochs, without the first fifth, in
which pools grow. The number of decoded batches that are alive at the end of an epoch changes a size
by whole batch tensors (18 MiB each here). Therefore three other figures of the same sizes are
reported: the median of all pairwise slopes; the line over the last half only (zero for a pool that
has reached its size, unchanged for a leak); and last minus first, without omissions. Threads and
file descriptors are counted before the loader is built and after it is closed. Writes
benchmarks/results/memory.json.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from benchmarks.data import prepare
from benchmarks.record import RESULTS, write_result
from penstock.pipeline.bench import Child, send_to_parent

if TYPE_CHECKING:
    from numpy.typing import NDArray

WARM_SHARE = 0.2


def resident_mib() -> float:
    """Return the resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def held() -> dict[str, int]:
    """Return the threads and file descriptors of this process, and the files in shared memory."""
    shared = Path("/dev/shm")
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared_files": len(list(shared.iterdir())) if shared.exists() else 0,
    }


def growth(resident: list[float]) -> dict[str, float]:
    """Return MiB per epoch by four methods; the limit applies to "least_squares".

    "pairwise_median" is Theil's and Sen's slope: Sen, "Estimates of the regression coefficient
    based on Kendall's tau", 1968.
    """
    kept = np.asarray(resident[int(len(resident) * WARM_SHARE) :])
    first, second = np.triu_indices(len(kept), 1)
    return {
        "least_squares": _line(kept),
        "pairwise_median": float(np.median((kept[second] - kept[first]) / (second - first))),
        "last_half": _line(np.asarray(resident[len(resident) // 2 :])),
        "end_to_end": (resident[-1] - resident[0]) / max(1, len(resident) - 1),
    }


def _line(sizes: NDArray[np.float64]) -> float:
    """Return the slope of the least-squares line."""
    return float(np.polyfit(np.arange(len(sizes)), sizes, 1)[0])


def iterate(pack: str, *, epochs: int, batch_size: int) -> dict[str, Any]:
    """Return, from a child process, the resident memory after every epoch, and the resources before
    and after."""
    from penstock import DataLoader, Dataset, imagenet_train

    def loader(seed: int) -> DataLoader:
        return DataLoader(
            Dataset(pack),
            batch_size=batch_size,
            shuffle=True,
            drop_last=True,
            seed=seed,
            augment=imagenet_train(224),
        )

    with loader(1) as first:  # DALI and torch start threads once, which stay with the process
        next(iter(first))
    before = held()
    resident = []
    with loader(7) as second:
        for _ in range(epochs):
            for _batch in second:
                pass
            resident.append(resident_mib())
    return {"resident_mib": resident, "before": before, "after": held()}


def measure(
    work: Path, *, images: int, epochs: int, results: Path = RESULTS, console: Console
) -> Path:
    """Run the child, print the slope and write the result. Returns its path."""
    prepared = prepare(work, train_images=images, eval_images=16)
    words = ["--pack", str(prepared.pack.absolute()), "--epochs", str(epochs)]
    with (
        console.status(f"{epochs} epochs of {images:,} images"),
        Child("benchmarks.memory", words) as child,
    ):
        report = child.receive()
    slopes = growth(report["resident_mib"])
    console.print(
        f"{slopes['least_squares']:+.3f} MiB an epoch over {epochs} epochs of {images:,} images "
        f"(pairwise median {slopes['pairwise_median']:+.3f}, last half {slopes['last_half']:+.3f}, "
        f"last minus first {slopes['end_to_end']:+.3f}); before and after: {report['before']} "
        f"{report['after']}",
        highlight=False,
    )
    measured = report | {"epochs": epochs, "images": images, "mib_per_epoch": slopes}
    return write_result("memory", measured, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and measure; with --pack, run the process that iterates."""
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 epochs of 128 images")
    parser.add_argument("--work", type=Path, default=Path("demo/memory"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--pack", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args(argv)
    if options.pack:
        send_to_parent(iterate(options.pack, epochs=options.epochs, batch_size=options.batch_size))
        return
    measure(
        options.work,
        images=128 if options.quick else 1000,
        epochs=5 if options.quick else options.epochs,
        results=options.results,
        console=Console(),
    )


if __name__ == "__main__":
    main()
