"""Test the order of shards in decode units: lanes contain shards, windows mix units."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mixing import contents_of_units
from penstock.cache import PlanError
from penstock.pipeline.plan import (
    LEAST_UNITS,
    MIXED_BATCHES,
    WINDOW_BYTES,
    Plan,
    default_window,
    first_settings,
    live_share,
    make_plan,
    open_units,
    window_of,
)
from tests.pipeline.plan.plans import batch_of, plans, whole
from tests.properties import examples

if TYPE_CHECKING:
    from penstock.readers import Contents

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


@examples(80)
@given(shape=shapes(), epoch=st.integers(0, 3), size=st.integers(1, 50))
def test_each_epoch_visits_every_sample_once(shape: Shape, epoch: int, size: int) -> None:
    plan = planned(shape[0], **shape[1])
    np.testing.assert_array_equal(np.sort(whole(plan, epoch, size)), np.arange(plan.samples))


@examples(40)
@given(shape=shapes(), epoch=st.integers(0, 2), world=st.integers(1, 96), data=st.data())
def test_every_world_size_gives_the_same_global_batches(
    shape: Shape, epoch: int, world: int, data: st.DataObject
) -> None:
    plan = planned(shape[0], **shape[1])
    position = data.draw(st.integers(0, plan.samples))
    together = batch_of(plan, epoch, position, 100)
    slices = [batch_of(plan, epoch, position, 100, rank=r, world=world) for r in range(world)]
    np.testing.assert_array_equal(np.concatenate(slices), together)


def test_units_of_one_size_are_one_number_a_shard() -> None:
    spelt = planned([[3, 3, 1], [], [5], [2, 2]])
    short = Plan([7, 0, 5, 4], units=[3, 9, 8, 2], seed=5, lanes=2, window=3)
    assert short.fingerprint == spelt.fingerprint
    np.testing.assert_array_equal(whole(short, 1, 4), whole(spelt, 1, 4))


@examples(60)
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


@examples(80)
@given(
    units=st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), min_size=4, max_size=20),
    lanes=st.integers(1, 4),
    window=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
def test_a_unit_is_done_with_before_the_next_window_begins(
    units: list[list[int]], lanes: int, window: int, epoch: int
) -> None:
    """Each unit is decoded once: it is in one window, of the requested size and its shift."""
    plan = planned(units, seed=3, lanes=lanes, window=window)
    ends = [np.cumsum(each) for each in units]
    longest = max(max(each) for each in units)
    mean = plan.samples / sum(map(len, units))
    wanted = max(longest, int(window * mean * lanes / plan.strands))  # rows of a strand
    stream = [batch_of(plan, epoch, position, 1)[0].tolist() for position in range(plan.samples)]
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
            rows = [batch_of(plan, epoch, p, 4, rank=lane, world=4)[0] for p in range(0, 400, 4)]
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


@given(
    shards=st.integers(1, 40),
    units=st.integers(1, 12),
    rows=st.integers(1, 9),
    lanes=st.integers(1, 8),
    window=st.integers(1, 60),
)
def test_open_units_are_those_of_the_plan(
    shards: int, units: int, rows: int, lanes: int, window: int
) -> None:
    found = contents_of_units(shards, units, rows)
    plan = Plan(found.sizes, seed=1, lanes=lanes, window=window, units=found.units)
    report = open_units(found, lanes=lanes, window=window)
    assert min(report, shards) == pytest.approx(plan.open_shards)
    assert report <= shards * units


@pytest.mark.parametrize(
    ("what", "batch", "lanes", "wanted"),
    [
        # 10,000 chunks of 180 MB, 8 samples each: what 4 GiB hold.
        (contents_of_units(10_000, 1, 8, unit_bytes=180e6), 16, 2, 26),
        # 4 in each lane at least, however large they are.
        (contents_of_units(10_000, 1, 8, unit_bytes=180e6), 256, 32, 128),
        # A sample a chunk of 49 kB takes no memory: as many as of shards.
        (contents_of_units(2_000, 640, 1, unit_bytes=49e3), 256, 32, 11_328),
        # 392 kB, 8 samples each: enough for 32 batches, and for the root of the units.
        (contents_of_units(250, 640, 8, unit_bytes=392e3), 256, 32, 4_000),
        # Photographs in row groups of 100: 11 MB each.
        (contents_of_units(2_560, 5, 100, unit_bytes=11e6), 256, 32, 416),
        # Larger than the window's bytes each.
        (contents_of_units(500, 1, 4, unit_bytes=6e9), 8, 1, LEAST_UNITS),
        # All there are.
        (contents_of_units(3, 2, 8, unit_bytes=1e3), 8, 1, 6),
    ],
)
def test_defaults(what: Contents, batch: int, lanes: int, wanted: int) -> None:
    found = window_of(what, lanes, global_batch=batch)
    assert found * lanes == wanted
    assert first_settings(what, seed=1, global_batch=batch, lanes=lanes).window == found


@given(
    shards=st.integers(1, 300),
    units=st.integers(1, 30),
    rows=st.integers(1, 50),
    unit_bytes=st.floats(0, 1e9),
    batch=st.integers(1, 512),
    lanes=st.integers(1, 32),
)
def test_a_window_fits_and_mixes(
    shards: int, units: int, rows: int, unit_bytes: float, batch: int, lanes: int
) -> None:
    what = contents_of_units(shards, units, rows, unit_bytes=unit_bytes)
    window = window_of(what, lanes, global_batch=batch)
    every = shards * units
    opened = min(window * lanes, every)
    kept = opened * unit_bytes * live_share(rows)
    least = max(LEAST_UNITS, 4 * lanes) + lanes
    assert kept <= WINDOW_BYTES + lanes * unit_bytes or opened <= least
    assert opened >= min(every, LEAST_UNITS)
    if kept < WINDOW_BYTES / 2 and opened < every:
        assert opened * rows >= MIXED_BATCHES * batch
    # More memory a unit never opens more of them.
    larger = replace(what, unit_bytes=2 * unit_bytes)
    assert window_of(larger, lanes, global_batch=batch) <= window


def test_shards_without_units_keep_their_windows() -> None:
    what: Any = replace(contents_of_units(900, 1, 8), units=None)
    settings = first_settings(what, seed=1, global_batch=256)
    assert settings.window == default_window(
        900, settings.lanes, global_batch=256, icc=None, shuffled=False
    )
    assert make_plan(what, settings).open_shards > 0


def test_a_unit_of_one_row_is_never_kept() -> None:
    assert live_share(1) == 0
    assert live_share(2) == 0.5
    assert live_share(8) > 0.99
