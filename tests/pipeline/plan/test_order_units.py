"""Shards that are decoded in units: lanes run over shards, windows mix units."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import Plan
from tests.pipeline.plan.plans import plans, whole

if TYPE_CHECKING:
    Shape = tuple[list[list[int]], dict[str, Any]]

units_lists = st.lists(
    st.lists(st.integers(1, 12), min_size=0, max_size=8), min_size=1, max_size=14
)


def planned(units: list[list[int]], **more: Any) -> Plan:
    """A plan of shards that consist of these units."""
    settings = {"seed": 5, "lanes": 2, "window": 3, **more}
    return Plan([sum(each) for each in units], units=units, **settings)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Units, and settings of a plan."""
    return draw(units_lists), {
        "seed": draw(st.integers(0, 9)),
        "lanes": draw(st.integers(1, 5)),
        "window": draw(st.sampled_from([1, 2, 3, 7, 1000])),
        "reshuffle": draw(st.sampled_from([0.0, 0.5])),
    }


@settings(max_examples=80, deadline=None)
@given(shape=shapes(), epoch=st.integers(0, 3), size=st.integers(1, 50))
def test_each_epoch_visits_every_sample_once(shape: Shape, epoch: int, size: int) -> None:
    plan = planned(shape[0], **shape[1])
    np.testing.assert_array_equal(np.sort(whole(plan, epoch, size)), np.arange(plan.samples))


@settings(max_examples=40, deadline=None)
@given(shape=shapes(), epoch=st.integers(0, 2), world=st.integers(1, 96), data=st.data())
def test_every_world_size_gives_the_same_global_batches(
    shape: Shape, epoch: int, world: int, data: st.DataObject
) -> None:
    plan = planned(shape[0], **shape[1])
    position = data.draw(st.integers(0, plan.samples))
    together = plan.batch(epoch, position, 100)
    slices = [plan.batch(epoch, position, 100, rank=r, world=world) for r in range(world)]
    np.testing.assert_array_equal(np.concatenate(slices), together)


def test_units_of_one_size_are_one_number_a_shard() -> None:
    spelt = planned([[3, 3, 1], [], [5], [2, 2]])
    short = Plan([7, 0, 5, 4], units=[3, 9, 8, 2], seed=5, lanes=2, window=3)
    assert short.fingerprint == spelt.fingerprint
    np.testing.assert_array_equal(whole(short, 1, 4), whole(spelt, 1, 4))


@settings(max_examples=60, deadline=None)
@given(plan=plans(), epoch=st.integers(0, 2), size=st.integers(1, 50))
def test_one_unit_a_shard_changes_nothing(plan: Plan, epoch: int, size: int) -> None:
    again = Plan(
        plan.sizes,
        seed=plan.seed,
        lanes=plan.lanes,
        window=plan.window,
        reshuffle=plan.reshuffle,
        units=[[size] if size else [] for size in plan.sizes.tolist()],
    )
    assert again.fingerprint == plan.fingerprint
    assert again.open_shards == plan.open_shards
    np.testing.assert_array_equal(whole(again, epoch, size), whole(plan, epoch, size))


@settings(max_examples=80, deadline=None)
@given(
    units=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), min_size=4, max_size=20),
    lanes=st.integers(1, 4),
    window=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_a_unit_is_done_with_before_the_next_window_begins(
    units: list[list[int]], lanes: int, window: int, epoch: int
) -> None:
    """So that it is decoded once: in one window, of the size that was asked for and its shift."""
    plan = planned(units, seed=3, lanes=lanes, window=window)
    ends = [np.cumsum(each) for each in units]
    longest = max(max(each) for each in units)
    mean = plan.samples / sum(map(len, units))
    wanted = max(longest, int(window * mean * lanes / plan.strands))  # rows of a strand
    stream = [plan.batch(epoch, position, 1)[0].tolist() for position in range(plan.samples)]
    for strand in range(plan.strands):
        rows = stream[strand :: plan.strands]
        of = [(shard, int(np.searchsorted(ends[shard], row, side="right"))) for shard, row in rows]
        last = {unit: place for place, unit in enumerate(of)}
        # Where all units that were begun are done with, a window may end.
        cuts, open_until = [0], -1
        for place, unit in enumerate(of):
            open_until = max(open_until, last[unit])
            if open_until == place:
                cuts.append(place + 1)
        room = max(2 * wanted, len(rows) // max(1, len(rows) // wanted))
        assert max(np.diff(cuts), default=0) <= 1.5 * room + longest + 1


def test_a_lane_keeps_its_shards_and_mixes_their_units() -> None:
    plan = planned([[10] * 50 for _ in range(16)], lanes=4, window=8)
    for lane in range(4):
        of_lane = plan.shards(4, first=lane, end=lane + 1, world=4)
        assert len(of_lane) <= 6  # four of its own, and those across its borders
        for epoch in range(2):
            rows = [plan.batch(epoch, p, 4, rank=lane, world=4)[0] for p in range(0, 400, 4)]
            shards = {int(shard) for shard, _ in rows}
            assert shards <= set(of_lane.tolist())
            assert len({(int(s), int(r) // 10) for s, r in rows}) > 8  # of a hundred samples
            assert len(shards) > 2


def test_open_shards_counts_shards_not_units() -> None:
    plan = planned([[1] * 100 for _ in range(8)], lanes=2, window=50)
    assert plan.open_shards == 8


def test_memory_grows_with_units_not_samples() -> None:
    def peak(rows: int) -> int:
        tracemalloc.start()
        try:
            plan = Plan(
                [rows * 20] * 200,
                seed=1,
                lanes=8,
                window=1,
                units=[[rows] * 20 for _ in range(200)],
            )
            layout = plan._cut_shards(0)
            assert len(layout.rows) >= 4000
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1_000_000) < 1.2 * peak(100)


def test_units_are_in_the_fingerprint() -> None:
    prints = {
        planned(units).fingerprint
        for units in ([[4, 4], [8]], [[8], [4, 4]], [[2, 6], [8]], [[8], [8]])
    }
    assert len(prints) == 4
    assert (
        planned([[4, 4], [8]], seed=None).fingerprint == planned([[8], [8]], seed=None).fingerprint
    )


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ([[4]], "those of 1 shards, wanted a list of rows for each of the 2"),
        ([[4], [3]], "those of shard 1 have 3 rows, and the shard has 4"),
        ([[4], [2, 2, 0]], "for shard 1, wanted the rows of its units"),
        ([[4], [2.0, 2.0]], "whole numbers of at least 1"),
        ([[4], [[4]]], "for shard 1"),
        ([4, 0], "for shard 1"),
    ],
)
def test_units_that_cannot_be_are_refused(units: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        Plan([4, 4], seed=1, lanes=1, window=1, units=units)
