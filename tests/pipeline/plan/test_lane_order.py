"""Test lane orders, their text in a state, and the defaults of lanes and windows."""

from __future__ import annotations

import binascii
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import PlanError
from penstock.pipeline.plan import (
    MOST_GROUPS,
    LaneGroups,
    LaneOrder,
    default_lanes,
    default_window,
    label_spread,
    most_lanes,
    ordered_slots,
)
from tests.properties import examples


def some_order(lanes: int, seed: int) -> LaneOrder:
    groups = LaneGroups(lanes)
    order = np.arange(len(groups))
    np.random.default_rng(seed).shuffle(order[: groups.movable])
    return LaneOrder(tuple(order.tolist()), lanes)


@examples(100)
@given(lanes=st.one_of(st.integers(1, 300), st.integers(2000, 70_000)), seed=st.integers(0, 99))
def test_an_order_of_groups_comes_back_from_its_text(lanes: int, seed: int) -> None:
    order = some_order(lanes, seed)
    assert len(LaneGroups(lanes)) <= MOST_GROUPS
    assert len(order.text) < 9000
    assert json.loads(json.dumps(order.text)) == order.text
    assert LaneOrder.parse(order.text, lanes=lanes) == order
    at = order.lanes_of(lanes)
    assert sorted(at.tolist()) == list(range(lanes))
    assert np.array_equal(at[:: LaneGroups(lanes).size] // LaneGroups(lanes).size, order.groups)


def test_every_order_of_few_lanes_is_one_of_groups() -> None:
    assert [len(LaneGroups(lanes)) for lanes in (1, 7, 2048, 2049, 4608, 10**6)] == [
        *(1, 7, 2048, 1025, 1536, 2045)
    ]
    order = LaneOrder((2, 0, 1), 3)
    assert order.lanes_of(3).tolist() == [2, 0, 1]
    assert LaneOrder.parse(order.text, lanes=3) == order
    assert not order.is_identity


@pytest.mark.parametrize("groups", [[], [0], [0, 0], [1, 2], [0, 1, 2], [-1, 0]])
def test_an_invalid_permutation_of_groups_is_refused(groups: list[int]) -> None:
    with pytest.raises(PlanError, match="each of the 2 groups of 2 lanes once"):
        LaneOrder(tuple(groups), 2)


def test_a_shorter_group_stays_last() -> None:
    groups = list(range(len(LaneGroups(2049))))
    with pytest.raises(PlanError, match="a shorter one last"):
        LaneOrder(tuple(groups[::-1]), 2049)


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
    with pytest.raises(ValueError, match=r".") as raised:
        LaneOrder.parse(text, lanes=4)
    assert len(str(raised.value)) < 500


@examples(200)
@given(text=st.one_of(st.text(), st.from_regex(r"groups:4:[A-Za-z0-9+/=]*", fullmatch=True)))
def test_any_text_is_an_order_or_refused(text: str) -> None:
    try:
        order = LaneOrder.parse(text, lanes=4)
    except ValueError:
        return
    assert sorted(order.groups) == [0, 1, 2, 3]


@examples(200)
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


# -- defaults


@examples(200)
@given(batch=st.integers(1, 5000), shards=st.integers(0, 10**6))
def test_default_lanes_divide_the_batch(batch, shards):
    fits = [d for d in range(1, batch + 1) if batch % d == 0 and d <= min(shards / 4, batch / 8)]
    assert default_lanes(batch, shards) == max(fits, default=1)
    assert max([1, *fits]) <= most_lanes(batch, shards)


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ({"icc": None, "shuffled": True}, 7),  # sqrt(40_000) = 200 open, over 32 lanes
        ({"icc": None, "shuffled": False}, 63),  # 2,000
        ({"icc": 0.0, "shuffled": False}, 7),
        ({"icc": -0.01, "shuffled": False}, 7),
        ({"icc": 0.1, "shuffled": False}, 80),  # 100 * 256 * 0.1 = 2,560
        ({"icc": 0.02, "shuffled": False}, 63),
        ({"icc": 0.1, "shuffled": True}, 80),
        ({"icc": 1.0, "shuffled": False}, 800),
    ],
)
def test_default_window_opens_what_labels_need(arguments, window):
    assert default_window(40_000, 32, global_batch=256, **arguments) == window


@pytest.mark.parametrize(
    ("shards", "lanes", "window"),
    [
        (1, 1, 1),
        (7, 1, 7),  # small sets mix as a whole
        (16, 4, 4),
        (64, 8, 8),
        (65, 8, 8),  # and larger ones no less
        (1000, 32, 4),  # a rank with one lane has some shards to mix
        (10**6, 32, 32),
    ],
)
def test_default_windows_of_shuffled_packs(shards, lanes, window):
    found = default_window(shards, lanes, global_batch=256, icc=0.0, shuffled=True)
    assert found == window


@examples(100)
@given(
    shards=st.integers(0, 10**6),
    batch=st.integers(1, 10**5),
    icc=st.one_of(st.none(), st.floats(-0.1, 1)),
    shuffled=st.booleans(),
)
def test_default_window_is_enough_and_no_more_than_all(shards, batch, icc, shuffled):
    lanes = default_lanes(batch, shards)
    window = default_window(shards, lanes, global_batch=batch, icc=icc, shuffled=shuffled)
    assert window >= 1
    assert window * lanes >= min(shards, max(math.sqrt(shards), 64, 4 * lanes))
    assert (window - 1) * lanes < max(shards, 1)
    if icc is not None:
        assert window * lanes >= min(shards, 100 * batch * icc)
        open_shards = min(window * lanes, shards)
        if 0 < open_shards < shards:
            assert label_spread(batch, icc, open_shards, shards) <= 1.01 + 1e-9


def test_label_spread_follows_a_simulation():
    """With shards of one label each, batches from few open shards vary by the formula."""
    rng = np.random.default_rng(0)
    batch, open_shards, shards, classes = 64, 32, 1000, 10
    labels = np.repeat(np.arange(classes), shards // classes)
    counts = [
        np.count_nonzero(labels[rng.choice(rng.choice(shards, open_shards, False), batch)] == 0)
        for _ in range(6000)
    ]
    full = batch / classes * (1 - 1 / classes)
    assert np.var(counts) / full == pytest.approx(
        label_spread(batch, 1.0, open_shards, shards), rel=0.1
    )
    assert label_spread(batch, 1.0, shards, shards) == 1
    assert label_spread(batch, 0.0, 1, shards) == 1
    assert label_spread(1, 1.0, 1, 0) == 1


def test_no_more_rows_are_open_than_a_plan_has_room_for() -> None:
    arguments: dict[str, Any] = {"global_batch": 64, "shuffled": False}
    assert default_window(2_400, 8, icc=None, **arguments) == 62
    assert default_window(2_400, 8, icc=None, rows=200_000.0, **arguments) == 6
    assert default_window(2_400, 8, icc=None, rows=1e9, **arguments) == 1
    assert default_window(2_400, 8, icc=1.0, rows=1e9, **arguments) == 300
