"""Ask a file system whether a path is there, and tell "no" from "can't be known"."""

from __future__ import annotations

import errno
import os

from penstock.cache import ReadError
from penstock.cache.base import machine_remedy
from penstock.readers.files import printable

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What says that a name leads to nothing. All else (EIO, ESTALE, EACCES …) says that it can't be
known: taken for nothing, it would change the dataset, or its index."""


def status_of(path: bytes | str) -> os.stat_result | None:
    """The status of a path, None where nothing is there. Raises ReadError where that can't be
    known, which os.path.isfile and its like take for nothing."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise not_seen(os.fsencode(path), error) from error


def not_seen(path: bytes, error: OSError, *, is_folder: bool = False) -> ReadError:
    """The error for a path of which the file system doesn't say whether it is there, or for a
    folder that can't be listed."""
    what = "the folder can't be listed" if is_folder else "can't be examined"
    remedy = machine_remedy(error) or (
        "Check that the mount works, and that this user may read the file and the folders above it."
    )
    return ReadError(
        f"{printable(path)}: {what} ({error.strerror or error}). {remedy}", errno=error.errno
    )
