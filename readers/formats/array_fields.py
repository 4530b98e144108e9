"""Choose the types of fields that are arrays, and their samples: windows, as many of each array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import Array, Value
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


def check_samples(count: int, *, what: str) -> None:
    """Raise DatasetError for too many samples. what: the dataset, for messages."""
    if count > MAX_SAMPLES:
        raise DatasetError(
            f"{what} has {count:,} samples, expected at most {MAX_SAMPLES:,}. Use longer strides "
            "(stride=)."
        )


def field_type(
    given: FieldType | None,
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    *,
    name: str,
    url: str,
) -> FieldType:
    """Return the type of a field: the one that the user gives, if samples of this dtype and shape
    can be delivered as that, else the type of the stored numbers.

    shape: of a sample; None for a length that differs. Raises ConfigError or DatasetError.
    """
    size_bytes = math.prod(length or 1 for length in shape) * dtype.itemsize
    if size_bytes > MAX_SAMPLE_BYTES:
        raise DatasetError(
            f"{url}: a sample of {name!r} takes {size_bytes:,} bytes, expected at most "
            f"{MAX_SAMPLE_BYTES:,}. Use smaller windows (sample=)."
        )
    is_array = shape or dtype.itemsize > 8
    own: FieldType = Array(dtype.name, shape) if is_array else Value(dtype.name)
    if given is None:
        return own
    given = given.completed(dtype.name, shape)
    if not given.can_hold(dtype, shape):
        raise ConfigError(f'schema["{name}"]: got {given!r}, and the samples of {url} are {own!r}.')
    return given
