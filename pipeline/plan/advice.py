"""What a plan's settings cost, in words: batches with few divisors, lopsided ranks. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.plan.lanes import lanes_of_slots
from penstock.pipeline.plan.order import default_lanes, default_window, label_spread, most_lanes

if TYPE_CHECKING:
    from penstock.pipeline.plan.batch_schedule import BatchSchedule
    from penstock.pipeline.plan.job_plan import JobPlan

# Per-batch label counts vary this much more than in a full shuffle before we speak of it: below
# that, BatchNorm's statistics move less than between two batches anyway.
LOPSIDED_SPREAD = 2.0
# As many more readers a shard has before we speak of it.
MANY_READERS = 1.25
# Where nobody knows the world yet: samples of a rank, and the worlds to tell for.
USUAL_PER_RANK, USUAL_WORLDS = 32, (1, 8, 64, 256, 1024)
# Batches that are looked at in search of a better one, either way.
_MOST_TRIED = 512


def readers_per_shard(lanes: int, nodes: int) -> float:
    """How many nodes read a lane, on average; so many read a shard that lies in one lane.

    Lanes and nodes each cut a batch into equal slices, and of L and n slices L + n - gcd(L, n)
    pairs overlap. Exact where both divide the batch.
    """
    return (lanes + nodes - math.gcd(lanes, nodes)) / lanes


def shards_of_a_rank(open_shards: float, *, lanes: int, ranks: int) -> float:
    """How many of the shards that are mixed at a time one rank mixes: of its lanes, or of the
    one that it has a part of."""
    return max(1.0, open_shards / min(lanes, ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCost:
    """What a global batch makes of a job: its lanes, and how many nodes read a shard."""

    global_batch: int
    lanes: int
    readers: float


def better_batch(
    global_batch: int, shards: int, *, nodes: int, step: int
) -> tuple[BatchCost, BatchCost] | None:
    """The cost of a batch whose divisors leave it less than half of the lanes that its neighbours
    get, and of the nearest one that is good; None for a batch that is good, or where it costs no
    readers.

    step: only batches that differ by multiples of it are looked at (the world's size, where a batch
    is equal on all ranks).
    """

    def cost(batch: int) -> BatchCost:
        lanes = default_lanes(batch, shards)
        return BatchCost(global_batch=batch, lanes=lanes, readers=readers_per_shard(lanes, nodes))

    here = cost(global_batch)
    if not _is_few(here, shards):
        return None
    for away in range(1, _MOST_TRIED + 1):
        for batch in (global_batch + away * step, global_batch - away * step):
            if batch < 1:
                continue
            there = cost(batch)
            if not _is_few(there, shards) and here.readers > MANY_READERS * there.readers:
                return here, there
    return None


def _is_few(cost: BatchCost, shards: int) -> bool:
    return 2 * cost.lanes < most_lanes(cost.global_batch, shards)


def advice(
    plan: JobPlan,
    *,
    icc: float | None,
    global_batch: int,
    ranks: int,
    nodes: int,
    chosen: bool,
) -> list[str]:
    """Warnings for a job of so many ranks on so many nodes; none for what costs it little.

    icc: label correlation inside a shard, None if unknown. chosen: whether the lanes follow from
    the batch, so that another batch would bring others.
    """
    words = []
    shards = len(plan.sizes)
    if chosen:
        step = ranks if global_batch % ranks == 0 else 1
        if found := better_batch(global_batch, shards, nodes=nodes, step=step):
            words.append(few_lanes_words(*found, nodes=nodes))
    if icc is not None:
        per_rank = -(-global_batch // ranks)
        mixed = shards_of_a_rank(plan.open_shards, lanes=plan.lanes, ranks=ranks)
        spread = label_spread(per_rank, icc, round(mixed), shards)
        if spread > LOPSIDED_SPREAD:
            words.append(lopsided_words(icc, mixed=mixed, shards=shards, spread=spread))
    return words


def uneven_words(schedule: BatchSchedule, *, lanes: int, nodes: int) -> str | None:
    """A warning for batches that grow to what the lanes don't divide; None where that costs little.

    A node's slots then reach into its neighbours' lanes, a few samples of each batch, and it
    fetches those lanes' shards for them.
    """
    for first, size in schedule.entries[schedule.history + 1 :]:
        if nodes < 2 or size % lanes == 0 or size < nodes:
            continue
        cuts = [
            lanes_of_slots(n * size // nodes, (n + 1) * size // nodes, count=size, lanes=lanes)
            for n in range(nodes)
        ]
        readers = sum(end - begin for begin, end in cuts) / lanes
        least = readers_per_shard(lanes, nodes)
        if readers > MANY_READERS * least:
            better = max(1, round(size / lanes)) * lanes
            return (
                f"global_batch_size: the {size:,} samples from sample {first:,} on aren't a "
                f"multiple of the job's {lanes} lanes, and each shard is then read by "
                f"{readers:.1f} of the {nodes} nodes, with {better:,} by {least:.1f}. Pass that."
            )
    return None


def few_lanes_words(here: BatchCost, there: BatchCost, *, nodes: int) -> str:
    """A warning for `better_batch`."""
    return (
        f"A global batch of {here.global_batch} has few divisors, so it gets {here.lanes} "
        f"lane{'s' * (here.lanes != 1)}, and each shard is read by {here.readers:.1f} of the "
        f"{nodes} nodes. With {there.global_batch} it would be {there.lanes} lanes and "
        f"{there.readers:.1f} readers: each node fetches and keeps less. Change the batch, or "
        f"pass lanes= (a divisor of the batch, {nodes} or more)."
    )


def lopsided_words(icc: float, *, mixed: float, shards: int, spread: float) -> str:
    """A warning for ranks whose batches hold few labels."""
    return (
        f"Labels cluster inside shards (ICC {icc:.2f}): with {mixed:.0f} of {shards} shards mixed, "
        f"label counts of a rank's batches vary {spread:.1f} times as much as in a full shuffle, "
        "and BatchNorm sees that. `penstock pack` shuffles for good; fewer lanes= or a wider "
        "window= mix more."
    )


def usual_spreads(shards: int, *, icc: float, shuffled: bool) -> dict[int, float]:
    """`label_spread` of a rank's batches of 32 samples, with default lanes and windows, by number
    of ranks."""
    spreads = {}
    for ranks in USUAL_WORLDS:
        batch = USUAL_PER_RANK * ranks
        lanes = default_lanes(batch, shards)
        window = default_window(shards, lanes, global_batch=batch, icc=icc, shuffled=shuffled)
        mixed = shards_of_a_rank(min(lanes * window, shards), lanes=lanes, ranks=ranks)
        spreads[ranks] = label_spread(USUAL_PER_RANK, icc, round(mixed), shards)
    return spreads


def usual_spread_words(spreads: dict[int, float], *, icc: float) -> str | None:
    """What to say of `usual_spreads` where ranks would be lopsided; None where none would."""
    bad = {ranks: spread for ranks, spread in spreads.items() if spread > LOPSIDED_SPREAD}
    if not bad:
        return None
    first, most = min(bad), max(bad, key=lambda ranks: bad[ranks])
    return (
        f"Labels cluster inside shards (ICC {icc:.2f}): on {first} ranks with {USUAL_PER_RANK} "
        f"samples each, label counts of a rank's batches vary {bad[first]:.1f} times as much as in "
        f"a full shuffle, on {most} ranks {bad[most]:.1f} times, and BatchNorm sees that. "
        "`penstock pack` shuffles for good."
    )
