"""Test that a job whose batch grows has the same global batches on any world, in any lane order."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.pipeline.plan import BatchSchedule, Cursor, LaneOrder, Plan, RankOrder, Walk, World
from tests.pipeline.plan.plans import order_of_lanes

SAMPLES, LANES = 10_000, 60
SIZES = np.random.default_rng(0).multinomial(SAMPLES, np.ones(300) / 300)
WALK = Walk(
    samples=SAMPLES,
    schedule=BatchSchedule.of({0: 960, 4_000: 480, 13_333: 240, 16_000: 1_920}),
    drop_last=True,
)
SOME = (2, 7, 11, 24, 96)
WORLDS = [
    size if size in SOME else pytest.param(size, marks=pytest.mark.grid)
    for size in range(1, 121)
    if 120 % size == 0 or size in SOME
]


def plan_of(lane_order: LaneOrder | None) -> Plan:
    return Plan(SIZES, seed=5, lanes=LANES, window=2, lane_order=lane_order)


def global_batches(world: int, lane_order: LaneOrder | None) -> list[list[int]]:
    """Of three epochs, put together from the slots of all ranks."""
    ranks = [RankOrder(plan=plan_of(lane_order), world=World(r, world)) for r in range(world)]
    starts = np.cumsum(SIZES) - SIZES
    found = []
    for epoch in range(3):
        for step in WALK.steps(Cursor(epoch, 0), endless=False):
            rows = np.concatenate([rank.slots(step).rows for rank in ranks])
            found.append((starts[rows[:, 0]] + rows[:, 1]).tolist())
    return found


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    return global_batches(1, None)


def test_the_batches_are_those_of_the_schedule(reference: list[list[int]]) -> None:
    assert [len(batch) for batch in reference[:16]] == [960] * 5 + [480] * 10 + [480]
    assert {len(batch) for batch in reference} == {960, 480, 240, 1_920}


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_has_them(world: int, reference: list[list[int]]) -> None:
    assert global_batches(world, None) == reference


@pytest.mark.parametrize("world", [1, 7, 24])
def test_another_order_of_lanes_changes_who_reads_what_alone(
    world: int, reference: list[list[int]]
) -> None:
    places = np.random.default_rng(world).permutation(LANES).tolist()
    found = global_batches(world, order_of_lanes(tuple(places)))
    assert found != reference
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in reference]
