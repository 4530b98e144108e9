"""Choose the arrays that are fields, their types, and their samples: windows, as many of each
array."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import Array, FieldType, FieldTypes, Schema, Value, is_field_name
from penstock.readers.formats.array_windows import ArrayWindows, Shape, windows_of
from penstock.readers.formats.shard_summary import MAX_SAMPLES
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import numpy as np

    from penstock.readers.formats.dataset_arguments import Sampling

Stored = TypeVar("Stored")

MAX_SAMPLE_BYTES = 2**36
"""The largest sample of one field."""


def chosen_arrays(
    found: Mapping[str, Stored | Rejection],
    places: Mapping[str, str],
    names: Callable[[str], Sequence[str]],
    *,
    where: str,
    hint: str,
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the arrays that are fields, by field: those that the user names, or all that can be;
    and the reasons against the others, by place.

    found: arrays by place, which is a path or the name of a member; a Rejection for one that can't
    be read. places: of fields, from the user; empty if they give none. names: returns the names
    that the field of a place may have then, best first. where, hint: the arrays' place and advice,
    for messages. Raises ConfigError, DatasetError.
    """
    arrays, refused = dict[str, Stored](), dict[str, str]()
    for name, place in places.items():
        if (array := found.get(place)) is None:
            raise ConfigError(
                f'fields: got {{"{name}": {place!r}}}, and {where} has no such array. Its arrays: '
                f"{sorted(found)[:20]}."
            )
        if isinstance(array, Rejection):
            raise DatasetError(f"{where}: {place!r} can't be read: {array.reason}. {hint}")
        arrays[name] = array
    for place, array in () if places else found.items():
        free = [each for each in names(place) if is_field_name(each) and each not in arrays]
        if isinstance(array, Rejection):
            refused[place] = array.reason
        elif not free:
            refused[place] = "no field can have its name: pass fields={name: path}"
        else:
            arrays[free[0]] = array
    if not arrays:
        reasons = "; ".join(f"{place or 'array'}: {why}" for place, why in refused.items())
        raise DatasetNotFoundError(
            f"{where}: there are no arrays that can be fields ({reasons[:500] or 'none at all'}). "
            f"{hint}"
        )
    return arrays, refused


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
    given: FieldTypes,
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
        raise DatasetNotFoundError(f"{what} has no samples: its arrays' first axis is empty.")
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
            raise ConfigError(f'schema["{name}"]: got {type!r}, but samples of {url} are {own!r}.')
        types[name] = type
    return Schema(types)
