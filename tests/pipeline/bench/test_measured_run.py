"""Test the figures of one measured run, and the search for settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.pipeline.bench import (
    MOST_NOISE,
    SETTLE_BATCHES,
    Axis,
    Clock,
    LoaderSettings,
    axes_for,
    floor_au,
    play,
    samples_of,
    tree_cpu_s,
    tune,
)
from penstock.pipeline.report import Meter
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.report import Statistics

BATCH = 4


@dataclass
class SteppedClock(Clock):
    """A clock that only loaders and waits advance; a wait ends late, as on a busy machine."""

    time_s: float = 0.0
    late_s: float = 0.125

    def now_s(self) -> float:
        return self.time_s

    def wait(self, seconds: float) -> None:
        self.time_s += seconds + self.late_s


@dataclass
class Loader:
    """A loader whose batches advance the clock: `epoch` batches of `batch_s` each."""

    clock: SteppedClock
    batch_s: float
    epoch: int = 10
    first_s: float = 0.0
    yielded: int = 0
    closed: int = 0
    meter: Meter = field(default_factory=lambda: Meter(decode_threads=1, device="cpu"))

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.epoch):
            self.clock.time_s += self.batch_s if self.yielded else self.first_s
            self.yielded += 1
            self.meter.bytes_disk += 100 * BATCH
            self.meter.counted_bytes += 100 * BATCH
            yield np.zeros((BATCH, 2)), np.zeros(BATCH)

    def statistics(self) -> Statistics:
        return self.meter.snapshot()

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


def test_a_run_counts_what_came_in_its_measured_part(clock: SteppedClock) -> None:
    loader = Loader(clock, batch_s=0.25, first_s=3.0)
    done = play(lambda: loader, seconds=2.0, settle=1, clock=clock).figures
    assert (done.batches, done.samples, done.seconds) == (8, 8 * BATCH, 2.0)
    assert (done.samples_per_s, done.bytes_per_s) == (16.0, 1600.0)
    assert done.first_batch_s == 3.0
    assert (done.wait_p50_s, done.wait_p99_s, done.wait_share) == (0.25, 0.25, 1.0)
    assert (done.au, done.step_s) == (0.0, 0.0)
    assert done.bytes_by_tier == {"remote": 0, "peers": 0, "disk": 8 * BATCH * 100, "memory": 0}
    assert loader.yielded == 1 + 1 + 8
    assert loader.closed == 1


def test_utilisation_is_of_the_steps_as_they_were_measured(clock: SteppedClock) -> None:
    run = play(
        lambda: Loader(clock, batch_s=0.125), seconds=6.0, step_s=0.25, settle=2, clock=clock
    )
    done = run.figures
    assert run.facts.wait_share == done.wait_share  # the verdict has the same
    assert done.step_s == 0.375  # the wait was an eighth late: it counts as computed
    assert done.au == pytest.approx(75.0)
    assert done.wait_share == pytest.approx(0.25)


def test_batches_that_were_ready_are_not_counted(clock: SteppedClock) -> None:
    loader = Loader(clock, batch_s=0.125)
    done = play(lambda: loader, seconds=1.0, clock=clock)
    assert loader.yielded == 1 + SETTLE_BATCHES + 8
    assert len(done.waits_s) == done.figures.batches == 8


def test_slow_batches_settle_twice_and_are_measured_twice(clock: SteppedClock) -> None:
    loader = Loader(clock, batch_s=60.0)
    assert play(lambda: loader, seconds=0.5, clock=clock).figures.batches == 2
    assert loader.yielded == 1 + 2 + 2


def test_an_epoch_shorter_than_the_run_is_begun_again(clock: SteppedClock) -> None:
    assert (
        play(lambda: Loader(clock, batch_s=0.25, epoch=3), seconds=5.0, clock=clock).figures.batches
        == 20
    )


def test_an_epoch_without_a_batch_is_an_error_and_the_loader_is_closed(clock: SteppedClock) -> None:
    loader = Loader(clock, batch_s=0.25, epoch=0)
    with pytest.raises(ConfigError, match="no batch"):
        play(lambda: loader, seconds=5.0, clock=clock)
    assert loader.closed == 1


def test_an_interrupted_run_closes_its_loader(clock: SteppedClock) -> None:
    loader = Loader(clock, batch_s=0.25)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(lambda: loader, seconds=5.0, progress=interrupt, clock=clock)
    assert loader.closed == 1


def test_progress_is_reported_in_shares_twice_a_second(clock: SteppedClock) -> None:
    reported: list[float] = []
    play(lambda: Loader(clock, batch_s=0.125), seconds=4.0, progress=reported.append, clock=clock)
    assert reported == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0]


def test_the_floor_is_the_utilisation_of_a_loader_without_cost(clock: SteppedClock) -> None:
    assert floor_au((range(BATCH),), step_s=0.25, seconds=2.0, clock=clock) == 100.0


def test_samples_are_the_rows_of_the_first_tensor() -> None:
    assert samples_of(np.zeros((5, 3))) == 5
    assert samples_of((np.zeros((6, 3)), np.zeros(7))) == 6


def test_cpu_time_only_grows() -> None:
    before = tree_cpu_s()
    sum(range(10**5))
    assert tree_cpu_s() > before


# --- the search ----------------------------------------------------------------------------------

THREADS = (1, 2, 4, 8)
DEPTHS = (1, 2, 4)
AXES = (
    Axis(name="num_workers", values=THREADS, tie=True),
    Axis(name="prefetch_factor", values=DEPTHS),
    Axis(name="read", values=("copy", "pread")),
)
START = LoaderSettings(batch_size=64, num_workers=4)


@given(threads=st.sampled_from(THREADS), depth=st.sampled_from(DEPTHS), read=st.sampled_from("cp"))
@examples(30)
def test_a_clear_best_is_found_from_anywhere(threads: int, depth: int, read: str) -> None:
    def rate(setup: LoaderSettings) -> float:
        off = abs(THREADS.index(setup.num_workers) - THREADS.index(threads))
        off += abs(DEPTHS.index(setup.prefetch_factor) - DEPTHS.index(depth))
        return 1000 * 0.8**off * (1.3 if setup.read[0] == read else 1.0)

    found = tune(START, AXES, rate).best
    assert (found.num_workers, found.prefetch_factor, found.read[0]) == (threads, depth, read)


@given(seed=st.integers(0, 2**16), noise=st.floats(0, 0.1))
@examples(30)
def test_noise_alone_changes_nothing_that_costs_speed(seed: int, noise: float) -> None:
    """Four threads and more are equally fast, fewer are slower: as on a machine of four cores."""
    rng = np.random.default_rng(seed)
    runs = 0

    def rate(setup: LoaderSettings) -> float:
        nonlocal runs
        runs += 1
        return min(4, setup.num_workers) * 100 * float(1 + noise * rng.uniform(-0.5, 0.5))

    found = tune(START, AXES, rate)
    assert found.best.num_workers in (4, 8)
    assert found.noise <= MOST_NOISE
    assert runs == sum(map(len, found.runs.values())) <= 30


def test_threads_that_bring_nothing_are_left_out() -> None:
    found = tune(START, AXES, lambda setup: 100.0 + (setup.num_workers >= 2)).best
    assert found == LoaderSettings(batch_size=64, num_workers=1)


def test_small_losses_dont_add_up() -> None:
    """Half the threads cost a little less than the noise, half of those again much more."""
    start = LoaderSettings(batch_size=64, num_workers=8)
    losses = {8: 0, 4: 1, 2: 2, 1: 3}
    found = tune(start, AXES, lambda setup: 100 * 0.985 ** losses[setup.num_workers]).best
    assert found.num_workers == 4


def test_one_lucky_run_is_not_enough() -> None:
    lucky = iter([100.0, 100.0, 90.0, 140.0, 100.0, 100.0])
    axes = (Axis(name="num_workers", values=(2, 4, 8)),)
    assert tune(START, axes, lambda _: next(lucky)).best == START


@given(cores=st.integers(1, 256), samples=st.integers(64, 10**6), workers=st.integers(1, 300))
@examples(50)
def test_axes_hold_the_start_and_no_batch_beyond_the_set(
    cores: int, samples: int, workers: int
) -> None:
    start = LoaderSettings(batch_size=64, num_workers=workers)
    for axis in axes_for(start, cores=cores, samples=samples):
        assert getattr(start, axis.name) in axis.values
        assert axis.name != "batch_size" or max(axis.values) <= samples
    names = ("num_workers", "batch_size")
    left = axes_for(start, cores=cores, samples=samples, given=names)
    assert [axis.name for axis in left] == ["prefetch_factor", "read"]
