"""Exchange facts between the ranks of one loader through the store of torch's process group.

Each loader of a job has its part of the store, by dataset and number (`section_name`). Its keys,
after that part's name, and what they are for; ROUND is 0, and one more after each loaded state:

| exchange       | keys                    | who writes               | who waits, and how long    |
|----------------|-------------------------|--------------------------|----------------------------|
| numbers        | loaders-P, of-rank-R    | process P; each of rank  | none                       |
|                |                         | R                        |                            |
| facts          | ROUND/plan              | the first rank           | none: later ranks compare  |
|                |                         |                          | theirs                     |
| state          | ROUND/state             | the first that loads it  | none: later ranks compare  |
|                |                         |                          | theirs                     |
| first batch    | ROUND/ (barrier)        | each rank, as it has its | each that trains: timeout= |
|                |                         | loader or has loaded the | or 600 s; rank 0 `ALONE_S` |
|                |                         | state                    | if no other has the loader |
| lane order     | lanes-N/ (decision)     | each what its node's     | each, as at the first      |
|                |                         | cache holds              | batch                      |
| weights        | ROUND/weights-N/        | each those that it sets  | each, as at the first      |
|                | (decision)              |                          | batch                      |
| refusal        | refusals (notices)      | a rank whose loader or   | none: ranks that wait end  |
|                |                         | state is refused         | if it stands for           |
|                |                         |                          | `STANDS_AFTER_S`           |
| stop           | ROUND/stop              | the first that fails or  | none: each reads it at     |
|                |                         | passes max_bad=          | each batch, and each       |
|                |                         |                          | second while it waits      |
| end            | ROUND/ended/ (barrier)  | each that stops for bad  | each of these:             |
|                |                         | samples                  | `ENDING_TIMEOUT_S`         |
| bad samples    | ROUND/bad-EPOCH, and    | each at a batch with bad | none                       |
|                | notices of places       | samples                  |                            |
| their count in | ROUND/at-PLACE; 0/bad   | the first that asks      | none                       |
| a state        | for a rejoin            |                          |                            |
| waiting times  | waits (notices)         | each once a minute       | none                       |
| datasets in    | in-order (notices of    | each at its first batch  | none: later ranks, and     |
| index order    | the whole job)          |                          | shuffled loaders, compare  |
|                |                         |                          | theirs                     |
| process 0      | `first_process`         | process 0                | a thread of each other     |
|                |                         |                          | process                    |

No rank waits when a loader is built: the first rank publishes its facts, and later ones compare
theirs. At the first batch, ranks wait for one another if samples are shuffled. All of them train
then, so that an error of one rank is raised on each rank before the first step, instead of a hang
without a reason. A loader in index order may belong to any single rank, so its ranks only publish
what they read. If one rank shuffles a loader and another rank doesn't, the later of the two finds
the other's facts.

A refusal is an error of one rank whose user may continue with another state or without one. So a
rank publishes its refusal and withdraws it when it continues.

Requests have a connection of their own with a short time limit, so that a rank notices a store
whose server has died. If the job's first process was killed, every rank stops. If that process
ended normally, or the reason is unknown, each rank then counts for itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
import warnings
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from penstock.cache import (
    BARRIER_TIMEOUT_S,
    Barrier,
    JobStore,
    JobStoreError,
    PenstockError,
    PenstockWarning,
    PlanError,
    RankFailedError,
)
from penstock.pipeline.members.comparison import (
    CUT_TWICE,
    SharedFacts,
    describe_dataset,
    recipe_facts,
)
from penstock.pipeline.members.membership import Membership, rank_failure
from penstock.pipeline.report import WAITS_OF_STATISTICS, JobStatistics, RankWaits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.pipeline.members.first_process import FirstProcessNotices, FirstProcessWatch
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import JobOrder, LoaderState, World
    from penstock.pipeline.report import Meter
    from penstock.readers import MixtureContents, Source

    Choose = Callable[[list[str]], dict[str, Any]]

log = logging.getLogger("penstock")

T = TypeVar("T")

ALONE_S = 5.0
"""Seconds that rank 0 waits if no other rank has built the loader: it may have one alone."""

STANDS_AFTER_S = 3.0
"""Seconds after which a refusal ends the ranks that wait; long enough for a second try."""

ENDING_TIMEOUT_S = 30.0
"""Seconds that a rank that stops waits for ranks that are still in the step before: about as long
as a step may take."""

PUBLISH_EVERY_S = 60.0
# Waiting times are also published at an epoch's end, unless epochs are shorter than this.
_LEAST_INTERVAL_S = 5.0
_MOST_CHANGES = 4  # of a mixture's weights, in a message
_SHUFFLED = "shuffled"  # the part of the store for shuffled loaders
_MOST_REASON = 2000  # characters of a reason that is published to other ranks
_ALONE_REMEDY = "For a loader that only this rank has, pass world=World(0, 1)."
_PURPOSE = "to build this loader, or to load the state that the others loaded"
_REMEDY = (
    "Build and iterate the same loaders on every rank, and load the same state; for a loader that "
    "only one rank has, pass world=World(0, 1). If ranks start that far apart, raise timeout=."
)


class JobMembership(Membership):
    """The membership of one loader among the same loaders of other ranks, through the job's store.
    Once the store is lost, it has only itself.

    Several loaders of a job don't mix: a process's k-th shuffled loader belongs to the others'
    k-th, and its k-th loader in index order of a dataset to the others' k-th of the same dataset,
    because rank 0 alone may evaluate.
    """

    def __init__(
        self,
        facts: SharedFacts,
        world: World,
        *,
        store: JobStore,
        label: str,
        shuffles: bool,
        timeout_s: float = 0.0,
        follows_data: bool = False,
        meets: bool = True,
    ) -> None:
        """Join the loader to those of the other ranks, and compare it with them without waiting.

        store: of the job. label: the name by which loaders in index order belong together: the
        dataset's fingerprint, or that of the whole of which it is a part. timeout_s: for the first
        batch; 0 for the default. follows_data: this rank wants slots to follow the data; the first
        rank decides. meets: False compares only now. Raises PlanError if the loaders differ; the
        other ranks then stop at their next batch.
        """
        super().__init__(world)
        self._facts, self._job_store, self._shuffles = facts, store, shuffles
        self._timeout_s = timeout_s or BARRIER_TIMEOUT_S
        self._meets, self._has_met = meets, False
        self._round, self._decisions = 0, dict[str, int]()  # the number of decisions by name
        self._was_refused = False
        self._refused_at: dict[int, float] = {}  # when a refusal was first read, by its number
        self._notices: FirstProcessNotices | None = None  # in process 0
        self._watch: FirstProcessWatch | None = None  # in any other
        self._meter: Meter | None = None
        self._waits_number = 0  # of this process's notice of its waiting times
        self._published_s, self._due_s = -_LEAST_INTERVAL_S, time.monotonic() + PUBLISH_EVERY_S
        self._section = section_name(label, shuffles=shuffles)
        self.store = section = store.under(self._section)
        self._number = self._request(lambda store: store.add(f"loaders-{world.process}", 1), 1)
        if self.store is not None:
            self.store = section.under(str(self._number))
        self._compare_facts(wants_data=follows_data)
        self._arrive()

    @property
    def job_store(self) -> JobStore | None:
        return None if self.store is None else self._job_store

    def _compare_facts(self, *, wants_data: bool) -> None:
        world = self.world
        mine = {**asdict(self._facts), "label": world.label, "process": world.process}
        mine["follows_data"] = wants_data
        first = self.first_value("plan", mine)
        self.follows_data = bool(first.get("follows_data"))
        text = self._facts.difference(first, label=world.label)
        if not text and world.place is not None:
            key, members = f"of-rank-{world.rank}", world.processes // world.size
            number = self._request(lambda store: store.add(key, 1), 1)
            self.speaks_for_rank = number == 1
            if number > members:
                text = (
                    f"{world.label.capitalize()} is one of more than {members} processes with that "
                    f"rank, but {world.processes} processes form {world.size} replicas: some rank "
                    "has no process, and its samples would be lost. Pass each process the place of "
                    "its replica: data_parallel=(rank, size), or "
                    'world=World.from_mesh(mesh["dp"]).'
                )
        if text:
            self._fail(text, self._round, self._round + 1)
            raise PlanError(text)

    def follow_first_process(self) -> None:
        """Stop when the job's first process is killed; in that process, publish its end to the
        others."""
        if self.world.processes == 1:
            return
        connection = self._request(lambda store: store.separate(), None)
        if connection is None or self.store is None:
            return
        from penstock.pipeline.members.first_process import FirstProcessNotices, FirstProcessWatch

        with contextlib.suppress(JobStoreError):  # the next request reports it
            if self.world.process == 0:
                self._notices = FirstProcessNotices(self.store, owner=self)
            else:
                self._watch = FirstProcessWatch(
                    self.store, connection, owner=self, is_expected=self._shuffles
                )

    # -- passes and states

    def begin_pass(self) -> None:
        if self._notices is not None:
            self._notices.stay()
        if self._was_refused:
            self._withdraw_refusals()

    def restart(self) -> None:
        is_lost = self.store is None and "failed" in (self._notice or ())
        self._notice = self._notice if is_lost else None
        self._counts.clear()
        if self._notices is not None:
            self._notices.stay(begins=True)
        self._round += 1
        if self._meets:
            self._arrive()

    def close(self) -> None:
        if self._notices is not None:
            self._notices.leave()
        elif self._watch is not None:
            self._watch.end()

    def compare_state(self, described: str) -> None:
        if not self._meets:
            return
        label, following = self.world.label, self._round + 1
        other, theirs = self._first(f"{following}/state", [label, described])
        if theirs != described:
            text = (
                f"{other.capitalize()} loaded a state of {theirs}; {label} one of {described}: "
                "samples would be lost or read twice. Load the same state on every rank."
            )
            self._fail(text, following)
            raise PlanError(text)

    def agree_on_weights(self, call: str, change: str, words: str) -> None:
        if self.store is None or not self._meets:
            return
        own = {"label": self.world.label, "change": change, "words": words, "call": call}
        answer = self.decide(
            self._key("weights"),
            json.dumps(own),
            _choose_weights,
            purpose=f"to call {call}",
            remedy=f"All ranks call {call} equally often, with the same arguments, between the "
            "same steps. For a loader that only one rank has, pass world=World(0, 1).",
        )
        if different := answer["different"]:
            raise PlanError(different)

    def refuse_weights(self, error: Exception) -> None:
        def request(store: JobStore) -> None:  # takes part in the next decision without waiting
            barrier = self._barrier(store, self._next_decision(self._key("weights")))
            barrier.arrive(json.dumps({"refused": text}))
            if self.world.process == 0:  # which decides
                barrier.answer({"different": text})

        text = f"{self.world.label.capitalize()} couldn't set weights: {error}"[:_MOST_REASON]
        if self._meets:
            self._request(request, None)

    def _next_decision(self, name: str) -> str:
        """Count one more decision of a name, and return its key."""
        self._decisions[name] = self._decisions.get(name, 0) + 1
        return f"{name}-{self._decisions[name]}"

    # -- the first batch

    def _arrive(self) -> None:
        """Publish that this rank has built its loader, or loaded a state."""
        self._request(lambda store: self._barrier(store, self._round).arrive(), None)
        self._withdraw_refusals()
        self._has_met = False

    def meet(self, *, has_begun: bool = False) -> None:
        if self._has_met or not self._meets:
            return
        if not self._shuffles or self.world.size == 1:
            self._compare_datasets()
        elif not (has_begun and self._facts.at):
            try:
                self._wait_for_ranks()
            except JobStoreError:
                pass  # the next request reports it
            except PenstockError as error:
                self.fail(error)
                raise
        self._has_met = True

    def _wait_for_ranks(self) -> None:
        if (store := self.store) is None:
            return
        barrier, brief_s = self._barrier(store, self._round), min(ALONE_S, self._timeout_s)

        def look() -> None:
            self.look()
            self._find_unshuffled()

        if barrier.wait(timeout_s=brief_s, look=look):
            return
        is_alone = self.world.process == 0 and self._barrier(store, 0).arrived() <= 1
        if is_alone or self._facts.at:  # ranks that rejoin may have changed again
            return
        barrier.wait_for_all(timeout_s=self._timeout_s, waited_s=brief_s, look=look)

    def _barrier(
        self, store: JobStore, name: str | int, purpose: str = _PURPOSE, remedy: str = _REMEDY
    ) -> Barrier:
        """Return a barrier of all ranks. name: of its keys; a round's number for the barrier at the
        first batch."""
        ranks = {"process": self.world.process, "processes": self.world.processes}
        return Barrier(store=store.under(str(name)), purpose=purpose, remedy=remedy, **ranks)

    def decide(
        self, name: str, text: str, choose: Choose, *, purpose: str, remedy: str
    ) -> dict[str, Any]:
        """Decide something together with all ranks, which all call this equally often.

        The arguments are those of `Barrier` and of its method. Raises what that raises,
        RankFailedError if a rank failed, and JobStoreError.
        """
        if self.store is None:
            raise JobStoreError("The process group's store is lost, so the ranks can't decide.")
        self.check()
        barrier = self._barrier(self.store, self._next_decision(name), purpose, remedy)
        return barrier.decide(text, choose, timeout_s=self._timeout_s, look=self.look)

    def look(self) -> None:
        """Raise RankFailedError if a rank has failed, or if its refusal stands: waiting is
        pointless.

        A rank that was itself refused ignores the refusals of others, because if all of them were
        refused, all continue alike.
        """
        self.check()
        if self._was_refused:
            return
        texts = self._request(lambda store: store.notices("refusals"), dict[int, str]())
        now = time.monotonic()
        self._refused_at = {number: self._refused_at.get(number, now) for number in texts}
        for number, text in texts.items():
            if now - self._refused_at[number] >= STANDS_AFTER_S:
                refusal = json.loads(text)
                raise RankFailedError(
                    f"{str(refusal['label']).capitalize()} raised an error before its first batch, "
                    f"so every rank stops here: {refusal['reason']}",
                    rank=int(refusal["rank"]),
                )

    def refuse(self, error: Exception) -> None:
        if self._meets:
            self._was_refused = True
            self._request(lambda store: post_refusal(store, self.world, error), None)

    def _withdraw_refusals(self) -> None:
        def request(store: JobStore) -> None:
            for number, text in store.notices("refusals").items():
                if json.loads(text)["process"] == self.world.process:
                    store.set(f"refusals-{number}", "")

        self._request(request, None)

    # -- loaders in index order

    def _compare_datasets(self) -> None:
        """Publish which dataset this rank reads in index order, and compare it with the others'.

        One rank may read a dataset that the others don't read. It is an error if two ranks each
        read a dataset for which the other has no loader: each would read only its share of it.
        """
        job_store, world = self.job_store, self.world
        if job_store is None or world.size == 1:
            return
        mine = {**asdict(self._facts), "process": world.process, "label": world.label}
        mine["section"] = self._section
        text = json.dumps(mine)
        shuffled: dict[str, Any] = {}
        try:
            if job_store.set_once(f"in-order/{self._section}", text) == text:
                job_store.post("in-order", text)
            others = map(json.loads, job_store.notices("in-order").values())
            different = [other for other in others if _share_no_dataset(job_store, mine, other)]
            number = _loaders(job_store, _SHUFFLED, world.process) + 1  # that this rank lacks
            if facts := job_store.get(f"{_SHUFFLED}/{number}/0/plan"):
                shuffled = {**json.loads(facts), "number": number}
        except JobStoreError:
            return  # the next request reports it
        if shuffled and _is_same_unshuffled(job_store, shuffled, mine):
            self._refuse_shuffle(job_store, shuffled, mine)
        if not different:
            return
        other = different[-1]
        text = (
            f"{str(other['label']).capitalize()} reads dataset {_describe_reader(other)} in index "
            f"order, for which {mine['label']} has no loader; {mine['label']} reads "
            f"{_describe_reader(mine)}, for which {other['label']} has none: each would read only "
            f"its share, and the rest would be lost. {CUT_TWICE} {_ALONE_REMEDY}"
        )
        self._fail(text, self._round, self._round + 1)
        with contextlib.suppress(JobStoreError):  # the next request reports it
            for other in different:
                self._stop_in_order(job_store, other, text)
        raise PlanError(text)

    def _find_unshuffled(self) -> None:
        """Raise PlanError if another rank reads this shuffled loader's samples in index order."""
        if (job_store := self.job_store) is None:
            return
        mine = {**asdict(self._facts), "process": self.world.process, "label": self.world.label}
        mine["number"] = self._number
        for text in job_store.notices("in-order").values():
            if _is_same_unshuffled(job_store, mine, other := json.loads(text)):
                self._refuse_shuffle(job_store, mine, other)

    def _refuse_shuffle(
        self, job_store: JobStore, shuffled: dict[str, Any], in_order: dict[str, Any]
    ) -> NoReturn:
        """Stop the ranks of a loader that only some of them shuffle, and raise PlanError."""
        text = (
            f"{str(shuffled['label']).capitalize()} built this loader with shuffle=True; "
            f"{in_order['label']} with shuffle=False: samples would be lost or read twice. Pass "
            f"the same shuffle= on every rank. {_ALONE_REMEDY}"
        )
        self._fail(text, self._round, self._round + 1)
        with contextlib.suppress(JobStoreError):  # the next request reports it
            self._stop_in_order(job_store, in_order, text)
            section = job_store.under(f"{_SHUFFLED}/{shuffled['number']}")
            _stop_ranks(section, self._failure(text), (0, 1))
        raise PlanError(text)

    def _stop_in_order(self, job_store: JobStore, reader: dict[str, Any], text: str) -> None:
        """Stop a process's first loaders of a dataset in index order, and the latest."""
        latest = _loaders(job_store, reader["section"], reader["process"]) or 1
        for number in {1, latest}:
            section = job_store.under(f"{reader['section']}/{number}")
            _stop_ranks(section, self._failure(text), (0, 1))

    # -- batches

    def use_meter(self, meter: Meter) -> None:
        if self.store is not None:
            self._meter = meter
            meter.job = self.statistics

    def count_batch(self, *, ended: int | None) -> None:
        if ended is not None and self._notices is not None:
            self._notices.end_epoch(ended)
        now = time.monotonic()
        is_due = now >= self._due_s or ended is not None
        if not is_due or now < self._published_s + _LEAST_INTERVAL_S or self._meter is None:
            return
        self._published_s, self._due_s = now, now + PUBLISH_EVERY_S
        found, world = self._meter.snapshot(briefly=True), self.world
        waits = RankWaits(
            rank=world.rank,
            process=world.process,
            step=found.batches,
            step_s=(found.step_s + found.wait_s) / max(1, found.batches - 1),
            **{name: getattr(found, name) for name in WAITS_OF_STATISTICS},
        )
        if self._waits_number:
            key = f"waits-{self._waits_number}"
            self._request(lambda store: store.set(key, waits.text()), None)
        else:
            self._waits_number = self._request(lambda store: store.post("waits", waits.text()), 0)

    def statistics(self) -> JobStatistics | None:
        """Return what all processes have published; None if the job's store can't be reached."""
        texts = self._request(lambda store: store.notices("waits"), None)
        if texts is None or self._meter is None:
            return None
        waits = [each for each in map(RankWaits.parse, texts.values()) if each is not None]
        processes, step = self.world.processes, self._meter.batches
        return JobStatistics.of(waits, processes=processes, step=step)

    def add(self, name: str, count: int, *, place: int = 0) -> int:
        own, key = super().add(name, count), self._key(name)

        def request(store: JobStore) -> int:
            total = store.add(key, count)
            if count:
                store.post(f"{key}-places", json.dumps([place, count]))
            return total

        return self._request(request, own)

    def additions(self, name: str) -> list[tuple[int, int]] | None:
        key = self._key(name)
        texts = self._request(lambda store: store.notices(f"{key}-places"), dict[int, str]())
        found = [(place, count) for place, count in map(json.loads, texts.values())]
        total = self._request(lambda store: store.add(key, 0), None)
        return found if total == sum(count for _, count in found) else None

    def count_at(self, place: str, name: str) -> int | None:
        found = self.first_value(f"at-{place}", self.add(name, 0))
        return None if self.store is None else found

    def first_value(self, name: str, value: T) -> T:
        return self._first(self._key(name), value)

    # -- the end

    def stop(self, notice: dict[str, Any]) -> None:
        super().stop(notice)
        self._request(lambda store: _stop_ranks(store, notice, (self._round,)), None)

    def stop_notice(self) -> dict[str, Any] | None:
        if self._notice is None:
            text = self._request(lambda store: store.get(self._key("stop")), None)
            # A store that is lost by this request may leave a notice of its own.
            self._notice = self._notice if text is None else json.loads(text)
        return self._notice

    def check(self, epoch: int | None = None) -> None:
        notice = self.stop_notice()
        if notice is None or "failed" not in notice:
            return
        if epoch is None or (epoch, 0) >= tuple(notice["last"]):
            raise rank_failure(notice)

    def fail(self, error: BaseException) -> None:
        self._fail(f"{type(error).__name__}: {error}", self._round)

    def _fail(self, reason: str, *rounds: int) -> None:
        """Publish that this rank failed. rounds: also a following one if the loaders differ."""
        if self.store is not None:
            notice = self._failure(reason)
            self._notice = self._notice or notice
            self._request(lambda store: _stop_ranks(store, notice, rounds), None)

    def _failure(self, reason: str) -> dict[str, Any]:
        return {"rank": self.world.rank, "failed": reason[:_MOST_REASON], "last": [-1, 0]}

    def end_together(self) -> None:
        """Wait until every rank that has this loader has called this, or for half a minute.

        The store ends with the process that holds it, and connections end with any rank. A rank
        that is still in its last step would otherwise raise a network error instead of the reason
        to stop.
        """
        if (store := self.store) is None:
            return
        with contextlib.suppress(JobStoreError):  # the store is gone: its process has ended
            here = self._barrier(store, 0).arrived()
            ending = replace(self._barrier(store, self._key("ended")), processes=here)
            ending.arrive()
            ending.wait(timeout_s=ENDING_TIMEOUT_S)

    # -- requests

    def _key(self, name: str) -> str:
        return f"{self._round}/{name}"

    def _first(self, key: str, value: T) -> T:
        """Return the value of the first process that wrote a key; its own if the store is gone."""
        text = json.dumps(value)
        found: T = json.loads(self._request(lambda store: store.set_once(key, text), text))
        return found

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
        elif (place := self._watch.last_place()) is None:
            log.info("Rank 0 has closed its loader and ended, and so has the job's store. %s", more)
        else:
            reason = (
                f"it was killed, or can't be reached: {error} See its output and `dmesg` on its "
                "node, then restart the job from its last state. If rank 0 may end before the "
                "other ranks, let it call loader.close() first."
            )
            notice = {"rank": 0, "failed": reason, "last": [*place]}
            self._notice = self._notice or notice


def _choose_weights(texts: list[str]) -> dict[str, Any]:
    """Return what process 0 publishes about a change of weights: how those of ranks differ, "" if
    they don't. texts: of all processes."""
    first, *others = map(json.loads, texts)
    for other in others:
        if "refused" in other:
            return {"different": other["refused"]}
        if other["change"] != first["change"]:
            return {
                "different": f"{first['call']}: {first['label']} set {first['words']}; "
                f"{other['label']} {other['words']}: samples would be lost or read twice. Call "
                f"{first['call']} with the same arguments on every rank."
            }
    return {"different": ""}


def section_name(label: str, *, shuffles: bool) -> str:
    """Return the name of the part of a job's store for loaders that may belong together."""
    return _SHUFFLED if shuffles else f"in-order/{label[:32]}"


def _stop_ranks(store: JobStore, notice: dict[str, Any], rounds: Iterable[int]) -> None:
    """Publish a notice to stop to the ranks of a loader. store: its part of the job's."""
    for number in rounds:
        store.set_once(f"{number}/stop", json.dumps(notice))


def post_refusal(store: JobStore, world: World, error: Exception) -> None:
    """Publish that a process raised an error instead of doing what its user asked.

    store: the part of its loader. Raises JobStoreError.
    """
    refusal = {
        "process": world.process,
        "rank": world.rank,
        "label": world.label,
        "reason": f"{type(error).__name__}: {error}"[:_MOST_REASON],
    }
    store.post("refusals", json.dumps(refusal))


def _share_no_dataset(job_store: JobStore, mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if neither process ever had a loader of the dataset that the other one reads."""
    if other["section"] == mine["section"] or other["process"] == mine["process"]:
        return False
    pairs = ((mine["section"], other["process"]), (other["section"], mine["process"]))
    return not any(_loaders(job_store, section, process) for section, process in pairs)


def _is_same_unshuffled(
    job_store: JobStore, shuffled: dict[str, Any], in_order: dict[str, Any]
) -> bool:
    """Return True if two processes have loaders that differ in shuffle=, and neither has the other
    kind too. shuffled, in_order: the facts of each; a loader with other batches, or with another
    end of epochs, is an evaluation that perhaps only one rank has."""
    return (
        all(shuffled[name] == in_order[name] for name in ("dataset", "batch", "ends", "size"))
        and shuffled["process"] != in_order["process"]
        and _loaders(job_store, _SHUFFLED, in_order["process"]) < shuffled["number"]
        and not _loaders(job_store, in_order["section"], shuffled["process"])
    )


def _loaders(job_store: JobStore, section: str, process: int) -> int:
    """Return how many loaders a process has built in a section of the job's store."""
    return int(job_store.get(f"{section}/loaders-{process}") or 0)


def _describe_reader(facts: dict[str, Any]) -> str:
    return describe_dataset(facts["section"].rpartition("/")[2], facts)


# -- joining, when a loader is built or rejoins


def join_ranks(order: JobOrder, options: LoaderOptions, *, plan: str) -> Membership:
    """Join this rank's loader to the job's, and compare it with the others' without waiting.

    plan: the order's fingerprint. Raises PlanError if the loaders differ.
    """
    store = JobStore.of_group()
    if store is None:
        return Membership(options.world)
    if options.kind != "native":
        store = store.under("torch")  # numbered separately from native loaders
    membership = _join(order, options, store, plan, at="", meets=True)
    membership.follow_first_process()
    return membership


def rejoin_ranks(
    order: JobOrder,
    options: LoaderOptions,
    state: LoaderState,
    *,
    store: JobStore | None,
    old: Membership | None,
) -> Membership:
    """Join this rank to a changed set of ranks, and compare it with them without waiting.

    state: where they continue. store: of the new ranks. old: the membership before, whose store is
    used if no other is given and it still answers. Raises PlanError if the loaders differ.
    """
    job_store = store or (None if old is None else old.job_store)
    if job_store is None:
        return Membership(options.world)
    schedule = order.walk.schedule
    sizes = ", ".join(str(size) for _, size in schedule.entries[schedule.history :][:4])
    return _join(
        order,
        options,
        job_store.under("rejoined"),
        state.fingerprint,
        at=f"step {state.step} ({state.cursor}) with global batches of {sizes}",
        meets=store is not None,  # the old store may hold what earlier ranks published
    )


def refuse_unbuilt(source: Source, options: LoaderOptions, error: Exception) -> None:
    """Publish that this rank's next loader can't be built, because the other ranks would wait for
    it."""
    world = options.world
    store = JobStore.of_group() if options.agrees and world.processes > 1 else None
    if store is None:
        return
    section = store.under(section_name(_label(source), shuffles=bool(options.shuffle)))
    with contextlib.suppress(JobStoreError):
        number = int(section.get(f"loaders-{world.process}") or 0) + 1
        post_refusal(section.under(str(number)), world, error)


def _join(
    order: JobOrder, options: LoaderOptions, store: JobStore, plan: str, *, at: str, meets: bool
) -> JobMembership:
    """Join a loader to a store's ranks. at: where a loader that rejoins continues."""
    source, settings, walk, world = order.source, order.settings, order.walk, options.world
    batch = ", ".join(
        f"{size} from sample {first} on" if first else str(size)
        for first, size in walk.schedule.entries[walk.schedule.history :]
    )
    mixture = source.contents.mixture
    operations: Any = options.augment
    if mixture is not None and mixture.augments:
        operations = {**mixture.augments, "other parts": operations}
    recipe, texts = recipe_facts(operations)
    facts = SharedFacts(
        dataset=source.contents.fingerprint,
        samples=source.contents.samples,
        seed=settings.seed,
        plan=plan,
        size=world.size,
        at=at,
        url=source.url,
        lanes=settings.lanes,
        window=settings.window,
        reshuffle=float(settings.reshuffle),
        batch="" if at else batch,  # ranks that rejoin know only the batches to come (`at`)
        ends=f"drop_last={walk.drop_last}, pad={options.pad}",
        recipe=recipe,
        operations=texts,
        shares="" if mixture is None else _shares_text(mixture),
        weights=settings.weights_text,
    )
    remote = source.remote_shards
    keeps_data = remote is not None and any(not cache.is_temporary for cache in remote.caches)
    # Parts of a mixture have lanes of their own, which keep their places.
    has_slots = settings.shuffle and settings.lanes > 1 and settings.mixture is None
    follows = options.order.slots == "data" and has_slots and world.nodes > 1 and keeps_data
    return JobMembership(
        facts,
        world,
        store=store,
        label=_label(source),
        shuffles=settings.shuffle,
        timeout_s=options.timeout,
        follows_data=follows and meets,
        meets=meets,
    )


def _shares_text(mixture: MixtureContents) -> str:
    """Return the shares of a mixture's parts, and from which sample of the job each holds."""
    texts = []
    for change in mixture.changes[:_MOST_CHANGES]:
        pairs = zip(mixture.names, change.shares, strict=True)
        shares = ", ".join(f"{name} {share / sum(change.shares):.4g}" for name, share in pairs)
        texts.append(f"{shares}{f' from sample {change.start} on' if change.start else ''}")
    return "; ".join(texts)


def _label(source: Source) -> str:
    """Return the name by which loaders in index order belong together.

    Parts of one dataset count as that dataset, because each rank may have cut its own.
    """
    whole = source.part_of
    return source.contents.fingerprint if whole is None else f"part-{whole}"
