"""The fill queue returns each shard once, in the order of first need, within the walk's budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.feed import FillQueue
from penstock.pipeline.plan import BatchSchedule, Cursor, Needs, Plan, Walk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pytest

SIZES = [7, 3, 9, 4, 6, 8, 2, 5]
WALK = Walk(samples=sum(SIZES), schedule=BatchSchedule.constant(4), drop_last=False)


def needs() -> Needs:
    return Needs(Plan(SIZES, seed=3, lanes=2, window=1), WALK, first=0, end=1, world=1)


def queue(kept: Sequence[int] = range(len(SIZES)), most_ahead: int = 10**6) -> FillQueue:
    found = FillQueue(needs(), mine=np.arange(len(SIZES)), endless=False, most_ahead=most_ahead)
    found.pin(kept.__contains__, has_changed=lambda: True)
    return found


def rest(found: FillQueue, here: Sequence[int] = ()) -> list[int]:
    shards = []
    while (shard := found.next(lambda n: n in here)) is not None:
        shards.append(shard)
    return shards


def first_needs(start: Cursor) -> list[int]:
    touched = [n for _, some in needs().shards(start, endless=False) for n in some.tolist()]
    return list(dict.fromkeys(touched))


@given(
    kept=st.sets(st.integers(0, len(SIZES) - 1)),
    here=st.sets(st.integers(0, len(SIZES) - 1)),
    step=st.integers(0, len(WALK) - 1),
)
def test_kept_shards_that_are_not_here_come_once_by_first_need(
    kept: set[int], here: set[int], step: int
) -> None:
    found, start = queue(sorted(kept)), Cursor(1, step * WALK.schedule.size)
    found.seek(start)
    assert rest(found, sorted(here)) == [n for n in first_needs(start) if n in kept - here]
    assert found.pinned == sorted(kept)


def test_before_a_place_is_sought_nothing_is_filled() -> None:
    found = queue()
    assert found.next(lambda _: False) is None
    assert not found.is_empty


def test_from_another_place_what_was_met_and_not_filled_comes_again() -> None:
    found = queue()
    found.seek(Cursor(0, 0))
    first = found.next(lambda _: False)
    found.seek(Cursor(0, 0))
    assert rest(found) == [n for n in first_needs(Cursor(0, 0)) if n != first]
    assert found.is_empty


def test_the_last_place_that_was_sought_counts() -> None:
    found, last = queue(), Cursor(2, 12)
    for place in (Cursor(0, 0), Cursor(1, 8), last):
        found.seek(place)
    assert rest(found) == first_needs(last)


def test_a_shard_that_was_put_back_comes_behind_the_others() -> None:
    found = queue()
    found.seek(Cursor(0, 0))
    shard = found.next(lambda _: False)
    assert shard is not None
    found.put_back(shard)
    assert sorted([*rest(found)]) == list(range(len(SIZES)))


@given(refused=st.lists(st.sets(st.integers(0, len(SIZES) - 1)), min_size=1, max_size=5))
def test_shards_that_are_passed_over_keep_their_places(refused: list[set[int]]) -> None:
    found, order = queue(), first_needs(Cursor(0, 0))
    found.seek(Cursor(0, 0))
    for some in refused:
        may = [n for n in order if n not in some]
        assert found.next(lambda _: False, may.__contains__) == (may[0] if may else None)
        if may:
            order.remove(may[0])
        assert found.is_empty == (not order)
    assert rest(found) == order
    assert found.is_empty


def test_the_walk_waits_for_many_that_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FillQueue, "most_passed_over", 2)
    found, asked = queue(), list[int]()
    found.seek(Cursor(0, 0))
    for _ in range(2):
        assert found.next(lambda _: False, asked.append) is None
    first = first_needs(Cursor(0, 0))
    assert len(set(asked)) < len(first)
    assert rest(found) == first


def test_the_walk_stops_where_it_may_go_no_further() -> None:
    found = queue(most_ahead=1)
    found.seek(Cursor(0, 0))
    walked = [some.tolist() for _, some in needs().shards(Cursor(0, 0), endless=False)]
    assert rest(found) == walked[0]
    assert rest(found) == []
    found.count_batch()
    assert rest(found) == [n for n in walked[1] if n not in walked[0]]
    found.seek(Cursor(0, 0))
    assert rest(found) == []  # what was met before, and no more


def test_what_the_cache_keeps_is_looked_at_once_or_when_it_has_changed() -> None:
    found = queue([0, 1])
    assert not found.pin([2].__contains__, has_changed=lambda: False)
    assert found.pinned == [0, 1]
    assert found.pin([1, 2].__contains__, has_changed=lambda: True)
    assert found.pinned == [1, 2]
    found.seek(Cursor(0, 0))
    assert sorted(rest(found)) == [1, 2]


class Endless:
    """Steps that need no shard: the walk ends only where it may go no further."""

    shard_count = len(SIZES)

    def __init__(self) -> None:
        self.walked = 0

    def shards(self, _start: Cursor, *, endless: bool) -> Iterator[tuple[Cursor, Any]]:
        assert endless
        while True:
            self.walked += 1
            yield Cursor(0, 0), np.zeros(0, np.int64)


@given(batches=st.lists(st.booleans(), max_size=200), steps=st.integers(1, 50))
def test_the_walk_stays_near_the_consumer(batches: list[bool], steps: int) -> None:
    endless: Any = Endless()
    found = FillQueue(endless, mine=np.arange(len(SIZES)), endless=True, most_ahead=steps)
    found.pin(lambda _: True, has_changed=lambda: True)
    found.seek(Cursor(0, 0))
    received = 0
    for is_received in batches:
        if is_received:
            found.count_batch()
            received += 1
        else:
            assert found.next(lambda _: False) is None
            assert endless.walked == min(16 * (received + 1), received + steps)
