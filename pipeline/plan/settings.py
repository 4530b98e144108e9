"""Freezes what a job says of its order into a plan: its settings, the plan, a fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.plan.order import Plan, default_lanes, default_window

if TYPE_CHECKING:
    from penstock.pipeline.plan.buckets import BucketSettings
    from penstock.pipeline.plan.lane_order import LaneOrder
    from penstock.readers.contents import Contents


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What a plan was frozen with. seed: of draws, and of the order if shuffle. buckets: of batches
    that are cut by tokens, else None."""

    seed: int
    shuffle: bool
    lanes: int
    window: int
    reshuffle: float
    buckets: BucketSettings | None = None


def ordered_settings(*, seed: int) -> PlanSettings:
    """Plan settings of a job in index order. seed: of draws."""
    return PlanSettings(seed=seed, shuffle=False, lanes=1, window=1, reshuffle=0.0)


def shuffled_settings(
    contents: Contents,
    *,
    seed: int,
    global_batch: int,
    lanes: float | None = None,
    window: float | None = None,
    reshuffle: float = 0.0,
) -> PlanSettings:
    """Plan settings of a shuffled job: what isn't given follows from dataset and global batch."""
    shards = int(np.count_nonzero(contents.sizes))
    lanes = int(lanes or default_lanes(global_batch, shards))
    if not window and contents.units is not None:
        from penstock.pipeline.plan.unit_window import default_unit_window  # others need none of it

        window = default_unit_window(contents, lanes, global_batch=global_batch)
    window = int(
        window
        or default_window(
            shards,
            lanes,
            global_batch=global_batch,
            icc=contents.icc,
            shuffled=contents.shuffled,
            rows=contents.samples / max(1, shards),
        )
    )
    return PlanSettings(seed=seed, shuffle=True, lanes=lanes, window=window, reshuffle=reshuffle)


def make_plan(
    contents: Contents, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> Plan:
    """Make a plan from its settings, for one walker.

    Each takes a plan of its own: a plan remembers the windows of one place only, and two places on
    one plan would compute them over and over.
    """
    return Plan(
        contents.sizes,
        seed=settings.seed if settings.shuffle else None,
        lanes=settings.lanes,
        window=settings.window,
        reshuffle=settings.reshuffle,
        units=contents.units,
        lane_order=lane_order,
    )


def order_fingerprint(contents: Contents, settings: PlanSettings) -> str:
    """What a resumed job must share, of dataset and order, as hex."""
    plan = make_plan(contents, settings)
    told = f"{contents.fingerprint} {plan.fingerprint}"
    if settings.buckets is not None:
        told = f"{told} {settings.buckets}"
    return hashlib.sha256(told.encode()).hexdigest()
