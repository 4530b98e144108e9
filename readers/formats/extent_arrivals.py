"""Share extents of a shard that one batch is fetching with other batches that need them.

Batches that are read at the same time need the same chunks. The cache fetches each byte once per
node; what it doesn't keep is shared here, for as long as the batch that fetched it is being read:
by then it is decoded, and decoded chunks are kept.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

T = TypeVar("T")


class Arrival(Generic[T]):
    """One extent on its way, and behind that who has it."""

    def __init__(self) -> None:
        self._is_settled = threading.Event()
        self._holder: weakref.ref[T] | None = None

    def settle(self, holder: T | None) -> None:
        """Say who has it; None: it doesn't come, if that wasn't settled before."""
        if holder is not None:
            self._holder = weakref.ref(holder)
        self._is_settled.set()

    @property
    def is_over(self) -> bool:
        """Whether nobody has it, and nobody is fetching it."""
        return self._is_settled.is_set() and (self._holder is None or self._holder() is None)

    def wait(self, timeout_s: float) -> T | None:
        """Who has it; None: nobody has it any more, or it takes too long."""
        if not self._is_settled.wait(timeout_s) or self._holder is None:
            return None
        return self._holder()


class Arrivals(Generic[T]):
    """What was fetched and decoded of one shard's extents. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[int, Arrival[T]] = {}
        self._chunks: dict[int, set[int]] = {}

    def claim(self, extents: Iterable[int]) -> tuple[dict[int, Arrival[T]], dict[int, Arrival[T]]]:
        """Who is to fetch these: the caller, which settles each, and for the rest what it can wait
        for."""
        mine, others = {}, {}
        with self._lock:
            for extent in extents:
                known = self._coming.get(extent)
                if known is None or known.is_over:
                    mine[extent] = self._coming[extent] = Arrival()
                else:
                    others[extent] = known
        return mine, others

    def note(self, extents: Iterable[int], chunk: int) -> None:
        """Note that a chunk is decoded of these."""
        with self._lock:
            for extent in extents:
                self._chunks.setdefault(extent, set()).add(chunk)

    def chunks(self, extent: int) -> tuple[int, ...]:
        """The chunks that were decoded of an extent."""
        with self._lock:
            return tuple(self._chunks.get(extent, ()))
