"""Agree on the lane order of a job: which rank reads which lanes, by what the nodes' caches hold.

The first process of each node publishes how much of each group of lanes its cache holds. Rank 0
chooses the order by which the nodes hold most of what they will read; if none gains anything, it
keeps the order that the job has. The contents of a global batch stay the same.
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
from penstock.pipeline.members.handshake import EXCHANGE_TIMEOUT_S, ranks_words
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
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import Cursor, JobOrder, World

    Ints = NDArray[np.int64]

log = logging.getLogger("penstock")

_TOLD_AFTER_S = 60.0  # then a rank says what it waits for
_ANSWER_SPARE_S = 30.0  # beyond rank 0's own limit, so that its reason is heard

_ALL, _ANSWER = "all", "answer"
_REMEDY = (
    "All ranks decide together which of them reads what of each batch, when the first pass over a "
    "loader begins: build and iterate the same loaders on every rank, and load the same state; for "
    "a loader that is one rank's own pass world=World(0, 1). Where ranks start that far apart, "
    'raise timeout=; order=Order(slots="rank") asks nobody.'
)


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


def exchange(
    store: JobStore,
    world: World,
    word: ProcessReport,
    *,
    groups: int,
    decide: Callable[[Nodes | None], dict[str, Any]],
    timeout_s: float = EXCHANGE_TIMEOUT_S,
    refusals: RankRefusals | None = None,
) -> dict[str, Any]:
    """Say this process's word, and wait for the answer: what rank 0 decided, as JSON types. Ranks
    in messages are processes, which are more where several share one.

    store: for this one exchange. groups: of lanes. decide: called on rank 0 alone, with None where
    the ranks of a node aren't numbered in a row. refusals: of ranks that may not come.

    Raises StalledError on each rank that waits where some don't come within the time limit, naming
    them; RankFailedError where one was refused and doesn't come; JobStoreError where the store
    doesn't answer; PlanError for a word that can't be read.
    """
    store.set(_word(world.process), word.text())
    if store.add("came", 1) == world.processes:
        store.set(_ALL, "1")
    if world.process == 0:
        asked = _answer(store, world, groups, decide, timeout_s=timeout_s, refusals=refusals)
        store.set_once(_ANSWER, asked)
    elif not _wait(store, _ANSWER, world, timeout_s=timeout_s + _ANSWER_SPARE_S, refusals=refusals):
        if refusals is not None and (error := refusals.error()) is not None:
            raise error
        missing = _missing(store, world)
        raise _stalled(world, missing or [0], timeout_s=timeout_s + _ANSWER_SPARE_S)
    told = json.loads(store.get(_ANSWER) or "{}")
    if "refused" in told:
        raise RankFailedError(str(told["refused"]), rank=int(told["rank"]))
    if (missing := told.get("missing")) is not None:
        raise _stalled(world, missing, timeout_s=timeout_s)
    if "failed" in told:
        raise PlanError(f"The ranks can't decide who reads what: {told['failed']}")
    if "decision" not in told:
        raise JobStoreError("The process group's store lost what rank 0 told: look at rank 0.")
    decision: dict[str, Any] = told["decision"]
    return decision


def give_up(store: JobStore, reason: str) -> None:
    """Tell those that wait, or will, that this rank doesn't come. Raises JobStoreError."""
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
    """What rank 0 publishes: the decision, or who is missing."""
    if not _wait(store, _ALL, world, timeout_s=timeout_s, refusals=refusals):
        if refusals is not None and (error := refusals.error()) is not None:
            return json.dumps({"refused": str(error), "rank": error.rank})
        missing = _missing(store, world)
        if missing:
            return json.dumps({"missing": missing})
    if (given_up := store.get(_ANSWER)) is not None:
        return given_up
    texts = store.get_all([_word(process) for process in range(world.processes)])
    try:
        words = [ProcessReport.parse(text, groups=groups) for text in texts]
        _check_alike(words)
        nodes = Nodes.of_reports(words, size=world.size, groups=groups)
        return json.dumps({"decision": decide(nodes)})
    except PenstockError as error:  # told to all, and raised on all
        return json.dumps({"failed": str(error)})


def _check_alike(words: Sequence[ProcessReport]) -> None:
    """Raise PlanError unless all go on from the same place with the same order."""
    for word in words:
        if word.goes_on != words[0].goes_on:
            others = [n for n, other in enumerate(words) if other.goes_on == word.goes_on]
            raise PlanError(
                f"{ranks_words(others).capitalize()} would go on from {word.goes_on}, rank 0 from "
                f"{words[0].goes_on}: load the same state on every rank."
            )


def _wait(
    store: JobStore, key: str, world: World, *, timeout_s: float, refusals: RankRefusals | None
) -> bool:
    """Whether a key was told within the time limit; says after a while who is waited for. No longer
    than until a rank's refusal stands."""
    first_s, look = min(_TOLD_AFTER_S, timeout_s), None if refusals is None else refusals.look
    if not store.wait([key], timeout_s=first_s, look=look):
        return True
    if refusals is not None and refusals.error() is not None:
        return False
    if timeout_s > first_s:
        missing = _missing(store, world)
        log.warning(
            "rank %d has waited %.0f s for %s; it waits %.0f s more",
            world.process,
            first_s,
            f"{ranks_words(missing)} to begin a pass"
            if missing
            else "rank 0 to decide who reads what",
            timeout_s - first_s,
        )
    return not store.wait([key], timeout_s=timeout_s - first_s, look=look)


def _missing(store: JobStore, world: World) -> list[int]:
    return [rank for rank in range(world.processes) if store.get(_word(rank)) is None]


def _word(process: int) -> str:
    return f"word-{process}"


def _stalled(world: World, missing: Sequence[int], *, timeout_s: float) -> StalledError:
    return StalledError(
        f"Rank {world.process} of {world.processes} waited {timeout_s:.0f} s for "
        f"{ranks_words(missing)} to begin the first pass over this loader. {_REMEDY}"
    )
