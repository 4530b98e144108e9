"""Test the division of positions among parts: exact, complete and monotone for any weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.readers.mixtures import ShareTree, integer_shares
from tests.properties import examples

WEIGHTS = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=40)
FAR = st.integers(0, 10**12)


def deviation(tree: ShareTree, n: int) -> float:
    """Return the largest difference between a part's count and its exact share."""
    whole, rest = divmod(n, tree.total)
    return float(
        np.abs(tree.counts(n) - whole * tree.shares - rest * tree.shares / tree.total).max()
    )


@examples(200)
@given(weights=WEIGHTS, n=FAR)
def test_each_position_belongs_to_one_part_and_counts_keep_the_shares(weights, n):
    tree = ShareTree(integer_shares(weights))
    counts = tree.counts(n)
    assert counts.sum() == n
    assert counts.min() >= 0
    assert deviation(tree, n) < 2


@examples(60)
@given(weights=WEIGHTS, start=FAR, length=st.integers(1, 500))
def test_positions_are_located_as_they_are_counted(weights, start, length):
    tree = ShareTree(integer_shares(weights))
    part, index = tree.locate(np.arange(start, start + length))
    before = tree.counts(start)
    for each in range(len(weights)):
        own = index[part == each]
        np.testing.assert_array_equal(own, before[each] + np.arange(len(own)))
    np.testing.assert_array_equal(
        before + np.bincount(part, minlength=len(weights)), tree.counts(start + length)
    )


@pytest.mark.parametrize("parts", [2, 30, 2419])
def test_counts_of_power_law_weights_keep_the_shares(parts):
    random = np.random.default_rng(parts)
    tree = ShareTree(integer_shares((random.pareto(0.7, parts) + 1e-9).tolist()))
    ends = [*range(1, 50), *random.integers(0, 10**12, 50).tolist()]
    assert max(deviation(tree, n) for n in ends) < 2


def test_a_rare_part_appears():
    shares = integer_shares([1.0, 1e-9])
    tree = ShareTree(shares)
    assert shares[1] == 1
    period = tree.total
    assert [int(tree.counts(n)[1]) for n in (period, 5 * period)] == [1, 5]


def test_the_order_of_equal_weights_is_the_order_of_parts():
    part, _ = ShareTree(integer_shares([1, 1, 1, 1])).locate(np.arange(4))
    assert sorted(part.tolist()) == [0, 1, 2, 3]


@examples(40)
@given(seed=st.integers(0, 2**32), lengths=st.lists(st.integers(1, 80), min_size=2, max_size=60))
def test_what_a_part_lacks_is_carried_over_a_change_of_weights(seed, lengths):
    random = np.random.default_rng(seed)
    counts, exact, owed = np.zeros(6), np.zeros(6), None
    for length in lengths:
        tree = ShareTree(integer_shares(random.random(6).tolist()), owed=owed)
        counts, exact = counts + tree.counts(length), exact + length * tree.shares / tree.total
        owed = tree.owed_after(length)
        np.testing.assert_allclose(owed, exact - counts, atol=1e-6)
        assert np.abs(owed).max() < 2


def test_limits_are_kept_and_the_rest_goes_to_the_others():
    tree = ShareTree(integer_shares([5, 3, 2]), most=np.array([10, 50, 40]))
    np.testing.assert_array_equal(tree.counts(100), [10, 50, 40])
    part, index = tree.locate(np.arange(100))
    assert [np.sort(index[part == each]).tolist() for each in range(3)] == [
        list(range(10)),
        list(range(50)),
        list(range(40)),
    ]


@pytest.mark.parametrize("weights", [[], [0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(PlanError, match="weights: got"):
        integer_shares(weights)
