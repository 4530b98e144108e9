"""Share short texts between the processes of a job through the store of torch's process group.

It never uses a collective, since rank 0 alone may build a loader: a reader gets what was published
so far, or waits for it with a time limit. Nothing is initialised here; without a process group
there is no store.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache.errors import JobStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

T = TypeVar("T")

STORE_TIMEOUT_S = 20.0
"""Of one question. The store of a job whose server died doesn't answer."""

_PREFIX = "penstock"
# Waits ask again and again, in pauses that grow: a TCPStore's own wait hears no interrupt, holds up
# the connection's other questions, and complains on stderr where it ends without an answer.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 0.01, 0.25, 1.5
_FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
_LOOK_EVERY_S, _LOOKED_OFTEN_S = 8.0, 60.0  # at most, while ranks may still be starting
_FOR_EVER = timedelta(days=300)


class JobStore:
    """A key-value store that all processes of a job reach. Safe for several threads.

    Every method raises JobStoreError where the store doesn't answer. Values are short texts.
    """

    def __init__(self, store: Any, *, prefix: str = _PREFIX, kept: Any = None) -> None:
        """store: one of torch's. prefix: before every key. kept: what mustn't go while this is in
        use, such as the store that holds the server."""
        self._store = store
        self._prefix = prefix
        self._kept = kept

    @classmethod
    def of_group(cls) -> JobStore | None:
        """The store of torch's default process group; None where no group stands.

        It is a connection of our own where the kind of store allows: no other question waits behind
        ours, and ours have a time limit of their own.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        return cls.of(group_store()) if distributed.is_initialized() else None

    @classmethod
    def of(cls, store: Any) -> JobStore:
        """A connection of our own to a store of torch's, as `of_group`."""
        try:
            own = store.clone()
        except (RuntimeError, NotImplementedError):
            return cls(store)  # one that can't be cloned: its owner's time limit holds
        own.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return cls(own, kept=store)

    def under(self, name: str) -> JobStore:
        """The same store, every key below a name."""
        return JobStore(self._store, prefix=f"{self._prefix}/{name}", kept=self._kept)

    def separate(self) -> JobStore | None:
        """Another connection to the same server, for somebody who waits for long; None for stores
        that have no server to lose."""
        kind: Any = self._store
        while (inner := getattr(kind, "underlying_store", None)) is not None:
            kind = inner
        if type(kind).__name__ != "TCPStore":
            return None
        own = self._ask(lambda store: store.clone())
        return JobStore(own, prefix=self._prefix, kept=self._kept)

    def set(self, key: str, value: str) -> None:
        """Write a value, over an older one."""
        self._ask(lambda store: store.set(self._key(key), value))

    def set_all(self, values: Mapping[str, str]) -> None:
        """Write several values by one question."""
        keys = [self._key(key) for key in values]
        self._ask(lambda store: store.multi_set(keys, list(values.values())))

    def get(self, key: str) -> str | None:
        """Read a value that was told; None where nobody has told it yet."""
        name = self._key(key)
        found = self._ask(lambda store: store.get(name) if store.check([name]) else None)
        return None if found is None else _text(found)

    def has_all(self, keys: Sequence[str]) -> bool:
        """Whether all of these are told, by one question."""
        names = [self._key(key) for key in keys]
        return bool(self._ask(lambda store: store.check(names)))

    def get_all(self, keys: Sequence[str]) -> list[str]:
        """Read values that all were told, by one question."""
        names = [self._key(key) for key in keys]
        return [_text(value) for value in self._ask(lambda store: store.multi_get(names))]

    def set_once(self, key: str, value: str) -> str:
        """Write a value unless somebody else was first; returns what stands there now."""
        return _text(self._ask(lambda store: store.compare_set(self._key(key), "", value)))

    def add(self, key: str, count: int) -> int:
        """Add to a counter of all processes; its new value."""
        return int(self._ask(lambda store: store.add(self._key(key), count)))

    def wait(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        look: Callable[[], float | None] | None = None,
    ) -> list[str]:
        """Wait until all of these keys are set; return those that aren't when the time is over.

        The store is asked in growing pauses, which an interrupt ends: its own wait hears none.

        look: called now and then while they aren't; says how many seconds to wait until the next
        time at most, 0 to wait no longer, None as usual.
        """
        began = look_at = time.monotonic()
        look_s, pause_s = _FIRST_LOOK_S, _FIRST_PAUSE_S
        nothing: queue.SimpleQueue[None] = queue.SimpleQueue()
        while not self.has_all(keys):
            now = time.monotonic()
            left_s = began + timeout_s - now
            if left_s <= 0:
                return [key for key in keys if self.get(key) is None]
            if look is not None and now >= look_at:
                asked_s = look()
                if asked_s == 0:
                    return [key for key in keys if self.get(key) is None]
                is_new = now - began < _LOOKED_OFTEN_S
                most_s = _LOOK_EVERY_S if is_new else _LONGEST_LOOK_S
                look_at = now + min(look_s, most_s if asked_s is None else asked_s)
                look_s *= 2
            with contextlib.suppress(queue.Empty):
                nothing.get(timeout=min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_GROWTH * pause_s)
        return []

    def wait_for_ever(self, key: str) -> None:
        """Wait until a key is told, and for nothing else: nobody else may use this connection."""
        self._ask(lambda store: store.wait([self._key(key)], _FOR_EVER))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _ask(self, question: Callable[[Any], T]) -> T:
        try:
            return question(self._store)
        except RuntimeError as error:  # each kind of store has its own errors, all of this kind
            raise _gone(error) from error


def _gone(error: RuntimeError) -> JobStoreError:
    return JobStoreError(
        f"The process group's store doesn't answer ({str(error).splitlines()[0]}). The process "
        "that holds it may have ended: look at rank 0."
    )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def group_store() -> Any:
    """The key-value store of torch's default process group, which must stand.

    torch doesn't document it; of such names this is the one outside of `pipeline.torch_private`,
    whose test watches this one, too.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
