"""Derive the verdict from the facts of a run: its limit, the cause, and the most useful change.

This module is pure. The limit is the stage for which the training loop waited. Its cause is the
anomaly with the largest predicted gain (progressive JPEGs, oversized images, a slow core, tiny
shards, a small cache, ...), or the stage itself if nothing is unusual. A prediction multiplies the
rate of this run by a factor, states its assumptions and the source of the factor, and never exceeds
the ceiling of the next stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.report.remedies import LIMITS, Change, waits_for_disk

if TYPE_CHECKING:
    from penstock.pipeline.report.run_facts import Cause, Ceilings, Limit, LoaderFacts, Rate, Stage

# Waits shorter than this share of the time don't matter: the accelerator is busy.
FED_WAIT_SHARE = 0.02
# A cache that keeps less than this share of what the node reads is too small.
_KEPT_SHARE = 0.98
# If the cache keeps less than this, most bytes come from the remote in every epoch.
_KEPT_LITTLE = 0.5
# If this share of the attempts to take the GIL is late, another thread holds it. A loop of pure
# Python or a C call that doesn't release it made 58 to 71 of 100 late, and a step that waits 0 to
# 7, with two cores and four times as many busy programs (measured).
_HELD_GIL = 0.3
# If decoding takes less than this share of decoding and augmenting, augmenting is the limit.
_DECODE_SHARE = 0.5
# The run waits for a stage if its rate is this close to the stage's ceiling.
_NEAR_CEILING = 0.8


def find_limit(facts: LoaderFacts) -> Limit:
    """Return the stage for which the training loop waited."""
    if facts.batches < 1:
        return "nothing yet"
    holds_gil = facts.workers is None and facts.gil_late >= _HELD_GIL
    if facts.wait_share < FED_WAIT_SHARE:
        return "python" if holds_gil else "model"
    # Checked before the GIL: a function in one reading thread holds it against the others.
    waits_for_bytes = facts.wait_read_s > facts.wait_decode_s or not facts.decodes
    if facts.map is not None and waits_for_bytes and facts.map.seconds > facts.load_s / 2:
        return "map"
    # Reading threads that can't take the GIL leave decoding without work, so the training loop
    # waits for decoding, too.
    if holds_gil and facts.step_s > facts.wait_s:
        return "python"
    if facts.workers is not None:
        return "decode" if facts.wait_decode_s > facts.wait_read_s else "dataset"
    # Reading threads that decode into memory wait for no disk.
    if not waits_for_bytes or facts.fill_s > facts.load_s / 2:
        return _limit_after_reading(facts)
    remote = facts.remote
    # The reading threads' waits decide: a job may fetch all the time and still wait for a disk.
    if remote is None or remote.traffic.remote_wait_s < facts.load_s / 2:
        return "python" if holds_gil else "disk"
    if remote.traffic.bytes_peers > remote.traffic.bytes_remote:
        return "peers"
    is_small = remote.max_bytes > 0 and remote.kept_bytes < _KEPT_SHARE * remote.wanted_bytes
    # In the first epoch the job also waits for bytes that the cache will keep. The cache's size is
    # the limit only once more bytes pass it by, or if it keeps the smaller part in any case.
    passes = remote.traffic.bytes_passed > remote.traffic.bytes_filled
    is_tiny = remote.max_bytes > 0 and remote.kept_bytes < _KEPT_LITTLE * remote.wanted_bytes
    return "cache" if is_small and (passes or is_tiny) else "remote"


def _limit_after_reading(facts: LoaderFacts) -> Limit:
    """Return the limiting stage after reading: decode, unless the ceilings name another one."""
    ceilings = facts.ceilings
    if ceilings is None:
        return "decode"
    copy, augment = ceilings.copy, ceilings.augment
    if copy is not None and augment is not None:
        is_slower = copy.samples_per_s < augment.samples_per_s
        if is_slower and facts.samples_per_s > _NEAR_CEILING * copy.samples_per_s:
            return "copy"
    share = ceilings.decode_share
    return "augment" if share is not None and share < _DECODE_SHARE else "decode"


def ceiling_of(limit: Limit, ceilings: Ceilings | None) -> tuple[Stage, Rate] | None:
    """Return the stage of a limit and its rate alone, of which `of_ceiling` is the share.

    None if that wasn't measured.
    """
    stage = LIMITS[limit].stage if limit in LIMITS else None
    rate = ceilings.stages().get(stage) if stage is not None and ceilings is not None else None
    return (stage, rate) if stage is not None and rate is not None else None


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


def predict(change: Change, limit: Limit, facts: LoaderFacts) -> tuple[float | None, str, str]:
    """Predict the rate after a change; None if no measurement predicts it.

    Also returns the conditions, to be read after an "if", and the figures from which it follows.
    """
    rate, bounds = facts.samples_per_s, _bounds(limit, facts)
    if change.factor is not None and not change.is_most:
        wanted = rate * change.factor
        bound, name = min(bounds, default=(wanted, ""))
        if wanted <= bound:
            return wanted, f"{change.assumes} and {LIMITS[limit].gain}", change.basis
    elif change.removes and facts.ceilings is not None and bounds:
        bound, name = min(bounds)
    else:
        return None, "", change.basis
    # A ceiling measured while other programs used the machine may lie below the run's rate.
    rest = "takes as long as before" if name == _THE_STEP else "reaches the rate that it has alone"
    basis = f"{change.basis}; then {name} would be the limit"
    if limit in ("model", "python"):
        basis = f"{name}, measured alone"
    return max(bound, rate), f"{change.assumes} and {name} {rest}", basis


def _bounds(limit: Limit, facts: LoaderFacts) -> list[tuple[float, str]]:
    """Return the rates of what doesn't change, the other stages and the training step, by name."""
    changed = LIMITS[limit].changed
    ceilings = {} if facts.ceilings is None else facts.ceilings.stages()
    bounds: list[tuple[float, str]] = []
    for stage in STAGE_WORDS:
        if stage == "remote":  # if it isn't the limit, the job reads local bytes
            continue
        # Decoding alone is a bound only if augmenting changes; otherwise augmenting is slower.
        bounding = stage not in changed if stage != "decode" else limit == "augment"
        if bounding and stage in ceilings:
            bounds.append((ceilings[stage].samples_per_s, STAGE_WORDS[stage]))
    # A loop that only takes batches has no training step.
    has_step = facts.trains and facts.step_s > _LEAST_STEP_SHARE * (facts.step_s + facts.wait_s)
    if limit not in ("model", "python") and has_step:
        bounds.append((facts.samples / facts.step_s, _THE_STEP))
    return bounds


_OF_DATA: tuple[Limit, ...] = ("disk", "remote", "peers", "cache")
# A part is named if it takes most of the reading time, and clearly more than its share.
_SLOW_PART_SHARE, _SLOW_PART_TIMES = 0.5, 1.5

LEAST_PREDICTED_GAIN = 1.05
"""A verdict leaves out a smaller gain, which would read "1 times as many"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The limit of a run, its cause and its remedy.

    limit: the stage; cause: the reason. of_ceiling: the run's rate divided by the rate of that
    stage alone (`ceiling_of`); for the model and Python, the share of the time that they take; None
    if it wasn't measured. advice: the one change that would help most. predicted_samples_per_s: the
    rate after that change, None if no measurement predicts it; assumes: the conditions, to be read
    after an "if"; basis: the figures from which it follows. verdict: all of this in a few
    sentences.
    """

    limit: Limit
    cause: Cause = ""
    of_ceiling: float | None = None
    advice: str = ""
    predicted_samples_per_s: float | None = None
    assumes: str = ""
    basis: str = ""
    verdict: str


def diagnose(facts: LoaderFacts) -> Diagnosis:
    """Return the limit of a run, its cause, and the change that would help most."""
    limit = find_limit(facts)
    if limit == "nothing yet":
        verdict = "Too early to judge: fewer than two batches were delivered."
        return Diagnosis(limit=limit, verdict=verdict)
    kind, found = LIMITS[limit], ceiling_of(limit, facts.ceilings)
    changes = [change for propose in kind.changes if (change := propose(facts)) is not None]
    change = max(changes, key=lambda each: (each.is_anomaly, each.factor or 0.0))
    rate, assumes, basis = predict(change, limit, facts)
    of_ceiling = None if found is None else facts.samples_per_s / found[1].samples_per_s
    if limit in ("model", "python"):
        of_ceiling = 1 - facts.wait_share
    subject = kind.subject
    if limit == "model" and not facts.trains:
        subject = "The loop that takes the batches"
    waits = f"{_describe_waits(limit, facts)}{_describe_ceiling(found, of_ceiling)}"
    prediction = _describe_prediction(rate, assumes, basis, limit, facts)
    part = _slow_part(limit, facts)
    parts = (f"{subject} is the limit: {waits}.", part, change.why, change.advice, prediction)
    return Diagnosis(
        limit=limit,
        cause=change.cause,
        of_ceiling=of_ceiling,
        advice=change.advice,
        predicted_samples_per_s=rate,
        assumes=assumes,
        basis=basis,
        verdict=" ".join(part for part in parts if part),
    )


def _describe_waits(limit: Limit, facts: LoaderFacts) -> str:
    """Describe the share of the time that the training step waited, its rate, and the setup."""
    loop = "the training step" if facts.trains else "a loop that only takes batches"
    waited = f"{loop} waits {facts.wait_share:.1%} of the time"
    if limit in ("model", "python"):
        return waited
    waits_for = LIMITS[limit].waits_for
    if limit == "disk" and not waits_for_disk(facts):
        waits_for = "samples to be read"
    elif limit == "map" and facts.map is not None:
        waits_for = facts.map.name
    if waits_for:
        setup = f", most of that for {waits_for}"
    elif limit == "dataset":
        setup = ", read in the training process"
        if facts.workers:
            setup = f", read with {facts.workers} workers"
    elif facts.on_gpu:
        setup = " on the GPU"
    else:
        threads = facts.decode_threads
        setup = f" with {threads} decode thread{'s' * (threads != 1)}"
    return f"{waited} at {facts.samples_per_s:,.0f} samples/s{setup}"


def _slow_part(limit: Limit, facts: LoaderFacts) -> str:
    """Describe the part of a mixture whose data is the limit; "" if none is slower than others."""
    part = facts.part
    if limit not in _OF_DATA or part is None or part.load_share < _SLOW_PART_SHARE:
        return ""
    if part.load_share < _SLOW_PART_TIMES * part.sample_share:
        return ""
    return (
        f'It is the data of the part "{part.name}": {part.load_share:.0%} of the reading time for '
        f"{part.sample_share:.0%} of the samples."
    )


def _describe_ceiling(found: tuple[Stage, Rate] | None, share: float | None) -> str:
    """Describe the run's rate as a share of its stage's rate alone; "" if that is unknown."""
    if found is None or share is None:
        return ""
    alone, rate = f"{STAGE_WORDS[found[0]]} alone", found[1].samples_per_s
    if share > 1:  # for example because the machine was busier while the ceiling was measured
        return f" ({alone} reached no more than {rate:,.0f}/s)"
    return f" ({share:.0%} of the {rate:,.0f}/s that {alone} reached)"


def _describe_prediction(
    rate: float | None, assumes: str, basis: str, limit: Limit, facts: LoaderFacts
) -> str:
    if rate is None:
        return ""
    if limit in ("model", "python"):
        return f"If {assumes}, the input side could feed up to {rate:,.0f} samples/s ({basis})."
    times = rate / facts.samples_per_s if facts.samples_per_s else 1.0
    if times < LEAST_PREDICTED_GAIN:
        return ""
    return f"Predicted, if {assumes}: {rate:,.0f} samples/s, {times:.2g} times as many ({basis})."
