"""Test the order: each sample once, equal on all ranks and for ever, as a plain account has it."""

from __future__ import annotations

import hashlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.cache.base import keyed_hash
from penstock.pipeline.plan import Plan
from tests.pipeline.plan.plans import (
    PRIMES_AND_POWERS,
    batch_of,
    fresh,
    ids_of,
    plans,
    seeds,
    sizes_lists,
    whole,
)
from tests.properties import examples

# -- what is visited


@examples(150)
@given(plan=plans(), epoch=st.integers(0, 5), size=st.integers(1, 70))
def test_each_epoch_visits_every_sample_once(plan, epoch, size):
    np.testing.assert_array_equal(np.sort(whole(plan, epoch, size)), np.arange(plan.samples))


@examples(60)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 30), data=st.data())
def test_ids_agree_with_rows(plan, epoch, size, data):
    position = data.draw(st.integers(0, plan.samples))
    rows = batch_of(plan, epoch, position, size)
    assert rows.shape == (min(size, plan.samples - position), 2)
    assert rows.dtype == np.int64
    assert np.all(rows[:, 1] >= 0)
    assert np.all(rows[:, 1] < plan.sizes[rows[:, 0]])
    before = np.concatenate([[0], np.cumsum(plan.sizes)])
    ids = ids_of(plan, epoch, position, size)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(ids, before[rows[:, 0]] + rows[:, 1])


@examples(30)
@given(sizes=sizes_lists, epoch=st.integers(0, 3), size=st.integers(1, 50))
def test_without_a_seed_samples_come_in_index_order(sizes, epoch, size):
    plan = Plan(sizes, seed=None, lanes=7, window=3, reshuffle=0.5)
    assert (plan.lanes, plan.window, plan.reshuffle) == (1, 1, 0.0)
    np.testing.assert_array_equal(whole(plan, epoch, size), np.arange(plan.samples))


# -- what it doesn't depend on


@examples(60)
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
    together = batch_of(plan, epoch, position, size)
    slices = [batch_of(plan, epoch, position, size, rank=r, world=world) for r in range(world)]
    np.testing.assert_array_equal(np.concatenate(slices), together)
    lengths = [len(s) for s in slices]
    assert max(lengths) - min(lengths) <= 1


@examples(60)
@given(plan=plans(), epoch=st.integers(0, 2), data=st.data())
def test_batch_size_may_change_at_any_position(plan, epoch, data):
    """A batch-size ramp delivers the same stream: any cut has the samples of its positions."""
    one_by_one = whole(plan, epoch, 1)
    position = 0
    while position < plan.samples:
        size = data.draw(st.integers(1, 90))
        ids = ids_of(plan, epoch, position, size)
        assert set(ids) == set(one_by_one[position : position + size])
        position += size


@examples(60)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 60), data=st.data())
def test_seeking_equals_walking(plan, epoch, size, data):
    walked = [batch_of(plan, epoch, p, size) for p in range(0, plan.samples, size)]
    if walked:
        step = data.draw(st.integers(0, len(walked) - 1))
        np.testing.assert_array_equal(batch_of(fresh(plan), epoch, step * size, size), walked[step])


@examples(30)
@given(plan=plans(), data=st.data())
def test_calls_in_any_order_agree(plan, data):
    """Cached epochs and windows never change a result."""
    calls = data.draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.integers(0, plan.samples), st.integers(1, 40)),
            max_size=12,
        )
    )
    for call in calls:
        np.testing.assert_array_equal(batch_of(plan, *call), batch_of(fresh(plan), *call))


def test_threads_agree():
    plan = Plan([50] * 40, seed=3, lanes=8, window=2)
    calls = [(epoch, p, 16) for p in range(0, 2000, 16) for epoch in (0, 1, 2)]
    expected = [ids_of(fresh(plan), *call) for call in calls[:60]]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda call: ids_of(plan, *call), calls))
    np.testing.assert_array_equal(np.array(found[:60]), np.array(expected))
    assert sorted(np.concatenate(found)) == sorted(list(range(2000)) * 3)


# -- what it does depend on


@examples(25)
@given(seed=seeds, epoch=st.integers(0, 1000))
def test_epochs_and_seeds_differ(seed, epoch):
    plan = Plan([9, 11, 10, 12] * 5, seed=seed, lanes=4, window=2)
    other = Plan(plan.sizes, seed=seed + 1, lanes=4, window=2)
    here = ids_of(plan, epoch, 0, 100)
    assert not np.array_equal(here, ids_of(plan, epoch + 1, 0, 100))
    assert not np.array_equal(here, ids_of(other, epoch, 0, 100))
    # seed + epoch must not be all that counts
    assert not np.array_equal(ids_of(plan, epoch + 1, 0, 100), ids_of(other, epoch, 0, 100))


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
    """A failure means that running jobs can't resume: raise ORDER_VERSION, add to the changelog."""
    plan = Plan(seed=7, window=2, **settings)
    assert [whole(plan, epoch, 6).tolist() for epoch in (0, 1)] == golden


def test_the_order_of_this_version_stays_for_many_windows():
    plan = Plan(np.arange(400) % 37, seed=-(2**70), lanes=12, window=3, reshuffle=0.25)
    digest = hashlib.sha256(whole(plan, 3, 48).astype("<i8").tobytes()).hexdigest()
    assert digest == "95df9f1260d7f5ecaa11cf60da5e637ea3cf04b28f6651aeb2259572c81dd8dd"


def test_the_fingerprint_stays_and_distinguishes_plans():
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


# -- the ends, and what is refused


def test_the_end_of_an_epoch_clips_and_may_leave_ranks_without():
    plan = Plan([4, 3], seed=0, lanes=2, window=1)
    assert batch_of(plan, 0, 7, 5).shape == (0, 2)
    assert ids_of(plan, 0, 7, 5).shape == (0,)
    assert len(ids_of(plan, 0, 5, 5)) == 2
    shares = [len(ids_of(plan, 0, 5, 5, rank=r, world=5)) for r in range(5)]
    assert sorted(shares) == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_nothing_is_an_epoch_of_no_batches(sizes):
    for seed in (None, 3):
        plan = Plan(sizes, seed=seed, lanes=4, window=2, reshuffle=0.5)
        assert plan.samples == 0
        assert batch_of(plan, 0, 0, 8).shape == (0, 2)


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
        ((0, 0, 4), {"world": 0}, "size"),
    ],
)
def test_calls_out_of_range_are_refused(call, keywords, message):
    plan = Plan([4, 3], seed=0, lanes=2, window=1)
    with pytest.raises(PlanError, match=message):
        batch_of(plan, *call, **keywords)


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
        batch_of(plan, 0, 0, 8)


def test_what_callers_hold_is_theirs():
    sizes = np.array([4, 3])
    plan = Plan(sizes, seed=0, lanes=2, window=1)
    before = ids_of(plan, 0, 0, 7)
    sizes[:] = 0
    before_copy = before.copy()
    before[:] = -1
    np.testing.assert_array_equal(ids_of(plan, 0, 0, 7), before_copy)
    with pytest.raises(ValueError, match="read-only"):
        plan.sizes[0] = 9


def test_a_plan_prints_in_short():
    assert repr(Plan([4, 3], seed=1, lanes=2, window=1)).startswith("Plan(<7 samples in 2 shards>")


# -- the order itself, against a plain account of it


@examples(80)
@given(plan=plans(), epoch=st.integers(0, 3), size=st.integers(1, 60))
def test_order_is_the_documented_one(plan, epoch, size):
    if plan.seed is not None:
        expected = plainly(plan, epoch)
        at = 0
        for p in range(0, plan.samples, size):
            slots = sorted(
                (q % plan.lanes, q // plan.lanes) for q in range(p, min(p + size, len(expected)))
            )
            rows = batch_of(plan, epoch, p, size).tolist()
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


# -- reshuffle


def lane_of(plan, epoch):
    """Each shard's lane (of most of its samples) in an epoch."""
    rows = batch_of(plan, epoch, 0, plan.samples)  # sorted by lane
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
