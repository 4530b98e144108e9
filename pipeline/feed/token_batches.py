"""Decide how batches are cut by tokens, from a job's options and the lengths of its samples.

Only jobs with batch_tokens= load this module.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from penstock.augment import Pad
from penstock.cache import ConfigError, PenstockWarning, PlanError, ResumeError
from penstock.pipeline.plan import bucket_settings, least_tokens
from penstock.readers.fieldtypes import Tokens, stored_fields

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.pipeline.options import LoaderOptions
    from penstock.pipeline.plan import BucketSettings
    from penstock.readers import Source

# The sampled lengths: of so many evenly spread shards, the first so many samples each.
_SHARDS, _SAMPLES = 16, 256


def freeze_buckets(source: Source, options: LoaderOptions) -> BucketSettings:
    """Decide how batches are cut at a job's first start. Raises ConfigError and PlanError."""
    field, tokens = token_field(source, options)
    ranks = options.world.size
    settings = bucket_settings(
        field,
        tokens=tokens * ranks,
        is_padded=_is_padded(field, options),
        ranks=ranks,
        some=_sampled_lengths(source, field),
    )
    check_tokens(source, settings, ranks=ranks)
    return settings


def token_field(source: Source, options: LoaderOptions) -> tuple[str, int]:
    """Return the field whose lengths count, and the tokens of a rank.

    Raises ConfigError if that field isn't clear, or if its samples have no lengths.
    """
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
                f"{list(selected)}, {found or 'none'} differ in length. Name it: "
                f"batch_tokens={{'tokens': {given}}}."
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


def _is_padded(field: str, options: LoaderOptions) -> bool:
    augment = options.augment
    recipes = augment.values() if isinstance(augment, Mapping) else (augment or (),)
    for operation in (each for recipe in recipes for each in recipe):
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
    if (field, _is_padded(field, options)) != (settings.field, settings.is_padded):
        raise ResumeError(
            f'State was saved for batches by the lengths of "{settings.field}", padded: '
            f'{settings.is_padded}; this loader has "{field}", {_is_padded(field, options)}. Pass '
            "the same recipe and batch_tokens=."
        )
    check_tokens(source, settings, ranks=ranks)
    most = settings.most(ranks)
    if tokens * ranks != settings.tokens or most > tokens:
        warnings.warn(
            f"The state's global batches of {settings.tokens:,} tokens apply, so that no sample is "
            f"lost: {settings.tokens // ranks:,} a rank on {ranks}, instead of "
            f"batch_tokens={tokens:,}. A rank's batch may hold up to {most:,}: each global batch "
            f"was cut into "
            f"{settings.bins} part{'s'[: settings.bins > 1]}, and {ranks} "
            f"rank{'s'[: ranks > 1]} read{'s'[: ranks == 1]} it.",
            PenstockWarning,
            stacklevel=5,
        )
