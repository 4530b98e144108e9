"""Which stage holds a run back: the one that the training loop waited for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.pipeline.report.causes import Limit
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
    stage = _STAGE.get(limit)
    rate = ceilings.stages().get(stage) if stage is not None and ceilings is not None else None
    return (stage, rate) if stage is not None and rate is not None else None
