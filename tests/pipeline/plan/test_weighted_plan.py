"""Test weighted sampling: exact counts, the same batches at every world size, numbered copies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import Plan, WeightedPlan, expected_counts


def weighted(weights, *, shards=12, lanes=2, seed=5) -> WeightedPlan:
    sizes = np.diff(np.linspace(0, len(weights), shards + 1).astype(np.int64))
    counts = expected_counts(np.asarray(weights, np.float64))
    return WeightedPlan(
        sizes, counts, seed=seed, plan=lambda s: Plan(s, seed=seed, lanes=lanes, window=3)
    )


def delivered(plan: WeightedPlan, epoch: int, size: int = 32):
    """Return the id and the occurrence of each sample of an epoch."""
    first = np.cumsum(plan.sizes) - plan.sizes
    found = [
        plan.places(epoch, at, size, low=0, high=min(size, plan.samples - at))
        for at in range(0, plan.samples, size)
    ]
    rows = np.concatenate([each.rows for each in found])
    return first[rows[:, 0]] + rows[:, 1], np.concatenate([each.occurrences for each in found])


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 20)), min_size=1, max_size=120),
    epoch=st.integers(0, 5),
)
def test_each_sample_is_delivered_as_often_as_expected(weights, epoch):
    if not any(weights):
        return
    plan, expected = weighted(weights), expected_counts(np.array(weights))
    ids, occurrences = delivered(plan, epoch)
    counts = np.bincount(ids, minlength=len(weights))
    assert counts.sum() == plan.samples == round(expected.sum())
    assert np.all(counts >= np.floor(expected - 1e-6))
    assert np.all(counts <= np.ceil(expected + 1e-6))
    assert max(Counter(zip(ids.tolist(), occurrences.tolist(), strict=True)).values()) == 1
    assert np.all(occurrences < counts[ids])


def test_counts_are_right_on_average():
    weights = np.random.default_rng(0).random(200) * 1.5
    expected = expected_counts(weights)
    counts = sum(
        np.bincount(delivered(weighted(weights, seed=seed), 0)[0], minlength=200)
        for seed in range(200)
    )
    share = expected % 1  # of the runs in which a sample has one copy more
    sigma = np.sqrt(np.maximum(share * (1 - share) / 200, 1e-9))
    assert np.abs((counts / 200 - expected) / sigma)[share > 0.01].max() < 4.5


@pytest.mark.parametrize("world", [2, 7, 32])
def test_every_world_size_gives_the_same_global_batches(world):
    plan, ranks = weighted(np.arange(100) % 4), [weighted(np.arange(100) % 4) for _ in range(world)]
    for at in range(0, plan.samples, 32):
        count = min(32, plan.samples - at)
        whole = plan.places(1, at, 32, low=0, high=count)
        parts = [
            rank.places(1, at, 32, low=r * count // world, high=(r + 1) * count // world)
            for r, rank in enumerate(ranks)
        ]
        np.testing.assert_array_equal(np.concatenate([p.rows for p in parts]), whole.rows)
        np.testing.assert_array_equal(
            np.concatenate([p.occurrences for p in parts]), whole.occurrences
        )


def test_equal_weights_deliver_each_sample_once():
    ids, occurrences = delivered(weighted(np.ones(300)), 3)
    np.testing.assert_array_equal(np.sort(ids), np.arange(300))
    assert not occurrences.any()


def test_copies_are_spread():
    ids, _ = delivered(weighted(np.full(240, 4.0), shards=24), 0)
    assert np.mean(ids[1:] == ids[:-1]) < 0.05


@pytest.mark.parametrize("weights", [[0.0, 0.0], [-1.0, 2.0], [float("nan")], [float("inf")]])
def test_weights_that_are_no_counts_are_refused(weights):
    with pytest.raises(PlanError, match="weights: wanted finite"):
        expected_counts(np.array(weights))


def test_another_number_of_weights_is_refused():
    with pytest.raises(PlanError, match="wanted one for each of 3 samples"):
        WeightedPlan(
            np.array([3]), np.ones(4), seed=0, plan=lambda s: Plan(s, seed=0, lanes=1, window=1)
        )
