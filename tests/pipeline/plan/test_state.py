"""States are small JSON, survive a round trip, and are refused when they don't fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.cache.errors import ResumeError
from penstock.pipeline.plan.batch_schedule import BatchSchedule
from penstock.pipeline.plan.settings import PlanSettings
from penstock.pipeline.plan.state import LoaderState, check_resumable

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
    ("change", "told"),
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
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ResumeError, match=told):
        LoaderState.from_dict({**STATE.to_dict(), **change})


@pytest.mark.parametrize("state", [None, 3, "x", [], {}])
def test_what_is_no_state_is_refused(state: object) -> None:
    with pytest.raises(ResumeError):
        LoaderState.from_dict(state)


def test_another_dataset_or_seed_is_refused_with_both_sides() -> None:
    with pytest.raises(ResumeError, match=r"dddddddddddd.*eeeeeeeeeeee"):
        check_resumable(STATE, dataset="e" * 64, samples=7, wanted={})
    with pytest.raises(ResumeError, match=r"seed=1208925819614629174706176.*seed=7"):
        check_resumable(STATE, dataset="d" * 64, samples=100, wanted={"seed": 7})
    check_resumable(STATE, dataset="d" * 64, samples=100, wanted={"seed": 2**80, "lanes": 8})
