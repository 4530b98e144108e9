"""Agree on the lane order of a job: which rank reads which lanes, by what the nodes' caches hold.

The first process of each node publishes how much of each group of lanes its cache holds. Rank 0
chooses the order by which the nodes hold most of what they will read; if none gains anything, it
keeps the order that the job has. The contents of a global batch stay the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

from penstock.cache import PlanError
from penstock.cache.base import format_size
from penstock.cache.disk import boot_id
from penstock.pipeline.members.rank_exchange import EXCHANGE_TIMEOUT_S, exchange
from penstock.pipeline.plan import (
    LaneGroups,
    LaneOrder,
    ProcessReport,
    choose_lane_order,
    held_bytes_of_lanes,
    make_plan,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache import JobStore
    from penstock.cache.disk import DiskCache
    from penstock.pipeline.members.rank_exchange import RankRefusals
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import Cursor, JobOrder, Nodes

    Ints = NDArray[np.int64]

log = logging.getLogger("penstock")


def agreed_lane_order(
    store: JobStore,
    order: JobOrder,
    options: NativeOptions,
    at: Cursor,
    *,
    refusals: RankRefusals | None = None,
) -> LaneOrder | None:
    """The order of lanes that all ranks go by, None for the identity.

    store: for this one agreement. order: with the last order of lanes. at: where the job goes on;
    both the same on every rank. refusals: of those ranks. Raises what `exchange` raises.
    """
    world, lanes, last = options.world, order.settings.lanes, order.lane_order
    remote = order.source.remote_shards
    word = ProcessReport(
        rank=world.rank,
        cache=_cache_name(() if remote is None else remote.caches, world.process),
        goes_on=_resume_place(order, at),
        held=held_of_groups(order, at.epoch) if world.is_first_on_node else None,
    )
    told = exchange(
        store,
        world,
        word,
        groups=len(LaneGroups(lanes)),
        decide=lambda nodes: _decide(nodes, last, ranks=world.size, lanes=lanes),
        timeout_s=options.timeout_s or EXCHANGE_TIMEOUT_S,
        refusals=refusals,
    )
    try:
        decided = LaneOrder.parse(told["lane_order"], lanes=lanes)
        held, before = int(told["held"]), int(told["before"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"What rank 0 told of the order of lanes can't be read: {error}") from None
    if world.is_first_on_node:
        _log_lane_order(decided, last, held_bytes=held, before_bytes=before)
    return None if decided.is_identity else decided


def held_of_groups(order: JobOrder, epoch: int) -> Ints:
    """Bytes of each group of lanes that this node's caches hold, int64, shape (groups,)."""
    remote, contents = order.source.remote_shards, order.source.contents
    held = contents.shard_bytes * 0
    if remote is not None:
        held = (contents.shard_bytes * remote.held_shares()).astype(held.dtype)
    return held_bytes_of_lanes(make_plan(contents, order.settings), epoch, held)


def _decide(
    nodes: Nodes | None, last: LaneOrder | None, *, ranks: int, lanes: int
) -> dict[str, Any]:
    """What rank 0 publishes: the order, and the bytes that nodes hold of what they read, with it
    and with the last one."""
    if nodes is None:
        log.info("nodes' ranks aren't numbered in a row, so the order of lanes stays")
        stays = last or LaneOrder(tuple(range(lanes)))
        return {"lane_order": stays.text, "held": 0, "before": 0}
    firsts, held = nodes.shares()
    counts = [end - first for first, end in zip(firsts, (*firsts[1:], ranks), strict=True)]
    choice = choose_lane_order(held, nodes=counts, last=last, lanes=lanes)
    return {"lane_order": choice.order.text, "held": choice.chosen, "before": choice.last}


def _log_lane_order(
    decided: LaneOrder, last: LaneOrder | None, *, held_bytes: int, before_bytes: int
) -> None:
    """Say, once a node, that ranks read other slots than their numbers say."""
    if decided.is_identity and last is None:
        return
    stays = decided == last or (last is None and decided.is_identity)
    log.info(
        "slots follow the data: %s; nodes hold %s of what they read, %s. Global batches stay the "
        "same; which rank has which part of them differs, and so may sums of floats",
        "the order of lanes that the job had stays" if stays else "another order of lanes is taken",
        format_size(held_bytes),
        "as before" if stays else f"where it would be {format_size(before_bytes)}",
    )


def _resume_place(order: JobOrder, at: Cursor) -> str:
    """From where and how this rank goes on, for people and for comparing."""
    last = order.lane_order
    lanes = (
        hashlib.sha256(last.text.encode()).hexdigest()[:12] if last is not None else "as numbered"
    )
    coming = order.walk.schedule.entries[order.walk.schedule.history :]
    return (
        f"epoch {at.epoch}, position {at.position} with global batches of "
        f"{', '.join(str(size) for _, size in coming[:4])} (order of lanes {lanes})"
    )


def _cache_name(caches: Sequence[DiskCache], process: int) -> str:
    """What names the folders of caches, the same for all processes that share them, in a short
    text; a process that has none is a node of its own."""
    places = []
    for cache in caches:
        if cache.can_be_used:
            found = os.stat(cache.path)
            places.append(f"{found.st_dev}:{found.st_ino}")
    if not places:
        return f"process {process}"
    return hashlib.sha256(f"{boot_id()} {sorted(places)}".encode()).hexdigest()[:24]
