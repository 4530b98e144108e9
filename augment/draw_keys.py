"""Derive each random number of augmentations from its key, without any state.

A number in [0, 1) is a keyed hash of (seed, epoch, sample id, occurrence, entry of the recipe,
place of the operation, number of the draw). `draw_base` alone makes the part of the key that the
operations of one entry share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache.base import keyed_hash, splitmix64, unit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

_OCCURRENCE = 0x6F63637572  # keeps these hashes apart from places of operations, times 2^32


def draw_base(
    seed: int,
    epoch: int | NDArray[np.int64],
    ids: NDArray[np.int64],
    *,
    salt: int = 0,
    occurrences: NDArray[np.int64] | None = None,
) -> NDArray[np.uint64]:
    """Return the keys of all draws of samples, uint64, shape (n,). No other function computes them.

    epoch: of all samples, or of each. salt: salt of the recipe's entry (`entry_salts`); 0 adds
    nothing. occurrences: how many earlier positions of the epoch deliver each id; 0 adds nothing,
    and None means zeros.
    """
    base = keyed_hash(seed, epoch, ids)
    if salt:
        base = splitmix64(base ^ np.uint64(salt))
    if occurrences is not None and occurrences.any():
        again = splitmix64(
            splitmix64(base ^ np.uint64(_OCCURRENCE)) ^ occurrences.astype(np.uint64)
        )
        base = np.where(occurrences > 0, again, base)
    return base


def entry_salts(recipes: Any) -> dict[str, int]:
    """Return by field the salt that its entry in a mapping of recipes adds to the key of draws.

    A salt is a stable hash of the field's name, or of the sorted names of a tuple, whose fields
    share their draws. Empty for a list of operations and for a mapping with one entry.
    """
    if not isinstance(recipes, Mapping) or len(recipes) < 2:
        return {}
    salts: dict[str, int] = {}
    for key in recipes:
        names = sorted([key] if isinstance(key, str) else key)
        digest = hashlib.blake2b(json.dumps(names).encode(), digest_size=8).digest()
        salts |= dict.fromkeys(names, int.from_bytes(digest, "little"))
    return salts


@dataclass(frozen=True, slots=True)
class Uniform:
    """The draws in [0, 1) of the operation at one place of a recipe, always the same ones.

    base: of the samples, from `draw_base`, uint64, (n,). index: the operation's place.
    """

    base: NDArray[np.uint64]
    index: int

    def __call__(self, count: int, /) -> Floats:
        """Return the draws 0 to count - 1, float64, shape (count, n)."""
        return self.numbered(range(count))

    def numbered(self, numbers: Sequence[int]) -> Floats:
        """Return the draws of these numbers, shape (numbers, n). Row k is
        unit(keyed_hash(seed, epoch, ids, index * 2^32 + numbers[k])) if salt and occurrence are
        0."""
        keys = np.array(numbers, np.uint64)[:, None] + np.uint64(self.index << 32)
        return unit(splitmix64(self.base ^ keys))
