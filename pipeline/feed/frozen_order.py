"""Freeze a job's order from the user's options, check it, and warn of its costs."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache import PenstockWarning, PlanError
from penstock.pipeline.options import check_shuffles
from penstock.pipeline.plan import (
    BatchSchedule,
    JobOrder,
    Walk,
    buckets_of,
    ordered_settings,
    shuffled_settings,
)

if TYPE_CHECKING:
    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import LaneOrder, LoaderState, PlanSettings
    from penstock.readers import Contents, Source


def freeze_order(
    source: Source,
    options: LoaderOptions,
    settings: PlanSettings | None = None,
    lane_order: LaneOrder | None = None,
) -> JobOrder:
    """Return the order of a job.

    settings: of a state's plan, used unchanged; None at a job's first start. lane_order: of that
    plan; None is the identity. Raises ConfigError and PlanError.
    """
    if options.batch_tokens is not None or (settings and settings.buckets):
        return _by_tokens(source, options, settings, lane_order)
    if settings is None:
        global_batch = options.schedule.first_size  # the lanes stay as the batch grows
        settings = _first_settings(source.contents, options, global_batch=global_batch)
    schedule, samples = options.schedule, source.contents.samples
    if not samples or (options.drop_last and schedule.largest > samples):
        raise PlanError(
            f"One global batch of {schedule.largest} samples is more than the {samples} of "
            f"{source!r}, and drop_last=True drops it: an epoch would have no step. Pass a "
            "smaller batch or drop_last=False."
        )
    walk = Walk(samples=samples, schedule=schedule, drop_last=options.drop_last)
    return JobOrder(source=source, settings=settings, walk=walk, lane_order=lane_order)


def _by_tokens(
    source: Source,
    options: LoaderOptions,
    settings: PlanSettings | None,
    lane_order: LaneOrder | None,
) -> JobOrder:
    """Return the order of a job whose batches are cut by tokens."""
    from penstock.pipeline.feed.token_batches import check_resumed, freeze_buckets

    if settings is None:
        buckets = freeze_buckets(source, options)
        first = _first_settings(source.contents, options, global_batch=buckets.batch)
        settings = replace(first, buckets=buckets)
    else:
        check_resumed(source, settings.buckets, options, ranks=options.world.size)
    return bucket_order(source, settings, lane_order)


def bucket_order(
    source: Source, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> JobOrder:
    """Return the order of a job from settings that cut batches by tokens."""
    from penstock.pipeline.plan import BucketWalk  # needed by such jobs only

    cut, buckets = settings.buckets, buckets_of(source, settings, lane_order)
    assert cut is not None
    assert buckets is not None
    samples = source.contents.samples
    walk = BucketWalk(
        samples=samples,
        schedule=BatchSchedule.constant(max(1, min(cut.batch, samples))),
        drop_last=False,
        buckets=buckets,
    )
    return JobOrder(source=source, settings=settings, walk=walk, lane_order=lane_order)


def _first_settings(
    contents: Contents, options: LoaderOptions, *, global_batch: int
) -> PlanSettings:
    """Return the settings of a first start: the user's, else derived from the dataset and batch."""
    given = options.order
    check_shuffles(given, shuffle=bool(options.shuffle))
    if not options.shuffle:
        return ordered_settings(seed=options.plan_seed)
    return shuffled_settings(
        contents,
        seed=options.plan_seed,
        global_batch=global_batch,
        lanes=given.lanes,
        window=given.window,
        reshuffle=float(given.reshuffle),
    )


def check_state(
    source: Source, state: LoaderState, *, wanted: dict[str, int | float] | None = None
) -> LaneOrder | None:
    """Raise ResumeError unless a state continues this order of the source; return its lane order.

    wanted: plan settings that the user passed explicitly.
    """
    from penstock.pipeline.plan import check_resumable, order_fingerprint, other_order

    contents = source.contents
    check_resumable(
        state, dataset=contents.fingerprint, samples=contents.samples, wanted=wanted or {}
    )
    fingerprint = order_fingerprint(contents, state.plan)
    if fingerprint != state.fingerprint:
        raise other_order(state.fingerprint, fingerprint)
    return lane_order_of(state)


def lane_order_of(state: LoaderState | None) -> LaneOrder | None:
    """Return the lane order of a state; None is the identity. Raises ResumeError."""
    if state is None or state.lane_order is None:
        return None
    from penstock.pipeline.plan import LaneOrder

    return LaneOrder.parse(state.lane_order, lanes=state.plan.lanes)


def warn_of_costs(order: JobOrder, options: LoaderOptions) -> None:
    """Warn of the costs of a job's order. Only the first rank warns."""
    world = options.world
    icc = order.source.contents.icc
    if world.process or not options.shuffle or (world.nodes == 1 and icc is None):
        return
    from penstock.pipeline.plan import (
        advice,
        uneven_batches_warning,
    )  # arrays on one node cost nothing

    warned = advice(
        order.plan(),
        icc=icc,
        global_batch=order.walk.schedule.size,
        ranks=world.size,
        nodes=world.nodes,
        chosen=options.order.lanes is None,
    )
    uneven = uneven_batches_warning(
        order.walk.schedule, lanes=order.settings.lanes, nodes=world.nodes
    )
    few = None if warned else _few_shards(order, options)
    for message in (*warned, uneven, few):
        if message:
            warnings.warn(message, PenstockWarning, stacklevel=4)


def _few_shards(order: JobOrder, options: LoaderOptions) -> str | None:
    """Return a warning about shards that several nodes fetch; None if there is none."""
    contents, nodes = order.source.contents, options.world.nodes
    if nodes == 1 or options.order.lanes is not None or order.source.remote_shards is None:
        return None
    from penstock.pipeline.plan.sizing import few_shards_warning  # needed by several nodes only

    return few_shards_warning(
        samples=contents.samples,
        shards=len(contents.sizes),
        total_bytes=int(contents.shard_bytes.sum()),
        lanes=order.settings.lanes,
        global_batch=order.walk.schedule.size,
        nodes=nodes,
    )
