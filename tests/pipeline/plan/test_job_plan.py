"""Test plans of all kinds: of one part, of several, and weighted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import (
    BatchSchedule,
    Cursor,
    MixturePlan,
    Needs,
    Plan,
    RankOrder,
    Walk,
    WeightedPlan,
    WeightSettings,
    World,
)
from penstock.readers import SampleWeights
from penstock.readers.mixtures import MixtureStream, WeightChange, integer_shares
from tests.pipeline.plan.plans import batch_of, plans
from tests.properties import examples
from tests.sources import values_of

if TYPE_CHECKING:
    from penstock.pipeline.plan import JobPlan

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@st.composite
def mixtures(draw: st.DrawFn) -> MixturePlan:
    """Draw two or three small datasets and their weights."""
    parts = [
        Plan(draw(sizes), seed=draw(st.integers(0, 9)), lanes=draw(st.integers(1, 4)), window=2)
        for _ in range(draw(st.integers(2, 3)))
    ]
    weights = [draw(st.integers(1, 7)) for _ in parts]
    changes = [WeightChange(start=0, shares=tuple(integer_shares(weights).tolist()))]
    stream = MixtureStream(np.array([part.samples for part in parts]), changes)
    return MixturePlan(parts, stream, samples=draw(st.integers(1, 3 * parts[0].samples)))


@st.composite
def weighted(draw: st.DrawFn) -> WeightedPlan:
    """Draw a small dataset and the expected counts of its samples."""
    rows = draw(sizes)
    count = sum(rows)
    weights = draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    lanes = draw(st.integers(1, 4))
    known = SampleWeights.of(np.array([*weights[1:], 1.0]))
    own = WeightSettings.first(known)
    assert own is not None
    contents = values_of(rows, weights=known)
    return WeightedPlan(contents, own, seed=3, lanes=lanes, window=2)


any_plan = st.one_of(plans(), mixtures(), weighted())


@examples(80)
@given(plan=any_plan, epoch=st.integers(0, 3), size=st.integers(1, 60), data=st.data())
def test_slots_are_cut_from_one_batch(
    plan: JobPlan, epoch: int, size: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, plan.samples))
    count = min(size, plan.samples - position)
    whole = batch_of(plan, epoch, position, size)
    assert len(whole) == count
    low = data.draw(st.integers(0, count))
    high = data.draw(st.integers(low, count))
    some = plan.places(epoch, position, size, low=low, high=high)
    np.testing.assert_array_equal(some.rows, whole[low:high])
    assert np.all(some.rows[:, 1] < plan.sizes[some.rows[:, 0]])
    with pytest.raises(PlanError, match="slots"):
        plan.places(epoch, position, size, low=low, high=count + 1)


@examples(40)
@given(plan=any_plan, world=st.integers(1, 7), each=st.integers(1, 5))
def test_walkers_take_any_plan(plan: JobPlan, world: int, each: int) -> None:
    """Ranks share the batches; what a node needs is what its ranks read."""
    batch = world * each
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    needs = Needs(plan, walk, first=0, end=world, world=world)
    needed = dict(needs.shards(Cursor(1, 0), endless=False)) if plan.samples else {}
    for step in walk.steps(Cursor(1, 0), endless=False):
        at = step.start
        orders = [RankOrder(plan=plan, world=World(rank, world)) for rank in range(world)]
        rows = np.concatenate([order.slots(step).rows for order in orders])
        np.testing.assert_array_equal(rows, batch_of(plan, at.epoch, at.position, batch))
        assert needed[at].tolist() == sorted(set(rows[:, 0].tolist()))
        assert set(rows[:, 0].tolist()) <= set(
            plan.shards(batch, first=0, end=world, world=world).tolist()
        )
