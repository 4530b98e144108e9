"""One measured run of a loader: as fast as batches come, or with an emulated training step.

The step is a wait that leaves the cores alone, as a process does whose accelerator computes. What
a loader had ready when the measuring began would flatter it: the first batches, more than any
loader of ours keeps ready, are taken and not counted.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache.errors import ConfigError
from penstock.pipeline.bench.cpu import tree_cpu_s
from penstock.pipeline.bench.figures import RunFigures
from penstock.pipeline.plan.sizing.au import au_percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.pipeline.report.facts import LoaderFacts
    from penstock.pipeline.report.statistics import Statistics

# Batches in front of the measured part: those in DALI, those prepared, and one on its way.
SETTLE_BATCHES = 6
# Where a batch takes long they take no more than this share of the run's length, and one at least.
_SETTLE_SHARE = 0.5
_LEAST_BATCHES = 2
_REPORT_EVERY_S = 0.5


class Loader(Protocol):
    """What a run plays: `penstock.DataLoader`, or what stands in for it."""

    def __iter__(self) -> Iterator[Any]: ...
    def statistics(self) -> Statistics: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run of a loader, and what charts and verdicts need beside it.

    facts: what the loader knows of the measured part. waits_s: every measured step's wait for its
    batch, in order.
    """

    figures: RunFigures
    facts: LoaderFacts
    waits_s: tuple[float, ...]


@dataclass(slots=True)
class _StepTimes:
    """The clock's readings of some steps in a row, and how many samples they were over."""

    waits_s: list[float] = field(default_factory=list)
    computes_s: list[float] = field(default_factory=list)
    samples: int = 0
    elapsed_s: float = 0.0


def play(
    make_loader: Callable[[], Loader],
    *,
    seconds: float,
    step_s: float = 0.0,
    settle: int = SETTLE_BATCHES,
    sample_bytes: float | None = None,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Build a loader, take batches for so many seconds (two at least), close it.

    make_loader: called once, within the time to first batch; batches are tensors, or tuples whose
    first one has a row a sample. seconds: of the measured part, begun over and over if an epoch is
    shorter. step_s: wait so long after each batch; 0 takes them as they come. settle: batches that
    come before the measured part. sample_bytes: mean encoded size, for data of which the loader
    can't say what it read; None: what it says. progress: told the share of the
    measured part that is done, twice a second.

    Raises ConfigError for numbers that can't be, and what the loader raises.
    """
    if seconds <= 0 or step_s < 0 or settle < 0:
        raise ConfigError(
            f"play: got seconds={seconds}, step_s={step_s}, settle={settle}; wanted seconds above "
            "0 and neither of the others below 0."
        )
    import_all()
    began = time.perf_counter()
    loader = make_loader()
    try:
        batches = _endless(loader)
        first = next(batches)
        _wait_for_batch(first)
        first_batch_s = time.perf_counter() - began
        del first
        most_s = _SETTLE_SHARE * seconds
        _settle(batches, step_s, settle // 2, most_s / 2)
        loader.statistics()  # the first look may measure the cores; what came meanwhile is taken
        _settle(batches, step_s, settle - settle // 2, most_s / 2)
        before, cpu_s = loader.statistics(), tree_cpu_s()
        report = _ShareReporter(progress, seconds)
        steps = _play_steps(
            batches, step_s, lambda n, s: report(s) >= seconds and n >= _LEAST_BATCHES
        )
        cpu_s, after = tree_cpu_s() - cpu_s, loader.statistics()
    finally:
        loader.close()
    facts = after.facts.since(before.facts)
    size_bytes = facts.bytes_read if sample_bytes is None else round(sample_bytes * steps.samples)
    return Run(
        figures=_run_figures(
            steps,
            size_bytes=size_bytes,
            cpu_s=cpu_s,
            first_batch_s=first_batch_s,
            stepped=step_s > 0,
            tiers=_bytes_by_tier(before, after),
        ),
        facts=facts,
        waits_s=tuple(steps.waits_s),
    )


def _settle(batches: Iterator[Any], step_s: float, count: int, most_s: float) -> None:
    _play_steps(batches, step_s, lambda n, s: n >= count or (n >= 1 and s > most_s))


def floor_au(batch: Any, *, step_s: float, seconds: float) -> float:
    """AU in per cent of a loader that costs nothing: the same loop over one batch that is there.

    What is missing to 100 is this machine's: the time that it takes to wake a step.
    """
    enough = itertools.repeat(batch)
    return _au(_play_steps(enough, step_s, lambda n, s: n >= _LEAST_BATCHES and s >= seconds))


def import_all() -> None:
    """Import what a loader imports at its first use: no run pays for it in its first batch."""
    import penstock.pipeline.loader
    from penstock.augment import resample_node
    from penstock.augment.dali import load_dali
    from penstock.cache.errors import MissingDependencyError

    assert penstock.pipeline.loader
    try:
        load_dali()
        resample_node.is_compiled()
    except MissingDependencyError:
        return  # a run that needs it says so where it builds its graph


def _endless(loader: Loader) -> Iterator[Any]:
    """Epoch after epoch. An epoch without a batch is an error: it would never end."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            raise ConfigError("The loader has no batch in an epoch. Pass a smaller batch size.")


def _play_steps(
    batches: Iterator[Any], step_s: float, enough: Callable[[int, float], bool]
) -> _StepTimes:
    """Take batches, each followed by a step, until enough(steps, seconds) says so."""
    steps, idle = _StepTimes(), Event()
    began = last = time.perf_counter()
    while not enough(len(steps.waits_s), last - began):
        batch = next(batches)
        _wait_for_batch(batch)
        came = time.perf_counter()
        if step_s:
            idle.wait(step_s)
        done = time.perf_counter()
        steps.waits_s.append(came - last)
        steps.computes_s.append(done - came)
        steps.samples += samples_of(batch)
        last = done
    steps.elapsed_s = last - began
    return steps


def samples_of(batch: Any) -> int:
    """Rows of a batch: of a tensor, or of the first one of a tuple."""
    return len(batch[0] if isinstance(batch, tuple | list) else batch)


def _wait_for_batch(batch: Any) -> None:
    """Wait until a batch on a GPU is there: a training step can't begin before."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    if getattr(getattr(first, "device", None), "type", "cpu") == "cuda":
        import torch

        torch.cuda.current_stream(first.device).synchronize()


def _au(steps: _StepTimes) -> float:
    # The steps before the measured ones stand for the first step, which an AU leaves out.
    return au_percent(steps.computes_s, steps.elapsed_s)


def _run_figures(
    steps: _StepTimes,
    *,
    size_bytes: int,
    cpu_s: float,
    first_batch_s: float,
    stepped: bool,
    tiers: dict[str, int],
) -> RunFigures:
    waits = np.array(steps.waits_s)
    return RunFigures(
        samples=steps.samples,
        batches=len(waits),
        seconds=steps.elapsed_s,
        bytes=size_bytes,
        cpu_s=cpu_s,
        first_batch_s=first_batch_s,
        wait_p50_s=float(np.quantile(waits, 0.5)),
        wait_p99_s=float(np.quantile(waits, 0.99)),
        wait_share=float(waits.sum() / steps.elapsed_s),
        step_s=float(np.median(steps.computes_s)) if stepped else 0.0,
        au=_au(steps) if stepped else 0.0,
        bytes_by_tier=tiers,
    )


def _bytes_by_tier(before: Statistics, after: Statistics) -> dict[str, int]:
    return {
        "remote": after.bytes_remote - before.bytes_remote,
        "peers": after.bytes_peers - before.bytes_peers,
        "disk": after.bytes_disk - before.bytes_disk,
        "memory": after.bytes_memory - before.bytes_memory,
    }


class _ShareReporter:
    """Tells a progress callback the share that is done, rarely: telling takes CPU time too."""

    def __init__(self, progress: Callable[[float], None] | None, seconds: float) -> None:
        self._progress, self._seconds = progress, seconds
        self._next_s = 0.0

    def __call__(self, elapsed_s: float) -> float:
        if self._progress is not None and elapsed_s >= self._next_s:
            self._progress(min(1.0, elapsed_s / self._seconds))
            self._next_s = elapsed_s + _REPORT_EVERY_S
        return elapsed_s
