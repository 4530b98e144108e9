"""Distinguish errors of the machine, its disks and permissions from damaged data; name remedies.

The bytes of a file never cause such an error, so no sample counts as bad because of it.
"""

from __future__ import annotations

import errno
import os
import re

from penstock.cache.errors import PenstockError, ReadError

_FILES = (
    "Raise the limit of open files (`ulimit -n`), or use fewer workers and processes; `penstock "
    "doctor` shows the limit."
)
_MEMORY = (
    "Memory ran out, or this process has too many mapped files (vm.max_map_count): use fewer "
    "workers or a smaller batch, or give the job more memory."
)
_RIGHTS = "Give this user permission to read it, and to enter its parent folders."
_DISK = "The disk or the mount fails: read `dmesg`, check the disk, or mount it again."
_FULL = "The disk or the quota is full: free some space."
# fmt: off
_OF_DISKS = (
    errno.EIO, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN,
    errno.ECONNABORTED, errno.ECONNRESET, errno.ETIMEDOUT, errno.ESHUTDOWN, errno.ENETDOWN,
    errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOLCK, errno.ENOBUFS,
)
# fmt: on
_REMEDIES = {
    errno.EMFILE: _FILES,
    errno.ENFILE: "The machine has too many open files: end other jobs, or raise fs.file-max.",
    errno.ENOMEM: _MEMORY,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "The file system is mounted read-only: mount it for writing.",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys(_OF_DISKS, _DISK),
}
_SHORTAGES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))
_ARROWS_ERRNO = re.compile(r"\[errno (\d+)\]", re.I)
# Allocations of 1 TiB and more: damaged data requests them, not a lack of memory.
_ABSURD = re.compile(r"size -?\d{13,}|allocate [\d.]+ [TPE]iB")


def _errno(error: BaseException) -> int | None:
    if isinstance(error, MemoryError):
        return None if _ABSURD.search(str(error)) else errno.ENOMEM
    if isinstance(error, ImportError):  # the loader of a library reports no error number
        return next((code for code in _SHORTAGES if os.strerror(code) in str(error)), None)
    if not isinstance(error, OSError):
        return None
    found = _ARROWS_ERRNO.search(str(error)) if error.errno is None else None
    return int(found[1]) if found else error.errno


def machine_remedy(error: BaseException) -> str | None:
    """Return the remedy for an error of the machine; None for all other errors, which the data or a
    program may have caused."""
    return _REMEDIES.get(_errno(error) or 0)


def is_shortage(error: BaseException) -> bool:
    """Return True if this process or machine ran out of memory or open files: reading the bytes
    again from any source would fail in the same way."""
    return _errno(error) in _SHORTAGES


def refuse_shortage(error: BaseException, name: str) -> None:
    """Raise ReadError if this process or machine ran out of memory or open files."""
    if is_shortage(error) and not isinstance(error, PenstockError):
        raise read_error(name, error) from error


def read_error(name: str, error: BaseException) -> ReadError:
    """Return the error for an existing file that can't be read. name: its name in messages."""
    code = _errno(error)
    strerror = error.strerror if isinstance(error, OSError) else None
    reason = os.strerror(code) if code and not strerror else strerror or str(error)
    remedy = machine_remedy(error) or "Check the file, its permissions and its disk."
    return ReadError(f"{name}: can't be read ({reason}). {remedy}", errno=code)
