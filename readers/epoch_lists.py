"""Hold which samples each epoch delivers, in order, where a sampler lists them."""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.readers.types import Ints


_KEPT = 3


class EpochList(NamedTuple):
    """The samples of an epoch by their positions in the source, int64, shape (n,), and how many
    earlier ones of the list are the same; None if none are."""

    positions: Ints
    occurrences: Ints | None

    @classmethod
    def of(cls, positions: Ints) -> EpochList:
        """Return a list with its repeats numbered."""
        order = positions.argsort(kind="stable")
        ordered = positions[order]
        is_first = np.append(True, ordered[1:] != ordered[:-1])
        if is_first.all():
            return cls(positions, None)
        place = np.arange(len(positions))
        occurrences = np.empty(len(positions), np.int64)
        occurrences[order] = place - place[is_first][np.cumsum(is_first) - 1]
        return cls(positions, occurrences)


class EpochLists:
    """The lists of all epochs, a pure function of seed and epoch. Safe for several threads.

    draw: returns the positions of an epoch, given a seed and the epoch. samples: of each epoch.
    """

    def __init__(self, draw: Callable[[int, int], Ints], *, samples: int) -> None:
        self._draw, self.samples = draw, samples
        self._known: dict[tuple[int, int], EpochList] = {}
        self._lock = threading.Lock()

    def of(self, seed: int, epoch: int) -> EpochList:
        """Return the list of an epoch; the latest ones are kept."""
        key = seed, epoch
        with self._lock:
            found = self._known.pop(key, None) or EpochList.of(self._draw(seed, epoch))
            self._known[key] = found
            while len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
            return found

    def fingerprint(self, seed: int) -> str:
        """Return the hash of the first epoch's list, 32 hex digits."""
        return hashlib.sha256(self.of(seed, 0).positions.astype("<i8").tobytes()).hexdigest()[:32]
