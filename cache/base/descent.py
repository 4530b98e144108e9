"""Walking to a folder by its path, once: links of other users on the way are refused."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import deque

from penstock.cache.base.trust import strange

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40


def descend(path: str, mode: int | None) -> int:
    """Walk to a folder and open it; links of other users are refused.

    mode: make what is missing, the last with these permissions.
    """
    left = deque(part for part in os.path.abspath(path).split("/") if part)
    at, links = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), 0
    try:
        while left:
            name = left.popleft()
            if mode is not None:
                _make_missing(name, at, 0o700 if left else mode)
            with contextlib.suppress(OSError):  # what is mounted when it is looked into, is now
                os.stat(f"{name}/.", dir_fd=at)
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            seen = os.fstat(found)
            if not stat.S_ISLNK(seen.st_mode):
                at, before = found, at
                os.close(before)
                continue
            try:
                links += 1
                if seen.st_uid not in (0, os.geteuid()):
                    raise strange(f"{name} is a link of another user (uid {seen.st_uid})", path)
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                target = os.readlink("", dir_fd=found)
            finally:
                os.close(found)
            if target.startswith("/"):
                at, before = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), at
                os.close(before)
            left.extendleft(reversed([part for part in target.split("/") if part]))
        return os.open(".", FOLDER_FLAGS, dir_fd=at)
    finally:
        os.close(at)


def _make_missing(name: str, at: int, mode: int) -> None:
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=at)
            if mode & 0o077:
                os.chmod(name, mode & 0o7777, dir_fd=at)
