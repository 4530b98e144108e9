"""Where redirects led: a hub that sends to a CDN by a signed URL is asked once in some minutes and
not once a range."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.stores.web_address import Hop

_KEPT_S = 240.0
"""Signed URLs of hubs and CDNs live for at least five minutes, most of them for an hour."""
_MOST_KEPT = 4096
_DISTRUSTED = 3
"""So many remembered redirects that were of no use, and they are for one request each here."""


class RedirectMemory:
    """A RedirectMemory keeps the last hop of each object for a while. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hops: OrderedDict[str, tuple[Hop, float]] = OrderedDict()
        self._useless = 0

    def recall(self, key: str) -> Hop | None:
        """Where the last redirect of an object led; None: ask the origin."""
        if not self._hops:
            return None
        with self._lock:
            hop, until_s = self._hops.get(key, (None, 0.0))
        return hop if time.monotonic() <= until_s else None

    def keep(self, key: str, hop: Hop) -> None:
        """Remember where a redirect led."""
        with self._lock:
            if self._useless < _DISTRUSTED:
                self._hops[key] = hop, time.monotonic() + _KEPT_S
                self._hops.move_to_end(key)
                while len(self._hops) > _MOST_KEPT:
                    self._hops.popitem(last=False)

    def forget(self, key: str, *, useless: bool = False) -> None:
        """Ask the origin next time. useless: what was remembered had expired."""
        with self._lock:
            self._hops.pop(key, None)
            self._useless += useless
