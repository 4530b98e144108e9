"""10^9 samples on 1,024 ranks: a rank's plan is small, and its first ids come at once."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.order_large import in_a_child


@pytest.mark.parametrize(
    "told",
    [
        {"shards": 200_000, "batch": 32_768, "extras": True},
        {"shards": 200_000, "batch": 32_768, "shuffled": False},
        {"shards": 20_000, "batch": 1024},
        pytest.param({"shards": 1_000_000, "batch": 32_768}, marks=pytest.mark.grid),
    ],
)
def test_a_rank_of_a_thousand_begins_in_seconds_and_megabytes(told: dict[str, Any]) -> None:
    found = in_a_child(**told)
    assert found["plan_mib"] < 300
    assert found["first_cpu_s"] < 2  # of work, which a busy machine doesn't lengthen
