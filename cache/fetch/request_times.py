"""How long recent requests took, and so when one is late: arithmetic, no clock."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.base.fetch_policy import FetchPolicy


class RequestTimes:
    """Keeps times of recent requests by size class (powers of two), for hedges and look-ahead."""

    RECENT = 256
    REFRESH = 16
    """A class's quantile is worked out again after so many more requests: sorting costs 20 us."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self._classes: dict[int, deque[float]] = {}
        self._counts: dict[int, int] = {}
        self._late: dict[int, tuple[int, float]] = {}
        self._recent: deque[float] = deque(maxlen=self.RECENT)

    def add(self, size_bytes: int, seconds: float) -> None:
        """Note a request that succeeded."""
        name = size_bytes.bit_length()
        self._classes.setdefault(name, deque(maxlen=self.RECENT)).append(seconds)
        self._counts[name] = self._counts.get(name, 0) + 1
        if size_bytes:
            self._recent.append(seconds)

    def late_after_s(self, size_bytes: int) -> float | None:
        """How long a request of this size may take before it is hedged; None: too few seen."""
        name = size_bytes.bit_length()
        count = self._counts.get(name, 0)
        if count < self._policy.hedge_least:
            return None
        seen, late = self._late.get(name, (0, 0.0))
        if not seen or count - seen >= self.REFRESH:
            times = sorted(self._classes[name])
            late = max(
                quantile(times, self._policy.hedge_quantile),
                self._policy.hedge_factor * quantile(times, 0.5),
                self._policy.hedge_floor_s,
            )
            self._late[name] = count, late
        return late

    def summary(self) -> tuple[float, float]:
        """(mean, 99th percentile) of recent requests for bytes; (0.0, 0.0) before the first."""
        if not self._recent:
            return 0.0, 0.0
        return sum(self._recent) / len(self._recent), quantile(sorted(self._recent), 0.99)


def quantile(ordered: list[float], share: float) -> float:
    """The smallest of sorted values that at least `share` of them don't pass."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
