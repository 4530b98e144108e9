"""Compute the CRC-32C of a batch's spans, over copies that nobody else can change behind the check.

A CRC is a remainder modulo a polynomial over GF(2), so the CRC of bytes whose parts were summed
apart is arithmetic: to put n bytes behind some is to multiply their remainder by x to the power of
8 n. Bits are in the CRC's own order: x to the power of 0 is the highest one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from crc32c import crc32c

from penstock.readers.formats import BlobShard

if TYPE_CHECKING:
    from penstock.cache.base import ReadMode
    from penstock.readers.blocks import Blocks
    from penstock.readers.formats import OpenShard
    from penstock.readers.reading.batch_plan import BatchSpans
    from penstock.readers.types import Encoded

_NOTHING = np.empty(0, np.uint8)


def checksums(
    visit: BatchSpans, encoded: list[Encoded], mode: ReadMode, blocks: Blocks
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


_POLYNOMIAL = 0x82F63B78
_ONE = 1 << 31


def joined_crc(first: int, second: int, *, second_bytes: int) -> int:
    """The CRC-32C of some bytes and `second_bytes` behind them, by that of each."""
    return _product(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=256)
def _shift(count: int) -> int:
    """x to the power of 8 count."""
    power, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    """a times b, modulo the polynomial."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
