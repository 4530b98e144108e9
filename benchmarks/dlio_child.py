"""One loader of `benchmarks.dlio` in a process of its own: a line of JSON in, a run's figures out.

What each loader does follows DLIO's readers (github.com/argonne-lcf/dlio_benchmark, reader/): a
sample's bytes are all read, and where the workload has a record_length_bytes_resize, what is handed
out in their place is of that size, no matter what was read.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks.dlio_data import files_below
from penstock.pipeline.bench.children import tell
from penstock.pipeline.bench.play import play

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from penstock import Statistics

LoaderName = Literal["penstock", "torch", "floor"]
Work = Literal["bytes", "decode", "arrays"]

CROP = 224
_RAW_THREADS = 4  # keeps the disk here busy; the mapped pack's read-ahead keeps as much in flight
_RAW_MOST_BYTES = 8 * 2**20  # a request; larger samples are read in several, as everybody does


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a loader is built for. window_bytes: handed out of each array; 0 is the whole array."""

    work: Work
    files: str
    pack: str
    sample_bytes: int
    batch_size: int
    workers: int
    window_bytes: int = 0
    seed: int = 7


class Arrays:
    """A torch dataset as a user writes it: loads a whole .npy, hands out a random window of it.

    window_bytes: 0 hands the array out. Samples: (uint8 tensor, its number).
    """

    def __init__(self, folder: str, *, window_bytes: int) -> None:
        self.paths = [str(path) for path in files_below(Path(folder))]
        self.window_bytes = window_bytes

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import torch

        values = np.load(self.paths[index])
        if self.window_bytes:
            begin = int(torch.randint(len(values) - self.window_bytes + 1, ()))
            values = values[begin : begin + self.window_bytes].copy()  # lets go of the rest
        return torch.from_numpy(values), index


class EncodedFiles:
    """A torch dataset that reads a file and looks at nothing: its number, and how long it was."""

    def __init__(self, folder: str) -> None:
        self.paths = [str(path) for path in files_below(Path(folder))]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[int, int]:
        with open(self.paths[index], "rb") as file:
            return index, len(file.read())


class WithStatistics:
    """What `play` asks a loader for, around batches that have no statistics of their own."""

    def __init__(self, batches: Any, close: Callable[[], None] = lambda: None) -> None:
        self._batches, self._close = batches, close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def statistics(self) -> Statistics:
        from penstock.pipeline.report.meter import Meter

        return Meter(decode_threads=0, device="cpu").snapshot()

    def close(self) -> None:
        self._close()
        self._batches = ()


class Native:
    """Penstock over a pack. Closing it closes the dataset too: mapped files can't be forgotten."""

    def __init__(self, task: Task) -> None:
        from penstock import DataLoader, Dataset, imagenet_train

        decodes = task.work == "decode"
        # Without "image" nothing is decoded, but every sample's bytes are read and checksummed.
        self._dataset = Dataset(task.pack, fields=None if decodes else ("label", "id"))
        self._loader = DataLoader(
            self._dataset,
            batch_size=task.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=task.workers,
            seed=task.seed,
            augment=imagenet_train(CROP) if decodes else None,
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def statistics(self) -> Statistics:
        return self._loader.statistics()

    def close(self) -> None:
        self._loader.close()
        self._dataset.close()


def torch_dataset(task: Task) -> Any:
    """What torch's DataLoader reads; Penstock's too where there are arrays."""
    if task.work == "arrays":
        return Arrays(task.files, window_bytes=task.window_bytes)
    if task.work == "bytes":
        return EncodedFiles(task.files)
    from penstock.pipeline.bench.peers.images import Crop, fastest
    from penstock.pipeline.bench.peers.torch_loader import FolderImages
    from penstock.pipeline.bench.peers.work import list_files

    return FolderImages(list_files(Path(task.files)), Crop(CROP, decoder=fastest()))


def torchs_options(task: Task) -> dict[str, Any]:
    """Arguments that both loaders are given over the same torch dataset."""
    return {
        "batch_size": task.batch_size,
        "shuffle": True,
        "drop_last": True,
        "num_workers": task.workers,
        "persistent_workers": task.workers > 0,
    }


def penstock(task: Task) -> Any:
    if task.work != "arrays":
        return Native(task)
    from penstock import DataLoader

    return DataLoader(torch_dataset(task), seed=task.seed, **torchs_options(task))


def torchs(task: Task) -> Any:
    from torch.utils.data import DataLoader

    from penstock.pipeline.bench.peers.images import one_thread

    options = torchs_options(task) | {"worker_init_fn": one_thread}
    return WithStatistics(DataLoader(torch_dataset(task), **options))


def floor(task: Task) -> Any:
    """A batch of the same shape that is there already, over and over: a loader that costs
    nothing."""
    import torch

    labels = torch.zeros(task.batch_size, dtype=torch.int64)
    first = {
        "bytes": labels,
        "decode": torch.zeros(task.batch_size, 3, CROP, CROP),
        "arrays": torch.zeros(task.batch_size, task.window_bytes or task.sample_bytes).byte(),
    }[task.work]
    return WithStatistics(itertools.repeat((first, labels)))


LOADERS: dict[LoaderName, Callable[[Task], Any]] = {
    "penstock": penstock,
    "torch": torchs,
    "floor": floor,
}


def raw_read(folder: Path, *, request_bytes: int, seconds: float) -> tuple[int, float]:
    """(bytes, seconds) of reading the files below in requests of that size, in random order, by
    four threads: what the disk can give anybody who reads so. Ends with the data, or the time."""
    from penstock.cache.threads import ordered

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
    """One run's figures, as JSON values."""
    played = play(
        lambda: LOADERS[name](task),
        seconds=seconds,
        step_s=step_s,
        sample_bytes=task.sample_bytes,
    )
    measured = played.figures
    return asdict(measured) | {
        "samples_per_s": measured.samples_per_s,
        "bytes_per_s": measured.bytes_per_s,
        "cpu_s_per_1000": measured.cpu_s_per_1000,
        "read_bytes": measured.bytes_by_tier.get("disk", 0),
    }


def main(argv: list[str]) -> None:
    """argv: the loader's name or "raw", and a Task as JSON; then step_s and seconds, a line each
    run."""
    task = Task(**json.loads(argv[1]))
    tell({"ready": argv[0]})
    for line in sys.stdin:
        asked = json.loads(line)
        if argv[0] == "raw":
            total, took_s = raw_read(
                Path(task.pack), request_bytes=task.sample_bytes, seconds=asked["seconds"]
            )
            tell({"bytes_per_s": total / took_s})
        else:
            tell(run(argv[0], task, **asked))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1:])
