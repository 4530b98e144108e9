"""Share short texts between the processes of a job through the store of torch's process group.

It never uses a collective, because perhaps only rank 0 builds a loader: a reader gets what was
published so far, or waits for it with a time limit. This module initialises nothing; without a
process group there is no store.
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
"""The time limit of one request, because a store whose server died doesn't answer."""

_PREFIX = "penstock"
# `wait` polls with growing pauses: a TCPStore's own wait can't be interrupted, blocks the
# connection's other requests, and writes to stderr if it times out.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PAUSE_GROWTH = 0.01, 0.25, 1.5
FIRST_LOOK_S, _LONGEST_LOOK_S = 1.0, 30.0
_EARLY_LOOK_S, _EARLY_S = 8.0, 60.0  # the longest interval while ranks may still be starting
_FOREVER = timedelta(days=300)


class JobStore:
    """A key-value store that all processes of a job can reach. Safe for several threads.

    Every method raises JobStoreError if the store doesn't answer. Values are short texts.
    """

    def __init__(self, store: Any, *, prefix: str = _PREFIX, kept: Any = None) -> None:
        """store: a store of torch. prefix: the prefix of every key. kept: an object to keep alive
        while this one is in use, such as the store that owns the server."""
        self._store = store
        self._prefix = prefix
        self._kept = kept

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

    def wait(
        self,
        keys: Sequence[str],
        *,
        timeout_s: float,
        look: Callable[[], float | None] | None = None,
    ) -> list[str]:
        """Wait until all of these keys are set; return those that aren't set when time runs out.

        It polls the store with growing pauses, which an interrupt ends.

        look: called from time to time while keys are missing. It returns the longest time in
        seconds until its next call, 0 to end the wait, or None for the usual interval.
        """
        began = look_at = time.monotonic()
        look_s, pause_s = FIRST_LOOK_S, _FIRST_PAUSE_S
        nothing: queue.SimpleQueue[None] = queue.SimpleQueue()
        while not self.has_all(keys):
            now = time.monotonic()
            left_s = began + timeout_s - now
            if left_s <= 0:
                return [key for key in keys if self.get(key) is None]
            if look is not None and now >= look_at:
                next_s = look()
                if next_s == 0:
                    return [key for key in keys if self.get(key) is None]
                most_s = _EARLY_LOOK_S if now - began < _EARLY_S else _LONGEST_LOOK_S
                look_at = now + min(look_s, most_s if next_s is None else next_s)
                look_s *= 2
            with contextlib.suppress(queue.Empty):
                nothing.get(timeout=min(pause_s, left_s))
            pause_s = min(_LONGEST_PAUSE_S, _PAUSE_GROWTH * pause_s)
        return []

    def wait_forever(self, key: str) -> None:
        """Wait without a time limit until a key is set; this blocks the connection for others."""
        self._ask(lambda store: store.wait([self._key(key)], _FOREVER))

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
