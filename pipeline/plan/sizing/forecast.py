"""What a job's input side will do: times, utilisation, bytes and the limit of each kind of epoch.

An epoch takes as long as its slowest tier (`tiers`), as fetching, reading, decoding and training
run side by side, behind the job's first batch, which nothing hides. docs/sizing.md has the
formulas with their sources.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.cache.errors import ConfigError
from penstock.pipeline.plan.needs import ahead_s, connections
from penstock.pipeline.plan.sizing.costs import (
    CONNECTIONS_A_RANK,
    OPENERS,
    REQUEST_BYTES,
    peer_cpu_s,
)
from penstock.pipeline.plan.sizing.geometry import Geometry, geometry_of
from penstock.pipeline.plan.sizing.tiers import (
    OF_THE_STORE,
    Tier,
    bytes_cpu_s,
    decode_cpu_s,
    tier_seconds,
)
from penstock.pipeline.plan.sizing.traffic import (
    EpochTraffic,
    cache_share,
    first_traffic,
    warm_traffic,
)

if TYPE_CHECKING:
    from penstock.pipeline.plan.sizing.values import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochForecast:
    """One epoch. seconds: from its first request to its last step's end. au: in per cent, as DLIO
    has it, the first step and its wait left out; of an epoch of one step that step's share. tiers:
    seconds if each were the only limit. cpu_s: that decoding and moving bytes take, of all nodes;
    peer_cpu_s: of that, for peers."""

    seconds: float
    first_batch_s: float
    au: float
    tiers: dict[Tier, float]
    traffic: EpochTraffic
    cpu_s: float
    peer_cpu_s: float

    @property
    def busy(self) -> float:
        """Share of the epoch in which the GPUs compute, in per cent, its first step counted."""
        return min(100.0, 100 * self.tiers["model"] / self.seconds)

    @property
    def limit(self) -> Tier:
        """The tier that the epoch waits for."""
        return max(self.tiers, key=lambda tier: self.tiers[tier])

    @property
    def next_limit(self) -> Tier | None:
        """The tier that it would wait for then."""
        left = {tier: took for tier, took in self.tiers.items() if tier != self.limit}
        return max(left, key=lambda tier: left[tier], default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A job. first: its first epoch, over empty caches; later: each other one. bytes_per_s: that
    one node consumes when its GPUs never wait. connections, lookahead_bytes: of a node, to hide the
    store's latency. kept: the part of what a node reads that its cache keeps."""

    setup: Setup
    geometry: Geometry
    kept: float
    bytes_per_s: float
    connections: int
    lookahead_bytes: float
    first: EpochForecast
    later: EpochForecast

    @property
    def seconds(self) -> float:
        """The whole job's."""
        return self.first.seconds + (self.setup.job.epochs - 1) * self.later.seconds

    @property
    def main(self) -> EpochForecast:
        """The epoch that the job has most of."""
        return self.later if self.setup.job.epochs > 1 else self.first

    @property
    def requests(self) -> float:
        """To the store, of the whole job."""
        later = (self.setup.job.epochs - 1) * self.later.traffic.requests
        return self.first.traffic.requests + later + self._postponed / REQUEST_BYTES

    @property
    def remote_bytes(self) -> float:
        """From the store, of the whole job."""
        later = (self.setup.job.epochs - 1) * self.later.traffic.remote
        return self.first.traffic.remote + later + self._postponed

    @property
    def _postponed(self) -> float:
        return self.first.traffic.postponed if self.setup.job.epochs > 1 else 0.0

    @property
    def price(self) -> float | None:
        """Of the whole job's requests, where one was given."""
        store = self.setup.store
        if store is None or store.price_per_1000 is None:
            return None
        return self.requests / 1000 * store.price_per_1000


def forecast(setup: Setup, geometry: Geometry | None = None) -> Forecast:
    """What a job will do. geometry: what its plan really has, else as the defaults would cut it.

    Raises ConfigError for a cache that can't hold a shard.
    """
    geometry = geometry or geometry_of(setup.data, setup.job)
    _check_room(setup, geometry)
    job = setup.job
    need = job.gpus * job.samples_per_s * setup.data.sample_bytes
    wanted, ahead = _ahead(setup, need)
    cold, warm = _first(setup, geometry), warm_traffic(setup, geometry)
    return Forecast(
        setup=setup,
        geometry=geometry,
        kept=cache_share(setup, geometry),
        bytes_per_s=need,
        connections=wanted,
        lookahead_bytes=ahead,
        first=_epoch(setup, cold, first_batch_s=_first_batch_s(setup, geometry)),
        # Batches are fetched ahead across the end of an epoch.
        later=_epoch(setup, warm, first_batch_s=0.0),
    )


def _first(setup: Setup, geometry: Geometry) -> EpochTraffic:
    """The first epoch's: fills of whole shards give way where batches wait for the store."""
    fed = first_traffic(setup, geometry)
    tiers = tier_seconds(setup, fed)
    others = max(took for tier, took in tiers.items() if tier not in OF_THE_STORE)
    slowest = max((tiers.get(tier, 0.0) for tier in OF_THE_STORE), default=0.0)
    return first_traffic(setup, geometry, starved=True) if slowest > others else fed


def _check_room(setup: Setup, geometry: Geometry) -> None:
    room, shard = setup.node.nvme_bytes, geometry.shard_bytes
    if setup.store is not None and 0 < room < shard:
        raise ConfigError(
            f"NVMe: got {format_size(room)}, and one shard is {format_size(shard)}, "
            f"{shard / room:.1f} x as much: the cache keeps whole shards. Give it more room, or "
            "none (0)."
        )


def _ahead(setup: Setup, need: float) -> tuple[int, float]:
    """Connections of a node, and bytes that it has asked for ahead of the consumer."""
    store, batch = setup.store, setup.data.sample_bytes * setup.job.global_batch / setup.job.nodes
    if store is None:
        return 0, 2 * batch
    mean_s = store.request_s(REQUEST_BYTES)
    wanted = connections(need, request_bytes=REQUEST_BYTES, request_s=mean_s)
    slow_s = store.tail * mean_s
    most = CONNECTIONS_A_RANK * setup.job.gpus
    # A batch at least; batches of uneven samples differ by what their mean's deviation says.
    uneven = 1 + 3 * setup.data.spread / max(1.0, setup.job.global_batch / setup.job.nodes) ** 0.5
    ahead = need * ahead_s(mean_s=mean_s, slow_s=slow_s)
    return max(1, min(most, round(wanted + 0.5))), max(ahead, batch) * uneven


def _first_batch_s(setup: Setup, geometry: Geometry) -> float:
    """Of the job: its samples by requests of their own, behind the tables of their shards, of which
    a rank opens 16 at a time, and then their decoding, which has nothing to run beside."""
    job, node, store = setup.job, setup.node, setup.store
    samples = job.global_batch / job.nodes
    size = samples * setup.data.sample_bytes
    decode_s = samples * job.cpu_s_per_1000 / 1000 / node.cores
    if store is None or job.moved == 0:
        return size / node.nvme_bytes_per_s + decode_s
    rate = setup.link_bytes_per_s
    if job.moved is None or not job.peers:
        rate = min(rate, store.bytes_per_s / job.nodes)
    alone = min(setup.data.sample_bytes, REQUEST_BYTES)
    rounds = max(1.0, size / alone / (job.gpus * CONNECTIONS_A_RANK))
    shards = min(geometry.open_shards, job.global_batch) / job.ranks
    opened_s = store.latency_s * math.ceil(shards / OPENERS)
    answered_s = job.global_batch * max(1.0, setup.data.sample_bytes / REQUEST_BYTES)
    answered_s /= store.requests_per_s
    return opened_s + max(answered_s, size / rate, rounds * store.request_s(alone)) + decode_s


def _epoch(setup: Setup, traffic: EpochTraffic, *, first_batch_s: float) -> EpochForecast:
    tiers = tier_seconds(setup, traffic)
    step_s, steps = setup.job.step_s, setup.steps
    slowest = max(tiers.values())
    # Behind the last bytes stands a step, as before the first stands their fetching.
    seconds = max(first_batch_s + tiers["model"], slowest + (step_s if first_batch_s else 0.0))
    # Of a single step nothing is left without it: its own share then.
    counted, rest = (
        ((steps - 1) * step_s, seconds - first_batch_s - step_s) if steps > 1 else (step_s, seconds)
    )
    au = min(100.0, 100 * counted / rest) if rest > 0 else 100.0
    return EpochForecast(
        seconds=seconds,
        first_batch_s=first_batch_s,
        au=au,
        tiers=tiers,
        traffic=traffic,
        cpu_s=decode_cpu_s(setup) + bytes_cpu_s(setup, traffic),
        peer_cpu_s=peer_cpu_s(traffic.peer, tls=setup.job.tls),
    )
