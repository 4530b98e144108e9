"""Test AU as DLIO defines it, and emulated accelerators."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.pipeline.bench import ACCELERATORS, accelerator
from penstock.pipeline.plan.sizing import au_percent

# Whole microseconds: DLIO's own subtraction loses smaller differences.
seconds = st.integers(0, 10**9).map(lambda us: us / 1e6)
steps = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=50)


def dlio(steps: list[tuple[float, float]]) -> float:
    """Compute AU like its statscounter: from the load and compute times of every step, including
    the first."""
    ends = list(itertools.accumulate(load + compute for load, compute in steps))
    total = ends[-1] - (steps[0][0] + steps[0][1])
    computed = sum(compute for _, compute in steps[1:])
    return 100 * computed / total if computed else 0.0


@given(steps=steps)
def test_au_is_dlios(steps: list[tuple[float, float]]) -> None:
    rest = steps[1:]
    elapsed = sum(load + compute for load, compute in rest)
    au = au_percent([compute for _, compute in rest], elapsed)
    assert au == pytest.approx(dlio(steps), rel=1e-6, abs=1e-6)
    assert 0 <= au <= 100


@given(computes=st.lists(st.floats(1e-3, 10), min_size=1), wait=st.floats(0, 10))
def test_waiting_lowers_au_and_none_is_a_hundred(computes: list[float], wait: float) -> None:
    assert au_percent(computes, sum(computes)) == pytest.approx(100)
    au = au_percent(computes, sum(computes) + wait)
    assert au == pytest.approx(100 * sum(computes) / (sum(computes) + wait))


@given(
    computes=st.lists(st.floats(1e-3, 10), min_size=1), wait=st.floats(0, 10), k=st.floats(0.01, 99)
)
def test_au_has_no_unit(computes: list[float], wait: float, k: float) -> None:
    elapsed = sum(computes) + wait
    scaled = au_percent([k * compute for compute in computes], k * elapsed)
    assert scaled == pytest.approx(au_percent(computes, elapsed))


def test_without_a_step_there_is_no_au() -> None:
    assert au_percent([], 0.0) == 0.0
    assert au_percent([0.0], 3.0) == 0.0


@pytest.mark.parametrize(("computes", "elapsed"), [([2.0], 1.0), ([3.0, -1.0], 5.0), ([1.0], -1.0)])
def test_times_of_two_clocks_are_refused(computes: list[float], elapsed: float) -> None:
    with pytest.raises(ConfigError, match="one clock"):
        au_percent(computes, elapsed)


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_a_step_scales_with_its_batch(name: str) -> None:
    found = accelerator(name)
    assert found.name == name
    assert found.step_for(found.batch_size) == found.step_s
    assert found.step_for(2 * found.batch_size) == pytest.approx(2 * found.step_s)
    assert found.samples_per_s == pytest.approx(1 / found.step_for(1))
    assert found.bytes_per_s == pytest.approx(found.samples_per_s * found.sample_bytes)


def test_the_published_paces() -> None:
    """Samples a second that follow from the published numbers."""
    paces = {name: found.samples_per_s for name, found in ACCELERATORS.items()}
    assert paces["h100-resnet50"] == pytest.approx(1785.7, abs=0.1)
    assert paces["h100-unet3d"] == pytest.approx(21.67, abs=0.01)
    assert paces["h100-cosmoflow"] == pytest.approx(285.7, abs=0.1)
    assert paces["a100-resnet50"] == pytest.approx(919.5, abs=0.1)
    assert paces["dgx-pod"] == pytest.approx(480)
    for model in ("resnet50", "unet3d", "cosmoflow"):  # the same job, on a slower accelerator
        newer, older = accelerator(f"h100-{model}"), accelerator(f"a100-{model}")
        assert older.step_s > newer.step_s
        assert (older.batch_size, older.sample_bytes) == (newer.batch_size, newer.sample_bytes)


def test_an_unknown_accelerator_is_answered_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"tpu.*h100-resnet50.*dgx-pod"):
        accelerator("tpu")
