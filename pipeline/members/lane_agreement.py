"""Agree on a job's lane order: which rank reads which lanes, by what the nodes' caches hold.

Every process publishes a report through the job's store; the first process of each node adds how
many bytes of each group of lanes its cache holds. Rank 0 waits for all reports, chooses the lane
order with which the nodes hold most of what they will read, and publishes it once. If no order
gains anything, it keeps the job's order. The contents of a global batch stay the same.

All ranks follow the published order. A rank that continued alone would read other samples than the
others assume, so a rank that doesn't report is an error on all of them, which names it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import TYPE_CHECKING, Any

from penstock.cache import JobStoreError, PenstockError, PlanError, RankFailedError, StalledError
from penstock.cache.base import format_size
from penstock.cache.disk import boot_id
from penstock.pipeline.members.handshake import EXCHANGE_TIMEOUT_S, format_ranks
from penstock.pipeline.plan import (
    LaneGroups,
    LaneOrder,
    Nodes,
    ProcessReport,
    choose_lane_order,
    held_bytes_of_lanes,
    make_plan,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.cache import JobStore
    from penstock.cache.disk import DiskCache
    from penstock.pipeline.members.handshake import RankRefusals
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Cursor, JobOrder, World

    Ints = NDArray[np.int64]

log = logging.getLogger("penstock")

_WARN_AFTER_S = 60.0  # a rank that has waited this long logs the ranks that it waits for
ANSWER_SPARE_S = 30.0  # beyond rank 0's own limit, so that rank 0 can still publish its reason

_ALL, _ANSWER = "all", "answer"
_REMEDY = (
    "When the first pass over a loader begins, all ranks decide together which of them reads which "
    "part of each batch. Build and iterate the same loaders on every rank, and load the same "
    "state; for a loader that only one rank has, pass world=World(0, 1). If ranks start that far "
    'apart, raise timeout=, or pass order=Order(slots="rank"), with which ranks don\'t wait.'
)


def agreed_lane_order(
    store: JobStore,
    order: JobOrder,
    options: LoaderOptions,
    at: Cursor,
    *,
    refusals: RankRefusals | None = None,
) -> LaneOrder | None:
    """Return the lane order that all ranks follow; None for the identity.

    store: for this agreement alone. order: with the latest lane order. at: where the job continues;
    both are the same on every rank. refusals: of these ranks. Raises what `exchange` raises, and
    PlanError if the answer can't be read.
    """
    world, lanes, last = options.world, order.settings.lanes, order.lane_order
    remote = order.source.remote_shards
    report = ProcessReport(
        rank=world.rank,
        cache=_cache_name(() if remote is None else remote.caches, world.process),
        resume_point=_resume_place(order, at),
        held=held_of_groups(order, at.epoch) if world.is_first_on_node else None,
    )
    answer = exchange(
        store,
        world,
        report,
        groups=len(LaneGroups(lanes)),
        decide=lambda nodes: _decide(nodes, last, ranks=world.size, lanes=lanes),
        timeout_s=options.timeout or EXCHANGE_TIMEOUT_S,
        refusals=refusals,
    )
    try:
        decided = LaneOrder.parse(answer["lane_order"], lanes=lanes)
        held, before = int(answer["held"]), int(answer["before"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"The lane order that rank 0 published can't be read ({error}). Run the same release "
            "of Penstock on every rank."
        ) from None
    if world.is_first_on_node:
        _log_lane_order(decided, last, held_bytes=held, before_bytes=before)
    return None if decided.is_identity else decided


def held_of_groups(order: JobOrder, epoch: int) -> Ints:
    """Return the bytes of each group of lanes that this node's caches hold: int64, (groups,)."""
    remote, contents = order.source.remote_shards, order.source.contents
    held = contents.shard_bytes * 0
    if remote is not None:
        held = (contents.shard_bytes * remote.held_shares()).astype(held.dtype)
    return held_bytes_of_lanes(make_plan(contents, order.settings), epoch, held)


def _decide(
    nodes: Nodes | None, last: LaneOrder | None, *, ranks: int, lanes: int
) -> dict[str, Any]:
    """Return what rank 0 publishes: the lane order, and the bytes that nodes hold of what they will
    read, with this order and with the latest one."""
    if nodes is None:
        log.info("the ranks of a node aren't numbered consecutively, so the lane order stays")
        stays = last or LaneOrder(tuple(range(lanes)))
        return {"lane_order": stays.text, "held": 0, "before": 0}
    firsts, held = nodes.shares()
    counts = [end - first for first, end in zip(firsts, (*firsts[1:], ranks), strict=True)]
    choice = choose_lane_order(held, nodes=counts, last=last, lanes=lanes)
    return {"lane_order": choice.order.text, "held": choice.chosen, "before": choice.last}


def _log_lane_order(
    decided: LaneOrder, last: LaneOrder | None, *, held_bytes: int, before_bytes: int
) -> None:
    """Log, once per node, that ranks read other slots than their numbers imply."""
    if decided.is_identity and last is None:
        return
    stays = decided == last or (last is None and decided.is_identity)
    log.info(
        "slots follow the data: %s; nodes hold %s of what they will read%s. Global batches stay "
        "the same, but other ranks read parts of them, so sums of floats may differ slightly",
        "the job keeps its lane order" if stays else "the job changes its lane order",
        format_size(held_bytes),
        "" if stays else f", instead of {format_size(before_bytes)}",
    )


def _resume_place(order: JobOrder, at: Cursor) -> str:
    """Return the place and the settings with which this rank continues, as text to show and to
    compare."""
    last = order.lane_order
    lanes = (
        hashlib.sha256(last.text.encode()).hexdigest()[:12] if last is not None else "as numbered"
    )
    coming = order.walk.schedule.entries[order.walk.schedule.history :]
    return (
        f"epoch {at.epoch}, position {at.position} with global batches of "
        f"{', '.join(str(size) for _, size in coming[:4])} (lane order {lanes})"
    )


def _cache_name(caches: Sequence[DiskCache], process: int) -> str:
    """Return a short name of the caches' folders, the same for all processes that share them.

    A process without a cache counts as a node of its own.
    """
    places = []
    for cache in caches:
        if cache.can_be_used:
            found = os.stat(cache.path)
            places.append(f"{found.st_dev}:{found.st_ino}")
    if not places:
        return f"process {process}"
    return hashlib.sha256(f"{boot_id()} {sorted(places)}".encode()).hexdigest()[:24]


def exchange(
    store: JobStore,
    world: World,
    report: ProcessReport,
    *,
    groups: int,
    decide: Callable[[Nodes | None], dict[str, Any]],
    timeout_s: float = EXCHANGE_TIMEOUT_S,
    refusals: RankRefusals | None = None,
) -> dict[str, Any]:
    """Publish this process's report, wait for rank 0's decision, and return it as JSON types.

    Ranks in messages are process numbers, because several processes may share a rank. store: for
    this exchange alone. groups: the number of groups of lanes. decide: called on rank 0 alone, with
    None if the ranks of a node aren't numbered consecutively. refusals: of these ranks.

    Raises StalledError, which names the missing ranks, on each rank that waits past the time limit;
    RankFailedError if one of them published a refusal; JobStoreError if the store doesn't answer;
    PlanError if a report can't be read.
    """
    store.set(_report_key(world.process), report.text())
    if store.add("came", 1) == world.processes:
        store.set(_ALL, "1")
    if world.process == 0:
        text = _answer(store, world, groups, decide, timeout_s=timeout_s, refusals=refusals)
        store.set_once(_ANSWER, text)
    elif not _wait(store, _ANSWER, world, timeout_s=timeout_s + ANSWER_SPARE_S, refusals=refusals):
        if refusals is not None and (error := refusals.error()) is not None:
            raise error
        missing = _missing(store, world)
        raise _stalled(world, missing or [0], timeout_s=timeout_s + ANSWER_SPARE_S)
    answer = json.loads(store.get(_ANSWER) or "{}")
    if "refused" in answer:
        raise RankFailedError(str(answer["refused"]), rank=int(answer["rank"]))
    if (missing := answer.get("missing")) is not None:
        raise _stalled(world, missing, timeout_s=timeout_s)
    if "failed" in answer:
        raise PlanError(f"The ranks can't decide which rank reads what: {answer['failed']}")
    if "decision" not in answer:
        raise JobStoreError(
            "The process group's store lost the decision of rank 0. See the output of rank 0."
        )
    decision: dict[str, Any] = answer["decision"]
    return decision


def give_up(store: JobStore, reason: str) -> None:
    """Publish that this rank won't come, so that no rank waits for it. Raises JobStoreError."""
    store.set_once(_ANSWER, json.dumps({"failed": reason}))
    store.set(_ALL, "1")


def _answer(
    store: JobStore,
    world: World,
    groups: int,
    decide: Callable[[Nodes | None], dict[str, Any]],
    *,
    timeout_s: float,
    refusals: RankRefusals | None,
) -> str:
    """Return what rank 0 publishes: the decision, or which ranks are missing."""
    if not _wait(store, _ALL, world, timeout_s=timeout_s, refusals=refusals):
        if refusals is not None and (error := refusals.error()) is not None:
            return json.dumps({"refused": str(error), "rank": error.rank})
        missing = _missing(store, world)
        if missing:
            return json.dumps({"missing": missing})
    if (given_up := store.get(_ANSWER)) is not None:
        return given_up
    texts = store.get_all([_report_key(process) for process in range(world.processes)])
    try:
        reports = [ProcessReport.parse(text, groups=groups) for text in texts]
        _check_same_place(reports)
        nodes = Nodes.of_reports(reports, size=world.size, groups=groups)
        return json.dumps({"decision": decide(nodes)})
    except PenstockError as error:  # published, and raised on every rank
        return json.dumps({"failed": str(error)})


def _check_same_place(reports: Sequence[ProcessReport]) -> None:
    """Raise PlanError unless all ranks continue from the same place with the same order."""
    first = reports[0].resume_point
    for report in reports:
        if report.resume_point != first:
            others = [
                n for n, other in enumerate(reports) if other.resume_point == report.resume_point
            ]
            raise PlanError(
                f"{format_ranks(others).capitalize()} would continue from {report.resume_point}, "
                f"rank 0 from {first}. Load the same state on every rank."
            )


def _wait(
    store: JobStore, key: str, world: World, *, timeout_s: float, refusals: RankRefusals | None
) -> bool:
    """Wait for a key, and return True if it was published within the time limit.

    After a while, logs which ranks are missing. Ends early if a rank's refusal stands.
    """
    first_s, look = min(_WARN_AFTER_S, timeout_s), None if refusals is None else refusals.look
    if not store.wait([key], timeout_s=first_s, look=look):
        return True
    if refusals is not None and refusals.error() is not None:
        return False
    if timeout_s > first_s:
        missing = _missing(store, world)
        log.warning(
            "rank %d has waited %.0f s for %s; it waits at most %.0f s more",
            world.process,
            first_s,
            f"{format_ranks(missing)} to begin a pass"
            if missing
            else "rank 0 to decide which rank reads what",
            timeout_s - first_s,
        )
    return not store.wait([key], timeout_s=timeout_s - first_s, look=look)


def _missing(store: JobStore, world: World) -> list[int]:
    return [n for n in range(world.processes) if store.get(_report_key(n)) is None]


def _report_key(process: int) -> str:
    return f"word-{process}"


def _stalled(world: World, missing: Sequence[int], *, timeout_s: float) -> StalledError:
    return StalledError(
        f"Rank {world.process} of {world.processes} waited {timeout_s:.0f} s for "
        f"{format_ranks(missing)} to begin the first pass over this loader. {_REMEDY}"
    )
