"""What a job's schedule of batches becomes where it goes on from a state. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.pipeline.plan.batch_schedule import MOST_KEPT
from penstock.pipeline.plan.steps import Cursor, Walk

if TYPE_CHECKING:
    from penstock.pipeline.plan.batch_schedule import BatchSchedule
    from penstock.pipeline.plan.state import LoaderState


def resumed_schedule(
    state: LoaderState, wanted: BatchSchedule | None, *, drop_last: bool
) -> BatchSchedule:
    """The state's batches up to its place, and from there on those that are wanted; None: its own.

    Past batches are remembered for the steps' numbers, as far as a state has room. Where epochs end
    in another way from here on (drop_last), those before can't be numbered by the same rule: then
    the numbers go on, and what steps before held is forgotten.
    """
    walk, cursor = state.walk, state.cursor
    at = walk.sample(cursor)
    schedule = state.schedule.continued(at, wanted)
    if drop_last != state.drop_last:
        return schedule.forgotten_before(at, walk.step_number(cursor))
    if len(schedule.entries) <= MOST_KEPT:
        return schedule
    walk = Walk(samples=state.samples, schedule=schedule, drop_last=drop_last)
    oldest = schedule.entries[-MOST_KEPT][0]
    step = walk.step_number(Cursor(*divmod(oldest, state.samples)))
    return schedule.forgotten_before(walk.sample(walk.cursor_of(step)), step)


def moved_state(state: LoaderState, cursor: Cursor) -> LoaderState:
    """The state of a job that went from there to another place, to the start of a batch."""
    at = state.walk.sample(cursor)
    moved = replace(state, epoch=cursor.epoch, position=cursor.position, bad=0)
    if state.plan.buckets is not None:
        return replace(moved, step=None)
    moved = replace(moved, schedule=state.schedule.continued(at))
    return replace(moved, step=moved.walk.step_number(cursor))
