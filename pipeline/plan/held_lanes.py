"""How many bytes of each group of lanes a cache holds, from those of each shard. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.errors import PlanError
from penstock.pipeline.plan.lane_order import LaneGroups

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.plan.order import Plan

    Ints = NDArray[np.int64]


def held_bytes_of_lanes(plan: Plan, epoch: int, held: Ints) -> Ints:
    """Bytes of each group of lanes that somebody holds, in an epoch (which says something only
    where `reshuffle` moves shards).

    held: bytes of each shard that are there, int64, shape (shards,). A shard that lies in two lanes
    counts for both by its rows. Returns int64, shape (groups,). Raises PlanError for the bytes of
    another number of shards.
    """
    if held.shape != plan.sizes.shape:
        raise PlanError(f"held: got shape {held.shape}, wanted {plan.sizes.shape}: bytes a shard.")
    pieces = plan.pieces(epoch)
    groups = LaneGroups(plan.lanes)
    strand = np.repeat(np.arange(plan.strands), pieces.strand_pieces)
    group = strand % plan.lanes // groups.size
    size, there = plan.sizes[pieces.shard], held[pieces.shard]
    # there · rows // size without leaving 64 bits.
    part = there // size * pieces.rows + there % size * pieces.rows // size
    lanes = np.zeros(len(groups), dtype=np.int64)
    np.add.at(lanes, group, part)
    return lanes
