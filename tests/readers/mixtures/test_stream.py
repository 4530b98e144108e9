"""Test the stream of a mixture: parts' epochs, the ends of its own, and changes of weights."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.readers.mixtures import MixtureStream, WeightChange, epoch_samples, integer_shares
from tests.properties import examples

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def shares_of(*weights: float) -> tuple[int, ...]:
    return tuple(integer_shares(weights).tolist())


def random_shares(random: np.random.Generator, parts: int) -> tuple[int, ...]:
    return shares_of(*(random.random(parts) + 0.01))


@st.composite
def streams(draw, *, is_once=None, unit=1):
    """Draw a stream with constant weights, a step or a linear change."""
    sizes = np.array(draw(SIZES), np.int64)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    first, second = (random_shares(random, len(sizes)) for _ in range(2))
    changes = [WeightChange(start=0, shares=first)]
    kind = draw(st.sampled_from(["constant", "step", "linear"]))
    if kind == "step":
        changes.append(WeightChange(start=unit * draw(st.integers(1, 90)), shares=second))
    elif kind == "linear" and unit == 1:
        until = draw(st.integers(1, 90))
        changes = [
            WeightChange(start=0, shares=first, until=until, target=second),
            WeightChange(start=until + 10, shares=first),
        ]
    once = draw(st.booleans()) if is_once is None else is_once
    return MixtureStream(sizes, changes, is_once=once, unit=unit)


@examples(80)
@given(stream=streams())
def test_each_part_is_delivered_in_its_own_order(stream):
    part, index = stream.locate(np.arange(300))
    for each in range(len(stream.sizes)):
        own = index[part == each]
        np.testing.assert_array_equal(own, np.arange(len(own)))
    for sample in (0, 1, 77, 150, 299):
        np.testing.assert_array_equal(
            stream.counts(sample), np.bincount(part[:sample], minlength=len(stream.sizes))
        )


@examples(60)
@given(stream=streams(is_once=True), epoch=st.integers(0, 4))
def test_an_epoch_with_each_sample_once_has_each_sample_once(stream, epoch):
    total = int(stream.sizes.sum())
    part, index = stream.locate(np.arange(epoch * total, (epoch + 1) * total))
    for each, size in enumerate(stream.sizes.tolist()):
        np.testing.assert_array_equal(
            np.sort(index[part == each]), np.arange(epoch * size, (epoch + 1) * size)
        )


def test_shares_of_the_others_are_kept_when_a_part_is_used_up():
    sizes = np.array([100, 3000, 3000], np.int64)
    stream = MixtureStream(
        sizes, [WeightChange(start=0, shares=shares_of(0.5, 0.4, 0.1))], is_once=True
    )
    np.testing.assert_allclose(stream.counts(200), [100, 80, 20], atol=2)
    np.testing.assert_allclose(stream.counts(1200), [100, 880, 220], atol=2)


@examples(40)
@given(stream=streams(is_once=False, unit=16))
def test_a_batch_belongs_to_one_part(stream):
    part, index = stream.locate(np.arange(16 * 30))
    assert all(len({*batch}) == 1 for batch in part.reshape(30, 16).tolist())
    for each in range(len(stream.sizes)):
        own = index[part == each]
        np.testing.assert_array_equal(own, np.arange(len(own)))


@examples(60)
@given(sizes=SIZES, seed=st.integers(0, 2**32), rule=st.sampled_from(["first", "all"]))
def test_an_epoch_ends_when_its_rule_is_met(sizes, seed, rule):
    array = np.array(sizes, np.int64)
    changes = [WeightChange(start=0, shares=random_shares(np.random.default_rng(seed), len(sizes)))]
    samples, stream = epoch_samples(array, changes, rule), MixtureStream(array, changes)
    is_met = any if rule == "first" else all
    assert is_met(stream.counts(samples) >= array)
    assert not is_met(stream.counts(samples - 1) >= array)


def test_an_epoch_that_never_ends_is_refused():
    never = [WeightChange(start=0, shares=(2**30, 0))]
    with pytest.raises(PlanError, match="have more than"):
        epoch_samples(np.array([5, 5]), never, "all")


def test_a_stream_continues_from_a_recorded_change():
    sizes = np.array([40, 30, 20], np.int64)
    changes = [
        WeightChange(start=start, shares=shares_of(*weights))
        for start, weights in ((0, (5, 3, 2)), (101, (1, 1, 8)), (333, (4, 4, 2)))
    ]
    whole = MixtureStream(sizes, changes)
    known = whole.weights_at(333)
    later = MixtureStream(sizes, changes[2:], counts=known.counts, owed=known.owed)
    samples = np.arange(333, 900)
    for ours, theirs in zip(later.locate(samples), whole.locate(samples), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(PlanError, match="before 333"):
        later.counts(332)


def test_a_linear_change_goes_from_one_share_to_the_other():
    change = WeightChange(start=0, shares=shares_of(1, 3), until=10_000, target=shares_of(3, 1))
    stream = MixtureStream(np.array([10**6, 10**6]), [change])
    tenths = np.array([stream.counts(n * 1000)[0] for n in range(11)])
    assert np.all(np.diff(tenths, 2) > 0)  # each tenth has more of the first part
    np.testing.assert_allclose(tenths[-1], 5000, atol=30)
    np.testing.assert_allclose(stream.counts(20_000) - stream.counts(10_000), [7500, 2500], atol=2)


def test_linear_changes_carry_what_parts_lack():
    random = np.random.default_rng(3)
    sizes, starts = np.full(6, 10**6), [7 * n for n in range(101)]
    shares = [random_shares(random, 6) for _ in starts]
    changes = [
        WeightChange(start=start, shares=each, until=until, target=target)
        for start, each, until, target in zip(starts, shares, starts[1:], shares[1:], strict=False)
    ]
    counts = MixtureStream(sizes, changes).counts(starts[-1])
    exact = np.zeros(6)
    for change, end in zip(changes, starts[1:], strict=False):
        stages = [*change.stages(end), (end, np.zeros(6))]
        for (start, each), (until, _) in pairwise(stages):
            exact += (until - start) * each / each.sum()
    assert np.abs(counts - exact).max() < 2


def test_many_parts_cost_little():
    random = np.random.default_rng(1)
    sizes = random.integers(10**6, 10**9, 2419)
    changes = [WeightChange(start=0, shares=random_shares(random, 2419))]
    stream = MixtureStream(sizes, changes, is_once=True)
    total = int(sizes.sum())
    assert stream.counts(total // 2).sum() == total // 2
    np.testing.assert_array_equal(stream.counts(total), sizes)
