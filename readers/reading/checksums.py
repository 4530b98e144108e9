"""The checksums of a batch's samples, and copies that nobody else can change behind the check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.formats.blob_shard import BlobShard

if TYPE_CHECKING:
    from penstock.cache.base.blob import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.formats.shard import OpenShard
    from penstock.readers.reading.visit import SpanVisit
    from penstock.readers.types import Encoded

_NOTHING = np.empty(0, np.uint8)


def checksums(
    visit: SpanVisit, encoded: list[Encoded], mode: ReadMode, blocks: Blocks
) -> list[int]:
    """The CRC-32C of each span. With "copy" views of maps are replaced by copies in a block, each
    just before it is summed: it is read from memory once, and what was summed is what is decoded,
    whatever happens to the file meanwhile."""
    sums: list[int] = []
    copied = [mode == "copy" and gives_views(shard) for shard in visit.shards]
    sizes = [len(sample) for sample in encoded]
    needed = sum(
        sum(sizes[a:b]) for (_, a, b), copies in zip(visit.pieces(), copied, strict=True) if copies
    )
    room, shown = blocks.take(needed) if needed else (_NOTHING, _NOTHING)
    at = 0
    for (_, a, b), copies in zip(visit.pieces(), copied, strict=True):
        if copies:
            for i in range(a, b):
                end = at + sizes[i]
                room[at:end] = encoded[i]
                encoded[i] = sample = shown[at:end]
                sums.append(crc32c(sample))
                at = end
        else:
            sums += map(crc32c, encoded[a:b])
    return sums


def gives_views(shard: OpenShard) -> bool:
    """Whether its samples are views of a mapped file, not memory of their own."""
    return shard.blob.is_cached if isinstance(shard, BlobShard) else shard.is_mapped
