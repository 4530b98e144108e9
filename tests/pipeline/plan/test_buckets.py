"""Test batches by tokens: pools of the stream, cut and shuffled. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import (
    BatchSchedule,
    BucketPlan,
    BucketWalk,
    Cursor,
    LaneOrder,
    Plan,
    bucket_settings,
    cut_by_tokens,
    first_slot,
    least_tokens,
)
from tests.pipeline.plan.plans import batch_of, order_of_lanes
from tests.properties import examples

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=120)


def cost(lengths: list[int], *, is_padded: bool) -> int:
    counted = [max(1, each) for each in lengths]
    return max(counted) * len(counted) if is_padded else sum(counted)


@given(
    lengths=LENGTHS,
    more=st.integers(0, 200),
    is_padded=st.booleans(),
    ranks=st.integers(1, 4),
    has_bins=st.booleans(),
)
def test_no_batch_holds_more_than_its_tokens_nor_fewer_samples_than_ranks(
    lengths: list[int], more: int, is_padded: bool, ranks: int, has_bins: bool
) -> None:
    tokens, bins = least_tokens(max(*lengths, 1), ranks=ranks) + more, ranks if has_bins else 1
    order, ends = cut_by_tokens(
        np.array(lengths, np.int64), tokens=tokens, is_padded=is_padded, ranks=ranks, bins=bins
    )
    assert sorted(order.tolist()) == list(range(len(lengths)))
    batches = np.split(order, ends[:-1])
    for batch in batches:
        assert cost([lengths[i] for i in batch.tolist()], is_padded=is_padded) <= tokens
        assert len(batch) >= min(ranks, len(lengths))
        batch.sort()  # as a batch has its samples: in the order of the stream
        for bin in range(bins):
            mine = [lengths[i] for i in batch[bin * len(batch) // bins :][: len(batch)].tolist()]
            mine = mine[: (bin + 1) * len(batch) // bins - bin * len(batch) // bins]
            assert not mine or cost(mine, is_padded=is_padded) <= tokens // bins


def test_a_sample_longer_than_a_batch_is_refused() -> None:
    with pytest.raises(PlanError, match="a sample of 9 tokens is longer than the 8"):
        cut_by_tokens(np.array([3, 9]), tokens=8, is_padded=False, ranks=1)
    with pytest.raises(PlanError, match=r"9 tokens is longer than the 8 of a rank's part"):
        cut_by_tokens(np.array([3, 9]), tokens=16, is_padded=False, ranks=2, bins=2)


@given(count=st.integers(0, 200), bins=st.integers(1, 12), world=st.integers(1, 12))
def test_ranks_take_whole_bins_or_share_one(count: int, bins: int, world: int) -> None:
    cuts = [first_slot(count, rank, world, bins) for rank in range(world + 1)]
    assert cuts == sorted(cuts)
    assert (cuts[0], cuts[-1]) == (0, count)
    ends = {bin * count // bins for bin in range(bins + 1)}
    if world <= bins:
        assert ends.issuperset(cuts)
        assert max(np.diff([rank * bins // world for rank in range(world + 1)])) <= -(
            -bins // world
        )
    else:
        assert ends.issubset(cuts)
    if bins in (1, world):
        assert cuts == [rank * count // world for rank in range(world + 1)]


def made(
    lengths: list[list[int]],
    *,
    tokens: int,
    is_padded: bool,
    ranks: int,
    seed: int | None,
    smaller: int = 32,
    lanes: int = 2,
    lane_order: LaneOrder | None = None,
) -> tuple[BucketPlan, BucketWalk]:
    """A plan over samples of these lengths, and its walk. smaller: pools, so many times."""
    sizes = [len(each) for each in lengths]
    plan = Plan(sizes, seed=seed, lanes=lanes, window=2, lane_order=lane_order)
    flat = np.array([each for shard in lengths for each in shard], np.int64)
    report = bucket_settings("t", tokens=tokens, is_padded=is_padded, ranks=ranks, some=flat)
    object.__setattr__(report, "pool", max(2 * ranks, report.pool // smaller))
    first = np.cumsum([0, *map(len, lengths)])

    def look_up(rows: Any) -> Any:
        return flat[first[rows[:, 0]] + rows[:, 1]]

    buckets = BucketPlan(plan, report, look_up, seed=seed)
    walk = BucketWalk(
        samples=plan.samples,
        schedule=BatchSchedule.constant(report.batch),
        drop_last=False,
        buckets=buckets,
    )
    return BucketPlan(plan, report, look_up, seed=seed), walk


SHARDS = st.lists(st.lists(st.integers(1, 30), max_size=20), min_size=1, max_size=8).filter(any)


@examples(60)
@given(
    lengths=SHARDS,
    is_padded=st.booleans(),
    ranks=st.integers(1, 3),
    seed=st.none() | st.integers(0, 9),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    epoch=st.integers(0, 2),
)
def test_each_sample_once_an_epoch_in_any_worlds_and_restarts(
    lengths: list[list[int]],
    is_padded: bool,
    ranks: int,
    seed: int | None,
    worlds: list[int],
    epoch: int,
) -> None:
    longest = max(each for shard in lengths for each in shard)
    tokens = least_tokens(longest, ranks=ranks) + 50
    plan, walk = made(lengths, tokens=tokens, is_padded=is_padded, ranks=ranks, seed=seed)
    steps = list(walk.steps(Cursor(epoch, 0), endless=False))
    assert walk.left(Cursor(epoch, 0)) == len(steps)
    assert walk.left(Cursor(epoch, 0), most=1) == 1
    seen, batches = [], []
    for number, step in enumerate(steps):
        at, size, world = step.start, step.size, worlds[number % len(worlds)]
        whole = plan.places(at.epoch, at.position, size, low=0, high=size).rows
        slices = [
            batch_of(plan, epoch, at.position, size, rank=r, world=world) for r in range(world)
        ]
        np.testing.assert_array_equal(np.concatenate(slices), whole)
        mine = [lengths[shard][row] for shard, row in whole.tolist()]
        assert cost(mine, is_padded=is_padded) <= tokens
        for rows in slices:
            if mine := [lengths[shard][row] for shard, row in rows.tolist()]:
                assert cost(mine, is_padded=is_padded) <= tokens // ranks * -(-ranks // world)
        seen += [tuple(row) for row in whole.tolist()]
        batches.append(whole.tolist())
        assert walk.left(at) == len(steps) - number
        # A loader that begins here does as the one that walked all the way.
        again, fresh = made(lengths, tokens=tokens, is_padded=is_padded, ranks=ranks, seed=seed)
        assert fresh.step(at) == step
        np.testing.assert_array_equal(
            again.places(at.epoch, at.position, size, low=0, high=size).rows, whole
        )
    assert sorted(seen) == [(s, r) for s, shard in enumerate(lengths) for r in range(len(shard))]
    assert plan.fingerprint != Plan([1], seed=seed, lanes=1, window=1).fingerprint


def test_lengths_are_alike_in_a_batch_and_batches_come_in_any_order() -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 1000, 100).tolist() for _ in range(40)]
    plan, walk = made(lengths, tokens=20_000, is_padded=True, ranks=1, seed=5, smaller=1)
    filled, longest = [], []
    for step in walk.steps(Cursor(0, 0), endless=False):
        at = step.start
        rows = plan.places(0, at.position, step.size, low=0, high=step.size).rows.tolist()
        mine = [lengths[shard][row] for shard, row in rows]
        filled.append(sum(mine) / (max(mine) * len(mine)))
        longest.append(max(mine))
    assert np.mean(filled) > 0.9  # unsorted: about a half
    assert longest != sorted(longest, reverse=True)


@examples(40)
@given(lengths=SHARDS, seed=st.none() | st.integers(0, 9), data=st.data())
def test_steps_are_numbered_from_any_known_place(
    lengths: list[list[int]], seed: int | None, data: st.DataObject
) -> None:
    longest = max(each for shard in lengths for each in shard)
    tokens = least_tokens(longest, ranks=1) + 20
    _, walk = made(lengths, tokens=tokens, is_padded=False, ranks=1, seed=seed)
    starts = [
        step.start for epoch in range(3) for step in walk.steps(Cursor(epoch, 0), endless=False)
    ]
    _, other = made(lengths, tokens=tokens, is_padded=False, ranks=1, seed=seed)
    known = data.draw(st.integers(0, len(starts) - 1))
    other.know(starts[known], known)
    for number in data.draw(st.permutations(range(len(starts)))):
        assert other.step_number(starts[number]) == number
        assert other.cursor_of(number) == starts[number]
    _, third = made(lengths, tokens=tokens, is_padded=False, ranks=1, seed=seed)
    third.learn(other)
    assert third.cursor_of(known) == starts[known]
    with pytest.raises(PlanError, match="wanted 0 or more"):
        other.cursor_of(-1)


def test_too_many_samples_are_not_counted_for_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.pipeline.plan.buckets.MOST_COUNTED", 400)
    lengths = [[1 + each % 7 for each in range(100)]]
    _, walk = made(lengths, tokens=20, is_padded=False, ranks=1, seed=1)
    number = walk.step_number(Cursor(3, 0))
    with pytest.raises(PlanError, match=r"about \d+ of them, which is too much"):
        walk.step_number(Cursor(9, 0))
    with pytest.raises(PlanError, match="too much to wait for"):
        walk.cursor_of(100 * number)
    walk.know(Cursor(9, 0), 3 * number)  # as in a state
    assert walk.step_number(Cursor(9, 0)) == 3 * number
    assert walk.cursor_of(3 * number) == Cursor(9, 0)


@examples(60)
@given(
    lengths=SHARDS,
    is_padded=st.booleans(),
    world=st.integers(1, 4),
    lanes=st.integers(1, 5),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_an_order_of_lanes_sorts_each_batch_and_changes_none(
    lengths: list[list[int]],
    is_padded: bool,
    world: int,
    lanes: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    places = order_of_lanes(tuple(data.draw(st.permutations(range(lanes)))))
    longest = max(each for shard in lengths for each in shard)
    report: dict[str, Any] = {
        "tokens": least_tokens(longest, ranks=world) + 50,
        "is_padded": is_padded,
        "ranks": world,
        "seed": 3,
        "lanes": lanes,
    }
    plan, walk = made(lengths, **report)
    other, other_walk = made(lengths, **report, lane_order=places)
    steps = list(walk.steps(Cursor(epoch, 0), endless=False))
    assert steps == list(other_walk.steps(Cursor(epoch, 0), endless=False))
    if world > 1:  # bins change places as a whole
        for step in steps:
            at, size = step.start, step.size
            shares = [
                sorted(
                    sorted(batch_of(each, epoch, at.position, size, rank=r, world=world).tolist())
                    for r in range(world)
                )
                for each in (plan, other)
            ]
            assert shares[0] == shares[1]
            own_slots = other.own_slots(epoch, at.position, size)
            assert own_slots is not None
            before, after = (batch_of(each, epoch, at.position, size) for each in (plan, other))
            assert before[own_slots].tolist() == after.tolist()
        return
    own = Plan(plan.sizes, seed=3, lanes=lanes, window=2)
    stream = batch_of(own, epoch, 0, own.samples).tolist()
    lane_of = [x for x in range(lanes) for _ in range(x, own.samples, lanes)]
    place_of = {lane: place for place, lane in enumerate(places.groups)}
    for step in steps:
        at, size = step.start, step.size
        before = batch_of(plan, epoch, at.position, size)
        after = np.concatenate(
            [batch_of(other, epoch, at.position, size, rank=r, world=world) for r in range(world)]
        )
        where = [stream.index(row) for row in after.tolist()]
        assert where == sorted(where, key=lambda slot: (place_of[lane_of[slot]], slot))
        own_slots = other.own_slots(epoch, at.position, size)
        assert own_slots is not None
        assert before[own_slots].tolist() == after.tolist()
