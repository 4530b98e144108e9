"""Lane orders: what is one, what is made of groups, and their text in a state."""

from __future__ import annotations

import binascii
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import PlanError, ResumeError
from penstock.pipeline.plan import MOST_GROUPS, LaneGroups, LaneOrder, ordered_slots


def some_order(lanes: int, seed: int) -> LaneOrder:
    groups = LaneGroups(lanes)
    order = np.arange(len(groups))
    np.random.default_rng(seed).shuffle(order[: groups.movable])
    return LaneOrder.of_groups(order.tolist(), lanes=lanes)


@settings(max_examples=100, deadline=None)
@given(lanes=st.one_of(st.integers(1, 300), st.integers(2000, 70_000)), seed=st.integers(0, 99))
def test_an_order_of_groups_comes_back_from_its_text(lanes: int, seed: int) -> None:
    order = some_order(lanes, seed)
    assert len(LaneGroups(lanes)) <= MOST_GROUPS
    assert len(order.text) < 9000
    assert json.loads(json.dumps(order.text)) == order.text
    assert LaneOrder.parse(order.text, lanes=lanes) == order
    assert LaneOrder.of_groups(order.groups.tolist(), lanes=lanes) == order


def test_every_order_of_few_lanes_is_one_of_groups() -> None:
    assert [len(LaneGroups(lanes)) for lanes in (1, 7, 2048, 2049, 4608, 10**6)] == [
        *(1, 7, 2048, 1025, 1536, 2045)
    ]
    order = LaneOrder((2, 0, 1))
    assert order.groups.tolist() == [2, 0, 1]
    assert LaneOrder.parse(order.text, lanes=3) == order
    assert not order.is_identity


def test_an_order_that_separates_the_lanes_of_a_group_has_no_text() -> None:
    places = list(range(5000))
    places[0], places[4000] = places[4000], places[0]
    with pytest.raises(PlanError, match="groups of 3 consecutive lanes"):
        _ = LaneOrder(tuple(places)).text


@pytest.mark.parametrize("groups", [[], [0], [0, 0], [1, 2], [0, 1, 2], [-1, 0]])
def test_what_is_no_permutation_of_groups_is_refused(groups: list[int]) -> None:
    with pytest.raises(PlanError, match="each of the 2 groups of 2 lanes once"):
        LaneOrder.of_groups(groups, lanes=2)


def test_a_shorter_group_stays_last() -> None:
    groups = list(range(len(LaneGroups(2049))))
    with pytest.raises(PlanError, match="the shorter group 1024 isn't last"):
        LaneOrder.of_groups(groups[::-1], lanes=2049)


def _text(groups: list[int], lanes: int) -> str:
    data = np.array(groups, dtype="<u2").tobytes()
    return f"groups:{lanes}:{binascii.b2a_base64(data, newline=False).decode()}"


@pytest.mark.parametrize(
    "text",
    [
        *(None, 3, [0, 1], "", "identity", "0,1", "groups:4:", "groups:4:AAAB", "groups:4:=A=="),
        *(_text([0, 1, 2], 4), _text([0, 1, 2, 4], 4), _text([0, 0, 1, 2], 4)),
        *(_text([0, 1, 2, 3], 5), _text([0, 1, 2, 3, 4], 4), _text([0, 1, 2, 3], 4) + "\n"),
        *("groups:04:AAABAAIAAwA=", "groups:٤:AAABAAIAAwA=", "groups:4:" + "A" * 10**7),
        *("groups:4:AAABAAIAAwB=", "groups:4:AAAB\x00AIAAwA=", "x" * 10**6),
    ],
)
def test_hostile_texts_are_refused(text: object) -> None:
    with pytest.raises(ResumeError) as raised:
        LaneOrder.parse(text, lanes=4)
    assert len(str(raised.value)) < 500


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.text(), st.from_regex(r"groups:4:[A-Za-z0-9+/=]*", fullmatch=True)))
def test_any_text_is_an_order_or_refused(text: str) -> None:
    try:
        order = LaneOrder.parse(text, lanes=4)
    except ResumeError:
        return
    assert sorted(order.places) == [0, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), lanes=st.integers(1, 12), position=st.integers(0, 60))
def test_slots_stand_by_place_and_offset(data: st.DataObject, lanes: int, position: int) -> None:
    count = data.draw(st.integers(0, 50))
    low = data.draw(st.integers(0, count))
    high = data.draw(st.integers(low, count))
    places = data.draw(st.permutations(range(lanes)))
    place_of = {lane: place for place, lane in enumerate(places)}
    wanted = sorted(
        (place_of[p % lanes], p // lanes, p % lanes) for p in range(position, position + count)
    )
    lane, offset = ordered_slots(position, count, np.array(places), low=low, high=high)
    assert [(int(x), int(n)) for x, n in zip(lane, offset, strict=True)] == [
        (lane, offset) for _, offset, lane in wanted[low:high]
    ]
