"""Compute the bytes that an epoch moves by tier, and the time that each tier would take alone.

The longest of these times is the limit. Traffic differs over an empty and over a filled cache.
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
    """What all nodes together move in an epoch. Bytes.

    remote, peer: from the store and from other nodes' caches. disk_read, disk_write: of the local
    disks. memory: read from what the kernel keeps of their files. requests: to the store, of which
    `opening` for the tables of shards that the first batches need, before anything else is sent.
    postponed: bytes of the store that a starved first epoch leaves to the second.
    """

    remote: float
    peer: float
    disk_read: float
    disk_write: float
    memory: float
    requests: float
    opening: float = 0.0
    postponed: float = 0.0


def cache_share(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """F: of what a node reads, the part that its cache keeps; 1 where the data are local."""
    if setup.store is None:
        return 1.0
    room = (1 - MARGIN_SHARE) * setup.node.nvme_bytes
    return min(1.0, room / node_set_bytes(setup, geometry))


def node_set_bytes(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Bytes of the shards that one node may ever read, whole: with `reshuffle` all that there are,
    of which a cache keeps the same random part on each node."""
    if setup.job.reshuffle:
        return setup.data.total_bytes
    return node_epoch_bytes(setup, geometry)


def node_epoch_bytes(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Bytes of the shards that one node reads in an epoch, whole."""
    return setup.data.total_bytes * geometry.readers / setup.job.nodes


def reshuffled_share(reshuffle: float, *, nodes: int, epochs: int) -> float:
    """Of what nodes read in an epoch after the first, the part that is new to the node, on average
    over these epochs.

    A node reads a shard of its own lanes in an epoch with probability a = 1 - p + p/n, each other
    one with b = p/n: so epoch e brings a·(1 - a)^e + (n - 1)·b·(1 - b)^e of the dataset to nodes
    that have never read it.
    """
    if epochs < 2:
        return 0.0
    own, other = 1 - reshuffle + reshuffle / nodes, reshuffle / nodes
    brought = (1 - own) * (1 - (1 - own) ** (epochs - 1))
    brought += (nodes - 1) * (1 - other) * (1 - (1 - other) ** (epochs - 1))
    return brought / (epochs - 1)


def memory_share(kept: float) -> float:
    """Of an epoch's reads, those that an LRU of so much of the files finds in memory.

    In an order that is random in each epoch the files read between two reads of one are
    1 - x(1 - y) of all, x and y its places in the two epochs: so c + (1 - c)·ln(1 - c).
    """
    if kept >= 1:
        return 1.0
    return max(0.0, kept + (1 - kept) * math.log1p(-kept))


def single_share(open_share: float) -> float:
    """Of a cold epoch's samples, those that come by requests of their own, as their shards aren't
    there yet: of w open shards all at first, and ever fewer until they are filled."""
    return open_share * (1 - open_share / 2)


TABLES_A_SHARD = 2
"""Requests before a shard's first sample: where it begins and where its table lies."""
_BLOCKS = MOST_WIDENING / math.sqrt(2)
"""Samples that a starved epoch fetches at a time: blocks are powers of two of 4 KiB, so between
half of `MOST_WIDENING` times a sample and all of it, and in between on average."""
EARLY_BATCHES = math.ceil(math.log(MOST_WIDENING, 4)) + 4
"""Until they are that wide, which takes a late batch for each factor of 4, and what is in flight by
then."""


def block_samples(setup: ClusterSetup) -> float:
    """Samples that one request of a starved epoch brings."""
    return min(_BLOCKS, max(1.0, REQUEST_BYTES / setup.data.sample_bytes))


def early_share(setup: ClusterSetup) -> float:
    """Of a starved epoch's samples, those that are fetched one by one."""
    return min(1.0, EARLY_BATCHES * setup.job.global_batch / setup.data.samples)


def starved_share(setup: ClusterSetup, *, readers: float) -> float:
    """Requests over samples of a cold epoch whose batches wait for the store: each sample alone to
    begin with, then with its neighbours, which every node that reads the shard asks for."""
    early = early_share(setup)
    return early + (1 - early) * readers / block_samples(setup)


def starved_readers(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Copies of the dataset that the nodes of a starved epoch fetch together, without peers.

    A node asks for blocks of k neighbours, so of a shard that it shares with others it fetches all
    but the blocks that hold none of its samples: 1 - (1 - 1/readers)^k of it.
    """
    readers, early = geometry.readers, early_share(setup)
    wide = readers * (1 - math.pow(1 - 1 / readers, block_samples(setup)))
    return early + (1 - early) * wide


def first_traffic(
    setup: ClusterSetup, geometry: ShardGeometry, *, starved: bool = False
) -> EpochTraffic:
    """A job's first epoch: over empty caches, over some of which a part lies on other nodes
    (`moved`), or over data on local disks that memory has nothing of.

    starved: batches wait for what is fetched. Then fills give way, and samples come by requests of
    their own and soon with their neighbours.
    """
    data, job, kept = setup.data, setup.job, cache_share(setup, geometry)
    total = data.total_bytes
    if setup.store is None:
        return _local(total, found=0.0)
    moved = 1.0 if job.moved is None else job.moved
    passed, absent = total * (1 - kept), total * kept * moved
    # Each node that reads a shard keeps it whole.
    readers = starved_readers(setup, geometry) if starved else geometry.readers
    filled, postponed = absent * readers, absent * (geometry.readers - readers)
    from_store = filled
    if job.peers:  # once, where nobody has it yet
        from_store, postponed = (absent if job.moved is None else 0.0), 0.0
    each = math.ceil(data.sample_bytes / REQUEST_BYTES)
    asking = from_store / absent if absent else 0.0  # nodes that ask the store for a shard
    if starved:
        alone = starved_share(setup, readers=asking) if asking else 0.0
    else:
        alone = single_share(geometry.open_share) * from_store / filled if filled else 0.0
    single = data.samples * each * ((1 - kept) + kept * moved * alone)
    fills = 0.0 if starved else from_store / geometry.shard_bytes
    # Whoever reads of a shard fetches its tables once, whether or not it keeps the shard.
    opened = geometry.shards * ((1 - kept) * geometry.readers + kept * moved * asking)
    here = _local(total * kept * (1 - moved), found=_found(setup, geometry, kept))
    return EpochTraffic(
        remote=from_store + passed,
        peer=filled - from_store,
        disk_read=here.disk_read,
        disk_write=filled,
        memory=here.memory + absent,  # what was just written is in memory still
        requests=single
        + fills * math.ceil(geometry.shard_bytes / REQUEST_BYTES)
        + TABLES_A_SHARD * opened,
        opening=TABLES_A_SHARD * opened * geometry.open_share,
        postponed=postponed,
    )


def warm_traffic(setup: ClusterSetup, geometry: ShardGeometry) -> EpochTraffic:
    """An epoch over caches that hold all that they keep; with `reshuffle` over those that hold
    what the epochs before have brought, the mean of all later ones."""
    data, job, kept = setup.data, setup.job, cache_share(setup, geometry)
    total = data.total_bytes
    local = _local(total * kept, found=_found(setup, geometry, kept))
    if setup.store is None:
        return local
    new = kept * reshuffled_share(job.reshuffle, nodes=job.nodes, epochs=job.epochs)
    if kept >= 1 and not new:
        return local
    here = _local(total * (kept - new), found=_found(setup, geometry, kept))
    filled = total * new * geometry.readers
    from_store = 0.0 if job.peers else filled
    each = math.ceil(data.sample_bytes / REQUEST_BYTES)
    alone = 0.0 if job.peers else new * single_share(geometry.open_share)
    single = data.samples * each * (1 - kept + alone)
    ranges = from_store / geometry.shard_bytes * math.ceil(geometry.shard_bytes / REQUEST_BYTES)
    return EpochTraffic(
        remote=total * (1 - kept) + from_store,
        peer=filled - from_store,
        disk_read=here.disk_read,
        disk_write=filled,
        memory=here.memory + total * new,  # what was just written is in memory still
        requests=single + ranges,
    )


def _found(setup: ClusterSetup, geometry: ShardGeometry, kept: float) -> float:
    """Of what an epoch reads locally, the part that is in memory."""
    on_disk = max(1.0, kept * node_epoch_bytes(setup, geometry))
    return memory_share(min(1.0, RAM_SHARE * setup.node.ram_bytes / on_disk))


def _local(read: float, *, found: float) -> EpochTraffic:
    return EpochTraffic(
        remote=0.0,
        peer=0.0,
        disk_read=read * (1 - found),
        disk_write=0.0,
        memory=read * found,
        requests=0.0,
    )


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


def decode_cpu_s(setup: ClusterSetup) -> float:
    """CPU seconds of all nodes to decode and augment an epoch."""
    return setup.job.cpu_s_per_1000 * setup.steps * setup.job.global_batch / 1000


def bytes_cpu_s(setup: ClusterSetup, traffic: EpochTraffic) -> float:
    """CPU seconds of all nodes to move an epoch's bytes: from the store, peers, disk and memory."""
    read = READ_S_PER_GB * (traffic.disk_read + traffic.memory) / 1e9
    fetched = fetch_cpu_s(traffic.remote, traffic.requests)
    return read + fetched + peer_cpu_s(traffic.peer, tls=setup.job.tls)


def tier_seconds(setup: ClusterSetup, traffic: EpochTraffic) -> dict[Tier, float]:
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


def _connections_s(setup: ClusterSetup, traffic: EpochTraffic) -> float:
    """Seconds of an epoch's requests, with as many in flight as a rank begins with; tables that
    the first batches wait for come before, of fewer shards at a time."""
    store, ranks = setup.store, setup.job.ranks
    assert store is not None
    others_s = (traffic.requests - traffic.opening) * store.latency_s
    others_s += traffic.remote / store.stream_bytes_per_s
    opening_s = traffic.opening * store.latency_s / (ranks * OPENERS)
    return opening_s + others_s / (ranks * CONNECTIONS_A_RANK)
