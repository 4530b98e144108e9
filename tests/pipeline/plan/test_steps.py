"""Test the arithmetic of a walk through epochs against one step by step."""

from __future__ import annotations

import re
from bisect import bisect_left
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import BatchSchedule, Cursor, Walk

EPOCHS = 12


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    """Walks whose batch changes some times, in an epoch or between two; often of one size."""
    samples = draw(st.integers(1, 60))
    sizes = st.integers(1, min(24, samples))
    some = st.integers(1, 9 * samples) | st.integers(1, 9).map(lambda epoch: epoch * samples)
    firsts = sorted({0, *draw(st.lists(some, max_size=6))})
    schedule = BatchSchedule.of({first: draw(sizes) for first in firsts})
    return Walk(samples=samples, schedule=schedule, drop_last=draw(st.booleans()))


def steps_of(walk: Walk) -> list[tuple[Cursor, int]]:
    """Each step of some epochs, one after the other."""
    found = []
    for epoch in range(EPOCHS):
        at = 0
        while at < walk.samples:
            sample = epoch * walk.samples + at
            wanted = [size for first, size in walk.schedule.entries if first <= sample][-1]
            size = min(wanted, walk.samples - at)
            if size < wanted and walk.drop_last:
                break
            found.append((Cursor(epoch, at), size))
            at += size
    return found


@given(walks())
def test_steps_are_those_of_a_walk_by_hand(walk: Walk) -> None:
    wanted = steps_of(walk)
    steps = list(islice(walk.steps(Cursor(0, 0), endless=True), len(wanted)))
    assert [(step.start, step.size) for step in steps] == wanted
    assert [step.then for step in steps[:-1]] == [step.start for step in steps[1:]]
    for epoch in range(EPOCHS):
        those = [start for start, _ in wanted if start.epoch == epoch]
        assert walk.left(Cursor(epoch, 0)) == len(those)
        assert [s.start for s in walk.steps(Cursor(epoch, 0), endless=False)] == those


@given(walks())
def test_numbers_and_places_are_each_others_inverse(walk: Walk) -> None:
    wanted = steps_of(walk)
    for number, (start, _) in list(enumerate(wanted))[:: 1 + len(wanted) // 200]:
        assert walk.step_number(start) == number
        assert walk.cursor_of(number) == start


@given(walks(), st.integers(0, EPOCHS - 2))
def test_any_place_has_the_number_of_the_first_step_from_it_on(walk: Walk, epoch: int) -> None:
    starts = [start for start, _ in steps_of(walk)]
    for position in range(walk.samples):
        here = Cursor(epoch, position)
        assert walk.step_number(here) == bisect_left(starts, here)
        left = [start for start in starts if start.epoch == epoch and start >= here]
        if here in left:  # else no batch begins there, and the next one's size is another's
            assert walk.left(here) == len(left)
            assert walk.left(here, most=3) == min(3, len(left))


@given(walks(), st.data())
def test_runs_tell_all_sizes_of_an_epoch(walk: Walk, data: st.DataObject) -> None:
    start, _ = data.draw(st.sampled_from(steps_of(walk)))
    sizes = [step.size for step in walk.steps(start, endless=False)]
    assert [run.size for run in walk.runs(start) for _ in range(run.count)] == sizes


@given(walks(), st.data())
def test_a_walk_that_forgot_its_beginning_counts_on(walk: Walk, data: st.DataObject) -> None:
    wanted = steps_of(walk)
    number = data.draw(st.integers(0, len(wanted) - 1))
    since = wanted[number][0]
    schedule = walk.schedule.forgotten_before(walk.sample(since), number)
    shorter = Walk(samples=walk.samples, schedule=schedule, drop_last=walk.drop_last)
    for later, (start, _) in enumerate(wanted[number:], number):
        assert shorter.step_number(start) == later
        assert shorter.cursor_of(later) == start
    if number:
        with pytest.raises(PlanError, match=f"wanted {number:,} or later"):
            shorter.cursor_of(number - 1)
        with pytest.raises(PlanError, match="no record of older batches"):
            shorter.step_number(wanted[number - 1][0])


@given(walks(), st.data())
def test_another_batch_from_a_step_on_changes_nothing_before(
    walk: Walk, data: st.DataObject
) -> None:
    wanted = steps_of(walk)
    number = data.draw(st.integers(0, len(wanted) - 1))
    at = wanted[number][0]
    size = data.draw(st.integers(1, walk.samples))
    schedule = walk.schedule.continued(walk.sample(at), BatchSchedule.constant(size))
    other = Walk(samples=walk.samples, schedule=schedule, drop_last=walk.drop_last)
    assert schedule.sizes == (size,)
    assert [other.cursor_of(each) for each in range(number)] == [s for s, _ in wanted[:number]]
    assert [other.step_size(s) for s, _ in wanted[:number]] == [n for _, n in wanted[:number]]
    step = other.step(other.normalise(at))
    assert step is not None
    assert step.size in (size, walk.samples % size, walk.samples - at.position)
    assert other.step_number(step.start) == number


@given(walks(), st.data())
def test_continuing_as_planned_changes_nothing(walk: Walk, data: st.DataObject) -> None:
    at, _ = data.draw(st.sampled_from(steps_of(walk)))
    schedule = walk.schedule.continued(walk.sample(at))
    assert schedule.entries == walk.schedule.entries
    ahead = [size for start, size in steps_of(walk) if start >= at]
    assert max(ahead) <= schedule.largest


def test_numbers_cost_the_same_anywhere() -> None:
    entries = {0: 8192, 50_000_000: 16384, 10**12 + 7: 32768}
    walk = Walk(samples=1_281_167, schedule=BatchSchedule.of(entries), drop_last=True)
    for step in (0, 10**6, 10**9, 10**15):
        assert walk.step_number(walk.cursor_of(step)) == step
    assert walk.cursor_of(156 * 3 + 5) == Cursor(3, 5 * 8192)


def test_a_job_without_steps_reports_it() -> None:
    walk = Walk(samples=10, schedule=BatchSchedule.of({0: 5, 20: 11}), drop_last=True)
    assert walk.cursor_of(3) == Cursor(1, 5)
    with pytest.raises(PlanError, match="got 4, and no epoch"):
        walk.cursor_of(4)


@pytest.mark.parametrize(
    "entries",
    [
        (),
        ((0, 0),),
        ((-1, 4),),
        ((0, 4), (0, 5)),
        ((0, 4), (9, 5), (8, 6)),
        ((0, 4.0),),
        ((0, True),),
        (("0", 4),),
    ],
)
def test_schedules_that_cannot_be_are_refused(entries: Any) -> None:
    with pytest.raises(PlanError, match=re.escape(f"got {entries}, wanted pairs of whole numbers")):
        BatchSchedule(entries)
