"""Compare what the ranks' loaders were built with, and wait for one another at the first batch.

No rank waits when a loader is built: the first rank publishes its facts, and later ones compare
theirs. A difference is an error where it is found, and a notice to all other ranks, which check for
one at every batch. Recipes are compared as a text that is the same in all processes
(`recipe_text`).

At the first batch, ranks wait for one another if samples are shuffled. All of them train then, so
that an error of one rank is raised on each rank before the first step, instead of a hang without a
reason. Rank 0 may have the loader alone, so it waits only briefly if no other rank has built it. A
loader in index order may belong to any single rank, so its ranks only publish what they read.

A state that can't be loaded, or a loader that can't be built, is an error of one rank, and its user
may continue with another state or without one. So a rank publishes its refusal and withdraws it
when it continues; the other ranks end only if the refusal stands for a while (`RankRefusals`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import JobStoreError, PenstockError, PlanError, RankFailedError, StalledError
from penstock.pipeline.members.shared_channel import MOST_REASON, SharedChannel, built_key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.cache import JobStore
    from penstock.pipeline.plan import World

_MOST_RUNS = 12  # of ranks, that a message names
_RECIPE_SHOWN = 200  # characters
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def recipe_text(value: object) -> str:
    """Return a text of operations that is the same in all processes: their names and arguments.

    Of a user's own functions and objects it has only the names, because the rest may differ between
    processes.
    """
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, np.generic):  # float64 is a float, and float32 isn't
        value = value.item()
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        return f"array({value.dtype}, {value.shape}, {digest[:16]})"
    if is_dataclass(value) and not isinstance(value, type):
        named = {each.name: getattr(value, each.name) for each in fields(value) if each.compare}
        text = ", ".join(f"{name}={recipe_text(each)}" for name, each in named.items())
        return f"{type(value).__name__}({text})"
    if isinstance(value, Mapping):
        text = ", ".join(f"{recipe_text(key)}: {recipe_text(each)}" for key, each in value.items())
        return f"{{{text}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(recipe_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(recipe_text, value))}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def recipe_facts(operations: object) -> tuple[str, str]:
    """Return a recipe's facts for `SharedFacts`: its fingerprint, and the start of its text."""
    text = recipe_text(operations)
    return hashlib.sha256(text.encode()).hexdigest(), text[:_RECIPE_SHOWN]


CUT_TWICE = (
    "Give every rank the same dataset: the loader shares it out over the ranks, so a part per rank "
    "(subset, split, a DistributedSampler's share, one folder per rank) would be shared out twice."
)
_REMEDIES = {
    "dataset": CUT_TWICE,
    "recipe": "Pass the same augment= on every rank.",
    "batch": "Pass the same batch_size= or global_batch_size= on every rank.",
    "ends": "Pass the same drop_last= and pad= on every rank.",
    "size": "Pass a world of the same size on every rank.",
}
_NOT_COMPARED = ("url", "recipe_words")
_REJOIN_REMEDY = (
    "Call rejoin with the same step on every rank, and with a store that only these ranks use, "
    "such as a PrefixStore: each rejoin needs a new one."
)
_ORDER_REMEDY = "Pass the same seed= and order= on every rank."


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """The facts that the loaders of all ranks must share.

    dataset, plan: fingerprints. samples, url: of the dataset; the url may differ between nodes.
    lanes, window, reshuffle: of the plan. batch: global batches, by first sample. ends: how epochs
    end. recipe: its fingerprint. recipe_words: the beginning of its text. size: ranks of the world.
    at: where ranks that rejoin continue, "" for a loader that begins.
    """

    dataset: str
    samples: int
    seed: int
    plan: str
    size: int
    at: str = ""
    url: str = ""
    lanes: int = 1
    window: int = 1
    reshuffle: float = 0.0
    batch: str = ""
    ends: str = ""
    recipe: str = ""
    recipe_words: str = ""


def check_same_plan(
    channel: SharedChannel, facts: SharedFacts, *, label: str = "", follows_data: bool = False
) -> bool:
    """Raise PlanError unless the ranks' loaders agree; the other ranks then stop at their next
    batch.

    label: this process's name in messages. follows_data: True if this rank wants slots to follow
    the data. Returns the value of the first rank, so that all ranks do the same.
    """
    mine, label = asdict(facts), label or f"rank {channel.rank}"
    first = channel.compare({**mine, "label": label, "follows_data": follows_data})
    theirs = {name: first.get(name) for name in mine}
    differ = [name for name in mine if name not in _NOT_COMPARED and theirs[name] != mine[name]]
    if not differ:
        return bool(first.get("follows_data"))
    other = str(first.get("label", "another rank"))
    text = (
        f"{other.capitalize()} built this loader {_describe_facts(theirs, differ)}; {label} "
        f"{_describe_facts(mine, differ)}: samples would be lost or read twice. {_remedy(differ)} "
        "For a loader that only this rank has, pass world=World(0, 1)."
    )
    channel.fail(text, differs=True)
    raise PlanError(text)


def check_replicas(channel: SharedChannel, world: World) -> None:
    """Raise PlanError if more processes have this rank than a replica has processes."""
    members = world.processes // world.size
    if channel.number_of_rank <= members:
        return
    text = (
        f"{world.label.capitalize()} is one of more than {members} processes with that rank, but "
        f"{world.processes} processes form {world.size} replicas: some rank has no process, and "
        "its samples would be lost. Pass each process the place of its replica: "
        'data_parallel=(rank, size), or world=World.from_mesh(mesh["dp"]).'
    )
    channel.fail(text, differs=True)
    raise PlanError(text)


def _remedy(differ: list[str]) -> str:
    if "dataset" in differ:
        return CUT_TWICE
    if "at" in differ:
        return _REJOIN_REMEDY
    remedies = dict.fromkeys(
        _REMEDIES.get(name, _ORDER_REMEDY) for name in differ if name != "plan"
    )
    return " ".join(remedies) or _ORDER_REMEDY


def _describe_facts(facts: dict[str, Any], differ: list[str]) -> str:
    """Return the facts of one rank that differ, as words for a message."""
    url = f" of {facts['url']}" if facts["url"] else ""
    texts = {
        "dataset": f"over dataset {str(facts['dataset'])[:12]} ({facts['samples']} samples{url})",
        "seed": f"with seed {facts['seed']}",
        "size": f"for {facts['size']} ranks",
        **{name: f"with {name}={facts[name]}" for name in ("lanes", "window", "reshuffle")},
        "batch": f"with global batches of {facts['batch']}",
        "ends": f"with {facts['ends']}",
        "recipe": f"with recipe {str(facts['recipe'])[:8]}, {facts['recipe_words']}",
        "at": f"at {facts['at'] or 'its beginning'}",
    }
    parts = [text for name, text in texts.items() if name in differ]
    return ", ".join(parts) or f"with plan {str(facts['plan'])[:12]}"


log = logging.getLogger("penstock")

EXCHANGE_TIMEOUT_S = 600.0
"""Seconds that a rank waits for the others at its first batch: NCCL's default limit of a
collective, after which the job would end in any case."""

MEET_TIMEOUT_S = 5.0
"""Seconds that rank 0 waits if no other rank has built the loader: it may have one alone."""

_WARN_AFTER_S = 60.0  # a rank that has waited this long logs the ranks that it waits for
_MOST_DATASETS = 64  # datasets read in index order that are compared


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text for a message: "ranks 0, 4 to 7 and 12"."""
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
"""Seconds after which a refusal ends the ranks that wait; long enough for a second try."""

_MOST_REFUSALS = 64  # refusals that are read


class RankRefusals:
    """The refusals of one loader's ranks. Every method raises JobStoreError.

    was_refused: this rank was refused. It then ignores the refusals of other ranks, because if all
    of them were refused, all continue alike.
    """

    def __init__(self, store: JobStore, world: World) -> None:
        """store: the loader's part of the job's store."""
        self._store = store
        self._world = world
        self.was_refused = False
        self._seen: set[int] = set()

    def publish(self, reason: str) -> None:
        """Publish that this process raised an error instead of doing what its user asked."""
        self.was_refused = True
        refusal = {
            "process": self._world.process,
            "rank": self._world.rank,
            "label": self._world.label,
            "reason": reason[:MOST_REASON],
        }
        self._store.set(_refusal_key(self._store.add("refusals", 1)), json.dumps(refusal))

    def withdraw(self) -> None:
        """Withdraw this process's refusals, because it continues after all."""
        for number, refusal in self._open_refusals():
            if refusal.get("process") == self._world.process:
                self._store.set(_refusal_key(number), "")

    def look(self) -> float | None:
        """Check for refusals between two waits, and return the longest next wait in seconds.

        None for any; 0 if a refusal has stood for a while, so that waiting is pointless.
        """
        if self.was_refused:
            return None
        numbers = {number for number, _ in self._open_refusals()}
        if numbers & self._seen:
            return 0.0
        self._seen = numbers
        return STANDS_AFTER_S if numbers else None

    def error(self) -> RankFailedError | None:
        """Return the error to raise for the first refusal that `look` saw stand; None if there is
        none."""
        for number, refusal in self._open_refusals():
            if number in self._seen and not self.was_refused:
                label = str(refusal.get("label", "another rank")).capitalize()
                return RankFailedError(
                    f"{label} raised an error before its first batch, so every rank stops here: "
                    f"{refusal.get('reason')}",
                    rank=int(refusal.get("rank", 0)),
                )
        return None

    def _open_refusals(self) -> list[tuple[int, dict[str, Any]]]:
        count = min(self._store.add("refusals", 0), _MOST_REFUSALS)
        texts = ((number, self._store.get(_refusal_key(number))) for number in range(1, count + 1))
        return [(number, json.loads(text)) for number, text in texts if text]


def _refusal_key(number: int) -> str:
    return f"refusal-{number}"


class FirstBatchBarrier:
    """The barrier of one loader's ranks at their first batch, and at the first one after each
    state.

    The training thread calls it. It sends no request once the ranks have met.
    """

    def __init__(
        self,
        channel: SharedChannel,
        facts: SharedFacts,
        *,
        world: World,
        waits: bool,
        timeout_s: float | None,
    ) -> None:
        """waits: wait for all ranks, because all of them train. timeout_s: seconds; 0 for the
        default; None: continue after a short wait, because the ranks may have changed again."""
        self._channel = channel
        self._facts = facts
        self._world = world
        self._waits = waits
        self._is_brief = timeout_s is None
        self._timeout_s = timeout_s or EXCHANGE_TIMEOUT_S
        self._has_met = False
        store = channel.store
        self.refusals = None if store is None else RankRefusals(store, world)

    # -- before the first batch

    def arrive(self) -> None:
        """Publish that this rank has built its loader, or loaded a state."""
        self._channel.arrive(self._world.processes, process=self._world.process)
        self._update(lambda refusals: refusals.withdraw())
        self._has_met = False

    def refuse(self, reason: str) -> None:
        """Publish why this rank can't build its loader or load its state."""
        self._update(lambda refusals: refusals.publish(reason))

    def come_back(self) -> None:
        """Withdraw this rank's refusal, because a pass begins."""
        if self.refusals is not None and self.refusals.was_refused:
            self._update(lambda refusals: refusals.withdraw())

    def compare_state(self, described: str) -> None:
        """Raise PlanError unless all ranks load the same state; the others then stop at their next
        batch.

        described: where and how the state continues.
        """
        label = self._world.label
        first = json.loads(self._channel.compare_next(json.dumps([label, described])))
        if first[1] == described:
            return
        text = (
            f"{str(first[0]).capitalize()} loaded a state of {first[1]}; {label} one of "
            f"{described}: samples would be lost or read twice. Load the same state on every rank."
        )
        self._channel.fail_next(text)
        raise PlanError(text)

    # -- the first batch

    def check(self, epoch: int | None = None) -> None:
        """Raise RankFailedError if a rank has published that it failed.

        epoch: of the batch that is asked for. Batches before the place of the failure are still
        delivered.
        """
        notice = self._channel.stop_notice()
        is_later = epoch is None or notice is None or (epoch, 0) >= tuple(notice["last"])
        if notice is not None and "failed" in notice and is_later:
            rank = int(notice.get("rank", 0))
            raise RankFailedError(
                f"Rank {rank} failed, so every rank stops here: {notice['failed']}", rank=rank
            )

    def begin(self, *, waits: bool = True) -> bool:
        """Wait for the other ranks at the first batch; return True if this is the first batch.

        waits: False waits for no rank. Raises StalledError, which names the missing ranks;
        RankFailedError if one of them published a refusal; PlanError if ranks read different
        datasets in index order.
        """
        if self._has_met:
            return False
        if not self._waits:
            self._compare_datasets()
        elif waits:
            try:
                self._meet()
            except JobStoreError:
                pass  # the channel's next request reports it
            except PenstockError as error:
                self._channel.fail(f"{type(error).__name__}: {error}")
                raise
        self._has_met = True
        return True

    def _meet(self) -> None:
        channel, refusals = self._channel, self.refusals
        if refusals is None:
            return
        waited_s = 0.0
        for until_s in (MEET_TIMEOUT_S, _WARN_AFTER_S, self._timeout_s):
            left_s = min(until_s, self._timeout_s) - waited_s
            if left_s <= 0:
                break
            waited_s += left_s
            if channel.meet(timeout_s=left_s, look=refusals.look):
                return
            if (refused := refusals.error()) is not None:
                raise refused
            if self._is_brief or (self._world.process == 0 and not channel.others_arrived()):
                return
            is_due = until_s == _WARN_AFTER_S < self._timeout_s
            if is_due and (missing := channel.missing(self._world.processes)):
                log.warning(
                    "rank %d waits at its first batch for %s to build this loader, or to load the "
                    "state that the others loaded; it waits at most %.0f s in total",
                    self._world.process,
                    format_ranks(missing),
                    self._timeout_s,
                )
        if not (missing := channel.missing(self._world.processes)):
            return  # the last one arrived after the wait
        raise StalledError(
            f"Rank {self._world.process} of {self._world.processes} waited {self._timeout_s:.0f} s "
            f"at its first batch for {format_ranks(missing)} to build this loader, or to load the "
            "state that the others loaded. Build the same loaders on every rank, and load the same "
            "state; for a loader that only one rank has, pass world=World(0, 1). If ranks start "
            "that far apart, raise timeout=."
        )

    # -- loaders in index order

    def _compare_datasets(self) -> None:
        """Publish which dataset this rank reads in index order, and compare it with the other
        ranks'.

        One rank may read a dataset that the others don't read. It is an error if two ranks each
        read a dataset for which the other has no loader: each would read only its share of it.
        """
        job_store, world = self._channel.job_store, self._world
        if job_store is None or world.size == 1:
            return
        mine = {
            "process": world.process,
            "label": world.label,
            "room": self._channel.section,
            "samples": self._facts.samples,
            "url": self._facts.url,
        }
        try:
            theirs = _publish_dataset(job_store.under("in-order"), mine)
            different = [other for other in theirs if _share_no_dataset(job_store, mine, other)]
        except JobStoreError:
            return  # the next request reports it
        if not different:
            return
        other = different[-1]
        text = (
            f"{str(other['label']).capitalize()} reads dataset {_describe_dataset(other)} in index "
            f"order, for which {mine['label']} has no loader; {mine['label']} reads "
            f"{_describe_dataset(mine)}, for which {other['label']} has none: each would read only "
            f"its share, and the rest would be lost. {CUT_TWICE} For a loader that only this rank "
            "has, pass world=World(0, 1)."
        )
        self._channel.fail(text, differs=True)
        for other in different:
            self._fail_section(job_store.under(str(other["room"])), int(other["process"]), text)
        raise PlanError(text)

    def _fail_section(self, section: JobStore, process: int, text: str) -> None:
        """Publish the failure to the ranks of another dataset's loaders: the first loaders and the
        latest."""
        latest = int(section.get(built_key(process)) or 1)
        for number in {1, latest}:
            store = section.under(str(number))
            SharedChannel(store, rank=self._world.rank, size=self._world.size).fail(
                text, differs=True
            )

    def _update(self, change: Callable[[RankRefusals], None]) -> None:
        if self.refusals is not None and self._channel.is_shared:
            try:
                change(self.refusals)
            except JobStoreError:
                self.refusals = None  # the channel's next request reports it


def _publish_dataset(store: JobStore, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Publish which dataset is read, unless a rank has, and return what was published of others."""
    text = json.dumps(mine)
    if store.set_once(f"read-{mine['room']}", text) == text:
        store.set(f"read-{store.add('read', 1)}", text)
    found = []
    for number in range(1, min(store.add("read", 0), _MOST_DATASETS) + 1):
        other = store.get(f"read-{number}")  # None: its process publishes it next, then compares
        if other is not None and (facts := json.loads(other))["room"] != mine["room"]:
            found.append(facts)
    return found


def _share_no_dataset(job_store: JobStore, mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if neither process ever had a loader of the dataset that the other one reads."""
    if other["process"] == mine["process"]:
        return False
    pairs = ((mine["room"], other["process"]), (other["room"], mine["process"]))
    return all(
        job_store.under(str(section)).get(built_key(int(process))) is None
        for section, process in pairs
    )


def _describe_dataset(facts: dict[str, Any]) -> str:
    url = f" of {facts['url']}" if facts["url"] else ""
    name = str(facts["room"]).rpartition("/")[2][:12]
    return f"{name} ({facts['samples']} samples{url})"
