"""Measure the rate that each stage of a batch reaches on its own, as the ceiling of a run.

- remote: fetch ranges of the dataset's objects and drop them, without cache, samples or checks.
- read: read batches in a shuffled order and check them, with as many threads as the loader has. Of
  a remote dataset only the cached shards are read.
- decode: decode samples that are in memory. The recipe's windows stay, but all output sizes are
  divided by 16 and antialiasing is off, so that hardly any work but decoding is left.
- augment: decode and augment the same samples by the whole recipe.
- python: run the same graph without decoding; what remains are views, draws and the feeding.
- copy: copy the encoded bytes from pinned memory to the GPU.

`progressive_cost` compares progressive JPEGs of the dataset with baseline ones on the job's device.
It rewrites some progressive images of the batch as baseline images without loss, and decodes both
in turns, in the same windows. Without jpeglib, which rewrites them, it compares the batch's own
progressive and baseline images by cost per pixel, if the batch has both.
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
    FixedCrop,
    GeometricOperation,
    Graph,
    GraphPlan,
    Stage,
    check_recipe,
    draw,
)
from penstock.cache import ConfigError, MissingDependencyError, Ordered, Workers
from penstock.cache.base import ObjectRange, usable_cores
from penstock.pipeline.feed import MAPPED_READ_THREADS, READ_THREADS
from penstock.pipeline.options import parse_device
from penstock.pipeline.plan import make_plan, shuffled_settings
from penstock.pipeline.report import BLOCK_BYTES, COLD_SHARE, Ceilings, ProgressiveCost, Rate
from penstock.readers.fieldtypes import IMAGE_HEAD_BYTES, is_progressive, sniff
from penstock.readers.packing import baseline_twin

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from penstock.augment import CheckedRecipe, Operation
    from penstock.readers import Encoded, EncodedBatch, RemoteShards, Source

_FIRST_BYTES, _FIRST_COUNT = 16 << 10, 64  # fast on almost any remote


def raw_remote(dataset: Source, *, seconds: float) -> Rate | None:
    """Return the best rate of a group of requests in about `seconds`; None for a local dataset.

    Of several concatenated datasets, only the first remote is measured. Requests start small; while
    they finish quickly, they grow in size and number, up to the loader's own ranges (8 MiB) or
    whole objects. Raises FetchError.
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
    """Yield ranges of the first remote's shards, one shard after the other, endlessly."""
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
    """Drop an answer."""


TURNS = 2  # of stages that are measured in turns
_FED = 2  # runs in flight, as in the loader
# The first touch of a graph's memory costs up to a tenth of the work.
_WARM_RUNS = 3
_SETTLE_SHARE = 0.25  # of the time, before counting begins
_LEAST_RUNS = 3 * TURNS  # in the given time; large images get smaller runs


class RateClock:
    """Counts samples and bytes for so many seconds.

    marks: (time, CPU time, samples, bytes) of each count; the first mark is the start.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.marks = [(time.perf_counter(), time.process_time(), 0, 0)]
        self.is_over = False

    def count(self, samples: int, size_bytes: int) -> None:
        now = time.perf_counter()
        self.marks.append((now, time.process_time(), samples, size_bytes))
        # At least two counts: the rate of a graph's runs starts at the first one.
        self.is_over = now - self.marks[0][0] >= self._seconds and len(self.marks) > 2

    def settled(self) -> Usage:
        """Return the usage since the last mark of the settling part, or since the start if the
        settling part has no mark: batches that were read together arrive together."""
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
    """The time, the CPU time, the samples and the bytes of a part of a measurement."""

    seconds: float
    cpu_s: float
    samples: int
    bytes: int


def rate_of(parts: Sequence[Usage]) -> Rate:
    """Compute the rate over all parts."""
    seconds, samples = sum(part.seconds for part in parts), sum(part.samples for part in parts)
    return Rate(
        samples_per_s=samples / seconds,
        bytes_per_s=sum(part.bytes for part in parts) / seconds,
        cpu_s_per_1000=1000 * sum(part.cpu_s for part in parts) / samples,
    )


class RecipeTimer:
    """Times a recipe on a batch in memory, with two runs in flight, as in the loader."""

    def __init__(self, recipe: CheckedRecipe, *, constant: bool = False) -> None:
        self._recipe, self._constant = recipe, constant
        self._clocks: list[RateClock] = []
        self._epochs = itertools.count()

    def open(
        self, batch: EncodedBatch, *, device: str, threads: int, seconds: float, whole: bool = False
    ) -> None:
        """Build the graph, run it until its memory is allocated, and choose the number of samples
        of a run so that several runs fit into `seconds`. whole: a run has the whole batch."""
        self._device = device
        plan = GraphPlan(
            self._recipe,
            batch_size=len(batch.encoded),
            threads=threads,
            device_id=parse_device(device).index,
            constant=self._constant,
        )
        self._graph = Graph(plan)
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
        """Run the recipe for `seconds` and count its samples."""
        clock = RateClock(seconds)
        self._clocks.append(clock)
        while not clock.is_over:
            while self._graph.in_flight < _FED:
                self._feed()
            self._collect()
            clock.count(len(self._few.encoded), sum(map(len, self._few.encoded)))
        self._graph.drain()

    def rate(self) -> Rate:
        """Return the rate over all turns, each counted from its first run."""
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
    """Return the first `size` samples of a batch, or all."""
    return batch if size >= len(batch.encoded) else some_of(batch, range(size))


def some_of(batch: EncodedBatch, rows: Sequence[int]) -> EncodedBatch:
    """Return some samples of a batch."""
    return replace(
        batch,
        ids=batch.ids[list(rows)],
        encoded=[batch.encoded[row] for row in rows],
        dims=batch.dims[list(rows)],
    )


def play_in_turns(stages: Sequence[RecipeTimer], seconds: float) -> list[Rate]:
    """Measure opened stages in turns, so that other load on the machine slows them equally."""
    for _ in range(TURNS):
        for stage in stages:
            stage.play(seconds / TURNS)
    return [stage.rate() for stage in stages]


def wait_for(device: str) -> None:
    """Wait until the GPU's current stream is idle; on the CPU, return at once."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.current_stream().synchronize()


# Rewriting this many pixels takes a third of a second; a few images are enough for the ratio.
_MOST_PIXELS = 2**24
_MOST_IMAGES = 16
_LEAST_NEIGHBOURS = 4  # of each kind: images of a set differ


def progressive_cost(
    batch: EncodedBatch, recipe: CheckedRecipe, *, device: str, threads: int, seconds: float
) -> ProgressiveCost | None:
    """Decode progressive and baseline images for about `seconds` and return the ratio of costs.

    recipe: decodes, with as little other work as possible. Returns None if the batch has no
    progressive image, or nothing to compare with. Raises what decoding raises.
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
    """Limit the rows to the number and pixels that may be rewritten, but keep at least one."""
    kept: list[int] = []
    pixels = 0
    for row in rows[:_MOST_IMAGES]:
        height, width = batch.dims[row].tolist()
        pixels += height * width
        if kept and pixels > _MOST_PIXELS:
            break
        kept.append(row)
    return kept


def _twins(batch: EncodedBatch, rows: Sequence[int]) -> tuple[EncodedBatch, EncodedBatch] | None:
    """Return progressive images and their baseline copies; None if none can be rewritten."""
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
_CHECKED_SHARDS = 4096  # the most shards that are looked up in the cache
_FEW = 8  # samples per thread, if they must be fetched


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

    image: the field of images to decode, and its recipe; None without images. For several fields,
    call it once for each and use `joined_ceilings`. threads: decode threads; 0: all usable cores.
    seed: of the order of reading. The dataset stays open. Nothing else of this process may run at
    the same time. Raises ConfigError for numbers out of range, and what reading and decoding raise.
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
    # Fetch only a few samples from a remote.
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
    """Return the images of some rows, None without any, and the share of rows that have one."""
    found = dataset.values(field, rows)
    there = [row for row, image in enumerate(found.encoded(field).encoded) if len(image)]
    return (found.take(there).encoded(field) if there else None), len(there) / max(1, len(rows))


def _scaled_rate(rate: Rate, share: float) -> Rate:
    """Convert a rate of images to one of samples, of which this share has an image."""
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
    """Return the rate of stages that each sample passes one after the other."""
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
    """Return the recipe's decoding and windows with tiny output sizes, and no later operation."""
    bare: list[Operation] = []
    is_behind = False
    for op in ops:
        changed: Any = op
        if isinstance(op, GeometricOperation) and op.resize is not None:
            changed = replace(changed, size=_smaller(changed.size), antialias=False)
            is_behind = True
        elif isinstance(op, FixedCrop) and is_behind:
            # Before a resize, a crop is the window to decode; without a resize it is the output.
            changed = replace(changed, size=_smaller(changed.size))
        elif not isinstance(op, FixedCrop) and op.stage is not Stage.DECODE:
            continue
        bare.append(changed)
    return bare


def _smaller(size: Any) -> Any:
    if isinstance(size, int):
        return max(1, size // _SHRINK)
    return tuple(max(1, side // _SHRINK) for side in size)


def _cached_shards(dataset: Source) -> NDArray[np.bool_] | None:
    """Return a mask of the shards that the cache holds as a whole, of the first _CHECKED_SHARDS
    shards of a remote dataset; None for a local one."""
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
    """Yield the (shard, row) pairs of batch after batch in the order of a job, endlessly.

    near: a mask of the shards to read; None or all False reads every shard.
    """
    contents = dataset.contents
    plan = make_plan(contents, shuffled_settings(contents, seed=seed, global_batch=batch_size))
    for epoch in itertools.count(1):  # the run has just read epoch 0
        for position in range(0, contents.samples, batch_size):
            rows = plan.batch(epoch, position, batch_size)
            if near is not None and near.any():
                rows = rows[near[rows[:, 0]]]
            if len(rows):
                yield rows


def _read(dataset: Source, rows: Iterator[NDArray[np.int64]], seconds: float) -> tuple[Rate, bool]:
    """Measure reading, and find out if it waited for the disk."""
    is_mapped = not dataset.contents.is_file_per_sample
    workers = MAPPED_READ_THREADS if is_mapped else READ_THREADS
    blocks = _blocks()

    def read(some: NDArray[np.int64]) -> tuple[int, int]:
        read = dataset.read(some)
        return len(read), read.bytes_read

    pool = Workers(workers, name="ceiling")
    stream = Ordered(read, rows, pool=pool, ahead=2 * workers)
    clock = RateClock(seconds)
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
    """Return the number of blocks that this process has read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


def _copy(batch: EncodedBatch, device: str, seconds: float) -> Rate:
    import torch

    size_bytes = sum(map(len, batch.encoded))
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    clock = RateClock(seconds)
    while not clock.is_over:
        host.to(device, non_blocking=True)
        wait_for(device)
        clock.count(len(batch.encoded), size_bytes)
    return rate_of([clock.settled()])
