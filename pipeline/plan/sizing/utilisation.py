"""Compute accelerator utilisation (AU): the share of time in which the accelerator computes.

By DLIO's definition (github.com/argonne-lcf/dlio_benchmark, utils/statscounter.py,
`compute_metrics_train`, with its defaults metric_exclude_start_steps=1 and
metric_exclude_end_steps=0):

    AU = 100 * sum(compute[1:]) / (elapsed - (load[0] + compute[0]))

What matches: compute is the measured length of each emulated step, not the length asked for, so a
machine too busy to wake a step in time doesn't count as waiting; elapsed is by the clock, so all
between two steps counts as lost; the first step, its wait included, is in neither. What differs:
DLIO's elapsed also holds what follows the last step until its loop is left (its end of the epoch),
and DLIO takes the mean over epochs and ranks; it reads a clock that may be set, ours can't be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def au_percent(compute_s: Sequence[float], elapsed_s: float) -> float:
    """AU in per cent, 0 to 100.

    compute_s: measured seconds of the compute of each step but the first; elapsed_s: seconds from
    the end of the first step to the end of the last. 0.0 without a step: nothing was measured.

    Raises ConfigError where the steps are longer than the time that held them, or negative: they
    weren't read from one clock, or one of the two still holds the first step.
    """
    computed_s = sum(compute_s)
    if computed_s == 0:
        return 0.0
    # Sums of differences of one clock differ from the difference of its ends by rounding only.
    if min(compute_s) < 0 or computed_s > elapsed_s * (1 + 1e-9):
        raise ConfigError(
            f"{computed_s:.6f} s of steps in {elapsed_s:.6f} s can't be: every step must be at "
            "least 0 s and all of them at most the elapsed time. Read both from one clock, and "
            "leave the first step out of both."
        )
    return min(100.0, 100 * computed_s / elapsed_s)
