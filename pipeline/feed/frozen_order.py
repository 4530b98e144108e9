"""Freeze a job's order from its user's options, check it, and warn of what it costs."""

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
    advice,
    buckets_of,
    ordered_settings,
    shuffled_settings,
    uneven_words,
)

if TYPE_CHECKING:
    from penstock.pipeline.options import NativeOptions
    from penstock.pipeline.plan import LaneOrder, PlanSettings
    from penstock.readers import Contents, Source


def freeze_order(
    source: Source,
    options: NativeOptions,
    settings: PlanSettings | None = None,
    lane_order: LaneOrder | None = None,
) -> JobOrder:
    """The order of a job. settings: of the plan of a state, taken over as they are; None: a job's
    first start. lane_order: of that plan; None is the identity. Raises ConfigError and PlanError.
    """
    if options.batch_tokens is not None or (settings and settings.buckets):
        return _by_tokens(source, options, settings, lane_order)
    if settings is None:
        global_batch = options.sizes.schedule.first_size  # the lanes stay as the batch grows
        settings = _first_settings(source.contents, options, global_batch=global_batch)
    walk = _walk(source, options)
    return JobOrder(source=source, settings=settings, walk=walk, lane_order=lane_order)


def _by_tokens(
    source: Source,
    options: NativeOptions,
    settings: PlanSettings | None,
    lane_order: LaneOrder | None,
) -> JobOrder:
    """The order of a job whose batches are cut by tokens."""
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
    """The order of a job whose settings cut batches by tokens."""
    from penstock.pipeline.plan import BucketWalk  # other jobs need none of it

    told, found = settings.buckets, buckets_of(source, settings, lane_order)
    assert told is not None
    assert found is not None
    samples = source.contents.samples
    walk = BucketWalk(
        samples=samples,
        schedule=BatchSchedule.constant(max(1, min(told.batch, samples))),
        drop_last=False,
        buckets=found,
    )
    return JobOrder(source=source, settings=settings, walk=walk, lane_order=lane_order)


def _first_settings(
    contents: Contents, options: NativeOptions, *, global_batch: int
) -> PlanSettings:
    """The user's, else from dataset and global batch."""
    given = options.order
    check_shuffles(given, shuffle=options.shuffle)
    if not options.shuffle:
        return ordered_settings(seed=options.seed)
    return shuffled_settings(
        contents,
        seed=options.seed,
        global_batch=global_batch,
        lanes=given.lanes,
        window=given.window,
        reshuffle=float(given.reshuffle),
    )


def _walk(source: Source, options: NativeOptions) -> Walk:
    """The steps of a job's epochs. Raises PlanError where an epoch would have none."""
    schedule, samples = options.sizes.schedule, source.contents.samples
    if not samples or (options.drop_last and schedule.largest > samples):
        raise PlanError(
            f"One global batch of {schedule.largest} samples is more than the {samples} of "
            f"{source!r}, and drop_last=True drops it: an epoch would have no step. Pass a "
            "smaller batch or drop_last=False."
        )
    return Walk(samples=samples, schedule=schedule, drop_last=options.drop_last)


def warn_of_the_order(order: JobOrder, options: NativeOptions) -> None:
    """Warn of what the order costs this job; the first rank does, for all."""
    world = options.world
    if world.process or not options.shuffle:
        return
    words = advice(
        order.plan(),
        icc=order.source.contents.icc,
        global_batch=order.walk.schedule.size,
        ranks=world.size,
        nodes=world.nodes,
        chosen=options.order.lanes is None,
    )
    uneven = uneven_words(order.walk.schedule, lanes=order.settings.lanes, nodes=world.nodes)
    few = None if words else _few_shards(order, options)
    for one in [*words, *(one for one in (uneven, few) if one)]:
        warnings.warn(one, PenstockWarning, stacklevel=4)


def _few_shards(order: JobOrder, options: NativeOptions) -> str | None:
    """What to say of shards that several nodes fetch; None where nothing is fetched."""
    contents, nodes = order.source.contents, options.world.nodes
    if nodes == 1 or options.order.lanes is not None or order.source.remote_shards is None:
        return None
    from penstock.pipeline.plan.sizing import few_shards_words  # one node needs none of it

    return few_shards_words(
        samples=contents.samples,
        shards=len(contents.sizes),
        total_bytes=int(contents.shard_bytes.sum()),
        lanes=order.settings.lanes,
        global_batch=order.walk.schedule.size,
        nodes=nodes,
    )
