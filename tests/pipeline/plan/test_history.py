"""Test a job's schedule through many resumes with other batches: every step keeps its number."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import BatchSchedule, Cursor, LoaderState, PlanSettings, Step, Walk
from penstock.pipeline.plan import state as history

SAMPLES = 50
START = LoaderState(
    dataset="d",
    fingerprint="f",
    samples=SAMPLES,
    plan=PlanSettings(seed=1, shuffle=True, lanes=1, window=1, reshuffle=0.0),
    epoch=0,
    position=0,
    step=0,
    schedule=BatchSchedule.constant(7),
    drop_last=True,
)
schedules = st.dictionaries(st.integers(1, 6 * SAMPLES), st.integers(1, 20), max_size=3).map(
    lambda more: BatchSchedule.of({0: 9, **dict(sorted(more.items()))})
)


def walked(state: LoaderState, schedule: BatchSchedule, count: int) -> tuple[list[Step], Walk]:
    walk = Walk(samples=SAMPLES, schedule=schedule, drop_last=state.drop_last)
    cursor, steps = walk.normalise(state.cursor), []
    for _ in range(count):
        step = walk.step(cursor)
        assert step is not None
        steps.append(step)
        cursor = step.then
    return steps, walk


def saved(walk: Walk, cursor: Cursor) -> LoaderState:
    state = replace(
        START,
        epoch=cursor.epoch,
        position=cursor.position,
        step=walk.step_number(cursor),
        schedule=BatchSchedule(walk.schedule.entries, first_step=walk.schedule.first_step),
    )
    assert LoaderState.from_dict(state.to_dict()) == state
    return state


@given(
    resumes=st.lists(st.tuples(st.none() | schedules, st.integers(0, 9)), max_size=12),
    most=st.integers(4, 40),
)
def test_every_step_keeps_its_number(
    resumes: list[tuple[BatchSchedule | None, int]], most: int
) -> None:
    state, steps = START, list[Step]()
    with mock.patch.object(history, "MOST_KEPT", most):
        for wanted, count in resumes:
            schedule = state.resumed_schedule(wanted, drop_last=True)
            assert len(schedule.entries) <= most
            more, walk = walked(state, schedule, count)
            if wanted is not None:
                samples = [walk.sample(step.start) for step in more]
                assert [walk.full_size(step.start) for step in more] == [
                    wanted.size_at(sample) for sample in samples
                ]
                assert set(schedule.sizes) <= set(wanted.sizes)
            steps += more
            state = saved(walk, steps[-1].then if steps else Cursor(0, 0))
            assert state.step == len(steps)
    walk = state.walk
    first = state.schedule.first_step
    for number, step in enumerate(steps):
        if number < first:
            with pytest.raises(PlanError, match=r"wanted .* or later"):
                walk.cursor_of(number)
        else:
            assert walk.cursor_of(number) == step.start
            assert walk.step_size(step.start) == step.size
            assert walk.step_number(step.start) == number
    if most == 40:
        assert first == 0


@given(wanted=schedules, count=st.integers(0, 30), epoch=st.integers(0, 9))
def test_a_state_that_moves_is_one_of_that_place(
    wanted: BatchSchedule, count: int, epoch: int
) -> None:
    _, walk = walked(START, wanted, count)
    at = walk.cursor_of(count)
    state = saved(walk, at)
    forgetful = replace(state, schedule=state.schedule.forgotten_before(walk.sample(at), count))
    for each in (state, forgetful):
        moved = each.moved(Cursor(epoch, 0))
        assert moved.cursor == Cursor(epoch, 0)
        assert LoaderState.from_dict(moved.to_dict()).to_dict() == moved.to_dict()
        assert moved.schedule.size_at(SAMPLES * epoch) in {size for _, size in wanted.entries}
    assert state.moved(Cursor(epoch, 0)).step == walk.step_number(Cursor(epoch, 0))
