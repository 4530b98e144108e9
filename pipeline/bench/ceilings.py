"""Measure the rate that each stage of a batch reaches on its own, as the ceiling of a run.

- remote: fetch ranges of the dataset's objects and drop them, without cache, samples or checks.
- read: read batches in a shuffled order and check them, with as many threads as the loader has. Of
  a remote dataset only the cached shards are read.
- decode: decode samples that are in memory. The recipe's windows stay, but all output sizes are
  divided by 16 and antialiasing is off, so that hardly any work but decoding is left.
- augment: decode and augment the same samples by the whole recipe.
- python: run the same graph without decoding; what remains are views, draws and the feeding.
- copy: copy the encoded bytes from pinned memory to the GPU.

If the batch has progressive JPEGs, some of them are rewritten as baseline ones without loss, and
both are decoded in turns, in the same windows. Without jpeglib, which rewrites them, the batch's
own progressive and baseline images are compared by cost per pixel, if it has both.
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
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.augment import CheckedRecipe, Operation
    from penstock.readers import Encoded, EncodedBatch, RemoteShards, Source

_CHECKED_SHARDS = 4096  # the most shards that are looked up in the cache
_FEW = 8  # samples per thread, if they must be fetched


def measure_ceilings(
    dataset: Source,
    images: Mapping[str, CheckedRecipe],
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int = 0,
    seconds: float = 0.5,
    seed: int = 0,
) -> Ceilings:
    """Measure reading, decoding, augmenting, the copy and Python's part, each for about `seconds`.

    images: the fields of images to decode, each with its recipe. threads: decode threads; 0: all
    usable cores. seed: of the order of reading. The dataset stays open. Nothing else of this
    process may run at the same time. Raises ConfigError for numbers out of range, and what reading
    and decoding raise.
    """
    if batch_size < 1 or threads < 0 or seconds <= 0:
        raise ConfigError(
            f"measure_ceilings: got batch_size={batch_size}, threads={threads}, seconds={seconds}; "
            "wanted a batch of 1 or more, threads of 0 or more and seconds above 0."
        )
    remote = _raw_remote(dataset, seconds=seconds)
    near = _cached_shards(dataset)
    rows = _rows(dataset, batch_size, seed=seed, near=near)
    read, is_cold = _read(dataset, rows, seconds) if near is None or near.any() else (None, False)
    found = Ceilings(remote=remote, read=read, is_cold=is_cold)
    if not images:
        return found
    threads = threads or usable_cores()
    # Fetch only a few samples from a remote.
    some = next(rows) if read is not None else next(rows)[: _FEW * threads]
    stages = ImageStages(device=device, threads=threads, seconds=seconds / len(images))
    fields = []
    for field, recipe in images.items():
        columns = dataset.values(field, some)
        there = [row for row, image in enumerate(columns.encoded(field).encoded) if len(image)]
        if there:
            bare = without_augmenting(recipe.ops)
            checked = check_recipe(bare, images=dataset.contents.images[field])
            batch, share = columns.take(there).encoded(field), len(there) / len(some)
            fields.append(stages.measure(batch, recipe, checked, share=share))
    if not fields:
        return found
    return replace(
        fields[0],
        remote=remote,
        read=read,
        is_cold=is_cold,
        decode=rate_in_sequence([each.decode for each in fields]),
        augment=rate_in_sequence([each.augment for each in fields]),
        copy=rate_in_sequence([each.copy for each in fields]),
        python=rate_in_sequence([each.python for each in fields]),
    )


def rate_in_sequence(rates: Sequence[Rate | None]) -> Rate | None:
    """Return the rate of stages that each sample passes one after the other, as those of several
    fields."""
    known = [rate for rate in rates if rate is not None]
    if len(known) <= 1:
        return known[0] if known else None
    samples_per_s = 1 / sum(1 / rate.samples_per_s for rate in known)
    return Rate(
        samples_per_s=samples_per_s,
        bytes_per_s=samples_per_s * sum(rate.bytes_per_s / rate.samples_per_s for rate in known),
        cpu_s_per_1000=sum(rate.cpu_s_per_1000 for rate in known),
    )


_FIRST_BYTES, _FIRST_COUNT = 16 << 10, 64  # fast on almost any remote


def _raw_remote(dataset: Source, *, seconds: float) -> Rate | None:
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
        fetcher.fetch(spans, lambda _number, _answer: None)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        got = sum(span.end - span.start for span in spans)
        rate = _rate(took_s, cpu_s, got / sample_bytes, got)
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
    clock = _RateClock(seconds)
    try:
        while not clock.is_over:
            clock.count(*next(stream))
    finally:
        stream.close()
        pool.close()
    is_cold = (_blocks() - blocks) * BLOCK_BYTES > COLD_SHARE * clock.spent(0)[3]
    return _rate(*clock.settled()), is_cold


def _blocks() -> int:
    """Return the number of blocks that this process has read from disks."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock


_SETTLE_SHARE = 0.25  # of the time, before counting begins


class _RateClock:
    """Counts samples and bytes for so many seconds.

    marks: time, CPU time, samples and bytes so far at the start and at each count.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.marks = [(time.perf_counter(), time.process_time(), 0, 0)]
        self.is_over = False

    def count(self, samples: int, size_bytes: int) -> None:
        now, (_, _, samples_before, bytes_before) = time.perf_counter(), self.marks[-1]
        self.marks.append(
            (now, time.process_time(), samples_before + samples, bytes_before + size_bytes)
        )
        # At least two counts: the rate of a graph's runs starts at the first one.
        self.is_over = now - self.marks[0][0] >= self._seconds and len(self.marks) > 2

    def settled(self) -> NDArray[np.float64]:
        """Return what was spent since the last mark of the settling part, or since the start if the
        settling part has no mark: batches that were read together arrive together."""
        until = self.marks[0][0] + _SETTLE_SHARE * self._seconds
        return self.spent(sum(mark[0] <= until for mark in self.marks[:-1]) - 1)

    def spent(self, first: int) -> NDArray[np.float64]:
        """Return the seconds, CPU seconds, samples and bytes between a mark and the last one."""
        return np.array(self.marks[-1], np.float64) - np.array(self.marks[first], np.float64)


def _rate(seconds: float, cpu_s: float, samples: float, size_bytes: float) -> Rate:
    return Rate(
        samples_per_s=float(samples / seconds),
        bytes_per_s=float(size_bytes / seconds),
        cpu_s_per_1000=float(1000 * cpu_s / samples),
    )


_TURNS = 2  # of stages that are measured in turns
_FED = 2  # runs in flight, as in the loader
# The first touch of a graph's memory costs up to a tenth of the work.
_WARM_RUNS = 3
_LEAST_RUNS = 3 * _TURNS  # in the given time; large images get smaller runs
# Rewriting this many pixels takes a third of a second; a few images are enough for the ratio.
_MOST_PIXELS = 2**24
_MOST_IMAGES = 16
_LEAST_NEIGHBOURS = 4  # of each kind: images of a set differ


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageStages:
    """Measures the stages of images that are in memory, each for about `seconds`."""

    device: str
    threads: int
    seconds: float

    def measure(
        self, batch: EncodedBatch, recipe: CheckedRecipe, bare: CheckedRecipe, *, share: float
    ) -> Ceilings:
        """Measure the stages of one field. bare: the recipe `without_augmenting`. share: of the
        samples that have an image."""
        timers = [
            _RecipeTimer(bare, batch, self),
            _RecipeTimer(recipe, batch, self),
            _RecipeTimer(recipe, batch, self, constant=True),
        ]
        decode, augment, python = (
            # Convert a rate of images to one of samples.
            replace(
                rate,
                samples_per_s=rate.samples_per_s / share,
                cpu_s_per_1000=rate.cpu_s_per_1000 * share,
            )
            for rate in self._play_in_turns(timers)
        )
        return Ceilings(
            device=self.device,
            decode=decode,
            augment=augment,
            copy=self._copy(batch) if self.device.startswith("cuda") else None,
            python=python,
            progressive=self._progressive_cost(batch, bare),
        )

    def wait(self) -> None:
        """Wait until the GPU's current stream is idle; on the CPU, return at once."""
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.current_stream().synchronize()

    def _play_in_turns(self, timers: Sequence[_RecipeTimer]) -> list[Rate]:
        """Measure recipes in turns, so that other load on the machine slows them equally."""
        with contextlib.ExitStack() as opened:
            for timer in timers:
                timer.open()
                opened.callback(timer.close)
            for _ in range(_TURNS):
                for timer in timers:
                    timer.play(self.seconds / _TURNS)
            return [_rate(*timer.spent) for timer in timers]

    def _copy(self, batch: EncodedBatch) -> Rate:
        import torch

        size_bytes = sum(map(len, batch.encoded))
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        clock = _RateClock(self.seconds)
        while not clock.is_over:
            host.to(self.device, non_blocking=True)
            self.wait()
            clock.count(len(batch.encoded), size_bytes)
        return _rate(*clock.settled())

    def _progressive_cost(self, batch: EncodedBatch, bare: CheckedRecipe) -> ProgressiveCost | None:
        """Decode progressive and baseline images and return the ratio of costs; None if the batch
        has no progressive image, or nothing to compare with."""
        kinds = [_kind(sample) for sample in batch.encoded]
        rows = {
            kind: _few(batch, [row for row, each in enumerate(kinds) if each == kind])
            for kind in ("progressive", "baseline")
        }
        if not rows["progressive"]:
            return None
        pair = _twins(batch, rows["progressive"])
        of_twins = pair is not None
        if pair is None:
            if min(map(len, rows.values())) < _LEAST_NEIGHBOURS:
                return None
            pair = _some_of(batch, rows["progressive"]), _some_of(batch, rows["baseline"])
        timers = [_RecipeTimer(bare, each, self, whole=True) for each in pair]
        progressive, baseline = (
            # On a busy machine CPU time varies less than elapsed time.
            (rate.cpu_s_per_1000 if self.device == "cpu" else 1000 / rate.samples_per_s)
            / float(np.prod(each.dims, axis=1, dtype=np.int64).mean())
            for rate, each in zip(self._play_in_turns(timers), pair, strict=True)
        )
        return ProgressiveCost(
            times=progressive / baseline, images=len(pair[0].encoded), of_twins=of_twins
        )


class _RecipeTimer:
    """Times a recipe on a batch in memory, with two runs in flight, as in the loader.

    constant: the graph gets constant pixels instead of decoding. whole: a run has the whole batch,
    not as many samples as let several runs fit into the time. spent: the seconds, CPU seconds,
    samples and bytes of all turns, each counted from its first run.
    """

    def __init__(
        self,
        recipe: CheckedRecipe,
        batch: EncodedBatch,
        stages: ImageStages,
        *,
        constant: bool = False,
        whole: bool = False,
    ) -> None:
        self._recipe, self._batch, self._stages = recipe, batch, stages
        self._constant, self._whole = constant, whole
        self._epochs = itertools.count()
        self.spent = np.zeros(4)

    def open(self) -> None:
        """Build the graph, run it until its memory is allocated, and choose the number of samples
        of a run."""
        threads = self._stages.threads
        plan = GraphPlan(
            self._recipe,
            batch_size=len(self._batch.encoded),
            threads=threads,
            device_id=parse_device(self._stages.device).index,
            constant=self._constant,
        )
        self._graph = Graph(plan)
        for size in (threads, 2 * threads):
            self._few = _first_of(self._batch, size)
            began = time.perf_counter()
            self._feed()
            self._collect()
            sample_s = (time.perf_counter() - began) / len(self._few.encoded)
        fitting = max(threads, int(self._stages.seconds / _LEAST_RUNS / sample_s))
        self._few = self._batch if self._whole else _first_of(self._batch, fitting)
        for _ in range(_WARM_RUNS):
            self._run()
        self._graph.drain()

    def play(self, seconds: float) -> None:
        """Run the recipe for `seconds` and count its samples."""
        clock = _RateClock(seconds)
        while not clock.is_over:
            self._run()
            clock.count(len(self._few.encoded), sum(map(len, self._few.encoded)))
        self._graph.drain()
        self.spent += clock.spent(1)

    def close(self) -> None:
        self._graph.close()

    def _run(self) -> None:
        while self._graph.in_flight < _FED:
            self._feed()
        self._collect()

    def _feed(self) -> None:
        draws = draw(
            self._recipe, ids=self._few.ids, dims=self._few.dims, seed=0, epoch=next(self._epochs)
        )
        self._graph.feed(self._few, draws)

    def _collect(self) -> None:
        self._graph.outputs()
        self._stages.wait()


def _first_of(batch: EncodedBatch, size: int) -> EncodedBatch:
    """Return the first `size` samples of a batch, or all."""
    return batch if size >= len(batch.encoded) else _some_of(batch, range(size))


def _some_of(batch: EncodedBatch, rows: Sequence[int]) -> EncodedBatch:
    """Return some samples of a batch."""
    return replace(
        batch,
        ids=batch.ids[list(rows)],
        encoded=[batch.encoded[row] for row in rows],
        dims=batch.dims[list(rows)],
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
        twins = {
            row: twin for row in rows if (twin := baseline_twin(batch.encoded[row])) is not None
        }
    except MissingDependencyError:
        return None
    if not twins:
        return None
    these = _some_of(batch, list(twins))
    return these, replace(these, encoded=list(twins.values()))


_SHRINK = 16  # a 224 crop becomes 14 x 14: a two-hundredth of the pixels to resize


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
