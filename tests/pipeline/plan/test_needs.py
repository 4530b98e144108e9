"""Test which shards a node reads, how far ahead and at what pace, by properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline import World
from penstock.pipeline.plan import (
    DEMAND,
    MOST_AHEAD,
    MOST_ROOM,
    MOST_WIDENING,
    BatchSchedule,
    Cursor,
    LookAhead,
    Needs,
    Pace,
    Plan,
    Walk,
    node_ranks,
    open_windows_bytes,
    shards_of_ranks,
    widening,
    window_room_warning,
)
from tests.pipeline.plan.plans import batch_of, order_of_lanes
from tests.properties import examples

# -- which shards

shard_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Plan, int, int, int, int]:
    """A plan, a global batch, a world and ranks [first, end) of it."""
    lanes = draw(st.integers(1, 16))
    places = draw(st.one_of(st.none(), st.permutations(range(lanes))))
    plan = Plan(
        draw(shard_sizes),
        seed=draw(st.one_of(st.none(), st.integers(0, 99))),
        lanes=lanes,
        lane_order=None if places is None else order_of_lanes(tuple(places)),
        window=draw(st.integers(1, 4)),
        reshuffle=draw(st.sampled_from([0.0, 0.0, 0.5])),
    )
    world = draw(st.integers(1, 12))
    first = draw(st.integers(0, world - 1))
    batch = draw(st.integers(world, world + 40))
    return plan, batch, world, first, draw(st.integers(first + 1, world))


def touched(plan: Plan, batch: int, world: int, ranks: range, epoch: int, at: int) -> set[int]:
    rows = [batch_of(plan, epoch, at, batch, rank=rank, world=world)[:, 0] for rank in ranks]
    return set(np.concatenate(rows).tolist())


@examples(150)
@given(job=jobs(), epoch=st.integers(0, 3), data=st.data())
def test_full_batches_touch_only_the_shards_that_the_plan_lists(
    job: tuple[Plan, int, int, int, int], epoch: int, data: st.DataObject
) -> None:
    plan, batch, world, first, end = job
    report = set(plan.shards(batch, first=first, end=end, world=world).tolist())
    full = plan.samples - min(batch, plan.samples)
    at = data.draw(st.integers(0, full))
    assert touched(plan, batch, world, range(first, end), epoch, at) <= report


@examples(60)
@given(
    sizes=shard_sizes,
    seed=st.integers(0, 9),
    each=st.integers(1, 3),
    lanes_each=st.integers(1, 3),
    world=st.integers(1, 4),
)
def test_where_ranks_divide_lanes_and_lanes_the_batch_no_shard_is_listed_in_vain(
    sizes: list[int], seed: int, each: int, lanes_each: int, world: int
) -> None:
    lanes = lanes_each * world
    batch = lanes * each
    sizes = [*sizes, -sum(sizes) % batch]  # whole batches only
    plan = Plan(sizes, seed=seed, lanes=lanes, window=2)
    for rank in range(world):
        steps = range(0, plan.samples, batch)
        parts = (touched(plan, batch, world, range(rank, rank + 1), 1, at) for at in steps)
        report = plan.shards(batch, first=rank, end=rank + 1, world=world)
        assert set().union(*parts) == set(report.tolist())


@examples(80)
@given(job=jobs())
def test_all_ranks_together_read_every_shard(job: tuple[Plan, int, int, int, int]) -> None:
    plan, batch, world, first, end = job
    parts = [(0, first), (first, end), (end, world)]
    report = [plan.shards(batch, first=a, end=b, world=world) for a, b in parts if a < b]
    assert set(np.concatenate(report).tolist()) == set(np.flatnonzero(plan.sizes).tolist())
    assert all(np.all(np.diff(part) > 0) for part in report)


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="ranks"):
        Plan([4], seed=1, lanes=1, window=1).shards(4, first=1, end=1, world=2)


@examples(80)
@given(job=jobs(), drop_last=st.booleans())
def test_needs_are_what_the_ranks_batches_hold(
    job: tuple[Plan, int, int, int, int], drop_last: bool
) -> None:
    plan, batch, world, first, end = job
    walk = Walk(samples=plan.samples, schedule=BatchSchedule.constant(batch), drop_last=drop_last)
    needs = Needs(plan, walk, first=first, end=end, world=world)
    for cursor, shards in needs.shards(Cursor(1, 0), endless=False):
        wanted = touched(plan, batch, world, range(first, end), 1, cursor.position)
        assert set(shards.tolist()) == wanted


@examples(60)
@given(job=jobs(), more=st.lists(st.integers(12, 60), max_size=3))
def test_a_batch_that_grows_needs_what_each_of_its_sizes_does(
    job: tuple[Plan, int, int, int, int], more: list[int]
) -> None:
    plan, batch, world, first, end = job
    sizes = tuple(dict.fromkeys((batch, *more)))
    found = shards_of_ranks(plan, sizes, first=first, end=end, world=world)
    each = [plan.shards(size, first=first, end=end, world=world).tolist() for size in sizes]
    assert found.tolist() == sorted({shard for shards in each for shard in shards})


def test_a_nodes_ranks_are_in_a_row() -> None:
    assert node_ranks(World(10, 16, local_rank=2, local_size=8)) == (8, 16)
    assert node_ranks(World(0, 1)) == (0, 1)
    # Ranks dealt out to the nodes in turn: only this rank's own is known.
    assert node_ranks(World(1, 4, local_rank=1, local_size=4)) == (0, 4)
    assert node_ranks(World(3, 4, local_rank=1, local_size=2)) == (2, 4)
    assert node_ranks(World(1, 8, local_rank=3, local_size=4)) == (1, 2)


# -- room


@given(
    open_shards=st.floats(1, 3000),
    shard_bytes=st.integers(1, 2**30),
    share=st.sampled_from([1.0, 0.5, 0.125]),
    node_bytes=st.integers(0, 2**40),
)
def test_room_for_two_windows_is_never_more_than_the_nodes_share(
    open_shards: float, shard_bytes: int, share: float, node_bytes: int
) -> None:
    needed = open_windows_bytes(
        open_shards=open_shards, shard_bytes=shard_bytes, share=share, node_bytes=node_bytes
    )
    most = int(MOST_ROOM * node_bytes)
    assert needed <= most
    assert needed == most or needed >= 2 * open_shards * shard_bytes * share
    assert window_room_warning(needed, needed, window=2, lanes=3) is None
    if needed:
        words = window_room_warning(needed - 1, needed, window=2, lanes=3)
        assert words is not None
        assert f"max_bytes={needed} or" in words


# -- pace


@examples(100)
@given(
    batches=st.lists(st.integers(1, 10**8), min_size=1, max_size=60),
    shard=st.integers(10**7, 2 * 10**8),
    misses=st.floats(0, 1),
)
def test_demand_stays_below_the_consumption_and_the_allowance(
    batches: list[int], shard: int, misses: float
) -> None:
    pace = Pace(allowance_bytes=2**26)
    assert not pace.open  # nothing before the first batch was delivered
    consumed = fetched = 0
    for size in batches:
        pace.count_batch(size)
        consumed += size
        by_batch = int(misses * size)
        pace.spend_for_batches(by_batch)
        fetched += by_batch
        while pace.open:
            pace.spend(shard)
            fetched += shard
        assert fetched <= DEMAND * consumed + 2**26 + shard


def test_unused_bandwidth_is_not_saved_up() -> None:
    pace = Pace(allowance_bytes=100)
    for _ in range(1000):
        pace.count_batch(1000)
    assert pace.tokens <= 200


def test_another_loaders_traffic_does_not_stop_fills_for_ever() -> None:
    pace = Pace(allowance_bytes=100)
    pace.count_batch(10)
    pace.spend_for_batches(10**12)
    pace.count_batch(100)
    assert pace.open


def test_while_few_batches_are_ready_they_fetch_adjacent_bytes() -> None:
    width, widths = 1, []
    for ready_share in (1.0, 0.1, 0.1, 0.1, 0.3, *[0.6] * 5):
        width = widening(width, ready_share=ready_share)
        widths.append(width)
    assert widths == [1, 4, 16, 16, 16, 8, 4, 2, 1, 1]
    assert max(widths) == MOST_WIDENING


# -- look-ahead


def look_ahead(*, misses: int, waited: float = 0.0, batches: int = 100) -> LookAhead:
    found = LookAhead(least=4)
    for _ in range(batches):
        found.count_batch(10**6, period_s=0.1, waited_s=0.1 * waited, missed=misses > 0)
        found.count_misses(misses)
    return found


def test_the_look_ahead_hides_the_stores_latency() -> None:
    # 10 batches a second, 1 s for the slowest, 0.4 s for the mean: 10·(1 + 1.25·0.4) batches.
    assert look_ahead(misses=1).batches(mean_s=0.4, p99_s=1.0) == 4 + 15


def test_a_warm_dataset_has_no_look_ahead() -> None:
    assert look_ahead(misses=0).batches(mean_s=0.4, p99_s=1.0) == 4


def test_batches_that_wait_all_the_same_make_it_longer() -> None:
    late = look_ahead(misses=1, waited=0.5)
    assert late.batches(mean_s=0.1, p99_s=0.2) > 4 * look_ahead(misses=1).batches(
        mean_s=0.025, p99_s=0.05
    )


def test_no_more_is_asked_for_ahead_than_connections_can_take() -> None:
    """Two requests a connection: of batches that miss 64 samples each 3 ahead for 96 of them."""
    assert look_ahead(misses=64, waited=0.9).batches(mean_s=1.0, p99_s=2.0) == 4
    assert look_ahead(misses=16, waited=0.9).batches(mean_s=1.0, p99_s=2.0) == 13


@given(size=st.integers(1, 2**34), mean=st.floats(0, 100), p99=st.floats(0, 1000))
def test_the_look_ahead_has_bounds(size: int, mean: float, p99: float) -> None:
    found = LookAhead(least=3, max_bytes=2**30)
    found.count_batch(size, period_s=0.01, waited_s=0.01, missed=True)
    found.count_misses(1)
    batches = found.batches(mean_s=mean, p99_s=p99)
    assert 3 <= batches <= max(3, min(MOST_AHEAD, 2**30 // size))
