"""Cutting what lies in a row (units of a large file, small files) into shards of about one size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Ints = NDArray[np.int64]

PART_BYTES = 64 * 2**20
"""A shard's size, unless what lies there is larger and can't be cut: as a pack's."""


def parts(sizes: ArrayLike, *, target_bytes: int | None = None) -> Ints:
    """Bounds of contiguous parts of about one size: int64, shape (parts + 1,).

    target_bytes: that size; None is `PART_BYTES`. sizes: bytes of each item, which isn't cut, at
    least 0, shape (items,). Part i is items [bounds[i], bounds[i + 1]); none is empty, and there is
    one at least where there are items. The parts are as equal as the items let them be, so none is
    a small rest: a part differs from the mean by one item at most.
    """
    ends = np.cumsum(np.asarray(sizes, np.int64))
    if not len(ends):
        return np.zeros(1, np.int64)
    total, target = int(ends[-1]), target_bytes or PART_BYTES
    count = max(1, min(len(ends), round(total / target)))
    # Items go where their middle lies. As floats, since count * total may pass 2^63.
    middles = (ends - np.asarray(sizes, np.int64) / 2) * (count / max(1, total))
    number = np.minimum(middles.astype(np.int64), count - 1)
    first = np.flatnonzero(np.diff(number, prepend=-1))
    return np.append(first, len(ends)).astype(np.int64)
