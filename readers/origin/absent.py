"""What is said where no dataset is found: nothing is there, a file is, or nobody can know."""

from __future__ import annotations

import errno
import os

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.origin.unread import remedy_for

NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What says that a name leads to nothing. All else (EIO, ESTALE, EACCES …) says that it can't be
known: taken for nothing, it would change the dataset, or its index."""


def not_seen(path: bytes, error: OSError) -> DatasetError:
    """The error for a path of which the file system doesn't say whether it is there."""
    return DatasetError(
        f"{printable(path)}: can't be examined ({error.strerror or error}). Check that the mount "
        "works, and that this user may read the file and the folders above it."
    )


def nothing_there(url: str) -> str:
    """The message for a dataset that doesn't exist."""
    return (
        f"{url}: nothing is there. Wanted an image folder (<class>/<image>), a folder of *.tar "
        "files, or a pack made by `penstock pack`. Check the path for a typing error or a missing "
        "mount." + _remedy(url)
    )


def not_a_folder(url: str) -> str:
    """The message for a file where a folder should be."""
    return (
        f"{url}: this is a file whose name tells no format that is read alone (.npy, .parquet, "
        ".tar, …). Give the folder that holds the dataset, or say what it is: format=."
        + _remedy(url)
    )


def _remedy(url: str) -> str:
    remedy = remedy_for(os.fsencode(url.partition("?")[0]))
    return f" {remedy}" if remedy else ""
