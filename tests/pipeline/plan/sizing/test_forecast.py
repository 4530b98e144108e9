"""Test the formulas of a sizing against known results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache import ConfigError
from penstock.pipeline.bench import accelerator
from penstock.pipeline.plan import CONNECTIONS_MARGIN, connections
from penstock.pipeline.plan.sizing import (
    changes,
    forecast,
    memory_share,
    reshuffled_share,
    single_share,
    unmet_utilisation,
)
from tests.pipeline.plan.sizing.setups import SETUP, setup


def test_a_b200_takes_5_9_gib_of_unet3d() -> None:
    model = accelerator("b200-unet3d")
    found = forecast(
        setup(
            samples=model.samples,
            sample_bytes=model.sample_bytes,
            samples_per_s=model.samples_per_s,
            gpus=1,
            nodes=1,
            global_batch=7,
        )
    )
    assert found.bytes_per_s / 2**30 == pytest.approx(5.9, abs=0.05)


def test_connections_are_littles_law_and_a_quarter_more() -> None:
    assert connections(1e9, request_bytes=8e6, request_s=0.1) == CONNECTIONS_MARGIN * 12.5


def test_nothing_waits_where_everything_is_fast() -> None:
    found = forecast(setup(store_bytes_per_s=1e12, nvme_bytes_per_s=1e12))
    assert found.first.limit == found.later.limit == "model"
    assert found.later.au == pytest.approx(100)
    assert found.later.seconds == pytest.approx(SETUP.steps * 256 / 1786)
    assert changes(found) == []


@pytest.mark.parametrize(
    ("changed", "limit"),
    [
        ({"store_bytes_per_s": 1e9}, "remote"),
        ({"store_requests_per_s": 1000}, "requests"),
        ({"nic_bytes_per_s": 1e8}, "nic"),
        ({"nvme_bytes_per_s": 1e8}, "disk"),
        ({"cpu_s_per_1000": 100.0}, "decode"),
        ({"store_latency_s": 2.0}, "connections"),
    ],
)
def test_the_slowest_tier_is_the_limit(changed: dict[str, float], limit: str) -> None:
    found = forecast(setup(**changed))
    assert found.first.limit == limit
    assert found.first.au < 90
    best = changes(found)[0] if limit != "connections" else None
    assert best is None or best.gain > 1


def test_later_epochs_of_a_kept_set_fetch_nothing() -> None:
    found = forecast(SETUP)
    assert found.kept == 1
    assert found.later.traffic.remote == found.later.traffic.requests == 0
    assert found.first.traffic.remote == pytest.approx(SETUP.total_bytes, rel=0.01)


@given(epochs=st.integers(1, 200), kept=st.floats(0, 2))
def test_a_jobs_remote_bytes_are_the_bound(epochs: int, kept: float) -> None:
    total = SETUP.total_bytes
    found = forecast(
        setup(epochs=epochs, nodes=1, nvme_bytes=kept * total / 0.998)
        if kept > 0.01
        else setup(epochs=epochs, nodes=1, nvme_bytes=0)
    )
    assert found.remote_bytes == pytest.approx(
        total * (1 + (epochs - 1) * max(0.0, 1 - found.kept)), rel=1e-6
    )
    assert found.kept == pytest.approx(min(1.0, kept) if kept > 0.01 else 0.0, abs=1e-6)


def test_half_of_the_room_in_memory_hits_as_an_lru_does() -> None:
    """Measured of an LRU over half of a set: 0.16."""
    assert memory_share(0.5) == pytest.approx(0.16, abs=0.01)
    assert memory_share(0) == 0
    assert memory_share(1) == 1


def test_single_requests_are_those_that_were_walked() -> None:
    """docs/explanation/mixing.md: 46 to 48 % if all is open, 9 % and 14 % of 0.10 and 0.16."""
    walked = {1.0: 0.47, 0.1024: 0.09, 0.164: 0.14, 0.41: 0.35}
    for opened, share in walked.items():
        assert single_share(opened) == pytest.approx(share, abs=0.035)


def test_tables_of_the_first_shards_are_fetched_by_fewer_at_a_time() -> None:
    found = forecast(
        setup(
            samples=12_000,
            sample_bytes=10_000,
            shards=115,
            nodes=1,
            gpus=1,
            global_batch=256,
            samples_per_s=12_800,
            store_latency_s=0.1,
            store_bytes_per_s=5e8,
            stream_bytes_per_s=5e8,
        )
    )
    assert found.first.limit == "connections"
    traffic, tables = found.first.traffic, 2 * 115
    assert traffic.opening == pytest.approx(tables)  # all are open at once
    expected = tables * 0.1 / 16 + ((traffic.requests - tables) * 0.1 + 0.24) / 64
    assert found.first.tiers["connections"] == pytest.approx(expected)


def test_shared_shards_come_from_peers() -> None:
    few: dict[str, Any] = {
        "samples": 200_000,
        "shards": 64,
        "nodes": 64,
        "global_batch": 16384,
        "samples_per_s": 100,
        "store_bytes_per_s": 1e12,
    }
    alone, peers = (forecast(setup(**few, peers=asked)) for asked in (False, True))
    assert alone.geometry.readers > 3
    total = alone.setup.total_bytes
    assert alone.first.traffic.remote == pytest.approx(total * alone.geometry.readers)
    assert peers.first.traffic.remote == pytest.approx(total)
    assert peers.first.traffic.peer == pytest.approx(total * (alone.geometry.readers - 1))
    assert peers.first.peer_cpu_s == pytest.approx(0.71 * peers.first.traffic.peer / 1e9)


def _starved(**job: Any) -> Any:
    few = {"samples": 200_000, "shards": 53}
    own = {"nodes": 4, "global_batch": 400, "samples_per_s": 100_000, **job}
    return setup(**few, **own, store_bytes_per_s=1e8)


def test_a_starved_first_epoch_fetches_what_each_reader_of_a_shard_needs() -> None:
    """Measured over 4 nodes without peers, 53 shards, 1.35 readers: 1.33 datasets, and for the
    tables of shards as many requests more; nothing in the second epoch."""
    found = forecast(_starved(epochs=1))
    total, readers = found.setup.total_bytes, found.geometry.readers
    assert found.first.limit == "remote"
    assert readers > 1.2
    assert found.first.traffic.remote == pytest.approx(total * readers, rel=0.01)
    assert forecast(_starved(epochs=3)).remote_bytes == pytest.approx(total * readers, rel=0.01)


def test_large_samples_of_a_starved_epoch_are_fetched_alone_and_the_rest_later() -> None:
    large = {"samples": 2_000, "sample_bytes": 50e6, "shards": 53}
    job = {"nodes": 4, "global_batch": 400, "samples_per_s": 100_000}
    one, three = (forecast(setup(**large, **job, epochs=n, store_bytes_per_s=1e8)) for n in (1, 3))
    total, readers = one.setup.total_bytes, one.geometry.readers
    assert readers > 1.2
    assert one.remote_bytes == pytest.approx(total)
    assert three.remote_bytes == pytest.approx(total * readers)
    assert three.requests > one.requests


def test_every_node_that_reads_a_shard_fetches_its_tables() -> None:
    found = forecast(_starved(epochs=1))
    tables = 2 * 53 * found.geometry.open_share
    readers = found.geometry.readers
    assert found.first.traffic.opening == pytest.approx(tables * readers, rel=0.01)
    peers = forecast(_starved(epochs=1, peers=True))
    assert peers.first.traffic.opening == pytest.approx(tables)
    no_cache = forecast(setup(nvme_bytes=0))
    tables = 2 * no_cache.geometry.shards * no_cache.geometry.readers
    assert no_cache.first.traffic.opening == pytest.approx(tables * no_cache.geometry.open_share)


def test_an_epoch_of_one_step_counts_it() -> None:
    """AU excludes the first step; an epoch of one step would have no AU."""
    job = {"nodes": 100_000, "global_batch": 800_000, "samples_per_s": 1000}
    found = forecast(setup(**job))
    assert found.setup.steps == 1
    assert found.first.seconds > 1
    assert found.first.au == pytest.approx(100 * 0.001 / found.first.seconds)
    assert found.first.busy == found.first.au
    assert found.later.au == pytest.approx(100)


SLOW_START = setup(
    samples=12_000,
    shards=115,
    nodes=1,
    global_batch=2048,
    samples_per_s=100,
    epochs=2,
    store_latency_s=0.5,
    store_requests_per_s=1e6,
)


def test_a_first_batch_that_takes_long_shows_in_what_counts_it() -> None:
    first = forecast(SLOW_START).first
    assert first.au > first.busy + 5
    assert first.busy == pytest.approx(100 * first.tiers["model"] / first.seconds)


def test_a_cache_below_a_shard_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigError, match=r"one shard is 63\.9 MiB, 67\.0 x as much"):
        forecast(setup(nvme_bytes=1e6))


def test_an_au_that_cant_be_met_names_the_constraint_and_by_how_much() -> None:
    slow = forecast(setup(nvme_bytes_per_s=4e8, ram_bytes=1e9))
    words = unmet_utilisation(slow, au=95)
    assert words is not None
    assert f"{slow.later.tiers['disk'] / slow.later.tiers['model']:.2f} x" in words
    assert "Too slow for the GPUs: the local disk (" in words
    many = unmet_utilisation(forecast(setup(store_requests_per_s=1.0, epochs=1)), au=95)
    assert many is not None
    assert "Too slow for the GPUs: the store's requests a second (" in many
    assert unmet_utilisation(forecast(SETUP), au=95) is None


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
def test_figures_that_cant_be_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="sample bytes: got"):
        setup(sample_bytes=bad)
    with pytest.raises(ConfigError, match="cores: got"):
        setup(cores=bad)


def test_a_batch_below_the_world_and_above_the_set_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 31, 1 fewer than the 32 GPUs of 4 nodes"):
        setup(global_batch=31)
    with pytest.raises(ConfigError, match="8092 samples short of one full batch"):
        setup(samples=100)


def test_reshuffled_shards_are_those_that_a_node_reads_for_the_first_time() -> None:
    """Against a draw: each shard in each epoch at home, or with p at any node."""
    nodes, shards, epochs, share = 4, 4000, 6, 0.3
    rng = np.random.default_rng(5)
    home = np.arange(shards) % nodes
    seen = np.zeros((nodes, shards), np.bool_)
    new = []
    for _ in range(epochs):
        moves = rng.random(shards) < share
        at = np.where(moves, rng.integers(0, nodes, shards), home)
        new.append(np.mean(~seen[at, np.arange(shards)]))
        seen[at, np.arange(shards)] = True
    assert new[0] == 1
    said = reshuffled_share(share, nodes=nodes, epochs=epochs)
    assert said == pytest.approx(np.mean(new[1:]), abs=0.01)
    assert reshuffled_share(share, nodes=1, epochs=90) == 0
    assert reshuffled_share(0.0, nodes=8, epochs=90) == 0


def test_reshuffle_moves_bytes_in_every_epoch_from_peers_or_from_the_store() -> None:
    job = {"nodes": 8, "reshuffle": 0.1, "epochs": 10}
    alone, peers = (forecast(setup(**job, peers=asked)) for asked in (False, True))
    assert alone.later.traffic.remote > 0
    assert alone.later.traffic.remote == pytest.approx(peers.later.traffic.peer)
    assert peers.later.traffic.remote == 0
    few = forecast(setup(**job, peers=True, nvme_bytes=0.25e9 * 147))
    assert few.kept == pytest.approx(0.25, abs=0.01)  # of all shards, not of the node's
