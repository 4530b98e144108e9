"""What each stage can do alone, measured beside a run so that shares are comparable.

read: as many threads as the loader has read batches in a shuffled order, and check them.
decode: encoded samples in memory go through the recipe's own windows with all sizes divided by 16
and without antialiasing, so that hardly anything but decoding those windows is left.
augment: the same samples through the whole recipe. python: the same without any decoding: views,
draws and the hand-over. copy: encoded bytes from pinned memory to the GPU, as what crosses the bus.
"""

from __future__ import annotations

import itertools
import resource
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from augment.draws import draw
from augment.graph import Graph
from augment.ops import CenterCrop, Decode, RandomResizedCrop, Resize
from augment.recipe import check_recipe
from cache.errors import ConfigError
from cache.threads import Ordered, Workers
from pipeline.bench.facts import Ceilings, Rate
from pipeline.build import (
    MAPPED_READ_THREADS,
    READ_THREADS,
    REMOTE_READ_THREADS,
    make_plan,
    shuffled_plan,
)
from pipeline.world import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from augment.ops import Operation
    from augment.recipe import CheckedRecipe
    from readers import Dataset
    from readers.types import EncodedBatch

_SHRINK = 16  # a 224 crop becomes 14 x 14: a two-hundredth of the pixels to resize
_FED = 2  # runs in flight, as in the loader
_SETTLE_SHARE = 0.25  # of the time, before counting begins
_LEAST_RUNS = 4  # of a batch in the time; images too large for that come in smaller runs
# Of the bytes, from a disk: less than that may be others' reads.
_COLD_SHARE = 0.2
_BLOCK_BYTES = 512  # of getrusage(2)


def measure_ceilings(
    dataset: Dataset,
    recipe: CheckedRecipe | None,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int = 0,
    seconds: float = 0.5,
    seed: int = 0,
) -> Ceilings:
    """Measure reading, decoding, augmenting, the copy and Python's part, each for about `seconds`.

    recipe: of `check_recipe`; None: a dataset without images. threads: that decode, 0: all usable
    cores. seed: of the order that is read in. The dataset stays open. Call it when nothing else of
    this process runs. Raises ConfigError for numbers that can't be, and what reading and decoding
    raise.
    """
    if batch_size < 1 or threads < 0 or seconds <= 0:
        raise ConfigError(
            f"measure_ceilings: got batch_size={batch_size}, threads={threads}, seconds={seconds}; "
            "wanted a batch of 1 or more, threads of 0 or more and seconds above 0."
        )
    rows = _rows(dataset, batch_size, seed=seed)
    read, is_cold = _read(dataset, rows, seconds)
    if recipe is None or "image" not in dataset.fields:
        return Ceilings(read=read, is_cold=is_cold)
    batch = dataset.read(next(rows))
    images = _Images(
        batch=batch,
        batch_size=len(batch.encoded),
        device=device,
        threads=threads or usable_cores(),
        seconds=seconds,
    )
    bare = check_recipe(without_augmenting(recipe.ops), images=dataset.index.images)
    return Ceilings(
        device=device,
        read=read,
        is_cold=is_cold,
        decode=images.rate(bare),
        augment=images.rate(recipe),
        copy=_copy(batch, device, seconds) if device.startswith("cuda") else None,
        python=images.rate(recipe, constant=True),
    )


def without_augmenting(ops: tuple[Operation, ...]) -> list[Operation]:
    """The recipe's windows, with hardly any pixels to resize to, and nothing behind them."""
    resizes = any(isinstance(op, Resize | RandomResizedCrop) for op in ops)
    bare: list[Operation] = []
    for op in ops:
        if isinstance(op, Resize | RandomResizedCrop):
            bare.append(replace(op, size=_smaller(op.size), antialias=False))
        elif isinstance(op, CenterCrop):
            # In front of any resize it is the window to decode; without one it is all there is.
            is_behind = any(isinstance(other, Resize | RandomResizedCrop) for other in bare)
            bare.append(replace(op, size=_smaller(op.size)) if resizes and is_behind else op)
        elif isinstance(op, Decode):
            bare.append(op)
    return bare


def _smaller(size: Any) -> Any:
    if isinstance(size, int):
        return max(1, size // _SHRINK)
    return tuple(max(1, side // _SHRINK) for side in size)


def _rows(dataset: Dataset, batch_size: int, *, seed: int) -> Iterator[NDArray[Any]]:
    """(shard, row) of batch after batch, as a job of this seed would walk them, without an end."""
    index = dataset.index
    plan = make_plan(index, shuffled_plan(index, seed=seed, global_batch=batch_size))
    for epoch in itertools.count(1):  # the run itself has had epoch 0 in memory lately
        for position in range(0, index.samples, batch_size):
            yield plan.batch(epoch, position, batch_size)


def _read(dataset: Dataset, rows: Iterator[NDArray[Any]], seconds: float) -> tuple[Rate, bool]:
    """What reading gives, and whether bytes had to come from further than memory."""
    remote = dataset.remote is not None
    workers = MAPPED_READ_THREADS if dataset.index.kind != "folder" else READ_THREADS
    workers = REMOTE_READ_THREADS if remote else workers
    fetched, blocks = dataset.traffic().bytes_remote, _blocks()

    def read(some: NDArray[Any]) -> tuple[int, int]:
        encoded = dataset.read(some).encoded
        return len(encoded), sum(map(len, encoded))

    pool = Workers(workers, name="ceiling")
    # A slow remote is asked for little at first: closing waits for what is in flight.
    stream = Ordered(read, rows, pool=pool, ahead=min(2, workers))
    clock = _Clock(seconds)
    try:
        while not clock.is_over:
            clock.count(*next(stream))
            stream.ahead = min(2 * workers, stream.ahead + 1)
        rate = clock.rate()
    finally:
        stream.close()
        pool.close()
    read_bytes = sum(mark[3] for mark in clock.marks)
    is_cold = (_blocks() - blocks) * _BLOCK_BYTES > _COLD_SHARE * read_bytes
    return rate, is_cold or dataset.traffic().bytes_remote > fetched


def _blocks() -> int:
    """Blocks that this process has had to read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


@dataclass(slots=True)
class _Clock:
    """Counts what comes after the settling part of so many seconds."""

    seconds: float
    began_s: float = field(default_factory=time.perf_counter)
    marks: list[tuple[float, float, int, int]] = field(default_factory=list)
    is_over: bool = False

    def count(self, samples: int, size_bytes: int) -> None:
        now = time.perf_counter()
        self.marks.append((now, time.process_time(), samples, size_bytes))
        # Two at least: a rate is from one to another.
        self.is_over = now - self.began_s >= self.seconds and len(self.marks) > 1

    def rate(self) -> Rate:
        """From the last mark of the settling part (the first of all, if that has none) on."""
        settled = self.began_s + _SETTLE_SHARE * self.seconds
        before = sum(mark[0] <= settled for mark in self.marks[:-1])
        first, rest = self.marks[max(0, before - 1)], self.marks[max(1, before) :]
        samples, size_bytes = sum(mark[2] for mark in rest), sum(mark[3] for mark in rest)
        took_s, cpu_s = rest[-1][0] - first[0], rest[-1][1] - first[1]
        return Rate(
            samples_per_s=samples / took_s,
            bytes_per_s=size_bytes / took_s,
            cpu_s_per_1000=1000 * cpu_s / samples,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Images:
    """A batch in memory, and how it is decoded."""

    batch: EncodedBatch
    batch_size: int
    device: str
    threads: int
    seconds: float

    def rate(self, recipe: CheckedRecipe, *, constant: bool = False) -> Rate:
        """Runs of the batch through a graph, one in work and one behind it."""
        kind, _, number = self.device.partition(":")
        graph = Graph(
            recipe,
            batch_size=self.batch_size,
            threads=self.threads,
            device=kind,
            device_id=int(number) if number else None,
            constant_decode=constant,
        )
        try:
            few = self._first(graph, recipe)
            clock, epochs = _Clock(self.seconds), itertools.count()
            while not clock.is_over:
                while graph.in_flight < _FED:
                    self._feed(graph, recipe, few, next(epochs))
                graph.outputs()
                _wait_for(self.device)
                clock.count(len(few.encoded), sum(map(len, few.encoded)))
            return clock.rate()
        finally:
            graph.close()

    def _first(self, graph: Graph, recipe: CheckedRecipe) -> EncodedBatch:
        """A first run, which pays for what is built once; then as many samples a run as fit."""
        for size in (self.threads, 2 * self.threads):
            few = _part(self.batch, size)
            began = time.perf_counter()
            self._feed(graph, recipe, few, 0)
            graph.outputs()
            _wait_for(self.device)
            sample_s = (time.perf_counter() - began) / len(few.encoded)
        return _part(self.batch, max(self.threads, int(self.seconds / _LEAST_RUNS / sample_s)))

    def _feed(self, graph: Graph, recipe: CheckedRecipe, batch: EncodedBatch, epoch: int) -> None:
        draws = draw(recipe, ids=batch.ids, dims=batch.dims, seed=0, epoch=epoch)
        graph.feed(batch, draws)


def _part(batch: EncodedBatch, size: int) -> EncodedBatch:
    if size >= len(batch.encoded):
        return batch
    return replace(
        batch,
        ids=batch.ids[:size],
        encoded=batch.encoded[:size],
        dims=batch.dims[:size],
        columns={},
    )


def _wait_for(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.current_stream().synchronize()


def _copy(batch: EncodedBatch, device: str, seconds: float) -> Rate:
    import torch

    size_bytes = sum(map(len, batch.encoded))
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    clock = _Clock(seconds)
    while not clock.is_over:
        host.to(device, non_blocking=True)
        _wait_for(device)
        clock.count(len(batch.encoded), size_bytes)
    return clock.rate()
