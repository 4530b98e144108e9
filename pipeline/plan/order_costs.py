"""Estimate the cost of a plan's settings, and write warnings about batches and labels. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from penstock.pipeline.plan.order import default_lanes, default_window, label_spread, most_lanes

if TYPE_CHECKING:
    from penstock.pipeline.plan.order import JobPlan

# Warn if a batch's label counts vary this much more than in a full shuffle: below it, BatchNorm's
# statistics move less than between two batches.
_MOST_SPREAD = 2.0
# Warn if a shard has this many times the readers that it could have.
_MORE_READERS = 1.25
# Samples of a rank, and numbers of ranks to report, while the job's world isn't known.
USUAL_PER_RANK, _USUAL_WORLDS = 32, (1, 8, 64, 256, 1024)
_MOST_TRIED = 512  # larger and smaller batches that `better_batch` tries


def readers_per_shard(lanes: int, nodes: int) -> float:
    """Return the mean number of nodes that read a lane, and so a shard of a single lane.

    Lanes and nodes each cut a batch into equal slices, and of L and n slices L + n - gcd(L, n)
    pairs overlap. Exact if both divide the batch.
    """
    return (lanes + nodes - math.gcd(lanes, nodes)) / lanes


def readers_of(shards: int, *, lanes: int, nodes: int) -> float:
    """Return the mean number of nodes that read a shard, including shards that extend over the
    lanes of two nodes: each of a lane's two strands ends in one. docs/explanation/order.md
    compares it with what plans read."""
    ends = 2 * nodes / max(1, shards) if nodes > 1 else 0.0
    return min(float(nodes), readers_per_shard(lanes, nodes) + ends)


def shards_of_a_rank(open_shards: float, *, lanes: int, ranks: int) -> float:
    """Return how many of the shards that are mixed at a time one rank mixes: those of its lanes, or
    of the lane that it has a part of."""
    return max(1.0, open_shards / min(lanes, ranks))


def better_batch(global_batch: int, shards: int, *, nodes: int, step: int) -> int | None:
    """Return the nearest batch that has enough divisors, for a batch with too few.

    A batch has too few if it gets less than half of the lanes that a batch with many divisors gets.
    None for a batch with enough divisors, and if another one would hardly lower the readers.
    step: only batches that differ by multiples of it are tried (the world's size, if a batch is
    equal on all ranks).
    """

    def readers(batch: int) -> float:
        return readers_per_shard(default_lanes(batch, shards), nodes)

    def has_few_lanes(batch: int) -> bool:
        return 2 * default_lanes(batch, shards) < most_lanes(batch, shards)

    if not has_few_lanes(global_batch):
        return None
    most = readers(global_batch) / _MORE_READERS
    for away in range(1, _MOST_TRIED + 1):
        for batch in (global_batch + away * step, global_batch - away * step):
            if batch >= 1 and not has_few_lanes(batch) and readers(batch) < most:
                return batch
    return None


def clustered_labels_warning(
    plan: JobPlan, *, icc: float, global_batch: int, ranks: int
) -> str | None:
    """Return a warning for ranks whose batches have too few labels; None if they mix enough.

    icc: label correlation inside a shard.
    """
    shards = len(plan.sizes)
    mixed = shards_of_a_rank(plan.open_shards, lanes=plan.lanes, ranks=ranks)
    spread = label_spread(-(-global_batch // ranks), icc, round(mixed), shards)
    if spread <= _MOST_SPREAD:
        return None
    return (
        f"Labels cluster inside shards (ICC {icc:.2f}): with {mixed:.0f} of {shards} shards mixed, "
        f"label counts of a rank's batches vary {spread:.1f} times as much as in a full shuffle, "
        "which changes BatchNorm's statistics. `penstock pack` shuffles the data once; fewer "
        "lanes= or a wider window= mix more."
    )


def usual_spreads(shards: int, *, icc: float, shuffled: bool) -> dict[int, float]:
    """Return by number of ranks the `label_spread` of a rank's batches of 32 samples, with default
    lanes and windows."""
    spreads = {}
    for ranks in _USUAL_WORLDS:
        batch = USUAL_PER_RANK * ranks
        lanes = default_lanes(batch, shards)
        window = default_window(shards, lanes, global_batch=batch, icc=icc, shuffled=shuffled)
        mixed = shards_of_a_rank(min(lanes * window, shards), lanes=lanes, ranks=ranks)
        spreads[ranks] = label_spread(USUAL_PER_RANK, icc, round(mixed), shards)
    return spreads


def spread_warning(spreads: dict[int, float], *, icc: float) -> str | None:
    """Return the warning about large `usual_spreads`; None if all are small."""
    bad = {ranks: spread for ranks, spread in spreads.items() if spread > _MOST_SPREAD}
    if not bad:
        return None
    first, most = min(bad), max(bad, key=lambda ranks: bad[ranks])
    return (
        f"Labels cluster inside shards (ICC {icc:.2f}): on {first} ranks with {USUAL_PER_RANK} "
        f"samples each, label counts of a rank's batches vary {bad[first]:.1f} times as much as in "
        f"a full shuffle, on {most} ranks {bad[most]:.1f} times, which changes BatchNorm's "
        "statistics. `penstock pack` shuffles the data once."
    )
