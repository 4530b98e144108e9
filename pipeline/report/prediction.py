"""What a change would bring to a run: its own rate by a factor, up to where the next stage ends it.

Pure. A prediction says what it assumes and which figures it follows from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.report.causes import Limit
    from penstock.pipeline.report.ceilings import Rate, Stage
    from penstock.pipeline.report.change import Change
    from penstock.pipeline.report.facts import LoaderFacts

_CHANGED: dict[Limit, tuple[Stage, ...]] = {
    "disk": ("read",),
    "decode": ("decode", "augment"),
    "augment": ("decode", "augment"),
    "copy": ("copy",),
}
"""Stages whose ceilings move with a change of the limit; the others bound what it can bring."""
_STAYS: dict[Limit, str] = {
    "decode": "decoding stays the limit",
    "augment": "decoding is the limit then",
}
"""What a gain by a factor assumes."""
STAGE_WORDS: dict[Stage, str] = {
    "remote": "fetching",
    "read": "reading",
    "decode": "decoding",
    "augment": "decoding and augmenting",
    "copy": "the copy",
    "python": "Python",
}
_THE_STEP = "the training step"
_LEAST_STEP_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run would do after a change.

    samples_per_s: None where nothing measured tells. assumes: what has to be so for that, behind an
    "if". basis: the figures that it follows from.
    """

    samples_per_s: float | None
    assumes: str
    basis: str


def predict(change: Change, limit: Limit, facts: LoaderFacts) -> Prediction:
    """The rate with the change, what it assumes and what it follows from."""
    rate, bounds = facts.samples_per_s, _bounds(limit, facts)
    if change.factor is not None:
        wanted = rate * change.factor
        bound, name = min(bounds, default=(wanted, ""))
        if wanted <= bound:
            stays = _STAYS.get(limit, "nothing else becomes the limit")
            return Prediction(wanted, f"{change.assumes} and {stays}", change.basis)
    elif change.removes and facts.ceilings is not None and bounds:
        bound, name = min(bounds)
    else:
        return Prediction(None, "", change.basis)
    # A ceiling that was measured while others used the machine may lie below what the run did.
    stays = "takes what it took" if name == _THE_STEP else "gives what it gave alone"
    assumes = f"{change.assumes} and {name} {stays}"
    if limit in ("model", "python"):
        return Prediction(max(bound, rate), assumes, f"{name}, measured alone")
    return Prediction(max(bound, rate), assumes, f"{change.basis}; then {name} would be the limit")


def _bounds(limit: Limit, facts: LoaderFacts) -> list[tuple[float, str]]:
    """Samples a second of what stays as it is: the other stages and the training step."""
    changed = _CHANGED.get(limit, ())
    bounds: list[tuple[float, str]] = []
    for stage in STAGE_WORDS:
        if stage == "remote":  # a job whose limit it isn't reads what is here
            continue
        # Decoding alone bounds where only what follows it changes; else augmenting is slower.
        bounding = stage not in changed if stage != "decode" else limit == "augment"
        rate = _ceiling(stage, facts)
        if bounding and rate is not None:
            bounds.append((rate.samples_per_s, STAGE_WORDS[stage]))
    # A loop that only takes batches has no step to speak of.
    has_step = facts.trains and facts.step_s > _LEAST_STEP_SHARE * (facts.step_s + facts.wait_s)
    if limit not in ("model", "python") and has_step:
        bounds.append((facts.samples / facts.step_s, _THE_STEP))
    return bounds


def _ceiling(stage: Stage, facts: LoaderFacts) -> Rate | None:
    return facts.ceilings.stages().get(stage) if facts.ceilings is not None else None
