"""How well the order mixes, measured."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.pipeline.plan import Plan, default_lanes, default_window, label_spread, partners

# -- how well it mixes, measured


def label_variance(plan, labels, size):
    """Variance of the labels' counts in a batch, over that of a full shuffle; and how often
    partners are of one label, over how often two samples are by chance."""
    places = range(0, plan.samples // size * size, size)
    batches = [plan.ids(epoch, p, size) for epoch in range(2) for p in places]
    shares = np.bincount(labels) / plan.samples
    spread = wanted = alike = 0.0
    for ids in batches:
        there = np.bincount(labels[ids], minlength=len(shares))
        spread += float(((there - size * shares) ** 2).sum())
        left = (plan.samples - size) / (plan.samples - 1)
        wanted += float((size * shares * (1 - shares) * left).sum())
        other = partners(np.arange(size), position=0, size=size, lanes=plan.lanes)
        alike += float(np.mean(labels[ids] == labels[ids[other]]))
    return spread / wanted, alike / len(batches) / float((shares**2).sum())


SORTED = [(40, 5000), (300, 700), (1000, 200), (4000, 50)]


@pytest.mark.parametrize(("shards", "rows"), SORTED)
@pytest.mark.parametrize("classes", [10, 100, 1000])
@pytest.mark.parametrize("size", [1024, 4096, 8192])
def test_sorted_data_is_mixed_as_by_a_full_shuffle(shards, rows, classes, size, record_property):
    """Class-sorted, with defaults: what a batch holds, and who is mixed with whom."""
    lanes = default_lanes(size, shards)
    window = default_window(shards, lanes, global_batch=size, icc=1.0, shuffled=False)
    sizes = np.random.default_rng(1).integers(rows // 2, rows * 3 // 2, shards)
    plan = Plan(sizes, seed=3, lanes=lanes, window=window)
    labels = np.sort(np.arange(plan.samples) % classes)
    spread, alike = label_variance(plan, labels, size)
    record_property("label_variance", spread)
    record_property("partners_of_one_class", alike)
    assert spread < 1.05
    assert alike < 1.05


def test_where_no_window_can_cover_it_labels_vary_no_more_than_the_formula_says():
    """Correlated shards and a narrow window, so that it shows."""
    shards, rows, classes, size = 3000, 60, 10, 1024
    plan = Plan([rows] * shards, seed=3, lanes=128, window=4)
    labels = np.sort(np.arange(plan.samples) % classes)
    spread, alike = label_variance(plan, labels, size)
    assert 1.1 < spread < label_spread(size, 1.0, 128 * 4, shards)
    assert alike < 1.05


@pytest.mark.parametrize(("sizes", "lanes"), [([1000] * 4, 2), ([1000] * 8, 2), ([700] * 33, 4)])
@pytest.mark.parametrize("window", [100, 2**70])
def test_a_window_that_covers_a_lane_mixes_all_of_it(sizes, lanes, window):
    plan = Plan(sizes, seed=1, lanes=lanes, window=window)
    steps = 20
    size = plan.samples // steps
    for epoch in (0, 1):
        per_shard = np.array(
            [
                np.bincount(plan.batch(epoch, step * size, size)[:, 0], minlength=len(sizes))
                for step in range(steps)
            ]
        )
        expected = size / len(sizes)
        # Each shard has its share of every twentieth of the epoch: 6 standard deviations.
        assert np.abs(per_shard - expected).max() < 6 * math.sqrt(expected)


def meet_again(plan, size, *, rank=None, world=1):
    """How often two samples of a batch are in one batch of the next epoch too, over how often they
    would be after a full shuffle. rank, world: of one rank's batches only."""
    where = np.full((2, plan.samples), -1)
    for epoch in (0, 1):
        for step, position in enumerate(range(0, plan.samples, size)):
            ids = plan.ids(epoch, position, size, rank=rank or 0, world=world)
            where[epoch, ids] = step
    steps = where.max() + 1
    seen = where[:, (where >= 0).all(axis=0)]
    together = np.bincount(seen[0] * steps + seen[1])
    before = np.bincount(where[0][where[0] >= 0])
    pairs = (before * (before - 1)).sum()
    share = size / world
    return (together * (together - 1)).sum() / pairs / ((share - 1) / (plan.samples - 1))


@pytest.mark.parametrize(
    ("shards", "rows", "size"), [(7, 4000, 64), (16, 2000, 64), (64, 500, 256)]
)
def test_pairs_of_small_packs_meet_again_as_after_a_full_shuffle(shards, rows, size):
    lanes = default_lanes(size, shards)
    window = default_window(shards, lanes, global_batch=size, icc=0.0, shuffled=True)
    plan = Plan([rows] * shards, seed=3, lanes=lanes, window=window)
    assert meet_again(plan, size) == pytest.approx(1, abs=0.06)


def test_a_pair_meets_again_on_a_rank_as_often_as_lanes_and_windows_say():
    """A rank keeps its lanes (8 ranks: 8 times as often), which windows of a part of them raise."""
    shards, rows, size, world = 512, 64, 512, 8
    covering = Plan([rows] * shards, seed=3, lanes=64, window=8)
    assert meet_again(covering, size, rank=3, world=world) == pytest.approx(world, rel=0.1)
    narrow = Plan([rows] * shards, seed=3, lanes=16, window=4)
    again = meet_again(narrow, size, rank=3, world=world)
    assert 1.2 * world < again < 2 * world  # it is those of one shard that meet often


def shards_of_a_rank(plan, size, world):
    """How many shards one rank's batch comes from, on average."""
    places = range(0, plan.samples - size + 1, max(size, plan.samples // 8 // size * size))
    found = [
        len(np.unique(plan.batch(epoch, at, size, rank=rank, world=world)[:, 0]))
        for epoch in (0, 1)
        for at in places
        for rank in range(0, world, max(1, world // 16))
    ]
    return np.mean(found)


@pytest.mark.parametrize("shards", [1000, 10_000])
@pytest.mark.parametrize("world", [1, 8, 64, 256, 1024])
def test_a_ranks_batch_comes_from_several_shards(shards, world, record_property):
    """32 samples a rank, of a shuffled pack, with defaults; the table in docs/order.md."""
    size = 32 * world
    lanes = default_lanes(size, shards)
    window = default_window(shards, lanes, global_batch=size, icc=0.0, shuffled=True)
    plan = Plan([600] * shards, seed=3, lanes=lanes, window=window)
    found = shards_of_a_rank(plan, size, world)
    record_property("shards_of_a_ranks_batch", float(found))
    assert found >= 4
