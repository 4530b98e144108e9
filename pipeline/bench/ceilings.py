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
import time
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.augment import (
    FixedCrop,
    GeometricOperation,
    Graph,
    GraphPlan,
    Resize,
    Stage,
    check_recipe,
    draw,
)
from penstock.cache import MissingDependencyError, ordered
from penstock.cache.base import ObjectRange, usable_cores
from penstock.pipeline.feed import MAPPED_READ_THREADS, READ_THREADS
from penstock.pipeline.options import parse_device
from penstock.pipeline.plan import first_settings, stream_plan
from penstock.pipeline.report import Ceilings, ProgressiveCost, Rate
from penstock.readers.fieldtypes import IMAGE_HEAD_BYTES, is_progressive, sniff
from penstock.readers.packing import baseline_twin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
) -> Ceilings:
    """Measure reading, decoding, augmenting, the copy and Python's part, each for about `seconds`.

    images: the fields of images to decode, each with its recipe. threads: decode threads; 0: all
    usable cores. The dataset stays open. Nothing else of this process may run at the same time.
    Raises ConfigError for numbers out of range, and what reading and decoding raise.
    """
    remote = _raw_remote(dataset, seconds=seconds)
    near = _cached_shards(dataset)
    rows = _rows(dataset, batch_size, near)
    read = _read(dataset, rows, seconds) if near is None or near.any() else None
    found = Ceilings(device=device, remote=remote, read=read)
    if not images:
        return found
    threads = threads or usable_cores()
    # Fetch only a few samples from a remote.
    some = next(rows) if read is not None else next(rows)[: _FEW * threads]
    stages = ImageStages(device=device, threads=threads, seconds=seconds / len(images))
    fields = []
    for name, recipe in images.items():
        columns = dataset.values(name, some)
        there = [row for row, image in enumerate(columns.encoded(name).encoded) if len(image)]
        if there:
            ops = without_augmenting(recipe.ops, has_one_size=recipe.sizes.fixed is not None)
            bare = check_recipe(ops, images=dataset.contents.images[name])
            batch, share = columns.take(there).encoded(name), len(there) / len(some)
            fields.append(stages.measure(batch, recipe, bare, share=share))
    if not fields:
        return found
    rates: dict[str, Any] = {
        stage: rate_in_sequence([getattr(each, stage) for each in fields])
        for stage in ("decode", "augment", "copy", "python")
    }
    return replace(found, **rates, progressive=fields[0].progressive)


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
        spans = list(islice(remote_ranges(remote, len(contents.sizes), size), count))
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


def remote_ranges(remote: RemoteShards, shards: int, size_bytes: int) -> Iterator[ObjectRange]:
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
    shards = range(len(dataset.contents.sizes))
    return np.array([shard < _CHECKED_SHARDS and remote.is_whole(shard) for shard in shards])


def _rows(
    dataset: Source, batch_size: int, near: NDArray[np.bool_] | None
) -> Iterator[NDArray[np.int64]]:
    """Yield the (shard, row) pairs of batch after batch in the order of a job, endlessly.

    near: a mask of the shards to read; None or all False reads every shard.
    """
    contents = dataset.contents
    plan = stream_plan(contents, first_settings(contents, seed=0, global_batch=batch_size))
    for epoch in itertools.count(1):  # the run has just read epoch 0
        for position in range(0, plan.samples, batch_size):
            size = min(batch_size, plan.samples - position)
            rows = plan.places(epoch, position, size, low=0, high=size).rows
            if near is not None and near.any():
                rows = rows[near[rows[:, 0]]]
            if len(rows):
                yield rows


def _read(dataset: Source, rows: Iterator[NDArray[np.int64]], seconds: float) -> Rate:
    is_mapped = not dataset.contents.is_file_per_sample
    workers = MAPPED_READ_THREADS if is_mapped else READ_THREADS

    def read(some: NDArray[np.int64]) -> tuple[int, int]:
        read = dataset.read(some)
        return len(read), read.bytes_read

    stream = ordered(read, rows, workers=workers, ahead=2 * workers, name="ceiling")
    with contextlib.closing(stream):
        return _settled_rate(_repeat(lambda: next(stream), seconds), seconds)


_SETTLE_SHARE = 0.25  # of the time, before counting begins


def _repeat(run: Callable[[], tuple[int, int]], seconds: float) -> NDArray[np.float64]:
    """Call a function for so many seconds, at least twice.

    run: returns the number of samples and bytes of one call. Returns the time, the CPU time, and
    the samples and bytes so far, at the start and after each call, shape (calls + 1, 4).
    """
    marks = [(time.perf_counter(), time.process_time(), 0, 0)]
    while len(marks) <= 2 or marks[-1][0] - marks[0][0] < seconds:
        samples, size_bytes = run()
        marks.append((time.perf_counter(), time.process_time(), samples, size_bytes))
    found = np.array(marks, np.float64)
    found[:, 2:] = found[:, 2:].cumsum(axis=0)
    return found


def _settled_rate(marks: NDArray[np.float64], seconds: float) -> Rate:
    """Return the rate since the last mark of the settling part, or since the start if the settling
    part has no mark: batches that were read together arrive together."""
    settled = np.sum(marks[:-1, 0] <= marks[0, 0] + _SETTLE_SHARE * seconds)
    return _rate(*(marks[-1] - marks[settled - 1]))


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
        timers = [_RecipeTimer(each, batch, self) for each in (bare, recipe)]
        timers.append(_RecipeTimer(recipe, batch, self, constant=True))
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
            decode=decode,
            augment=augment,
            python=python,
            copy=self._copy(batch) if self.device.startswith("cuda") else None,
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
                opened.enter_context(timer)
            for _ in range(_TURNS):
                for timer in timers:
                    timer.play(self.seconds / _TURNS)
        return [_rate(*timer.spent) for timer in timers]

    def _copy(self, batch: EncodedBatch) -> Rate:
        import torch

        size_bytes = sum(map(len, batch.encoded))
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

        def copy() -> tuple[int, int]:
            host.to(self.device, non_blocking=True)
            self.wait()
            return len(batch.encoded), size_bytes

        return _settled_rate(_repeat(copy, self.seconds), self.seconds)

    def _progressive_cost(self, batch: EncodedBatch, bare: CheckedRecipe) -> ProgressiveCost | None:
        """Decode progressive and baseline images and return the ratio of costs; None if the batch
        has no progressive image, or nothing to compare with."""
        kinds = np.array([_kind(sample) for sample in batch.encoded])
        rows = [_few(batch, np.flatnonzero(kinds == kind)) for kind in ("progressive", "baseline")]
        pair = _twins(batch, rows[0])
        of_twins = pair is not None
        if pair is None:
            if min(map(len, rows)) < _LEAST_NEIGHBOURS:
                return None
            pair = _some_of(batch, rows[0]), _some_of(batch, rows[1])
        timers = [_RecipeTimer(bare, each, self, whole=True) for each in pair]
        progressive, baseline = (
            # On a busy machine CPU time varies less than elapsed time.
            (rate.cpu_s_per_1000 if self.device == "cpu" else 1000 / rate.samples_per_s)
            / float(np.prod(each.dims, axis=1, dtype=np.int64).mean())
            for rate, each in zip(self._play_in_turns(timers), pair, strict=True)
        )
        images = len(pair[0].encoded)
        return ProgressiveCost(times=progressive / baseline, images=images, of_twins=of_twins)


@dataclass(eq=False)
class _RecipeTimer:
    """Times a recipe on a batch in memory, with two runs in flight, as in the loader.

    Entering the context builds the graph. constant: the graph gets constant pixels instead of
    decoding. whole: a run has the whole batch, not as many samples as let several runs fit into the
    time. spent: the seconds, CPU seconds, samples and bytes of all turns, each counted from its
    first run.
    """

    recipe: CheckedRecipe
    batch: EncodedBatch
    stages: ImageStages
    constant: bool = False
    whole: bool = False
    spent: NDArray[np.float64] = field(default_factory=lambda: np.zeros(4))
    epochs: Iterator[int] = field(default_factory=itertools.count)

    def __enter__(self) -> None:
        """Build the graph, run it until its memory is allocated, and choose the number of samples
        of a run."""
        threads = self.stages.threads
        plan = GraphPlan(
            self.recipe,
            batch_size=len(self.batch.encoded),
            threads=threads,
            device_id=parse_device(self.stages.device).index,
            constant=self.constant,
        )
        self._graph = Graph(plan)
        for size in (threads, 2 * threads):
            self._few = _some_of(self.batch, slice(size))
            began = time.perf_counter()
            self._feed()
            self._collect()
            sample_s = (time.perf_counter() - began) / len(self._few.encoded)
        fitting = max(threads, int(self.stages.seconds / _LEAST_RUNS / sample_s))
        self._few = self.batch if self.whole else _some_of(self.batch, slice(fitting))
        for _ in range(_WARM_RUNS):
            self._run()
        self._graph.drain()

    def play(self, seconds: float) -> None:
        """Run the recipe for `seconds` and count its samples."""
        marks = _repeat(self._run, seconds)
        self._graph.drain()
        self.spent += marks[-1] - marks[1]

    def __exit__(self, *_: object) -> None:
        self._graph.close()

    def _run(self) -> tuple[int, int]:
        while self._graph.in_flight < _FED:
            self._feed()
        self._collect()
        return len(self._few.encoded), sum(map(len, self._few.encoded))

    def _feed(self) -> None:
        few, epoch = self._few, next(self.epochs)
        self._graph.feed(few, draw(self.recipe, ids=few.ids, dims=few.dims, seed=0, epoch=epoch))

    def _collect(self) -> None:
        self._graph.outputs()
        self.stages.wait()


def _some_of(batch: EncodedBatch, rows: slice | Sequence[int]) -> EncodedBatch:
    """Return some samples of a batch."""
    chosen = np.arange(len(batch.encoded))[rows]
    encoded = [batch.encoded[row] for row in chosen]
    return replace(batch, ids=batch.ids[chosen], encoded=encoded, dims=batch.dims[chosen])


def _kind(sample: Encoded) -> str:
    if sniff(bytes(sample[:IMAGE_HEAD_BYTES])) != "jpeg":
        return "other"
    return "progressive" if is_progressive(sample) else "baseline"


def _few(batch: EncodedBatch, rows: NDArray[np.int64]) -> list[int]:
    """Limit the rows to the number and pixels that may be rewritten, but keep at least one."""
    pixels = np.prod(batch.dims[rows[:_MOST_IMAGES]], axis=1, dtype=np.int64).cumsum()
    kept: list[int] = rows[: max(1, int(np.sum(pixels <= _MOST_PIXELS)))].tolist()
    return kept


def _twins(batch: EncodedBatch, rows: Sequence[int]) -> tuple[EncodedBatch, EncodedBatch] | None:
    """Return progressive images and their baseline copies; None if none can be rewritten."""
    try:
        every = {row: baseline_twin(batch.encoded[row]) for row in rows}
    except MissingDependencyError:
        return None
    twins = {row: twin for row, twin in every.items() if twin is not None}
    if not twins:
        return None
    these = _some_of(batch, list(twins))
    return these, replace(these, encoded=list(twins.values()))


_SHRINK = 16  # a 224 crop becomes 14 x 14: a two-hundredth of the pixels to resize
_TINY = 40


def without_augmenting(ops: tuple[Operation, ...], *, has_one_size: bool = True) -> list[Operation]:
    """Return the recipe's decoding and windows with tiny output sizes, and no later operation; of
    images with views, one small view of the full image. has_one_size: False if images differ in
    size."""
    bare: list[Operation] = []
    is_behind = False
    tiny = Resize((_TINY, _TINY), antialias=False)
    for op in ops:
        changed: Any = op
        if isinstance(op, GeometricOperation) and op.gives_lists:  # full images are decoded for it
            changed, is_behind = tiny, True
        elif isinstance(op, GeometricOperation) and op.resize is not None:
            changed = replace(changed, size=_smaller(changed.size), antialias=False)
            is_behind = True
        elif isinstance(op, FixedCrop) and is_behind:
            # Before a resize, a crop is the window to decode; without a resize it is the output.
            changed = replace(changed, size=_smaller(changed.size))
        elif op.stage is Stage.VIEWS:
            changed = Resize((_SHRINK, _SHRINK), antialias=False)
        elif not isinstance(op, FixedCrop) and op.stage is not Stage.DECODE:
            continue
        bare.append(changed)
    if not has_one_size and not is_behind:
        bare.append(tiny)
    return bare


def _smaller(size: Any) -> Any:
    if isinstance(size, int):
        return max(1, size // _SHRINK)
    return tuple(max(1, side // _SHRINK) for side in size)
