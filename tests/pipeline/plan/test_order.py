"""Every property of the order that the design promises."""

from __future__ import annotations

import hashlib
import itertools
import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.pipeline.plan.lanes
import penstock.pipeline.plan.order
import penstock.pipeline.plan.windows
from penstock.cache.base.hashing import keyed_hash, splitmix64
from penstock.cache.errors import PlanError
from penstock.pipeline.plan.order import (
    Plan,
    default_lanes,
    default_window,
    label_spread,
    most_lanes,
)
from penstock.pipeline.plan.partners import partners

PRIMES_AND_POWERS = (1, 2, 3, 5, 7, 8, 16, 31, 64, 96)

sizes_lists = st.one_of(
    st.lists(st.integers(0, 40), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=30),
    st.lists(st.sampled_from([0, 1, 2, 400]), min_size=1, max_size=12),
)
seeds = st.one_of(st.integers(-(2**70), 2**70), st.integers(0, 9))


@st.composite
def plans(draw):
    return Plan(
        draw(sizes_lists),
        seed=draw(st.one_of(seeds, st.none())) if draw(st.booleans()) else draw(seeds),
        lanes=draw(st.integers(1, 24)),
        window=draw(st.one_of(st.integers(1, 5), st.sampled_from([50, 2**70]))),
        reshuffle=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )


def fresh(plan):
    """An equal plan without anything cached."""
    return Plan(
        plan.sizes,
        seed=plan.seed,
        lanes=plan.lanes,
        window=plan.window,
        reshuffle=plan.reshuffle,
    )


def whole(plan, epoch, size):
    """Ids of an epoch walked in global batches of `size`."""
    steps = [plan.ids(epoch, p, size) for p in range(0, plan.samples, size)]
    return np.concatenate([*steps, np.empty(0, dtype=np.int64)])


# -- what is visited


@settings(max_examples=150, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 5), size=st.integers(1, 70))
def test_each_epoch_visits_every_sample_once(plan, epoch, size):
    np.testing.assert_array_equal(np.sort(whole(plan, epoch, size)), np.arange(plan.samples))


@settings(max_examples=60, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 30), data=st.data())
def test_ids_agree_with_rows(plan, epoch, size, data):
    position = data.draw(st.integers(0, plan.samples))
    rows = plan.batch(epoch, position, size)
    assert rows.shape == (min(size, plan.samples - position), 2)
    assert rows.dtype == np.int64
    assert np.all(rows[:, 1] >= 0)
    assert np.all(rows[:, 1] < plan.sizes[rows[:, 0]])
    before = np.concatenate([[0], np.cumsum(plan.sizes)])
    ids = plan.ids(epoch, position, size)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, before[rows[:, 0]] + rows[:, 1])


@settings(max_examples=30, deadline=None)
@given(sizes=sizes_lists, epoch=st.integers(0, 3), size=st.integers(1, 50))
def test_without_a_seed_samples_come_in_index_order(sizes, epoch, size):
    plan = Plan(sizes, seed=None, lanes=7, window=3, reshuffle=0.5)
    assert (plan.lanes, plan.window, plan.reshuffle) == (1, 1, 0.0)
    np.testing.assert_array_equal(whole(plan, epoch, size), np.arange(plan.samples))


# -- what it doesn't depend on


@settings(max_examples=60, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 2), size=st.integers(96, 200), data=st.data())
def test_every_world_size_gives_the_same_global_batches(plan, epoch, size, data):
    position = data.draw(st.integers(0, plan.samples))
    world = data.draw(st.one_of(st.integers(1, 96), st.sampled_from(PRIMES_AND_POWERS)))
    assert_ranks_share(plan, epoch, position, size, world)


@pytest.mark.grid
@pytest.mark.parametrize("world", range(1, 97))
def test_every_world_size_gives_the_same_global_batches_on_the_whole_grid(world):
    sizes = np.random.default_rng(world).integers(0, 60, 40)
    for lanes, window, size in [(1, 3, 96), (8, 2, 96), (24, 1, 128), (96, 1, 192), (5, 4, 256)]:
        plan = Plan(sizes, seed=world, lanes=lanes, window=window)
        for epoch in range(3):
            for position in range(0, plan.samples + 1, size):
                assert_ranks_share(plan, epoch, position, size, world)


def assert_ranks_share(plan, epoch, position, size, world):
    together = plan.batch(epoch, position, size)
    slices = [plan.batch(epoch, position, size, rank=r, world=world) for r in range(world)]
    np.testing.assert_array_equal(np.concatenate(slices), together)
    lengths = [len(s) for s in slices]
    assert max(lengths) - min(lengths) <= 1


@settings(max_examples=60, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 2), data=st.data())
def test_batch_size_may_change_at_any_position(plan, epoch, data):
    """A ramp hands out the same stream: any cut of it holds the samples of its positions."""
    one_by_one = whole(plan, epoch, 1)
    position = 0
    while position < plan.samples:
        size = data.draw(st.integers(1, 90))
        ids = plan.ids(epoch, position, size)
        assert set(ids) == set(one_by_one[position : position + size])
        position += size


@settings(max_examples=60, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 60), data=st.data())
def test_seeking_equals_walking(plan, epoch, size, data):
    walked = [plan.batch(epoch, p, size) for p in range(0, plan.samples, size)]
    if walked:
        step = data.draw(st.integers(0, len(walked) - 1))
        np.testing.assert_array_equal(fresh(plan).batch(epoch, step * size, size), walked[step])


@settings(max_examples=30, deadline=None)
@given(plan=plans(), data=st.data())
def test_calls_in_any_order_agree(plan, data):
    """What is cached between calls (epochs, windows) never shows."""
    calls = data.draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, plan.samples), st.integers(1, 40)),
            max_size=12,
        )
    )
    for call in calls:
        np.testing.assert_array_equal(plan.batch(*call), fresh(plan).batch(*call))


def test_threads_agree():
    plan = Plan([50] * 40, seed=3, lanes=8, window=2)
    calls = [(epoch, p, 16) for p in range(0, 2000, 16) for epoch in (0, 1, 2)]
    expected = [fresh(plan).ids(*call) for call in calls[:60]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda call: plan.ids(*call), calls))
    np.testing.assert_array_equal(np.array(found[:60]), np.array(expected))
    assert sorted(np.concatenate(found)) == sorted(list(range(2000)) * 3)


# -- what it does depend on


@settings(max_examples=25, deadline=None)
@given(seed=seeds, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(seed, epoch):
    plan = Plan([9, 11, 10, 12] * 5, seed=seed, lanes=4, window=2)
    other = Plan(plan.sizes, seed=seed + 1, lanes=4, window=2)
    here = plan.ids(epoch, 0, 100)
    assert not np.array_equal(here, plan.ids(epoch + 1, 0, 100))
    assert not np.array_equal(here, other.ids(epoch, 0, 100))
    # seed + epoch must not be all that counts
    assert not np.array_equal(plan.ids(epoch + 1, 0, 100), other.ids(epoch, 0, 100))


GOLDEN: list[tuple[dict[str, Any], list[list[int]]]] = [
    (
        {"sizes": [3, 0, 5, 1, 4, 7], "lanes": 3},
        [
            [3, 7, 13, 10, 16, 18, 6, 5, 9, 11, 19, 14, 4, 0, 2, 8, 15, 17, 1, 12],
            [1, 4, 10, 2, 19, 14, 5, 7, 8, 11, 16, 17, 0, 6, 13, 9, 15, 18, 3, 12],
        ],
    ),
    (
        {"sizes": [3, 0, 5, 1, 4, 7], "lanes": 3, "reshuffle": 0.5},
        [
            [3, 7, 13, 10, 16, 18, 6, 5, 9, 11, 19, 14, 4, 0, 2, 8, 15, 17, 1, 12],
            [14, 4, 16, 19, 8, 11, 5, 7, 9, 17, 0, 1, 13, 6, 10, 15, 12, 2, 3, 18],
        ],
    ),
    (
        {"sizes": [3, 0, 5, 1, 4, 7, 2, 2, 6], "lanes": 2},
        [
            [
                20,
                23,
                21,
                2,
                25,
                1,
                19,
                0,
                22,
                24,
                16,
                26,
                6,
                10,
                4,
                14,
                8,
                15,
                9,
                5,
                11,
                27,
                13,
                28,
                7,
                12,
                3,
                17,
                29,
                18,
            ],
            [
                20,
                9,
                0,
                13,
                27,
                14,
                11,
                3,
                10,
                24,
                17,
                25,
                6,
                23,
                4,
                18,
                26,
                15,
                12,
                5,
                19,
                8,
                16,
                29,
                21,
                22,
                7,
                2,
                28,
                1,
            ],
        ],
    ),
]


@pytest.mark.parametrize(("settings", "golden"), GOLDEN)
def test_the_order_of_this_version_stays(settings, golden):
    """If this fails, running jobs can't resume: raise ORDER_VERSION and say so in the changelog."""
    plan = Plan(seed=7, window=2, **settings)
    assert penstock.pipeline.plan.order.ORDER_VERSION == 2
    assert [whole(plan, epoch, 6).tolist() for epoch in (0, 1)] == golden


def test_the_order_of_this_version_stays_for_many_windows():
    plan = Plan(np.arange(400) % 37, seed=-(2**70), lanes=12, window=3, reshuffle=0.25)
    digest = hashlib.sha256(whole(plan, 3, 48).astype("<i8").tobytes()).hexdigest()
    assert digest == "95df9f1260d7f5ecaa11cf60da5e637ea3cf04b28f6651aeb2259572c81dd8dd"


def test_the_fingerprint_stays_and_tells_plans_apart():
    def fingerprint(**changes):
        settings: dict[str, Any] = {
            "sizes": [3, 5],
            "seed": 7,
            "lanes": 2,
            "window": 2,
            "reshuffle": 0.0,
            **changes,
        }
        return Plan(settings.pop("sizes"), **settings).fingerprint

    assert fingerprint() == "4277e2bb2c91032a8a09d34da48c7137b8c118912e47dedf28ea046b26442ec0"
    others: list[dict[str, Any]] = [
        {"sizes": [5, 3]},
        {"sizes": [3, 5, 0]},
        {"seed": 8},
        {"seed": None},
        {"lanes": 1},
        {"window": 1},
        {"reshuffle": 0.1},
    ]
    assert len({fingerprint(), *(fingerprint(**o) for o in others)}) == len(others) + 1
    assert fingerprint(sizes=np.array([3, 5], dtype=np.uint8)) == fingerprint()


# -- the order itself, against a plain account of it


@settings(max_examples=80, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 60))
def test_order_is_the_documented_one(plan, epoch, size):
    if plan.seed is not None:
        expected = plainly(plan, epoch)
        at = 0
        for p in range(0, plan.samples, size):
            slots = sorted(
                (q % plan.lanes, q // plan.lanes) for q in range(p, min(p + size, len(expected)))
            )
            rows = plan.batch(epoch, p, size).tolist()
            assert rows == [list(expected[offset * plan.lanes + lane]) for lane, offset in slots]
            at += len(rows)
        assert at == plan.samples


def plainly(plan, epoch):
    """(shard, row) of each position, one sample at a time."""
    filled = np.flatnonzero(plan.sizes).tolist()
    strands = 2 * plan.lanes if len(filled) >= 4 * plan.lanes else plan.lanes
    assert plan.strands == strands
    stream = [(s, r) for s in dealt(plan, epoch, filled, strands) for r in range(plan.sizes[s])]
    lengths = [len(stream) // strands + (s < len(stream) % strands) for s in range(strands)]
    order, piece_number, begin = {}, 0, 0
    for strand, length in enumerate(lengths):
        samples = stream[begin : begin + length]
        begin += length
        pieces: dict[int, list[tuple[int, int]]] = {}
        for shard, row in samples:
            pieces.setdefault(shard, []).append((shard, row))
        ranked = []
        for piece in pieces.values():
            ranked.append((int(keyed_hash(plan.seed, 4, epoch, piece_number)), piece))
            piece_number += 1
        samples = [sample for _, piece in sorted(ranked) for sample in piece]
        for offset, sample in enumerate(in_windows(plan, epoch, strand, samples, len(filled))):
            order[offset * strands + strand] = sample
    return order


def dealt(plan, epoch, filled, strands):
    """Shards in the order in which they are laid end to end."""
    halves = strands // plan.lanes
    count = halves * max(1, len(filled) // strands)
    runs: list[list[int]] = [[] for _ in range(count)]
    for place, shard in enumerate(filled):
        runs[place * count // len(filled)].append(shard)
    halved: list[list[list[int]]] = [[] for _ in range(halves)]
    for number, run in enumerate(runs):
        run.sort(key=lambda shard: int(keyed_hash(plan.seed, 1, shard)))
        swapped = int(keyed_hash(plan.seed, 6, number // halves)) & 1
        halved[(number + swapped) % halves].append(run)
    order = [
        run[turn]
        for half in halved
        for turn in range(max(map(len, half), default=0))
        for run in half
        if turn < len(run)
    ]
    moves = [int(keyed_hash(plan.seed, 2, epoch, s)) / 2**64 < plan.reshuffle for s in order]
    movers = [shard for shard, goes in zip(order, moves, strict=True) if goes]
    movers.sort(key=lambda shard: -int(keyed_hash(plan.seed, 3, epoch, shard)))
    return [movers.pop() if goes else shard for shard, goes in zip(order, moves, strict=True)]


def in_windows(plan, epoch, strand, samples, filled):
    """A strand's samples, shuffled in windows of half of W shards or of W, and what is left."""
    if not samples:
        return []
    rows = max(1, plan.window * plan.samples * plan.lanes // (filled * plan.strands))
    shortest = plan.samples // plan.strands
    windows = max(1, shortest // rows)
    rows = max(1, shortest // windows)
    shift = phases(plan.strands)[strand] * rows // plan.strands - rows // 2
    bounds = [0, *(window * rows + shift for window in range(1, windows)), len(samples)]
    mixed: list[tuple[int, int]] = []
    for window, (start, end) in enumerate(itertools.pairwise(bounds)):
        part = samples[start:end]
        keys = [int(keyed_hash(plan.seed, 5, epoch, strand, window, i)) for i in range(len(part))]
        mixed += [part[i] for i in sorted(range(len(part)), key=lambda i: keys[i] >> 32)]
    return mixed


def phases(strands):
    step = max(1, round(strands * (math.sqrt(5) - 1) / 2))
    while math.gcd(step, strands) > 1:
        step -= 1
    return [strand * step % strands for strand in range(strands)]


# -- bounds: work, memory, shards a node reads, bursts


@pytest.fixture
def counted(monkeypatch):
    """How many numbers were hashed and how many window samples sorted, as a measure of work."""
    work = {"hashed": 0}

    def counting(*keys):
        result = keyed_hash(*keys)
        work["hashed"] += result.size
        return result

    real = splitmix64

    def mixing(x):
        work["hashed"] += x.size
        return real(x)

    monkeypatch.setattr(penstock.pipeline.plan.windows, "splitmix64", mixing)
    monkeypatch.setattr(penstock.pipeline.plan.windows, "keyed_hash", counting)
    monkeypatch.setattr(penstock.pipeline.plan.order, "keyed_hash", counting)
    return work


def test_a_thousand_million_samples_cost_megabytes_at_any_position(counted):
    sizes = np.random.default_rng(0).integers(1, 2000, 10**6)
    sizes[::1000] = 0
    works, peaks = [], []
    for epoch, share in [(0, 0.0), (0, 0.31), (90, 0.63)]:
        counted["hashed"] = 0
        tracemalloc.start()
        plan = Plan(sizes, seed=1, lanes=64, window=16)
        assert len(plan.batch(epoch, int(plan.samples * share), 256)) == 256
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
    plan.batch(0, 0, 1)
    counted["hashed"] = 0
    whole(plan, 0, 500)
    assert counted["hashed"] < 2.5 * plan.samples  # and a hash for each window of 3


def nodes_per_shard(plan, size, nodes):
    """How many nodes read a shard in an epoch's full batches, on average: 1 is the least."""
    readers: set[tuple[int, int]] = set()
    for position in range(0, plan.samples - size + 1, size):
        for node in range(nodes):
            rows = plan.batch(0, position, size, rank=node, world=nodes)
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
    """Most shard bytes that a rank newly opens in the 16th part of a window, over the mean: 1 is
    steady.

    The windows that begin and end an epoch are left out: they have nothing to overlap with.
    """
    steps_a_window = plan.window * plan.lanes * plan.samples / len(plan.sizes) / size
    seen = np.zeros(len(plan.sizes), dtype=np.bool_)
    opened = []
    for position in range(0, plan.samples, size):
        rows = plan.batch(0, position, size, rank=rank, world=world)
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
def test_demand_is_steady_because_windows_are_staggered(
    size, lanes, window, most, monkeypatch, record_property
):
    """However many ranks there are: together they read the same."""
    sizes = np.random.default_rng(5).integers(56, 73, 8 * lanes * window)
    plan = Plan(sizes, seed=2, lanes=lanes, window=window)
    shifted = peak_demand(plan, size)
    monkeypatch.setattr(
        penstock.pipeline.plan.windows, "_shifts", lambda strands, _: np.zeros(strands, int)
    )
    together = peak_demand(fresh(plan), size)
    record_property("peak_demand", float(shifted))
    record_property("peak_demand_unshifted", float(together))
    assert shifted < most
    assert together > 4 * shifted


@pytest.mark.parametrize(("nodes", "most"), [(4, 1.6), (8, 2.0), (32, 3.5)])
def test_a_nodes_own_demand_is_steadier_than_with_shifts_that_rise(
    nodes, most, monkeypatch, record_property
):
    """A node's lanes lie in a row: with such shifts they turn over almost together."""
    sizes = np.random.default_rng(5).integers(56, 73, 128 * 32)
    plan = Plan(sizes, seed=2, lanes=128, window=4)
    found = np.mean([peak_demand(plan, 256, rank=r, world=nodes) for r in range(3)])

    def rising(strands, rows):
        return np.arange(strands) % 128 * rows // 128 - rows // 2

    monkeypatch.setattr(penstock.pipeline.plan.windows, "_shifts", rising)
    almost_together = peak_demand(fresh(plan), 256, rank=1, world=nodes)
    record_property("peak_demand_of_a_node", float(found))
    assert found < most
    assert almost_together > 2 * found


@settings(deadline=None)
@given(strands=st.integers(1, 300), rows=st.integers(1, 1000))
def test_shifts_are_spread_evenly_over_all_strands_and_stay_within_half_a_window(strands, rows):
    shifts = penstock.pipeline.plan.windows._shifts(strands, rows)
    wanted = np.arange(strands) * rows // strands - rows // 2
    np.testing.assert_array_equal(np.sort(shifts), wanted)
    assert -rows <= 2 * shifts.min()
    assert 2 * shifts.max() <= rows


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


# -- reshuffle


def lane_of(plan, epoch):
    """Each shard's lane (of most of its samples) in an epoch."""
    rows = plan.batch(epoch, 0, plan.samples)  # sorted by lane
    lane = np.arange(plan.samples) * plan.lanes // plan.samples
    counts = np.zeros((len(plan.sizes), plan.lanes), dtype=np.int64)
    np.add.at(counts, (rows[:, 0], lane), 1)
    return counts.argmax(axis=1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3])
def test_about_the_reshuffle_share_changes_lane(share):
    lanes = 8
    plan = Plan([2] * 20_000, seed=4, lanes=lanes, window=2, reshuffle=share)
    home = lane_of(Plan(plan.sizes, seed=4, lanes=lanes, window=2), 0)
    for epoch in (0, 7):
        moved = np.mean(lane_of(plan, epoch) != home)
        # A shard that moves falls back into its lane once in L times; those near a cut slip across.
        assert abs(moved - share * (1 - 1 / lanes)) < 0.03
    if share:
        assert not np.array_equal(lane_of(plan, 0), lane_of(plan, 7))


# -- defaults


@settings(max_examples=200, deadline=None)
@given(batch=st.integers(1, 5000), shards=st.integers(0, 10**6))
def test_default_lanes_divide_the_batch(batch, shards):
    fits = [d for d in range(1, batch + 1) if batch % d == 0 and d <= min(shards / 4, batch / 8)]
    assert default_lanes(batch, shards) == max(fits, default=1)
    assert max([1, *fits]) <= most_lanes(batch, shards)


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({"icc": None, "shuffled": True}, 7),  # sqrt(40_000) = 200 open, over 32 lanes
        ({"icc": None, "shuffled": False}, 63),  # 2,000
        ({"icc": 0.0, "shuffled": False}, 7),
        ({"icc": -0.01, "shuffled": False}, 7),
        ({"icc": 0.1, "shuffled": False}, 80),  # 100 * 256 * 0.1 = 2,560
        ({"icc": 0.02, "shuffled": False}, 63),
        ({"icc": 0.1, "shuffled": True}, 80),
        ({"icc": 1.0, "shuffled": False}, 800),
    ],
)
def test_default_window_opens_what_labels_need(arguments, window):
    assert default_window(40_000, 32, global_batch=256, **arguments) == window


@pytest.mark.parametrize(
    ("shards", "lanes", "window"),
    [
        (1, 1, 1),
        (7, 1, 7),  # small sets mix as a whole
        (16, 4, 4),
        (64, 8, 8),
        (65, 8, 8),  # and larger ones no less
        (1000, 32, 4),  # a rank with one lane has some shards to mix
        (10**6, 32, 32),
    ],
)
def test_default_windows_of_shuffled_packs(shards, lanes, window):
    found = default_window(shards, lanes, global_batch=256, icc=0.0, shuffled=True)
    assert found == window


@settings(max_examples=100, deadline=None)
@given(
    shards=st.integers(0, 10**6),
    batch=st.integers(1, 10**5),
    icc=st.one_of(st.none(), st.floats(-0.1, 1)),
    shuffled=st.booleans(),
)
def test_default_window_is_enough_and_no_more_than_all(shards, batch, icc, shuffled):
    lanes = default_lanes(batch, shards)
    window = default_window(shards, lanes, global_batch=batch, icc=icc, shuffled=shuffled)
    assert window >= 1
    assert window * lanes >= min(shards, max(math.sqrt(shards), 64, 4 * lanes))
    assert (window - 1) * lanes < max(shards, 1)
    if icc is not None:
        assert window * lanes >= min(shards, 100 * batch * icc)
        open_shards = min(window * lanes, shards)
        if 0 < open_shards < shards:
            assert label_spread(batch, icc, open_shards, shards) <= 1.01 + 1e-9


def test_label_spread_follows_a_simulation():
    """Shards of one label each: batches from few open shards vary as the formula says."""
    rng = np.random.default_rng(0)
    batch, open_shards, shards, classes = 64, 32, 1000, 10
    labels = np.repeat(np.arange(classes), shards // classes)
    counts = [
        np.count_nonzero(labels[rng.choice(rng.choice(shards, open_shards, False), batch)] == 0)
        for _ in range(6000)
    ]
    full = batch / classes * (1 - 1 / classes)
    assert np.var(counts) / full == pytest.approx(
        label_spread(batch, 1.0, open_shards, shards), rel=0.1
    )
    assert label_spread(batch, 1.0, shards, shards) == 1
    assert label_spread(batch, 0.0, 1, shards) == 1
    assert label_spread(1, 1.0, 1, 0) == 1


# -- the ends, and what is refused


def test_the_end_of_an_epoch_clips_and_may_leave_ranks_without():
    plan = Plan([4, 3], seed=0, lanes=2, window=1)
    assert plan.batch(0, 7, 5).shape == (0, 2)
    assert plan.ids(0, 7, 5).shape == (0,)
    assert len(plan.ids(0, 5, 5)) == 2
    shares = [len(plan.ids(0, 5, 5, rank=r, world=5)) for r in range(5)]
    assert sorted(shares) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_is_an_epoch_of_no_batches(sizes):
    for seed in (None, 3):
        plan = Plan(sizes, seed=seed, lanes=4, window=2, reshuffle=0.5)
        assert plan.samples == 0
        assert plan.batch(0, 0, 8).shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "keywords", "message"),
    [
        ((-1, 0, 4), {}, "epoch"),
        ((0, -1, 4), {}, "position"),
        ((0, 8, 4), {}, "beyond"),
        ((0, 0, 0), {}, "size"),
        ((0, 0, -3), {}, "size"),
        ((0, 0.5, 4), {}, "position"),
        ((0, 0, 4), {"rank": 4, "world": 4}, "rank"),
        ((0, 0, 4), {"rank": -1, "world": 4}, "rank"),
        ((0, 0, 4), {"world": 0}, "world"),
        ((0, 0, 4), {"world": 5}, "each of 5 ranks"),
    ],
)
def test_calls_out_of_range_are_refused(call, keywords, message):
    plan = Plan([4, 3], seed=0, lanes=2, window=1)
    for method in (plan.batch, plan.ids):
        with pytest.raises(PlanError, match=message):
            method(*call, **keywords)


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": [1.5]},
        {"sizes": [[1]]},
        {"sizes": [3, -1]},
        {"sizes": [2**62]},
        {"sizes": [2**61, 2**61]},
        {"sizes": [2**63, 2**63]},
        {"sizes": ["a"]},
        {"lanes": 0},
        {"lanes": 2.0},
        {"window": 0},
        {"window": None},
        {"reshuffle": 1.5},
        {"reshuffle": -0.1},
        {"reshuffle": float("nan")},
        {"seed": "7"},
    ],
)
def test_plans_out_of_range_are_refused(wrong):
    good = {"sizes": [4, 3], "seed": 0, "lanes": 2, "window": 1}
    with pytest.raises(PlanError, match=next(iter(wrong))):
        Plan(**{**good, **wrong})


def test_a_window_beyond_32_bits_is_refused_with_what_to_do():
    plan = Plan([2**34] * 4, seed=0, lanes=1, window=2)
    with pytest.raises(PlanError, match="smaller window"):
        plan.batch(0, 0, 8)


def test_what_callers_hold_is_theirs():
    sizes = np.array([4, 3])
    plan = Plan(sizes, seed=0, lanes=2, window=1)
    before = plan.ids(0, 0, 7)
    sizes[:] = 0
    before_copy = before.copy()
    before[:] = -1
    np.testing.assert_array_equal(plan.ids(0, 0, 7), before_copy)
    with pytest.raises(ValueError, match="read-only"):
        plan.sizes[0] = 9


def test_a_plan_prints_in_short():
    assert repr(Plan([4, 3], seed=1, lanes=2, window=1)).startswith("Plan(<7 samples in 2 shards>")
