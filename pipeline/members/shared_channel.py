"""Exchange facts between the ranks of one loader through the store of torch's process group.

A collective can't be used, because rank 0 alone may build a loader. A rank sends the store one
request per batch, on a connection of its own with a short time limit, so that it notices a store
whose server has died. If the job's first process was killed, every rank stops. If that process
ended normally, or the reason is unknown, each rank then counts for itself.

A count over all ranks can be read at any place of the stream without waiting. Each addition is
published with its place, under the total that it led to. Totals are unique and lead back to the
first addition.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import JobStore, JobStoreError, PenstockWarning
from penstock.pipeline.members.rank_membership import LoaderChannel

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline.members.first_process import FirstProcessNotices, FirstProcessWatch
    from penstock.pipeline.plan import World

log = logging.getLogger("penstock")

T = TypeVar("T")

_ALL_THERE = "all-there"

# A rank that stops waits this long for ranks that are still in the step before: about as long as a
# step may take.
ENDING_TIMEOUT_S = 30.0
MOST_REASON = 2000  # characters of a reason that is published to other ranks


class SharedChannel(LoaderChannel):
    """The channel of one loader to the same loader on other ranks, through the job's store. Once
    the store is lost, it has only itself.

    Several loaders of a job don't mix: each has its own keys, by dataset and number.
    """

    def __init__(
        self,
        store: JobStore | None = None,
        *,
        rank: int = 0,
        size: int = 1,
        job_store: JobStore | None = None,
        section: str = "",
    ) -> None:
        """store: this loader's part of the job's store. job_store: all of it. section: the name of
        the part that holds this and similar loaders. size: ranks of the job, reachable or not."""
        super().__init__(rank=rank, size=size)
        self.store = store
        self._job_store = job_store
        self.section = section
        self._round = 0
        self._notices: FirstProcessNotices | None = None  # in process 0
        self._watch: FirstProcessWatch | None = None  # in any other
        self._waits_number = 0  # of this process, among those that published waits, from 1

    @property
    def job_store(self) -> JobStore | None:
        return None if self.store is None else self._job_store

    def follow_first(self, world: World, *, is_expected: bool) -> None:
        """Stop when the job's first process is killed; in that process, publish its end to the
        others.

        is_expected: all processes have this loader.
        """
        if self.store is None or world.processes == 1:
            return
        connection = self._request(lambda store: store.separate(), None)
        if connection is None or self.store is None:
            return
        from penstock.pipeline.members.first_process import FirstProcessNotices, FirstProcessWatch

        store = self.store
        with contextlib.suppress(JobStoreError):  # the next request reports it
            if world.process == 0:
                self._notices = FirstProcessNotices(store, owner=self)
            else:
                self._watch = FirstProcessWatch(
                    store, connection, owner=self, is_expected=is_expected
                )

    def begin_pass(self) -> None:
        if self._notices is not None:
            self._notices.stay()

    def end_epoch(self, epoch: int) -> None:
        if self._notices is not None:
            self._notices.end_epoch(epoch)

    def close(self) -> None:
        if self._notices is not None:
            self._notices.leave()
        elif self._watch is not None:
            self._watch.end()

    def begin(self) -> None:
        super().begin()
        if self._notices is not None:
            self._notices.stay(begins=True)
        self._round += 1

    def compare(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of the first rank that called this; this rank's own facts if it is the
        first."""
        mine = json.dumps(facts, sort_keys=True)
        key = self._key("plan")
        theirs = json.loads(self._request(lambda store: store.set_once(key, mine), mine))
        return theirs if isinstance(theirs, dict) else facts

    def add(self, name: str, count: int) -> int:
        own = super().add(name, count)
        return self._request(lambda store: store.add(self._key(name), count), own)

    def count_at(self, place: str, name: str) -> int | None:
        if not self.is_shared:
            return super().count_at(place, name)
        mine = str(self.add(name, 0))
        first = self._request(lambda store: store.set_once(self._key(f"at-{place}"), mine), "")
        return int(first) if first else None

    def first_value(self, name: str, value: int) -> int:
        key, text = self._key(name), str(value)
        return int(self._request(lambda store: store.set_once(key, text), text))

    def stop(self, notice: dict[str, Any]) -> None:
        super().stop(notice)
        text = json.dumps(notice)
        self._request(lambda store: store.set_once(self._key("stop"), text), "")

    def fail(self, reason: str, *, differs: bool = False) -> None:
        if not self.is_shared:
            return
        self.stop(self._failure(reason, differs=differs))
        self._request(lambda store: store.set(self._key(_ALL_THERE), "1"), None)
        if differs:
            self.fail_next(reason, differs=True)

    def fail_next(self, reason: str, *, differs: bool = False) -> None:
        """Publish that this rank failed to the ranks that have already loaded the next state."""
        text, prefix = json.dumps(self._failure(reason, differs=differs)), f"{self._round + 1}/"
        self._request(lambda store: store.set_once(f"{prefix}stop", text), "")
        self._request(lambda store: store.set(f"{prefix}{_ALL_THERE}", "1"), None)

    def _failure(self, reason: str, *, differs: bool) -> dict[str, Any]:
        notice = {"rank": self.rank, "failed": reason[:MOST_REASON], "last": [-1, 0]}
        return {**notice, "differs": differs}

    def compare_next(self, text: str) -> str:
        """Return the text of the first rank that loaded the next state; this rank's own if it is
        the first."""
        key = f"{self._round + 1}/state"
        return self._request(lambda store: store.set_once(key, text), text)

    def arrive(self, processes: int, *, process: int) -> None:
        """Publish that this process has its loader; call it again after `begin`.

        processes: the number of processes that have the loader. process: this one's number.
        """
        self._request(lambda store: store.set(self._key(f"here-{process}"), "1"), None)
        if self._request(lambda store: store.add(self._key("there"), 1), 0) == processes:
            self._request(lambda store: store.set(self._key(_ALL_THERE), "1"), None)

    def others_arrived(self) -> bool:
        """Return True if any other process has ever arrived."""
        return self._request(lambda store: store.add("0/there", 0), 0) > 1

    def missing(self, processes: int) -> list[int]:
        """Return the processes that haven't arrived."""

        def request(store: JobStore) -> list[int]:
            keys = [self._key(f"here-{process}") for process in range(processes)]
            return [process for process, key in enumerate(keys) if store.get(key) is None]

        return self._request(request, list[int]())

    def meet(self, *, timeout_s: float, look: Callable[[], float | None] | None = None) -> bool:
        """Wait until all processes have arrived or one has failed; return False at the time limit.

        look: as in `JobStore.wait`.
        """
        keys, none = [self._key(_ALL_THERE)], list[str]()
        return not self._request(lambda s: s.wait(keys, timeout_s=timeout_s, look=look), none)

    def stop_notice(self) -> dict[str, Any] | None:
        if self._notice is None:
            text = self._request(lambda store: store.get(self._key("stop")), None)
            if text is not None:
                self._notice = json.loads(text)
        return self._notice

    def publish_waits(self, text: str) -> None:
        """Publish this process's waiting times in place of its earlier ones."""
        if not self._waits_number:
            self._waits_number = self._request(lambda store: store.add("tellers", 1), 0)
        key = f"waits-{self._waits_number}"
        self._request(lambda store: store.set(key, text), None)

    def all_waits(self) -> list[str] | None:
        """Return the waiting times that all processes published; None if the store is gone."""

        def request(store: JobStore) -> list[str]:
            keys = [f"waits-{number + 1}" for number in range(store.add("tellers", 0))]
            if not store.has_all(keys):  # a process has its number and will publish next
                keys = [key for key in keys if store.has_all([key])]
            return store.get_all(keys) if keys else []

        return self._request(request, None)

    def join(self) -> None:
        """Count this rank among those that `end_together` waits for."""
        self._request(lambda store: store.add("members", 1), 0)

    def end_together(self) -> None:
        """Wait until every rank that joined has called this, or for half a minute.

        The store ends with the process that holds it, and connections end with any rank. A rank
        that is still in its last step would otherwise raise a network error instead of the reason
        to stop.
        """
        members = self._request(lambda store: store.add("members", 0), 0)
        here = self._request(lambda store: store.add(self._key("ended"), 1), members)
        key = self._key("all-ended")
        if here >= members:
            self._request(lambda store: store.set(key, "1"), None)
        elif self.store is not None:
            with contextlib.suppress(JobStoreError):  # the store is gone: its process has ended
                self.store.wait([key], timeout_s=ENDING_TIMEOUT_S)

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _request(self, request: Callable[[JobStore], T], default: T) -> T:
        if self.store is None:
            return default
        try:
            return request(self.store)
        except JobStoreError as error:
            self.store = None
            self._lose(error)
            return default

    def _lose(self, error: JobStoreError) -> None:
        """Handle the loss of the store: stop if the first process failed, else continue alone."""
        more = (
            "Ranks no longer exchange counts of bad samples and waiting times: each counts its own."
        )
        if self._watch is None:
            warnings.warn(f"{error} {more}", PenstockWarning, stacklevel=3)
        elif (after := self._watch.last_place()) is None:
            log.info("Rank 0 has closed its loader and ended, and so has the job's store. %s", more)
        else:
            reason = (
                f"it was killed, or can't be reached: {error} See its output and `dmesg` on its "
                "node, then restart the job from its last state. If rank 0 may end before the "
                "other ranks, let it call loader.close() first."
            )
            self._notice = self._notice or {
                "rank": 0,
                "failed": reason,
                "last": list(after),
                "differs": True,
            }


def store_section(dataset: str, *, shuffle: bool) -> str:
    """Return the name of the part of a job's store for loaders that may belong together."""
    return "shuffled" if shuffle else f"in-order/{dataset[:32]}"


def built_key(process: int) -> str:
    """Return the key, in such a part, of how many loaders a process has built there."""
    return f"0/loaders-{process}"


def open_channel(
    *, dataset: str, shuffle: bool, world: World, store: JobStore | None = None
) -> SharedChannel:
    """Open the channel of this process's next loader; without a process group it reaches no rank.

    dataset: the name by which loaders belong together: the dataset's fingerprint, or that of the
    whole of which it is a part. A process's k-th shuffled loader belongs to the others' k-th, and
    its k-th loader in index order of a dataset to the others' k-th of the same dataset, because
    rank 0 alone may evaluate. store: a membership's own store; None is the process group's.
    """
    rank, size = world.rank, world.size
    store = store or JobStore.of_group()
    if store is None:
        return SharedChannel(rank=rank, size=size)
    section = store_section(dataset, shuffle=shuffle)
    kind = store.under(section)
    number = SharedChannel(kind, rank=rank).add(f"loaders-{world.process}", 1)  # `built_key`
    channel = SharedChannel(
        kind.under(str(number)), rank=rank, size=size, job_store=store, section=section
    )
    if world.place is not None:
        channel.number_of_rank = channel.add(f"of-rank-{rank}", 1)
    channel.join()
    return channel


def publish_count(store: JobStore, name: str, *, total: int, place: int, count: int) -> None:
    """Publish an addition of `count` at a place. total: the sum after it. Raises JobStoreError."""
    store.set(f"{name}-{total}", f"{place} {count}")


def published_counts(store: JobStore, name: str, *, total: int) -> list[tuple[int, int]] | None:
    """Return the place and the count of each addition; None if one isn't published yet.

    total: the sum of all. Sends one request per addition. Raises JobStoreError.
    """
    found = []
    while total > 0:
        text = store.get(f"{name}-{total}")
        if text is None:
            return None
        place, count = map(int, text.split())
        found.append((place, count))
        total -= count
    return found
