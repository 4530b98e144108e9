"""Who stands in for a sample that can't be used: a pure function of seed, epoch and sample id.

So batch, world and restart don't change it: a few attempts in the same shard, whose bytes are at
hand, then anywhere. A substitute that is bad too leads to the next attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.hashing import keyed_hash

if TYPE_CHECKING:
    from numpy.typing import NDArray

SAME_SHARD_ATTEMPTS = 8
ATTEMPTS = 64  # with half of a dataset bad, one sample in 10^19 finds no substitute

_SALT = 0x5AB57170  # keeps these hashes apart from those of order and draws


def substitute(
    sample_id: int,
    attempt: int,
    *,
    seed: int,
    epoch: int,
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> int:
    """The id that stands in for a bad sample. attempt: from 0.

    starts, sizes: first id and samples of each shard, shape (shards,). The first attempts stay in
    the sample's shard, the later ones draw from all samples; ids may repeat.
    """
    draw = int(keyed_hash(seed, epoch, sample_id, attempt, _SALT))
    if attempt < SAME_SHARD_ATTEMPTS:
        shard = int(np.searchsorted(starts, sample_id, side="right")) - 1
        return int(starts[shard]) + draw % int(sizes[shard])
    return draw % int(starts[-1] + sizes[-1])
