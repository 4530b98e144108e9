"""Test which nodes may hold a shard, and which shards move, against a walk through the epochs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import Holders, LaneOrder, Plan, moves


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
        lane_order=None if places is None else LaneOrder(tuple(places)),
    )


def lane_sets(plan: Plan, epoch: int) -> list[set[int]]:
    """The lanes of each shard, from where its samples stand."""
    found: list[set[int]] = [set() for _ in plan.sizes]
    for position in range(plan.samples):
        shard = int(plan.batch(epoch, position, 1)[0, 0])
        found[shard].add(position % plan.lanes)
    return found


def reader_sets(plan: Plan, epoch: int, nodes: list[int]) -> list[set[int]]:
    """The nodes that read each shard, by batches that lanes and ranks divide."""
    size, world, found = plan.lanes * sum(nodes), sum(nodes), [set[int]() for _ in plan.sizes]
    node_of = np.repeat(np.arange(len(nodes)), nodes)
    for position in range(0, plan.samples - size + 1, size):
        for rank in range(world):
            for shard in plan.batch(epoch, position, size, rank=rank, world=world)[:, 0].tolist():
                found[shard].add(int(node_of[rank]))
    return found


@settings(max_examples=60, deadline=None)
@given(plan=some_plans(), epoch=st.integers(0, 3))
def test_moves_are_the_shards_that_come_into_another_lane(plan: Plan, epoch: int) -> None:
    now, then = lane_sets(plan, epoch), lane_sets(plan, epoch + 1)
    found = moves(plan, epoch)
    wanted = [(s, lane) for s in range(len(now)) for lane in sorted(then[s] - now[s])]
    assert list(zip(found.shard.tolist(), found.to.tolist(), strict=True)) == wanted
    assert all(
        int(source) in now[shard] for shard, source in zip(found.shard, found.source, strict=True)
    )
    assert plan.reshuffle or not len(found)


@settings(max_examples=60, deadline=None)
@given(plan=some_plans(), nodes=st.lists(st.integers(1, 3), min_size=1, max_size=4), data=st.data())
def test_readers_are_those_that_walk_over_it(
    plan: Plan, nodes: list[int], data: st.DataObject
) -> None:
    epoch = data.draw(st.integers(0, 2))
    holders = Holders(plan, nodes=nodes)
    walked = reader_sets(plan, epoch, nodes)
    for shard, size in enumerate(plan.sizes):
        readers = holders.readers(shard, epoch)
        assert walked[shard] <= set(readers)
        assert bool(readers) == bool(size)
        assert set(holders.nodes_of(shard, epoch)) >= set(readers)
    found = holders.moves(epoch)
    wanted = [
        (shard, node)
        for shard in range(len(plan.sizes))
        for node in holders.readers(shard, epoch + 1)
        if node not in holders.readers(shard, epoch)
    ]
    assert list(zip(found.shard.tolist(), found.to.tolist(), strict=True)) == wanted
    assert all(
        int(node) in holders.readers(shard, epoch)
        for shard, node in zip(found.shard.tolist(), found.source, strict=True)
    )


def test_readers_are_no_more_than_those_that_read() -> None:
    plan = Plan([200] * 16, seed=1, lanes=4, window=2)
    nodes = [2, 1, 3]
    holders = Holders(plan, nodes=nodes)
    walked = reader_sets(plan, 0, nodes)
    assert [set(holders.readers(shard, 0)) for shard in range(16)] == walked


def test_the_likeliest_are_named_first() -> None:
    plan = Plan([10] * 64, seed=1, lanes=8, window=2, reshuffle=1.0)
    held = np.zeros((4, 8), np.int64)
    held[3], held[1] = 500, 700
    holders = Holders(plan, nodes=[2] * 4, held=held, start_epoch=2)
    for shard in range(64):
        at_start, before, now = (holders.readers(shard, epoch) for epoch in (2, 4, 5))
        assert holders.nodes_of(shard, 2)[:2] == (1, 3)
        assert set(holders.nodes_of(shard, 2)) == {1, 3, *at_start}
        later = holders.nodes_of(shard, 5)
        assert later[: len(before)] == before
        assert set(later) == {1, 3, *before, *now}
        assert len(set(later)) == len(later)


def test_with_fixed_lanes_an_epoch_is_as_good_as_any() -> None:
    plan = Plan([10] * 64, seed=1, lanes=8, window=2)
    holders = Holders(plan, nodes=[2] * 4)
    for shard in range(64):
        assert holders.nodes_of(shard, 0) == holders.readers(shard, 9) == holders.readers(shard, 0)
    assert len(holders.moves(3)) == 0


def test_owners_are_shared_out_and_keep_what_they_own_when_one_goes() -> None:
    plan = Plan([10] * 800, seed=1, lanes=1, window=2)
    holders = Holders(plan, nodes=[1] * 8)
    owners = np.array([holders.owner(shard, 0) for shard in range(800)])
    assert np.bincount(owners, minlength=8).min() > 60
    alive = [node for node in range(8) if node != 3]
    left = np.array([holders.owner(shard, 0, alive) for shard in range(800)])
    assert (left[owners != 3] == owners[owners != 3]).all()
    assert 3 not in left
    assert holders.owner(0, 0, []) is None


@pytest.mark.parametrize(
    ("nodes", "held", "words"),
    [
        ([], None, "got nodes of"),
        ([1, 0], None, "got nodes of"),
        ([1], np.zeros((2, 4), np.int64), "one row for each of the 1 nodes"),
        ([1], np.zeros((1, 3), np.int64), "one column for each of 4 groups"),
    ],
)
def test_what_does_not_fit_is_refused(
    nodes: list[int], held: np.ndarray | None, words: str
) -> None:
    plan = Plan([10] * 64, seed=1, lanes=4, window=2)
    with pytest.raises(PlanError, match=words):
        Holders(plan, nodes=nodes, held=held)


def test_a_tenth_leaves_and_a_tenth_returns() -> None:
    plan = Plan(np.full(10**5, 100), seed=1, lanes=512, window=2, reshuffle=0.1)
    found = Holders(plan, nodes=[8] * 64).moves(4)
    # Who leaves in an epoch is back in the next one, unless it is drawn again.
    assert 0.17 * 10**5 < len(found) < 0.21 * 10**5
