"""Test that the kept result of `benchmarks.mixing` is what the code gives."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import mixing
from benchmarks.record import RESULTS
from penstock.pipeline.plan import Plan


@pytest.fixture(scope="module")
def kept() -> Any:
    return json.loads((RESULTS / "mixing.json").read_text())


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [each for one in value for each in flat(one)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("part", "measure"),
    [
        ("lane_order", mixing.lane_orders),
        ("fill", mixing.fill),
        ("padding", lambda: mixing.padding(mixing.COCO_BATCH, mixing.COCO_RANKS)),
    ],
)
def test_the_result_is_what_the_code_gives(part: str, measure: Any, kept: Any) -> None:
    """Run `python -m benchmarks.mixing` after a change of the order."""
    found = flat(measure())
    assert [each for each in found if isinstance(each, str)] == [
        each for each in flat(kept[part]) if isinstance(each, str)
    ]
    numbers = [each for each in found if not isinstance(each, str)]
    assert numbers == pytest.approx([e for e in flat(kept[part]) if not isinstance(e, str)])


def test_a_walk_sees_all_units() -> None:
    plan = Plan([8] * 16, seed=1, lanes=2, window=8, units=[[4, 4]] * 16)
    seen = mixing.walked(plan, batch=4, world=2, units=2, rows=4)
    assert 1 <= seen["units_of_a_batch"] <= 4
    assert 0 <= seen["pairs_of_one_unit"] <= 1
    assert 0 < seen["kept_units"] <= 32


def test_sorted_data_is_measured_with_every_batch() -> None:
    for row in mixing.sorted_data(samples=40_000):
        assert len(row["variance"]) == len(row["partners"]) == len(mixing.SORTED_BATCHES)
        assert max(row["variance"]) < 1.3  # of few batches
