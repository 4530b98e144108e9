"""The quick case of the benchmark of nodes that serve one another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rich.console import Console

from benchmarks import peers

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_both_sides_costs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "NGINX", None)
    monkeypatch.setattr(peers, "BLOB_BYTES", 20 * peers.MIB)  # ranges of 16 MiB lie in it
    place = peers.measure(
        rounds=1, total_bytes=peers.MIB, results=tmp_path, console=Console(quiet=True)
    )
    told = json.loads(place.read_text())["cpu_s_per_gb"]
    assert set(told) == {"penstock, plain", "penstock, TLS"}
    for figures in told.values():
        assert set(figures) >= set(peers.RANGES)
        for one in figures.values():
            assert one["both"]["median"] > 0
