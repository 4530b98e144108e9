"""How many requests may be in flight, by what they bring: arithmetic, no clock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cache.base.fetch_policy import FetchPolicy


class ConnectionLimit:
    """Adapts how many requests may be in flight: K = 1.25 * (bytes/s) / (bytes a request) * E[T].

    count: K, as it is now.

    By Little's law that is 1.25 times what was in flight on average, so a consumer that takes
    less than the remote can give gets what it needs and a quarter more. But batches come in bursts,
    whose mean says too little: K doesn't shrink while requests have had to wait for it. A consumer
    that takes all would grow K without end; so a larger K is on trial for a period, and stays if it
    brought more bytes a second. A throttled moment halves K.
    """

    PERIOD_S = 0.25
    GAIN = 1.05
    """What growing must bring; otherwise the link is full and more requests only wait longer."""
    HOLD = 20
    """Periods until the next trial after one that brought nothing."""

    def __init__(self, policy: FetchPolicy) -> None:
        self._policy = policy
        self.count = policy.start_connections
        self._began_s: float | None = None
        self._bytes = 0
        self._busy_s = 0.0
        self._done = 0
        self._throttled = False
        self._halved_s: float | None = None
        self._trial: tuple[int, float] | None = None
        self._hold = 0
        self._was_full = False
        # A burst after a pause mustn't find that the pause has cost it its connections.
        self._standing = max(
            policy.min_connections, min(policy.standing_connections, policy.start_connections)
        )

    def full(self) -> None:
        """Note that a request has to wait for one of these connections."""
        self._was_full = True

    def done(self, now_s: float, *, size_bytes: int, seconds: float) -> None:
        """Note a request that succeeded."""
        if self._began_s is None:
            self._began_s = now_s - seconds
        self._bytes += size_bytes
        self._busy_s += seconds
        self._done += 1
        if now_s - self._began_s >= self.PERIOD_S and self._done >= self.count:
            self._adapt(now_s - self._began_s)
            self._began_s, self._bytes, self._busy_s, self._done = now_s, 0, 0.0, 0
            self._throttled = False

    def throttled(self, now_s: float) -> None:
        """Note that the remote said "slow down": K is halved, once for all requests of a moment."""
        if self._halved_s is None or now_s - self._halved_s >= self.PERIOD_S:
            self.count = max(self._policy.min_connections, self.count // 2)
            self._trial = None
            self._hold = self.HOLD
            self._halved_s = now_s
        self._throttled = True

    def _adapt(self, elapsed_s: float) -> None:
        rate = self._bytes / elapsed_s
        wanted = math.ceil(1.25 * self._busy_s / elapsed_s)
        was_full, self._was_full = self._was_full, False
        trial, self._trial = self._trial, None
        self._hold = max(0, self._hold - 1)
        if self._throttled:
            return
        if trial is not None and rate < self.GAIN * trial[1]:
            self.count, self._hold = trial[0], self.HOLD
        elif wanted > self.count:
            if not self._hold and self.count < self._policy.max_connections:
                self._trial = self.count, rate
                self.count = min(wanted, self._policy.max_connections)
        elif not was_full:
            # Down by an eighth at most: a batch's burst follows every pause.
            least = max(self._standing, self.count - self.count // 8)
            self.count = min(self.count, max(wanted, least))
