"""All that `penstock bench` measures for one job, in order, each part when nothing else runs."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from pipeline.bench.ceilings import measure_ceilings
from pipeline.bench.diagnosis import Diagnosis, diagnose
from pipeline.bench.play import Played, floor_au, import_all, play
from pipeline.bench.tune import Setup, Tuned, axes_for, tune
from pipeline.world import usable_cores

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.bench.facts import Ceilings
    from pipeline.bench.job import Job
    from readers import Dataset

# Each run of a search takes this share of a measured run, but long enough for some batches.
_TRIAL_SHARE = 0.2
_LEAST_TRIAL_S = 1.0
# A stage alone is steady within this share of a run's length.
_CEILING_SHARE = 0.1
_FLOOR_SHARE = 0.2


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

    raw: as fast as batches come; stepped: with the emulated step, None without one. floor_au: in
    per cent, of a loader that costs nothing, with the same step on this machine; None without a
    step. tuned: what --tune tried. against: what peers did, by name, in the order asked for.
    skipped: peers that could not play, and why.
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
    against: Mapping[str, Mapping[str, float]]
    skipped: Mapping[str, str]
    date: datetime.datetime

    @property
    def judged(self) -> Played:
        """The run that waits and the verdict are of: the one with a step, if there was one."""
        return self.stepped or self.raw


def bench(job: Job, *, search: bool = False, told: Told) -> Result:
    """Open the job's dataset, find settings if asked to, measure. Peers are the caller's.

    Raises what opening and loading raise; PlanError for a batch larger than the dataset.
    """
    told("importing")
    import_all()
    told("opening")
    with job.dataset() as dataset:
        dataset.open()
        setup, tuned = job.setup(dataset), None
        if search:
            tuned = _search(job, dataset, setup, told)
            setup = tuned.best
        raw = _play(job, dataset, setup, told, what="as fast as batches come")
        stepped = floor = None
        if job.step_s:
            what = f"with a step of {1000 * job.step_s:g} ms"
            stepped = _play(job, dataset, setup, told, what=what, step_s=job.step_s)
            floor = _floor(job, setup, told)
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
            against={},
            skipped={},
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
    return play(
        lambda: job.loader(dataset, setup),
        seconds=seconds or job.seconds,
        step_s=step_s,
        sample_bytes=mean_bytes,
        progress=lambda share: told(what, share),
    )


def _search(job: Job, dataset: Dataset, start: Setup, told: Told) -> Tuned:
    seconds = max(_LEAST_TRIAL_S, _TRIAL_SHARE * job.seconds)

    def measure(setup: Setup) -> float:
        what = f"trying {setup}"
        played = _play(job, dataset, setup, told, what=what, seconds=seconds)
        return played.measured.samples_per_s

    axes = axes_for(
        start,
        cores=usable_cores(),
        samples=len(dataset),
        # A step is over a batch of its size: another batch would be another step.
        batch_size_is_given=job.batch_size is not None or job.step_s > 0,
    )
    return tune(start, axes, measure)


def _floor(job: Job, setup: Setup, told: Told) -> float:
    told("the same steps without a loader")
    batch = (range(setup.batch_size),)
    return floor_au(batch, step_s=job.step_s, seconds=_FLOOR_SHARE * job.seconds)


def _ceilings(job: Job, dataset: Dataset, setup: Setup) -> Ceilings:
    from augment.recipe import check_recipe

    recipe = None
    if job.recipe.operations is not None:
        recipe = check_recipe(job.recipe.operations, images=dataset.index.images)
    return measure_ceilings(
        dataset,
        recipe,
        batch_size=setup.batch_size,
        device=job.device,
        threads=setup.num_workers,
        seconds=_CEILING_SHARE * job.seconds,
    )
