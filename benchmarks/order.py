"""`python -m benchmarks.order`: how well windows of several widths mix on a rank, and their cost.

Pure arithmetic over the plan, without data: shuffled packs of 1,000 to 100,000 shards of 64 MiB,
jobs of 1 to 1,024 ranks, 8 per node, 32 samples each, the default number of lanes, and windows of 2
to 16 shards, of the whole lane, and the default. For one rank in the middle of the job:

- shards_of_a_batch: from how many shards one of its batches comes, on average;
- meets_again: how often two samples of one of its batches are in one of its batches of the next
  epoch too, divided by the frequency after a full shuffle of all samples over all ranks.

And for its node, in a first epoch with an empty cache that has room for its share:

- single_share: samples that were requested individually because their shard wasn't cached yet;
  fills follow the order of first need, at the pace that `pipeline.plan.needs.Pace` permits;
- open_bytes: bytes of shards that were started and not yet finished, mean over the epoch;
- readers: how many nodes read a shard in an epoch.

Shards have fewer samples than real ones, to keep the epoch of a node short; all figures are shares.
Writes benchmarks/results/order.json.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.record import RESULTS, write_result
from penstock.pipeline.plan import Pace, Plan, World, default_lanes, default_window, rank_slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

SHARDS = (1_000, 10_000, 100_000)
RANKS = (1, 8, 64, 256, 1_024)
WINDOWS = (2, 4, 8, 16)
A_RANK, A_NODE = 32, 8  # samples; ranks
SHARD_BYTES = 64 * 2**20
# What fills may begin with: 16 connections with ranges of 8 MiB, in shards, or in batches of a node
# where shards are smaller here.
ALLOWANCE, ALLOWANCE_BATCHES = 2, 4
# A node's samples, about, and the fewest of a shard.
NODE_SAMPLES, LEAST_ROWS, MOST_ROWS = 600_000, 20, 600
STEPS_AHEAD = 16  # of the walk for fills, for each batch


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSize:
    """The size of a job, measured with `rows` samples per shard."""

    shards: int
    ranks: int

    @property
    def batch(self) -> int:
        """The global batch."""
        return self.ranks * A_RANK

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return max(1, self.ranks // A_NODE)

    @property
    def lanes(self) -> int:
        """The default number of lanes."""
        return default_lanes(self.batch, self.shards)

    @property
    def default_window(self) -> int:
        """The default window of a shuffled pack."""
        return default_window(
            self.shards, self.lanes, global_batch=self.batch, icc=0.0, shuffled=True
        )

    def plan(self, window: int) -> Plan:
        """The order; shards differ in size by up to a tenth."""
        rows = max(LEAST_ROWS, min(MOST_ROWS, NODE_SAMPLES * self.nodes // self.shards))
        sizes = np.random.default_rng(0).integers(rows * 19 // 20, rows * 21 // 20 + 1, self.shards)
        return Plan(sizes, seed=7, lanes=self.lanes, window=window)


def measured(job: JobSize, window: int) -> dict[str, float]:
    """Return all figures of one window, by name."""
    rank = job.ranks // 2
    first = _batches(job.plan(window), job, epoch=0, rank=rank)
    second = _batches(job.plan(window), job, epoch=1, rank=rank)
    plan = job.plan(window)
    return {
        "shards_of_a_batch": float(np.mean([len(np.unique(rows[:, 0])) for rows in first])),
        "meets_again": _meets_again(plan, [_ids(plan, first), _ids(plan, second)]),
        **_cold_epoch(job, window, node=job.nodes // 2),
        "readers": _readers(plan, job),
    }


def _batches(plan: Plan, job: JobSize, *, epoch: int, rank: int) -> list[Ints]:
    places = range(0, plan.samples // job.batch * job.batch, job.batch)
    world = World(rank, job.ranks)
    return [_batch(plan, epoch, p, job.batch, world) for p in places]


def _batch(plan: Plan, epoch: int, position: int, size: int, world: World) -> Ints:
    """Return (shard, row) of a rank's samples of a global batch."""
    low, high = rank_slots(world, size)
    return plan.places(epoch, position, size, low=low, high=high).rows


def _ids(plan: Plan, batches: list[Ints]) -> list[Ints]:
    starts = np.cumsum(plan.sizes) - plan.sizes
    return [starts[rows[:, 0]] + rows[:, 1] for rows in batches]


def _meets_again(plan: Plan, epochs: list[list[Ints]]) -> float:
    """Return the pairs in batches of both epochs, divided by those of the first, relative to
    chance."""
    where = np.full((2, plan.samples), -1, dtype=np.int64)
    for epoch, batches in enumerate(epochs):
        for step, ids in enumerate(batches):
            where[epoch, ids] = step
    both = where[:, (where >= 0).all(axis=0)]
    _, together = np.unique(both[0] * len(epochs[1]) + both[1], return_counts=True)
    pairs = len(epochs[0]) * A_RANK * (A_RANK - 1)
    again = float((together * (together - 1)).sum()) / pairs
    return again / ((A_RANK - 1) / (plan.samples - 1))


def _cold_epoch(job: JobSize, window: int, *, node: int) -> dict[str, float]:
    """Simulate one node's first epoch, counted in samples instead of bytes."""
    plan, ahead = job.plan(window), job.plan(window)  # a walker takes a plan of its own
    places = range(0, plan.samples // job.batch * job.batch, job.batch)
    node_batch = job.batch // job.nodes
    allowance = max(ALLOWANCE * int(plan.sizes.mean()), ALLOWANCE_BATCHES * node_batch)
    pace = Pace(allowance_bytes=allowance)
    is_whole, is_known = np.zeros((2, len(plan.sizes)), dtype=np.bool_)
    came = np.zeros(len(plan.sizes), dtype=np.int64)  # by requests of their own
    begun = np.full(len(plan.sizes), -1, dtype=np.int64)
    ended = np.full(len(plan.sizes), -1, dtype=np.int64)
    queue: deque[int] = deque()
    walked = samples = 0
    for step, position in enumerate(places):
        shard = _batch(plan, 0, position, job.batch, World(node, job.nodes))[:, 0]
        begun[shard] = np.where(begun[shard] < 0, step, begun[shard])
        ended[shard] = step
        single = shard[~is_whole[shard]]
        np.add.at(came, single, 1)
        samples += len(shard)
        pace.count_batch(len(shard))
        pace.spend_for_batches(len(single))
        while walked < min(len(places), (step + 1) * STEPS_AHEAD) and len(queue) < 4096:
            rows = _batch(ahead, 0, places[walked], job.batch, World(node, job.nodes))
            new = np.unique(rows[~is_known[rows[:, 0]], 0])
            is_known[new] = True
            queue.extend(new.tolist())
            walked += 1
        while queue and pace.open:
            filled = queue.popleft()
            pace.spend(int(plan.sizes[filled] - came[filled]))
            is_whole[filled] = True
    read = begun >= 0
    return {
        "single_share": float(came.sum() / samples),
        "open_bytes": float((ended[read] - begun[read] + 1).sum() / len(places) * SHARD_BYTES),
    }


def _readers(plan: Plan, job: JobSize) -> float:
    nodes = job.nodes
    shards = (plan.shards(job.batch, first=n, end=n + 1, world=nodes) for n in range(nodes))
    return sum(map(len, shards)) / len(plan.sizes)


def measure(jobs: list[JobSize], *, results: Path = RESULTS, console: Console) -> Path:
    """Measure every job with every window; print a table per number of shards and
    write the result."""
    rows: list[dict[str, Any]] = []
    for job in jobs:
        whole = -(-job.shards // job.lanes)
        wanted = {w for w in (*WINDOWS, job.default_window) if w < whole} | {whole}
        table = Table("W", "shards of a batch", "meets again", "single", "open a node", "readers")
        table.title = f"{job.shards:,} shards, {job.ranks:,} ranks: L = {job.lanes}"
        for window in sorted(wanted):
            with console.status(f"{job}, window {window}"):
                found = measured(job, window)
            is_default = window == job.default_window
            rows.append(
                asdict(job)
                | {"lanes": job.lanes, "window": window, "default": is_default}
                | {"whole_lane": window == whole, **found}
            )
            table.add_row(
                f"{window}{' (whole)' * (window == whole)}{' default' * is_default}",
                f"{found['shards_of_a_batch']:.1f}",
                f"{found['meets_again']:,.1f}",
                f"{found['single_share']:.1%}",
                f"{found['open_bytes'] / 2**30:,.1f} GiB",
                f"{found['readers']:.2f}",
            )
        console.print(table)
    return write_result("order", {"rows": rows}, folder=results)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run the measurement."""
    parser = argparse.ArgumentParser(prog="benchmarks.order", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 shards, 8 and 64 ranks")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    shards, ranks = ((1_000,), (8, 64)) if options.quick else (SHARDS, RANKS)
    jobs = [JobSize(shards=s, ranks=r) for s in shards for r in ranks]
    measure(jobs, results=options.results, console=Console())


if __name__ == "__main__":
    main()
