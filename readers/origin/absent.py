"""What is said where no dataset is found: nothing is there, a file is, or nobody can know."""

from __future__ import annotations

import errno
import os
import re

from penstock.cache.base.machine import machine_remedy
from penstock.cache.errors import ReadError
from penstock.readers.files.names import printable
from penstock.readers.origin.unread import remedy_for, store_of

_DRIVE = re.compile(r"(?:^|/)([A-Za-z]):([\\/].*)$", re.DOTALL)
_ONE_SLASH = re.compile(r"(?:^|/)(https?|s3|gs|az|abfs|hf|file):/(?!/)(.+)$", re.DOTALL)

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


def nothing_there(url: str) -> str:
    """The message for a dataset that doesn't exist, or, by its name, of a kind that isn't read: a
    store that lists folders doesn't say whether a file is there."""
    if "://" in url and (remedy := _remedy(url)):
        return f"{url}: no dataset that Penstock reads is there.{remedy}"
    return (
        f"{url}: nothing is there. Wanted a folder, a file, or a pattern such as data/*.parquet. "
        + (_mistaken(url) or "Check the path for a typing error or a missing mount.")
    )


def _mistaken(url: str) -> str:
    """What to write instead of a path that was meant as a URL, or as a path of Windows; "" where
    a path looks like neither."""
    if found := _DRIVE.search(url):
        drive, rest = found.group(1), found.group(2).replace("\\\\", "/").replace("\\", "/")
        return (
            "This is a path of Windows. Inside of WSL, where Penstock runs, that drive is "
            f"/mnt/{drive.lower()}{rest.rstrip('/')}."
        )
    if found := _ONE_SLASH.search(url):
        return f"A URL has two slashes: {found.group(1)}://{found.group(2)}."
    return ""


def not_a_folder(url: str) -> str:
    """The message for a file where a folder should be."""
    if store_of([os.fsencode(url.partition("?")[0])]) is not None:
        return f"{url}:{_remedy(url).replace(' It', ' it', 1)}"
    return (
        f"{url}: this is a file whose name tells no format that is read alone (.npy, .parquet, "
        ".tar, …). Give the folder that holds the dataset, or say what it is: format=."
        + _remedy(url)
    )


def _remedy(url: str) -> str:
    remedy = remedy_for(os.fsencode(url.partition("?")[0]))
    return f" {remedy}" if remedy else ""
