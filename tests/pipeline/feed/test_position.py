"""Where a loader is: what moves it, what doesn't, and which pass may go on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.pipeline.feed import Position
from penstock.pipeline.plan import BatchSchedule, Cursor, Walk

WALK = Walk(samples=25, schedule=BatchSchedule.constant(10), drop_last=False)


def hand_over(position: Position, walk: Walk = WALK) -> None:
    step = walk.step(position.cursor)
    assert step is not None
    position.hand_over(step)


def test_it_is_behind_what_was_handed_over_and_moves_on_with_the_last_batch() -> None:
    position, seen = Position(), []
    for _ in range(7):
        seen.append(position.cursor)
        hand_over(position)
        assert position.received == position.cursor
    assert seen == [Cursor(epoch, at) for epoch in (0, 1) for at in (0, 10, 20)] + [Cursor(2, 0)]


def test_to_ask_for_a_pass_moves_nothing() -> None:
    position = Position()
    hand_over(position)
    assert position.ask() == Cursor(0, 0)
    assert position.cursor == Cursor(0, 10)


def test_a_pass_begins_at_the_start_of_its_epoch_or_where_a_state_says() -> None:
    position = Position()
    hand_over(position)
    position.begin_pass()
    assert position.cursor == Cursor(0, 0)
    position.restore(Cursor(3, 10))
    position.begin_pass()
    assert position.cursor == Cursor(3, 10)
    hand_over(position)  # the restored place is spent
    position.begin_pass()
    assert position.cursor == Cursor(3, 0)


def test_only_the_latest_pass_may_go_on() -> None:
    position = Position()
    first = position.begin_pass()
    second = position.begin_pass()
    position.check(second)
    with pytest.raises(ConfigError, match="overtaken"):
        position.check(first)
    position.restore(Cursor(0, 10))
    with pytest.raises(ConfigError, match="overtaken"):
        position.check(second)


def test_a_pass_is_over_with_its_epoch() -> None:
    position = Position()
    begun = position.begin_pass()
    for _ in range(3):
        assert not position.is_over(begun)
        hand_over(position)
    assert position.is_over(begun)
    position.check(begun)  # over, not overtaken


def test_the_same_epoch_again_changes_nothing() -> None:
    position = Position()
    position.restore(Cursor(2, 10))
    begun = position.begin_pass()
    position.go_to(2)
    position.check(begun)
    assert (position.cursor, position.is_restored) == (Cursor(2, 10), True)
    position.go_to(4)
    assert (position.cursor, position.is_restored) == (Cursor(4, 0), False)


def test_what_was_received_stays_where_the_user_goes_elsewhere() -> None:
    position = Position()
    assert position.received is None
    hand_over(position)
    position.go_to(7)
    assert position.received == Cursor(0, 10)
    position.restore(Cursor(1, 10))
    assert position.received is None


def test_an_epoch_is_asked_for_by_its_pass_not_by_the_end_of_the_one_before() -> None:
    position = Position()
    position.begin_pass()
    for _ in range(3):
        hand_over(position)
    assert (position.cursor.epoch, position.asked_epoch) == (1, 0)
    position.ask()
    assert position.asked_epoch == 1


def test_which_batch_begins_an_epoch() -> None:
    position = Position()
    assert position.begins_epoch
    hand_over(position)
    assert not position.begins_epoch
    position.restore(Cursor(4, 10))  # what was counted before comes with the state
    assert not position.begins_epoch
    hand_over(position)
    position.go_to(0)
    assert position.begins_epoch


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    at=st.integers(0, 60),
    drop_last=st.booleans(),
)
def test_a_restored_place_without_a_step_is_the_start_of_the_next_epoch(
    samples: int, batch: int, at: int, drop_last: bool
) -> None:
    walk = Walk(
        samples=samples, schedule=BatchSchedule.constant(min(batch, samples)), drop_last=drop_last
    )
    position = Position()
    position.restore(Cursor(5, min(at, samples)))
    position.settle(walk)
    assert walk.step(position.cursor) is not None
    assert position.cursor in (Cursor(5, min(at, samples)), Cursor(6, 0))
    assert position.is_restored
