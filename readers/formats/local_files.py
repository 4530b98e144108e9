"""Reading local files of a dataset: whole or in part, with errors that say what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.machine import machine_remedy, read_error
from penstock.cache.errors import DatasetError, IndexChangedError, ReadError
from penstock.readers.files.names import printable

if TYPE_CHECKING:
    from penstock.readers.types import Encoded

REINDEX = "Run `penstock index` on the dataset again."


def open_file(path: bytes, name: bytes) -> int:
    """Open a file for reading; returns its descriptor. name: in the dataset. Raises
    IndexChangedError (gone), ReadError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise changed(name, "it is gone") from None
    except OSError as error:
        raise unreadable(path, error) from error


def read_up_to(fd: int, into: Encoded, offset: int = 0) -> int:
    """Fill an array from a file's offset; bytes that came, fewer where the file ends. Raises
    OSError."""
    view, got = into.data, 0
    while got < len(view) and (more := os.preadv(fd, [view[got:]], offset + got)):
        got += more
    return got


def read_file(path: bytes, *, name: bytes, size_bytes: int) -> Encoded:
    """Read a whole file that has size_bytes. Raises as read_file_into does."""
    data = np.empty(size_bytes + 1, np.uint8)
    read_file_into(path, data, name=name)
    data.flags.writeable = False
    return data[:-1]


def read_file_into(
    path: bytes, slot: Encoded, *, name: bytes, start: int = 0, is_rest: bool = True
) -> None:
    """Read a file from a byte on. is_rest: to its end, which is one byte before the slot's: so the
    same call sees a file that grew; else as much as the slot takes.

    Raises IndexChangedError (gone, another size), ReadError.
    """
    fd = open_file(path, name)
    try:
        got = read_up_to(fd, slot, start)
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        os.close(fd)
    wanted = len(slot) - is_rest
    if got != wanted:
        now = "has more" if got > wanted else f"has {start + got}"
        raise changed(name, f"it had {start + wanted} bytes and {now}")


def changed(name: bytes, what: str) -> IndexChangedError:
    """The error for a file that isn't what was listed or indexed."""
    return IndexChangedError(
        f"{printable(name)}: changed since it was listed: {what}. Put it back, or take the folder "
        f"as it is now: {REINDEX}"
    )


def unreadable(path: bytes, error: OSError) -> ReadError | DatasetError:
    """The error for what is there and can't be read: the machine's fault, or no file. path: all of
    it, as mounts and rights are looked for by paths."""
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return DatasetError(
        f"{printable(path)}: can't be read as a file ({error.strerror or error}). Put the file "
        "back, or take it out of the dataset."
    )
