"""All that `penstock bench` measures for one job, in order, each part when nothing else runs."""

from __future__ import annotations

import datetime
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.cache.base.limits import usable_cores
from penstock.cache.errors import PenstockError
from penstock.pipeline.bench.ceilings import measure_ceilings
from penstock.pipeline.bench.compare import ROUND, ROUNDS, compare_url
from penstock.pipeline.bench.play import Played, floor_au, import_all, play
from penstock.pipeline.bench.tune import Setup, Tuned, axes_for, tune
from penstock.pipeline.report.diagnosis import Diagnosis, diagnose

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.pipeline.bench.compare import Against
    from penstock.pipeline.bench.job import Job
    from penstock.pipeline.report.ceilings import Ceilings
    from penstock.readers import Dataset

# Each run of a search takes this share of a measured run, but long enough for some batches.
_TRIAL_SHARE = 0.2
_LEAST_TRIAL_S = 1.0
# A stage alone is steady within this share of a run's length.
_CEILING_SHARE = 0.1
_FLOOR_SHARE = 0.2
_LEAST_TIMED = 4  # batches of a round in turns with others


class Told(Protocol):
    """Hears what is being measured, and the share of it that is done (None: unknown)."""

    def __call__(self, what: str, share: float | None = None, /) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The dataset that was read: samples, encoded bytes, kind ("arrow", "tar", "folder")."""

    samples: int
    bytes: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that was measured for a job.

    raw: as fast as batches come; stepped: with the emulated step, measured before it, None without
    one. floor_au: in per cent, of a loader that costs nothing, with the same step on this machine;
    None without a step. tuned: what --tune tried. against: what peers did; None where none was
    asked for, or where one of them failed: then failed is the error.
    """

    job: Job
    setup: Setup
    about: About
    raw: Played
    stepped: Played | None
    floor_au: float | None
    ceilings: Ceilings
    diagnosis: Diagnosis
    tuned: Tuned | None
    date: datetime.datetime
    against: Against | None = None
    failed: PenstockError | None = None

    @property
    def judged(self) -> Played:
        """The run that waits and the verdict are of: the one with a step, if there was one."""
        return self.stepped or self.raw


def bench(job: Job, *, told: Told, search: bool = False, peers: Sequence[str] = ()) -> Result:
    """Open the job's dataset, find settings if asked to, measure, and let peers do the same.

    Raises what opening and loading raise; PlanError for a batch larger than the dataset.
    """
    result = _alone(job, told=told, search=search)
    if not peers:
        return result
    try:
        return replace(result, against=_against(job, result, peers, told))
    except PenstockError as error:  # what was measured before stands
        return replace(result, failed=error)


def _alone(job: Job, *, told: Told, search: bool) -> Result:
    told("importing")
    import_all()
    told("opening (what has no index yet is indexed once)")
    with job.dataset() as dataset:
        dataset.open()
        setup, tuned = job.setup(dataset), None
        if search:
            tuned = _search(job, dataset, setup, told)
            setup = tuned.best
        # The run that is judged comes first: a cache of the user's fills while runs go on.
        stepped = floor = None
        if job.step_s:
            what = f"with a step of {1000 * job.step_s:g} ms"
            stepped = _play(job, dataset, setup, told, what=what, step_s=job.step_s)
            floor = _floor(job, setup, told)
        raw = _play(job, dataset, setup, told, what="as fast as batches come")
        told("each stage alone")
        ceilings = _ceilings(job, dataset, setup)
        judged = stepped or raw
        return Result(
            job=job,
            setup=setup,
            about=About(
                samples=len(dataset),
                bytes=int(dataset.index.shard_bytes.sum()),
                kind=dataset.index.kind,
            ),
            raw=raw,
            stepped=stepped,
            floor_au=floor,
            ceilings=ceilings,
            diagnosis=diagnose(replace(judged.facts, ceilings=ceilings)),
            tuned=tuned,
            date=datetime.datetime.now(datetime.UTC).replace(microsecond=0),
        )


def _play(
    job: Job,
    dataset: Dataset,
    setup: Setup,
    told: Told,
    *,
    what: str,
    step_s: float = 0.0,
    seconds: float | None = None,
) -> Played:
    told(what, 0.0)
    index = dataset.index
    mean_bytes = float(index.shard_bytes.sum()) / max(1, index.samples)
    with _as_at_first(job, dataset) as own:
        return play(
            lambda: job.loader(own, setup),
            seconds=seconds or job.seconds,
            step_s=step_s,
            sample_bytes=mean_bytes,
            progress=lambda share: told(what, share),
        )


@contextmanager
def _as_at_first(job: Job, dataset: Dataset) -> Iterator[Dataset]:
    """A remote dataset opened anew, where what earlier runs fetched would be there already, in the
    temporary folder that stands for a cache. Not where that would mean to index it again."""
    keeps_index = dataset.index.kind == "arrow" or job.index is not None
    if dataset.remote is None or job.cache is not None or not keeps_index:
        yield dataset
        return
    with job.dataset() as own:
        own.open()
        yield own


def _search(job: Job, dataset: Dataset, start: Setup, told: Told) -> Tuned:
    seconds = max(_LEAST_TRIAL_S, _TRIAL_SHARE * job.seconds)

    def measure(setup: Setup) -> float:
        what = (
            f"trying {setup.num_workers} threads, {setup.prefetch_factor} batches ahead, batches "
            f"of {setup.batch_size}, {setup.read}"
        )
        played = _play(job, dataset, setup, told, what=what, seconds=seconds)
        return played.measured.samples_per_s

    # A step is over a batch of its size: another batch would be another step.
    given = {"batch_size"} if job.batch_size is not None or job.step_s else set()
    given |= {"num_workers"} if job.num_workers else set()
    axes = axes_for(start, cores=usable_cores(), samples=len(dataset), given=given)
    return tune(start, axes, measure)


def _floor(job: Job, setup: Setup, told: Told) -> float:
    told("the same steps without a loader")
    batch = (range(setup.batch_size),)
    return floor_au(batch, step_s=job.step_s, seconds=_FLOOR_SHARE * job.seconds)


def _ceilings(job: Job, dataset: Dataset, setup: Setup) -> Ceilings:
    from penstock.augment.recipe import check_recipe

    recipe = None
    if job.recipe.operations is not None:
        recipe = check_recipe(job.recipe.operations, images=dataset.index.images)
    with _as_at_first(job, dataset) as own:
        return measure_ceilings(
            own,
            recipe,
            batch_size=setup.batch_size,
            device=job.device,
            threads=setup.num_workers,
            seconds=_CEILING_SHARE * job.seconds,
        )


def _against(job: Job, result: Result, peers: Sequence[str], told: Told) -> Against:
    """Rounds in turns, each about as long for Penstock as a measured run is in all."""
    told("other loaders", 0.0)
    rate = result.raw.measured.samples_per_s / result.setup.batch_size
    timed = min(ROUND.timed, max(_LEAST_TIMED, round(rate * job.seconds / ROUNDS)))
    with job.dataset() as dataset:
        return compare_url(
            peers,
            dataset,
            recipe=job.recipe.operations or (),
            batch_size=result.setup.batch_size,
            workers=result.setup.num_workers,
            size=replace(ROUND, timed=timed),
            progress=lambda done, rounds: told("other loaders", done / rounds),
        )
