"""Draws of one operation for each sample: numbers in [0, 1) by a keyed hash, without any state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from penstock.cache.base.hashing import splitmix64, unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


class Uniform(Protocol):
    """uniform(count): keyed draws in [0, 1), float64, shape (count, n); always the same ones."""

    def __call__(self, count: int, /) -> Floats: ...


def keyed_draws(base: NDArray[np.uint64], index: int, numbers: list[int]) -> Floats:
    """Draws in [0, 1) of these numbers, shape (numbers, n), for the operation at `index`.

    Row k is unit(keyed_hash(seed, epoch, ids, index * 2^32 + numbers[k])), given
    base = keyed_hash(seed, epoch, ids).
    """
    keys = np.array(numbers, np.uint64)[:, None] + np.uint64(index << 32)
    return unit(splitmix64(base ^ keys))
