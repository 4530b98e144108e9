"""Forecast times, utilisation, bytes and the limit of each kind of epoch, and what to change first.

An epoch takes as long as its slowest tier (`traffic`), because fetching, reading, decoding and
training run at the same time. Only the job's first batch adds its time. docs/howto/sizes.md has the
formulas with their sources. The best change is found by a forecast for each possible one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.cache.base import format_size
from penstock.pipeline.plan.needs import ahead_s, connections
from penstock.pipeline.plan.sizing.cluster import (
    CONNECTIONS_A_RANK,
    MARGIN_SHARE,
    OPENERS,
    REQUEST_BYTES,
    TAIL,
    peer_cpu_s,
)
from penstock.pipeline.plan.sizing.shard_geometry import ShardGeometry, geometry_of
from penstock.pipeline.plan.sizing.traffic import (
    STORE_TIERS,
    TIER_NAMES,
    EpochTraffic,
    Tier,
    bytes_cpu_s,
    cache_share,
    decode_cpu_s,
    first_traffic,
    node_epoch_bytes,
    node_set_bytes,
    tier_seconds,
    warm_traffic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.pipeline.plan.sizing.cluster import ClusterSetup


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
    slow_s = TAIL * mean_s
    most = CONNECTIONS_A_RANK * setup.gpus
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
    rounds = max(1.0, size / alone / (setup.gpus * CONNECTIONS_A_RANK))
    shards = min(geometry.open_shards, setup.global_batch) / setup.ranks
    opened_s = setup.store_latency_s * math.ceil(shards / OPENERS)
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
        peer_cpu_s=peer_cpu_s(traffic.peer, tls=setup.tls),
    )


_LEAST_GAIN = 1.02  # a change that gains less isn't listed
_MOST_CHANGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
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
            found.append(
                SetupChange(
                    words=words,
                    seconds=then.seconds,
                    au_first=then.first.au,
                    au_later=then.later.au,
                    limit=then.main.limit,
                    gain=gain,
                )
            )
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
    ({"disk"}, "nvme_bytes_per_s", lambda rate: f"local disks of {format_size(rate)}/s a node"),
    ({"nic"}, "nic_bytes_per_s", lambda rate: f"a network of {rate * 8 / 1e9:.3g} Gb/s a node"),
    (
        {"remote"},
        "store_bytes_per_s",
        lambda rate: f"a store of {format_size(rate)}/s, for all nodes",
    ),
    (
        {"requests"},
        "store_requests_per_s",
        "a store that answers {:,} requests/s (more prefixes)".format,
    ),
)
"""Figures of a setup that may be too low: the tiers that they limit, their fields, and the words
for a higher one."""


def _changed_setups(now: Forecast) -> Iterator[tuple[str, ClusterSetup]]:
    """Yield changes, as (words, setup), that raise a limit of either kind of epoch."""
    setup = now.setup
    limits = {now.first.limit, now.later.limit} - {"model"}
    wanted = node_set_bytes(setup, now.geometry) / (1 - MARGIN_SHARE) * 1.001
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
    slow = {tier: shortfall(epoch, tier) for tier in epoch.tiers}
    slow = {tier: by for tier, by in slow.items() if by > max(1.0, au / 100)} or {
        epoch.limit: shortfall(epoch, epoch.limit)
    }
    tiers = sorted(slow, key=lambda tier: -slow[tier])
    names = "; ".join(f"{TIER_NAMES[tier]} ({slow[tier]:,.2f} x)" for tier in tiers)
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
