"""Compute the bytes that an epoch moves by tier, and the time that each tier would take alone.

The longest of these times is the limit. The traffic depends on whether the caches are filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.pipeline.plan.needs import MOST_WIDENING
from penstock.pipeline.plan.sizing.cluster import (
    CONNECTIONS_A_RANK,
    MARGIN_SHARE,
    OPENERS,
    RAM_SHARE,
    READ_S_PER_GB,
    REQUEST_BYTES,
    fetch_cpu_s,
    peer_cpu_s,
)

if TYPE_CHECKING:
    from penstock.pipeline.plan.sizing.cluster import ClusterSetup
    from penstock.pipeline.plan.sizing.shard_geometry import ShardGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTraffic:
    """The bytes that all nodes together move in an epoch, and their requests.

    remote, peer: bytes from the store and from other nodes' caches. disk_read, disk_write: bytes of
    the local disks. memory: bytes read from the kernel's page cache. requests: requests to the
    store; `opening` of these fetch the tables of the first batches' shards, before all others.
    postponed: bytes of the store that a starved first epoch leaves to the second.
    """

    remote: float = 0.0
    peer: float = 0.0
    disk_read: float
    disk_write: float = 0.0
    memory: float
    requests: float = 0.0
    opening: float = 0.0
    postponed: float = 0.0


def cache_share(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Return F, the share of a node's data that its cache keeps; 1 if the data are local."""
    if setup.is_local:
        return 1.0
    room = (1 - MARGIN_SHARE) * setup.nvme_bytes
    return min(1.0, room / node_set_bytes(setup, geometry))


def node_set_bytes(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Return the bytes of all shards that one node reads during a job: with `reshuffle` the whole
    dataset, of which each node's cache keeps the same random part."""
    if setup.reshuffle:
        return setup.set_bytes
    return node_epoch_bytes(setup, geometry)


def node_epoch_bytes(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Return the bytes of all shards that one node reads in an epoch; of a mixture, in the job."""
    return setup.set_bytes * geometry.readers / setup.nodes


def reshuffled_share(reshuffle: float, *, nodes: int, epochs: int) -> float:
    """Return the share of a node's reads that are new to it, on average over the epochs after the
    first.

    A node reads a shard of its own lanes in an epoch with probability a = 1 - p + p/n, and each
    other one with b = p/n. So in epoch e nodes read a·(1 - a)^e + (n - 1)·b·(1 - b)^e of the
    dataset for the first time.
    """
    if epochs < 2:
        return 0.0
    own, other = 1 - reshuffle + reshuffle / nodes, reshuffle / nodes
    brought = (1 - own) * (1 - (1 - own) ** (epochs - 1))
    brought += (nodes - 1) * (1 - other) * (1 - (1 - other) ** (epochs - 1))
    return brought / (epochs - 1)


def memory_share(kept: float) -> float:
    """Return the share of an epoch's reads that find their file in an LRU page cache, which keeps
    the share `kept` of the files.

    In an order that is random in each epoch the files read between two reads of one are
    1 - x(1 - y) of all, with x and y its places in the two epochs: so c + (1 - c)·ln(1 - c).
    """
    if kept >= 1:
        return 1.0
    return max(0.0, kept + (1 - kept) * math.log1p(-kept))


def single_share(open_share: float) -> float:
    """Return the share of a cold epoch's samples that are fetched one by one, since their shards
    aren't cached yet: of the first open shards all samples, and fewer until they are filled."""
    return open_share * (1 - open_share / 2)


_TABLES_A_SHARD = 2  # requests before a shard's first sample: its header and its table
_BLOCKS = MOST_WIDENING / math.sqrt(2)
"""Samples of a block that a starved epoch fetches: blocks are powers of two of 4 KiB, so they have
between half of `MOST_WIDENING` samples and all of it."""
EARLY_BATCHES = math.ceil(math.log(MOST_WIDENING, 4)) + 4
"""Batches before blocks are that large: a late batch for each factor of 4, and those in flight."""


def block_samples(setup: ClusterSetup) -> float:
    """Return the samples that one request of a starved epoch fetches."""
    return min(_BLOCKS, max(1.0, REQUEST_BYTES / setup.sample_bytes))


def _early_share(setup: ClusterSetup) -> float:
    """Return the share of a starved epoch's samples that are fetched one by one."""
    return min(1.0, EARLY_BATCHES * setup.global_batch / setup.samples)


def _starved_readers(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Return how many copies of the dataset the nodes of a starved epoch fetch together, without
    peers.

    A node fetches blocks of k neighbours, so of a shard that it shares with others it fetches all
    but the blocks without any of its samples: 1 - (1 - 1/readers)^k of it.
    """
    readers, early = geometry.readers, _early_share(setup)
    wide = readers * (1 - math.pow(1 - 1 / readers, block_samples(setup)))
    return early + (1 - early) * wide


def first_traffic(
    setup: ClusterSetup, geometry: ShardGeometry, *, starved: bool = False
) -> EpochTraffic:
    """Return the traffic of a job's first epoch: over empty caches, over caches of which a part is
    on other nodes (`moved`), or over local data of which memory holds nothing.

    starved: batches wait for the store. Then fills yield, and samples are fetched one by one and
    later in blocks with their neighbours.
    """
    if setup.is_local:
        return _local(setup.total_bytes, found=0.0)
    new = setup.new_first * (1.0 if setup.moved is None else setup.moved)
    return _traffic(setup, geometry, new=new, is_first=True, starved=starved)


def warm_traffic(setup: ClusterSetup, geometry: ShardGeometry) -> EpochTraffic:
    """Return the traffic of an epoch over filled caches; with `reshuffle` the mean of all epochs
    after the first, whose caches hold what earlier epochs have read."""
    if setup.is_local:
        return _local(setup.total_bytes, found=_found(setup, geometry, 1.0))
    new = setup.new_later
    new += reshuffled_share(setup.reshuffle, nodes=setup.nodes, epochs=setup.epochs)
    return _traffic(setup, geometry, new=new, is_first=False)


def _traffic(
    setup: ClusterSetup,
    geometry: ShardGeometry,
    *,
    new: float,
    is_first: bool,
    starved: bool = False,
) -> EpochTraffic:
    """Return the traffic of an epoch. new: share of what the caches keep that they don't hold yet.
    is_first: the shards' tables are fetched, too."""
    total, kept = setup.total_bytes, cache_share(setup, geometry)
    passed, absent = total * (1 - kept), total * kept * new
    # Each node that reads a shard keeps it whole.
    readers = _starved_readers(setup, geometry) if starved else geometry.readers
    filled, postponed = absent * readers, absent * (geometry.readers - readers)
    from_store = filled
    if setup.peers:  # once, unless a node has it already
        is_cold = is_first and setup.moved is None
        from_store, postponed = (absent if is_cold else 0.0), 0.0
    each = math.ceil(setup.sample_bytes / REQUEST_BYTES)
    asking = from_store / absent if absent else 0.0  # nodes that ask the store for a shard
    if starved:  # requests over samples: one by one at first, then in blocks, by every reader
        early = _early_share(setup)
        alone = early + (1 - early) * asking / block_samples(setup) if asking else 0.0
    else:
        alone = single_share(geometry.open_share) * from_store / filled if filled else 0.0
    single = setup.samples * each * ((1 - kept) + kept * new * alone)
    fills = 0.0 if starved else from_store / geometry.shard_bytes
    # Each node that reads a shard fetches its tables once, even if it doesn't keep the shard.
    opened = geometry.shards * ((1 - kept) * geometry.readers + kept * new * asking) * is_first
    local = _local(total * kept * max(0.0, 1 - new), found=_found(setup, geometry, kept))
    return EpochTraffic(
        remote=from_store + passed,
        peer=filled - from_store,
        disk_read=local.disk_read,
        disk_write=filled,
        # What was just written is still in memory.
        memory=local.memory + min(absent, total * kept),
        requests=single
        + fills * math.ceil(geometry.shard_bytes / REQUEST_BYTES)
        + _TABLES_A_SHARD * opened,
        opening=_TABLES_A_SHARD * opened * geometry.open_share,
        postponed=postponed,
    )


def _found(setup: ClusterSetup, geometry: ShardGeometry, kept: float) -> float:
    """Return the share of an epoch's local reads that memory serves."""
    on_disk = max(1.0, kept * node_epoch_bytes(setup, geometry))
    return memory_share(min(1.0, RAM_SHARE * setup.ram_bytes / on_disk))


def _local(read: float, *, found: float) -> EpochTraffic:
    return EpochTraffic(disk_read=read * (1 - found), memory=read * found)


Tier = Literal["model", "decode", "cores", "disk", "nic", "remote", "requests", "connections"]
"""The possible limits of an epoch. decode: the cores, mostly for decoding; cores: the cores, mostly
for moving bytes. nic: a node's network, in the busier direction. remote: the store's bandwidth.
requests: the store's requests a second. connections: a node's requests in flight, times their
latency."""

STORE_TIERS: tuple[Tier, ...] = ("nic", "remote", "requests", "connections")
"""The tiers that limit fetching."""

TIER_NAMES: dict[Tier, str] = {
    "model": "the GPUs",
    "decode": "the CPU cores, which decode",
    "cores": "the CPU cores, which move bytes",
    "disk": "the local disk",
    "nic": "the node's network",
    "remote": "the store's bandwidth",
    "requests": "the store's requests a second",
    "connections": "connections to the store, each with its latency",
}


def decode_cpu_s(setup: ClusterSetup) -> float:
    """Return the CPU seconds of all nodes to decode and augment an epoch."""
    return setup.cpu_s_per_1000 * setup.steps * setup.global_batch / 1000


def bytes_cpu_s(setup: ClusterSetup, traffic: EpochTraffic) -> float:
    """Return the CPU seconds of all nodes to move an epoch's bytes from the store, peers, disks and
    memory."""
    read = READ_S_PER_GB * (traffic.disk_read + traffic.memory) / 1e9
    fetched = fetch_cpu_s(traffic.remote, traffic.requests)
    return read + fetched + peer_cpu_s(traffic.peer, tls=setup.tls)


def tier_seconds(setup: ClusterSetup, traffic: EpochTraffic) -> dict[Tier, float]:
    """Return by tier the seconds of an epoch if it were the only limit; without idle tiers.

    traffic: of the whole dataset; samples that don't fill a batch are fetched, too.
    """
    decode, moving = decode_cpu_s(setup), bytes_cpu_s(setup, traffic)
    seconds: dict[Tier, float] = {
        "model": setup.steps * setup.step_s,
        "decode" if decode > moving else "cores": (decode + moving) / (setup.nodes * setup.cores),
        "disk": (traffic.disk_read + traffic.disk_write) / (setup.nodes * setup.nvme_bytes_per_s),
        "nic": (traffic.remote + traffic.peer) / (setup.nodes * setup.link_bytes_per_s),
    }
    if not setup.is_local:
        seconds["remote"] = traffic.remote / setup.store_bytes_per_s
        seconds["requests"] = traffic.requests / setup.store_requests_per_s
        seconds["connections"] = _connections_s(setup, traffic)
    return {tier: took for tier, took in seconds.items() if took > 0}


def _connections_s(setup: ClusterSetup, traffic: EpochTraffic) -> float:
    """Return the seconds of an epoch's requests, with as many in flight as ranks begin with. The
    tables that the first batches wait for come first, with fewer in flight."""
    others_s = (traffic.requests - traffic.opening) * setup.store_latency_s
    others_s += traffic.remote / setup.stream_bytes_per_s
    opening_s = traffic.opening * setup.store_latency_s / (setup.ranks * OPENERS)
    return opening_s + others_s / (setup.ranks * CONNECTIONS_A_RANK)
