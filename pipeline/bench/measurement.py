"""Measure all figures of `penstock bench`, one part after the other, so that none slows another."""

from __future__ import annotations

import datetime
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.cache import PenstockError
from penstock.cache.base import usable_cores
from penstock.pipeline.bench.ceilings import measure_ceilings
from penstock.pipeline.bench.loader_comparison import (
    ROUND,
    ROUNDS,
    check_comparable,
    compare_loaders,
)
from penstock.pipeline.bench.measured_run import MeasuredRun, floor_au, import_all, play
from penstock.pipeline.bench.settings_search import LoaderSettings, SearchResult, axes_for, tune
from penstock.pipeline.feed import mapped_fields
from penstock.pipeline.report import Diagnosis, diagnose
from penstock.readers.fieldtypes import image_fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.augment import CheckedRecipe
    from penstock.pipeline.bench.loader_comparison import LoaderComparison
    from penstock.pipeline.bench.workload import Workload
    from penstock.pipeline.report import Ceilings
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
    comparison with other loaders; None if none was requested, or if one failed with loaders_error.
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
    loaders: LoaderComparison | None = None
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
        result = BenchResult(
            workload=workload,
            setup=setup,
            dataset=DatasetFacts(
                samples=len(dataset),
                bytes=int(dataset.contents.shard_bytes.sum()),
                kind=dataset.kind,
            ),
            raw=raw,
            stepped=stepped,
            floor_au=floor,
            ceilings=ceilings,
            diagnosis=diagnose(facts),
            search=found,
            date=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        )
    try:
        played = _play_loaders(result, loaders, progress) if loaders else None
        return replace(result, loaders=played)
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
        what = (
            f"trying {setup.num_workers} threads, {setup.prefetch_factor} batches ahead, batches "
            f"of {setup.batch_size}, {setup.read}"
        )
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
