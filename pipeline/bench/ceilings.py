"""Measure the rate that each stage of a batch reaches alone, to compare a run with.

remote: ranges of its objects, fetched and dropped: no cache, no samples, nothing checked. read:
as many threads as the loader has read batches in a shuffled order, and check them; of a remote
dataset those that the cache has by then. decode: encoded samples in memory go through the
recipe's own windows with all sizes divided by 16 and without antialiasing, so that hardly
anything but decoding those windows is left. augment: the same samples through the whole recipe.
python: the same without any decoding: views, draws and the hand-over. copy: encoded bytes from
pinned memory to the GPU, as what crosses the bus.

progressive: what a progressive JPEG of this dataset costs beside a baseline one, on the job's
device. Some of the batch's progressive images are rewritten as baseline ones, without loss, and
both are decoded in turns, in the same windows. Without jpeglib, which rewrites them, the baseline
images of the batch are compared with the progressive ones, pixel by pixel; where there are none,
nothing is reported.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import (
    CenterCrop,
    Decode,
    Graph,
    RandomCrop,
    RandomResizedCrop,
    Resize,
    check_recipe,
    draw,
)
from penstock.cache import ConfigError, MissingDependencyError, Ordered, Workers
from penstock.cache.base import ObjectRange, usable_cores
from penstock.pipeline.feed import MAPPED_READ_THREADS, READ_THREADS
from penstock.pipeline.plan import make_plan, shuffled_settings
from penstock.pipeline.report import BLOCK_BYTES, COLD_SHARE, Ceilings, ProgressiveCost, Rate
from penstock.readers.fields import IMAGE_HEAD_BYTES, is_progressive, sniff
from penstock.readers.packing import baseline_twin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.augment import CheckedRecipe, Operation
    from penstock.readers import Encoded, EncodedBatch, RemoteShards, Source

_FIRST_BYTES, _FIRST_COUNT = 16 << 10, 64  # what hardly any remote takes long for


def raw_remote(dataset: Source, *, seconds: float) -> Rate | None:
    """The best that a group of requests gave in about so many seconds; None for a local dataset.
    Where several lie end to end, the first remote is asked.

    Requests begin small and grow, in bytes and in number, while they are answered quickly: up to
    the loader's own ranges (8 MiB), or the objects. Raises FetchError.
    """
    remote, contents = dataset.remote_shards, dataset.contents
    if remote is None:
        return None
    fetcher, best, size, count = remote.remotes[0].fetcher, None, _FIRST_BYTES, _FIRST_COUNT
    until = time.perf_counter() + seconds
    sample_bytes = float(contents.shard_bytes.sum()) / contents.samples
    while best is None or time.perf_counter() < until:
        spans = list(islice(_spans(remote, len(contents.sizes), size), count))
        began, cpu_s = time.perf_counter(), time.process_time()
        fetcher.fetch(spans, _drop)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        got = sum(span.end - span.start for span in spans)
        rate = Rate(
            samples_per_s=got / sample_bytes / took_s,
            bytes_per_s=got / took_s,
            cpu_s_per_1000=1000 * cpu_s * sample_bytes / got,
        )
        if best is None or rate.bytes_per_s > best.bytes_per_s:
            best = rate
        if took_s < seconds / 4:
            size = min(2 * size, fetcher.policy.range_bytes)
            count = min(2 * count, fetcher.policy.max_connections)
    return best


def _spans(remote: RemoteShards, shards: int, size_bytes: int) -> Iterator[ObjectRange]:
    """Ranges of one shard of the first remote after the other, over and over."""
    for shard in cycle(range(shards)):
        found = remote.find(shard)
        for segment in found[1].segments if found and found[0] is remote.remotes[0] else ():
            for start in range(0, segment.size_bytes, size_bytes):
                yield ObjectRange(
                    path=segment.path,
                    start=segment.start + start,
                    end=segment.start + min(start + size_bytes, segment.size_bytes),
                    version=segment.version,
                )


def _drop(_number: int, _answer: object) -> None:
    """The bytes aren't for keeping."""


TURNS = 2  # of stages that are measured beside one another
_FED = 2  # runs in flight, as in the loader
# Memory that a graph touches for the first time costs as much as a tenth of the work.
_WARM_RUNS = 3
_SETTLE_SHARE = 0.25  # of the time, before counting begins
_LEAST_RUNS = 3 * TURNS  # in the time; images too large for that come in smaller runs


class Clock:
    """Counts what comes in so many seconds. marks: time, CPU time, samples, bytes; from the start
    on."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.marks = [(time.perf_counter(), time.process_time(), 0, 0)]
        self.is_over = False

    def count(self, samples: int, size_bytes: int) -> None:
        now = time.perf_counter()
        self.marks.append((now, time.process_time(), samples, size_bytes))
        # Two at least: of runs the first one is what a rate begins at.
        self.is_over = now - self.marks[0][0] >= self._seconds and len(self.marks) > 2

    def settled(self) -> Usage:
        """From the last mark of the settling part on; from the start where that has none, as
        batches that were read together come together."""
        until = self.marks[0][0] + _SETTLE_SHARE * self._seconds
        return self.spent(sum(mark[0] <= until for mark in self.marks[:-1]) - 1)

    def spent(self, first: int) -> Usage:
        """Return the seconds, CPU seconds, samples and bytes between a mark and the last one."""
        begin, rest = self.marks[first], self.marks[first + 1 :]
        return Usage(
            seconds=rest[-1][0] - begin[0],
            cpu_s=rest[-1][1] - begin[1],
            samples=sum(mark[2] for mark in rest),
            bytes=sum(mark[3] for mark in rest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Time that samples took."""

    seconds: float
    cpu_s: float
    samples: int
    bytes: int


def rate_of(parts: Sequence[Usage]) -> Rate:
    """The rate over all parts."""
    seconds, samples = sum(part.seconds for part in parts), sum(part.samples for part in parts)
    return Rate(
        samples_per_s=samples / seconds,
        bytes_per_s=sum(part.bytes for part in parts) / seconds,
        cpu_s_per_1000=1000 * sum(part.cpu_s for part in parts) / samples,
    )


class RecipeTimer:
    """Times a recipe on a batch in memory: one run in work and one behind it, as in the loader."""

    def __init__(self, recipe: CheckedRecipe, *, constant: bool = False) -> None:
        self._recipe, self._constant = recipe, constant
        self._clocks: list[Clock] = []
        self._epochs = itertools.count()

    def open(
        self, batch: EncodedBatch, *, device: str, threads: int, seconds: float, whole: bool = False
    ) -> None:
        """Build the graph, pay for what is built at the first run, and see how many samples a run
        may have for some of them to fit into the seconds. whole: a run has all of them."""
        kind, _, number = device.partition(":")
        self._device = device
        self._graph = Graph(
            self._recipe,
            batch_size=len(batch.encoded),
            threads=threads,
            device=kind,
            device_id=int(number) if number else None,
            constant_decode=self._constant,
        )
        for size in (threads, 2 * threads):
            self._few = first_of(batch, size)
            began = time.perf_counter()
            self._feed()
            self._collect()
            sample_s = (time.perf_counter() - began) / len(self._few.encoded)
        fitting = max(threads, int(seconds / _LEAST_RUNS / sample_s))
        self._few = batch if whole else first_of(batch, fitting)
        for _ in range(_WARM_RUNS):
            while self._graph.in_flight < _FED:
                self._feed()
            self._collect()
        self._graph.drain()

    def play(self, seconds: float) -> None:
        """Run for so long, and note the runs."""
        clock = Clock(seconds)
        self._clocks.append(clock)
        while not clock.is_over:
            while self._graph.in_flight < _FED:
                self._feed()
            self._collect()
            clock.count(len(self._few.encoded), sum(map(len, self._few.encoded)))
        self._graph.drain()

    def rate(self) -> Rate:
        """The rate over all that was played, from the first run of each turn on."""
        return rate_of([clock.spent(1) for clock in self._clocks])

    def close(self) -> None:
        self._graph.close()

    def _feed(self) -> None:
        draws = draw(
            self._recipe, ids=self._few.ids, dims=self._few.dims, seed=0, epoch=next(self._epochs)
        )
        self._graph.feed(self._few, draws)

    def _collect(self) -> None:
        self._graph.outputs()
        wait_for(self._device)


def first_of(batch: EncodedBatch, size: int) -> EncodedBatch:
    """So many samples of a batch, or all."""
    return batch if size >= len(batch.encoded) else some_of(batch, range(size))


def some_of(batch: EncodedBatch, rows: Sequence[int]) -> EncodedBatch:
    """These samples of a batch."""
    return replace(
        batch,
        ids=batch.ids[list(rows)],
        encoded=[batch.encoded[row] for row in rows],
        dims=batch.dims[list(rows)],
    )


def play_in_turns(stages: Sequence[RecipeTimer], seconds: float) -> list[Rate]:
    """Measure the opened stages in turns, so that other work of the machine slows all of them
    alike."""
    for _ in range(TURNS):
        for stage in stages:
            stage.play(seconds / TURNS)
    return [stage.rate() for stage in stages]


def wait_for(device: str) -> None:
    """Wait until a GPU has done what was asked of it."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.current_stream().synchronize()


# Rewriting takes a third of a second for so many pixels; a few images tell the ratio.
_MOST_PIXELS = 2**24
_MOST_IMAGES = 16
_LEAST_NEIGHBOURS = 4  # of each kind: images of a set differ


def progressive_cost(
    batch: EncodedBatch, recipe: CheckedRecipe, *, device: str, threads: int, seconds: float
) -> ProgressiveCost | None:
    """Decode some for about `seconds` each. None where the batch has none, or nothing to compare.

    recipe: hardly more than decoding. Raises what decoding raises.
    """
    kinds = [_kind(sample) for sample in batch.encoded]
    progressive = _few(batch, [row for row, kind in enumerate(kinds) if kind == "progressive"])
    if not progressive:
        return None
    pairs = _twins(batch, progressive)
    if pairs is not None:
        return _compared(
            *pairs, recipe, of_twins=True, device=device, threads=threads, seconds=seconds
        )
    neighbours = _few(batch, [row for row, kind in enumerate(kinds) if kind == "baseline"])
    if min(len(progressive), len(neighbours)) < _LEAST_NEIGHBOURS:
        return None
    return _compared(
        some_of(batch, progressive),
        some_of(batch, neighbours),
        recipe,
        of_twins=False,
        device=device,
        threads=threads,
        seconds=seconds,
    )


def _kind(sample: Encoded) -> str:
    if sniff(bytes(sample[:IMAGE_HEAD_BYTES])) != "jpeg":
        return "other"
    return "progressive" if is_progressive(sample) else "baseline"


def _few(batch: EncodedBatch, rows: Sequence[int]) -> list[int]:
    """Return as many of them as may be rewritten; at least one, if there is any."""
    taken: list[int] = []
    pixels = 0
    for row in rows[:_MOST_IMAGES]:
        height, width = batch.dims[row].tolist()
        pixels += height * width
        if taken and pixels > _MOST_PIXELS:
            break
        taken.append(row)
    return taken


def _twins(batch: EncodedBatch, rows: Sequence[int]) -> tuple[EncodedBatch, EncodedBatch] | None:
    """Progressive images and the same as baseline ones; None where none can be rewritten."""
    try:
        found = [
            (row, twin) for row in rows if (twin := baseline_twin(batch.encoded[row])) is not None
        ]
    except MissingDependencyError:
        return None
    if not found:
        return None
    these = some_of(batch, [row for row, _ in found])
    return these, replace(these, encoded=[twin for _, twin in found])


def _compared(
    progressive: EncodedBatch,
    baseline: EncodedBatch,
    recipe: CheckedRecipe,
    *,
    of_twins: bool,
    device: str,
    threads: int,
    seconds: float,
) -> ProgressiveCost:
    with contextlib.ExitStack() as open_ones:
        stages = []
        for batch in (progressive, baseline):
            stages.append(RecipeTimer(recipe))
            stages[-1].open(batch, device=device, threads=threads, seconds=seconds, whole=True)
            open_ones.callback(stages[-1].close)
        rates = play_in_turns(stages, seconds)
    costs = [
        _cost(rate, device) / _mean_pixels(batch)
        for rate, batch in zip(rates, (progressive, baseline), strict=True)
    ]
    return ProgressiveCost(
        times=costs[0] / costs[1], images=len(progressive.encoded), of_twins=of_twins
    )


def _mean_pixels(batch: EncodedBatch) -> float:
    return float(np.prod(batch.dims, axis=1, dtype=np.int64).mean())


def _cost(rate: Rate, device: str) -> float:
    """Return the cost per 1,000 samples. On a busy machine CPU time varies less than elapsed
    time."""
    return rate.cpu_s_per_1000 if device == "cpu" else 1000 / rate.samples_per_s


_SHRINK = 16  # a 224 crop becomes 14 x 14: a two-hundredth of the pixels to resize
_CHECKED_SHARDS = 4096  # shards, whether they are in the cache
_FEW = 8  # samples a thread, where they must be fetched


def measure_ceilings(
    dataset: Source,
    image: tuple[str, CheckedRecipe] | None,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int = 0,
    seconds: float = 0.5,
    seed: int = 0,
) -> Ceilings:
    """Measure reading, decoding, augmenting, the copy and Python's part, each for about `seconds`.

    image: the field of images that is decoded, and its recipe (of several fields: one call for
    each, and `joined_ceilings`); None without images. threads: that decode, 0: all usable cores.
    seed: of the order that is read in. The dataset stays open. Call it when nothing else of this
    process runs. Raises ConfigError for numbers that can't be, and what reading and decoding raise.
    """
    if batch_size < 1 or threads < 0 or seconds <= 0:
        raise ConfigError(
            f"measure_ceilings: got batch_size={batch_size}, threads={threads}, seconds={seconds}; "
            "wanted a batch of 1 or more, threads of 0 or more and seconds above 0."
        )
    remote = raw_remote(dataset, seconds=seconds)
    near = _cached_shards(dataset)
    rows = _rows(dataset, batch_size, seed=seed, near=near)
    read, is_cold = _read(dataset, rows, seconds) if near is None or near.any() else (None, False)
    if image is None:
        return Ceilings(remote=remote, read=read, is_cold=is_cold)
    field, recipe = image
    threads = threads or usable_cores()
    # From a remote only as few as it takes.
    some = next(rows) if read is not None else next(rows)[: _FEW * threads]
    batch, share = _images(dataset, field, some)
    if batch is None:
        return Ceilings(remote=remote, read=read, is_cold=is_cold)
    bare = check_recipe(without_augmenting(recipe.ops), images=dataset.contents.images[field])
    stages = [RecipeTimer(bare), RecipeTimer(recipe), RecipeTimer(recipe, constant=True)]
    with contextlib.ExitStack() as open_ones:
        for stage in stages:
            stage.open(batch, device=device, threads=threads, seconds=seconds)
            open_ones.callback(stage.close)
        decode, augment, python = (
            _scaled_rate(rate, share) for rate in play_in_turns(stages, seconds)
        )
    return Ceilings(
        device=device,
        remote=remote,
        read=read,
        is_cold=is_cold,
        decode=decode,
        augment=augment,
        copy=_copy(batch, device, seconds) if device.startswith("cuda") else None,
        python=python,
        progressive=progressive_cost(batch, bare, device=device, threads=threads, seconds=seconds),
    )


def _images(
    dataset: Source, field: str, rows: NDArray[np.int64]
) -> tuple[EncodedBatch | None, float]:
    """The images that some rows have, None without any, and the share of the rows that have one."""
    found = dataset.values(field, rows)
    there = [row for row, image in enumerate(found.encoded(field).encoded) if len(image)]
    return (found.take(there).encoded(field) if there else None), len(there) / max(1, len(rows))


def _scaled_rate(rate: Rate, share: float) -> Rate:
    """A rate by samples, of which this share has an image."""
    return Rate(
        samples_per_s=rate.samples_per_s / share,
        bytes_per_s=rate.bytes_per_s,
        cpu_s_per_1000=rate.cpu_s_per_1000 * share,
    )


def joined_ceilings(fields: Sequence[Ceilings]) -> Ceilings:
    """Join the ceilings of a sample's image fields. fields: the ceilings of each, at least one."""
    first = fields[0]
    return replace(
        first,
        decode=_rate_in_sequence([each.decode for each in fields]),
        augment=_rate_in_sequence([each.augment for each in fields]),
        copy=_rate_in_sequence([each.copy for each in fields]),
        python=_rate_in_sequence([each.python for each in fields]),
    )


def _rate_in_sequence(rates: Sequence[Rate | None]) -> Rate | None:
    """The rate of pieces of work that each sample takes one after the other."""
    known = [rate for rate in rates if rate is not None]
    if len(known) <= 1:
        return known[0] if known else None
    samples_per_s = 1 / sum(1 / rate.samples_per_s for rate in known)
    return Rate(
        samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * sum(rate.bytes_per_s / rate.samples_per_s for rate in known),
        cpu_s_per_1000=sum(rate.cpu_s_per_1000 for rate in known),
    )


def without_augmenting(ops: tuple[Operation, ...]) -> list[Operation]:
    """The recipe's windows, with hardly any pixels to resize to, and nothing behind them."""
    resizes = any(isinstance(op, Resize | RandomResizedCrop) for op in ops)
    bare: list[Operation] = []
    for op in ops:
        if isinstance(op, Resize | RandomResizedCrop):
            bare.append(replace(op, size=_smaller(op.size), antialias=False))
        elif isinstance(op, CenterCrop | RandomCrop):
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


def _cached_shards(dataset: Source) -> NDArray[np.bool_] | None:
    """Which shards of a remote dataset are in the cache, of so many; None for a local one."""
    remote = dataset.remote_shards
    if remote is None:
        return None
    near = np.zeros(len(dataset.contents.sizes), np.bool_)
    for shard in range(min(_CHECKED_SHARDS, len(near))):
        near[shard] = remote.is_whole(shard)
    return near


def _rows(
    dataset: Source, batch_size: int, *, seed: int, near: NDArray[np.bool_] | None
) -> Iterator[NDArray[np.int64]]:
    """(shard, row) of batch after batch, as a job of this seed would walk them, without an end.

    near: shards to take samples of, where any is.
    """
    contents = dataset.contents
    plan = make_plan(contents, shuffled_settings(contents, seed=seed, global_batch=batch_size))
    for epoch in itertools.count(1):  # the run itself has had epoch 0 in memory lately
        for position in range(0, contents.samples, batch_size):
            rows = plan.batch(epoch, position, batch_size)
            if near is not None and near.any():
                rows = rows[near[rows[:, 0]]]
            if len(rows):
                yield rows


def _read(dataset: Source, rows: Iterator[NDArray[np.int64]], seconds: float) -> tuple[Rate, bool]:
    """Measure reading, and whether it waited for the disk."""
    is_mapped = not dataset.contents.is_file_per_sample
    workers = MAPPED_READ_THREADS if is_mapped else READ_THREADS
    blocks = _blocks()

    def read(some: NDArray[np.int64]) -> tuple[int, int]:
        read = dataset.read(some)
        return len(read), read.bytes_read

    pool = Workers(workers, name="ceiling")
    stream = Ordered(read, rows, pool=pool, ahead=2 * workers)
    clock = Clock(seconds)
    try:
        while not clock.is_over:
            clock.count(*next(stream))
        rate = rate_of([clock.settled()])
    finally:
        stream.close()
        pool.close()
    read_bytes = sum(mark[3] for mark in clock.marks)
    is_cold = (_blocks() - blocks) * BLOCK_BYTES > COLD_SHARE * read_bytes
    return rate, is_cold


def _blocks() -> int:
    """Blocks that this process has had to read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _copy(batch: EncodedBatch, device: str, seconds: float) -> Rate:
    import torch

    size_bytes = sum(map(len, batch.encoded))
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    clock = Clock(seconds)
    while not clock.is_over:
        host.to(device, non_blocking=True)
        wait_for(device)
        clock.count(len(batch.encoded), size_bytes)
    return rate_of([clock.settled()])
