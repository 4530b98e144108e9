"""The position of a loader: what moves it, what doesn't, and which pass may continue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.pipeline.feed import Position
from penstock.pipeline.plan import BatchSchedule, Cursor, Walk

WALK = Walk(samples=25, schedule=BatchSchedule.constant(10), drop_last=False)


def deliver(position: Position) -> None:
    step = WALK.step(position.cursor)
    assert step is not None
    position.deliver(step)


def test_it_follows_delivered_batches_into_the_next_epoch() -> None:
    position, seen = Position(), []
    for _ in range(7):
        seen.append(position.cursor)
        deliver(position)
        assert position.received == position.cursor
    assert seen == [Cursor(epoch, at) for epoch in (0, 1) for at in (0, 10, 20)] + [Cursor(2, 0)]


def test_requesting_a_pass_moves_nothing() -> None:
    position = Position()
    deliver(position)
    assert position.request_pass() == Cursor(0, 0)
    assert position.cursor == Cursor(0, 10)


def test_a_pass_begins_at_the_start_of_its_epoch_or_at_a_restored_position() -> None:
    position = Position()
    deliver(position)
    position.begin_pass()
    assert position.cursor == Cursor(0, 0)
    position.restore(Cursor(3, 10))
    position.begin_pass()
    assert position.cursor == Cursor(3, 10)
    deliver(position)  # the restored position applies once
    position.begin_pass()
    assert position.cursor == Cursor(3, 0)


def test_only_the_latest_pass_may_continue() -> None:
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
        deliver(position)
    assert position.is_over(begun)
    position.check(begun)  # over, not overtaken


def test_the_same_epoch_again_changes_nothing() -> None:
    position = Position()
    position.restore(Cursor(2, 10))
    begun = position.begin_pass()
    position.set_epoch(2)
    position.check(begun)
    assert (position.cursor, position.is_restored) == (Cursor(2, 10), True)
    position.set_epoch(4)
    assert (position.cursor, position.is_restored) == (Cursor(4, 0), False)


def test_another_epoch_keeps_what_was_received() -> None:
    position = Position()
    assert position.received is None
    deliver(position)
    position.set_epoch(7)
    assert position.received == Cursor(0, 10)
    position.restore(Cursor(1, 10))
    assert position.received is None


def test_an_epoch_is_requested_by_its_pass_not_by_the_end_of_the_one_before() -> None:
    position = Position()
    position.begin_pass()
    for _ in range(3):
        deliver(position)
    assert (position.cursor.epoch, position.requested_epoch) == (1, 0)
    position.request_pass()
    assert position.requested_epoch == 1


def test_which_batch_begins_an_epoch() -> None:
    position = Position()
    assert position.begins_epoch
    deliver(position)
    assert not position.begins_epoch
    position.restore(Cursor(4, 10))  # the state contains what was counted before
    assert not position.begins_epoch
    deliver(position)
    position.set_epoch(0)
    assert position.begins_epoch


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 20),
    at=st.integers(0, 60),
    drop_last=st.booleans(),
)
def test_a_restored_position_without_a_step_is_the_start_of_the_next_epoch(
    samples: int, batch: int, at: int, drop_last: bool
) -> None:
    walk = Walk(
        samples=samples, schedule=BatchSchedule.constant(min(batch, samples)), drop_last=drop_last
    )
    position = Position()
    position.restore(Cursor(5, min(at, samples)))
    position.normalise(walk)
    assert walk.step(position.cursor) is not None
    assert position.cursor in (Cursor(5, min(at, samples)), Cursor(6, 0))
    assert position.is_restored
