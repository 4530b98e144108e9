"""Exchange facts between the ranks of one loader through the store of torch's process group.

It is never a collective, because rank 0 alone may build a loader. A rank asks the store one
question a batch, on a connection of its own with a short time limit, so that a store whose server
died is noticed and not waited for. A job whose first process was killed then stops on every rank.
Where that process ended normally, or nobody knows, each rank counts for itself from then on.

A count over all ranks can be asked for at any place of the stream, and nobody waits for it. Each
addition is published with the place where it was made, under the total that it led to: totals
differ from one another, and lead back to the first addition.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import JobStore, JobStoreError, PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.members.first_process import FirstProcessNotices, FirstProcessWatch
    from penstock.pipeline.plan import World

log = logging.getLogger("penstock")

T = TypeVar("T")

_ALL_THERE = "all-there"

# How long a rank that stops waits for those that are still in the step before: as long as one step
# may take, and no longer than somebody would look at a job that has ended.
ENDING_TIMEOUT_S = 30.0
_MOST_REASON = 2000  # characters of a reason that the other ranks are told


class LoaderChannel:
    """Speaks for one loader with those of the job's other ranks; without a store, with itself.

    Several loaders of a job don't mix: each has its own keys, by dataset and number.
    """

    def __init__(
        self,
        store: JobStore | None = None,
        *,
        rank: int = 0,
        size: int = 1,
        whole: JobStore | None = None,
        room: str = "",
    ) -> None:
        """store: this loader's part of it; whole: all of it; room: of this and like loaders, in it.
        size: ranks of the job, whether or not there is a store to reach them by."""
        self._store = store
        self._whole = whole
        self.room = room
        self.rank = rank
        self.size = size
        self.number_of_rank = 1  # this process's, among those that have its rank, as they came
        self._counts: dict[str, int] = {}
        self._notice: dict[str, Any] | None = None
        self._round = 0
        self._notices: FirstProcessNotices | None = None  # in process 0
        self._watch: FirstProcessWatch | None = None  # in any other
        self._told_waits = 0  # this process's number among those that told, from 1

    @property
    def store(self) -> JobStore | None:
        """This loader's part of the job's store; None where the ranks can't reach one another."""
        return self._store

    @property
    def is_shared(self) -> bool:
        """Whether other ranks hear what this one says."""
        return self._store is not None

    @property
    def whole_store(self) -> JobStore | None:
        """The job's store; None where nobody answers, as far as is known."""
        return None if self._store is None else self._whole

    @property
    def speaks_for_rank(self) -> bool:
        """Whether this process does, of those that have its rank."""
        return self.number_of_rank == 1

    def follow_first(self, world: World, *, is_expected: bool) -> None:
        """Stop with the job's first process where it is killed and the store with it; be that
        process for the others. is_expected: all processes have this loader."""
        if self._store is None or world.processes == 1:
            return
        connection = self._ask(lambda store: store.separate(), None)
        if connection is None or self._store is None:
            return
        from penstock.pipeline.members.first_process import FirstProcessNotices, FirstProcessWatch

        store = self._store
        with contextlib.suppress(JobStoreError):  # the next question says so
            if world.process == 0:
                self._notices = FirstProcessNotices(store)
            else:
                self._watch = FirstProcessWatch(store, connection, is_expected=is_expected)

    def begin_pass(self) -> None:
        """A pass begins."""
        if self._notices is not None:
            self._notices.stay()

    def end_epoch(self, epoch: int) -> None:
        """The last batch of an epoch is handed out."""
        if self._notices is not None:
            self._notices.end_epoch(epoch)

    def close(self) -> None:
        """This process's loader is closed. Safe to call twice."""
        if self._notices is not None:
            self._notices.leave()
        elif self._watch is not None:
            self._watch.close()

    def begin(self) -> None:
        """Forget what was told so far: the job goes on from a state. All ranks do so together. That
        ranks' loaders differ stays."""
        notice = self.stop_notice()
        if self._notices is not None:
            self._notices.stay(begins=True)
        self._round += 1
        self._notice = notice if notice is not None and notice.get("differs") else None

    def compare(self, facts: dict[str, Any]) -> dict[str, Any]:
        """What the first rank that came here said; this rank's own facts if it is the first."""
        mine = json.dumps(facts, sort_keys=True)
        theirs = json.loads(self._ask(lambda store: store.set_once(self._key("plan"), mine), mine))
        return theirs if isinstance(theirs, dict) else facts

    def add(self, name: str, count: int) -> int:
        """Add to a counter of all ranks; its new value."""
        own = self._counts[name] = self._counts.get(name, 0) + count
        return self._ask(lambda store: store.add(self._key(name), count), own)

    def count_at(self, place: str, name: str) -> int | None:
        """A counter's value at a place of the stream, the same on every rank whenever it asks.

        The first rank that asks for a place decides it from what all have told by then, and the
        others take that: nobody waits. None where the ranks can't reach one another.
        """
        if not self.is_shared:
            return self._counts.get(name, 0) if self.size == 1 else None
        mine = str(self.add(name, 0))
        first = self._ask(lambda store: store.set_once(self._key(f"at-{place}"), mine), "")
        return int(first) if first else None

    def first_told(self, name: str, value: int) -> int:
        """What the first rank told that came here; this rank's own where nobody answers."""
        return int(self._ask(lambda store: store.set_once(self._key(name), str(value)), str(value)))

    def stop(self, notice: dict[str, Any]) -> None:
        """Tell every rank to stop when it asks for its next batch; the first notice stays."""
        self._notice = self._notice or notice
        text = json.dumps(notice)
        self._ask(lambda store: store.set_once(self._key("stop"), text), "")

    def fail(self, reason: str, *, differs: bool = False) -> None:
        """Tell every rank that this one can't go on: whatever step they are at, they end there.

        differs: as its loader isn't as theirs; then those too that have gone on from a state since.
        """
        if not self.is_shared:
            return
        told = {"rank": self.rank, "failed": reason[:_MOST_REASON], "last": [-1, 0]}
        notice = {**told, "differs": differs}
        self.stop(notice)
        self._ask(lambda store: store.set(self._key(_ALL_THERE), "1"), None)
        if differs:
            self.fail_next(reason, differs=True)

    def fail_next(self, reason: str, *, differs: bool = False) -> None:
        """Tell that this one can't go on to those that have loaded the next state already."""
        told = {"rank": self.rank, "failed": reason[:_MOST_REASON], "last": [-1, 0]}
        text, before = json.dumps({**told, "differs": differs}), f"{self._round + 1}/"
        self._ask(lambda store: store.set_once(f"{before}stop", text), "")
        self._ask(lambda store: store.set(f"{before}{_ALL_THERE}", "1"), None)

    def compare_next(self, text: str) -> str:
        """What the first rank told that loaded the next state, of that; this one's own if it is the
        first."""
        key = f"{self._round + 1}/state"
        return self._ask(lambda store: store.set_once(key, text), text)

    def arrive(self, processes: int, *, process: int) -> None:
        """Tell that this one's loader is as the others'; again behind `begin`. processes: that have
        one, if all do; process: this one's number."""
        self._ask(lambda store: store.set(self._key(f"here-{process}"), "1"), None)
        if self._ask(lambda store: store.add(self._key("there"), 1), 0) == processes:
            self._ask(lambda store: store.set(self._key(_ALL_THERE), "1"), None)

    def others_arrived(self) -> bool:
        """Whether any other process ever has."""
        return self._ask(lambda store: store.add("0/there", 0), 0) > 1

    def missing(self, processes: int) -> list[int]:
        """The processes that haven't arrived."""

        def asked(store: JobStore) -> list[int]:
            keys = [self._key(f"here-{process}") for process in range(processes)]
            return [process for process, key in enumerate(keys) if store.get(key) is None]

        nobody: list[int] = []
        return self._ask(asked, nobody)

    def meet(self, *, timeout_s: float, look: Callable[[], float | None] | None = None) -> bool:
        """Wait until all have arrived or one has failed; whether that came within the time.

        look: as of `JobStore.wait`."""
        keys = [self._key(_ALL_THERE)]
        nobody: list[str] = []
        return not self._ask(lambda store: store.wait(keys, timeout_s=timeout_s, look=look), nobody)

    def stop_notice(self) -> dict[str, Any] | None:
        """The notice, if a rank told all to stop."""
        if self._notice is None:
            text = self._ask(lambda store: store.get(self._key("stop")), None)
            if text is not None:
                self._notice = json.loads(text)
        return self._notice

    def tell_waits(self, text: str) -> None:
        """Tell all what this process waits for; the text before is forgotten."""
        if not self._told_waits:
            self._told_waits = self._ask(lambda store: store.add("tellers", 1), 0)
        key = _waits_key(self._told_waits)
        self._ask(lambda store: store.set(key, text), None)

    def all_waits(self) -> list[str] | None:
        """What all processes told of their waits; None where nobody can be asked."""

        def heard(store: JobStore) -> list[str]:
            keys = [_waits_key(number + 1) for number in range(store.add("tellers", 0))]
            if not store.has_all(keys):  # somebody has a number and is about to tell
                keys = [key for key in keys if store.has_all([key])]
            return store.get_all(keys) if keys else []

        return self._ask(heard, None)

    def join(self) -> None:
        """Count this rank among those that `end_together` waits for."""
        self._ask(lambda store: store.add("members", 1), 0)

    def end_together(self) -> None:
        """Wait until every rank that joined comes here too, or for half a minute.

        The rank whose process holds the store takes it away when it exits, and any rank its
        connections: one that is still in its last step would end with a network's error in place
        of the reason why all stop.
        """
        members = self._ask(lambda store: store.add("members", 0), 0)
        here = self._ask(lambda store: store.add(self._key("ended"), 1), members)
        key = self._key("all-ended")
        if here >= members:
            self._ask(lambda store: store.set(key, "1"), None)
        elif self._store is not None:
            with contextlib.suppress(JobStoreError):  # the store is gone, so its rank has ended
                self._store.wait([key], timeout_s=ENDING_TIMEOUT_S)

    def _key(self, what: str) -> str:
        return f"{self._round}/{what}"

    def _ask(self, question: Callable[[JobStore], T], otherwise: T) -> T:
        if self._store is None:
            return otherwise
        try:
            return question(self._store)
        except JobStoreError as error:
            self._store = None
            self._lose(error)
            return otherwise

    def _lose(self, error: JobStoreError) -> None:
        """The store is gone: stop with the first process, or go on alone."""
        more = "Ranks can't exchange counts of bad samples and waits any more: each counts its own."
        if self._watch is None:
            warnings.warn(f"{error} {more}", PenstockWarning, stacklevel=3)
        elif (after := self._watch.missed_after()) is None:
            log.info(
                "Rank 0 has closed its loader and ended, and the job's store with it. %s", more
            )
        else:
            reason = (
                f"it was killed, or can't be reached: {error} See its own output and its node's "
                "`dmesg`, then start the job again from its last state. A rank 0 that may end "
                "before the others calls loader.close() first."
            )
            self._notice = self._notice or {
                "rank": 0,
                "failed": reason,
                "last": list(after),
                "differs": True,
            }


def _waits_key(number: int) -> str:
    return f"waits-{number}"


def store_section(dataset: str, *, shuffle: bool) -> str:
    """The part of a job's store for loaders that may belong together, as `join` says."""
    return "shuffled" if shuffle else f"in-order/{dataset[:32]}"


def built_key(process: int) -> str:
    """The key, in such a part, of how many loaders a process has built of it."""
    return f"0/{_built(process)}"


def _built(process: int) -> str:
    return f"loaders-{process}"


def open_channel(
    *, dataset: str, shuffle: bool, world: World, store: JobStore | None = None
) -> LoaderChannel:
    """Speak for this process's next loader; for it alone where no process group stands.

    dataset: that belongs together: its fingerprint, or that of the whole where it is a part. A
    process's k-th shuffled loader belongs to the others' k-th, and its k-th loader in order of a
    dataset to the others' k-th of that: rank 0 alone may evaluate. store: of a membership; None is
    the process group's.
    """
    rank, size = world.rank, world.size
    store = store or JobStore.of_group()
    if store is None:
        return LoaderChannel(rank=rank, size=size)
    room = store_section(dataset, shuffle=shuffle)
    kind = store.under(room)
    number = LoaderChannel(kind, rank=rank).add(_built(world.process), 1)
    agreement = LoaderChannel(kind.under(str(number)), rank=rank, size=size, whole=store, room=room)
    if world.place is not None:
        agreement.number_of_rank = agreement.add(f"of-rank-{rank}", 1)
    agreement.join()
    return agreement


def publish_count(store: JobStore, name: str, *, total: int, place: int, count: int) -> None:
    """Tell where so many were added. total: behind them. Raises JobStoreError."""
    store.set(f"{name}-{total}", f"{place} {count}")


def published_counts(store: JobStore, name: str, *, total: int) -> list[tuple[int, int]] | None:
    """Each addition's place and count; None where one isn't told yet.

    total: of all by now. It asks once for each addition. Raises JobStoreError.
    """
    found = []
    while total > 0:
        told = store.get(f"{name}-{total}")
        if told is None:
            return None
        place, count = map(int, told.split())
        found.append((place, count))
        total -= count
    return found
