"""What a job's own settings can't reach, whatever the hardware: words for a warning at its start.

Only what is sure is said, and only where it moves a GiB in each epoch: small sets stay silent.
"""

from __future__ import annotations

from penstock.cache.base.sizes import format_size
from penstock.pipeline.plan.order import default_lanes
from penstock.pipeline.plan.sizing.costs import MARGIN_SHARE
from penstock.pipeline.plan.sizing.geometry import MOST_READERS, shard_bytes_for, shard_readers

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
