"""Test which nodes read a shard, against a walk through the epochs."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.pipeline.plan import Plan, ShardReaders
from tests.pipeline.plan.plans import batch_of, order_of_lanes
from tests.properties import examples


@st.composite
def some_plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=40))
    assume(sum(sizes))
    lanes = draw(st.integers(1, 8))
    places = draw(st.one_of(st.none(), st.permutations(range(lanes))))
    return Plan(
        sizes,
        seed=draw(st.integers(0, 9)),
        lanes=lanes,
        window=2,
        reshuffle=draw(st.sampled_from([0.0, 0.2, 1.0])),
        lane_order=None if places is None else order_of_lanes(tuple(places)),
    )


def reader_sets(plan: Plan, epoch: int, nodes: list[int]) -> list[set[int]]:
    """The nodes that read each shard, by batches that lanes and ranks divide."""
    size, world, found = plan.lanes * sum(nodes), sum(nodes), [set[int]() for _ in plan.sizes]
    node_of = np.repeat(np.arange(len(nodes)), nodes)
    for position in range(0, plan.samples - size + 1, size):
        for rank in range(world):
            rows = batch_of(plan, epoch, position, size, rank=rank, world=world)
            for shard in rows[:, 0].tolist():
                found[shard].add(int(node_of[rank]))
    return found


@examples(60)
@given(plan=some_plans(), nodes=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_readers_are_those_that_walk_over_it(
    plan: Plan, nodes: list[int], data: st.DataObject
) -> None:
    epoch = data.draw(st.integers(0, 2))
    planned = ShardReaders(plan, nodes=nodes)
    walked = reader_sets(plan, epoch, nodes)
    for shard, size in enumerate(plan.sizes):
        readers = planned.readers(shard, epoch)
        assert walked[shard] <= set(readers)
        assert bool(readers) == bool(size)


def test_readers_are_no_more_than_those_that_read() -> None:
    plan = Plan([200] * 16, seed=1, lanes=4, window=2)
    nodes = [2, 1, 3]
    planned = ShardReaders(plan, nodes=nodes)
    walked = reader_sets(plan, 0, nodes)
    assert [set(planned.readers(shard, 0)) for shard in range(16)] == walked


def test_with_fixed_lanes_an_epoch_is_as_good_as_any() -> None:
    plan = Plan([10] * 64, seed=1, lanes=8, window=2)
    planned = ShardReaders(plan, nodes=[2] * 4)
    for shard in range(64):
        assert planned.readers(shard, 9) == planned.readers(shard, 0)


def test_owners_are_shared_out() -> None:
    plan = Plan([10] * 800, seed=1, lanes=1, window=2)
    planned = ShardReaders(plan, nodes=[1] * 8)
    owners = np.array([planned.owner(shard, 0) for shard in range(800)])
    assert np.bincount(owners, minlength=8).min() > 60
