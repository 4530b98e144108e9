"""Play one measured run of a loader and return its figures.

A run consumes batches as fast as they come, or with an emulated training step. The step is a wait
that uses no core, as in a process whose accelerator computes. Batches that a loader had ready when
the measurement began would flatter it: the first batches, more than any of our loaders keeps ready,
are consumed and not counted. CPU time covers all child processes, running workers included.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache import ConfigError
from penstock.cache.base import growth
from penstock.pipeline.plan.sizing import au_percent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.pipeline.report import LoaderFacts, Statistics


def tree_cpu_s() -> float:
    """CPU-seconds of this process and all of its children so far, those that still run included.

    Linux keeps a CPU clock for every process, in nanoseconds; clock_getcpuclockid(3) names it by
    the complement of the process id shifted left by three, plus 2 (the scheduler's clock).
    """
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended: os.times counts it next time
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread or process has ended
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The median over the rounds, with the lowest and the highest round."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        return cls(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one run. The first batch and those that fill the read-ahead don't count.

    samples, batches, seconds: of the measured part; bytes: encoded bytes of its samples.
    samples_per_s, bytes_per_s, cpu_s_per_1000: of the measured part; CPU time of this process and
    its children. first_batch_s: from before the loader is built to its first batch, without
    imports. wait_p50_s, wait_p99_s, wait_share: of the steps' waits for a batch. step_s: median
    measured length of the emulated step, 0 without one. au: accelerator utilisation in per cent,
    see `pipeline.plan.sizing.au_percent`; 0 without a step. bytes_by_tier: bytes from "remote",
    "peers", "disk" and "memory" during the run.
    """

    samples: int
    batches: int
    seconds: float
    bytes: int
    cpu_s: float
    first_batch_s: float
    wait_p50_s: float
    wait_p99_s: float
    wait_share: float
    step_s: float
    au: float
    bytes_by_tier: Mapping[str, int]

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def cpu_s_per_1000(self) -> float:
        return 1000 * self.cpu_s / self.samples if self.samples else 0.0


# Batches before the measured part: those in DALI, those prepared, and one in transfer.
SETTLE_BATCHES = 6
# Slow batches settle for at most this share of the run's length, but for one batch at least.
_SETTLE_SHARE = 0.5
_LEAST_BATCHES = 2
_REPORT_EVERY_S = 0.5


class Clock:
    """The time that a run measures, in seconds from any start, and the wait of a step."""

    def now_s(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        Event().wait(seconds)


class Loader(Protocol):
    """The part of `penstock.DataLoader` that a run uses."""

    def __iter__(self) -> Iterator[Any]: ...
    def statistics(self) -> Statistics: ...
    def close(self) -> None: ...


_CLOCK = Clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The figures of one run of a loader, and the data for its charts and its verdict.

    facts: the loader's statistics of the measured part, with the waits and steps that the run
    measured, so that the verdict and the figures agree. waits_s: every measured step's wait for its
    batch, in order.
    """

    figures: RunFigures
    facts: LoaderFacts
    waits_s: tuple[float, ...]


@dataclass(slots=True)
class StepTimes:
    """The measured times of consecutive steps, and the number of their samples."""

    waits_s: list[float] = field(default_factory=list)
    computes_s: list[float] = field(default_factory=list)
    samples: int = 0
    elapsed_s: float = 0.0

    @property
    def au(self) -> float:
        """The AU in per cent. An AU leaves out the first step; here, the steps before the measured
        part replace it."""
        return au_percent(self.computes_s, self.elapsed_s)


def play(
    make_loader: Callable[[], Loader],
    *,
    seconds: float,
    step_s: float = 0.0,
    settle: int = SETTLE_BATCHES,
    sample_bytes: float | None = None,
    progress: Callable[[float], None] | None = None,
    clock: Clock = _CLOCK,
) -> MeasuredRun:
    """Build a loader, consume batches for `seconds` (at least two batches), and close it.

    make_loader: called once; the time to first batch includes the call. Batches are tensors, or
    tuples whose first tensor has one row per sample. seconds: of the measured part; a shorter epoch
    is repeated. step_s: wait after each batch, 0 for none. settle: batches before the measured
    part. sample_bytes: mean encoded size, for data whose size the loader can't count; None uses the
    loader's count. progress: called twice a second with the share of the measured part that is
    done.

    Raises ConfigError for numbers out of range, and the loader's errors.
    """
    import_all()
    began = clock.now_s()
    loader = make_loader()
    try:
        batches = endless(loader)
        first = next(batches)
        _wait_for_batch(first)
        first_batch_s = clock.now_s() - began
        del first
        # The first call of statistics() may measure the cores: consume what became ready meanwhile.
        for least in (settle // 2, settle - settle // 2):
            is_settled = partial(_is_settled, least, _SETTLE_SHARE / 2 * seconds)
            play_steps(batches, step_s, is_settled, clock)
            before = loader.statistics()
        cpu_s, shown_s = tree_cpu_s(), 0.0

        def is_enough(steps: int, elapsed_s: float) -> bool:
            nonlocal shown_s
            if progress is not None and elapsed_s >= shown_s:  # rarely: it costs CPU time, too
                progress(min(1.0, elapsed_s / seconds))
                shown_s = elapsed_s + _REPORT_EVERY_S
            return elapsed_s >= seconds and steps >= _LEAST_BATCHES

        steps = play_steps(batches, step_s, is_enough, clock)
        cpu_s, after = tree_cpu_s() - cpu_s, loader.statistics()
    finally:
        loader.close()
    facts, waits_s = growth(after.facts, before.facts), np.array(steps.waits_s)
    # The loader counts no wait while it prepares further batches, and the step waits for that, too.
    wait_s = float(waits_s.sum())
    facts = replace(facts, wait_s=wait_s, step_s=steps.elapsed_s - wait_s)
    p50_s, p99_s = np.quantile(waits_s, (0.5, 0.99)).tolist()
    figures = RunFigures(
        samples=steps.samples,
        batches=len(waits_s),
        seconds=steps.elapsed_s,
        bytes=facts.bytes_read if sample_bytes is None else round(sample_bytes * steps.samples),
        cpu_s=cpu_s,
        first_batch_s=first_batch_s,
        wait_p50_s=p50_s,
        wait_p99_s=p99_s,
        wait_share=facts.wait_share,
        step_s=float(np.median(steps.computes_s)) if step_s else 0.0,
        au=steps.au if step_s else 0.0,
        bytes_by_tier={
            tier: getattr(after, f"bytes_{tier}") - getattr(before, f"bytes_{tier}")
            for tier in ("remote", "peers", "disk", "memory")
        },
    )
    return MeasuredRun(figures=figures, facts=facts, waits_s=tuple(steps.waits_s))


def _is_settled(least: int, most_s: float, steps: int, elapsed_s: float) -> bool:
    return steps >= least or (steps >= 1 and elapsed_s > most_s)


def floor_au(batch: Any, *, step_s: float, seconds: float, clock: Clock = _CLOCK) -> float:
    """Return the AU in per cent of a loader without any cost: the same loop over one ready batch.

    The difference to 100 is the time that this machine takes to wake a step.
    """
    batches = itertools.repeat(batch)
    return play_steps(batches, step_s, lambda n, s: n >= _LEAST_BATCHES and s >= seconds, clock).au


def import_all() -> None:
    """Import the modules that a loader imports at its first use, so that no run measures that."""
    from penstock.augment import dali_nodes, load_dali
    from penstock.cache import MissingDependencyError

    importlib.import_module("penstock.pipeline.loader")
    try:
        load_dali()
        dali_nodes.is_compiled()
    except MissingDependencyError:
        return  # a run that needs it raises the error when it builds its graph


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches of epoch after epoch. Raise ConfigError for an epoch without a batch."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError(
                "The loader delivers no batch in an epoch: each of its workers has fewer samples "
                "than a batch. Use a smaller batch size, fewer workers or more samples."
            )


def play_steps(
    batches: Iterator[Any],
    step_s: float,
    is_enough: Callable[[int, float], bool],
    clock: Clock = _CLOCK,
) -> StepTimes:
    """Consume batches, each followed by a step, until is_enough(steps, seconds) returns True."""
    steps = StepTimes()
    began = last = clock.now_s()
    while not is_enough(len(steps.waits_s), last - began):
        batch = next(batches)
        _wait_for_batch(batch)
        received = clock.now_s()
        if step_s:
            clock.wait(step_s)
        done = clock.now_s()
        steps.waits_s.append(received - last)
        steps.computes_s.append(done - received)
        steps.samples += samples_of(batch)
        last = done
    steps.elapsed_s = last - began
    return steps


def samples_of(batch: Any) -> int:
    """Return the rows of a batch: of the tensor, or of the first tensor of a tuple."""
    return len(batch[0] if isinstance(batch, tuple | list) else batch)


def _wait_for_batch(batch: Any) -> None:
    """Wait until a batch on a GPU is complete: a training step can't begin before."""
    first = batch[0] if isinstance(batch, tuple | list) else batch
    if getattr(getattr(first, "device", None), "type", "cpu") == "cuda":
        import torch

        torch.cuda.current_stream(first.device).synchronize()
