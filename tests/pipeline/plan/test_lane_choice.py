"""Test the lane order that follows the nodes' data, and the assignment behind it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import (
    LaneChoice,
    LaneGroups,
    LaneOrder,
    Plan,
    best_bins,
    choose_lane_order,
    held_bytes_of_lanes,
)
from tests.pipeline.plan.plans import batch_of, order_of_lanes
from tests.properties import examples

LANES, BYTES = 256, 10**9


def shares(nodes: list[int], groups: int) -> np.ndarray:
    """The part of each place that each node reads, float, shape (nodes, groups)."""
    ends = np.cumsum(nodes) / sum(nodes)
    begins = ends - np.array(nodes) / sum(nodes)
    place = np.arange(groups)[None] / groups
    low = np.maximum(begins[:, None], place)
    part: np.ndarray = np.maximum(0.0, np.minimum(ends[:, None], place + 1 / groups) - low)
    return part * groups


def worth(held: np.ndarray, nodes: list[int], order: LaneOrder | None) -> float:
    """Bytes that nodes hold of what they read."""
    part = shares(nodes, held.shape[1])
    at = np.arange(held.shape[1]) if order is None else np.array(order.groups)
    return float((part * held[:, at]).sum())


def best(held: np.ndarray, nodes: list[int]) -> float:
    assignment = pytest.importorskip("scipy.optimize").linear_sum_assignment
    value = held.astype(float).T @ shares(nodes, held.shape[1])
    return float(value[assignment(value, maximize=True)].sum())


def after(nodes: list[int], lanes: int = LANES, order: LaneOrder | None = None) -> np.ndarray:
    """Return the caches of nodes that read the lanes of a job: shards of which a node reads more
    than a sliver."""
    at = np.arange(lanes) if order is None else np.array(order.groups)
    held = np.zeros((len(nodes), lanes), np.int64)
    held[:, at] = np.where(shares(nodes, lanes) > 1e-9, BYTES, 0)
    return held


def chosen(held: np.ndarray, nodes: list[int], last: LaneOrder | None = None) -> LaneChoice:
    return choose_lane_order(held, nodes=nodes, last=last, lanes=held.shape[1])


def share(choice: LaneChoice, lanes: int = LANES) -> float:
    """Of the whole dataset."""
    return choice.chosen / (lanes * BYTES)


def dealt(nodes: int, seed: int) -> list[int]:
    return [int(node) for node in np.random.default_rng(seed).permutation(nodes)]


@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_ranks_reassigned_read_what_they_hold(nodes: int) -> None:
    held = after([8] * nodes)[dealt(nodes, 1)]
    choice = chosen(held, [8] * nodes)
    assert share(choice) == 1.0
    assert worth(held, [8] * nodes, choice.order) == LANES * BYTES


@pytest.mark.parametrize(("nodes", "lanes"), [(4, 16), (8, 64), (8, 256), (32, 1024)])
def test_survivors_keep_what_they_hold_whichever_is_lost(nodes: int, lanes: int) -> None:
    full = after([8] * nodes, lanes)
    for lost in range(nodes):
        held = np.delete(full, lost, axis=0)[dealt(nodes - 1, lost)]
        choice = chosen(held, [8] * (nodes - 1))
        assert share(choice, lanes) == pytest.approx(1 - 1 / nodes, rel=1e-6)


def test_where_lanes_are_few_those_at_borders_are_read_twice() -> None:
    """31 nodes of 256 lanes have 7 or 8 whole places each."""
    held, nodes = np.delete(after([8] * 32), 5, axis=0), [8] * 31
    choice = chosen(held, nodes)
    assert 0.95 < share(choice) < 1 - 1 / 32
    assert worth(held, nodes, choice.order) >= 0.99 * best(held, nodes)


@pytest.mark.parametrize(("before", "now"), [(8, 4), (4, 8), (16, 32), (32, 16), (128, 256)])
def test_half_as_many_and_twice_as_many(before: int, now: int) -> None:
    full = after([8] * before)
    held = np.zeros((now, LANES), np.int64)
    rng = np.random.default_rng(now)
    which = rng.permutation(max(before, now))
    for node, old in enumerate(which[:now]):
        if old < before:
            held[node] = full[old]
    assert share(chosen(held, [8] * now)) == 0.5


def test_lanes_of_about_as_many_bytes_stay_next_to_their_neighbours() -> None:
    """Two that are torn apart leave a shard that lies in both to two nodes."""
    noise = np.random.default_rng(3).integers(0, BYTES // 50, LANES)
    held = np.zeros((8, LANES), np.int64)
    held[[1, 6, 3, 4]] = after([8] * 4) - noise * (after([8] * 4) > 0)
    choice = chosen(held, [8] * 8)
    node = np.argsort(choice.order.groups) // (LANES // 8)
    assert np.count_nonzero(np.diff(node)) <= 11  # of 255, where all orders have 7
    assert share(choice) > 0.49


def test_a_cold_node_in_place_of_a_lost_one_gets_what_no_node_has() -> None:
    held = after([8] * 8)[[5, 3, 1, 7, 0, 2, 6, 4]]
    held[2] = 0
    assert share(chosen(held, [8] * 8)) == 1 - 1 / 8


@examples(60)
@given(
    ranks=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    lanes=st.integers(1, 40),
    most=st.sampled_from([1, 3, 10**6, 10**15]),
    seed=st.integers(0, 2**32),
    empty=st.floats(0, 1),
)
def test_it_is_worth_half_of_what_can_be_or_more_and_no_less_than_before(
    ranks: list[int], lanes: int, most: int, seed: int, empty: float
) -> None:
    rng = np.random.default_rng(seed)
    held = rng.integers(0, most, (len(ranks), lanes), endpoint=True)
    held[rng.random(held.shape) < empty] = 0
    last = order_of_lanes(tuple(rng.permutation(lanes).tolist()))
    choice = chosen(held, ranks, last)
    got, most_worth = worth(held, ranks, choice.order), best(held, ranks)
    before = worth(held, ranks, last)
    assert got >= before * (1 - 1e-6)
    # What is within 1/32 of the largest is alike, and pairs that are chosen first block two others.
    least = (1 - 1e-6) * 31 / 64 * most_worth
    assert got >= least - 0.0101 * held.max(axis=0).sum()
    if choice.order != last:
        assert got >= least
    assert choice.chosen == pytest.approx(got, rel=1e-5, abs=lanes + most * 1e-6)
    assert choice.last == pytest.approx(before, rel=1e-5, abs=lanes + most * 1e-6)
    again = chosen(held.copy(), list(ranks), last)
    assert again == choice
    assert chosen(held, ranks, choice.order).order == choice.order  # a restart changes nothing


def test_what_is_gained_too_little_moves_nothing() -> None:
    held = after([8] * 8)
    last = order_of_lanes(tuple(np.random.default_rng(0).permutation(LANES).tolist()))
    there = after([8] * 8, order=last)
    assert chosen(there, [8] * 8, last).order == last
    noise = there + np.random.default_rng(1).integers(0, BYTES // 1000, there.shape)
    assert chosen(noise, [8] * 8, last).order == last
    assert chosen(held, [8] * 8).order.is_identity
    assert chosen(np.zeros_like(held), [8] * 8, last).order == last
    a_little = there.copy()
    a_little[:, 3] = 0
    a_little[6, 3] = BYTES  # one lane of 256: less than a hundredth
    assert chosen(a_little, [8] * 8, last).order == last


def test_what_is_as_good_where_it_was_stays_there() -> None:
    held = np.zeros((8, LANES), np.int64)
    held[0, 32:64] = BYTES  # node 0 has the data of node 1, and no node has other data
    order = chosen(held, [8] * 8).order
    assert sorted(order.groups[:32]) == list(range(32, 64))
    assert sorted(order.groups[32:64]) == list(range(32))
    assert list(order.groups[64:]) == list(range(64, LANES))
    held[:] = BYTES  # all hold all
    assert chosen(held, [8] * 8, order).order == order


def test_fewer_lanes_than_nodes() -> None:
    nodes = [1] * 32
    held = np.zeros((32, 8), np.int64)
    for node in range(32):
        held[node, (node // 4 + 3) % 8] = BYTES
    choice = chosen(held, nodes)
    assert choice.order.groups == (3, 4, 5, 6, 7, 0, 1, 2)
    assert share(choice, 8) == 1.0


def test_groups_of_many_lanes_and_a_shorter_last_one() -> None:
    lanes = 5000
    groups = len(LaneGroups(lanes))
    held = np.zeros((4, groups), np.int64)
    for group in range(groups):
        held[3 - group * 4 // groups, group] = 3 * BYTES
    order = choose_lane_order(held, nodes=[8] * 4, last=None, lanes=lanes).order
    assert order.groups[-1] == groups - 1
    assert LaneOrder.parse(order.text, lanes=lanes) == order
    assert worth(held, [8] * 4, order) > 0.99 * worth(held[::-1], [8] * 4, None)


@pytest.mark.parametrize("groups", [1024, pytest.param(2048, marks=pytest.mark.grid)])
@pytest.mark.parametrize(("kind", "least"), [("any", 0.98), ("dealt", 0.85), ("few", 0.9)])
def test_more_nodes_than_lanes(kind: str, least: float, groups: int) -> None:
    rng = np.random.default_rng(4)
    nodes = 2 * groups  # two a place, of which each reads half
    held = np.zeros((nodes, groups), np.int64)
    if kind == "any":
        held = rng.integers(0, BYTES, (nodes, groups))
    elif kind == "dealt":
        held[rng.permutation(nodes), np.arange(nodes) // 2] = BYTES
    else:
        for _ in range(3):
            held[np.arange(nodes), rng.integers(0, groups, nodes)] = rng.integers(0, BYTES, nodes)
    choice = chosen(held, [8] * nodes)
    assert worth(held, [8] * nodes, choice.order) >= least * best(held, [8] * nodes)


def test_a_last_order_of_other_lanes_is_refused() -> None:
    with pytest.raises(PlanError, match="of 3 lanes, wanted 4"):
        choose_lane_order(
            np.zeros((1, 4), np.int64), nodes=[1], last=order_of_lanes((0, 1, 2)), lanes=4
        )


# -- what is held of each lane


@examples(60)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(sum),
    lanes=st.integers(1, 9),
    reshuffle=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 99),
)
def test_held_bytes_of_lanes_count_the_rows_that_lanes_have(
    sizes: list[int], lanes: int, reshuffle: float, seed: int
) -> None:
    plan = Plan(sizes, seed=seed, lanes=lanes, window=2, reshuffle=reshuffle)
    each = 1000 * np.random.default_rng(seed).integers(0, 2, len(sizes))
    held = each * plan.sizes  # 1,000 bytes a row
    for epoch in (0, 3):
        rows = batch_of(plan, epoch, 0, plan.samples)
        lane = np.concatenate(
            [np.full(len(range(x, plan.samples, lanes)), x) for x in range(lanes)]
        )
        wanted = np.bincount(lane, weights=each[rows[:, 0]], minlength=lanes)
        assert held_bytes_of_lanes(plan, epoch, held).tolist() == wanted.astype(int).tolist()


def test_held_bytes_of_other_shards_are_refused() -> None:
    plan = Plan([3, 3], seed=0, lanes=1, window=1)
    with pytest.raises(PlanError, match=r"shape \(3,\), wanted \(2,\)"):
        held_bytes_of_lanes(plan, 0, np.zeros(3, np.int64))


def checked_sum(value: np.ndarray, room: np.ndarray) -> tuple[int, int]:
    """Return the sum of the chosen bins, and that of scipy's assignment, with one column for each
    place of a bin."""
    assignment = pytest.importorskip("scipy.optimize").linear_sum_assignment
    bins = best_bins(value, room)
    assert np.bincount(bins, minlength=len(room)).tolist() == room.tolist()
    columns = np.repeat(value, room, axis=1)
    most = columns[assignment(columns, maximize=True)].sum()
    return int(value[np.arange(len(bins)), bins].sum()), int(most)


@examples(200)
@given(
    seed=st.integers(0, 2**32),
    room=st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(sum),
    most=st.sampled_from([1, 2, 5, 1000, 2**40]),
    empty=st.floats(0, 1),
)
def test_each_row_has_a_bin_and_the_sum_is_large(
    seed: int, room: list[int], most: int, empty: float
) -> None:
    rng = np.random.default_rng(seed)
    value = rng.integers(0, most, (sum(room), len(room)), endpoint=True)
    value[rng.random(value.shape) < empty] = 0
    found, largest = checked_sum(value, np.array(room))
    assert 2 * found >= largest


@pytest.mark.parametrize("bins", [3, 40, 250])
@pytest.mark.parametrize("kind", ["any", "few", "product", "one"])
def test_hundreds_of_rows(bins: int, kind: str) -> None:
    rng = np.random.default_rng(bins)
    room = np.full(bins, 250 // bins)
    room[: 250 - room.sum()] += 1
    value = rng.integers(0, 2**24, (250, bins))
    if kind == "few":
        value[rng.random(value.shape) < 0.95] = 0
    elif kind == "product":
        value = np.outer(rng.integers(1, 2**10, 250), rng.integers(1, 2**10, bins))
    elif kind == "one":
        value[:, 1:] = 0
    found, largest = checked_sum(value, room)
    assert found >= (0.92 if kind == "few" else 0.97) * largest


@pytest.mark.parametrize("now", [7, 9, 12, 16])
def test_after_a_change_of_nodes_hardly_anything_is_lost(now: int) -> None:
    """Nodes that hold their lanes, and parts of others' from the job before."""
    rng = np.random.default_rng(now)
    full = after([8] * 8)
    old = np.maximum(full * rng.random(full.shape), full[dealt(8, 5)] * rng.random(full.shape))
    held = np.zeros((now, LANES), np.int64)
    held[rng.permutation(now)[: min(8, now)]] = old.astype(np.int64)[: min(8, now)]
    choice = chosen(held, [8] * now)
    assert worth(held, [8] * now, choice.order) >= 0.97 * best(held, [8] * now)
