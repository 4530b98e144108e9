"""Test batches of images with similar shapes: pools of whole batches, sorted and shuffled. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mixing import padding
from penstock.pipeline.plan import (
    Aspects,
    AspectSettings,
    BatchSchedule,
    BucketPlan,
    Cursor,
    LaneOrder,
    Plan,
    Walk,
)
from tests.pipeline.plan.plans import batch_of, order_of_lanes
from tests.properties import examples

SHARDS = st.lists(st.lists(st.integers(1, 30), max_size=20), min_size=1, max_size=8).filter(any)


def made(
    heights: list[list[int]],
    *,
    batch: int,
    pools: int = 2,
    seed: int | None = 3,
    lanes: int = 2,
    lane_order: LaneOrder | None = None,
) -> BucketPlan:
    """A plan over images of these heights and of width 8."""
    plan = Plan(list(map(len, heights)), seed=seed, lanes=lanes, window=2, lane_order=lane_order)
    dims = [np.array([[h, 8] for h in shard], np.int32).reshape(-1, 2) for shard in heights]
    similar = AspectSettings(field="image", pool=pools * batch, batch=batch)
    return BucketPlan(plan, similar, Aspects(dims.__getitem__), seed=seed)


def whole(plan: BucketPlan, epoch: int, position: int, size: int) -> list[Any]:
    found: list[Any] = batch_of(plan, epoch, position, size).tolist()
    return found


@examples(60)
@given(
    heights=SHARDS,
    batch=st.integers(1, 9),
    pools=st.integers(1, 4),
    seed=st.none() | st.integers(0, 9),
    worlds=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    epoch=st.integers(0, 2),
    later=st.integers(1, 9),
)
def test_each_sample_once_an_epoch_in_any_worlds_restarts_and_sizes(
    heights: list[list[int]],
    batch: int,
    pools: int,
    seed: int | None,
    worlds: list[int],
    epoch: int,
    later: int,
) -> None:
    plan = made(heights, batch=batch, pools=pools, seed=seed)
    samples, seen = plan.samples, list[Any]()
    walk = Walk(samples=samples, schedule=BatchSchedule.constant(batch), drop_last=False)
    for number, step in enumerate(walk.steps(Cursor(epoch, 0), endless=False)):
        at, world = step.start.position, worlds[number % len(worlds)]
        mine = whole(plan, epoch, at, step.size)
        slices = [batch_of(plan, epoch, at, step.size, rank=r, world=world) for r in range(world)]
        assert np.concatenate(slices).tolist() == mine
        # A loader that begins here does as the one that walked all the way.
        again = made(heights, batch=batch, pools=pools, seed=seed)
        assert whole(again, epoch, at, step.size) == mine
        seen += mine
    everything = [[s, r] for s, shard in enumerate(heights) for r in range(len(shard))]
    assert sorted(seen) == everything
    # Another batch size cuts the same order elsewhere.
    other = [row for at in range(0, samples, later) for row in whole(plan, epoch, at, later)]
    assert sorted(other) == everything


@examples(30)
@given(
    heights=SHARDS,
    batch=st.integers(1, 9),
    lanes=st.integers(1, 5),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_an_order_of_lanes_sorts_each_batch_and_changes_none(
    heights: list[list[int]], batch: int, lanes: int, epoch: int, data: st.DataObject
) -> None:
    places = order_of_lanes(tuple(data.draw(st.permutations(range(lanes)))))
    plan = made(heights, batch=batch, lanes=lanes)
    other = made(heights, batch=batch, lanes=lanes, lane_order=places)
    for at in range(0, plan.samples, batch):
        before, after = (whole(each, epoch, at, batch) for each in (plan, other))
        assert sorted(before) == sorted(after)
        own = other.own_slots(epoch, at, batch)
        assert own is not None
        assert [before[slot] for slot in own.tolist()] == after


@pytest.mark.parametrize(("batch", "ranks"), [(16, 1), (64, 8), (256, 8), (16, 8)])
def test_at_most_a_tenth_is_padding_on_sizes_as_in_coco(batch: int, ranks: int) -> None:
    for share in padding(batch, ranks).values():
        assert share["similar"] < 0.1
        assert share["similar"] < share["shuffled"] / 2


def test_batches_come_in_any_order_and_the_short_one_last() -> None:
    heights = [[int(h) for h in np.random.default_rng(s).integers(1, 1000, 50)] for s in range(9)]
    plan = made(heights, batch=20, pools=4)
    means = []
    for at in range(0, 450, 20):
        rows = whole(plan, 0, at, 20)
        means.append(np.mean([heights[s][r] for s, r in rows]))
        assert len(rows) == min(20, 450 - at)
    assert not np.all(np.diff(means[:4]) > 0) or not np.all(np.diff(means[4:8]) > 0)
    assert np.std(means) > 150
    unshuffled = made(heights, batch=20, pools=4, seed=None)
    first = [heights[s][r] for s, r in whole(unshuffled, 0, 0, 20)]
    second = [heights[s][r] for s, r in whole(unshuffled, 0, 20, 20)]
    assert max(first) <= min(second)


def test_sizes_are_looked_up_once_a_shard() -> None:
    asked = list[int]()

    def dims(shard: int) -> Any:
        asked.append(shard)
        return np.full((3, 2), shard + 1, np.int32)

    aspects = Aspects(dims)
    rows = np.array([[0, 1], [2, 0], [0, 2]], np.int64)
    assert aspects(rows).tolist() == [2**20] * 3
    assert aspects(rows[:0]).tolist() == []
    aspects(rows)
    assert asked == [0, 2]
