"""Derive the verdict from the facts of a run: its limit, the cause, and the most useful change.

Everything here is pure. The stage follows from where the training loop waited. Its cause is the
anomaly with the largest predicted gain (progressive JPEGs, oversized images, a slow core, tiny
shards, a small cache, ...); where nothing is out of the ordinary, the stage itself is. Every
prediction scales the rate of this very run by a factor, says what it assumes and where the factor
comes from, and ends where the next stage does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.report.remedies import changes_for, waits_for_disk

if TYPE_CHECKING:
    from penstock.pipeline.report.remedies import Change
    from penstock.pipeline.report.run_facts import Cause, Ceilings, Limit, LoaderFacts, Rate, Stage

# Waits shorter than this share of the time move nothing: the accelerator is fed.
FED_WAIT_SHARE = 0.02
# A cache that keeps less of what the node reads than this is too small for it.
_KEPT_SHARE = 0.98
# With less than this most bytes come from the remote in every epoch.
_KEPT_LITTLE = 0.5
# Tries to take the GIL that are late as often as this: somebody keeps it. A loop of pure Python or
# a C call that doesn't let it go made 58 to 71 of 100 late, a step that waits none to 7, with two
# cores and four times as many programs that wanted them (measured).
_HELD_GIL = 0.3
# Where decoding is less than this of the time that decoding and augmenting take, augmenting is it.
_DECODE_SHARE = 0.5
# A stage whose own ceiling is this near is what the run waits for.
_NEAR_CEILING = 0.8

_STAGE_OF_LIMIT: dict[Limit, Stage] = {
    "disk": "read",
    "remote": "remote",
    "cache": "remote",
    # What a run does of which decoding is the larger part: it never reaches decoding alone.
    "decode": "augment",
    "augment": "augment",
    "copy": "copy",
}
"""The stage whose ceiling a run's rate is compared with: its own part of the work, all of it."""


def find_limit(facts: LoaderFacts) -> Limit:
    """The stage that the training loop waited for."""
    if facts.batches < 1:
        return "nothing yet"
    holds_gil = facts.workers is None and facts.gil_late >= _HELD_GIL
    if facts.wait_share < FED_WAIT_SHARE:
        return "python" if holds_gil else "model"
    # Before the GIL: a function in the reading threads keeps it from the others of them.
    waits_for_bytes = facts.wait_read_s > facts.wait_decode_s or not facts.decodes
    if facts.map is not None and waits_for_bytes and facts.map.seconds > facts.load_s / 2:
        return "map"
    # Readers that are kept from the GIL leave decoding without work: it is waited for then, too.
    if holds_gil and facts.step_s > facts.wait_s:
        return "python"
    if facts.workers is not None:
        return "decode" if facts.wait_decode_s > facts.wait_read_s else "dataset"
    # Reading threads that decode into memory wait for no disk.
    if not waits_for_bytes or facts.fill_s > facts.load_s / 2:
        return _behind_the_bytes(facts)
    remote = facts.remote
    # By what the reading threads waited for: a job may fetch all the time and wait for a disk.
    if remote is None or remote.traffic.remote_wait_s < facts.load_s / 2:
        return "python" if holds_gil else "disk"
    if remote.traffic.bytes_peers > remote.traffic.bytes_remote:
        return "peers"
    is_small = remote.max_bytes > 0 and remote.kept_bytes < _KEPT_SHARE * remote.wanted_bytes
    # Until all that it keeps was read once, the rest isn't what the job waits for, unless the rest
    # is the larger part anyway.
    passes = remote.traffic.bytes_passed > remote.traffic.bytes_filled
    is_tiny = remote.max_bytes > 0 and remote.kept_bytes < _KEPT_LITTLE * remote.wanted_bytes
    return "cache" if is_small and (passes or is_tiny) else "remote"


def _behind_the_bytes(facts: LoaderFacts) -> Limit:
    """Which stage behind reading it is, where their ceilings are known."""
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
    """The stage that a limit is about and what it does alone, the one thing that `of_ceiling` is a
    share of; None where that wasn't measured."""
    stage = _STAGE_OF_LIMIT.get(limit)
    rate = ceilings.stages().get(stage) if stage is not None and ceilings is not None else None
    return (stage, rate) if stage is not None and rate is not None else None


_CHANGED_STAGES: dict[Limit, tuple[Stage, ...]] = {
    "disk": ("read",),
    "decode": ("decode", "augment"),
    "augment": ("decode", "augment"),
    "copy": ("copy",),
}
"""Stages whose ceilings move with a change of the limit; the others bound what it can bring."""
_GAIN_ASSUMPTIONS: dict[Limit, str] = {
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
            stays = _GAIN_ASSUMPTIONS.get(limit, "nothing else becomes the limit")
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
    changed = _CHANGED_STAGES.get(limit, ())
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


LEAST_PREDICTED_GAIN = 1.05
"""Times the rate of now, below which a prediction isn't told: it would read "1 times as many"."""

_LIMIT_SUBJECTS: dict[Limit, str] = {
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

_BYTE_SOURCES: dict[Limit, str] = {
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
    what = _LIMIT_SUBJECTS[limit] if has_model else "The loop that takes the batches is"
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
    if limit in _BYTE_SOURCES:
        return f"{at}, most of that for bytes from {_BYTE_SOURCES[limit]}"
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
    if times < LEAST_PREDICTED_GAIN:
        return ""
    return f"Predicted, if {assumes}: {rate:,.0f} samples/s, {times:.2g} times as many ({basis})."
