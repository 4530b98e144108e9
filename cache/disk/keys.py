"""The locks that stand for blobs' keys: who fills, publishes or drops a blob holds its key."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache.disk.layout import Layout

_TIMEOUT_S = 30.0


class KeyLocks:
    """KeyLocks hold a lock for each key of a cache.

    Every holder opens the file anew, so that threads exclude each other.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @contextlib.contextmanager
    def holding(self, key: str, *, timeout_s: float = _TIMEOUT_S) -> Iterator[None]:
        """Hold a blob's key. Raises StalledError."""
        locks = self._layout.locks("keys")
        try:
            with locks.holding(_offset(key), timeout_s=timeout_s, what=f"blob {key}"):
                yield
        finally:
            locks.close()

    @contextlib.contextmanager
    def trying(self, key: str) -> Iterator[bool]:
        """Hold a blob's key if it is free: whether it was."""
        locks = self._layout.locks("keys")
        try:
            yield locks.lock(_offset(key))
        finally:
            locks.close()


def _offset(key: str) -> int:
    """Where a key's lock is: 60 bits of it."""
    return int(key.partition("-")[0][:15], 16)
