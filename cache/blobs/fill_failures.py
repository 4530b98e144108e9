"""Remembers fetches that failed, for those who wait for what they would have brought.

Of several that want one piece one fetches it and the others wait. When that fetch fails for good,
it has spent the whole patience that a range gets; the others would only spend it again, one after
the other. So they end with the same error.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cache.disk.pieces import PieceSpan
    from penstock.cache.errors import FetchError

_REMEMBERED = 256


class _Failure(NamedTuple):
    at_s: float
    key: str
    run: PieceSpan
    error: FetchError


class FillFailures:
    """Remembers the failed fetches of one process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recent: deque[_Failure] = deque(maxlen=_REMEMBERED)

    def note(self, places: Iterable[tuple[str, PieceSpan]], error: FetchError) -> None:
        """Note the pieces (key of their blob, pieces) that a failed fetch held."""
        now_s = time.monotonic()
        with self._lock:
            self._recent += [_Failure(now_s, key, run, error) for key, run in places]

    def since(
        self, began_s: float, wanted: Iterable[tuple[str, list[PieceSpan]]]
    ) -> FetchError | None:
        """Find a fetch that failed behind a moment and held some of these pieces: its error."""
        with self._lock:
            recent = [each for each in self._recent if each.at_s >= began_s]
        if not recent:
            return None
        for key, runs in wanted:
            for failure in recent:
                low, high = failure.run
                if failure.key == key and any(low < end and high > at for at, end in runs):
                    error = failure.error
                    # One of its own: an exception that several threads raise mixes their traces.
                    return type(error)(str(error), uri=error.uri, missing=error.missing)
        return None
