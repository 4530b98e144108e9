"""Forecast times, utilisation, bytes and the limit of each kind of epoch, and what to change first.

An epoch moves bytes by tiers (`EpochTraffic`). It takes as long as its slowest tier, because
fetching, reading, decoding and training run at the same time. Only the job's first batch adds its
time. docs/reference/plan.md has the formulas. The best change is found by a forecast for each
possible one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from penstock.cache import ConfigError
from penstock.cache.base import format_size
from penstock.pipeline.plan.needs import MOST_WIDENING, ahead_s, connections
from penstock.pipeline.plan.sizing import cluster
from penstock.pipeline.plan.sizing.cluster import REQUEST_BYTES
from penstock.pipeline.plan.sizing.shard_geometry import ShardGeometry, geometry_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.pipeline.plan.sizing.cluster import ClusterSetup


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
    room = (1 - cluster.MARGIN_SHARE) * setup.nvme_bytes
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
    asked = single + fills * math.ceil(geometry.shard_bytes / REQUEST_BYTES)
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
        requests=asked + _TABLES_A_SHARD * opened,
        opening=_TABLES_A_SHARD * opened * geometry.open_share,
        postponed=postponed,
    )


def _found(setup: ClusterSetup, geometry: ShardGeometry, kept: float) -> float:
    """Return the share of an epoch's local reads that memory serves."""
    on_disk = max(1.0, kept * node_epoch_bytes(setup, geometry))
    return memory_share(min(1.0, cluster.RAM_SHARE * setup.ram_bytes / on_disk))


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
    read = cluster.READ_S_PER_GB * (traffic.disk_read + traffic.memory) / 1e9
    fetched = cluster.fetch_cpu_s(traffic.remote, traffic.requests)
    return read + fetched + cluster.peer_cpu_s(traffic.peer, tls=setup.tls)


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
    opening_s = traffic.opening * setup.store_latency_s / (setup.ranks * cluster.OPENERS)
    return opening_s + others_s / (setup.ranks * cluster.CONNECTIONS_A_RANK)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochForecast:
    """The forecast of one epoch.

    seconds: from the first request to the end of the last step. au: per cent, as DLIO defines it,
    without the first step and its wait; for an epoch of one step that step's share. tiers: seconds
    if each were the only limit. cpu_s: CPU seconds of all nodes for decoding and moving bytes;
    peer_cpu_s: the part of these for peers.
    """

    seconds: float
    first_batch_s: float
    au: float
    tiers: dict[Tier, float]
    traffic: EpochTraffic
    cpu_s: float
    peer_cpu_s: float

    @property
    def busy(self) -> float:
        """Per cent of the epoch in which the GPUs compute, including its first step."""
        return min(100.0, 100 * self.tiers["model"] / self.seconds)

    @property
    def limit(self) -> Tier:
        """The slowest tier, which the epoch waits for."""
        return max(self.tiers, key=lambda tier: self.tiers[tier])

    @property
    def next_limit(self) -> Tier | None:
        """The second slowest tier, which the epoch would wait for next."""
        left = {tier: took for tier, took in self.tiers.items() if tier != self.limit}
        return max(left, key=lambda tier: left[tier], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The forecast of a job.

    kept: share of a node's data that its cache keeps. bytes_per_s: consumption of a node whose GPUs
    never wait. connections, lookahead_bytes: requests in flight and bytes requested ahead with
    which a node hides the store's latency. first: the first epoch, over empty caches; later: each
    other epoch.
    """

    setup: ClusterSetup
    geometry: ShardGeometry
    kept: float
    bytes_per_s: float
    connections: int
    lookahead_bytes: float
    first: EpochForecast
    later: EpochForecast

    @property
    def seconds(self) -> float:
        """Seconds of the whole job."""
        return self.first.seconds + (self.setup.epochs - 1) * self.later.seconds

    @property
    def main(self) -> EpochForecast:
        """The kind of epoch that the job has most of."""
        return self.later if self.setup.epochs > 1 else self.first

    @property
    def requests(self) -> float:
        """Requests of the whole job to the store."""
        later = (self.setup.epochs - 1) * self.later.traffic.requests
        return self.first.traffic.requests + later + self._postponed / REQUEST_BYTES

    @property
    def remote_bytes(self) -> float:
        """Bytes of the whole job from the store."""
        later = (self.setup.epochs - 1) * self.later.traffic.remote
        return self.first.traffic.remote + later + self._postponed

    @property
    def _postponed(self) -> float:
        return self.first.traffic.postponed if self.setup.epochs > 1 else 0.0

    @property
    def price(self) -> float | None:
        """The price of the whole job's requests; None if the price of a request isn't known."""
        price = self.setup.price_per_1000
        return None if price is None or self.setup.is_local else self.requests / 1000 * price


def forecast(setup: ClusterSetup) -> Forecast:
    """Forecast a job. Raises ConfigError for a cache that can't hold a shard."""
    geometry = geometry_of(setup)
    room, shard = setup.nvme_bytes, geometry.shard_bytes
    if not setup.is_local and 0 < room < shard:
        raise ConfigError(
            f"NVMe: got {format_size(room)}, and one shard is {format_size(shard)}, "
            f"{shard / room:.1f} x as much: the cache keeps whole shards. Give it more room, or "
            "none (0)."
        )
    need = setup.gpus * setup.samples_per_s * setup.sample_bytes
    wanted, ahead = _ahead(setup, need)
    return Forecast(
        setup=setup,
        geometry=geometry,
        kept=cache_share(setup, geometry),
        bytes_per_s=need,
        connections=wanted,
        lookahead_bytes=ahead,
        first=_epoch(setup, _first(setup, geometry), first_batch_s=_first_batch_s(setup, geometry)),
        # Batches are fetched ahead across the end of an epoch.
        later=_epoch(setup, warm_traffic(setup, geometry), first_batch_s=0.0),
    )


def _first(setup: ClusterSetup, geometry: ShardGeometry) -> EpochTraffic:
    """Return the first epoch's traffic: fills of complete shards yield if batches wait for the
    store."""
    fed = first_traffic(setup, geometry)
    tiers = tier_seconds(setup, fed)
    others = max(took for tier, took in tiers.items() if tier not in STORE_TIERS)
    slowest = max(tiers.get(tier, 0.0) for tier in STORE_TIERS)
    return first_traffic(setup, geometry, starved=True) if slowest > others else fed


def _ahead(setup: ClusterSetup, need: float) -> tuple[int, float]:
    """Return a node's connections, and the bytes that it requests ahead of consumption."""
    batch = setup.sample_bytes * setup.global_batch / setup.nodes
    if setup.is_local:
        return 0, 2 * batch
    mean_s = setup.request_s(REQUEST_BYTES)
    wanted = connections(need, request_bytes=REQUEST_BYTES, request_s=mean_s)
    slow_s = cluster.TAIL * mean_s
    most = cluster.CONNECTIONS_A_RANK * setup.gpus
    # At least a batch, and a margin of three standard deviations of a batch's mean sample size.
    uneven = 1 + 3 * setup.spread / max(1.0, setup.global_batch / setup.nodes) ** 0.5
    ahead = need * ahead_s(mean_s=mean_s, slow_s=slow_s)
    return max(1, min(most, round(wanted + 0.5))), max(ahead, batch) * uneven


def _first_batch_s(setup: ClusterSetup, geometry: ShardGeometry) -> float:
    """Return the seconds until the job's first batch: a rank opens its shards, 16 at a time, then
    fetches the samples one by one, then decodes them."""
    samples = setup.global_batch / setup.nodes
    size = samples * setup.sample_bytes
    decode_s = samples * setup.cpu_s_per_1000 / 1000 / setup.cores
    if setup.is_local or setup.moved == 0:
        return size / setup.nvme_bytes_per_s + decode_s
    rate = setup.link_bytes_per_s
    if setup.moved is None or not setup.peers:
        rate = min(rate, setup.store_bytes_per_s / setup.nodes)
    alone = min(setup.sample_bytes, REQUEST_BYTES)
    rounds = max(1.0, size / alone / (setup.gpus * cluster.CONNECTIONS_A_RANK))
    shards = min(geometry.open_shards, setup.global_batch) / setup.ranks
    opened_s = setup.store_latency_s * math.ceil(shards / cluster.OPENERS)
    answered_s = setup.global_batch * max(1.0, setup.sample_bytes / REQUEST_BYTES)
    answered_s /= setup.store_requests_per_s
    return opened_s + max(answered_s, size / rate, rounds * setup.request_s(alone)) + decode_s


def _epoch(setup: ClusterSetup, traffic: EpochTraffic, *, first_batch_s: float) -> EpochForecast:
    tiers = tier_seconds(setup, traffic)
    step_s, steps = setup.step_s, setup.steps
    slowest = max(tiers.values())
    # A step follows the last bytes, as fetching precedes the first step.
    seconds = max(first_batch_s + tiers["model"], slowest + (step_s if first_batch_s else 0.0))
    # An epoch of a single step has nothing left without it.
    counted, rest = step_s, seconds
    if steps > 1:
        counted, rest = (steps - 1) * step_s, seconds - first_batch_s - step_s
    au = min(100.0, 100 * counted / rest) if rest > 0 else 100.0
    return EpochForecast(
        seconds=seconds,
        first_batch_s=first_batch_s,
        au=au,
        tiers=tiers,
        traffic=traffic,
        cpu_s=decode_cpu_s(setup) + bytes_cpu_s(setup, traffic),
        peer_cpu_s=cluster.peer_cpu_s(traffic.peer, tls=setup.tls),
    )


_LEAST_GAIN = 1.02  # a change that gains less isn't listed
_MOST_CHANGES = 4


@dataclass(frozen=True, slots=True)
class SetupChange:
    """A change of a setup and its effect.

    words: what to change. seconds, au_first, au_later, limit: of the job after the change. gain:
    the job's time without the change over its time with it.
    """

    words: str
    seconds: float
    au_first: float
    au_later: float
    limit: Tier
    gain: float


def changes(now: Forecast) -> list[SetupChange]:
    """Return the changes that make the job shorter, those with the largest gain first."""
    found = []
    for words, then in _candidates(now):
        gain = now.seconds / then.seconds
        if gain >= _LEAST_GAIN:
            au_first, au_later, limit = then.first.au, then.later.au, then.main.limit
            found.append(SetupChange(words, then.seconds, au_first, au_later, limit, gain))
    return sorted(found, key=lambda change: -change.gain)[:_MOST_CHANGES]


def _candidates(now: Forecast) -> Iterator[tuple[str, Forecast]]:
    """Yield possible changes, as (words, forecast with the change)."""
    for words, changed in _changed_setups(now):
        yield words, forecast(changed)
    setup = now.setup
    if setup.is_local or not now.kept or setup.moved is not None:
        return
    size = node_epoch_bytes(setup, now.geometry) * now.kept
    rates = setup.store_bytes_per_s / setup.nodes, setup.link_bytes_per_s, setup.nvme_bytes_per_s
    yield (
        f"`penstock warm` before the GPUs are held: {format_size(size)} a node, at least "
        f"{duration(size / min(rates))} before the job, when nothing waits for it",
        replace(now, first=now.later),
    )


_RAISED: tuple[tuple[set[Tier], str, Callable[[float], str]], ...] = (
    ({"decode", "cores"}, "cores", "{} cores a node".format),
    ({"disk"}, "nvme_bytes_per_s", lambda n: f"local disks of {format_size(n)}/s a node"),
    ({"nic"}, "nic_bytes_per_s", lambda n: f"a network of {n * 8 / 1e9:.3g} Gb/s a node"),
    ({"remote"}, "store_bytes_per_s", lambda n: f"a store of {format_size(n)}/s, for all nodes"),
    ({"requests"}, "store_requests_per_s", "a store of {:,} requests/s (more prefixes)".format),
)
"""Figures of a setup that may be too low: the tiers that they limit, their fields, and the words
for a higher one."""


def _changed_setups(now: Forecast) -> Iterator[tuple[str, ClusterSetup]]:
    """Yield changes, as (words, setup), that raise a limit of either kind of epoch."""
    setup = now.setup
    limits = {now.first.limit, now.later.limit} - {"model"}
    wanted = node_set_bytes(setup, now.geometry) / (1 - cluster.MARGIN_SHARE) * 1.001
    if not setup.is_local and now.kept < 1:
        words = f"NVMe of {format_size(wanted)} a node, so that its cache keeps all that it reads"
        yield words, replace(setup, nvme_bytes=wanted)
    for tiers, field, words_of in _RAISED:
        if limits & tiers:
            value = math.ceil(getattr(setup, field) * _shortfall(now, tiers))
            yield words_of(value), replace(setup, **{field: value})
    if "decode" in limits:
        yield (
            "images with a short side of 256 (`penstock pack --short-side 256`): taken as half of "
            "the decoding",
            replace(setup, cpu_s_per_1000=setup.cpu_s_per_1000 / 2),
        )
    if "disk" in limits:
        ram = 2.2 * wanted
        yield f"{format_size(ram)} of RAM a node", replace(setup, ram_bytes=ram)
    if setup.is_local or setup.nodes == 1:
        return
    if not setup.peers:
        yield "peers: `DiskCache(peers=)`", replace(setup, peers=True)
    if setup.shards is not None:
        packed = replace(setup, shards=None)
        size = geometry_of(packed).shard_bytes
        if size < now.geometry.shard_bytes:
            yield f"shards of {format_size(size)} (`penstock pack --shard-bytes`)", packed


def _shortfall(now: Forecast, tiers: set[Tier]) -> float:
    """Return the factor by which tiers are too slow for the GPUs, in the kinds of epoch that they
    limit; at least 1."""
    epochs = [epoch for epoch in (now.first, now.later) if epoch.limit in tiers]
    return max(1.0, *(shortfall(epoch, epoch.limit) for epoch in epochs))


def shortfall(epoch: EpochForecast, tier: Tier) -> float:
    """Return the throughput that an epoch needs of a tier to keep the GPUs busy, over what the tier
    has."""
    return epoch.tiers.get(tier, 0.0) / epoch.tiers["model"]


def unmet_utilisation(now: Forecast, *, au: float) -> str | None:
    """Return why a job doesn't reach an AU in per cent from its second epoch on (or in its only
    one), and the change that helps most; None if it reaches that AU."""
    epoch = now.main
    if epoch.au >= au:
        return None
    which = "from epoch 2 on" if epoch is now.later else "in the one epoch"
    least = max(1.0, au / 100)
    by_tier = sorted(((shortfall(epoch, t), t) for t in epoch.tiers), key=lambda each: -each[0])
    slow = [each for each in by_tier if each[0] > least] or by_tier[:1]
    names = "; ".join(f"{TIER_NAMES[tier]} ({by:,.2f} x)" for by, tier in slow)
    problem = (
        f"An AU of {au:g} % can't be met: it is {epoch.au:.1f} % {which}. Too slow for the GPUs: "
        f"{names}."
    )
    then = [(c.au_later if epoch is now.later else c.au_first, c.words) for c in changes(now)]
    if not then or (best := max(then))[0] <= epoch.au:
        return problem
    return f"{problem} The change that helps most: {best[1]}, for an AU of {best[0]:.1f} %."


def duration(seconds: float) -> str:
    """Return a time as text with a readable unit."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
