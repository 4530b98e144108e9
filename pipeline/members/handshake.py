"""Compare what the ranks' loaders were built with, and meet at the first batch.

Nobody waits when a loader is built: the first rank publishes its facts, later ones compare. A
difference is an error where it is noticed, and a notice for all other ranks, which look for one at
every batch. Recipes are compared as a text that is the same in all processes (`recipe_text`).

At the first batch ranks wait for one another where samples are shuffled: all of them train, and
what is wrong with one is an error on each of them before the first step, in which they would wait
for it anyway and not learn the reason. Only rank 0 may be alone, and then it doesn't wait for long.
Of a loader in index order any rank may be alone, as far as the others know: there ranks only
publish what they read.
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
from penstock.pipeline.members.loader_channel import LoaderChannel, built_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache import JobStore
    from penstock.pipeline.plan import World

_MOST_RUNS = 12  # of ranks, that a message names
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def recipe_text(value: object) -> str:
    """What operations are made of: their names and arguments; of a user's own functions and objects
    only what they are called, as anything else may differ between processes."""
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
        told = ", ".join(
            f"{one.name}={recipe_text(getattr(value, one.name))}" for one in _of(value)
        )
        return f"{type(value).__name__}({told})"
    if isinstance(value, Mapping):
        told = ", ".join(f"{recipe_text(key)}: {recipe_text(one)}" for key, one in value.items())
        return f"{{{told}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(recipe_text, value)))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(recipe_text, value))}]"
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _of(value: Any) -> Any:
    return (one for one in fields(value) if one.compare)


CUT_TWICE = (
    "Give every rank the same dataset: the loader shares it out itself, so a part of one's own "
    "(subset, split, a DistributedSampler's share, a folder a rank) would be shared out twice."
)
_REMEDIES = {
    "dataset": CUT_TWICE,
    "recipe": "Pass the same augment= on every rank.",
    "batch": "Pass the same batch_size= or global_batch_size= on every rank.",
    "ends": "Pass the same drop_last= and pad= on every rank.",
    "size": "Let every rank be of one world.",
}
_ONLY_TOLD = ("url", "recipe_words")
_AT = (
    "Call rejoin with the same step on every rank, and with a store that these ranks alone have, "
    "such as a PrefixStore: another rejoin needs another."
)
_OTHERS = "Pass the same seed= and order= on every rank."


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """What the ranks' loaders must share.

    dataset, plan: fingerprints; samples, url: of the dataset, where it may lie elsewhere on other
    nodes. lanes, window, reshuffle: of the plan. batch: global batches, by first sample; ends: how
    epochs end. recipe: its fingerprint, recipe_words: how it begins. size: ranks that it is for.
    at: where they go on, "" for a loader that begins.
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
    agreement: LoaderChannel, facts: SharedFacts, *, label: str = "", follows_data: bool = False
) -> bool:
    """Raise PlanError unless the ranks' loaders agree; the others then stop at their next batch.

    label: what this process is called. follows_data: whether this rank would have slots follow the
    data. Returns what the first rank that came here would, so that all do the same.
    """
    mine, label = asdict(facts), label or f"rank {agreement.rank}"
    first = agreement.compare({**mine, "label": label, "follows_data": follows_data})
    theirs = {name: first.get(name) for name in mine}
    differ = [name for name in mine if name not in _ONLY_TOLD and theirs[name] != mine[name]]
    if not differ:
        return bool(first.get("follows_data"))
    other = str(first.get("label", "another rank"))
    remedy = _remedy(differ, goes_on="at" in differ)
    text = (
        f"{other.capitalize()} built this loader {_fact_words(theirs, differ)}; {label} "
        f"{_fact_words(mine, differ)}: samples would be lost or read twice. {remedy} For a "
        "loader that is this rank's own: world=World(0, 1)."
    )
    agreement.fail(text, differs=True)
    raise PlanError(text)


def check_replicas(agreement: LoaderChannel, world: World) -> None:
    """Raise PlanError where more processes have a rank than a replica has, this one among them."""
    members = world.processes // world.size
    if agreement.number_of_rank <= members:
        return
    text = (
        f"{world.label.capitalize()} is one of more than {members} processes with that rank, "
        f"though {world.processes} processes are {world.size} replicas: others have none, and "
        "samples would be lost. Pass each process its replica's place: "
        'data_parallel=(rank, size), or world=World.from_mesh(mesh["dp"]).'
    )
    agreement.fail(text, differs=True)
    raise PlanError(text)


def _remedy(differ: list[str], *, goes_on: bool) -> str:
    if "dataset" in differ:
        return CUT_TWICE
    if goes_on:
        return _AT
    return (
        " ".join(dict.fromkeys(_REMEDIES.get(name, _OTHERS) for name in differ if name != "plan"))
        or _OTHERS
    )


def _fact_words(facts: dict[str, Any], differ: list[str]) -> str:
    """What a rank has of that which differs."""
    told: list[str] = []
    if "dataset" in differ:
        url = f" of {facts['url']}" if facts["url"] else ""
        told.append(f"over dataset {str(facts['dataset'])[:12]} ({facts['samples']} samples{url})")
    if "seed" in differ:
        told.append(f"with seed {facts['seed']}")
    if "size" in differ:
        told.append(f"for {facts['size']} ranks")
    told += [
        f"with {name}={facts[name]}" for name in ("lanes", "window", "reshuffle") if name in differ
    ]
    if "batch" in differ:
        told.append(f"with global batches of {facts['batch']}")
    if "ends" in differ:
        told.append(f"with {facts['ends']}")
    if "recipe" in differ:
        told.append(f"with recipe {str(facts['recipe'])[:8]}, {facts['recipe_words']}")
    if "at" in differ:
        told.append(f"at {facts['at'] or 'its beginning'}")
    return ", ".join(told) or f"with plan {str(facts['plan'])[:12]}"


log = logging.getLogger("penstock")

EXCHANGE_TIMEOUT_S = 600.0
"""How long a rank waits for the others at its first batch: as long as NCCL lets a collective wait
unless told, so whoever comes later than that would have ended the job anyway."""

MEET_TIMEOUT_S = 5.0
"""How long rank 0 waits where no other rank has built its loader: it may have one alone."""

_TOLD_AFTER_S = 60.0  # then a rank says whom it waits for
_MOST_DATASETS = 64  # of loaders in order, that are compared with
_NAMED = 32  # characters of a dataset's fingerprint in keys, as `join` takes


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


class FirstBatchBarrier:
    """One loader's ranks at their first batch, and at the first one behind each state.

    The training thread calls. Nothing is asked once the ranks have met.
    """

    def __init__(
        self,
        agreement: LoaderChannel,
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
        self.refusals = None if store is None else RankRefusals(store, world)

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
            theirs = _publish_dataset(whole.under("in-order"), mine)
            apart = [one for one in theirs if _are_apart(whole, mine, one)]
        except JobStoreError:
            return  # whoever asks next says so
        if not apart:
            return
        other = apart[-1]
        text = (
            f"{str(other['label']).capitalize()} reads dataset {_dataset_words(other)} in order, "
            f"of which {mine['label']} has no loader; that reads {_dataset_words(mine)}, of which "
            f"{other['label']} has none: each gets a share of its own, and nobody the rest. "
            f"{CUT_TWICE} For a loader that is this rank's own: world=World(0, 1)."
        )
        self._agreement.fail(text, differs=True)
        for one in apart:
            self._fail_there(whole.under(str(one["room"])), int(one["process"]), text)
        raise PlanError(text)

    def _fail_there(self, room: JobStore, process: int, text: str) -> None:
        """Tell the ranks of another dataset's loaders, the first ones and the latest of a rank."""
        latest = int(room.get(built_key(process)) or 1)
        for number in {1, latest}:
            there = room.under(str(number))
            LoaderChannel(there, rank=self._world.rank, size=self._world.size).fail(
                text, differs=True
            )

    def _tell(self, what: Any) -> None:
        if self.refusals is not None and self._agreement.is_shared:
            try:
                what(self.refusals)
            except JobStoreError:
                self.refusals = None  # the next question of the agreement's says so


def _publish_dataset(store: JobStore, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Tell a dataset, unless somebody has; all that were told, that one left out."""
    text = json.dumps(mine)
    if store.set_once(f"read-{mine['room']}", text) == text:
        store.set(f"read-{store.add('read', 1)}", text)
    found = []
    for number in range(1, min(store.add("read", 0), _MOST_DATASETS) + 1):
        told = store.get(f"read-{number}")  # None: whoever tells it compares after us
        if told is not None and (one := json.loads(told))["room"] != mine["room"]:
            found.append(one)
    return found


def _are_apart(whole: JobStore, mine: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether neither of two processes ever had a loader of the dataset that the other reads."""
    if other["process"] == mine["process"]:
        return False
    asked = ((mine["room"], other["process"]), (other["room"], mine["process"]))
    return all(whole.under(str(room)).get(built_key(int(who))) is None for room, who in asked)


def _dataset_words(one: dict[str, Any]) -> str:
    url = f" of {one['url']}" if one["url"] else ""
    name = str(one["room"]).rpartition("/")[2][:12]
    return f"{name} ({one['samples']} samples{url})"
