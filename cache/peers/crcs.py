"""The CRC-32C of each stretch of a body: from the cache's books where it is a block, else read.

So a server reads nothing for what fills ask for, at whole MiB; of any other range the first and the
last stretch, 2 MiB at most. A block that the disk has changed since it came carries the checksum of
what came, and whoever asked for it notices.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, overload

from crc32c import crc32c

from penstock.cache.disk.block_crcs import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cache.peers.protocol import Span

_STEP = 2**17


class _Room(threading.local):
    """What a thread reads into: new memory for each range would cost more than reading it."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_STEP))


_room = _Room()


@overload
def crc_of_file(fd: int, start: int, end: int) -> int: ...


@overload
def crc_of_file(fd: int, start: int, end: int, *, waits: bool) -> int | None: ...


def crc_of_file(fd: int, start: int, end: int, *, waits: bool = True) -> int | None:
    """Compute the checksum of bytes [start, end) of a file; None where that had to wait for the
    disk and may not. waits: it may.

    Read, not mapped: a file that is cut meanwhile is an error, not the end of the process. Raises
    OSError, EOFError.
    """
    room, crc = _room.view, 0
    flags = 0 if waits else os.RWF_NOWAIT
    while start < end:
        try:
            got = os.preadv(fd, [room[: end - start]], start, flags)
        except OSError as error:
            if not flags:
                raise
            if error.errno == errno.EAGAIN:
                return None
            flags = 0  # its file system can't tell
            continue
        if not got:
            raise EOFError("the file is shorter than it was")
        crc, start = crc32c(room[:got], crc), start + got
    return crc


def noted_crc(blocks: bytes | None, size_bytes: int, stretch: Span) -> int | None:
    """The checksum of a stretch as the books have it; None where it must be read. blocks: of each
    MiB of the blob, little-endian; None: they aren't known."""
    start, end = stretch
    number, within = divmod(start, BLOCK_BYTES)
    if blocks is None or within or (end - start < BLOCK_BYTES and end != size_bytes):
        return None
    return int.from_bytes(blocks[4 * number : 4 * number + 4], "little")


def bytes_to_read(blocks: bytes | None, size_bytes: int, wanted: Iterable[Span]) -> int:
    """How many bytes of some stretches must be read for their checksums."""
    return sum(
        [
            stretch[1] - stretch[0]
            for stretch in wanted
            if noted_crc(blocks, size_bytes, stretch) is None
        ]
    )
