"""The first batch of a loader, among its ranks: who hasn't come, and who reads what others don't.

Ranks wait for one another where samples are shuffled: all of them train, and what is wrong with
one is an error on each of them before the first step, in which they would wait for it anyway and
hear nothing of the reason. Only rank 0 may be alone, and then it doesn't wait for long. Of a loader
in order any rank may be alone, for all that others know: there the ranks only tell what they read.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from penstock.cache.errors import (
    JobStoreError,
    PenstockError,
    PlanError,
    RankFailedError,
    StalledError,
)
from penstock.pipeline.feed.agreement import Agreement, built_key
from penstock.pipeline.feed.handshake import CUT_TWICE
from penstock.pipeline.feed.node_exchange import EXCHANGE_TIMEOUT_S, ranks_words
from penstock.pipeline.feed.refusals import Refusals

if TYPE_CHECKING:
    from penstock.cache.job_store import JobStore
    from penstock.pipeline.feed.handshake import SharedFacts
    from penstock.pipeline.plan.world import World

log = logging.getLogger("penstock")

MEET_TIMEOUT_S = 5.0
"""How long rank 0 waits where no other rank has built its loader: it may have one alone."""

_TOLD_AFTER_S = 60.0  # then a rank says whom it waits for
_MOST_DATASETS = 64  # of loaders in order, that are compared with
_NAMED = 32  # characters of a dataset's fingerprint in keys, as `join` takes


class Meeting:
    """One loader's ranks at their first batch, and at the first one behind each state.

    The training thread calls. Nothing is asked once the ranks have met.
    """

    def __init__(
        self,
        agreement: Agreement,
        facts: SharedFacts,
        *,
        world: World,
        waits: bool,
        timeout_s: float | None,
    ) -> None:
        """waits: for all ranks, as all of them train. timeout_s: 0 stands for the usual; None: go
        on after a little while, as the ranks may be others again."""
        self._agreement = agreement
        self._facts = facts
        self._world = world
        self._waits = waits
        self._is_brief = timeout_s is None
        self._timeout_s = timeout_s or EXCHANGE_TIMEOUT_S
        self._has_met = False
        store = agreement.store
        self.refusals = None if store is None else Refusals(store, world)

    # -- before

    def arrive(self) -> None:
        """This rank's loader is there, or a state was loaded: tell who waits."""
        self._agreement.arrive(self._world.processes, process=self._world.process)
        self._tell(lambda refusals: refusals.withdraw())
        self._has_met = False

    def refuse(self, reason: str) -> None:
        """Tell who waits that this rank was refused what its user asked."""
        self._tell(lambda refusals: refusals.tell(reason))

    def come_back(self) -> None:
        """A pass begins: what was refused is forgotten."""
        if self.refusals is not None and self.refusals.was_refused:
            self._tell(lambda refusals: refusals.withdraw())

    def compare_state(self, words: str) -> None:
        """A state is about to be loaded, by all ranks: the same. Raises PlanError where it isn't;
        the others then stop at their next batch. words: where and how it goes on."""
        label = self._world.label
        first = json.loads(self._agreement.compare_next(json.dumps([label, words])))
        if first[1] == words:
            return
        text = (
            f"{str(first[0]).capitalize()} loaded a state of {first[1]}; {label} one of {words}: "
            "samples would be lost or read twice. Load the same state on every rank."
        )
        self._agreement.fail_next(text)
        raise PlanError(text)

    # -- the first batch

    def check(self, epoch: int | None = None) -> None:
        """Raise RankFailedError where a rank told that it can't go on: don't begin to wait. epoch:
        of the batch that is asked for; what another rank left behind it may still be handed out."""
        notice = self._agreement.stop_notice()
        is_later = epoch is None or notice is None or (epoch, 0) >= tuple(notice["last"])
        if notice is not None and "failed" in notice and is_later:
            rank = int(notice.get("rank", 0))
            raise RankFailedError(
                f"Rank {rank} failed, so every rank stops here: {notice['failed']}", rank=rank
            )

    def begin(self, *, waits: bool = True) -> bool:
        """The first batch is asked for; whether that is new. waits: whether for the others at all.

        Raises StalledError naming the ranks that don't come, RankFailedError where one of them was
        refused, PlanError where ranks read different datasets in order.
        """
        if self._has_met:
            return False
        if not self._waits:
            self._compare_datasets()
        elif waits:
            try:
                self._meet()
            except JobStoreError:
                pass  # the next question of the agreement's says so
            except PenstockError as error:
                self._agreement.fail(f"{type(error).__name__}: {error}")
                raise
        self._has_met = True
        return True

    def _meet(self) -> None:
        agreement, refusals = self._agreement, self.refusals
        if refusals is None:
            return
        waited_s = 0.0
        for until_s in (MEET_TIMEOUT_S, _TOLD_AFTER_S, self._timeout_s):
            left_s = min(until_s, self._timeout_s) - waited_s
            if left_s <= 0:
                break
            waited_s += left_s
            if agreement.meet(timeout_s=left_s, look=refusals.look):
                return
            if (refused := refusals.error()) is not None:
                raise refused
            if self._is_brief or (self._world.process == 0 and not agreement.others_arrived()):
                return
            if until_s == _TOLD_AFTER_S < self._timeout_s:
                self._say()
        if not (missing := agreement.missing(self._world.processes)):
            return  # just now
        raise StalledError(
            f"Rank {self._world.process} of {self._world.processes} waited {self._timeout_s:.0f} s "
            f"at its first batch for {ranks_words(missing)} to build this loader, or to load the "
            "state that the others did. Build the same loaders on every rank, and load the same "
            "state; for a loader that is one rank's own pass world=World(0, 1). Where ranks start "
            "that far apart, raise timeout=."
        )

    def _say(self) -> None:
        missing = self._agreement.missing(self._world.processes)
        if missing:
            log.warning(
                "rank %d waits at its first batch for %s to build this loader, or to load the "
                "state that the others did; %.0f s at most",
                self._world.process,
                ranks_words(missing),
                self._timeout_s,
            )

    # -- loaders in order

    def _compare_datasets(self) -> None:
        """Tell which dataset is read, if nobody has, and look whether ranks read others instead.

        One rank may read a dataset that the others don't. Two that each read one that the other has
        no loader of share both out with nobody.
        """
        whole, world = self._agreement.whole_store, self._world
        if whole is None or world.size == 1:
            return
        mine = {
            "process": world.process,
            "label": world.label,
            "room": self._agreement.room,
            "samples": self._facts.samples,
            "url": self._facts.url,
        }
        try:
            theirs = _tell_dataset(whole.under("in-order"), mine)
            apart = [one for one in theirs if _are_apart(whole, mine, one)]
        except JobStoreError:
            return  # whoever asks next says so
        if not apart:
            return
        other = apart[-1]
        text = (
            f"{str(other['label']).capitalize()} reads dataset {_words(other)} in order, of which "
            f"{mine['label']} has no loader; that reads {_words(mine)}, of which "
            f"{other['label']} has none: each gets a share of its own, and nobody the rest. "
            f"{CUT_TWICE} For a loader that is this rank's own: world=World(0, 1)."
        )
        self._agreement.fail(text, differs=True)
        for one in apart:
            self._fail_there(whole.under(str(one["room"])), int(one["process"]), text)
        raise PlanError(text)

    def _fail_there(self, room: JobStore, process: int, text: str) -> None:
        """Tell the ranks of another dataset's loaders, the first ones and the latest of a rank."""
        latest = int(room.heard(built_key(process)) or 1)
        for number in {1, latest}:
            there = room.under(str(number))
            Agreement(there, rank=self._world.rank, size=self._world.size).fail(text, differs=True)

    def _tell(self, what: Any) -> None:
        if self.refusals is not None and self._agreement.is_shared:
            try:
                what(self.refusals)
            except JobStoreError:
                self.refusals = None  # the next question of the agreement's says so


def _tell_dataset(store: JobStore, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Tell a dataset, unless somebody has; all that were told, that one left out."""
    text = json.dumps(mine)
    if store.first(f"read-{mine['room']}", text) == text:
        store.tell(f"read-{store.add('read', 1)}", text)
    found = []
    for number in range(1, min(store.add("read", 0), _MOST_DATASETS) + 1):
        told = store.heard(f"read-{number}")  # None: whoever tells it compares after us
        if told is not None and (one := json.loads(told))["room"] != mine["room"]:
            found.append(one)
    return found


def _are_apart(whole: JobStore, mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether neither of two processes ever had a loader of the dataset that the other reads."""
    if other["process"] == mine["process"]:
        return False
    asked = ((mine["room"], other["process"]), (other["room"], mine["process"]))
    return all(whole.under(str(room)).heard(built_key(int(who))) is None for room, who in asked)


def _words(one: dict[str, Any]) -> str:
    url = f" of {one['url']}" if one["url"] else ""
    name = str(one["room"]).rpartition("/")[2][:12]
    return f"{name} ({one['samples']} samples{url})"
