"""One thing that could be changed about a run, and the gain that follows from its own figures.

A gain is a factor on the run's rate from a stated model, or the whole stage (`removes`: what is
left are the other stages), or unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.report.causes import Cause

# A change that gains less isn't worth a sentence.
LEAST_GAIN = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing to change. why: a sentence on what was found; advice: what to do. factor: on the
    run's rate, None if unknown; removes: it takes the whole stage away; basis: the figures that
    come from; assumes: what has to be so for the gain to come true, behind an "if". is_anomaly:
    what was found is out of the ordinary."""

    cause: Cause
    why: str = ""
    advice: str
    factor: float | None = None
    removes: bool = False
    basis: str = ""
    assumes: str = ""
    is_anomaly: bool = False
