"""best_bins: as good as scipy's assignment, and within 5 % when the search ends early."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.plan import best_bins

assignment = pytest.importorskip("scipy.optimize").linear_sum_assignment


def best_sum(value: np.ndarray, room: np.ndarray) -> int:
    """Return the sum of scipy's assignment, with one column for each place of a bin."""
    columns = np.repeat(value, room, axis=1)
    return int(columns[assignment(columns, maximize=True)].sum())


def checked_sum(value: np.ndarray, room: np.ndarray, **options: int) -> int:
    bins = best_bins(value, room, **options)
    assert np.bincount(bins, minlength=len(room)).tolist() == room.tolist()
    return int(value[np.arange(len(bins)), bins].sum())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    room=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(sum),
    most=st.sampled_from([1, 2, 5, 1000, 2**40]),
    empty=st.floats(0, 1),
)
def test_the_sum_is_the_largest(seed: int, room: list[int], most: int, empty: float) -> None:
    rng = np.random.default_rng(seed)
    value = rng.integers(0, most, (sum(room), len(room)), endpoint=True)
    value[rng.random(value.shape) < empty] = 0
    bins = np.array(room)
    assert checked_sum(value, bins) == best_sum(value, bins)


@pytest.mark.parametrize("bins", [3, 40, 250])
@pytest.mark.parametrize("kind", ["any", "few", "product", "one"])
def test_hundreds_of_rows(bins: int, kind: str) -> None:
    rng = np.random.default_rng(bins)
    room = np.full(bins, 250 // bins)
    room[: 250 - room.sum()] += 1
    value = rng.integers(0, 2**24, (250, bins))
    if kind == "few":
        value[rng.random(value.shape) < 0.95] = 0
    elif kind == "product":
        value = np.outer(rng.integers(1, 2**10, 250), rng.integers(1, 2**10, bins))
    elif kind == "one":
        value[:, 1:] = 0
    assert checked_sum(value, room) == best_sum(value, room)


@pytest.mark.parametrize("work", [0, 2**20])
def test_a_search_that_ends_early_loses_little(work: int) -> None:
    rng = np.random.default_rng(1)
    value, room = rng.integers(0, 2**24, (300, 300)), np.ones(300, np.int64)
    assert checked_sum(value, room, most_work=work) >= 0.95 * best_sum(value, room)
