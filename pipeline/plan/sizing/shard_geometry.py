"""Compute how a job's plan cuts a dataset: shards, lanes, windows, and how many nodes read a shard.

It also words the warnings of what a job's own settings can't reach, whatever the hardware. Only
what is certain is said, and only where it moves a GiB in each epoch: small datasets stay silent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.cache.base import format_size
from penstock.pipeline.plan.order import SHARDS_PER_LANE, default_lanes, default_window
from penstock.pipeline.plan.order_costs import readers_of
from penstock.pipeline.plan.sizing.cluster import MARGIN_SHARE, check_count
from penstock.pipeline.plan.windows import window_count

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.pipeline.plan.sizing.cluster import DataFigures, JobFigures

SHARD_BYTES = 64 * 2**20
"""Of a shard where nothing asks for another size."""
LEAST_SHARD_BYTES = 4 * 2**20
"""Below this a shard is one request that is mostly latency: throughput levels off at 4 to 8 MiB."""
MOST_SHARD_BYTES = 2**30
MOST_SHARDS = 2**20
"""Each rank's plan takes about 100 bytes a shard."""
MOST_READERS = 1.1
"""Nodes that read a shard, above which smaller shards are worth while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGeometry:
    """A dataset as a job's plan cuts it. shard_bytes: mean of a shard; lanes: L; window: W;
    open_shards: that all lanes mix at a time; readers: nodes that read a shard, on average."""

    shards: int
    shard_bytes: float
    lanes: int
    window: int
    open_shards: float
    readers: float

    @property
    def open_share(self) -> float:
        """Of all shards, those that are mixed at a time."""
        return self.open_shards / self.shards


def geometry_of(data: DataFigures, job: JobFigures) -> ShardGeometry:
    """How a job's plan cuts the data, in shards that are there or such as `pack` should write."""
    shards = data.shards
    if shards is None:
        size = shard_bytes_for(
            data.samples, data.sample_bytes, nodes=job.nodes, global_batch=job.global_batch
        )
        shards = _shards_of(data.samples, data.sample_bytes, size)
    lanes = default_lanes(job.global_batch, shards)
    window = default_window(
        shards,
        lanes,
        global_batch=job.global_batch,
        icc=data.icc,
        shuffled=data.shuffled,
        rows=data.samples / shards,
    )
    strands = 2 * lanes if shards >= SHARDS_PER_LANE * lanes else lanes
    rows = max(1, window * data.samples * lanes // (shards * strands))
    return ShardGeometry(
        shards=shards,
        shard_bytes=data.total_bytes / shards,
        lanes=lanes,
        window=window,
        open_shards=min(shards, shards / window_count(max(1, data.samples // strands), rows)),
        readers=shard_readers(shards, lanes, nodes=job.nodes),
    )


def shard_readers(shards: int, lanes: int, *, nodes: int) -> float:
    """Nodes that read a shard, on average, and never more than there are."""
    return min(readers_of(shards, lanes=lanes, nodes=nodes), float(nodes))


def shard_bytes_for(samples: int, sample_bytes: float, *, nodes: int, global_batch: int) -> int:
    """The size of shards that a job on so many nodes wants: the largest one that leaves a shard at
    most 1.1 readers, from 64 MiB down to 4 MiB; where none does, that with the fewest readers.

    Of a dataset of more than a million such shards it is larger, so that plans stay small. A
    sample that is larger than all that is a shard of its own.
    """
    size = float(SHARD_BYTES)
    while samples * sample_bytes / size > MOST_SHARDS and size < MOST_SHARD_BYTES:
        size *= 2
    sizes = [size]
    while sizes[-1] / math.sqrt(2) >= LEAST_SHARD_BYTES - 1:
        sizes.append(sizes[-1] / math.sqrt(2))
    found = [(round(_readers(samples, sample_bytes, s, nodes, global_batch), 3), -s) for s in sizes]
    enough = [pair for pair in found if pair[0] <= MOST_READERS]
    chosen = -(enough[0] if enough else min(found))[1]
    return max(round(chosen), math.ceil(sample_bytes))


def shards_for(*, nodes: int, global_batch: int) -> Callable[[NDArray[np.int64]], int]:
    """`shard_bytes_for` of a job, as `pack(shard_bytes=)` takes it: a function of the samples'
    bytes. Raises ConfigError for a job that can't be."""
    check_count("nodes", nodes)
    check_count("global batch", global_batch)
    if global_batch < nodes:
        raise ConfigError(
            f"global batch: got {global_batch}, {nodes - global_batch} fewer than the {nodes} "
            "nodes: each takes a sample at least."
        )

    def rule(sizes: NDArray[np.int64]) -> int:
        samples = max(1, len(sizes))
        mean = max(1.0, float(sizes.sum()) / samples)
        return shard_bytes_for(samples, mean, nodes=nodes, global_batch=global_batch)

    return rule


def _readers(samples: int, sample_bytes: float, size: float, nodes: int, batch: int) -> float:
    shards = _shards_of(samples, sample_bytes, size)
    return shard_readers(shards, default_lanes(batch, shards), nodes=nodes)


def _shards_of(samples: int, sample_bytes: float, size: float) -> int:
    """Shards of whole samples."""
    return math.ceil(samples / max(1, int(size // sample_bytes)))


LEAST_BYTES = 2**30
"""What has to be fetched in vain before it is worth a warning."""
_MANY_READERS, _FEWER = 1.5, 1.25
_MOST_KEPT = 0.9


def few_shards_words(
    *, samples: int, shards: int, total_bytes: int, lanes: int, global_batch: int, nodes: int
) -> str | None:
    """A warning for shards that several nodes read, where smaller ones would end that; else None.

    For lanes that follow from dataset and batch, of a dataset that each node fetches.
    """
    if nodes == 1 or not samples:
        return None
    readers = shard_readers(shards, lanes, nodes=nodes)
    if readers < _MANY_READERS or (readers - 1) * total_bytes < LEAST_BYTES:
        return None
    mean = max(1.0, total_bytes / samples)
    size = shard_bytes_for(samples, mean, nodes=nodes, global_batch=global_batch)
    smaller = -(-samples // max(1, int(size // mean)))
    then = shard_readers(smaller, default_lanes(global_batch, smaller), nodes=nodes)
    if then > max(MOST_READERS, readers / _FEWER):
        return None
    return (
        f"Too few shards for {nodes} nodes: {shards:,} make {lanes} lanes, and each is read and "
        f"kept by {readers:.1f} nodes. In {smaller:,} of {format_size(size)} it would be "
        f"{then:.1f}: `penstock pack --for-nodes {nodes} --for-batch {global_batch}`."
    )


def small_cache_words(max_bytes: int, node_bytes: int) -> str | None:
    """A warning for a cache that keeps too little of what a node reads; else None."""
    kept = int((1 - MARGIN_SHARE) * max_bytes)
    if kept >= _MOST_KEPT * node_bytes or node_bytes - kept < LEAST_BYTES:
        return None
    return (
        f"max_bytes={format_size(max_bytes)} keeps {kept / node_bytes:.0%} of the "
        f"{format_size(node_bytes)} that this node reads: the other "
        f"{format_size(node_bytes - kept)} come from the remote in each epoch. `penstock plan` "
        "tells what that costs."
    )
