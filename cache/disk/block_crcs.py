"""Compute the CRC-32C of each block (1 MiB) of a blob, as the catalogue stores it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_BYTES = 2**20


def crcs_of_file(fd: int) -> bytes:
    """Compute the CRC-32C of each MiB of a file, little-endian uint32. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    buffer = bytearray(BLOCK_BYTES)
    found = []
    for at in range(0, size_bytes, BLOCK_BYTES):
        got = os.preadv(fd, [buffer], at)
        found.append(int(crc32c(memoryview(buffer)[:got])).to_bytes(4, "little"))
    return b"".join(found)


def crcs_of(data: memoryview, *, known: Mapping[int, int] | None = None) -> bytes:
    """Compute the CRC-32C of each MiB of bytes in memory, little-endian uint32. known: checksums
    that are already known, by block number."""
    crcs = dict(known or {})
    for number, at in enumerate(range(0, len(data), BLOCK_BYTES)):
        if number not in crcs:
            crcs[number] = int(crc32c(data[at : at + BLOCK_BYTES]))
    return b"".join([crcs[number].to_bytes(4, "little") for number in range(len(crcs))])
