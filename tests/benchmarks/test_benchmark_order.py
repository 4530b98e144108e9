"""Test the benchmark of the order."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from benchmarks.order import JobSize, measure, measured
from benchmarks.record import RESULTS

if TYPE_CHECKING:
    from pathlib import Path


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def test_wide_windows_mix_more_and_cost_more() -> None:
    job = JobSize(shards=400, ranks=8)
    narrow, wide = measured(job, 2), measured(job, 400)
    assert job.lanes == 32
    assert 4 <= narrow["shards_of_a_batch"] < wide["shards_of_a_batch"] <= 32
    assert narrow["meets_again"] > wide["meets_again"] == pytest.approx(8, rel=0.2)
    assert 0 < narrow["single_share"] < wide["single_share"] < 1
    assert narrow["open_bytes"] < wide["open_bytes"] <= 400 * 2**26
    assert narrow["readers"] == wide["readers"] == 1


def test_every_job_has_its_default_and_its_whole_lane(tmp_path: Path) -> None:
    path = measure([JobSize(shards=100, ranks=8)], results=tmp_path, console=Console(quiet=True))
    rows = rows_of(path)
    assert [row["window"] for row in rows if row["default"]] == [4]
    assert [row["whole_lane"] for row in rows] == [False, False, True]


def test_the_defaults_are_those_of_the_results() -> None:
    """Otherwise the table is outdated: measure again."""
    for row in rows_of(RESULTS / "order.json"):
        job = JobSize(shards=row["shards"], ranks=row["ranks"])
        assert job.lanes == row["lanes"]
        assert (job.default_window == row["window"]) == row["default"]
