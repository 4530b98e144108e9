"""Compute how a job's plan cuts a dataset: shards, lanes, windows, and how many nodes read a shard.

It also writes the warnings about shards and caches that are too small for a job, whatever the
hardware. It warns only of what is certain and costs a GiB in each epoch or more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cache import ConfigError
from penstock.cache.base import format_size
from penstock.pipeline.plan import order
from penstock.pipeline.plan.order import SAMPLES_PER_LANE, default_lanes
from penstock.pipeline.plan.order_costs import better_batch, readers_of
from penstock.pipeline.plan.sizing.cluster import MARGIN_SHARE, check_count
from penstock.pipeline.plan.windows import window_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.plan.lanes import Ints
    from penstock.pipeline.plan.mixture_plan import MixtureSettings
    from penstock.pipeline.plan.sizing.cluster import ClusterSetup
    from penstock.readers import MixtureContents

SHARD_BYTES = 64 * 2**20
"""Size of a shard unless a job needs another one."""
LEAST_SHARD_BYTES = 4 * 2**20
"""Minimum: a smaller shard is one request that is mostly latency (throughput levels off at 4 to 8
MiB)."""
MOST_SHARD_BYTES = 2**30
MOST_SHARDS = 2**20
"""Upper limit of shards before they get larger: each rank's plan takes about 100 bytes a shard."""
MOST_READERS = 1.1
"""Mean number of nodes that read a shard, above which smaller shards are worthwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGeometry:
    """A dataset as a job's plan cuts it.

    shard_bytes: mean size of a shard. lanes: L. window: W. open_shards: number of shards that all
    lanes mix at a time. readers: mean number of nodes that read a shard.
    """

    shards: int
    shard_bytes: float
    lanes: int
    window: int
    open_shards: float
    readers: float

    @property
    def open_share(self) -> float:
        """Share of the shards that are mixed at a time."""
        return self.open_shards / self.shards


def geometry_of(setup: ClusterSetup) -> ShardGeometry:
    """Return how a job's plan cuts the data, in its shards or in those that `pack` should write."""
    shards = setup.shards
    if shards is None:
        size = shard_bytes_for(
            setup.samples, setup.sample_bytes, nodes=setup.nodes, global_batch=setup.global_batch
        )
        shards = _shards_of(setup.samples, setup.sample_bytes, size)
    batch, samples, icc = setup.global_batch, setup.samples, setup.icc
    lanes, rows_each = default_lanes(batch, shards), samples / shards
    window = order.default_window(
        shards, lanes, global_batch=batch, icc=icc, shuffled=setup.shuffled, rows=rows_each
    )
    strands, rows = order.strands_and_window(
        shards, samples, shards=shards, lanes=lanes, window=window
    )
    return ShardGeometry(
        shards=shards,
        shard_bytes=(setup.stored_bytes or setup.total_bytes) / shards,
        lanes=lanes,
        window=window,
        open_shards=min(shards, shards / window_count(samples // strands, rows)),
        readers=readers_of(shards, lanes=lanes, nodes=setup.nodes),
    )


def shard_bytes_for(samples: int, sample_bytes: float, *, nodes: int, global_batch: int) -> int:
    """Return the size in bytes of the shards that a job should have.

    It is the largest size, from 64 MiB down to 4 MiB, with which a shard has at most 1.1 readers;
    if there is none, the one with the fewest readers. A dataset of more than a million such shards
    gets larger ones, so that plans stay small. A sample that is still larger is a shard of its own.
    """
    size = float(SHARD_BYTES)
    while samples * sample_bytes / size > MOST_SHARDS and size < MOST_SHARD_BYTES:
        size *= 2
    sizes = [size]
    while sizes[-1] / math.sqrt(2) >= LEAST_SHARD_BYTES - 1:
        sizes.append(sizes[-1] / math.sqrt(2))
    readers = []
    for size in sizes:
        shards = _shards_of(samples, sample_bytes, size)
        mean = readers_of(shards, lanes=default_lanes(global_batch, shards), nodes=nodes)
        readers.append((round(mean, 3), -size))
    enough = [pair for pair in readers if pair[0] <= MOST_READERS]
    chosen = -(enough[0] if enough else min(readers))[1]
    return max(round(chosen), math.ceil(sample_bytes))


def shards_for(*, nodes: int, global_batch: int) -> Callable[[Ints], int]:
    """Return a function for `pack(shard_bytes=)` from the samples' bytes, int64, shape (samples,),
    to `shard_bytes_for` the job. Raises ConfigError for an invalid job."""
    check_count("nodes", nodes)
    check_count("global batch", global_batch)
    if global_batch < nodes:
        raise ConfigError(
            f"global batch: got {global_batch}, {nodes - global_batch} fewer than the {nodes} "
            "nodes: each node needs at least one sample."
        )

    def rule(sizes: Ints) -> int:
        samples = max(1, len(sizes))
        mean = max(1.0, float(sizes.sum()) / samples)
        return shard_bytes_for(samples, mean, nodes=nodes, global_batch=global_batch)

    return rule


def _shards_of(samples: int, sample_bytes: float, size: float) -> int:
    """Return the number of shards of at most `size` bytes, each of complete samples."""
    return math.ceil(samples / max(1, int(size // sample_bytes)))


LEAST_BYTES = 2**30
"""Bytes that are fetched needlessly in each epoch; below this there is no warning."""
_MANY_READERS, _FEWER = 1.5, 1.25
_MOST_KEPT = 0.9
_MANY_NODES, _SOME_READERS = 64, 1.105
"""Number of nodes, and mean readers of a shard, from which on a warning needs no better setting.
With fewer nodes the additional bytes are those of a small dataset."""


def readers_warning(
    *,
    samples: int,
    shards: int,
    total_bytes: int,
    lanes: int,
    global_batch: int,
    nodes: int,
    step: int | None,
) -> str | None:
    """Return a warning, with its remedies, for shards that several nodes read; None if that costs
    little.

    shards: those with samples. total_bytes: of the dataset, if each node must fetch its part; else
    0. step: other batches may differ by multiples of it; None if lanes don't follow from the batch.
    """
    readers = readers_of(shards, lanes=lanes, nodes=nodes)
    is_costly = nodes >= _MANY_NODES and readers > _SOME_READERS
    found = []
    better = step and better_batch(global_batch, shards, nodes=nodes, step=step)
    if better:
        most = default_lanes(better, shards)
        then = readers_of(shards, lanes=most, nodes=nodes)
        found.append(f"a batch of {better:,} has more divisors: {most} lanes, {then:.2f} readers")
    elif is_costly:
        most = order.most_lanes(global_batch, shards)
        divisors = (n for n in range(1, most + 1) if not global_batch % n)
        best = min(divisors, key=lambda n: (readers_of(shards, lanes=n, nodes=nodes), -n))
        then = readers_of(shards, lanes=best, nodes=nodes)
        if then < readers / 1.05:
            found.append(f"with order=Order(lanes={best}) it would be {then:.2f}")
    if step and samples and (is_costly or readers >= _MANY_READERS):
        mean = max(1.0, total_bytes / samples)
        size = shard_bytes_for(samples, mean, nodes=nodes, global_batch=global_batch)
        smaller = _shards_of(samples, mean, size)
        then = readers_of(smaller, lanes=default_lanes(global_batch, smaller), nodes=nodes)
        is_better = then <= max(MOST_READERS, readers / _FEWER)
        if is_better and (readers - 1) * total_bytes >= LEAST_BYTES:
            found.append(
                f"with {smaller:,} shards of {format_size(size)} it would be {then:.2f}: "
                f"`penstock pack --for-nodes {nodes} --for-batch {global_batch}`"
            )
    if is_costly and global_batch < SAMPLES_PER_LANE * nodes:
        found.append(f"a batch needs {SAMPLES_PER_LANE} samples a node or more")
    if not found and not is_costly:
        return None
    text = "; ".join(found)
    return (
        f"Each of {shards:,} shards is read by {readers:.2f} of the {nodes} nodes on average (a "
        f"batch of {global_batch:,}, lanes={lanes}): they fetch and keep {readers:.2f} times the "
        f"dataset.{f' {text[0].upper()}{text[1:]}.' if text else ''}"
    )


def small_cache_warning(max_bytes: int, node_bytes: int) -> str | None:
    """Return a warning for a cache that keeps too little of what a node reads; else None."""
    kept = int((1 - MARGIN_SHARE) * max_bytes)
    if kept >= _MOST_KEPT * node_bytes or node_bytes - kept < LEAST_BYTES:
        return None
    return (
        f"max_bytes={format_size(max_bytes)} keeps {kept / node_bytes:.0%} of the "
        f"{format_size(node_bytes)} that this node reads: the other "
        f"{format_size(node_bytes - kept)} come from the remote in each epoch. `penstock plan` "
        "estimates the cost."
    )


def mixture_reads(
    mixture: MixtureContents, own: MixtureSettings, *, epochs: int
) -> tuple[float, float]:
    """Return the bytes of shards that a job of some epochs reads for the first time: in its first
    epoch, and on average in each later one. own: of its plan.

    An epoch may deliver samples of a part several times, which caches hold by then, and reach only
    some of another part, so that later epochs read new bytes. Shards are fetched whole: a part that
    has delivered a share of its samples has opened as many windows.
    """
    stream, parts = own.stream(mixture), mixture.parts
    each = zip(parts, own.lanes, own.windows, strict=True)
    windows = [order.windows_of(part, lanes=n, window=w) for part, n, w in each]

    def read(epochs: int) -> float:
        total, counts = 0.0, stream.counts(epochs * own.samples).tolist()
        for part, number, count in zip(parts, windows, counts, strict=True):
            if count:
                # The last window is half-way through on average, as borders are shifted.
                share = count / part.samples + 0.5 / number
                total += float(part.shard_bytes.sum()) * min(1.0, max(share, 1 / number))
        return total

    first = read(1)
    return first, (read(epochs) - first) / (epochs - 1) if epochs > 1 else 0.0
