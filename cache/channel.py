"""Exchange short texts between the processes of a job through the store of torch's process group.

`JobStore` sends single requests. The processes exchange everything by three means that are built on
them. NAME is what the caller passes, after the name of its part of the store (`JobStore.under`):

| means    | keys                   | who writes them          | who waits, and how long          |
|----------|------------------------|--------------------------|----------------------------------|
| notice   | NAME: a counter;       | any process, any number  | none: a process reads what has   |
|          | NAME-1, NAME-2, …      | of times                 | been published so far            |
| barrier  | here-P; came: a        | each process P once; the | each, for `all`; the caller      |
|          | counter; all           | last one `all`           | limits the wait, and absent ones |
|          |                        |                          | are named                        |
| decision | a barrier's, and       | process 0 the answer     | process 0 for `all`; the others  |
|          | answer                 |                          | for `answer`, `ANSWER_SPARE_S`   |
|          |                        |                          | longer                           |

`pipeline.members`, `readers.index.shared_build` and `cache.peers.peer_link` list what they
exchange. None uses a collective, because perhaps only rank 0 builds a loader. A process that waits
checks every `LOOK_EVERY_S` whether another one has failed. This module initialises nothing; without
a process group there is no store.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.errors import JobStoreError, StalledError, log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Look = Callable[[], None] | None
    Decision = dict[str, Any]
    Choose = Callable[[list[str]], Decision]

T = TypeVar("T")

STORE_TIMEOUT_S = 20.0
"""The time limit of one request, because a store whose server died doesn't answer."""

BARRIER_TIMEOUT_S = 600.0
"""Seconds that a process waits for the others if the user sets no limit: NCCL's default limit of a
collective, after which the job would end in any case."""

ANSWER_SPARE_S = 30.0
"""Seconds that the other processes wait longer than process 0, so that its failure still reaches
them."""

LOOK_EVERY_S = 1.0
"""Seconds between two checks whether a process has failed, while another one waits."""

_WARN_AFTER_S = 60.0  # a process that has waited this long logs those that it waits for

_PREFIX = "penstock"
# `wait` polls with growing pauses: a TCPStore's own wait can't be interrupted, blocks the
# connection's other requests, and writes to stderr if it times out.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 0.01, 0.25, 1.5
_FOREVER = timedelta(days=300)
_MOST_NOTICES = 65_536  # of one name, that are read
_MOST_RUNS = 12  # of ranks, that a message names


class JobStore:
    """A key-value store that all processes of a job can reach. Safe for several threads.

    Every method raises JobStoreError if the store doesn't answer. Values are short texts.
    """

    def __init__(self, store: Any, *, prefix: str = _PREFIX, kept: Any = None) -> None:
        """store: a store of torch. prefix: the prefix of every key. kept: an object to keep alive
        while this one is in use, such as the store that owns the server."""
        self._store, self._prefix, self._kept = store, prefix, kept

    @classmethod
    def of_group(cls) -> JobStore | None:
        """Return the store of torch's default process group; None if no group is initialised.

        It uses a separate connection if the kind of store allows that, so that its requests don't
        delay others and have their own time limit.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        return cls.of(group_store()) if distributed.is_initialized() else None

    @classmethod
    def of(cls, store: Any) -> JobStore:
        """Open a separate connection to a store of torch's, as `of_group` does."""
        try:
            own = store.clone()
        except (RuntimeError, NotImplementedError):
            return cls(store)  # it can't be cloned, so its owner's time limit applies
        own.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return cls(own, kept=store)

    def under(self, name: str) -> JobStore:
        """Return the same store with a name added to the prefix of every key."""
        return JobStore(self._store, prefix=f"{self._prefix}/{name}", kept=self._kept)

    def separate(self) -> JobStore | None:
        """Open another connection to the same server, for long waits; None for stores that have no
        server whose end could be noticed."""
        kind: Any = self._store
        while (inner := getattr(kind, "underlying_store", None)) is not None:
            kind = inner
        if type(kind).__name__ != "TCPStore":
            return None
        own = self._ask(lambda store: store.clone())
        return JobStore(own, prefix=self._prefix, kept=self._kept)

    # -- requests

    def set(self, key: str, value: str) -> None:
        """Write a value, replacing an older one."""
        self._ask(lambda store: store.set(self._key(key), value))

    def set_all(self, values: Mapping[str, str]) -> None:
        """Write several values by one request."""
        keys = [self._key(key) for key in values]
        self._ask(lambda store: store.multi_set(keys, list(values.values())))

    def get(self, key: str) -> str | None:
        """Return the value of a key; None if no process has set it yet."""
        name = self._key(key)
        found = self._ask(lambda store: store.get(name) if store.check([name]) else None)
        return None if found is None else _text(found)

    def has_all(self, keys: Sequence[str]) -> bool:
        """Return True if all of these keys are set, by one request."""
        names = [self._key(key) for key in keys]
        return bool(self._ask(lambda store: store.check(names)))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Return the values of keys that are all set, by one request."""
        names = [self._key(key) for key in keys]
        return [_text(value) for value in self._ask(lambda store: store.multi_get(names))]

    def set_once(self, key: str, value: str) -> str:
        """Write a value unless the key is set already; return the key's value."""
        return _text(self._ask(lambda store: store.compare_set(self._key(key), "", value)))

    def add(self, key: str, count: int) -> int:
        """Add to a counter that all processes share; return its new value."""
        return int(self._ask(lambda store: store.add(self._key(key), count)))

    def wait(self, key: str, *, timeout_s: float, look: Look = None) -> str | None:
        """Wait until a key is set, and return its value; None when time runs out.

        It polls the store with growing pauses, which an interrupt ends. look: called every
        `LOOK_EVERY_S` while the key is missing, and at last when time has run out; an error that it
        raises ends the wait.
        """
        until_s, look_at = time.monotonic() + timeout_s, 0.0
        pause, pause_s = threading.Event(), _FIRST_PAUSE_S
        while (value := self.get(key)) is None:
            now = time.monotonic()
            if look is not None and now >= min(look_at, until_s):
                look()
                look_at = now + LOOK_EVERY_S
            if now >= until_s:
                return None
            pause.wait(min(pause_s, until_s - now))
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_GROWTH * pause_s)
        return value

    def wait_forever(self, key: str) -> None:
        """Wait without a time limit until a key is set; this blocks the connection for others."""
        self._ask(lambda store: store.wait([self._key(key)], _FOREVER))

    # -- notices

    def post(self, name: str, text: str) -> int:
        """Publish one more notice of this name; return its number, from 1 on.

        `set` of the key NAME-NUMBER replaces it; "" withdraws it.
        """
        number = self.add(name, 1)
        self.set(f"{name}-{number}", text)
        return number

    def notices(self, name: str) -> dict[int, str]:
        """Return the notices of a name by their numbers, by three requests. Those that are
        withdrawn, or have a number and no text yet, are left out."""
        count = min(self.add(name, 0), _MOST_NOTICES)
        keys = {number: f"{name}-{number}" for number in range(1, count + 1)}
        if keys and not self.has_all([*keys.values()]):
            keys = {number: key for number, key in keys.items() if self.has_all([key])}
        texts = self.get_all([*keys.values()]) if keys else []
        return {number: text for number, text in zip(keys, texts, strict=True) if text}

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, request: Callable[[Any], T]) -> T:
        try:
            return request(self._store)
        except RuntimeError as error:  # the base class of the errors of all kinds of stores
            raise JobStoreError(
                f"The process group's store doesn't answer ({str(error).splitlines()[0]}). The "
                "process that holds it may have ended: look at rank 0."
            ) from error


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def group_store() -> Any:
    """Return the key-value store of torch's default process group, which must be initialised.

    torch doesn't document this function. It is the only such name outside `pipeline.torch_private`,
    whose test covers it, too.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """A barrier of a job's processes, at which they may also decide something together.

    store: for this barrier alone. process, processes: this one's number, and how many are expected.
    purpose: what an absent process hasn't done, for messages. remedy: what the user can do.
    Every method raises JobStoreError if the store doesn't answer.
    """

    store: JobStore
    process: int
    processes: int
    purpose: str = ""
    remedy: str = ""

    def arrive(self, text: str = "1") -> None:
        """Publish that this process has arrived, with a text for a decision. Call it once."""
        self.store.set(f"here-{self.process}", text)
        if self.store.add("came", 1) >= self.processes:
            self.store.set("all", "1")

    def arrived(self) -> int:
        """Return the number of processes that have arrived."""
        return self.store.add("came", 0)

    def wait(self, *, timeout_s: float, look: Look = None) -> bool:
        """Wait until all have arrived; return False when time runs out. look: as in
        `JobStore.wait`."""
        return self.store.wait("all", timeout_s=timeout_s, look=look) is not None

    def wait_for_all(self, *, timeout_s: float, waited_s: float = 0.0, look: Look = None) -> None:
        """Wait until all have arrived. waited_s: the part of the time limit that has passed.

        Raises StalledError, which names the absent processes, and what `look` raises.
        """
        self._wait("all", timeout_s=timeout_s, waited_s=waited_s, look=look)

    def decide(self, text: str, choose: Choose, *, timeout_s: float, look: Look = None) -> Decision:
        """Publish this process's text, and return what process 0 chooses from those of all.

        choose: called in process 0 alone, with the texts in the order of the processes; it returns
        JSON types. Raises what `wait_for_all` and, in process 0, `choose` raise. The caller
        publishes such a failure, so that `look` raises it in the other processes.
        """
        self.arrive(text)
        if self.process == 0:
            self.wait_for_all(timeout_s=timeout_s, look=look)
            texts = self.store.get_all([f"here-{number}" for number in range(self.processes)])
            self.answer(choose(texts))
        timeout_s += ANSWER_SPARE_S
        found: Decision = json.loads(self._wait("answer", timeout_s=timeout_s, look=look))
        return found

    def answer(self, decided: Decision) -> None:
        """Publish a decision in process 0, of JSON types; the first one counts."""
        self.store.set_once("answer", json.dumps(decided))

    def _wait(self, key: str, *, timeout_s: float, waited_s: float = 0.0, look: Look) -> str:
        """Wait for a key, and return its value. After a minute, log what is missing."""
        for until_s in sorted({min(_WARN_AFTER_S, timeout_s), timeout_s}):
            value = self.store.wait(key, timeout_s=max(0.0, until_s - waited_s), look=look)
            if value is None and key == "all" and not self._absent():
                value = "1"  # the last one arrived after the wait
            if value is not None:
                return value
            waited_s = max(until_s, waited_s)
            if until_s < timeout_s:
                text = f"rank {self.process} has waited {until_s:.0f} s for {self._missing()}"
                log.warning("%s; it waits at most %.0f s more", text, timeout_s - until_s)
        raise StalledError(
            f"Rank {self.process} of {self.processes} waited {timeout_s:.0f} s for "
            f"{self._missing()}. {self.remedy}"
        )

    def _absent(self) -> list[int]:
        return [n for n in range(self.processes) if self.store.get(f"here-{n}") is None]

    def _missing(self) -> str:
        absent = self._absent()
        return f"{format_ranks(absent)} {self.purpose}" if absent else "rank 0 to decide"


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
