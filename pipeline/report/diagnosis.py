"""The verdict: facts in; out come the limit, its cause and the one change that helps most. Pure.

The stage is told by where the training loop waited. Its cause is the anomaly with the largest
predicted gain (progressive JPEGs, oversized images, a slow core, tiny shards, a small cache, ...);
where nothing is out of the ordinary, the stage itself is. Every prediction scales the rate of this
very run by a factor, says what it assumes and where the factor comes from, and ends where the next
stage does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.pipeline.report.advice import changes_for

if TYPE_CHECKING:
    from penstock.pipeline.report.advice import Change
    from penstock.pipeline.report.causes import Cause, Limit
    from penstock.pipeline.report.ceilings import Ceilings, Rate, Stage
    from penstock.pipeline.report.facts import LoaderFacts

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

_STAGE: dict[Limit, Stage] = {
    "disk": "read",
    "remote": "remote",
    "cache": "remote",
    # What a run does of which decoding is the larger part: it never reaches decoding alone.
    "decode": "augment",
    "augment": "augment",
    "copy": "copy",
}
"""The stage whose ceiling a run's rate is told against: its own part of the work, all of it."""
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
_DOING: dict[Stage, str] = {
    "remote": "fetching",
    "read": "reading",
    "decode": "decoding",
    "augment": "decoding and augmenting",
    "copy": "the copy",
    "python": "Python",
}
_THE_STEP = "the training step"
_WHAT: dict[Limit, str] = {
    "model": "The model is",
    "python": "The training loop's Python is",
    "copy": "The copy to the device is",
    "augment": "Augmenting is",
    "decode": "Decoding and augmenting is",
    "dataset": "The dataset's own code is",
    "disk": "Reading is",
    "remote": "The remote is",
    "cache": "The cache's size is",
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
    predicted, assumes, basis = _predicted(change, limit, facts)
    return Diagnosis(
        limit=limit,
        cause=change.cause,
        of_ceiling=_of_ceiling(limit, facts),
        advice=change.advice,
        predicted_samples_per_s=predicted,
        assumes=assumes,
        basis=basis,
        verdict=" ".join(
            part
            for part in (
                f"{_WHAT[limit]} the limit: {_waited(limit, facts)}{_told_ceiling(limit, facts)}.",
                change.why,
                change.advice,
                _told_prediction(predicted, assumes, basis, limit, facts),
            )
            if part
        ),
    )


def find_limit(facts: LoaderFacts) -> Limit:
    """The stage that the training loop waited for."""
    if facts.batches < 1:
        return "nothing yet"
    holds_gil = facts.workers is None and facts.gil_late >= _HELD_GIL
    if facts.wait_share < FED_WAIT_SHARE:
        return "python" if holds_gil else "model"
    # Readers that are kept from the GIL leave decoding without work: it is waited for then, too.
    if holds_gil and facts.step_s > facts.wait_s:
        return "python"
    if facts.workers is not None:
        return "decode" if facts.wait_decode_s > facts.wait_read_s else "dataset"
    # Reading threads that decode into memory wait for no disk.
    if facts.wait_read_s <= facts.wait_decode_s or facts.fill_s > facts.load_s / 2:
        return _behind_the_bytes(facts)
    remote = facts.remote
    # By what the reading threads waited for: a job may fetch all the time and wait for a disk.
    if remote is None or remote.traffic.remote_wait_s < facts.load_s / 2:
        return "python" if holds_gil else "disk"
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


def _ceiling(stage: Stage, facts: LoaderFacts) -> Rate | None:
    return facts.ceilings.stages().get(stage) if facts.ceilings is not None else None


def ceiling_of(limit: Limit, ceilings: Ceilings | None) -> tuple[Stage, Rate] | None:
    """The stage that a limit is about and what it does alone, the one thing that `of_ceiling` is a
    share of; None where that wasn't measured."""
    stage = _STAGE.get(limit)
    rate = ceilings.stages().get(stage) if stage is not None and ceilings is not None else None
    return (stage, rate) if stage is not None and rate is not None else None


def _of_ceiling(limit: Limit, facts: LoaderFacts) -> float | None:
    if limit in ("model", "python"):
        return 1 - facts.wait_share
    found = ceiling_of(limit, facts.ceilings)
    return facts.samples_per_s / found[1].samples_per_s if found is not None else None


def _predicted(change: Change, limit: Limit, facts: LoaderFacts) -> tuple[float | None, str, str]:
    """The rate with the change, what it assumes and what it follows from."""
    rate, bounds = facts.samples_per_s, _bounds(limit, facts)
    if change.factor is not None:
        wanted = rate * change.factor
        bound, name = min(bounds, default=(wanted, ""))
        if wanted <= bound:
            stays = _STAYS.get(limit, "nothing else becomes the limit")
            return wanted, f"{change.assumes} and {stays}", change.basis
    elif change.removes and facts.ceilings is not None and bounds:
        bound, name = min(bounds)
    else:
        return None, "", change.basis
    # A ceiling that was measured while others used the machine may lie below what the run did.
    stays = "takes what it took" if name == _THE_STEP else "gives what it gave alone"
    assumes = f"{change.assumes} and {name} {stays}"
    if limit in ("model", "python"):
        return max(bound, rate), assumes, f"{name}, measured alone"
    return max(bound, rate), assumes, f"{change.basis}; then {name} would be the limit"


def _bounds(limit: Limit, facts: LoaderFacts) -> list[tuple[float, str]]:
    """Samples a second of what stays as it is: the other stages and the training step."""
    changed = _CHANGED.get(limit, ())
    bounds: list[tuple[float, str]] = []
    for stage in _DOING:
        if stage == "remote":  # a job whose limit it isn't reads what is here
            continue
        # Decoding alone bounds where only what follows it changes; else augmenting is slower.
        bounding = stage not in changed if stage != "decode" else limit == "augment"
        rate = _ceiling(stage, facts)
        if bounding and rate is not None:
            bounds.append((rate.samples_per_s, _DOING[stage]))
    if limit not in ("model", "python") and facts.step_s > 0:
        bounds.append((facts.samples / facts.step_s, _THE_STEP))
    return bounds


def _waited(limit: Limit, facts: LoaderFacts) -> str:
    """How much of the time the training step waited, at which rate, and with what."""
    waited = f"the training step waits {facts.wait_share:.1%} of the time"
    at = f"{waited} at {facts.samples_per_s:,.0f} samples/s"
    if limit in ("model", "python"):
        return waited
    if limit in ("disk", "remote", "cache"):
        return f"{at}, most of that for bytes from the {'disk' if limit == 'disk' else 'remote'}"
    if limit == "dataset":
        workers = f"with {facts.workers} workers" if facts.workers else "in the training process"
        return f"{at}, read {workers}"
    if facts.device.startswith("cuda"):
        return f"{at} on the GPU"
    threads = facts.decode_threads
    return f"{at} with {threads} decode thread{'s' * (threads != 1)}"


def _told_ceiling(limit: Limit, facts: LoaderFacts) -> str:
    """How far the run is from what its stage does alone."""
    found = ceiling_of(limit, facts.ceilings)
    if found is None:
        return ""
    stage, rate = found
    share = facts.samples_per_s / rate.samples_per_s
    return f" ({share:.0%} of the {rate.samples_per_s:,.0f}/s that {_DOING[stage]} alone gave)"


def _told_prediction(
    predicted: float | None, assumes: str, basis: str, limit: Limit, facts: LoaderFacts
) -> str:
    if predicted is None:
        return ""
    if limit in ("model", "python"):
        return (
            f"If {assumes}, the input side could feed up to {predicted:,.0f} samples/s ({basis})."
        )
    times = predicted / facts.samples_per_s if facts.samples_per_s else 1.0
    return (
        f"Predicted, if {assumes}: {predicted:,.0f} samples/s, {times:.2g} times as many ({basis})."
    )
