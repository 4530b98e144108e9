"""Measure all figures of `penstock bench`, one part after the other, so that none slows another.

`tune` searches for the fastest settings by runs of some seconds. It varies one setting after the
other, beginning with the defaults, and accepts a value if two runs are faster by more than two runs
with the same settings differ. This finds the large gains (another thread, more prefetch, another
way to read); a full grid would take an hour to find a gain of a per cent that the next day's noise
hides. `probe` measures this machine and the URL's store for `penstock plan --measure`.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from penstock.cache import PenstockError, ordered
from penstock.cache.base import usable_cores
from penstock.pipeline.bench.ceilings import measure_ceilings, remote_ranges
from penstock.pipeline.bench.loader_comparison import (
    ROUND,
    ROUNDS,
    LoaderComparison,
    check_comparable,
    compare_loaders,
)
from penstock.pipeline.bench.measured_run import MeasuredRun, floor_au, import_all, play
from penstock.pipeline.feed import mapped_fields
from penstock.pipeline.report import Ceilings, Diagnosis, diagnose
from penstock.readers.fieldtypes import image_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from penstock.augment import CheckedRecipe
    from penstock.pipeline.bench.workload import LoaderSettings, Workload
    from penstock.readers import Source


# Each run of a search takes this share of a measured run, but long enough for some batches.
_SEARCH_RUN_SHARE = 0.2
_LEAST_SEARCH_RUN_S = 1.0
# A stage alone is steady within this share of a run's length.
_CEILING_SHARE = 0.1
_FLOOR_SHARE = 0.2
_LEAST_TIMED = 4  # batches of a round in turns with others


class ProgressReport(Protocol):
    """Called with the name of the current measurement and its completed share (None: unknown)."""

    def __call__(self, what: str, share: float | None = None, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFacts:
    """The size and kind of the dataset. bytes: encoded bytes; kind: "pack", "tar", "folder", …."""

    samples: int
    bytes: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All measurements of a workload.

    raw: the run that consumes batches as fast as they arrive. stepped: the run with the emulated
    step, made before raw; None without a step. floor_au: the AU, in per cent, of a loader without
    any cost on this machine; None without a step. search: the result of --tune. loaders: the
    comparison with other loaders; empty if none was requested, or if one failed with loaders_error.
    """

    workload: Workload
    setup: LoaderSettings
    dataset: DatasetFacts
    raw: MeasuredRun
    stepped: MeasuredRun | None
    floor_au: float | None
    ceilings: Ceilings
    diagnosis: Diagnosis
    search: SearchResult | None
    date: datetime.datetime
    loaders: LoaderComparison = field(default_factory=LoaderComparison)
    loaders_error: PenstockError | None = None

    @property
    def main_run(self) -> MeasuredRun:
        """The run whose waits and verdict are reported: the one with a step, if there is one."""
        return self.stepped or self.raw


def bench(
    workload: Workload,
    *,
    progress: ProgressReport,
    search: bool = False,
    loaders: Sequence[str] = (),
) -> BenchResult:
    """Open the workload's dataset, search for settings if requested, and measure; then play other
    loaders. If one of these fails, the measurements before remain valid.

    Raises what opening and loading raise; PlanError for a batch larger than the dataset.
    """
    progress("importing")
    import_all()
    progress("opening (a dataset without an index is indexed once)")
    with workload.dataset() as dataset:
        workload = workload.settled(dataset)
        if loaders:  # before anything is measured
            check_comparable(dataset, workload.recipe.operations)
        setup, found = workload.setup(dataset), None
        if search:
            found = _search(workload, dataset, setup, progress)
            setup = found.best
        # The run of the verdict comes first: the user's cache fills during the runs.
        stepped = floor = None
        if workload.step_s:
            what = f"with a step of {1000 * workload.step_s:g} ms"
            stepped = _play(workload, dataset, setup, progress, what=what, step_s=workload.step_s)
            progress("the same steps without a loader")
            batch, seconds = (range(setup.batch_size),), _FLOOR_SHARE * workload.seconds
            floor = floor_au(batch, step_s=workload.step_s, seconds=seconds)
        raw = _play(workload, dataset, setup, progress, what="without a step")
        progress("each stage on its own")
        ceilings = workload_ceilings(workload, dataset, setup)
        facts = replace((stepped or raw).facts, ceilings=ceilings, trains=stepped is not None)
        size_bytes = int(dataset.contents.shard_bytes.sum())
        result = BenchResult(
            workload=workload,
            setup=setup,
            dataset=DatasetFacts(samples=len(dataset), bytes=size_bytes, kind=dataset.kind),
            raw=raw,
            stepped=stepped,
            floor_au=floor,
            ceilings=ceilings,
            diagnosis=diagnose(facts),
            search=found,
            date=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        )
    try:
        return replace(result, loaders=_play_loaders(result, loaders, progress))
    except PenstockError as error:
        return replace(result, loaders_error=error)


def _play(
    workload: Workload,
    dataset: Source,
    setup: LoaderSettings,
    progress: ProgressReport,
    *,
    what: str,
    step_s: float = 0.0,
    seconds: float | None = None,
) -> MeasuredRun:
    progress(what, 0.0)
    with reopened(workload, dataset) as own:
        return play(
            lambda: workload.loader(own, setup),
            seconds=seconds or workload.seconds,
            step_s=step_s,
            progress=lambda share: progress(what, share),
        )


@contextmanager
def reopened(workload: Workload, dataset: Source) -> Iterator[Source]:
    """Yield a dataset without earlier runs' fetched data: a remote dataset without a cache= is
    opened again, with a new temporary folder as its cache, unless it would have to be indexed
    again."""
    keeps_index = dataset.is_self_contained or workload.data.get("index") is not None
    if dataset.remote_shards is None or workload.data.get("cache") is not None or not keeps_index:
        yield dataset
        return
    with workload.dataset() as own:
        own.contents  # noqa: B018  # opens it, before the time is measured
        yield own


def _search(
    workload: Workload, dataset: Source, start: LoaderSettings, progress: ProgressReport
) -> SearchResult:
    seconds = max(_LEAST_SEARCH_RUN_S, _SEARCH_RUN_SHARE * workload.seconds)

    def measure(setup: LoaderSettings) -> float:
        batches = f"{setup.prefetch_factor} batches of {setup.batch_size} ahead"
        what = f"trying {setup.num_workers} threads, {batches}, {setup.read}"
        run = _play(workload, dataset, setup, progress, what=what, seconds=seconds)
        return run.figures.samples_per_s

    # The length of a step belongs to its batch size.
    given = {"batch_size"} if workload.batch_size is not None or workload.step_s else set()
    decodes = image_fields(dataset.schema, dataset.fields)
    given |= {"num_workers"} if workload.num_workers or not decodes else set()
    axes = axes_for(start, cores=usable_cores(), samples=len(dataset), given=given)
    return tune(start, axes, measure)


def workload_ceilings(workload: Workload, dataset: Source, setup: LoaderSettings) -> Ceilings:
    """Measure each stage of a workload separately, on its open dataset."""
    from penstock.augment import check_recipes

    images: Mapping[str, CheckedRecipe] = {}
    if not workload.recipe.reads_only:
        mapped = mapped_fields(dataset, workload.recipe.operations or None)
        # A field that a Map returns isn't in the dataset, so it can't be measured on its own.
        made = {name for each in mapped.maps for name in each.returns}
        fields = [name for name in dataset.fields if name not in made]
        if not made or image_fields(dataset.schema, fields):
            ranges = dataset.contents.images
            images = check_recipes(mapped.augment, dataset.schema, fields, ranges).images
    with reopened(workload, dataset) as own:
        return measure_ceilings(
            own,
            images,
            batch_size=setup.batch_size,
            device=workload.device,
            threads=setup.num_workers,
            seconds=_CEILING_SHARE * workload.seconds,
        )


def _play_loaders(
    result: BenchResult, loaders: Sequence[str], progress: ProgressReport
) -> LoaderComparison:
    """Play rounds in turns. All of Penstock's rounds take about as long as one measured run."""
    if not loaders:
        return LoaderComparison()
    progress("other loaders", 0.0)
    workload, rate = result.workload, result.raw.figures.samples_per_s / result.setup.batch_size
    timed = min(ROUND.timed, max(_LEAST_TIMED, round(rate * workload.seconds / ROUNDS)))
    with workload.dataset() as dataset:
        return compare_loaders(
            loaders,
            dataset,
            recipe=workload.recipe.operations,
            batch_size=result.setup.batch_size,
            workers=result.setup.num_workers,
            size=replace(ROUND, timed=timed),
            progress=lambda share: progress("other loaders", share),
        )


# Smaller differences are noise, even if two runs happened to agree.
LEAST_NOISE = 0.02
# With more noise than this the machine is busy with other work, and a search finds little.
BUSY_NOISE = 0.1
_BATCH_SIZES = (64, 128, 256, 512)
# The largest gain that the search demands, however noisy the machine is.
MOST_NOISE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One setting and the values to try, in an order in which speed is expected to have one peak.

    tie: True if the first of values with equal speeds (within 2 %) is better, as fewer threads are;
    False keeps the current value.
    """

    name: str
    values: tuple[Any, ...]
    tie: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search. runs: the samples/s of each run, by the settings that were tried, in
    the order of their first run; noise: as a share."""

    best: LoaderSettings
    runs: Mapping[LoaderSettings, Sequence[float]]
    noise: float


def axes_for(
    start: LoaderSettings, *, cores: int, samples: int, given: Collection[str] = ()
) -> tuple[Axis, ...]:
    """Return the settings to try on a number of cores. samples: of the dataset, the upper bound of
    a batch. given: names of settings that stay as they are."""
    threads = {1, max(1, cores // 2), cores, cores + max(1, cores // 2), start.num_workers}
    sizes = {size for size in _BATCH_SIZES if size <= samples} | {start.batch_size}
    axes = (
        Axis(name="num_workers", values=tuple(sorted(threads)), tie=True),
        Axis(name="prefetch_factor", values=tuple(sorted({1, 2, 4, start.prefetch_factor}))),
        Axis(name="batch_size", values=tuple(sorted(sizes))),
        Axis(name="read", values=("copy", "pread")),
    )
    return tuple(axis for axis in axes if axis.name not in given)


def tune(
    start: LoaderSettings, axes: Sequence[Axis], measure: Callable[[LoaderSettings], float]
) -> SearchResult:
    """Search along one axis after the other, beginning at start, and return the fastest setup.

    axes: each contains start's own value. measure: returns the samples/s of a short run. Raises
    what measure raises.
    """
    runs: dict[LoaderSettings, list[float]] = {}

    def run(setup: LoaderSettings) -> float:
        runs.setdefault(setup, []).append(measure(setup))
        return runs[setup][-1]

    def beats(new: LoaderSettings, best: LoaderSettings, by: float) -> bool:
        """Return True if a setup is faster by that share (if negative: slower by no more), in a
        first run and in a second run of both: one lucky run is no reason to change."""
        if run(new) <= (1 + by) * statistics.median(runs[best]):
            return False
        return run(new) > (1 + by) * run(best)

    low, high = sorted((run(start), run(start)))
    noise = min(MOST_NOISE, max(LEAST_NOISE, (high - low) / high))
    best = start
    for axis in axes:
        begin = place = axis.values.index(getattr(best, axis.name))
        peak = best
        # Search downwards first, then upwards if that found nothing better.
        for step, by in ((-1, -LEAST_NOISE if axis.tie else noise), (1, noise)):
            while 0 <= place + step < len(axis.values):
                new = replace(best, **{axis.name: axis.values[place + step]})
                # Compare with the fastest so far, so that several small losses don't add up.
                if not beats(new, peak, by):
                    break
                best, place = new, place + step
                peak = max(peak, new, key=lambda setup: statistics.median(runs[setup]))
            if place != begin:
                break
    return SearchResult(best=best, runs=runs, noise=noise)


_DISK_BYTES, _BLOCK, _READERS = 2**28, 2**20, 8
_LEAST_STORE_BYTES = 2**26  # smaller datasets don't show a store's rate
_PINGS, _PING_BYTES = 8, 4096


def probe(workload: Workload) -> dict[str, tuple[float, str]]:
    """Measure in some seconds: the figures of this machine by their field of `ClusterSetup`, each
    with where it is from, without those that can't be measured or don't apply.

    The CPU-seconds are those of the workload's recipe; the disk is that of the cache's folder,
    without the page cache; the store's rate is measured only with 64 MiB of data or more. Raises
    what opening, reading and decoding raise.
    """
    with workload.dataset() as dataset:
        settled = workload.settled(dataset)
        ceilings = workload_ceilings(settled, dataset, settled.setup(dataset))
        latency_s = store_latency(dataset)
        is_enough = int(dataset.contents.shard_bytes.sum()) >= _LEAST_STORE_BYTES
    augment_s = None if ceilings.augment is None else ceilings.augment.cpu_s_per_1000
    remote = ceilings.remote if is_enough else None
    one = "measured here, by one process"
    found = {
        "cpu_s_per_1000": (augment_s, "measured here, on the CPU"),
        "nvme_bytes_per_s": (disk_rate(workload.data.get("cache")), one),
        "store_bytes_per_s": (None if remote is None else remote.bytes_per_s, one),
        "store_latency_s": (latency_s, "measured here"),
    }
    return {name: (value, origin) for name, (value, origin) in found.items() if value is not None}


def store_latency(dataset: Source) -> float | None:
    """Return the median time of consecutive small requests; None for a local dataset."""
    remote = dataset.remote_shards
    if remote is None:
        return None
    span = next(remote_ranges(remote, len(dataset.contents.sizes), _PING_BYTES))
    took = []
    for _ in range(_PINGS):
        began = time.perf_counter()
        remote.remotes[0].fetcher.fetch([span], lambda _number, _answer: None)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def disk_rate(folder: Path | None, *, size_bytes: int = _DISK_BYTES) -> float | None:
    """Measure the read rate of a folder's disk in bytes a second, with parallel readers; None if
    its file system doesn't support O_DIRECT or is too full for the test file."""
    place = folder
    while place is not None and not place.is_dir():  # the nearest existing parent is on its disk
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            for _ in range(size_bytes // _BLOCK):
                file.write(os.urandom(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
            # Open the unnamed file again, with O_DIRECT.
            fd = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_DIRECT)
            try:
                return _read_rate(fd, size_bytes)
            finally:
                os.close(fd)
    except OSError:
        return None


def _read_rate(fd: int, size_bytes: int) -> float:
    def read(at: int) -> int:
        with mmap.mmap(-1, _BLOCK) as room:  # O_DIRECT wants whole pages
            return os.preadv(fd, [room], at)

    began = time.perf_counter()
    blocks = ordered(read, range(0, size_bytes, _BLOCK), workers=_READERS, ahead=2 * _READERS)
    with contextlib.closing(blocks):
        done = sum(blocks)
    return done / (time.perf_counter() - began)
