"""Read local files of a dataset, whole or in part, with errors that say what to do.

A `FileSpan` is a span that is read later, directly into the memory in which it is needed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError, IndexChangedError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.files import printable

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

REINDEX = "Run `penstock index` on the dataset again."


def open_file(path: bytes, name: bytes) -> int:
    """Open a file for reading and return its descriptor. name: in the dataset. Raises
    IndexChangedError if the file is gone, and ReadError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise changed_file_error(name, "it is gone") from None
    except OSError as error:
        raise unreadable_file_error(path, error) from error


def read_up_to(fd: int, into: Encoded, offset: int = 0) -> int:
    """Fill an array from an offset of a file and return the bytes read, fewer if the file ends.
    Raises OSError."""
    view, got = into.data, 0
    while got < len(view) and (more := os.preadv(fd, [view[got:]], offset + got)):
        got += more
    return got


def read_file(path: bytes, *, name: bytes, size_bytes: int) -> Encoded:
    """Read a whole file of size_bytes. Raises as read_file_into does."""
    data = np.empty(size_bytes + 1, np.uint8)
    read_file_into(path, data, name=name)
    data.flags.writeable = False
    return data[:-1]


def read_file_into(
    path: bytes, slot: Encoded, *, name: bytes, start: int = 0, is_rest: bool = True
) -> None:
    """Read a file from a byte onwards into a slot.

    is_rest: True to read to the end of the file, which must be one byte before the end of the slot,
    so that the same call notices a file that has grown; False to fill the slot. Raises
    IndexChangedError if the file is gone or has another size, and ReadError.
    """
    fd = open_file(path, name)
    try:
        got = read_up_to(fd, slot, start)
    except OSError as error:
        raise unreadable_file_error(path, error) from error
    finally:
        os.close(fd)
    expected = len(slot) - is_rest
    if got != expected:
        now = "has more" if got > expected else f"has {start + got}"
        raise changed_file_error(name, f"it had {start + expected} bytes and now {now}")


def changed_file_error(name: bytes, what: str) -> IndexChangedError:
    """Return the error for a file that differs from the one that was listed or indexed."""
    return IndexChangedError(
        f"{printable(name)}: changed since it was listed: {what}. Restore it, or use the folder "
        f"as it is now: {REINDEX}"
    )


def unreadable_file_error(path: bytes, error: OSError) -> ReadError | DatasetError:
    """Return the error for a file that exists and can't be read: a fault of the machine, or not a
    file.

    path: absolute, because mounts and permissions are looked up by path.
    """
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return DatasetError(
        f"{printable(path)}: can't be read as a file ({error.strerror or error}). Restore "
        "the file, or remove it from the dataset."
    )


STEP_BYTES = 4 * 2**20
"""Bytes that are read, then checksummed while they are in the processor's cache. Smaller steps
would be a little faster (256 KiB: 3 %), but a thread needs the GIL between two steps, which a
training loop may hold for milliseconds."""


class FileSpan(NamedTuple):  # creating a frozen dataclass takes a microsecond more
    """Bytes [start, start + size_bytes) of a file. name: for messages. is_rest: True if the file
    must end with them."""

    path: bytes
    name: bytes
    start: int
    size_bytes: int
    is_rest: bool

    def copy(self, slot: Encoded, begin: int) -> int:
        """Fill a slot with the span's bytes from `begin` onwards and return their CRC-32C.

        The call that reads the end of the span notices a file that has grown. Raises
        IndexChangedError if the file is gone or has another size, and DatasetError if it can't be
        read.
        """
        crc, fd = 0, open_file(self.path, self.name)
        try:
            if len(slot) <= STEP_BYTES:
                return self._copy_some(fd, slot, begin)
            for at in range(0, len(slot), STEP_BYTES):
                crc = self._copy_some(fd, slot[at : at + STEP_BYTES], begin + at, crc)
        except OSError as error:
            raise unreadable_file_error(self.path, error) from error
        finally:
            os.close(fd)
        return crc

    def _copy_some(self, fd: int, slot: Encoded, begin: int, crc: int = 0) -> int:
        """Fill a slot in one step and return the CRC-32C of the bytes so far. Raises OSError
        too."""
        size_bytes, view, offset = len(slot), slot.data, self.start + begin
        beyond = bytearray(self.is_rest and begin + size_bytes == self.size_bytes)
        got = os.preadv(fd, [view, beyond], offset)
        while 0 < got < size_bytes and (new := os.preadv(fd, [view[got:], beyond], offset + got)):
            got += new
        if got != size_bytes:
            now = "has more" if got > size_bytes else f"has {os.fstat(fd).st_size}"
            what = f"it had {self.start + self.size_bytes} bytes and now {now}"
            raise changed_file_error(self.name, what)
        return int(crc32c(slot, crc))
