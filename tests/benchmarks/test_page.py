"""Test that the page of benchmarks shows the kept results."""

from __future__ import annotations

import json
import re
from typing import Any

from benchmarks import page


def a_result(speeds: dict[str, float]) -> dict[str, Any]:
    """Return what `benchmarks.compare` keeps of loaders with these rates."""

    def figure(value: float) -> dict[str, float]:
        return {"median": value, "low": 0.9 * value, "high": 1.1 * value}

    first = next(iter(speeds.values()))
    summary = {
        name: {
            "images_per_s": figure(speed),
            "cpu_s_per_1000": figure(2000 / speed),
            "first_batch_s": figure(0.25),
            "wait_share": figure(0.0125),
            "speed_ratio": figure(first / speed),
            "cpu_ratio": figure(first / speed),
        }
        for name, speed in speeds.items()
    }
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cores": 2, "processor": "A Processor"},
        "versions": {"python": "3.11", "torch": "2.13", "webdataset": "1.0"},
        "dataset": {"images": 3072, "mean_bytes": 40123, "short_side": None, "origin": "of 3 cats"},
        "work": {"batch_size": 128, "size": 224, "workers": 2},
        "round": {"stepped": 12, "step_ms": 240.4},
        "rounds_played": 5,
        "decoder_of_the_rest": "simplejpeg + OpenCV",
        "not_installed": {"grain": "pip install grain"},
        "summary": summary,
    }


def test_the_page_is_what_the_kept_results_say() -> None:
    """Run `python -m benchmarks.page` if this fails."""
    assert page.PAGE.read_text() == page.page()


def test_every_kept_comparison_with_another_loader_is_on_the_page() -> None:
    shown = {section.result for section in page.SECTIONS}
    others = re.compile("torch|albumentations|zarr|pyarrow")
    compared = {
        path.stem
        for path in page.RESULTS.glob("*.json")
        if others.search(str(keys(json.loads(path.read_text()))))
    }
    assert compared - shown == set()


def keys(values: Any) -> list[str]:
    """Return all keys of a JSON value but those of the versions."""
    if isinstance(values, list):
        return [key for one in values for key in keys(one)]
    if not isinstance(values, dict):
        return []
    kept = {key: value for key, value in values.items() if key != "versions"}
    return [*kept, *(key for value in kept.values() for key in keys(value))]


def test_a_section_has_date_machine_versions_and_command() -> None:
    values = a_result({"penstock": 1234, "webdataset": 411, "dali": 617})
    text = page.SECTIONS[0].render(values)
    assert "2026-01-02, 2 cores of A Processor. python 3.11, torch 2.13, webdataset 1.0" in text
    assert "3,072 JPEGs of 40 kB (of 3 cats). " in text
    assert "`python -m benchmarks.compare`" in text
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.count("|") for row in rows] == [8] * 4  # with the head
    assert rows[1].startswith(
        "| **Penstock (pack)** | 1,234 (1,111 to 1,357) | 1.62 (1.46 to 1.78)"
    )
    assert "| 0.25 s | 1.2 % | 2.00 | 2.00 |" in rows[2]
    assert "Not installed, so not measured: Grain." in text
    assert "WebDataset (tar files of the same bytes)" in text
    assert "WebDataset decode with simplejpeg + OpenCV" in text


def test_chart_and_table_have_penstock_first_and_then_the_fastest() -> None:
    summary = {
        name: {"images_per_s": {"median": speed}}
        for name, speed in {"penstock": 1.0, "torch": 2.0, "dali": 3.0}.items()
    }
    assert page.ordered(summary) == ["penstock", "dali", "torch"]


def test_the_chart_lies_beside_the_page() -> None:
    charts = re.findall(r"!\[.*?\]\((.*?)\)", page.page())
    assert charts
    assert all((page.PAGE.parent / chart).stat().st_size > 1000 for chart in charts)
