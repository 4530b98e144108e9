"""Measure how well the order mixes and what it costs: work, memory, shards that a node reads."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from benchmarks.mixing import label_variance
from benchmarks.order_large import in_a_child
from penstock.cache.base import keyed_hash, splitmix64
from penstock.pipeline.plan import Plan, default_lanes, default_window, label_spread
from tests.pipeline.plan.plans import batch_of, ids_of, whole

# -- how well it mixes, measured


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


def test_where_no_window_can_cover_it_labels_vary_no_more_than_the_formula_states():
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
                np.bincount(batch_of(plan, epoch, step * size, size)[:, 0], minlength=len(sizes))
                for step in range(steps)
            ]
        )
        expected = size / len(sizes)
        # Each shard has its share of every twentieth of the epoch: 6 standard deviations.
        assert np.abs(per_shard - expected).max() < 6 * math.sqrt(expected)


def meet_again(plan, size, *, rank=None, world=1):
    """Return how often two samples of a batch share one of the next epoch too, relative to a full
    shuffle.

    rank, world: count one rank's batches only.
    """
    where = np.full((2, plan.samples), -1)
    for epoch in (0, 1):
        for step, position in enumerate(range(0, plan.samples, size)):
            ids = ids_of(plan, epoch, position, size, rank=rank or 0, world=world)
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
    """Return from how many shards one rank's batch comes, on average."""
    places = range(0, plan.samples - size + 1, max(size, plan.samples // 8 // size * size))
    found = [
        len(np.unique(batch_of(plan, epoch, at, size, rank=rank, world=world)[:, 0]))
        for epoch in (0, 1)
        for at in places
        for rank in range(0, world, max(1, world // 16))
    ]
    return np.mean(found)


@pytest.mark.parametrize("shards", [1000, 10_000])
@pytest.mark.parametrize("world", [1, 8, 64, 256, 1024])
def test_a_ranks_batch_comes_from_several_shards(shards, world, record_property):
    """32 samples a rank, of a shuffled pack, with defaults: docs/explanation/mixing.md."""
    size = 32 * world
    lanes = default_lanes(size, shards)
    window = default_window(shards, lanes, global_batch=size, icc=0.0, shuffled=True)
    plan = Plan([600] * shards, seed=3, lanes=lanes, window=window)
    found = shards_of_a_rank(plan, size, world)
    record_property("shards_of_a_ranks_batch", float(found))
    assert found >= 4


@pytest.fixture
def counted(monkeypatch):
    """Count the numbers that are hashed, as a measure of work."""
    work = {"hashed": 0}

    def counting(*keys):
        result = keyed_hash(*keys)
        work["hashed"] += result.size
        return result

    real = splitmix64

    def mixing(x):
        work["hashed"] += x.size
        return real(x)

    monkeypatch.setattr("penstock.pipeline.plan.windows.splitmix64", mixing)
    monkeypatch.setattr("penstock.pipeline.plan.windows.keyed_hash", counting)
    monkeypatch.setattr("penstock.pipeline.plan.order.keyed_hash", counting)
    return work


def test_a_thousand_million_samples_cost_megabytes_at_any_position(counted):
    sizes = np.random.default_rng(0).integers(1, 2000, 10**6)
    sizes[::1000] = 0
    works, peaks = [], []
    for epoch, share in [(0, 0.0), (0, 0.31), (90, 0.63)]:
        counted["hashed"] = 0
        tracemalloc.start()
        plan = Plan(sizes, seed=1, lanes=64, window=16)
        assert len(batch_of(plan, epoch, int(plan.samples * share), 256)) == 256
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        works.append(counted["hashed"])
    assert plan.samples > 0.99e9
    assert max(peaks) < 200e6
    start, *later = works  # the first windows of an epoch are shorter: half a window on average
    assert max(later) < 1.02 * min(later)
    assert start < min(later) < 1.25 * start


def test_a_walk_hashes_each_sample_about_once(counted):
    plan = Plan([100] * 400, seed=1, lanes=16, window=4)
    counted["hashed"] = 0
    whole(plan, 0, 64)
    assert counted["hashed"] < 1.1 * plan.samples + 3 * len(plan.sizes)


def test_windows_smaller_than_a_batch_cost_no_more_than_the_batch(counted):
    plan = Plan([1] * 20_000, seed=1, lanes=1, window=3)
    batch_of(plan, 0, 0, 1)
    counted["hashed"] = 0
    whole(plan, 0, 500)
    assert counted["hashed"] < 2.5 * plan.samples  # and a hash for each window of 3


def nodes_per_shard(plan, size, nodes):
    """Return the mean number of nodes that read a shard in an epoch's full batches."""
    readers: set[tuple[int, int]] = set()
    for position in range(0, plan.samples - size + 1, size):
        for node in range(nodes):
            rows = batch_of(plan, 0, position, size, rank=node, world=nodes)
            readers.update((shard, node) for shard in np.unique(rows[:, 0]).tolist())
    return len(readers) / len(plan.sizes)


@pytest.mark.parametrize(
    ("size", "nodes"), [(64, 8), (128, 16), (128, 32), (128, 128), (256, 64), (64, 5)]
)
def test_few_nodes_read_a_shard(size, nodes, record_property):
    """Power-of-two batches, with fewer nodes than lanes and with more (R > L)."""
    shards = 200
    lanes = default_lanes(size, shards)
    plan = Plan(np.random.default_rng(1).integers(40, 90, shards), seed=2, lanes=lanes, window=4)
    found = nodes_per_shard(plan, size, nodes)
    record_property("nodes_per_shard", float(found))
    pieces = (shards + plan.strands - 1) / shards  # one that lies across two strands has two
    if lanes % nodes == 0:
        assert found <= pieces
    elif nodes % lanes == 0:  # so many nodes take turns in a lane
        assert found <= pieces * nodes / lanes
    else:  # no lane is split among more than two
        assert found <= pieces * 2


@pytest.mark.parametrize("shards", [2_000, 20_000, 100_000])
@pytest.mark.parametrize("nodes", [8, 512, 1024, 4096])
def test_few_of_very_many_nodes_read_a_shard(nodes, shards, record_property):
    """8 GPUs a node, 32 samples each. No cap by bytes: only a lack of shards makes readers."""
    size = nodes * 8 * 32
    lanes = default_lanes(size, shards)
    sizes = np.random.default_rng(1).integers(800, 1800, shards)
    plan = Plan(sizes, seed=2, lanes=lanes, window=4)
    each = [len(plan.shards(size, first=n, end=n + 1, world=nodes)) for n in range(nodes)]
    found = sum(each) / shards
    record_property("nodes_per_shard", found)
    assert lanes > shards / 8 or lanes == size / 8
    turns = max(1, nodes / lanes)
    assert found <= turns * (1 + 2 * min(nodes, lanes) / shards)


def peak_demand(plan, size, *, rank=0, world=1):
    """Return the largest number of samples in shards that a rank newly opens within 1/16 of a
    window, over the mean: 1 is steady.

    The windows that begin and end an epoch are left out: they have nothing to overlap with.
    """
    steps_a_window = plan.window * plan.lanes * plan.samples / len(plan.sizes) / size
    seen = np.zeros(len(plan.sizes), dtype=np.bool_)
    opened = []
    for position in range(0, plan.samples, size):
        rows = batch_of(plan, 0, position, size, rank=rank, world=world)
        shards = np.unique(rows[:, 0])
        opened.append(plan.sizes[shards[~seen[shards]]].sum())
        seen[shards] = True
    edge, stretch = math.ceil(1.5 * steps_a_window), round(steps_a_window / 16)
    steady = np.array(opened[edge:-edge], dtype=float)
    demand = steady[: len(steady) // stretch * stretch].reshape(-1, stretch).sum(axis=1)
    return demand.max() / demand.mean()


@pytest.mark.parametrize(
    ("size", "lanes", "window", "most"),
    [(256, 64, 8, 1.25), (1024, 128, 8, 1.25), (1024, 256, 4, 1.25), (256, 256, 2, 1.4)],
)
def test_the_demand_of_all_ranks_is_steady(size, lanes, window, most, record_property):
    """Without shifted window boundaries it would be more than 4 times as high."""
    sizes = np.random.default_rng(5).integers(56, 73, 8 * lanes * window)
    found = peak_demand(Plan(sizes, seed=2, lanes=lanes, window=window), size)
    record_property("peak_demand", float(found))
    assert found < most


@pytest.mark.parametrize(("nodes", "most"), [(4, 1.6), (8, 2.0), (32, 3.5)])
def test_the_demand_of_one_node_is_steady(nodes, most, record_property):
    """A node reads neighbouring lanes. With shifts that rise from lane to lane their windows would
    end almost together: more than twice this demand."""
    sizes = np.random.default_rng(5).integers(56, 73, 128 * 32)
    plan = Plan(sizes, seed=2, lanes=128, window=4)
    found = np.mean([peak_demand(plan, 256, rank=r, world=nodes) for r in range(3)])
    record_property("peak_demand_of_a_node", float(found))
    assert found < most


@pytest.mark.parametrize(
    "message",
    [
        {"shards": 200_000, "batch": 32_768, "extras": True},
        *(
            pytest.param(message, marks=pytest.mark.grid)
            for message in (
                {"shards": 200_000, "batch": 32_768, "shuffled": False},
                {"shards": 20_000, "batch": 1024},
                {"shards": 1_000_000, "batch": 32_768},
            )
        ),
    ],
)
def test_a_rank_of_a_thousand_begins_in_seconds_and_megabytes(message: dict[str, Any]) -> None:
    found = in_a_child(**message)
    assert found["plan_mib"] < 300
    assert found["first_cpu_s"] < 2  # of work, which a busy machine doesn't lengthen
