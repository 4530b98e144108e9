"""Publish files atomically, so that a reader sees all of a file or none of it.

A file is written under a temporary name in the same folder, synced, and renamed into place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from typing import TYPE_CHECKING, Any

from penstock.cache import DestinationError, WriteError
from penstock.cache.base import is_shortage, machine_remedy
from penstock.readers.files.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def temp_name(path: bytes) -> bytes:
    """Return the temporary name under which `path` is written; always the same, so that a rerun
    replaces it."""
    folder, base = os.path.split(path)
    return os.path.join(folder, b"." + base + b".tmp")


def write_whole(path: bytes, write: Callable[[bytes], None]) -> None:
    """Let write(temp path) make a file, then rename it to `path`. Raises WriteError."""
    temp = temp_name(path)
    try:
        # A file of its own: the name may be a link to something else.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(temp, flags, 0o666))
        write(temp)
        fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temp, path)
    except OSError as error:
        _unlink(temp)
        raise write_error(path, error) from error
    except BaseException:
        _unlink(temp)
        raise


def write_bytes(path: bytes, data: bytes) -> None:
    """Write bytes to `path` atomically. Raises WriteError."""

    def write(temp: bytes) -> None:
        with open(temp, "wb") as file:
            file.write(data)

    write_whole(path, write)


def write_json(path: bytes, value: Any) -> None:
    """Write a value as JSON to `path` atomically, with sorted keys, so that equal values are equal
    files. Raises WriteError."""
    write_bytes(path, json.dumps(value, sort_keys=True).encode("ascii") + b"\n")


def make_folder(path: bytes) -> None:
    """Make a folder and its parents. Raises WriteError."""
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error


def write_error(path: bytes, error: OSError) -> WriteError:
    """Return the error for a file that couldn't be written, with its remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        "The disk is full: free some space, then run the same command again; finished files are "
        "kept."
        if full
        else (machine_remedy(error) if is_shortage(error) else None)
        or "Check that the folder exists and is writable, then run the same command again."
    )
    reason = error.strerror or str(error)
    return WriteError(f"{printable(path)}: could not be written ({reason}). {remedy}")


_held: set[int] = set()


def _close_held() -> None:
    """Close the parent's locks in a forked child, which would hold them as long as it lives."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_held)


@contextlib.contextmanager
def locked(folder: bytes, *, busy: str | None = None) -> Iterator[None]:
    """Lock `folder` against other processes that do the same, and wait until it is free.

    busy: don't wait; raise DestinationError with this message instead.

    The lock is the folder's own flock, so no file stays behind, and the lock of a dead process is
    free at once. If the file system has no locks (some NFS), nothing is locked. All writes are
    renames of whole files with equal content, so that only costs double work.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise write_error(folder, error) from error
    _held.add(fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if busy is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DestinationError(busy) from None
        except OSError:
            pass
        yield
    finally:
        if fd in _held:  # else this is a forked child, which has closed it
            _held.discard(fd)
            os.close(fd)


def _unlink(path: bytes) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
