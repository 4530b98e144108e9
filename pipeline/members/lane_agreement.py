"""Agree on a job's lane order: which rank reads which lanes, by what the nodes' caches hold.

Every process publishes a report; the first process of each node adds how many bytes of each group
of lanes its cache holds. Rank 0 chooses the lane order with which the nodes hold most of what they
will read, and all ranks follow it. If no order gains anything, the job's order stays. The contents
of a global batch stay the same.

A rank that continued alone would read other samples than the others assume, so a rank that doesn't
report is an error on all of them, which names it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import TYPE_CHECKING, Any

from penstock.cache import PlanError, format_ranks
from penstock.cache.base import format_size
from penstock.cache.disk import boot_id
from penstock.pipeline.members.job_membership import JobMembership
from penstock.pipeline.plan import (
    LaneGroups,
    LaneOrder,
    ProcessReport,
    choose_lane_order,
    held_bytes_of_lanes,
    make_plan,
    nodes_of_reports,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache.disk import DiskCache
    from penstock.pipeline.members.membership import Membership
    from penstock.pipeline.plan import Cursor, JobOrder

    Ints = NDArray[np.int64]

log = logging.getLogger("penstock")

_REMEDY = (
    "When the first pass over a loader begins, all ranks decide together which of them reads which "
    "part of each batch. Build and iterate the same loaders on every rank, and load the same "
    "state; for a loader that only one rank has, pass world=World(0, 1). If ranks start that far "
    'apart, raise timeout=, or pass order=Order(slots="rank"), with which ranks don\'t wait.'
)


def agreed_lane_order(membership: Membership, order: JobOrder, at: Cursor) -> LaneOrder | None:
    """Wait for all ranks, and return the lane order that they follow; None for the identity.

    order: with the latest lane order. at: where the job continues; both are the same on every rank.
    Raises what `JobMembership.decide` raises, PlanError if the answer can't be read, and what
    reading the cache raises; the other ranks then stop, too.
    """
    world, lanes, last = membership.world, order.settings.lanes, order.lane_order
    if membership.store is None:  # lost since; the membership has reported it
        return last
    assert isinstance(membership, JobMembership)
    try:
        remote = order.source.remote_shards
        report = ProcessReport(
            rank=world.rank,
            cache=_cache_name(() if remote is None else remote.caches, world.process),
            resume_point=_resume_place(order, at),
            held=held_of_groups(order, at.epoch) if world.is_first_on_node else None,
        )
        answer = membership.decide(
            "lanes",
            report.text(),
            lambda texts: _choose(texts, last, ranks=world.size, lanes=lanes),
            purpose="to begin the first pass over this loader",
            remedy=_REMEDY,
        )
        try:
            decided = LaneOrder.parse(answer["lane_order"], lanes=lanes)
            held, before = int(answer["held"]), int(answer["before"])
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"The lane order that rank 0 published can't be read ({error}). Run the same "
                "release of Penstock on every rank."
            ) from None
    except BaseException as error:  # an interrupt too: the other ranks must not wait
        membership.fail(error)
        raise
    if world.is_first_on_node and not (decided.is_identity and last is None):
        stays = decided == last
        log.info(
            "slots follow the data: %s; nodes hold %s of what they will read%s. Global batches "
            "stay the same, but other ranks read parts of them, so sums of floats may differ "
            "slightly",
            "the job keeps its lane order" if stays else "the job changes its lane order",
            format_size(held),
            "" if stays else f", instead of {format_size(before)}",
        )
    return None if decided.is_identity else decided


def held_of_groups(order: JobOrder, epoch: int) -> Ints:
    """Return the bytes of each group of lanes that this node's caches hold: int64, (groups,)."""
    remote, contents = order.source.remote_shards, order.source.contents
    shares = 0 if remote is None else remote.held_shares()
    held = (contents.shard_bytes * shares).astype(contents.shard_bytes.dtype)
    plan = make_plan(contents, order.settings).plan_of(epoch)
    return held_bytes_of_lanes(plan, epoch, held)


def _choose(texts: list[str], last: LaneOrder | None, *, ranks: int, lanes: int) -> dict[str, Any]:
    """Return what rank 0 publishes: the lane order, and the bytes that nodes hold of what they will
    read, with this order and with the latest one.

    texts: the reports of all processes. Raises PlanError if one can't be read, and if ranks
    continue from different places.
    """
    groups = len(LaneGroups(lanes))
    reports = [ProcessReport.parse(text, groups=groups) for text in texts]
    places = [report.resume_point for report in reports]
    for place in places:
        if place != places[0]:
            others = [number for number, other in enumerate(places) if other == place]
            raise PlanError(
                f"{format_ranks(others).capitalize()} would continue from {place}, rank 0 from "
                f"{places[0]}. Load the same state on every rank."
            )
    nodes = nodes_of_reports(reports, size=ranks, groups=groups)
    if nodes is None:
        log.info("the ranks of a node aren't numbered consecutively, so the lane order stays")
        stays = last or LaneOrder.identity(lanes)
        return {"lane_order": stays.text, "held": 0, "before": 0}
    counts, held = nodes
    choice = choose_lane_order(held, nodes=counts, last=last, lanes=lanes)
    return {"lane_order": choice.order.text, "held": choice.chosen, "before": choice.last}


def _resume_place(order: JobOrder, at: Cursor) -> str:
    """Return the place and the settings with which this rank continues, as text to show and to
    compare."""
    last, schedule, lanes = order.lane_order, order.walk.schedule, "as numbered"
    if last is not None:
        lanes = hashlib.sha256(last.text.encode()).hexdigest()[:12]
    sizes = ", ".join(str(size) for _, size in schedule.entries[schedule.history :][:4])
    return (
        f"epoch {at.epoch}, position {at.position} with global batches of {sizes} (lane order "
        f"{lanes})"
    )


def _cache_name(caches: Sequence[DiskCache], process: int) -> str:
    """Return a short name of the caches' folders, the same for all processes that share them.

    A process without a cache counts as a node of its own.
    """
    found = [os.stat(cache.path) for cache in caches if cache.can_be_used]
    if not found:
        return f"process {process}"
    places = sorted(f"{each.st_dev}:{each.st_ino}" for each in found)
    return hashlib.sha256(f"{boot_id()} {places}".encode()).hexdigest()[:24]
