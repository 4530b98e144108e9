"""Test the order of a mixture: the same batches at every world size, complete epochs of parts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import MixturePlan, MixtureSettings, Plan
from penstock.readers.mixtures import MixtureStream, WeightChange, epoch_samples, integer_shares
from tests.properties import examples


def mixture(
    *, weights=(5, 3, 2), shards=40, rows=20, lanes=(8, 4, 2), rule="first", seed=7, unit=1
) -> MixturePlan:
    random = np.random.default_rng(seed)
    parts = [
        Plan(random.integers(1, 2 * rows, shards), seed=seed + n, lanes=each, window=3)
        for n, each in enumerate(lanes)
    ]
    sizes = np.array([part.samples for part in parts])
    changes = [WeightChange(start=0, shares=tuple(integer_shares(weights).tolist()))]
    stream = MixtureStream(sizes, changes, is_once=rule == "once", unit=unit)
    return MixturePlan(parts, stream, samples=epoch_samples(sizes, changes, rule))


def batches(plan: MixturePlan, epoch: int, size: int, *, rank: int = 0, world: int = 1):
    """Yield the rows and epochs of a rank's batches."""
    for position in range(0, plan.samples, size):
        count = min(size, plan.samples - position)
        low, high = rank * count // world, (rank + 1) * count // world
        yield plan.places(epoch, position, size, low=low, high=high)


@pytest.mark.parametrize("world", [2, 7, 8, 96])
@pytest.mark.parametrize("rule", ["first", "once", 1500])
def test_every_world_size_gives_the_same_global_batches(world, rule):
    alone, ranks = mixture(rule=rule), [mixture(rule=rule) for _ in range(world)]
    for epoch in (0, 1):
        parts = [batches(plan, epoch, 96, rank=r, world=world) for r, plan in enumerate(ranks)]
        for whole, *shares in zip(batches(alone, epoch, 96), *parts, strict=True):
            np.testing.assert_array_equal(np.concatenate([s.rows for s in shares]), whole.rows)
            np.testing.assert_array_equal(np.concatenate([s.epochs for s in shares]), whole.epochs)


@examples(25)
@given(
    weights=st.lists(st.floats(0.01, 1), min_size=3, max_size=3),
    size=st.integers(1, 150),
    rule=st.sampled_from(["first", "all", "once"]),
)
def test_the_epochs_of_parts_are_complete(weights, size, rule):
    plan = mixture(weights=weights, shards=6, rows=8, lanes=(2, 1, 1), rule=rule)
    found = [each for epoch in range(3) for each in batches(plan, epoch, size)]
    rows, epochs = (np.concatenate([getattr(f, n) for f in found]) for n in ("rows", "epochs"))
    for part in range(3):
        mine = rows[:, 0] // 6 == part
        samples = int(plan.sizes[6 * part : 6 * part + 6].sum())
        for epoch in range(int(epochs[mine].max())):  # the last one may not be over
            own = rows[mine & (epochs == epoch)]
            assert len(own) == samples
            assert len(np.unique(own, axis=0)) == samples


@examples(30)
@given(position=st.integers(0, 1000), size=st.integers(1, 200), epoch=st.integers(0, 3))
def test_any_position_gives_the_same_samples(position, size, epoch):
    """Steps that are resolved ahead, single slots and a new plan agree."""
    walked, fresh = mixture(), mixture()
    position = min(position, walked.samples - 1)
    count = min(size, walked.samples - position)
    whole = walked.places(epoch, position, size, low=0, high=count)
    middle = count // 2
    halves = [
        fresh.places(epoch, position, size, low=low, high=high)
        for low, high in ((0, middle), (middle, count))
    ]
    np.testing.assert_array_equal(np.concatenate([half.rows for half in halves]), whole.rows)
    together = fresh.places_together(
        epoch, [(position, size, 0, middle), (position, size, middle, count)]
    )
    np.testing.assert_array_equal(together.rows, whole.rows)


@examples(25)
@given(
    turns=st.permutations(range(12)),
    steps=st.integers(1, 5),
    size=st.sampled_from([7, 24, 96]),
    low=st.integers(0, 6),
)
def test_steps_that_are_resolved_ahead_are_the_same_in_any_order(turns, steps, size, low):
    walked, fresh = mixture(), mixture()
    for turn in (*range(12), *turns):  # first as a job goes
        cuts = [((turn * steps + n) * size, size, low, 7) for n in range(steps)]
        cuts = [cut for cut in cuts if cut[0] + size <= walked.samples]
        if cuts:
            found = walked.places_together(1, cuts)
            alone = [fresh._resolve(1, [(at, size, low, high)]) for at, size, low, high in cuts]
            np.testing.assert_array_equal(found.rows, np.concatenate([a.rows for a in alone]))
            np.testing.assert_array_equal(found.epochs, np.concatenate([a.epochs for a in alone]))


def test_each_rank_gets_the_shares_and_reads_its_own_shards():
    plan = mixture(weights=(0.5, 0.25, 0.25), shards=160, rows=60, lanes=(16, 8, 8))
    for rank in range(8):
        known = set(plan.shards(256, first=rank, end=rank + 1, world=8).tolist())
        rows = np.concatenate(
            [
                plan.places(0, 256 * n, 256, low=32 * rank, high=32 * rank + 32).rows
                for n in range(60)
            ]
        )
        shares = np.bincount(rows[:, 0] // 160, minlength=3) / len(rows)
        np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], rtol=0.1)
        assert {*rows[:, 0].tolist()} <= known
        assert len(known) < len(plan.sizes) / 2


@pytest.mark.parametrize("lanes", [(1, 1, 1), (8, 8, 8), (4, 1, 1)])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_each_rank_gets_the_shares_with_any_lanes(lanes, world):
    plan = mixture(weights=(2, 1, 1), lanes=lanes, rule=96 * 30)
    for rank in range(world):
        parts = [found.rows[:, 0] // 40 for found in batches(plan, 0, 96, rank=rank, world=world)]
        counts = np.array([np.bincount(part, minlength=3) for part in parts])
        np.testing.assert_allclose(counts, np.tile([48, 24, 24], (30, 1)) / world, atol=2)


@pytest.mark.parametrize("world", [2, 7, 16, 32])
def test_each_rank_gets_the_shares_of_rare_parts_over_some_batches(world):
    """Also of a part that has fewer samples of a batch than there are ranks."""
    plan = mixture(weights=(0.9, 0.08, 0.02), rows=60, lanes=(8, 2, 1), rule=192 * 44)
    for rank in range(world):
        parts = [each.rows[:, 0] // 40 for each in batches(plan, 0, 192, rank=rank, world=world)]
        counts = np.bincount(np.concatenate(parts), minlength=3)
        expected = counts.sum() * np.array([0.9, 0.08, 0.02])
        np.testing.assert_allclose(counts, expected, rtol=0.01, atol=2)


@pytest.mark.parametrize("weights", [(5, 3, 2), (10, 1, 1)])
@pytest.mark.parametrize(("rule", "unit"), [("first", 1), ("first", 96), ("all", 1), ("once", 1)])
@pytest.mark.parametrize("world", [2, 8])
def test_a_rank_knows_the_shards_that_it_reads(weights, rule, unit, world):
    """Also once parts of an epoch are used up, and the others have larger shares."""
    plan, outside, read = mixture(weights=weights, rule=rule, rows=60, unit=unit), 0, 0
    for rank in range(world):
        known = plan.shards(96, first=rank, end=rank + 1, world=world)
        for found in batches(plan, 0, 96, rank=rank, world=world):
            outside += int((~np.isin(found.rows[:, 0], known)).sum())
            read += len(found.rows)
    assert outside < 0.02 * read


def test_a_global_batch_of_one_part():
    plan = mixture(unit=64, rule=64 * 20)
    for found in batches(plan, 0, 64):
        assert len(np.unique(found.rows[:, 0] // 40)) == 1


def test_positions_outside_the_epoch_are_refused():
    plan = mixture()
    with pytest.raises(PlanError, match="beyond the epoch"):
        plan.places(0, plan.samples + 1, 8, low=0, high=0)
    with pytest.raises(PlanError, match="slots"):
        plan.places(0, 0, 8, low=0, high=9)


SETTINGS = MixtureSettings(
    names=("a", "b"),
    lanes=(2, 1),
    windows=(3, 4),
    samples=100,
    changes=(WeightChange(start=0, shares=(5, 7), until=9, target=(1, 2)),),
    counts=(3, 4),
    owed=(0.25, -0.25),
)


def test_settings_are_kept_in_json():
    many = tuple(f"a part with the number {n}" for n in range(100))
    known: dict[str, Any] = {
        "rule": "first",
        "per": "sample",
        "shares": "5a",
        "contents": (1,) * 100,
    }
    for each in (
        SETTINGS,
        MixtureSettings(names=("a",), lanes=(1,), windows=(1,), samples=1),
        MixtureSettings(names=many, lanes=(1,) * 100, windows=(2,) * 100, samples=1, **known),
    ):
        assert MixtureSettings.from_dict(json.loads(json.dumps(each.to_dict()))) == each


PACKED = SETTINGS.to_dict()


def packed(*numbers: int) -> str:
    """Numbers as a state holds them."""
    parts = MixtureSettings(names=("a",), lanes=numbers, windows=(1,), samples=1)
    return str(parts.to_dict()["lanes"])


@pytest.mark.parametrize(
    "damage",
    [
        {"lanes": packed(2)},
        {"lanes": packed(2, 1, 1)},
        {"lanes": packed(*[2] * 10**6)},
        {"lanes": packed(0, 1)},
        {"lanes": [2, 1]},
        {"names": ["a"]},
        {"names": [1, 2]},
        {"names": "AAAA"},
        {"names": packed(1, 2)},
        {"rule": 5},
        {"contents": packed(1)},
        {"windows": "34"},
        {"windows": "AAAA"},
        {"samples": 0},
        {"samples": 1.5},
        {"counts": packed(-1, 4)},
        {"owed": [float("nan"), 0.0]},
        {"changes": []},
        {"changes": [{"start": 0, "shares": packed(0, 0)}]},
        {"changes": [{"start": 0, "shares": packed(2**40, 1)}]},
        {"changes": [{"start": -1, "shares": packed(1, 1)}]},
        {"changes": [{"start": "0", "shares": packed(1, 1)}]},
        {"changes": [{"start": 5, "shares": packed(1, 1), "until": 4, "target": packed(1, 1)}]},
        {"changes": [{"start": 5, "shares": packed(1, 1), "target": packed(1, 1)}]},
        {"more": 1},
    ],
)
def test_damaged_settings_are_refused(damage):
    with pytest.raises((ValueError, KeyError, TypeError)):
        MixtureSettings.from_dict({**PACKED, **damage})
