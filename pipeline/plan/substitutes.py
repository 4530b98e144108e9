"""Choose the substitutes of a bad sample: pure functions of seed, epoch and sample id.

So they don't depend on batch size, world and restarts. The first attempts choose from the same
shard, whose bytes are local, the later ones from all samples, or from those of the same part of a
mixture, whose shares and fields so remain. If a substitute is bad, too, the caller takes the next
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base import keyed_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.pipeline.plan.lanes import Ints

SAME_SHARD_ATTEMPTS = 8
ATTEMPTS = 64  # with half of a dataset bad, one sample in 10^19 finds no substitute

_SALT = 0x5AB57170  # keeps these hashes apart from those of order and draws


def substitutes(
    sample_id: int,
    *,
    seed: int,
    epoch: int,
    starts: Ints,
    sizes: Ints,
    place: int | None = None,
    occurrence: int = 0,
    within: tuple[int, int] | None = None,
) -> Iterator[int]:
    """Yield the indices, among all samples, of the substitutes of a bad one; they may repeat.

    starts, sizes: samples before and in each shard, shape (shards,). place: index of the bad
    sample; None if that is its id. occurrence: how many earlier positions of the epoch deliver it.
    within: [first, end) of the indices of its part; None if there is one part.
    """
    place = sample_id if place is None else place
    first, end = within or (0, int(starts[-1] + sizes[-1]))
    again = (occurrence,) if occurrence else ()
    for attempt in range(ATTEMPTS):
        draw = int(keyed_hash(seed, epoch, sample_id, attempt, _SALT, *again))
        if attempt < SAME_SHARD_ATTEMPTS:
            shard = int(np.searchsorted(starts, place, side="right")) - 1
            yield int(starts[shard]) + draw % int(sizes[shard])
        else:
            yield first + draw % (end - first)
