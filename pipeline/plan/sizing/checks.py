"""What a figure of a sizing may be."""

from __future__ import annotations

import math

from penstock.cache.errors import ConfigError

_MOST = 1e24
"""Of any figure: a yottabyte."""


def check_count(what: str, value: object, *, least: int = 1) -> None:
    """Raise ConfigError for what isn't a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what}: got {value!r}, wanted a whole number from {least} on.")


def check_figure(what: str, value: float, *, may_be_zero: bool = False, unit: str = "") -> None:
    """Raise ConfigError for what isn't a finite number above 0 (or 0), or beyond any machine."""
    if math.isfinite(value) and value > _MOST:
        raise ConfigError(f"{what}: got {value:g}{unit}, wanted at most {_MOST:g}.")
    good = math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))
    if not good:
        least = "0 or more" if may_be_zero else "more than 0"
        raise ConfigError(f"{what}: got {value:g}{unit}, wanted {least}.")
