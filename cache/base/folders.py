"""Folders of our own on the local disk, held open; their files are reached by name from there.

A cache may lie where other users can write, and the job may be root's. So a path is walked once:
links on it must be this user's or root's, and what it ends at must be this user's own folder. From
then on everything is opened relative to the descriptor, never through a link, made only where
nothing was, and looked at behind the opening: a regular file of this user's, and for writing one
that has no second name elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
import threading
from typing import TYPE_CHECKING

from penstock.cache.base.descent import FOLDER_FLAGS, descend
from penstock.cache.base.trust import OTHERS_WRITE, Trust, check_owner, no_file, strange

if TYPE_CHECKING:
    from collections.abc import Callable

_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a pipe mustn't be waited for
_WRITES = os.O_WRONLY | os.O_RDWR


def make_private_folder(path: str) -> None:
    """Make a folder (0700) with its parents; one that is there keeps its mode."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_private_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def remove_own_folder(path: str, owner: int) -> None:
    """Remove a folder with all that is in it; in any process but the owner nothing happens."""
    if os.getpid() == owner:  # a forked child's exit must not take its parent's files away
        shutil.rmtree(path, ignore_errors=True)


class Folder:
    """A Folder is held open, and its files are reached by name from there.

    path: for people. mode: of what is made in it; with group bits the folder is shared: what its
    other members made there is taken as ours. Raises OSError; StrangeFileError for what isn't ours.
    """

    def __init__(self, fd: int, path: str, mode: int) -> None:
        """fd: taken over."""
        self.fd, self.path, self._mode = fd, path, mode
        self._trust = Trust(os.fstat(fd).st_uid, mode)

    @classmethod
    def at(
        cls, path: str, *, mode: int = 0o700, make: bool = False, reads_roots: bool = False
    ) -> Folder:
        """Open a folder by its path. make: with its parents, if it isn't there. reads_roots: one of
        root's that only root may write is as good."""
        folder = cls(descend(path, mode if make else None), path, mode)
        found = os.fstat(folder.fd)
        if not (reads_roots and found.st_uid == 0 and not found.st_mode & OTHERS_WRITE):
            check_owner(found, path, mode=mode)
        return folder

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """Open a folder in it."""
        path = os.path.join(self.path, name)
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self.fd)
                self._open_up(name)
        try:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                reason = "a link or a file stands where a folder of the cache belongs"
                raise strange(reason, path) from None
            raise
        inside = Folder(fd, path, self._mode)
        self._trust.check_folder(os.fstat(fd), path)
        return inside

    def beneath(self, name: str) -> str:
        """Path of a folder in it, which needn't be there; if it is, it is ours."""
        with contextlib.suppress(FileNotFoundError):
            self.folder(name)
        return os.path.join(self.path, name)

    def _open_up(self, name: str) -> None:
        if self._mode & 0o077:
            os.chmod(name, self._mode & 0o7777, dir_fd=self.fd)

    @property
    def others_may_write(self) -> int | None:
        """Its permission bits, where users may write that it wasn't made for."""
        mode = stat.S_IMODE(os.fstat(self.fd).st_mode)
        return mode if mode & OTHERS_WRITE & ~self._mode else None

    # -- files

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open a file that is there; returns its descriptor."""
        try:
            fd = os.open(name, flags | _FILE, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise no_file(os.path.join(self.path, name)) from None
            raise
        try:
            path = os.path.join(self.path, name)
            self._trust.check_file(os.fstat(fd), path, writes=bool(flags & _WRITES))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create(self, name: str, flags: int = os.O_RDWR) -> int:
        """Make a new file; returns its descriptor. Raises FileExistsError."""
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self.fd)
        if self._mode & 0o077:
            os.fchmod(fd, self._mode & 0o666)
        return fd

    def open_or_create(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open a file, made empty if it isn't there; returns its descriptor."""
        for _ in range(100):  # others may make and remove it at the same time
            with contextlib.suppress(FileNotFoundError):
                return self.open(name, flags)
            with contextlib.suppress(FileExistsError):
                return self.create(name, flags)
        raise strange("it comes and goes", os.path.join(self.path, name))

    def check(self, name: str) -> None:
        """Raise StrangeFileError for what others could have put there; nothing if it isn't there.
        For files that somebody else opens."""
        with contextlib.suppress(FileNotFoundError):
            path = os.path.join(self.path, name)
            self._trust.check_file(self.stat(name), path, writes=True)

    def stat(self, name: str) -> os.stat_result:
        """The status of the entry itself, never of a link's target. Raises FileNotFoundError."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Whether there is a regular file of that name."""
        try:
            return stat.S_ISREG(self.stat(name).st_mode)
        except FileNotFoundError:
            return False

    def is_folder(self, name: str) -> bool:
        """Whether there is a folder of that name."""
        try:
            return stat.S_ISDIR(self.stat(name).st_mode)
        except FileNotFoundError:
            return False

    def names(self) -> list[str]:
        """The names of all entries."""
        return os.listdir(self.fd)

    def files(self) -> dict[str, os.stat_result]:
        """All regular files in it."""
        found: dict[str, os.stat_result] = {}
        with os.scandir(self.fd) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            while files:
                with contextlib.suppress(FileNotFoundError):  # of the one that was popped
                    while files:
                        entry = files.pop()
                        found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def read(self, name: str, most: int = 2**16) -> bytes:
        """A small file's content."""
        fd = self.open(name)
        try:
            return os.read(fd, most)
        finally:
            os.close(fd)

    def write_whole(self, name: str, data: bytes) -> None:
        """Put a small file in place, whole."""
        temp = f"{name}.{os.getpid()}-{threading.get_ident()}"
        self.remove(temp)
        fd = self.create(temp)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
        os.replace(temp, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Move an entry, over what stands there."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def remove(self, name: str) -> bool:
        """Remove an entry, whatever it is; a link, not what it points at. False if it isn't
        there."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            shutil.rmtree(name, dir_fd=self.fd)
        return True

    def __del__(
        self,
        close: Callable[[int], None] = os.close,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        if not is_finalizing():
            close(self.fd)
