"""Estimate what a plan's settings cost, and word the warnings: few lanes, lopsided ranks. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.lanes import lanes_of_slots
from penstock.pipeline.plan.order import (
    SAMPLES_PER_LANE,
    default_lanes,
    default_window,
    label_spread,
    most_lanes,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.pipeline.plan.order import JobPlan
    from penstock.pipeline.plan.walk import BatchSchedule

# Per-batch label counts vary this much more than in a full shuffle before we speak of it: below
# that, BatchNorm's statistics move less than between two batches anyway.
LOPSIDED_SPREAD = 2.0
# As many more readers a shard has before we speak of it.
MANY_READERS = 1.25
# Nodes from which on we speak of any shard that more than this many read. On fewer the extra bytes
# are those of a small dataset.
MANY_NODES, MOST_READERS = 64, 1.105
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


def readers_of(shards: int, *, lanes: int, nodes: int) -> float:
    """How many nodes read a shard, on average, those too that lie across the lanes of two nodes:
    each of a lane's two strands ends in one. docs/order.md has it beside what plans read."""
    return readers_per_shard(lanes, nodes) + (2 * nodes / max(1, shards) if nodes > 1 else 0.0)


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
    plan: JobPlan, *, icc: float | None, global_batch: int, ranks: int, nodes: int, chosen: bool
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
    filled = int(np.count_nonzero(plan.sizes))
    if not words and (
        many := many_readers_words(filled, lanes=plan.lanes, nodes=nodes, global_batch=global_batch)
    ):
        words.append(many)
    if icc is not None:
        per_rank = -(-global_batch // ranks)
        mixed = shards_of_a_rank(plan.open_shards, lanes=plan.lanes, ranks=ranks)
        spread = label_spread(per_rank, icc, round(mixed), shards)
        if spread > LOPSIDED_SPREAD:
            words.append(lopsided_words(icc, mixed=mixed, shards=shards, spread=spread))
    return words


def many_readers_words(shards: int, *, lanes: int, nodes: int, global_batch: int) -> str | None:
    """A warning for a job of so many nodes that each shard has more readers than `MOST_READERS`,
    with what would have to be otherwise; None for one of less."""
    readers = readers_of(shards, lanes=lanes, nodes=nodes)
    if nodes < MANY_NODES or readers <= MOST_READERS:
        return None
    most = most_lanes(global_batch, shards)
    divisors = [one for one in range(1, most + 1) if global_batch % one == 0]
    best = min(divisors, key=lambda one: (readers_of(shards, lanes=one, nodes=nodes), -one))
    least = readers_of(shards, lanes=best, nodes=nodes)
    wanted = math.ceil(2 * nodes / (MOST_READERS - 1) / 100) * 100  # shards that only ends cut
    remedies = []
    if least < readers / 1.05:
        remedies.append(f"with lanes={best} it would be {least:.2f}")
    if least > MOST_READERS and shards < wanted:
        remedies.append(f"a node wants some 20 shards or more: pack into {wanted:,} smaller ones")
    if global_batch < SAMPLES_PER_LANE * nodes:
        remedies.append(f"a batch wants {SAMPLES_PER_LANE} samples a node or more")
    remedy = f" {_sentence(remedies)}" if remedies else ""
    return (
        f"Each of {shards:,} shards is read by {readers:.2f} of the {nodes} nodes on average "
        f"(lanes={lanes}), so they fetch and keep {readers:.2f} times the dataset.{remedy}"
    )


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


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
        f"pass order=Order(lanes=…), a divisor of the batch, {nodes} or more."
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
