"""Choose the types of fields that are arrays, and their samples: windows, as many of each array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, DatasetError
from penstock.readers.fieldtypes import Array, Value
from penstock.readers.formats.shard_summary import MAX_SAMPLES

if TYPE_CHECKING:
    import numpy as np

    from penstock.readers.fieldtypes import FieldType

MAX_SAMPLE_BYTES = 2**36
"""The largest sample of one field."""


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
