"""What to buy or change first, and what that gives: each change is a forecast of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.cache.base.sizes import format_size
from penstock.pipeline.plan.sizing.costs import MARGIN_SHARE
from penstock.pipeline.plan.sizing.forecast import Forecast, forecast
from penstock.pipeline.plan.sizing.geometry import geometry_of
from penstock.pipeline.plan.sizing.tiers import WORDS
from penstock.pipeline.plan.sizing.traffic import node_epoch_bytes, node_set_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.sizing.forecast import EpochForecast
    from penstock.pipeline.plan.sizing.tiers import Tier
    from penstock.pipeline.plan.sizing.values import Setup

# A change that makes the job less than this much shorter isn't worth a line.
_LEAST_GAIN = 1.02
_MOST_CHANGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupChange:
    """One change. words: what to do. seconds: of the whole job with it; au_first, au_later, limit:
    then. gain: the job's time now over that."""

    words: str
    seconds: float
    au_first: float
    au_later: float
    limit: Tier
    gain: float


def changes(now: Forecast) -> list[SetupChange]:
    """What would make the job shorter, the largest gain first; none for one that is fed."""
    found = []
    for words, setup in _candidates(now):
        then = forecast(setup)
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
    if (warmed := _warmed(now)) is not None:
        found.append(warmed)
    return sorted(found, key=lambda change: -change.gain)[:_MOST_CHANGES]


def _warmed(now: Forecast) -> SetupChange | None:
    """`penstock warm` on all nodes before the GPUs are held."""
    store, node, nodes = now.setup.store, now.setup.node, now.setup.job.nodes
    if store is None or not now.kept or now.setup.job.moved is not None:
        return None
    seconds = now.setup.job.epochs * now.later.seconds
    gain = now.seconds / seconds
    if gain < _LEAST_GAIN:
        return None
    size = node_epoch_bytes(now.setup, now.geometry) * now.kept
    rate = min(store.bytes_per_s / nodes, now.setup.link_bytes_per_s, node.nvme_bytes_per_s)
    return SetupChange(
        words=f"`penstock warm` before the GPUs are held: {format_size(size)} a node, at least "
        f"{duration(size / rate)} before the job, when nothing waits for it",
        seconds=seconds,
        au_first=now.later.au,
        au_later=now.later.au,
        limit=now.later.limit,
        gain=gain,
    )


def _candidates(now: Forecast) -> Iterator[tuple[str, Setup]]:
    """Changes that concern a limit of either kind of epoch."""
    setup = now.setup
    limits = {now.first.limit, now.later.limit} - {"model"}
    node, job, store = setup.node, setup.job, setup.store
    wanted = node_set_bytes(setup, now.geometry) / (1 - MARGIN_SHARE) * 1.001
    if store is not None and now.kept < 1:
        words = f"NVMe of {format_size(wanted)} a node, so that its cache keeps all that it reads"
        yield words, replace(setup, node=replace(node, nvme_bytes=wanted))
    if limits & {"decode", "cores"}:
        cores = math.ceil(node.cores * _shortfall(now, "decode", "cores"))
        yield f"{cores} cores a node", replace(setup, node=replace(node, cores=cores))
    if "decode" in limits:
        yield (
            "images with a short side of 256 (`penstock pack --short-side 256`): taken as half of "
            "the decoding",
            replace(setup, job=replace(job, cpu_s_per_1000=job.cpu_s_per_1000 / 2)),
        )
    if "disk" in limits:
        rate = node.nvme_bytes_per_s * _shortfall(now, "disk")
        yield (
            f"local disks of {format_size(rate)}/s a node",
            replace(setup, node=replace(node, nvme_bytes_per_s=rate)),
        )
        ram = 2.2 * wanted
        yield f"{format_size(ram)} of RAM a node", replace(setup, node=replace(node, ram_bytes=ram))
    if "nic" in limits:
        rate = node.nic_bytes_per_s * _shortfall(now, "nic")
        yield (
            f"a network of {rate * 8 / 1e9:.3g} Gb/s a node",
            replace(setup, node=replace(node, nic_bytes_per_s=rate)),
        )
    if store is not None:
        yield from _of_the_store(now)


def _of_the_store(now: Forecast) -> Iterator[tuple[str, Setup]]:
    setup, store, job = now.setup, now.setup.store, now.setup.job
    assert store is not None
    limits = {now.first.limit, now.later.limit}
    if "remote" in limits:
        rate = store.bytes_per_s * _shortfall(now, "remote")
        yield (
            f"a store of {format_size(rate)}/s, for all nodes",
            replace(setup, store=replace(store, bytes_per_s=rate)),
        )
    if "requests" in limits:
        rate = store.requests_per_s * _shortfall(now, "requests")
        yield (
            f"a store that answers {rate:,.0f} requests/s (more prefixes)",
            replace(setup, store=replace(store, requests_per_s=rate)),
        )
    if not job.peers and job.nodes > 1:
        yield "peers: `DiskCache(peers=)`", replace(setup, job=replace(job, peers=True))
    if setup.data.shards is not None and job.nodes > 1:
        packed = replace(setup.data, shards=None)
        size = geometry_of(packed, job).shard_bytes
        if size < now.geometry.shard_bytes:
            words = f"shards of {format_size(size)} (`penstock pack --shard-bytes`)"
            yield words, replace(setup, data=packed)


def _shortfall(now: Forecast, *tiers: Tier) -> float:
    """By how much a tier is too slow for the GPUs, in either kind of epoch where it is the limit;
    at least 1."""
    return max(
        1.0,
        *(
            shortfall(epoch, tier)
            for epoch in (now.first, now.later)
            for tier in tiers
            if epoch.limit == tier
        ),
    )


def shortfall(epoch: EpochForecast, tier: Tier) -> float:
    """What an epoch asks of a tier so that the GPUs never wait, over what the tier gives."""
    return epoch.tiers.get(tier, 0.0) / epoch.tiers["model"]


def unmet_words(now: Forecast, *, au: float) -> str | None:
    """What keeps a job from an AU in per cent from its second epoch on (in its only one), by how
    much, and which change helps most; None for one that reaches it."""
    epoch = now.main
    if epoch.au >= au:
        return None
    which = "from epoch 2 on" if epoch is now.later else "in the one epoch"
    slow = {tier: shortfall(epoch, tier) for tier in epoch.tiers}
    slow = {tier: by for tier, by in slow.items() if by > max(1.0, au / 100)} or {
        epoch.limit: shortfall(epoch, epoch.limit)
    }
    tiers = sorted(slow, key=lambda tier: -slow[tier])
    words = "; ".join(f"{WORDS[tier]} ({slow[tier]:,.2f} x)" for tier in tiers)
    said = (
        f"An AU of {au:g} % can't be met: it is {epoch.au:.1f} % {which}. The GPUs ask for more "
        f"than there is of: {words}."
    )
    then = [(c.au_later if epoch is now.later else c.au_first, c.words) for c in changes(now)]
    if not then or (best := max(then))[0] <= epoch.au:
        return said
    return f"{said} First of all: {best[1]}, for an AU of {best[0]:.1f} %."


def duration(seconds: float) -> str:
    """A time for people."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
