"""Who stands in for a sample that can't be used: a pure function of seed, epoch and sample id.

So batch, world and restart don't change it: a few attempts in the same shard, whose bytes are at
hand, then anywhere. A substitute that is bad too leads to the next attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.hashing import keyed_hash

if TYPE_CHECKING:
    from penstock.readers.source import Contents

SAME_SHARD_ATTEMPTS = 8
ATTEMPTS = 64  # with half of a dataset bad, one sample in 10^19 finds no substitute

_SALT = 0x5AB57170  # keeps these hashes apart from those of order and draws


def substitute(
    sample_id: int, attempt: int, *, place: int, seed: int, epoch: int, contents: Contents
) -> int:
    """Where among all samples stands what takes the place of a bad one. attempt: from 0; place: of
    the sample itself.

    The first attempts stay in the sample's shard, the later ones draw from all samples; places may
    repeat.
    """
    draw = int(keyed_hash(seed, epoch, sample_id, attempt, _SALT))
    if attempt < SAME_SHARD_ATTEMPTS:
        shard = int(np.searchsorted(contents.starts, place, side="right")) - 1
        return int(contents.starts[shard]) + draw % int(contents.sizes[shard])
    return draw % contents.samples
