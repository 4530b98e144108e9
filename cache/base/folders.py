"""Open folders on the local disk so that no other user can redirect or replace their files.

A cache may lie where other users can write, and the job may run as root. So a path is walked once:
links on it must be this user's or root's, and it must end at a folder of this user. From then on
every file is opened relative to the descriptor of the folder, never through a link; it is created
only where nothing was, and checked after opening: it must be a regular file of this user, and to be
written it must have no second name elsewhere. With group permission bits the folder is shared, and
what the group's other members made there is accepted too.

The file system's type is read from /proc/self/mountinfo, because a cache needs a local one.

`user_cache` is the place for an index or a list that has no better one. XDG_CACHE_HOME is the only
variable that is read below the command line: a Dataset is opened without one, and where a user
keeps such files is the user's answer, not an argument of every call. Source: XDG Base Directory
Specification.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class StrangeFileError(PermissionError):
    """A link, another user's file, or something that is no file stands in the place of ours.

    Caught by whoever opens it: a disk's failure, as its base class.
    """


def strange_file_error(reason: str, path: str) -> StrangeFileError:
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
            raise not_a_file_error(path)
        if found.st_uid != self.owner:
            check_owner(found, path, mode=self.mode)
        if writes and found.st_nlink > 1:
            raise strange_file_error("it has a second name elsewhere (a hard link)", path)


def check_owner(found: os.stat_result, path: str, *, mode: int) -> None:
    """Raise StrangeFileError for what is neither this user's, nor of a group that shares it."""
    if found.st_uid == os.geteuid():
        return
    is_member = found.st_gid in (os.getegid(), *os.getgroups())
    if mode & stat.S_IWGRP and is_member and not found.st_mode & stat.S_IWOTH:
        return
    raise strange_file_error(f"it belongs to another user (uid {found.st_uid})", path)


def not_a_file_error(path: str) -> StrangeFileError:
    """Make the error for what is no regular file."""
    return strange_file_error("a link or a folder stands where a file belongs", path)


_OCTAL = re.compile(r"\\([0-7]{3})")  # how the kernel writes blanks in paths
_MOUNTS = "/proc/self/mountinfo"
# fmt: off
_NETWORK = frozenset((
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph",
    "glusterfs", "9p", "afs", "wekafs", "panfs", "orangefs",
    "fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.glusterfs",
    "fuse.mount-s3", "fuse.juicefs",
))
# fmt: on


def file_system(path: str) -> str:
    """Name the type of the file system that holds a path, such as "ext4"; "" where unknown."""
    path = os.path.realpath(path)
    best, found = "", ""
    with contextlib.suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="replace") as file:
        for line in file:
            mount, _, rest = line.partition(" - ")
            fields = mount.split()
            if len(fields) < 5 or not rest:
                continue
            place = _OCTAL.sub(lambda found: chr(int(found[1], 8)), fields[4])
            inside = path == place or path.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best):
                best, found = place, rest.split()[0]
    return found


def is_network(path: str) -> bool:
    """Whether a path lies on a file system of another machine."""
    return file_system(path) in _NETWORK


def refuse_network(root: str) -> None:
    """Raise ConfigError for a folder on a network file system."""
    if is_network(root):
        raise ConfigError(
            f"{root}: this folder is on a network file system ({file_system(root)}), wanted a "
            "local disk: a cache there would be no faster than the data, and its locks don't hold. "
            "Give a folder on the node's own NVMe."
        )


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
                    raise strange_file_error(
                        f"{name} is a link of another user (uid {seen.st_uid})", path
                    )
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
                raise strange_file_error(reason, path) from None
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
                raise not_a_file_error(os.path.join(self.path, name)) from None
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
        raise strange_file_error("it comes and goes", os.path.join(self.path, name))

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


def user_cache() -> bytes | None:
    """`$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # the specification has others ignored
        return os.path.join(os.fsencode(folder), b"penstock")
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return os.path.join(os.fsencode(home), b".cache", b"penstock") if home.is_absolute() else None
