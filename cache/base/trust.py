"""Which files and folders of a disk are ours: this user's own, or a group's that shares them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class StrangeFileError(PermissionError):
    """A link, another user's file, or something that is no file stands in the place of ours.

    Caught by whoever opens it: a disk's failure, as its base class.
    """


def strange(reason: str, path: str) -> StrangeFileError:
    """Make the error for what isn't ours."""
    return StrangeFileError(errno.EPERM, reason, path)


@dataclass(frozen=True, slots=True)
class Trust:
    """Trust decides whether what lies in an open folder is ours.

    owner: the folder's user; mode: of what is made in it; with group bits the folder is shared:
    what its other members made there is taken as ours.
    """

    owner: int
    mode: int

    def check_folder(self, found: os.stat_result, path: str) -> None:
        """Raise StrangeFileError for a folder of others."""
        if found.st_uid != self.owner:
            check_owner(found, path, mode=self.mode)

    def check_file(self, found: os.stat_result, path: str, *, writes: bool) -> None:
        """Raise StrangeFileError for what is no regular file, of others, or, to be written, has a
        second name elsewhere."""
        if not stat.S_ISREG(found.st_mode):
            raise no_file(path)
        if found.st_uid != self.owner:
            check_owner(found, path, mode=self.mode)
        if writes and found.st_nlink > 1:
            raise strange("it has a second name elsewhere (a hard link)", path)


def check_owner(found: os.stat_result, path: str, *, mode: int) -> None:
    """Raise StrangeFileError for what is neither this user's, nor of a group that shares it."""
    if found.st_uid == os.geteuid():
        return
    is_member = found.st_gid in (os.getegid(), *os.getgroups())
    if mode & stat.S_IWGRP and is_member and not found.st_mode & stat.S_IWOTH:
        return
    raise strange(f"it belongs to another user (uid {found.st_uid})", path)


def no_file(path: str) -> StrangeFileError:
    """Make the error for what is no regular file."""
    return strange("a link or a folder stands where a file belongs", path)
