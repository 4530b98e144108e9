"""Test what a rank reads of a step: its samples once, invalid stand-ins, and partners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan import (
    PARTNERS_ELSEWHERE,
    BatchSchedule,
    Cursor,
    Plan,
    RankOrder,
    Walk,
    World,
    most_elsewhere,
    partners,
    with_partners,
)
from tests.pipeline.plan.plans import batch_of, order_of_lanes
from tests.properties import examples

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
def test_partners_are_read_next_to_the_own_samples(
    sizes: list[int], world: int, each: int, lanes: int, data: st.DataObject
) -> None:
    plan = Plan(sizes, seed=1, lanes=lanes, window=2)
    batch = each * lanes * world
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    step = data.draw(st.sampled_from(list(walk.steps(Cursor(1, 0), endless=False))))
    at = step.start
    whole = batch_of(plan, at.epoch, at.position, step.size)
    wanted = partners(np.arange(step.size), position=at.position, size=step.size, lanes=plan.lanes)
    for rank in range(world):
        order = RankOrder(plan=plan, world=World(rank, world), mixes=True)
        slots = order.slots(step)
        assert slots.partner is not None
        own = slice(rank * step.size // world, (rank + 1) * step.size // world)
        assert slots.rows[: slots.real].tolist() == whole[own].tolist()
        assert slots.rows[slots.partner].tolist() == whole[wanted[own]].tolist()
        assert len(slots.rows) - slots.real <= PARTNERS_ELSEWHERE


@examples(80)
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
    places = order_of_lanes(tuple(data.draw(st.permutations(range(lanes)))))
    own = Plan(sizes, seed=1, lanes=lanes, window=2)
    plan = Plan(sizes, seed=1, lanes=lanes, window=2, lane_order=places)
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    step = data.draw(st.sampled_from(list(walk.steps(Cursor(1, 0), endless=False))))
    at, size = step.start, step.size
    whole = batch_of(own, at.epoch, at.position, size)
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


def plainly(position: int, size: int, lanes: int) -> list[int]:
    """Partners one sample at a time, by the account in the docs."""
    stands = sorted((p % lanes, p // lanes) for p in range(position, position + size))
    found = []
    for slot, (lane, _) in enumerate(stands):
        members = [s for s, (other, _) in enumerate(stands) if other == lane]
        if len(members) == 1:
            members = list(range(size))
        nth = members.index(slot)
        other = nth + 1 if nth % 2 == 0 else nth - 1
        found.append(members[other if other < len(members) else max(0, nth - 1)])
    return found


@given(size=st.integers(1, 80), lanes=st.integers(1, 24), position=st.integers(0, 200))
@examples(200)
def test_partners_are_the_documented_ones(size: int, lanes: int, position: int) -> None:
    found = partners(np.arange(size), position=position, size=size, lanes=lanes)
    assert found.tolist() == plainly(position, size, lanes)


@given(size=st.integers(2, 300), lanes=st.integers(1, 40), position=st.integers(0, 10**15))
@examples(200)
def test_partners_are_neighbours_and_no_sample_is_its_own(
    size: int, lanes: int, position: int
) -> None:
    slots = np.arange(size)
    found = partners(slots, position=position, size=size, lanes=lanes)
    assert (np.abs(found - slots) == 1).all()
    if size // lanes >= 2:
        rows = np.array(sorted((p % lanes, p) for p in range(position, position + size)))
        assert (rows[found, 0] == rows[:, 0]).all()  # never another lane's


def test_a_batch_of_one_is_mixed_with_itself() -> None:
    assert partners(np.arange(1), position=5, size=1, lanes=3).tolist() == [0]


@given(
    size=st.integers(1, 300),
    world=st.integers(1, 20),
    lanes=st.integers(1, 40),
    position=st.integers(0, 200),
)
@examples(200)
def test_ranks_read_their_slots_and_at_most_two_more(
    size: int, world: int, lanes: int, position: int
) -> None:
    slots = np.arange(size)
    whole = []
    for rank in range(world):
        low, high = rank * size // world, (rank + 1) * size // world
        read, place = with_partners(
            low, partners(np.arange(low, high), position=position, size=size, lanes=lanes)
        )
        np.testing.assert_array_equal(read[: high - low], slots[low:high])
        assert len(np.unique(read)) == len(read) <= high - low + PARTNERS_ELSEWHERE
        whole.append(read[place])
    expected = partners(slots, position=position, size=size, lanes=lanes)
    np.testing.assert_array_equal(np.concatenate(whole), expected)


@given(lanes=st.integers(1, 12), each=st.integers(2, 9), step=st.integers(0, 50), data=st.data())
@examples(100)
def test_a_rank_with_whole_lanes_reads_nothing_twice(
    lanes: int, each: int, step: int, data: st.DataObject
) -> None:
    """Also where a batch has an odd number of a lane."""
    world = data.draw(st.sampled_from([w for w in range(1, lanes + 1) if lanes % w == 0]))
    size = lanes * each
    for rank in range(world):
        low, high = rank * size // world, (rank + 1) * size // world
        read, _ = with_partners(
            low, partners(np.arange(low, high), position=step * size, size=size, lanes=lanes)
        )
        assert read.tolist() == list(range(low, high))


@pytest.mark.parametrize(("shards", "lanes"), [(16, 4), (33, 4), (100, 16), (64, 2)])
@pytest.mark.parametrize("window", [2, 5, 100])
def test_partners_never_share_a_shard(shards: int, lanes: int, window: int) -> None:
    """Nor one that lies across two strands: those of a lane are half of the stream apart."""
    sizes = np.random.default_rng(0).integers(50, 70, shards)
    plan = Plan(sizes, seed=1, lanes=lanes, window=window)
    size = 5 * lanes
    for position in range(0, plan.samples - size, size):
        shard = batch_of(plan, 0, position, size)[:, 0]
        other = partners(np.arange(size), position=position, size=size, lanes=lanes)
        assert (shard != shard[other]).all()
