"""Plan which sample is packed into which shard, from names and sizes, before any data is read.

So every rank knows the entire plan, a killed run can resume, and the result depends on neither. Bad
samples are left out of their shard, and no other sample moves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import keyed_hash
from penstock.readers.formats import Grouping, part_bounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.formats import Candidates

    Ints = NDArray[np.int64]

WINDOW_BYTES = 2**29
"""The bytes of samples in chunks that a shuffled pack mixes at a time: 8 shards of the default
size. It is the same on every machine, because ranks must agree. Decoded chunks may use more memory
if there is more."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedShard:
    """A shard of a pack before it is written. positions: of its samples in the source. source_ids:
    their ids in the source's index if no file were bad. Both are int64, shape (n,)."""

    number: int
    positions: Ints
    source_ids: Ints


PackPlan = list[PlannedShard]
"""The shards of a pack, by number."""


def _planned(grouping: Grouping, source_ids: Ints) -> PackPlan:
    groups = enumerate(map(grouping.positions, range(grouping.shards)))
    return [PlannedShard(number, mine, source_ids[mine]) for number, mine in groups]


def plan_candidates(
    candidates: Candidates, *, shuffle: bool, seed: int, shard_bytes: int
) -> PackPlan:
    """Plan a pack of data that has no index. Unshuffled, the ids are those of its index; the shards
    are those of its index too if these have the same size."""
    grouping = candidates.shards
    order = grouping.order
    source_ids = np.empty(len(order), np.int64)
    source_ids[order] = np.arange(len(order))
    if shuffle or shard_bytes != candidates.shard_bytes:
        order = order[shuffled(len(order), seed)] if shuffle else order
        grouping = cut_evenly(order, candidates.sizes, shard_bytes)
    return _planned(grouping, source_ids)


def plan_samples(
    sizes: Ints,
    *,
    shuffle: bool,
    seed: int,
    shard_bytes: int,
    units: Sequence[Ints] | None = None,
    window_bytes: int = WINDOW_BYTES,
    source_ids: Ints | None = None,
) -> PackPlan:
    """Plan a pack of samples. If they lie in decode units, the units are shuffled, then the samples
    of a window of units, so that each unit is decoded once and at most one window is in memory.

    sizes: bytes, int64, shape (n,). units: rows of each, by shard. window_bytes: of the units that
    are mixed. source_ids: of the samples, by position; None means the positions.
    """
    ids = order = np.arange(len(sizes), dtype=np.int64)
    if shuffle and units is not None:
        windows = _windows(np.concatenate(list(units)), sizes, seed, window_bytes)
        order = np.lexsort((keyed_hash(seed, ids), windows)).astype(np.int64)
    elif shuffle:
        order = shuffled(len(sizes), seed)
    grouping = cut_evenly(order, sizes, shard_bytes)
    return _planned(grouping, ids if source_ids is None else source_ids)


def _windows(rows: Ints, sizes: Ints, seed: int, window_bytes: int) -> Ints:
    """Return the number of each sample's window. rows: of each unit."""
    order = shuffled(len(rows), seed)
    before = np.concatenate(([0], np.cumsum(sizes)))
    unit_bytes = np.diff(before[np.concatenate(([0], np.cumsum(rows)))])[order]
    cuts = part_bounds(unit_bytes, target_bytes=window_bytes)
    window = np.empty(len(rows), np.int64)
    window[order] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    return np.repeat(window, rows)


def shuffled(count: int, seed: int) -> Ints:
    """Return a permutation of range(count), int64, from a keyed hash, so that it doesn't depend on
    the version of numpy."""
    keys = keyed_hash(seed, np.arange(count, dtype=np.int64))
    return np.argsort(keys, kind="stable").astype(np.int64)


def cut_evenly(order: Ints, sizes: Ints, shard_bytes: int) -> Grouping:
    """Cut a sequence of samples into ceil(total / shard_bytes) shards of about equal bytes, or
    fewer if samples are larger than a shard. order: positions in sizes, int64, shape (n,)."""
    before = np.concatenate(([0], np.cumsum(sizes[order], dtype=np.int64)))
    total = int(before[-1])
    count = max(1, -(-total // shard_bytes))
    # Python ints: k * total passes 2^63 for large sets.
    targets = np.array([-(-k * total // count) for k in range(1, count)], np.int64)
    cuts = np.searchsorted(before[:-1], targets, side="left")
    bounds = np.unique(np.concatenate(([0], cuts, [len(order)]))).astype(np.int64)
    return Grouping(order=order, bounds=bounds)
