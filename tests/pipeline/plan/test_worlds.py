"""Test jobs that change their world and lane order: the same global batches, each sample once."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.plan import (
    BatchSchedule,
    Cursor,
    LaneOrder,
    Plan,
    RankOrder,
    Walk,
    World,
    default_lanes,
)
from tests.pipeline.plan.plans import order_of_lanes
from tests.properties import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan import Step

SAMPLES, BATCH = 10_000, 960
UNEVEN = np.random.default_rng(0).multinomial(
    SAMPLES, np.random.default_rng(1).dirichlet([1] * 300)
)
DIVISORS = [size for size in range(1, 121) if 120 % size == 0]
WORLDS = [*DIVISORS, 7, 11, 96]
ALL_WORLDS = [
    size if size in WORLDS else pytest.param(size, marks=pytest.mark.grid) for size in range(1, 121)
]


class Job:
    """Walks an epoch on worlds that change, each rank with a plan of its own."""

    def __init__(self, sizes: Any, *, batch: int, **settings: Any) -> None:
        self.sizes = np.asarray(sizes)
        lanes = default_lanes(batch, int(np.count_nonzero(self.sizes)))
        self.settings: dict[str, Any] = {"seed": 5, "window": 2, "lanes": lanes, **settings}
        self.starts = np.cumsum(self.sizes) - self.sizes
        schedule = BatchSchedule.constant(batch)
        self.walk = Walk(samples=int(self.sizes.sum()), schedule=schedule, drop_last=False)

    def steps(self, epoch: int) -> Iterator[Step]:
        return self.walk.steps(Cursor(epoch, 0), endless=False)

    def ranks(self, world: int, order: LaneOrder | None = None) -> list[RankOrder]:
        # One plan for all: what a plan remembers doesn't show (test_order.py).
        plan = Plan(self.sizes, **self.settings, lane_order=order)
        return [RankOrder(plan=plan, world=World(rank, world)) for rank in range(world)]

    def ids(self, ranks: list[RankOrder], step: Step) -> list[int]:
        """The global batch, from what the ranks read; whose shares differ by a sample at most."""
        parts = [rank.slots(step).rows for rank in ranks]
        each = {len(part) for part in parts}
        assert max(each) - min(each) <= (step.size % len(ranks) > 0)
        rows = np.concatenate(parts)
        found: list[int] = (self.starts[rows[:, 0]] + rows[:, 1]).tolist()
        return found

    def batches(self, epoch: int, changes: dict[int, list[RankOrder]]) -> list[list[int]]:
        """An epoch. changes: the ranks from a step on, by its number in the epoch."""
        found, ranks = [], changes[0]
        for number, step in enumerate(self.steps(epoch)):
            ranks = changes.get(number, ranks)
            found.append(self.ids(ranks, step))
        return found


@pytest.fixture(scope="module")
def job() -> Job:
    return Job(UNEVEN, batch=BATCH)


@pytest.fixture(scope="module")
def reference(job: Job) -> list[list[list[int]]]:
    """Two epochs on 120 ranks."""
    return [job.batches(epoch, {0: job.ranks(120)}) for epoch in range(2)]


def test_an_epoch_holds_each_sample_once(reference: list[list[list[int]]]) -> None:
    for batches in reference:
        assert [len(batch) for batch in batches] == [BATCH] * 10 + [400]
        assert sorted(chain.from_iterable(batches)) == list(range(SAMPLES))


@pytest.mark.parametrize("world", ALL_WORLDS)
def test_a_job_of_120_ranks_continues_with_any_number(
    world: int, job: Job, reference: list[list[list[int]]]
) -> None:
    at = world % 10 + 1
    found = job.batches(1, {0: job.ranks(120), at: job.ranks(world)})
    assert found == reference[1]


@pytest.mark.parametrize("world", [1, 7, 24, 96, 120])
def test_and_with_any_order_of_lanes(
    world: int, job: Job, reference: list[list[list[int]]]
) -> None:
    rng = np.random.default_rng(world)
    lanes = job.settings["lanes"]
    orders = [order_of_lanes(tuple(rng.permutation(lanes).tolist())) for _ in range(3)]
    changes = {0: job.ranks(120, orders[0]), 4: job.ranks(world, orders[1])}
    found = job.batches(1, {**changes, 8: job.ranks(world, orders[2])})
    assert found != reference[1]
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in reference[1]]


@pytest.mark.parametrize("ranks", [1024, pytest.param(4608, marks=pytest.mark.grid)])
def test_thousands_of_ranks_with_a_sample_each(ranks: int) -> None:
    sizes = np.random.default_rng(ranks).multinomial(3 * ranks + 100, np.ones(5000) / 5000)
    job = Job(sizes, batch=ranks)
    before = job.batches(0, {0: job.ranks(ranks)})
    assert [len(batch) for batch in before] == [ranks] * 3 + [100]
    assert sorted(chain.from_iterable(before)) == list(range(job.walk.samples))
    fewer = job.ranks(ranks // 2)
    assert job.batches(0, {0: job.ranks(ranks), 1: fewer, 2: job.ranks(96)}) == before
    order = order_of_lanes(
        tuple(np.random.default_rng(0).permutation(job.settings["lanes"]).tolist())
    )
    found = job.batches(0, {0: job.ranks(1), 2: job.ranks(ranks, order)})
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in before]
    assert found[:2] == before[:2]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    sizes = draw(st.lists(st.integers(0, 30), min_size=1, max_size=30).filter(sum))
    units = None
    if draw(st.booleans()):
        units = draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    return Job(
        sizes,
        batch=draw(st.integers(1, 60)),
        lanes=draw(st.integers(1, 16)),
        window=draw(st.integers(1, 4)),
        reshuffle=draw(st.sampled_from([0.0, 0.3, 1.0])),
        units=units,
    )


@examples(60)
@given(job=jobs(), epoch=st.integers(0, 3), data=st.data())
def test_any_job_through_any_changes(job: Job, epoch: int, data: st.DataObject) -> None:
    lanes = job.settings["lanes"]
    steps = list(job.steps(epoch))
    least = min(step.size for step in steps)
    changes, orders = {}, []
    for at in {0, *data.draw(st.lists(st.integers(0, len(steps)), max_size=4))}:
        order = data.draw(st.one_of(st.none(), st.permutations(range(lanes))))
        world = data.draw(st.integers(1, min(least + 2, 12)))
        orders.append(order and order_of_lanes(tuple(order)))
        changes[at] = job.ranks(world, orders[-1])
    before = job.batches(epoch, {0: job.ranks(1)})
    found = job.batches(epoch, changes)
    assert [sorted(batch) for batch in found] == [sorted(batch) for batch in before]
    assert sorted(chain.from_iterable(found)) == list(range(job.walk.samples))
    if not any(orders):
        assert found == before


@pytest.mark.grid
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("message", [{}, {"reshuffle": 0.3}, {"units": [3] * 300}, {"lanes": 60}])
def test_the_grid_of_worlds_and_orders(world: int, message: dict[str, Any]) -> None:
    job = Job(UNEVEN, batch=BATCH, **message)
    rng = np.random.default_rng(world)
    for epoch in range(2):
        before = job.batches(epoch, {0: job.ranks(120)})
        assert sorted(chain.from_iterable(before)) == list(range(SAMPLES))
        for at in (0, 5, 10):
            found = job.batches(epoch, {0: job.ranks(120), at: job.ranks(world)})
            assert found == before
            order = order_of_lanes(tuple(rng.permutation(job.settings["lanes"]).tolist()))
            found = job.batches(epoch, {0: job.ranks(120), at: job.ranks(world, order)})
            assert [sorted(batch) for batch in found] == [sorted(batch) for batch in before]
