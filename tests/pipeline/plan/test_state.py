"""Test that states are small JSON, survive a round trip, and are rejected if they don't fit."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ResumeError
from penstock.pipeline.plan import (
    MOST_KEPT,
    MOST_LANE_ORDER,
    BatchSchedule,
    LoaderState,
    PlanSettings,
    order_fingerprint,
)

STATE = LoaderState(
    dataset="d" * 64,
    fingerprint="f" * 64,
    samples=100,
    plan=PlanSettings(seed=2**80, shuffle=True, lanes=8, window=3, reshuffle=0.5),
    epoch=4,
    position=40,
    step=44,
    schedule=BatchSchedule.constant(10),
    drop_last=True,
    lane_order="1,0",
    bad=3,
)


def test_json_round_trip() -> None:
    text = json.dumps(STATE.to_dict())
    assert len(text) < 1000
    assert LoaderState.from_dict(json.loads(text)) == STATE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1"),
        ({"version": None}, "version None"),
        ({"epoch": -1}, "epoch -1"),
        ({"position": 101}, "position 101"),
        ({"position": "4"}, "'position' is '4'"),
        ({"position": True}, "'position' is True"),
        ({"plan": None}, "'plan' is None"),
        ({"plan": {"seed": 1}}, "'shuffle' is None"),
        ({"dataset": 3}, "'dataset' is 3"),
        ({"step": 43}, "step 43 isn't the one at epoch 4, position 40"),
        ({"step": None}, "step None isn't"),
        ({"step": -1}, "step -1 isn't"),
        ({"step": 44.0}, "'step' is 44.0"),
        ({"batches": None}, "'batches' is None"),
        ({"batches": []}, r"'batches': .*got \(\), wanted"),
        ({"batches": [[0, 10], [0, 11]]}, "ascend"),
        ({"batches": [[90, 10], [50, 11]]}, "ascend"),
        ({"batches": [[0, "10"]]}, "whole numbers"),
        ({"batches": [[0, 10, 3]]}, "'batches'"),
        ({"batches": [0, 10]}, "'batches'"),
        ({"batches": [[0, 2**60]]}, "beyond a job"),
        ({"batches": [[number, 1 + number % 2] for number in range(161)]}, "161 sizes"),
        ({"batches": [[441, 10]], "first_step": 44}, "step 44 isn't"),
        ({"first_step": 2**70}, "beyond a job"),
        ({"first_step": -1}, "history"),
        ({"epoch": 2**60}, "epoch 1152921504606846976"),
        ({"samples": 0, "position": 0}, "step 44 isn't"),
        ({"lane_order": 7}, "'lane_order' is 7"),
        ({"lane_order": "1," * 5000}, "lane order is too long"),
        ({"plan": {**STATE.to_dict()["plan"], "lanes": 10**12}}, "invalid plan"),
        ({"plan": {**STATE.to_dict()["plan"], "lanes": 0}}, "invalid plan"),
        ({"plan": {**STATE.to_dict()["plan"], "reshuffle": float("nan")}}, "invalid plan"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ResumeError, match=message):
        LoaderState.from_dict({**STATE.to_dict(), **change})


def test_the_largest_state_is_below_10_kilobytes() -> None:
    schedule = BatchSchedule.of({10**12 * i: 10_000 + i % 2 for i in range(MOST_KEPT)})
    state = replace(STATE, schedule=schedule, lane_order="x" * MOST_LANE_ORDER)
    state = replace(state, step=state.walk.step_number(state.cursor))
    text = json.dumps(state.to_dict())
    assert len(text) < 10_000
    assert LoaderState.from_dict(json.loads(text)) == state


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*STATE.to_dict()]), JUNK, max_size=3))
def test_junk_is_refused_or_harmless(change: dict[str, Any]) -> None:
    try:
        state = LoaderState.from_dict({**STATE.to_dict(), **change})
    except ResumeError:
        return
    assert state.step is not None
    assert state.walk.cursor_of(state.step) == state.cursor


@pytest.mark.parametrize("state", [None, 3, "x", [], {}])
def test_an_invalid_state_is_refused(state: object) -> None:
    with pytest.raises(ResumeError):
        LoaderState.from_dict(state)


def test_another_dataset_or_seed_is_refused_with_both_sides() -> None:
    contents: Any = SimpleNamespace(
        fingerprint="d" * 64, samples=100, sizes=[100], units=None, weights=None, lists=None
    )
    state = replace(STATE, lane_order=None, fingerprint=order_fingerprint(contents, STATE.plan))
    with pytest.raises(ResumeError, match=r"eeeeeeeeeeee.*dddddddddddd"):
        replace(state, dataset="e" * 64).check(contents)
    with pytest.raises(ResumeError, match=r"seed=1208925819614629174706176.*seed=7"):
        state.check(contents, wanted={"seed": 7})
    with pytest.raises(ResumeError, match="orders samples differently"):
        STATE.check(contents)
    state.check(contents, wanted={"seed": 2**80, "lanes": 8})
