"""Test weighted sampling: exact counts, the same batches at every world size, numbered copies."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError, PlanError, ResumeError
from penstock.pipeline.plan import (
    Cursor,
    MixturePlan,
    Plan,
    RankOrder,
    Step,
    WeightedPlan,
    WeightSettings,
    World,
)
from penstock.readers import SampleSlots, SampleWeights, checked_weights, sample_weights
from penstock.readers.mixtures import MixtureStream, WeightChange
from tests.pipeline.plan.plans import ids_of
from tests.properties import examples
from tests.sources import values_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]


def weighted(
    weights: ArrayLike, *, shards: int = 12, lanes: int = 2, seed: int = 5, units: int = 0
) -> WeightedPlan:
    """Return the plan of samples in equal shards. units: of each shard; 0: it is one."""
    array = np.asarray(weights, np.float64)
    sizes = np.diff(np.linspace(0, len(array), shards + 1).astype(np.int64))
    known = SampleWeights.of(array)
    more: dict[str, Any] = {}
    if units:
        cuts = [np.diff(np.linspace(0, size, units + 1).astype(np.int64)) for size in sizes]
        more["units"] = [each[each > 0] for each in cuts]
    contents = values_of(sizes.tolist(), weights=known, **more)
    own = WeightSettings.first(known)
    assert own is not None
    return WeightedPlan(contents, own, seed=seed, lanes=lanes, window=3)


def delivered(plan: WeightedPlan, epoch: int, size: int = 32) -> tuple[Ints, Ints]:
    """Return the id and the occurrence of each sample of an epoch."""
    first = np.cumsum(plan.sizes) - plan.sizes
    found = [
        plan.places(epoch, at, size, low=0, high=min(size, plan.samples - at))
        for at in range(0, plan.samples, size)
    ]
    rows = np.concatenate([each.rows for each in found])
    occurrences = [each.occurrences for each in found if each.occurrences is not None]
    return first[rows[:, 0]] + rows[:, 1], np.concatenate(occurrences)


def expected(weights: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(weights, np.float64)
    counts: NDArray[np.float64] = array * (max(1, round(array.sum())) / array.sum())
    return counts


@examples(80)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 20)), min_size=1, max_size=120),
    epoch=st.integers(0, 5),
    units=st.integers(0, 3),
)
def test_each_sample_is_delivered_as_often_as_expected(
    weights: list[float], epoch: int, units: int
) -> None:
    if not any(weights):
        return
    plan, counts = weighted(weights, units=units), expected(weights)
    ids, occurrences = delivered(plan, epoch)
    got = np.bincount(ids, minlength=len(weights))
    assert got.sum() == plan.samples == round(counts.sum())
    assert np.all(got >= np.floor(counts - 1e-6))
    assert np.all(got <= np.ceil(counts + 1e-6))
    assert max(Counter(zip(ids.tolist(), occurrences.tolist(), strict=True)).values()) == 1
    assert np.all(occurrences < got[ids])


@examples(60)
@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=200).filter(any),
    scale=st.floats(1e-6, 1e6),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_whole_counts_are_exact_in_any_scale(
    weights: list[int], scale: float, offset: float
) -> None:
    slots = SampleSlots(np.array(weights) * scale, sum(weights))
    ends = slots.before(np.arange(len(weights) + 1), offset)
    np.testing.assert_array_equal(np.diff(ends), weights)
    owners = slots.owners(np.arange(sum(weights)), offset)
    np.testing.assert_array_equal(owners, np.repeat(np.arange(len(weights)), weights))


@examples(60)
@given(
    weights=st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 20)), min_size=1, max_size=200),
    samples=st.integers(1, 500),
    offset=st.floats(0, 1, exclude_max=True),
)
def test_many_samples_are_found_by_a_guide(
    weights: list[float], samples: int, offset: float
) -> None:
    if not any(weights):
        return
    slots = np.arange(samples)
    wanted = SampleSlots(np.array(weights), samples).owners(slots, offset)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_weights, "_LEAST_GUIDED", 1)
        guided = SampleSlots(np.array(weights), samples)
        np.testing.assert_array_equal(guided.owners(slots, offset), wanted)
        assert not len(guided.owners(slots[:0], offset))


@pytest.mark.parametrize("samples", [3, 10**6, 2**32 - 1])
def test_sums_are_whole(samples: int) -> None:
    weights = np.random.default_rng(1).random(10_000) ** 9
    slots = SampleSlots(weights, samples)
    for offset in (0.0, 0.3, 1 - 2**-30):
        assert slots.before(np.array([0, len(weights)]), offset).tolist() == [0, samples]


def test_errors_of_rounding_make_no_count_negative() -> None:
    """A million counts of nearly 1 are rounded up; a tiny one can't make up for them."""
    count, step = 10**6, 2.0**-30
    weights = np.full(count + 2, 1 - 0.4 * step)
    weights[-2:] = 3 + 0.4 * count * step - 5 * step, 5 * step
    slots = SampleSlots(weights, count + 3)
    assert slots.least_and_most[0] == 0
    assert (np.diff(slots.before(np.arange(count + 3), 0.5)) >= 0).all()


def test_counts_are_right_on_average() -> None:
    """χ² over seeds: of the epochs in which a sample has one copy more."""
    weights = np.random.default_rng(0).random(200) * 1.5
    seeds = 200
    counts = sum(
        np.bincount(delivered(weighted(weights, seed=seed), 0)[0], minlength=200)
        for seed in range(seeds)
    )
    share = expected(weights) % 1
    some = (share > 0.05) & (share < 0.95)
    more = (counts - seeds * np.floor(expected(weights)))[some]
    share = share[some]
    chi2 = (more - seeds * share) ** 2 / (seeds * share * (1 - share))
    # All follow from one offset a seed, so their sum varies more than that of independent ones.
    assert chi2.max() < 4.5**2
    assert 0.2 < chi2.mean() < 3


@pytest.mark.parametrize("world", [2, 7, 32])
def test_every_world_size_gives_the_same_global_batches(world: int) -> None:
    plan, ranks = weighted(np.arange(100) % 4), [weighted(np.arange(100) % 4) for _ in range(world)]
    for at in range(0, plan.samples, 32):
        count = min(32, plan.samples - at)
        whole = plan.places(1, at, 32, low=0, high=count)
        parts = [
            rank.places(1, at, 32, low=r * count // world, high=(r + 1) * count // world)
            for r, rank in enumerate(ranks)
        ]
        np.testing.assert_array_equal(np.concatenate([p.rows for p in parts]), whole.rows)
        occurrences = [p.occurrences for p in parts if p.occurrences is not None]
        np.testing.assert_array_equal(np.concatenate(occurrences), whole.occurrences)


@pytest.mark.parametrize("units", [0, 4])
def test_equal_weights_give_the_order_without_weights(units: int) -> None:
    plan = weighted(np.full(300, 1.0), units=units)
    plain = Plan(plan.sizes, seed=5, lanes=2, window=3, units=plan._contents.units)
    ids, occurrences = delivered(plan, 3)
    wanted = [ids_of(plain, 3, at, 32) for at in range(0, 300, 32)]
    np.testing.assert_array_equal(ids, np.concatenate(wanted))
    assert not occurrences.any()


def test_copies_are_spread() -> None:
    ids, _ = delivered(weighted(np.full(240, 4.0), shards=24), 0)
    assert np.mean(ids[1:] == ids[:-1]) < 0.05


def test_a_shard_that_is_sometimes_empty_moves_no_other() -> None:
    """A lane has the same shards in each epoch, except at its borders."""
    weights = np.repeat([1.0, 0.02, 1.0, 0.02, 1.0], 400)
    plan = weighted(weights, shards=100, lanes=4)
    found, filled = list[set[int]](), list[list[int]]()
    for epoch in range(9):
        shards = plan.plan_of(epoch).shards_of_lanes(np.array([1]))
        found.append({*shards[weights[20 * shards] == 1].tolist()})
        filled.append(np.flatnonzero(plan.plan_of(epoch).sizes).tolist())
    assert all(len(each ^ found[0]) <= 2 for each in found)
    assert any(each != filled[0] for each in filled)


class TestSettings:
    FIRST = WeightSettings(samples=5, changes=((0, "a"), (3, "b")))

    def test_the_latest_weights_hold(self) -> None:
        assert [self.FIRST.name_in(epoch) for epoch in (0, 2, 3, 9)] == ["a", "a", "b", "b"]
        assert self.FIRST.changed(3, "c").changes == ((0, "a"), (3, "c"))
        assert self.FIRST.changed(0, "c").changes == ((0, "c"),)
        assert self.FIRST.changed(7, "b") == self.FIRST

    def test_old_changes_are_dropped(self) -> None:
        many = self.FIRST
        for epoch in range(4, 60):
            many = many.changed(epoch, str(epoch))
        assert len(many.changes) == 32
        with pytest.raises(PlanError, match=r"epoch 5: .* those of epoch 28 and later ones are"):
            many.name_in(5)

    def test_they_are_saved(self) -> None:
        assert WeightSettings.from_dict(self.FIRST.to_dict()) == self.FIRST
        for wrong in (
            {"samples": 0, "changes": [[0, "a"]]},
            {"samples": 5, "changes": [[0, 1]]},
            {"samples": 5, "changes": [[3, "a"], [0, "b"]]},
        ):
            with pytest.raises(ValueError, match="settings of weights"):
                WeightSettings.from_dict(wrong)

    def test_needed_weights_must_be_known(self) -> None:
        known = SampleWeights(arrays={"b": np.ones(5)}, first="b", samples=5)
        self.FIRST.check(known, epoch=3)
        with pytest.raises(ResumeError, match=r"weights of samples a .* this loader has b"):
            self.FIRST.check(known, epoch=2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.0, 0.0], "all are 0"),
        ([-1.0, 2.0], "got -1 for the sample at index 0, wanted finite"),
        ([2.0, float("nan")], "got nan for the sample at index 1, wanted finite"),
        ([float("inf"), -1], "got inf .* and 1 more like it"),
        ([1.0, 2.0, 3.0], "got 3 of them, wanted one for each of the 2 samples"),
        (["1", "2"], "wanted one number for each sample"),
        ([[1.0], [2.0]], "wanted one number for each sample"),
        (7, "wanted one number for each sample"),
    ],
)
def test_weights_that_are_no_counts_are_refused(weights: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked_weights(weights, 2)


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="wanted less than 2\\^32"):
        SampleWeights.of(np.array([1e12]))


def test_partners_of_other_parts_keep_the_occurrences_of_a_rank() -> None:
    """Of a mixture's parts, one has weights; a rank reads partners of the other part, too."""
    parts = [
        weighted([0.5, 3.0] * 40, shards=4, lanes=2),
        Plan([40, 40], seed=3, lanes=1, window=2),
    ]
    shares = WeightChange(start=0, shares=(3, 1))
    stream = MixtureStream(np.array([part.samples for part in parts]), [shares])
    plan, batch, lacking = MixturePlan(parts, stream, samples=80), 8, 0
    for position in range(0, 80, batch):
        whole = plan.places(0, position, batch, low=0, high=batch)
        for rank in range(4):
            order = RankOrder(plan=plan, world=World(rank, 4), mixes=True)
            found = order.slots(
                Step(Cursor(0, position), batch, Cursor(0, position + batch))
            ).samples
            if found.occurrences is None:
                continue
            lacking += len(found.rows) > 2
            assert found.occurrences.shape == (len(found.rows),)
            for row, number in zip(found.rows.tolist(), found.occurrences.tolist(), strict=True):
                at = whole.rows.tolist().index(row)
                assert number in ([0] if whole.occurrences is None else whole.occurrences[at:])
    assert lacking
