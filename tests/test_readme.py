"""Test that the README is short, and that its figures are kept results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 10_000


def kept(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_the_figures_are_kept_results() -> None:
    speed = {
        n: s["speed_ratio"]["median"]
        for n, s in kept("throughput")["summary"].items()
        if n != "penstock"
    }
    starts = kept("resume")["starts"]
    cache = kept("cache")["epochs"]["summary"]
    nodes = {run["name"]: run["remote_share"] for run in kept("cluster-change")["runs"]}
    job = kept("dlio")["workloads"]["resnet50-decode"]
    busy = {name: one["au"]["median"] for name, one in job["summary"].items()}
    figures = [
        f"{speed['dali']:.2f} times as many images per second as DALI's own pipeline",
        f"{speed['simplejpeg']:.2f} times as many as torch's",
        f"at any position in {max(start['total_s'] for start in starts) + 0.005:.2f} seconds",
        f"warm cache runs at {cache['warm by local, images/s']['median']:.2f} of the rate",
        f"fetched it {nodes['three epochs, cold']:.3f} times in three epochs",
        f"{kept('detection')['cases']['boxes']['speed_ratio']:.2f} times the images per second of albumentations",
        f"at {job['k']} times its published step",
        f"busy for {busy['penstock']:.1f} % of the time with Penstock, and for {busy['torch']:.1f} %",
    ]
    text = " ".join(README.split())
    assert [figure for figure in figures if figure not in text] == []
    # "A seventh of the CPU time".
    assert round(kept("views")["ratios"]["torch and Pillow"]["median"]) == 7
