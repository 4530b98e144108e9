"""`python -m benchmarks.mixing`: how well the order mixes data that packs don't prepare, and how
full batches of similar samples are.

Pure arithmetic over plans, without data; every figure is the same on every machine.

- sorted: about 10^6 class-sorted samples in shards of uneven sizes, default lanes and window.
  `variance` is the variance of the label counts in a global batch, `partners` how often mixing
  partners have the same class, both over those of a full shuffle.
- units: data that is decoded in units (row groups, chunks), for the rank in the middle of a job:
  the units that all lanes mix at a time, from how many units one of the rank's batches comes, how
  many pairs of its samples are of one unit, and the bytes of units that the rank has begun and not
  finished, at most. With the default window, and with that of unshuffled shards (`wide`).
- lane_order: which share of all bytes is on the node that reads it after a change of nodes, with
  the order of lanes that is chosen for it (the minimum of 20 random assignments) and with lane 0
  first (their mean).
- padding: the share of pixels that only fill a batch, for images of sizes as in COCO, in shuffled
  batches and in batches of similar shapes.
- fill: the share of `batch_tokens` that samples use, for lengths spread evenly from 1 to 1,000.

Writes benchmarks/results/mixing.json.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.record import RESULTS, write_result
from penstock.pipeline.plan import (
    Aspects,
    AspectSettings,
    BucketPlan,
    Plan,
    World,
    choose_lane_order,
    cut_by_tokens,
    default_lanes,
    default_window,
    partners,
    rank_slots,
    window_of,
)
from penstock.readers import Contents
from penstock.readers.fieldtypes import Schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

SORTED_SAMPLES, SORTED_BATCHES = 10**6, (1024, 4096, 8192)
SORTED = ((100, 10), (1000, 10), (1000, 1000), (4000, 10), (4000, 1000))  # shards, classes
# name, shards, units of a shard, rows of a unit, decoded bytes of a unit, samples of a rank's batch
UNITS = (
    ("row groups of 100, 11 MB", 2_560, 5, 100, 11e6, 64),
    ("chunks of 8 samples of 49 kB", 936, 171, 8, 8 * 49e3, 64),
    ("chunks of 1 sample of 49 kB", 200, 1368, 1, 49e3, 64),
    ("chunks of 8 samples, 180 MB", 2_000, 1, 8, 180e6, 4),
)
PACK = ("a pack of 600 samples a shard", 2_000, 600, 64)
WORLDS = (1, 8)
ASSIGNMENTS, RANKS_A_NODE, LANE_BYTES = 20, 8, 10**9
COCO_IMAGES, COCO_BATCH, COCO_RANKS = 20_000, 64, 8
LONGEST, FILL_POOLS = 1_000, 20


# -- sorted data


def label_variance(plan: Plan, labels: Ints, size: int, *, epochs: int = 2) -> tuple[float, float]:
    """Return the variance of the labels' counts in a batch, and how often partners have the same
    label, both over those of a full shuffle."""
    places = range(0, plan.samples // size * size, size)
    starts = np.cumsum(plan.sizes) - plan.sizes
    shares = np.bincount(labels) / plan.samples
    spread = wanted = alike = 0.0
    for epoch in range(epochs):
        for position in places:
            rows = plan.places(epoch, position, size, low=0, high=size).rows
            found = labels[starts[rows[:, 0]] + rows[:, 1]]
            counts = np.bincount(found, minlength=len(shares))
            spread += float(((counts - size * shares) ** 2).sum())
            left = (plan.samples - size) / (plan.samples - 1)
            wanted += float((size * shares * (1 - shares) * left).sum())
            other = partners(np.arange(size), position=0, size=size, lanes=plan.lanes)
            alike += float(np.mean(found == found[other]))
    return spread / wanted, alike / (epochs * len(places)) / float((shares**2).sum())


def sorted_data(samples: int = SORTED_SAMPLES) -> list[dict[str, Any]]:
    """Return one row for each number of shards and of classes."""
    rows = []
    for shards, classes in SORTED:
        mean = samples // shards
        sizes = np.random.default_rng(1).integers(mean // 2, mean * 3 // 2, shards)
        row: dict[str, Any] = {"shards": shards, "classes": classes, "variance": [], "partners": []}
        for size in SORTED_BATCHES:
            lanes = default_lanes(size, shards)
            window = default_window(shards, lanes, global_batch=size, icc=1.0, shuffled=False)
            plan = Plan(sizes, seed=3, lanes=lanes, window=window)
            labels = np.sort(np.arange(plan.samples) % classes)
            variance, alike = label_variance(plan, labels, size)
            row["variance"].append(variance)
            row["partners"].append(alike)
        rows.append(row)
    return rows


# -- units


def contents_of_units(shards: int, units: int, rows: int, *, unit_bytes: float = 0.0) -> Contents:
    """Return a dataset of shards of units of rows, without files."""
    return Contents(
        schema=Schema({}),
        sizes=np.full(shards, units * rows),
        shard_bytes=np.full(shards, 2**26),
        id_end=shards * units * rows,
        fingerprint="",
        icc=None,
        shuffled=False,
        images={},
        files=shards,
        is_file_per_sample=False,
        units=[np.full(units, rows)] * shards,
        unit_bytes=unit_bytes,
    )


def walked(plan: Plan, *, batch: int, world: int, units: int, rows: int) -> dict[str, float]:
    """Return what the rank in the middle sees in an epoch.

    units: of a shard. rows: samples of a unit.
    """
    size = batch * world
    low, high = rank_slots(World(world // 2, world), size)
    begun = np.full(len(plan.sizes) * units, -1)
    ended = np.full(len(plan.sizes) * units, -1)
    distinct = pairs = 0.0
    steps = range(plan.samples // size)
    for step in steps:
        found = plan.places(0, step * size, size, low=low, high=high).rows
        unit, counts = np.unique(found[:, 0] * units + found[:, 1] // rows, return_counts=True)
        distinct += len(unit)
        pairs += float((counts * (counts - 1)).sum()) / (batch * (batch - 1))
        begun[unit] = np.where(begun[unit] < 0, step, begun[unit])
        ended[unit] = step
    read = begun >= 0
    changes = np.bincount(begun[read], minlength=len(steps))
    changes -= np.bincount(ended[read], minlength=len(steps))  # not kept after its last batch
    return {
        "units_of_a_batch": distinct / len(steps),
        "pairs_of_one_unit": pairs / len(steps),
        "kept_units": float(np.cumsum(changes).max()) if rows > 1 else 0.0,
    }


def decode_units() -> list[dict[str, Any]]:
    """Return one row for each kind of units and number of ranks; a pack, for comparison, has
    shards in their place."""
    found = []
    for name, shards, units, rows, unit_bytes, batch in UNITS:
        what = contents_of_units(shards, units, rows, unit_bytes=unit_bytes)
        for world in WORLDS:
            lanes = default_lanes(batch * world, shards)
            every = shards * units
            windows = {
                "default": window_of(what, lanes, global_batch=batch * world),
                "wide": math.ceil(10 * math.sqrt(every) / lanes),
            }
            row: dict[str, Any] = {"name": name, "ranks": world, "batch": batch, "all": every}
            for which, window in windows.items():
                plan = Plan(what.sizes, seed=1, lanes=lanes, window=window, units=what.units)
                seen = walked(plan, batch=batch, world=world, units=units, rows=rows)
                kept = seen.pop("kept_units") * unit_bytes
                row[which] = {"open": window * lanes, **seen, "kept_bytes": kept}
            found.append(row)
    name, shards, rows, batch = PACK
    for world in WORLDS:
        size = batch * world
        lanes = default_lanes(size, shards)
        window = default_window(shards, lanes, global_batch=size, icc=0.0, shuffled=True)
        plan = Plan(np.full(shards, rows), seed=1, lanes=lanes, window=window)
        seen = walked(plan, batch=batch, world=world, units=1, rows=rows)
        seen.pop("kept_units")
        row = {"name": name, "ranks": world, "batch": batch, "all": shards}
        found.append(row | {"default": {"open": window * lanes, **seen}})
    return found


# -- the lane order


def _shares(nodes: int, lanes: int) -> Floats:
    """Return the part of each place that each node reads, shape (nodes, lanes)."""
    ends = np.arange(1, nodes + 1)[:, None] / nodes
    place = np.arange(lanes)[None] / lanes
    low = np.maximum(ends - 1 / nodes, place)
    part: Floats = np.maximum(0.0, np.minimum(ends, place + 1 / lanes) - low)
    return part * lanes


def _held(nodes: int, lanes: int) -> Ints:
    """Return the bytes that each node holds after an epoch with lane 0 first."""
    return np.where(_shares(nodes, lanes) > 1e-9, LANE_BYTES, 0)


def _reassigned(before: int, now: int, lanes: int) -> Iterator[Ints]:
    """Yield what nodes hold if `now` nodes follow `before` ones, in any order; nodes that are new
    hold nothing."""
    full = _held(before, lanes)
    for seed in range(ASSIGNMENTS):
        held = np.zeros((now, lanes), np.int64)
        for node, old in enumerate(np.random.default_rng(seed).permutation(max(before, now))[:now]):
            if old < before:
                held[node] = full[old]
        yield held


def _one_lost(before: int, lanes: int) -> Iterator[Ints]:
    full = _held(before, lanes)
    yield from (np.delete(full, lost, axis=0) for lost in range(before))


def _one_empty(nodes: int, lanes: int) -> Iterator[Ints]:
    for seed, held in enumerate(_reassigned(nodes, nodes, lanes)):
        held[seed % nodes] = 0
        yield held


CHANGES: dict[str, tuple[Callable[[], Iterator[Ints]], ...]] = {
    "ranks reassigned on 8 nodes, 256 lanes": (lambda: _reassigned(8, 8, 256),),
    "ranks reassigned on 32 nodes, 1,024 lanes": (lambda: _reassigned(32, 32, 1024),),
    "8 to 7 nodes (any is lost, the others keep their order), 256 lanes": (
        lambda: _one_lost(8, 256),
    ),
    "32 to 31 nodes, 1,024 lanes": (lambda: _one_lost(32, 1024),),
    "32 to 31 nodes, 256 lanes": (lambda: _one_lost(32, 256),),
    "8 nodes reassigned, an empty one among them, 256 lanes": (lambda: _one_empty(8, 256),),
    "8 to 4 nodes, reassigned, 256 lanes": (lambda: _reassigned(8, 4, 256),),
    "4 to 8 nodes, reassigned, 256 lanes": (lambda: _reassigned(4, 8, 256),),
    "16 to 32 nodes and 32 to 16, reassigned, 1,024 lanes": (
        lambda: _reassigned(16, 32, 1024),
        lambda: _reassigned(32, 16, 1024),
    ),
}


def lane_orders() -> list[dict[str, Any]]:
    """Return one row for each change of nodes."""
    rows = []
    for name, changes in CHANGES.items():
        chosen, first = list[float](), list[float]()
        for change in changes:
            for held in change():
                nodes, lanes = held.shape
                choice = choose_lane_order(
                    held, nodes=[RANKS_A_NODE] * nodes, last=None, lanes=lanes
                )
                total = lanes * LANE_BYTES
                chosen.append(choice.chosen / total)
                first.append(float((_shares(nodes, lanes) * held).sum()) / total)
        rows.append({"change": name, "chosen": min(chosen), "lane_0_first": float(np.mean(first))})
    return rows


# -- similar samples


def coco_sizes(count: int) -> Ints:
    """Return heights and widths as common in COCO: int64, (count, 2)."""
    rng = np.random.default_rng(0)
    common = np.array([(480, 640), (427, 640), (640, 480), (640, 427), (375, 500), (500, 375)])
    found = common[rng.choice(6, count, p=[0.36, 0.26, 0.13, 0.09, 0.11, 0.05])]
    rare = rng.random(count) < 0.2  # any side from 300 to 640, and one of 640
    sides = np.stack([rng.integers(300, 641, count), np.full(count, 640)], axis=1)
    is_tall = rng.random(count) < 0.3
    sides[is_tall] = sides[is_tall, ::-1]
    return np.where(rare[:, None], sides, found)


def padding(batch: int, ranks: int) -> dict[str, dict[str, float]]:
    """Return the share of pixels that are padding, by resize, then by kind of batch."""
    rows = 500
    shards = COCO_IMAGES // rows
    dims = coco_sizes(COCO_IMAGES)
    plan = Plan([rows] * shards, seed=1, lanes=8, window=8)
    aspects = Aspects(lambda shard: dims[shard * rows : (shard + 1) * rows].astype(np.int32))
    similar = BucketPlan(plan, AspectSettings.of("image", batch), aspects, seed=1)
    resizes = {
        "shorter=800, max_size=1333": np.minimum(800 / dims.min(axis=1), 1333 / dims.max(axis=1)),
        "LongestSide(640)": 640 / dims.max(axis=1),
    }
    found: dict[str, dict[str, float]] = {}
    for resize, scale in resizes.items():
        sides = np.rint(dims * scale[:, None])
        found[resize] = {}
        for name, each in (("shuffled", plan), ("similar", similar)):
            used = held = 0.0
            for at in range(0, each.samples - batch, batch):
                for rank in range(ranks):
                    low, high = rank_slots(World(rank, ranks), batch)
                    mine = each.places(0, at, batch, low=low, high=high).rows
                    own = sides[mine[:, 0] * rows + mine[:, 1]]
                    used += float(own.prod(axis=1).sum())
                    held += float(own.max(axis=0).prod()) * len(own)
            found[resize][name] = 1 - used / held
    return found


def fill() -> dict[str, Any]:
    """Return how full batches are: of padded ones with 131 samples the share that isn't padding,
    sorted by length and shuffled; of bins the share of their tokens, by samples of a bin."""
    rng = np.random.default_rng(0)
    padded, shuffled = list[float](), list[float]()
    for _ in range(FILL_POOLS):
        lengths = rng.integers(1, LONGEST + 1, 64 * 131)
        shuffled += [float(one.mean() / one.max()) for one in np.split(lengths, 64)]
        order, ends = cut_by_tokens(lengths, tokens=131 * 500, is_padded=True, ranks=1)
        for batch in np.split(lengths[order], ends[:-1]):
            padded.append(float(batch.mean() / batch.max()))
    bins: dict[str, float] = {}
    for samples in (10, 20, 60, 160):
        tokens, used = samples * 500 * 8, list[float]()
        for _ in range(FILL_POOLS):
            lengths = rng.integers(1, LONGEST + 1, 64 * 8 * samples)
            order, ends = cut_by_tokens(lengths, tokens=tokens, is_padded=False, ranks=8, bins=8)
            used += [float(b.sum() / tokens) for b in np.split(lengths[order], ends[:-1])]
        bins[str(samples)] = float(np.mean(used))
    return {"padded": float(np.mean(padded)), "shuffled": float(np.mean(shuffled)), "bins": bins}


def main(argv: list[str] | None = None) -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.mixing", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    result = {
        "sorted": sorted_data(),
        "units": decode_units(),
        "lane_order": lane_orders(),
        "padding": padding(COCO_BATCH, COCO_RANKS),
        "fill": fill(),
    }
    for name, value in result.items():
        for line in value if isinstance(value, list) else [value]:
            print(name, line)
    write_result("mixing", result, folder=options.results)


if __name__ == "__main__":
    main()
