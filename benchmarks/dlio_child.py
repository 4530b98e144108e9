"""Run one loader of `benchmarks.dlio` in a process of its own: a line of JSON in, the figures of a
run out.

As in DLIO's readers (github.com/argonne-lcf/dlio_benchmark, reader/), all bytes of a sample are
read; here they are also delivered.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.dlio_data import files_below
from benchmarks.dlio_task import Task, Work
from benchmarks.dlio_torch import CROP, DETECT, GroupOrder, RowGroups, torch_dataset
from penstock.pipeline.bench import play, send_to_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock import Statistics

LoaderName = Literal["penstock", "torch", "floor"]

_RAW_THREADS = 4  # keeps the disk here busy; the mapped pack's read-ahead keeps as much in flight
_RAW_MOST_BYTES = 8 * 2**20  # a request; larger samples are read in several, as everybody does


class WithStatistics:
    """A wrapper that adds the statistics that `play` needs to batches without statistics."""

    def __init__(self, batches: Any, close: Callable[[], None] = lambda: None) -> None:
        self._batches, self._close = batches, close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def statistics(self) -> Statistics:
        from penstock.pipeline.report import Meter

        return Meter(decode_threads=0, device="cpu").snapshot()

    def close(self) -> None:
        self._close()
        self._batches = ()


class Native:
    """Penstock on the formats that it reads natively. Closing it also closes the dataset, because
    mapped files stay in the page cache."""

    def __init__(self, task: Task) -> None:
        from penstock import DataLoader, Dataset

        if task.work == "bytes":
            # Nothing is decoded, but every sample's bytes are read and checksummed.
            self._dataset = Dataset(task.pack, fields=("label", "id"))
        elif task.work == "arrays":
            fields = ("array", "id") if task.kind == "npy" else ("x", "id")
            self._dataset = Dataset(task.files, fields=fields)
        else:
            self._dataset = Dataset(task.pack)
        self._loader = DataLoader(
            self._dataset,
            batch_size=task.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=task.workers,
            seed=task.seed,
            augment=recipe(task.work),
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def statistics(self) -> Statistics:
        return self._loader.statistics()

    def close(self) -> None:
        self._loader.close()
        self._dataset.close()


def recipe(work: Work) -> Any:
    """Return the recipe for images."""
    from penstock import RandomHorizontalFlip, Resize, imagenet_train

    recipes = {
        "decode": imagenet_train(CROP),
        "detect": [Resize((DETECT, DETECT)), RandomHorizontalFlip()],
    }
    return recipes.get(work)


def torchs_options(task: Task, data: Any) -> dict[str, Any]:
    """Return the arguments of torch's loader."""
    by_group = isinstance(data, RowGroups)
    return {
        "batch_size": task.batch_size,
        "shuffle": not by_group,
        "sampler": GroupOrder(data, task.seed) if by_group else None,
        "drop_last": True,
        "num_workers": task.workers,
        "persistent_workers": task.workers > 0,
    }


def torchs(task: Task) -> Any:
    from torch.utils.data import DataLoader

    from penstock_bench_loaders.simplejpeg import one_core

    data = torch_dataset(task)
    options = torchs_options(task, data) | {"worker_init_fn": one_core}
    return WithStatistics(DataLoader(data, **options))


def floor(task: Task) -> Any:
    """Yield one ready batch of the same shape repeatedly: a loader that costs nothing."""
    import torch

    labels = torch.zeros(task.batch_size, dtype=torch.int64)
    first = {
        "bytes": labels,
        "decode": torch.zeros(task.batch_size, 3, CROP, CROP),
        "detect": torch.zeros(task.batch_size, 3, DETECT, DETECT, dtype=torch.uint8),
    }.get(task.work)
    if first is None:
        first = torch.zeros(task.batch_size, task.sample_bytes, dtype=torch.uint8)
    return WithStatistics(itertools.repeat((first, labels)))


LOADERS: dict[LoaderName, Callable[[Task], Any]] = {
    "penstock": Native,
    "torch": torchs,
    "floor": floor,
}


def raw_read(folder: Path, *, request_bytes: int, seconds: float) -> tuple[int, float]:
    """Read the files below a folder in requests of this size, in random order, by four threads;
    return (bytes, seconds). This is the rate that the disk can provide. Ends with the data or
    after the time."""
    from penstock.cache import ordered

    size = min(request_bytes, _RAW_MOST_BYTES)
    opened = {path: os.open(path, os.O_RDONLY) for path in files_below(folder)}
    try:
        places = [
            (descriptor, offset)
            for path, descriptor in opened.items()
            for offset in range(0, path.stat().st_size, size)
        ]
        np.random.default_rng(7).shuffle(places)
        began = time.perf_counter()
        total = 0
        chunks = ordered(
            lambda place: len(os.pread(place[0], size, place[1])),
            (tuple(place) for place in places),
            workers=_RAW_THREADS,
            ahead=4 * _RAW_THREADS,
        )
        for count in chunks:
            total += count
            if time.perf_counter() - began > seconds:
                break
        took_s = time.perf_counter() - began
        chunks.close()
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return total, took_s


def run(name: LoaderName, task: Task, *, step_s: float, seconds: float) -> dict[str, Any]:
    """Return one run's figures as JSON values."""
    played = play(
        lambda: LOADERS[name](task), seconds=seconds, step_s=step_s, sample_bytes=task.sample_bytes
    )
    measured = played.figures
    return asdict(measured) | {
        "samples_per_s": measured.samples_per_s,
        "bytes_per_s": measured.bytes_per_s,
        "cpu_s_per_1000": measured.cpu_s_per_1000,
        "read_bytes": measured.bytes_by_tier.get("disk", 0),
    }


def main(argv: list[str]) -> None:
    """Run tasks. argv: the name of the loader, or "raw", and a Task as JSON; stdin: step_s and
    seconds, one line per run."""
    task = Task(**json.loads(argv[1]))
    send_to_parent({"ready": argv[0]})
    for line in sys.stdin:
        asked = json.loads(line)
        if argv[0] == "raw":
            total, took_s = raw_read(
                Path(task.pack), request_bytes=task.sample_bytes, seconds=asked["seconds"]
            )
            send_to_parent({"bytes_per_s": total / took_s})
        else:
            send_to_parent(run(argv[0], task, **asked))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
