"""The CRC-32C of any range of a blob, from the checksums that its blocks have in the cache's books.

CRC is linear: the checksum of two stretches end to end follows from theirs, by a product of
polynomials modulo CRC's own (as zlib's crc32_combine does for CRC-32). So only what a range has of
its first and last block is read, at most 2 MiB. A range whose bytes the disk has changed since they
came then carries the checksum of what came, and whoever asked for it notices.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from crc32c import crc32c

from penstock.cache.disk.block_crcs import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, its bits reversed
_ONE = 1 << 31  # x^0, its bits reversed
_STEP = 2**18

Crc = int


def combine(first: Crc, second: Crc, *, shift: int) -> Crc:
    """The checksum of two stretches end to end. shift: `shift_over` the second's bytes."""
    return _product(shift, first) ^ second


def shift_over(size_bytes: int) -> int:
    """What a checksum is multiplied by when so many bytes follow: x^(8n) modulo the polynomial."""
    result, power = _ONE, _ONE >> 8  # x^8
    while size_bytes:
        if size_bytes & 1:
            result = _product(power, result)
        power = _product(power, power)
        size_bytes >>= 1
    return result


def _product(a: int, b: int) -> int:
    """a(x)·b(x) modulo the polynomial; the highest bit stands for x^0."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return result


_OVER_A_BLOCK = shift_over(BLOCK_BYTES)
# The product with one factor is linear in the other: a table for each of its bytes.
_TABLES = tuple(
    tuple(_product(_OVER_A_BLOCK, byte << place) for byte in range(256)) for place in (0, 8, 16, 24)
)


def _behind(crc: Crc, block: Crc) -> Crc:
    """The checksum of a stretch with a whole block behind it."""
    low, second, third, high = _TABLES
    shifted = low[crc & 255] ^ second[crc >> 8 & 255] ^ third[crc >> 16 & 255] ^ high[crc >> 24]
    return shifted ^ block


def crc_of_file(fd: int, start: int, end: int, crc: Crc = 0) -> Crc:
    """Compute the checksum of bytes [start, end) of a file. crc: of what stands before them.

    Read, not mapped: a file that is cut meanwhile is an error, not the end of the process. Raises
    OSError, EOFError.
    """
    room = memoryview(bytearray(min(_STEP, end - start)))
    while start < end:
        got = os.preadv(fd, [room[: end - start]], start)
        if not got:
            raise EOFError("the file is shorter than it was")
        crc, start = crc32c(room[:got], crc), start + got
    return crc


def crc_of_range(
    blocks: bytes | None,
    size_bytes: int,
    start: int,
    end: int,
    read: Callable[[int, int, Crc], Crc],
) -> Crc:
    """The checksum of bytes [start, end) of a blob.

    blocks: of each MiB, little-endian; None: they aren't known. read(start, end, crc): computes the
    checksum of bytes behind `crc`.
    """
    first, last = -(-start // BLOCK_BYTES), end // BLOCK_BYTES
    if end == size_bytes and end % BLOCK_BYTES and start <= last * BLOCK_BYTES and blocks:
        # The last block is short, and stands in the books as it is.
        tail = int.from_bytes(blocks[4 * last : 4 * last + 4], "little")
        if start == last * BLOCK_BYTES:
            return tail
        before = crc_of_range(blocks, size_bytes, start, last * BLOCK_BYTES, read)
        return combine(before, tail, shift=shift_over(end % BLOCK_BYTES))
    if blocks is None or first >= last:
        return read(start, end, 0)
    crc = read(start, first * BLOCK_BYTES, 0) if start % BLOCK_BYTES else 0
    noted = struct.unpack_from(f"<{last - first}I", blocks, 4 * first)
    for block in noted:
        crc = _behind(crc, block)
    return read(last * BLOCK_BYTES, end, crc) if end % BLOCK_BYTES else crc


def bytes_to_read(blocks: bytes | None, size_bytes: int, start: int, end: int) -> int:
    """How many bytes `crc_of_range` reads."""
    whole = end if end == size_bytes else end // BLOCK_BYTES * BLOCK_BYTES
    first = -(-start // BLOCK_BYTES) * BLOCK_BYTES
    if blocks is None or first >= whole:
        return end - start
    return (first - start) + (end - whole)
