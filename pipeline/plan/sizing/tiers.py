"""How long each tier would take for an epoch if it were the only one: the longest is the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from penstock.pipeline.plan.sizing.costs import (
    CONNECTIONS_A_RANK,
    OPENERS,
    READ_S_PER_GB,
    fetch_cpu_s,
    peer_cpu_s,
)

if TYPE_CHECKING:
    from penstock.pipeline.plan.sizing.traffic import EpochTraffic
    from penstock.pipeline.plan.sizing.values import Setup

Tier = Literal["model", "decode", "cores", "disk", "nic", "remote", "requests", "connections"]
"""What can hold an epoch back. decode: the cores, mostly by decoding; cores: by moving bytes.
remote: the store's bandwidth; requests: those that it answers a second; connections: requests that
a node has in flight, times their latency. nic: of a node, in the busier direction."""

OF_THE_STORE: tuple[Tier, ...] = ("nic", "remote", "requests", "connections")
"""What fetching waits for."""

WORDS: dict[Tier, str] = {
    "model": "the GPUs",
    "decode": "the CPU cores, which decode",
    "cores": "the CPU cores, which move bytes",
    "disk": "the local disk",
    "nic": "the node's network",
    "remote": "the store's bandwidth",
    "requests": "the store's requests a second",
    "connections": "connections to the store, each with its latency",
}


def decode_cpu_s(setup: Setup) -> float:
    """CPU seconds of all nodes to decode and augment an epoch."""
    return setup.job.cpu_s_per_1000 * setup.steps * setup.job.global_batch / 1000


def bytes_cpu_s(setup: Setup, traffic: EpochTraffic) -> float:
    """CPU seconds of all nodes to move an epoch's bytes: from the store, peers, disk and memory."""
    read = READ_S_PER_GB * (traffic.disk_read + traffic.memory) / 1e9
    fetched = fetch_cpu_s(traffic.remote, traffic.requests)
    return read + fetched + peer_cpu_s(traffic.peer, tls=setup.job.tls)


def tier_seconds(setup: Setup, traffic: EpochTraffic) -> dict[Tier, float]:
    """Seconds of an epoch, by the tier that would be its only limit; tiers without work left out.

    traffic: of a whole dataset; what doesn't fill a batch is fetched all the same.
    """
    job, node, store = setup.job, setup.node, setup.store
    decode, moving = decode_cpu_s(setup), bytes_cpu_s(setup, traffic)
    seconds: dict[Tier, float] = {
        "model": setup.steps * job.step_s,
        "decode" if decode > moving else "cores": (decode + moving) / (job.nodes * node.cores),
        "disk": (traffic.disk_read + traffic.disk_write) / (job.nodes * node.nvme_bytes_per_s),
        "nic": (traffic.remote + traffic.peer) / (job.nodes * setup.link_bytes_per_s),
    }
    if store is not None:
        seconds["remote"] = traffic.remote / store.bytes_per_s
        seconds["requests"] = traffic.requests / store.requests_per_s
        seconds["connections"] = _connections_s(setup, traffic)
    return {tier: took for tier, took in seconds.items() if took > 0}


def _connections_s(setup: Setup, traffic: EpochTraffic) -> float:
    """Seconds of an epoch's requests, with as many in flight as a rank begins with; tables that
    the first batches wait for come before, of fewer shards at a time."""
    store, ranks = setup.store, setup.job.ranks
    assert store is not None
    others_s = (traffic.requests - traffic.opening) * store.latency_s
    others_s += traffic.remote / store.stream_bytes_per_s
    opening_s = traffic.opening * store.latency_s / (ranks * OPENERS)
    return opening_s + others_s / (ranks * CONNECTIONS_A_RANK)
