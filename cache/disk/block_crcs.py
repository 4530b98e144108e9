"""Checksums of a blob's blocks, as the books keep them: CRC-32C of each MiB."""

from __future__ import annotations

import os

from crc32c import crc32c

BLOCK_BYTES = 2**20


def crcs_of_file(fd: int) -> bytes:
    """Compute CRC-32C of each MiB of a file, little-endian uint32. Raises OSError."""
    size_bytes = os.fstat(fd).st_size
    room = bytearray(BLOCK_BYTES)
    found = []
    for at in range(0, size_bytes, BLOCK_BYTES):
        got = os.preadv(fd, [room], at)
        found.append(int(crc32c(memoryview(room)[:got])).to_bytes(4, "little"))
    return b"".join(found)


def crcs_of(data: memoryview) -> bytes:
    """Compute CRC-32C of each MiB of bytes in memory, little-endian uint32."""
    blocks = (data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES))
    return b"".join(int(crc32c(block)).to_bytes(4, "little") for block in blocks)
