"""Check and show the argument that names a dataset, and examine local paths."""

from __future__ import annotations

import errno
import os
import re

from penstock.cache import ConfigError, ReadError, redact
from penstock.cache.base import machine_remedy
from penstock.readers.files import printable

OneUrl = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Url = OneUrl | list[OneUrl] | tuple[OneUrl, ...]
"""A folder, a file, a pattern of files, or a list of files and patterns of one store."""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def check_url(url: Url) -> None:
    """Raise ConfigError for a list that can't be a list of files."""
    if not isinstance(url, list | tuple):
        return
    from penstock.readers.origin.file_selection import MAX_NAMES

    if not 1 <= len(url) <= MAX_NAMES:
        raise ConfigError(f"url: got a list of {len(url):,}, wanted 1 to {MAX_NAMES:,} files.")
    for each in url:
        if not isinstance(each, str | bytes | os.PathLike):
            raise ConfigError(f"url: got {each!r} in a list, wanted paths or URLs of files.")


def local_path(url: OneUrl) -> bytes | None:
    """Return the path of a local URL (no scheme, or file://), None for any other."""
    if not isinstance(url, str):
        return os.fsencode(url)
    scheme = SCHEME.match(url)
    if scheme is None and not ("::" in url and "://" in url):
        return os.fsencode(url)
    if scheme and scheme[1].lower() in ("file", "local") and "::" not in url:
        return os.fsencode(url[scheme.end() :])
    return None


def show(url: Url) -> str:
    """Format a URL for messages, without credentials."""
    if isinstance(url, list | tuple):
        more = f" and {len(url) - 1:,} more" if len(url) > 1 else ""
        return f"{show(url[0])}{more}" if url else "[]"
    return redact(url) if isinstance(url, str) else os.fsdecode(os.fspath(url))


NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""The errors that mean that a path doesn't exist. Any other error (EIO, ESTALE, EACCES …) leaves
that unknown; ignoring it would change the dataset or its index."""


def status_of(path: bytes | str) -> os.stat_result | None:
    """Return the status of a path, or None if it doesn't exist. Raises ReadError if that is
    unknown; os.path.isfile and the like would return False."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in NOT_FOUND:
            return None
        raise cannot_examine(os.fsencode(path), error) from error


def cannot_examine(path: bytes, error: OSError, *, is_folder: bool = False) -> ReadError:
    """Return the error for a path that can't be examined, or for a folder that can't be listed."""
    problem = "the folder can't be listed" if is_folder else "can't be examined"
    remedy = machine_remedy(error) or (
        "Check that the mount works, and that this user may read the file and the folders above it."
    )
    return ReadError(
        f"{printable(path)}: {problem} ({error.strerror or error}). {remedy}", errno=error.errno
    )
