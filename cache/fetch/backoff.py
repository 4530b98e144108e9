"""The pause before a request is made again: arithmetic, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from penstock.cache.base.fetch_policy import FetchPolicy

_THROTTLED_ATTEMPTS = 3
"""A store that says "slow down" wants more than a packet that got lost: 8 times the pause."""


def backoff_s(
    policy: FetchPolicy,
    attempts: int,
    jitter: random.Random,
    *,
    throttled: bool = False,
    retry_after_s: float | None = None,
) -> float:
    """The pause after `attempts` failed requests. retry_after_s: what the server asked for; the
    pause is never shorter, and the jitter comes on top, so that not all come back at once."""
    power = min(attempts + (_THROTTLED_ATTEMPTS if throttled else 0), 64)
    pause = jitter.uniform(0, min(policy.backoff_cap_s, policy.backoff_base_s * 2.0**power))
    return pause + (retry_after_s or 0.0)
