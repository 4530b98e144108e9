"""The connections of a web client: in use, kept for the next request, and ended all at once."""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

from penstock.cache.base.store import RequestError

if TYPE_CHECKING:
    from penstock.cache.stores.web_address import WebOrigin
    from penstock.cache.stores.web_connection import Connection


class ConnectionPool:
    """A ConnectionPool keeps connections by origin. Safe for several threads.

    is_aborted: none is given any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[WebOrigin, list[Connection]] = {}
        self._live: set[Connection] = set()
        self.is_aborted = False
        weakref.finalize(self, _close_all, self._idle)

    def take(self, origin: WebOrigin, *, only_public: bool) -> Connection | None:
        """Take a kept connection that still works; None if there is none. Raises RequestError."""
        now_s = time.monotonic()
        while True:
            with self._lock:
                self.check()
                kept = self._idle.get(origin)
                fit = [each for each in kept or () if each.is_public or not only_public]
                if kept is None or not fit:
                    return None
                connection = fit[-1]
                kept.remove(connection)
                self._live.add(connection)
            if connection.is_fit(now_s):
                return connection
            self.put_back(connection, keep=False)

    def add(self, connection: Connection) -> None:
        """Count a new connection, which may only be about to be made. Raises RequestError behind
        abort, when it is in the pool already."""
        with self._lock:
            self._live.add(connection)
        self.check()

    def put_back(self, connection: Connection, *, keep: bool) -> None:
        """Keep a connection for others, or end it. Safe to call twice."""
        with self._lock:
            if connection not in self._live:
                return
            self._live.discard(connection)
            keep = keep and not self.is_aborted
            if keep:
                connection.rest()
                self._idle.setdefault(connection.origin, []).append(connection)
        if not keep:
            connection.close()

    def check(self) -> None:
        """Raise RequestError if the pool was aborted."""
        if self.is_aborted:
            raise RequestError("refused", "closed")

    def abort(self) -> None:
        """End all requests, now and later. Safe to call twice."""
        with self._lock:
            self.is_aborted = True
            live = list(self._live)
            idle = [each for some in self._idle.values() for each in some]
            self._idle.clear()
        for connection in live:
            connection.abort()
        for connection in idle:
            connection.close()


def _close_all(idle: dict[WebOrigin, list[Connection]]) -> None:
    """Of a pool that nobody has any more."""
    while idle:
        for connection in idle.popitem()[1]:
            connection.close()
