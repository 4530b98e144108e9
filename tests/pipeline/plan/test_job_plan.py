"""Test the plan of one part and of two: it is the same at every world size."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import BatchSchedule, Cursor, Needs, Plan, RankOrder, Walk, World
from tests.pipeline.plan.plans import batch_of, plans
from tests.pipeline.plan.two_parts import TwoParts

if TYPE_CHECKING:
    from penstock.pipeline.plan import JobPlan

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=8)


@st.composite
def two_parts(draw: st.DrawFn) -> TwoParts:
    """Two small datasets and their weights."""
    parts = tuple(
        Plan(draw(sizes), seed=draw(st.integers(0, 9)), lanes=draw(st.integers(1, 4)), window=2)
        for _ in range(2)
    )
    weights = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    return TwoParts(
        (parts[0], parts[1]), weights, samples=draw(st.integers(1, 3 * parts[0].samples))
    )


any_plan = st.one_of(plans(), two_parts())


@settings(max_examples=80, deadline=None)
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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=60, deadline=None)
@given(plan=two_parts(), size=st.integers(1, 40), world=st.integers(1, 6), data=st.data())
def test_two_parts_keep_their_shares(
    plan: TwoParts, size: int, world: int, data: st.DataObject
) -> None:
    """In any batch, in each rank's slice of it; and each part goes through its own epochs."""
    share = plan.weights[1] / sum(plan.weights)
    position = data.draw(st.integers(0, plan.samples - 1))
    whole = batch_of(plan, 0, position, size)
    assert abs(np.count_nonzero(whole[:, 0] >= plan.first_shard[1]) - share * len(whole)) <= 1
    for rank in range(world if size >= world else 0):
        mine = batch_of(plan, 0, position, size, rank=rank, world=world)
        assert abs(np.count_nonzero(mine[:, 0] >= plan.first_shard[1]) - share * len(mine)) <= 2


def test_shares_are_in_the_fingerprint() -> None:
    parts = (Plan([3], seed=1, lanes=1, window=1), Plan([4], seed=1, lanes=1, window=1))
    prints = {
        TwoParts(parts, weights, samples=10).fingerprint for weights in ((1, 2), (2, 1), (1, 1))
    }
    prints.add(TwoParts((parts[1], parts[0]), (1, 2), samples=10).fingerprint)
    assert len(prints) == 4


@settings(max_examples=40, deadline=None)
@given(plan=two_parts(), size=st.integers(1, 40))
def test_two_parts_go_through_epochs_of_their_own(plan: TwoParts, size: int) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()
    epochs = 3
    for epoch in range(epochs):
        for position in range(0, plan.samples, size):
            count = min(size, plan.samples - position)
            places = plan.places(epoch, position, size, low=0, high=count)
            assert places.epochs is not None
            seen.update(zip(*places.rows.T.tolist(), places.epochs.tolist(), strict=True))
    assert not seen or max(seen.values()) == 1  # no sample twice in an epoch of its part
    for part, total in enumerate(plan.before(epochs * plan.samples)):
        first, mine = plan.first_shard[part], plan.parts[part]
        of_part = Counter(
            epoch for shard, _, epoch in seen if first <= shard < first + len(mine.sizes)
        )
        whole = total // mine.samples  # epochs of the part that are over
        assert sum(of_part.values()) == total
        assert all(of_part[epoch] == mine.samples for epoch in range(whole))
