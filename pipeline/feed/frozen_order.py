"""Freeze a job's order from the user's options, check it, and warn of its costs.

With batch_tokens=, the settings say how batches are cut, by the lengths of the samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, PenstockWarning, PlanError, ResumeError
from penstock.pipeline.plan import BatchSchedule, JobOrder, Walk, bucket_plan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import Aspects, BucketSettings, LaneOrder, PlanSettings, World
    from penstock.readers import MixtureContents, Source


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
        settings = options.first_settings(source.contents, global_batch=global_batch)
        if options.bucket_by is not None:
            from penstock.pipeline.plan import AspectSettings  # needed by such jobs only

            aspects = AspectSettings.of(_image_field(source), global_batch)
            settings = replace(settings, aspects=aspects)
    elif (settings.aspects is None) != (options.bucket_by is None):
        saved = "without bucket_by=" if settings.aspects is None else 'with bucket_by="aspect"'
        raise ResumeError(
            f"State was saved {saved}, but this loader was not: its batches consist of other "
            "samples. Pass the same arguments."
        )
    unit = 1 if settings.mixture is None else settings.mixture.unit
    if unit > 1 and {*options.schedule.sizes} != {unit}:
        raise ConfigError(
            f'per="batch": this job takes global batches of {unit} samples from one part each, and '
            f"this loader's have {' and '.join(map(str, options.schedule.sizes))}. Pass "
            f"global_batch_size={unit}."
        )
    schedule, samples = options.schedule, settings.epoch_samples(source.contents)
    if not samples or (options.drop_last and schedule.largest > samples):
        raise PlanError(
            f"One global batch of {schedule.largest} samples is more than the {samples} of "
            f"{source!r}, and drop_last=True drops it: an epoch would have no step. Pass a "
            "smaller batch or drop_last=False."
        )
    walk = Walk(samples=samples, schedule=schedule, drop_last=options.drop_last)
    order = JobOrder(source=source, settings=settings, walk=walk, lane_order=lane_order)
    if settings.aspects is None:
        return order
    return replace(order, aspects=_aspects(source, settings.aspects.field, options))


def _aspects(source: Source, field: str, options: LoaderOptions) -> Aspects:
    """Return the aspects of the images. Raises ConfigError for data whose index has none."""
    from penstock.pipeline.plan import Aspects  # needed by such jobs only

    if source.contents.mixture is not None:
        _check_mixture(source, source.contents.mixture, options, what='bucket_by="aspect"')
    if not source.contents.are_checked:
        raise ConfigError(
            f'bucket_by="aspect": the index of {source.url} doesn\'t record the sizes of its '
            "images, because it is made from metadata alone. Pack the dataset first: penstock "
            "pack SRC DST."
        )
    return Aspects(lambda shard: source.image_dims(shard, field))


def _image_field(source: Source) -> str:
    """Return the images whose shapes count, the first of a batch. Raises ConfigError."""
    from penstock.readers.fieldtypes import image_fields  # needed by such jobs only

    images = image_fields(source.schema, source.fields)
    if not images:
        raise ConfigError(
            f'bucket_by="aspect": batches have {list(source.fields)}, and none is an image. Leave '
            "it out, or name an image in fields=."
        )
    return images[0]


def _by_tokens(
    source: Source, options: LoaderOptions, settings: PlanSettings | None, lanes: LaneOrder | None
) -> JobOrder:
    """Return the order of a job whose batches are cut by tokens."""
    if source.contents.mixture is not None:
        _check_mixture(source, source.contents.mixture, options)
    if settings is None:
        from penstock.pipeline.plan import bucket_settings  # needed by such jobs only

        (field, tokens), ranks = token_field(source, options), options.world.size
        buckets = bucket_settings(
            field,
            tokens=tokens * ranks,
            is_padded=_is_padded(field, source, options),
            ranks=ranks,
            some=_sampled_lengths(source, field),
        )
        check_tokens(source, buckets, ranks=ranks)
        first = options.first_settings(source.contents, global_batch=buckets.batch)
        settings = replace(first, buckets=buckets)
    else:
        check_resumed(source, settings.buckets, options, ranks=options.world.size)
    return bucket_order(source, settings, lanes)


def bucket_order(
    source: Source, settings: PlanSettings, lane_order: LaneOrder | None = None
) -> JobOrder:
    """Return the order of a job from settings that cut batches by tokens."""
    from penstock.pipeline.plan import BucketWalk  # needed by such jobs only

    cut, buckets = settings.buckets, bucket_plan(source, settings, lane_order)
    assert cut is not None
    assert buckets is not None
    samples = settings.epoch_samples(source.contents)
    walk = BucketWalk(
        samples=samples,
        schedule=BatchSchedule.constant(max(1, min(cut.batch, samples))),
        drop_last=False,
        buckets=buckets,
    )
    return JobOrder(source=source, settings=settings, walk=walk, lane_order=lane_order)


def warn_of_costs(order: JobOrder, options: LoaderOptions) -> None:
    """Warn of the costs of a job's order. Only the first rank warns."""
    world, icc = options.world, order.source.contents.icc
    if order.settings.mixture is not None:  # the other costs are those of one part's lanes
        warn_of_late_parts(order, world, stacklevel=5)
        return
    if world.process or not options.shuffle or (world.nodes == 1 and icc is None):
        return
    found = [_readers_warning(order, options)] if world.nodes > 1 else []
    if icc is not None:
        from penstock.pipeline.plan import clustered_labels_warning

        batch, ranks = order.walk.schedule.size, world.size
        found.append(
            clustered_labels_warning(order.plan(), icc=icc, global_batch=batch, ranks=ranks)
        )
    for message in filter(None, found):
        warnings.warn(message, PenstockWarning, stacklevel=4)


def warn_of_late_parts(order: JobOrder, world: World, *, stacklevel: int) -> None:
    """Warn of parts of a mixture that some batches lack. Only the first rank warns."""
    mixture, own = order.source.contents.mixture, order.settings.mixture
    if mixture is None or own is None or world.process:
        return
    from penstock.pipeline.plan import late_parts_warning  # needed by mixtures only

    if late := late_parts_warning(mixture, own, global_batch=order.walk.schedule.size):
        warnings.warn(late, PenstockWarning, stacklevel=stacklevel)


def _readers_warning(order: JobOrder, options: LoaderOptions) -> str | None:
    """Return a warning about shards that several nodes read; None if there is none."""
    from penstock.pipeline.plan.sizing import readers_warning  # needed by several nodes only

    contents, world = order.source.contents, options.world
    global_batch, step = order.walk.schedule.size, None
    if options.order.lanes is None:
        step = world.size if global_batch % world.size == 0 else 1
    is_remote = order.source.remote_shards is not None
    return readers_warning(
        samples=contents.samples,
        shards=int(np.count_nonzero(contents.sizes)),
        total_bytes=int(contents.shard_bytes.sum()) if is_remote else 0,
        lanes=order.settings.lanes,
        global_batch=global_batch,
        nodes=world.nodes,
        step=step,
    )


# The sampled lengths: of so many evenly spread shards, the first so many samples each.
_SHARDS, _SAMPLES = 16, 256


def token_field(source: Source, options: LoaderOptions) -> tuple[str, int]:
    """Return the field whose lengths count, and the tokens of a rank.

    Raises ConfigError if that field isn't clear, or if its samples have no lengths.
    """
    from penstock.readers.fieldtypes import Tokens, stored_fields  # needed by such jobs only

    given = options.batch_tokens
    schema = source.schema
    if isinstance(given, Mapping):
        ((field, tokens),) = given.items()
        if field not in schema:
            raise ConfigError(f'batch_tokens: got the field "{field}", wanted one of {[*schema]}.')
    else:
        assert given is not None
        tokens, selected = given, stored_fields(source.fields, schema)
        found = [name for name in selected if isinstance(schema.get(name), Tokens)]
        found = found or [name for name in selected if _has_lengths(source, name)]
        if len(found) != 1:
            raise ConfigError(
                f"batch_tokens={given}: the field whose lengths count isn't clear: of "
                f"{list(selected)}, {found or 'none'} differ in length. "
                + (
                    f"Name it: batch_tokens={{'{found[0]}': {given}}}."
                    if found
                    else "Pass batch_size=."
                )
            )
        (field,) = found
    if not _has_lengths(source, field):
        raise ConfigError(
            f'batch_tokens: "{field}" is {schema[field]!r}, and its samples don\'t differ in '
            "length. Pass batch_size=."
        )
    return field, tokens


def _has_lengths(source: Source, name: str) -> bool:
    type = source.schema.get(name)
    form = None if type is None else type.form
    return form is not None and form.is_ragged and form.shape[0] is None


def _check_mixture(
    source: Source, mixture: MixtureContents, options: LoaderOptions, *, what: str = "batch_tokens="
) -> None:
    """Raise ConfigError for a mixture whose batches can't hold similar samples. what: the
    argument."""
    from penstock.augment import Stage  # needed by such jobs only

    if mixture.per == "batch":
        raise ConfigError(
            f'{what} and per="batch": such a batch holds similar samples of all parts. Pass '
            f'per="token" or per="sample" to mix, or leave {what} out.'
        )
    for operation in _operations(source, options):
        if operation.stage is Stage.MIX:
            raise ConfigError(
                f"{operation} mixes samples of one part with each other, and batches of similar "
                f"samples of a mixture don't keep them together. Leave {what} out, or drop the "
                "operation."
            )


def _operations(source: Source, options: LoaderOptions) -> list[Any]:
    """Return the operations of all recipes, also those of a mixture's parts."""
    given: list[Any] = [options.augment]
    if (mixture := source.contents.mixture) is not None:
        from penstock.pipeline.feed.checked_recipes import recipes_of_parts

        given, _ = recipes_of_parts(mixture, options)
    lists = [[*each.values()] if isinstance(each, Mapping) else [each or ()] for each in given]
    return [operation for each in lists for recipe in each for operation in recipe]


def _is_padded(field: str, source: Source, options: LoaderOptions) -> bool:
    from penstock.augment import Pad  # needed by such jobs only

    for operation in _operations(source, options):
        if isinstance(operation, Pad) and operation.field == field:
            if operation.to is not None:
                raise ConfigError(
                    f"batch_tokens with {operation}: all samples are of one length then. Pass "
                    "batch_size=, or Pad without to=: each batch is as long as its longest."
                )
            return True
    return False


def _sampled_lengths(source: Source, field: str) -> NDArray[np.int64]:
    """Return the lengths of some samples, the same on every rank."""
    sizes = source.contents.sizes
    places = np.linspace(0, len(sizes) - 1, min(_SHARDS, len(sizes)), dtype=np.int64)
    rows = [
        np.stack([np.full(count, shard), np.arange(count)], axis=1)
        for shard in places.tolist()
        if (count := min(_SAMPLES, int(sizes[shard])))
    ]
    return source.lengths(field, np.concatenate(rows))


def check_tokens(source: Source, settings: BucketSettings, *, ranks: int) -> None:
    """Raise PlanError if a batch with the longest sample may lack a sample for some rank.

    The check needs an index that stores the longest length.
    """
    from penstock.pipeline.plan import least_tokens  # needed by such jobs only

    longest = source.contents.longest.get(settings.field)
    if longest is None or (least := least_tokens(longest, ranks=ranks)) <= settings.tokens:
        return
    raise PlanError(
        f"batch_tokens: got {settings.tokens // ranks:,} a rank ({settings.tokens:,} on {ranks}), "
        f'and the longest sample of "{settings.field}" has {longest:,}: a batch with it might not '
        f"have a sample for every rank. Pass {-(-least // ranks):,} or more, or shorten the "
        "samples."
    )


def check_resumed(
    source: Source, settings: BucketSettings | None, options: LoaderOptions, *, ranks: int
) -> None:
    """Check that a loader cuts batches as a state does. Raises ResumeError and PlanError.

    The state's tokens of a global batch apply, with a warning if they differ from the loader's or
    if a rank may get more than its share.
    """
    given = options.batch_tokens
    if (settings is None) != (given is None):
        saved = "without batch_tokens=" if settings is None else "with batch_tokens="
        raise ResumeError(
            f"State was saved {saved}, but this loader was not: its batches consist of other "
            "samples, and the state's position isn't the beginning of one. Pass the same arguments."
        )
    if settings is None:
        return
    field, tokens = token_field(source, options)
    is_padded = _is_padded(field, source, options)
    if (field, is_padded) != (settings.field, settings.is_padded):
        raise ResumeError(
            f'State was saved for batches by the lengths of "{settings.field}", padded: '
            f'{settings.is_padded}; this loader has "{field}", {is_padded}. Pass '
            "the same recipe and batch_tokens=."
        )
    check_tokens(source, settings, ranks=ranks)
    most = settings.most(ranks)
    if tokens * ranks != settings.tokens or most > tokens:
        warnings.warn(
            f"The state's global batches of {settings.tokens:,} tokens apply, so that no sample is "
            f"lost: {settings.tokens // ranks:,} a rank on {ranks}, instead of "
            f"batch_tokens={tokens:,}. A rank's batch may hold up to {most:,}: each global batch "
            f"was cut into {settings.bins} part{'s'[: settings.bins > 1]}, and {ranks} "
            f"rank{'s'[: ranks > 1]} read{'s'[: ranks == 1]} it.",
            PenstockWarning,
            stacklevel=5,
        )
