"""Gather one report of each process of a job, decide on rank 0, and publish the decision to all.

Every process publishes its report through the job's store. Rank 0 waits for all of them, makes one
decision and publishes it once; all ranks go by what is published. No rank goes on alone: one that
did so after a while would read other samples than the rest assume. So a rank that doesn't come is
an error on all of them, which names it.

A state that can't be loaded, or a loader that can't be built, is one rank's error, and its user may
go on all the same: with another state, or without one as all others do. So a rank publishes its
refusal, withdraws it when it comes after all, and the others end only if it stands for a while.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from penstock.cache import JobStoreError, PenstockError, PlanError, RankFailedError, StalledError
from penstock.pipeline.plan import Nodes, ProcessReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache import JobStore
    from penstock.pipeline.plan import World

log = logging.getLogger("penstock")

EXCHANGE_TIMEOUT_S = 600.0
"""How long a rank waits for the others at its first batch: as long as NCCL lets a collective wait
unless told, so whoever comes later than that would have ended the job anyway."""

_TOLD_AFTER_S = 60.0  # then a rank says what it waits for
_ANSWER_SPARE_S = 30.0  # beyond rank 0's own limit, so that its reason is heard

_ALL, _ANSWER = "all", "answer"
_MOST_RUNS = 12  # of missing ranks, that a message names
_REMEDY = (
    "All ranks decide together which of them reads what of each batch, when the first pass over a "
    "loader begins: build and iterate the same loaders on every rank, and load the same state; for "
    "a loader that is one rank's own pass world=World(0, 1). Where ranks start that far apart, "
    'raise timeout=; order=Order(slots="rank") asks nobody.'
)


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


def ranks_words(ranks: Sequence[int]) -> str:
    """Some ranks for people: "ranks 0, 4 to 7 and 12"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(low) if low == high else f"{low} to {high}" for low, high in runs]
    shown = words if len(words) <= _MOST_RUNS else [*words[: _MOST_RUNS - 1], "others"]
    listed = ", ".join(shown[:-1]) + (" and " if len(shown) > 1 else "") + shown[-1]
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


STANDS_AFTER_S = 3.0
"""A refusal that was seen and still stands so much later ends who waits: time for a second try."""

_MOST_HEARD = 64  # refusals that are looked at
_MOST_REASON = 2000  # characters that the other ranks are told


class RankRefusals:
    """Speaks of refusals with the ranks of one loader. Every method raises JobStoreError.

    was_refused: this rank was; then it goes by no other's, as where all were all go on alike.
    """

    def __init__(self, store: JobStore, world: World) -> None:
        """store: the loader's part of the job's."""
        self._store = store
        self._world = world
        self.was_refused = False
        self._seen: set[int] = set()

    def tell(self, reason: str) -> None:
        """Tell that this process was refused what its user asked."""
        self.was_refused = True
        told = {
            "process": self._world.process,
            "rank": self._world.rank,
            "label": self._world.label,
            "reason": reason[:_MOST_REASON],
        }
        self._store.set(_key(self._store.add("refusals", 1)), json.dumps(told))

    def withdraw(self) -> None:
        """Tell that this process goes on after all."""
        for number, told in self._standing():
            if told.get("process") == self._world.process:
                self._store.set(_key(number), "")

    def look(self) -> float | None:
        """Between two waits: how long the next one should be, None for any; 0 where a refusal stood
        for a while, so that waiting has no sense."""
        if self.was_refused:
            return None
        standing = {number for number, _ in self._standing()}
        if standing & self._seen:
            return 0.0
        self._seen = standing
        return STANDS_AFTER_S if standing else None

    def error(self) -> RankFailedError | None:
        """What a rank raises that waits, of the first refusal that `look` saw stand."""
        for number, told in self._standing():
            if number in self._seen and not self.was_refused:
                label = str(told.get("label", "another rank")).capitalize()
                return RankFailedError(
                    f"{label} was refused and hasn't come to its first batch, so every rank stops "
                    f"here: {told.get('reason')}",
                    rank=int(told.get("rank", 0)),
                )
        return None

    def _standing(self) -> list[tuple[int, dict[str, Any]]]:
        count = min(self._store.add("refusals", 0), _MOST_HEARD)
        told = ((number, self._store.get(_key(number))) for number in range(1, count + 1))
        return [(number, json.loads(text)) for number, text in told if text]


def _key(number: int) -> str:
    return f"refusal-{number}"
