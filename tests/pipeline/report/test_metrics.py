"""Metrics have the values of the statistics."""

from __future__ import annotations

import sys
import urllib.request
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from penstock.cache import MissingDependencyError
from penstock.cache.base import Traffic, growth, summed
from penstock.pipeline import DataLoader, Statistics, World
from penstock.pipeline.report import Meter, TierFacts, log_tensorboard, serve_metrics
from penstock.readers import Dataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def loader(pack: Path) -> Iterator[DataLoader]:
    dataset = Dataset(str(pack), fields=("label", "id"))
    world = World(1, 4)
    with DataLoader(dataset, 8, shuffle=True, seed=3, drop_last=True, world=world) as found:
        yield found


def scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_a_scrape_tells_what_the_statistics_tell(loader: DataLoader, pack: Path) -> None:
    pytest.importorskip("prometheus_client")
    url = str(getattr(loader.dataset, "url", ""))
    labels = f'{{dataset="{url}",rank="1"}}'
    with serve_metrics(loader) as server:
        before = scraped(server.port)
        batches = sum(1 for _ in loader)
        after = scraped(server.port)
    assert str(pack) in url
    assert before[f"penstock_batches_total{labels}"] == 0
    assert after[f"penstock_batches_total{labels}"] == batches
    assert after[f"penstock_samples_total{labels}"] == 8 * batches
    assert after[f"penstock_disk_bytes_total{labels}"] == loader.statistics().bytes_disk
    assert after[f"penstock_hit_ratio{labels}"] == 1.0
    assert sum(name.startswith("penstock_limit") for name in after) == 1


def test_each_counter_has_its_meaning_in_the_documentation() -> None:
    for row in fields(Statistics):
        assert f"{row.name}: " in (Statistics.__doc__ or "") or not row.metadata
        assert not row.metadata or row.metadata["text"] in (Statistics.__doc__ or "")


def test_a_counter_of_the_cache_is_exported_and_subtracted(
    loader: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all tables, `Traffic` alone names such a counter; its growth and export follow."""
    written: dict[str, float] = {}
    counts = {"failed": 7, "bytes_remote": 30}
    remote = TierFacts(
        traffic=Traffic(**counts),
        connections=1,
        request_p99_s=0.0,
        wanted_bytes=0,
        kept_bytes=0,
        max_bytes=0,
    )
    meter = Meter(decode_threads=1, device="cpu", remote=lambda: remote)
    monkeypatch.setattr(loader, "statistics", meter.snapshot)
    writer = SimpleNamespace(
        add_scalar=lambda name, value, _: written.update({name: value}), add_text=lambda *_: None
    )
    log_tensorboard(loader, writer, 1)
    assert written["penstock/failed"] == 7
    assert growth(remote, replace(remote, traffic=Traffic(failed=3))).traffic.failed == 4
    both = summed([remote.traffic, Traffic(failed=1)])
    assert (both.failed, both.bytes_remote) == (8, 30)


def test_closing_ends_the_server_and_its_thread(loader: DataLoader) -> None:
    pytest.importorskip("prometheus_client")
    server = serve_metrics(loader)
    server.close()
    server.close()
    with pytest.raises(OSError, match="refused"):
        scraped(server.port)


def test_tensorboard_gets_scalars(loader: DataLoader) -> None:
    written: dict[str, tuple[float, int]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name] = (value, step)

        def add_text(self, name: str, text: str, step: int) -> None:
            assert (name, text, step) == ("penstock/verdict", loader.statistics().verdict, 5)

    batches = sum(1 for _ in loader)
    log_tensorboard(loader, Writer(), 5)
    assert written["penstock/batches"] == (batches, 5)
    wait_s, step_s = (written[f"penstock/{name}"][0] for name in ("wait_s", "step_s"))
    assert written["penstock/wait_share"][0] == pytest.approx(wait_s / (wait_s + step_s))


def test_a_missing_package_names_the_extra(
    loader: DataLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"penstock\[metrics\]"):
        serve_metrics(loader)
