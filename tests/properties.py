"""How many examples a property is tested on."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

USUAL = 100
"""Hypothesis's own number, which `make verify` takes."""

# How long an example takes is what other programs on the machine leave it.
_ALWAYS: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("long", max_examples=USUAL, **_ALWAYS)
settings.register_profile("short", max_examples=30, **_ALWAYS)


def examples(count: int, **others: Any) -> settings:
    """Return a decorator for a property that needs more or fewer examples than usual: `count` with
    the long profile, a share of it with the short one. others: further settings of Hypothesis."""
    return settings(max_examples=max(1, count * settings().max_examples // USUAL), **others)
