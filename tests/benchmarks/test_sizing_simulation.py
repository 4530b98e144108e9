"""Test that the simulation of the real order agrees with the formulas within their domain."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.sizing_simulation import Simulation, simulate
from penstock.pipeline.plan.sizing import ClusterSetup, forecast
from tests.pipeline.plan.sizing.setups import setup

SMALL: dict[str, Any] = {"samples": 320_000}
CASES: dict[str, dict[str, Any]] = {
    "fed": {},
    "remote": {"store_bytes_per_s": 1e9},
    "requests": {"store_requests_per_s": 3000},
    "connections": {"store_latency_s": 1.0},
    "nic": {"nic_bytes_per_s": 1e8},
    "disk": {"nvme_bytes_per_s": 1e8, "ram_bytes": 1e9},
    "half of the memory": {"nvme_bytes_per_s": 1e8, "ram_bytes": 1e10},
    "decode": {"cpu_s_per_1000": 20.0},
    "small cache": {"nvme_bytes": 4e9, "store_bytes_per_s": 2e9},
    "no cache": {"nvme_bytes": 0, "store_bytes_per_s": 2e9},
    "eight nodes": {"nodes": 8, "store_bytes_per_s": 2e9},
}


@pytest.mark.parametrize("name", CASES)
def test_epochs_are_as_long_as_the_formulas_say(name: str) -> None:
    wanted = setup(**SMALL, **CASES[name])
    found, (first, later) = forecast(wanted), simulate(wanted)
    for walked, said in ((first, found.first), (later, found.later)):
        assert walked.seconds == pytest.approx(said.seconds, rel=0.08)
        assert walked.au == pytest.approx(said.au, rel=0.1, abs=1)
        total = wanted.total_bytes
        assert walked.bytes_by_tier["remote"] == pytest.approx(said.traffic.remote, abs=total / 30)
        assert walked.bytes_by_tier["disk"] == pytest.approx(said.traffic.disk_read, abs=total / 25)


def drawn(rng: random.Random) -> ClusterSetup:
    """Any setup that has enough steps, shards and seconds for formulas of means."""
    nodes = rng.choice([1, 2, 4, 8])
    return setup(
        samples=rng.choice([100_000, 200_000]),
        sample_bytes=rng.choice([1e5, 4e5]),
        nvme_bytes=rng.choice([0, 3e9, 1e10, 1e11]),
        nvme_bytes_per_s=10 ** rng.uniform(8.3, 10),
        nic_bytes_per_s=10 ** rng.uniform(8.3, 10.3),
        cores=rng.choice([8, 32, 128]),
        ram_bytes=10 ** rng.uniform(9.5, 12),
        store_bytes_per_s=10 ** rng.uniform(8.5, 11),
        store_latency_s=10 ** rng.uniform(-3, -0.7),
        store_requests_per_s=10 ** rng.uniform(3.3, 6),
        nodes=nodes,
        global_batch=nodes * 8 * 32,
        samples_per_s=10 ** rng.uniform(1.5, 2.7),
        cpu_s_per_1000=rng.choice([0, 3, 10]),
    )


@pytest.mark.parametrize("seed", range(12))
def test_of_any_setup_too(seed: int) -> None:
    wanted = drawn(random.Random(seed))
    found, walked = forecast(wanted), simulate(wanted, epochs=3)
    assert walked[0].seconds == pytest.approx(found.first.seconds, rel=0.1)
    assert walked[2].seconds == pytest.approx(found.later.seconds, rel=0.1)


def test_a_job_fetches_what_the_bound_states() -> None:
    wanted = setup(**SMALL, nvme_bytes=4e9, epochs=4)
    walked = simulate(wanted, epochs=4)
    fetched = sum(epoch.bytes_by_tier["remote"] for epoch in walked)
    assert fetched == pytest.approx(forecast(wanted).remote_bytes, rel=0.03)


@pytest.mark.parametrize(("samples", "sample_bytes"), [(40_000, 114_660), (2_000, 20e6)])
def test_shards_that_nodes_share_are_fetched_by_each(samples: int, sample_bytes: float) -> None:
    """A first epoch that starves: small samples come in blocks, with those of other nodes; large
    ones come alone, and the rest of their shards in later epochs."""
    wanted = setup(
        samples=samples,
        shards=53,
        sample_bytes=sample_bytes,
        nodes=4,
        global_batch=400,
        epochs=2,
        store_bytes_per_s=1e8,
    )
    found, (first, later) = forecast(wanted), simulate(wanted)
    assert found.geometry.readers > 1.3
    assert first.seconds == pytest.approx(found.first.seconds, rel=0.1)
    assert first.bytes_by_tier["remote"] == pytest.approx(found.first.traffic.remote, rel=0.05)
    both = first.bytes_by_tier["remote"] + later.bytes_by_tier["remote"]
    assert first.bytes_by_tier["remote"] < both < 1.02 * found.remote_bytes


def test_a_store_that_hardly_keeps_up_is_where_they_end_too() -> None:
    """The first batches wait, so single samples come before whole shards: more requests than the
    store answers in the time, and that lasts."""
    wanted = setup(
        samples=100_000,
        nodes=8,
        global_batch=2048,
        samples_per_s=1500,
        store_requests_per_s=60_000,
        store_bytes_per_s=1e11,
    )
    found, first = forecast(wanted), simulate(wanted, epochs=1)[0]
    assert found.first.limit == "model"
    assert first.seconds > 1.05 * found.first.seconds


@pytest.mark.parametrize("peers", [False, True])
@pytest.mark.parametrize("nic", [12.5e9, 2e8])
def test_nodes_reassigned_ask_their_peers(peers: bool, nic: float) -> None:
    """Each node holds what another one will read: all from the store, or none."""
    wanted = setup(
        samples=100_000,
        shards=400,
        nic_bytes_per_s=nic,
        nodes=4,
        peers=peers,
        global_batch=2048,
        moved=1.0,
    )
    found, order = forecast(wanted), Simulation(wanted).order
    walked = Simulation(wanted, held=np.roll(order.read, 1, axis=0)).epoch(0)
    total = wanted.total_bytes
    assert walked.seconds == pytest.approx(found.first.seconds, rel=0.1)
    for tier, said in (("remote", found.first.traffic.remote), ("peer", found.first.traffic.peer)):
        assert walked.bytes_by_tier[tier] == pytest.approx(said, abs=0.04 * total)
    assert (found.first.traffic.peer > 0.9 * total) is peers


def test_data_that_are_local_are_only_read() -> None:
    wanted = setup(**SMALL, nvme_bytes_per_s=2e8, ram_bytes=1e9)
    local = replace(wanted, is_local=True)
    found, (first, later) = forecast(local), simulate(local)
    assert found.first.limit == "disk"
    assert first.seconds == pytest.approx(found.first.seconds, rel=0.05)
    assert later.seconds == pytest.approx(found.later.seconds, rel=0.05)
    assert first.requests == 0
