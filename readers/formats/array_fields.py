"""Choose the types of fields that are arrays, and their samples: windows, as many of each array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import Array, Schema, Value
from penstock.readers.formats.array_windows import windows_of
from penstock.readers.formats.shard_summary import MAX_SAMPLES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import numpy as np

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.array_windows import ArrayWindows, Shape
    from penstock.readers.formats.dataset_arguments import Sampling

MAX_SAMPLE_BYTES = 2**36
"""The largest sample of one field."""


def matched_windows(
    shapes: Mapping[str, Shape],
    sampling: Sampling,
    *,
    where: str,
    hint: str,
    lead: str | None = None,
    optional: Collection[str] = (),
    may_be_short: bool = False,
) -> dict[str, ArrayWindows]:
    """Return the windows of arrays that are the samples of one dataset, as many of each.

    where, hint: the arrays' place and more advice, for messages. lead: the array whose samples the
    others must match; None for the one with the most. optional: arrays that are left out if they
    don't match. may_be_short: True if arrays may be too short for one sample; they have none then.
    Raises ConfigError or DatasetError.
    """
    windows = {
        name: windows_of(
            shape,
            sampling.window(name),
            sampling.step(name),
            what=f"{name!r} of {where}",
            is_named=name in sampling.sample,
            may_be_short=may_be_short,
        )
        for name, shape in shapes.items()
    }
    lead = lead or max(windows, key=lambda name: (windows[name].samples, len(shapes[name])))
    found = {}
    for name, own in windows.items():
        following = own.following(windows[lead])
        if following is not None:
            found[name] = following
        elif name not in optional:
            raise DatasetError(
                f"{where}: {lead!r} has {windows[lead].samples:,} samples and {name!r} has "
                f"{own.samples:,} (shapes {shapes[lead]} and {shapes[name]}). All fields of a "
                f"dataset have the same number of samples: name those that belong together, {hint}."
            )
    return found


def array_schema(
    stored: Mapping[str, tuple[np.dtype[Any], tuple[int | None, ...]]],
    given: Mapping[str, FieldType],
    samples: int,
    *,
    url: str,
    what: str,
) -> Schema:
    """Return the types of fields: those that the user gives, if samples can be delivered as that,
    else those of the stored numbers.

    stored: the dtype and the shape of samples, None for a length that differs, by field. samples:
    their number. what: the dataset, for messages. Raises ConfigError, DatasetError, or
    DatasetNotFoundError if there are no samples.
    """
    if not samples:
        raise DatasetNotFoundError(
            f"{what} has no samples. They run along the first axis of its arrays."
        )
    if samples > MAX_SAMPLES:
        raise DatasetError(
            f"{what} has {samples:,} samples, expected at most {MAX_SAMPLES:,}. Use longer strides "
            "(stride=)."
        )
    types = {}
    for name, (dtype, shape) in stored.items():
        size_bytes = math.prod(length or 1 for length in shape) * dtype.itemsize
        if size_bytes > MAX_SAMPLE_BYTES:
            raise DatasetError(
                f"{url}: a sample of {name!r} takes {size_bytes:,} bytes, expected at most "
                f"{MAX_SAMPLE_BYTES:,}. Use smaller windows (sample=)."
            )
        is_array = shape or dtype.itemsize > 8
        own: FieldType = Array(dtype.name, shape) if is_array else Value(dtype.name)
        type = given[name].completed(dtype.name, shape) if name in given else own
        is_own = type.stored is not None and type.stored.shape == shape
        if not is_own or not type.can_hold(dtype, shape):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, and the samples of {url} are {own!r}.'
            )
        types[name] = type
    return Schema(types)
