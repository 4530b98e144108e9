"""`python -m benchmarks.order_large`: the cost of the order for the largest jobs. Only plans, no
data.

- plan: a rank's plan of 10^9 samples in a job of 1,024 ranks, from nothing to its first ids in the
  middle of an epoch: seconds, CPU-seconds, and memory in addition to the imports. Each in a
  process of its own. With fixed lanes in the plan's own order, and with all options: lanes in
  another order, a tenth of the shards moving.
- readers: how many nodes read a shard on average, of 8 GPUs with 32 samples each, exactly.
- choice: CPU-seconds to choose a lane order over 2,048 groups of lanes.

Writes benchmarks/results/order_large.json.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks.record import write_result
from penstock.pipeline.plan import (
    BatchSchedule,
    Cursor,
    LaneGroups,
    LaneOrder,
    Plan,
    RankOrder,
    ShardReaders,
    Walk,
    World,
    choose_lane_order,
    default_lanes,
    default_window,
)

SAMPLES, RANKS = 10**9, 1024
PLANS = [
    {"shards": 20_000, "batch": 32_768},
    {"shards": 200_000, "batch": 32_768},
    {"shards": 1_000_000, "batch": 32_768},
    {"shards": 200_000, "batch": 32_768, "extras": True},
    {"shards": 200_000, "batch": 32_768, "shuffled": False},
    {"shards": 20_000, "batch": 1024},
]
SHARDS, NODES = (2_000, 10_000, 50_000, 100_000), (8, 64, 512, 660, 1024, 4096)


def some_order(lanes: int) -> LaneOrder:
    """Return groups of lanes in any order."""
    groups = LaneGroups(lanes)
    places = np.arange(len(groups))
    np.random.default_rng(0).shuffle(places[: groups.movable])
    return LaneOrder(tuple(places.tolist()), lanes)


def first_ids(
    *, shards: int, batch: int, extras: bool = False, shuffled: bool = True
) -> dict[str, float]:
    """Return the cost of a rank's first ids in this process, which must not have done
    other work."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    sizes = np.full(shards, SAMPLES // shards)
    lanes = default_lanes(batch, shards)
    window = default_window(
        shards, lanes, global_batch=batch, icc=None, shuffled=shuffled, rows=SAMPLES / shards
    )
    plan = Plan(
        sizes,
        seed=1,
        lanes=lanes,
        window=window,
        reshuffle=0.1 if extras else 0.0,
        lane_order=some_order(lanes) if extras else None,
    )
    schedule = BatchSchedule.constant(batch)
    walk = Walk(samples=plan.samples, schedule=schedule, drop_last=True)
    order = RankOrder(plan=plan, world=World(RANKS // 2, RANKS))
    middle = Cursor(3, SAMPLES // 2 // batch * batch)
    steps = walk.steps(middle, endless=False)
    order.slots(next(steps))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    for _ in range(2000):
        order.slots(next(steps))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"first_s": wall_s, "first_cpu_s": cpu_s, "plan_mib": (peak - before) / 1024}


def in_a_child(**report: Any) -> dict[str, float]:
    """Run `first_ids` in a process of its own."""
    code = (
        "import json, sys\n"
        "from benchmarks.order_large import first_ids\n"
        "print(json.dumps(first_ids(**json.loads(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, json.dumps(report)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def readers(shards: int, nodes: int) -> tuple[int, float]:
    """Return the default lanes, and how many nodes read a shard."""
    lanes = default_lanes(256 * nodes, shards)
    plan = Plan(np.full(shards, 37), seed=1, lanes=lanes, window=1)
    planned = ShardReaders(plan, nodes=[8] * nodes)
    return lanes, sum(len(planned.readers(shard, 0)) for shard in range(shards)) / shards


def choices() -> dict[str, float]:
    """Return CPU-seconds by the distribution of data over the nodes."""
    rng = np.random.default_rng(1)
    held = {
        "8 nodes, dealt anew": np.repeat(np.eye(8, dtype=np.int64)[rng.permutation(8)], 256, 1),
        "4,096 nodes, dealt anew": np.repeat(np.eye(2048, dtype=np.int64), 2, 0)[
            rng.permutation(4096)
        ],
        "4,096 nodes, anything": rng.integers(0, 10**9, (4096, 2048)),
    }
    found = {}
    for name, each in held.items():
        began_s = time.process_time()
        choose_lane_order(each * 10**6, nodes=[8] * len(each), last=None, lanes=2048)
        found[name] = time.process_time() - began_s
    return found


def main() -> None:
    """Measure, print and write the result."""
    result = {
        "plan": [{**report, **in_a_child(**report)} for report in PLANS],
        "readers": [
            {"shards": s, "nodes": n, **dict(zip(("lanes", "readers"), readers(s, n), strict=True))}
            for s in SHARDS
            for n in NODES
        ],
        "choice_cpu_s": choices(),
    }
    for name, value in result.items():
        for line in value if isinstance(value, list) else [value]:
            print(name, line)
    write_result("order_large", result)


if __name__ == "__main__":
    main()
