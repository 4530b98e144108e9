"""What a rank reads of a step: its own samples once, stand-ins that aren't valid, partners."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.plan import (
    PARTNERS_ELSEWHERE,
    BatchSchedule,
    Cursor,
    LaneOrder,
    Plan,
    RankOrder,
    Walk,
    World,
    most_elsewhere,
    partners,
)

sizes = st.lists(st.integers(1, 20), min_size=1, max_size=12)


def ids(plan: Plan, rows: np.ndarray) -> list[int]:
    starts = np.cumsum(plan.sizes) - plan.sizes
    return [int(sample_id) for sample_id in starts[rows[:, 0]] + rows[:, 1]]


@given(sizes=sizes, world=st.integers(1, 5), per_rank=st.integers(1, 6), lanes=st.integers(1, 4))
def test_padded_slots_hold_each_sample_once_and_are_equal_on_all_ranks(
    sizes: list[int], world: int, per_rank: int, lanes: int
) -> None:
    plan = Plan(sizes, seed=1, lanes=lanes, window=2)
    batch = per_rank * world
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    valid: list[int] = []
    for rank in range(world):
        order = RankOrder(plan=plan, world=World(rank, world), padded_by=walk)
        for step in walk.steps(Cursor(2, 0), endless=False):
            slots = order.slots(step)
            assert slots.valid is not None
            assert len(slots.rows) == len(slots.valid) == per_rank
            assert slots.valid.tolist() == [row < slots.real for row in range(per_rank)]
            valid += ids(plan, slots.rows[: slots.real])
    assert sorted(valid) == list(range(plan.samples))


@given(
    sizes=sizes,
    world=st.integers(1, 5),
    each=st.integers(1, 4),
    lanes=st.integers(1, 4),
    data=st.data(),
)
def test_partners_are_read_beside_the_own_samples(
    sizes: list[int], world: int, each: int, lanes: int, data: st.DataObject
) -> None:
    plan = Plan(sizes, seed=1, lanes=lanes, window=2)
    batch = each * lanes * world
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    step = data.draw(st.sampled_from(list(walk.steps(Cursor(1, 0), endless=False))))
    at = step.start
    whole = plan.batch(at.epoch, at.position, step.size)
    wanted = partners(np.arange(step.size), position=at.position, size=step.size, lanes=plan.lanes)
    for rank in range(world):
        order = RankOrder(plan=plan, world=World(rank, world), mixes=True)
        slots = order.slots(step)
        assert slots.partner is not None
        own = slice(rank * step.size // world, (rank + 1) * step.size // world)
        assert slots.rows[: slots.real].tolist() == whole[own].tolist()
        assert slots.rows[slots.partner].tolist() == whole[wanted[own]].tolist()
        assert len(slots.rows) - slots.real <= PARTNERS_ELSEWHERE


@settings(max_examples=80, deadline=None)
@given(
    sizes=sizes,
    world=st.integers(1, 7),
    batch=st.integers(1, 60),
    lanes=st.integers(1, 8),
    data=st.data(),
)
def test_no_order_of_lanes_changes_who_is_mixed_with_whom(
    sizes: list[int], world: int, batch: int, lanes: int, data: st.DataObject
) -> None:
    batch = max(batch, world)
    places = LaneOrder(tuple(data.draw(st.permutations(range(lanes)))))
    own = Plan(sizes, seed=1, lanes=lanes, window=2)
    plan = Plan(sizes, seed=1, lanes=lanes, window=2, lane_order=places)
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    step = data.draw(st.sampled_from(list(walk.steps(Cursor(1, 0), endless=False))))
    at, size = step.start, step.size
    whole = own.batch(at.epoch, at.position, size)
    wanted = partners(np.arange(size), position=at.position, size=size, lanes=lanes)
    pairs = dict(zip(ids(own, whole), ids(own, whole[wanted]), strict=True))
    found: dict[int, int] = {}
    room = -(-batch // world) + most_elsewhere(batch, lanes=lanes, ranks=world)
    for rank in range(world):
        slots = RankOrder(plan=plan, world=World(rank, world), mixes=True).slots(step)
        assert slots.partner is not None
        mine = ids(own, slots.rows[: slots.real])
        found |= dict(zip(mine, ids(own, slots.rows[slots.partner]), strict=True))
        assert len({tuple(row) for row in slots.rows.tolist()}) == len(slots.rows) <= room
        if size >= 2 * lanes:
            assert len(slots.rows) - slots.real <= PARTNERS_ELSEWHERE
    assert found == pairs
