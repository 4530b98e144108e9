"""The verdict: facts in; out come the limit, its cause and the one change that helps most. Pure.

The stage follows from where the training loop waited. Its cause is the anomaly with the largest
predicted gain (progressive JPEGs, oversized images, a slow core, tiny shards, a small cache, ...);
where nothing is out of the ordinary, the stage itself is. Every prediction scales the rate of this
very run by a factor, says what it assumes and where the factor comes from, and ends where the next
stage does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.report.advice import changes_for
from penstock.pipeline.report.limit import ceiling_of, find_limit
from penstock.pipeline.report.prediction import STAGE_WORDS, predict
from penstock.pipeline.report.read_changes import waits_for_disk

if TYPE_CHECKING:
    from penstock.pipeline.report.causes import Cause, Limit
    from penstock.pipeline.report.facts import LoaderFacts
    from penstock.pipeline.report.prediction import Prediction

LEAST_GAIN = 1.05
"""Times the rate of now, below which a prediction isn't told: it would read "1 times as many"."""

_WHAT: dict[Limit, str] = {
    "model": "The model is",
    "python": "The training loop's Python is",
    "copy": "The copy to the device is",
    "augment": "Augmenting is",
    "decode": "Decoding and augmenting is",
    "dataset": "The dataset's own code is",
    "map": "Your function in the recipe is",
    "disk": "Reading is",
    "remote": "The remote is",
    "peers": "The link to the other nodes is",
    "cache": "The cache's size is",
}

_FROM: dict[Limit, str] = {
    "disk": "the disk",
    "remote": "the remote",
    "cache": "the remote",
    "peers": "other nodes' caches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What holds a run back.

    limit: the stage; cause: what is behind it. of_ceiling: the run's rate over what that stage does
    alone (`ceiling_of`), measured beside the run (of the model and of Python: the share of the time
    that they take); None where that wasn't measured. advice: the one change that would help most.
    predicted_samples_per_s: with it, None where nothing measured tells; assumes: what has to be so
    for that, behind an "if"; basis: the figures that it follows from. verdict: all of it, in some
    sentences.
    """

    limit: Limit
    cause: Cause
    of_ceiling: float | None
    advice: str
    predicted_samples_per_s: float | None
    assumes: str
    basis: str
    verdict: str


def diagnose(facts: LoaderFacts) -> Diagnosis:
    """Name the limit of a run, its cause, and what would move it."""
    limit = find_limit(facts)
    if limit == "nothing yet":
        return Diagnosis(
            limit=limit,
            cause="",
            of_ceiling=None,
            advice="",
            predicted_samples_per_s=None,
            assumes="",
            basis="",
            verdict="Too early to tell: fewer than two batches were handed out.",
        )
    changes = changes_for(limit, facts)
    change = max(changes, key=lambda one: (one.is_anomaly, one.factor or 0.0))
    prediction = predict(change, limit, facts)
    found = f"{_wait_words(limit, facts)}{_ceiling_words(limit, facts)}"
    has_model = facts.trains or limit != "model"
    what = _WHAT[limit] if has_model else "The loop that takes the batches is"
    return Diagnosis(
        limit=limit,
        cause=change.cause,
        of_ceiling=_of_ceiling(limit, facts),
        advice=change.advice,
        predicted_samples_per_s=prediction.samples_per_s,
        assumes=prediction.assumes,
        basis=prediction.basis,
        verdict=" ".join(
            part
            for part in (
                f"{what} the limit: {found}.",
                change.why,
                change.advice,
                _prediction_words(prediction, limit, facts),
            )
            if part
        ),
    )


def _of_ceiling(limit: Limit, facts: LoaderFacts) -> float | None:
    if limit in ("model", "python"):
        return 1 - facts.wait_share
    found = ceiling_of(limit, facts.ceilings)
    return facts.samples_per_s / found[1].samples_per_s if found is not None else None


def _wait_words(limit: Limit, facts: LoaderFacts) -> str:
    """How much of the time the training step waited, at which rate, and with what."""
    who = "the training step" if facts.trains else "a loop that only takes batches"
    waited = f"{who} waits {facts.wait_share:.1%} of the time"
    at = f"{waited} at {facts.samples_per_s:,.0f} samples/s"
    if limit in ("model", "python"):
        return waited
    if limit == "disk" and not waits_for_disk(facts):
        return f"{at}, most of that for samples to be read"
    if limit in _FROM:
        return f"{at}, most of that for bytes from {_FROM[limit]}"
    if limit == "map":
        return f"{at}, most of that for {facts.map.name if facts.map else 'Map'}"
    if limit == "dataset":
        workers = f"with {facts.workers} workers" if facts.workers else "in the training process"
        return f"{at}, read {workers}"
    if facts.device.startswith("cuda"):
        return f"{at} on the GPU"
    threads = facts.decode_threads
    return f"{at} with {threads} decode thread{'s' * (threads != 1)}"


def _ceiling_words(limit: Limit, facts: LoaderFacts) -> str:
    """How far the run is from what its stage does alone."""
    found = ceiling_of(limit, facts.ceilings)
    if found is None:
        return ""
    stage, rate = found
    share = facts.samples_per_s / rate.samples_per_s
    if share > 1:  # as where the machine was busier meanwhile
        return f" ({STAGE_WORDS[stage]} alone gave no more than {rate.samples_per_s:,.0f}/s)"
    return f" ({share:.0%} of the {rate.samples_per_s:,.0f}/s that {STAGE_WORDS[stage]} alone gave)"


def _prediction_words(prediction: Prediction, limit: Limit, facts: LoaderFacts) -> str:
    rate, assumes, basis = prediction.samples_per_s, prediction.assumes, prediction.basis
    if rate is None:
        return ""
    if limit in ("model", "python"):
        return f"If {assumes}, the input side could feed up to {rate:,.0f} samples/s ({basis})."
    times = rate / facts.samples_per_s if facts.samples_per_s else 1.0
    if times < LEAST_GAIN:
        return ""
    return f"Predicted, if {assumes}: {rate:,.0f} samples/s, {times:.2g} times as many ({basis})."
