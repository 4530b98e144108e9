"""A span of a local file that is still to be read: straight into the place where it is wanted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from penstock.readers.formats.local_files import changed, open_file, unreadable

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

STEP_BYTES = 4 * 2**20
"""So much is read, then summed while it is in the processor's cache. Less would be a little faster
(256 KiB: 3 %), but a thread needs the GIL between two steps, which a training loop may hold for
milliseconds."""


class FileSpan(NamedTuple):  # a frozen dataclass takes a microsecond more to make
    """Bytes [start, start + size_bytes) of a file. name: for people. is_rest: the file shall end
    with them."""

    path: bytes
    name: bytes
    start: int
    size_bytes: int
    is_rest: bool

    def copy(self, slot: Encoded, begin: int) -> int:
        """Fill a slot with its bytes from `begin` on; returns their CRC-32C. Who reads its end sees
        whether the file grew.

        Raises IndexChangedError (gone, another size), DatasetError (can't be read).
        """
        crc, fd = 0, open_file(self.path, self.name)
        try:
            if len(slot) <= STEP_BYTES:
                return self._copy_some(fd, slot, begin)
            for at in range(0, len(slot), STEP_BYTES):
                crc = self._copy_some(fd, slot[at : at + STEP_BYTES], begin + at, crc)
        except OSError as error:
            raise unreadable(self.path, error) from error
        finally:
            os.close(fd)
        return crc

    def _copy_some(self, fd: int, slot: Encoded, begin: int, crc: int = 0) -> int:
        """Fill a slot at once; returns the CRC-32C of what stood before and of it. Raises OSError
        too."""
        size_bytes, view, offset = len(slot), slot.data, self.start + begin
        beyond = bytearray(self.is_rest and begin + size_bytes == self.size_bytes)
        got = os.preadv(fd, [view, beyond], offset)
        while 0 < got < size_bytes and (new := os.preadv(fd, [view[got:], beyond], offset + got)):
            got += new
        if got != size_bytes:
            now = "has more" if got > size_bytes else f"has {os.fstat(fd).st_size}"
            what = f"it had {self.start + self.size_bytes} bytes and {now}"
            raise changed(self.name, what)
        return int(crc32c(slot, crc))
