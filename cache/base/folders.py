"""Open folders on the local disk so that no other user can redirect or replace their files.

A cache may be in a folder to which other users can write, and the job may run as root. Therefore
this module walks a path once: its links must belong to this user or root, and its end must be a
folder of this user. From then on it opens every file relative to the folder's descriptor, never
through a link. It creates a file only if the name is free, and checks each file after opening it:
the file must be a regular file of this user, and for writing it must have no other hard link. A
mode with group permission bits shares the folder: files of the group's other members are accepted,
too.

The type of the file system comes from /proc/self/mountinfo, because a cache needs a local one.

`user_cache` is the default folder of indexes and lists. XDG_CACHE_HOME is the only environment
variable that is read below the command line, because the location of such files is the user's
setting and no argument of every call. Source: XDG Base Directory Specification.
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
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cache.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class StrangeFileError(PermissionError):
    """The entry is a link, another user's file, or no regular file.

    Callers handle it like its base class, as a failure of the disk.
    """


def strange_file_error(reason: str, path: str) -> StrangeFileError:
    """Return the error for an entry that this user or job didn't create."""
    return StrangeFileError(errno.EPERM, reason, path)


def check_owner(status: os.stat_result, path: str, *, mode: int) -> None:
    """Raise StrangeFileError for an entry of another user who isn't in a group that shares it."""
    if status.st_uid == os.geteuid():
        return
    is_member = status.st_gid in (os.getegid(), *os.getgroups())
    if mode & stat.S_IWGRP and is_member and not status.st_mode & stat.S_IWOTH:
        return
    raise strange_file_error(f"it belongs to another user (uid {status.st_uid})", path)


_OCTAL = re.compile(r"\\([0-7]{3})")  # the kernel's escapes of blanks in paths
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
    """Return the type of the file system that holds a path, such as "ext4"; "" if unknown."""
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
    """Return True if a path is on a network file system."""
    return file_system(path) in _NETWORK


def refuse_network(root: str) -> None:
    """Raise ConfigError for a folder on a network file system."""
    if is_network(root):
        raise ConfigError(
            f"{root}: this folder is on a network file system ({file_system(root)}), wanted a "
            "local disk: a network cache is no faster than the data, and its locks don't work. "
            "Pass a folder on the node's own NVMe."
        )


FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_LINKS = 40


def descend(path: str, mode: int | None) -> int:
    """Walk to a folder and open it; refuse links of other users. Return its descriptor.

    mode: the permission bits of the last folder if it is missing, which is then created with its
    parents; None creates no folders.
    """
    left = deque(part for part in os.path.abspath(path).split("/") if part)
    at, links = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), 0
    try:
        while left:
            name = left.popleft()
            if mode is not None:
                try:
                    os.stat(name, dir_fd=at, follow_symlinks=False)
                except FileNotFoundError:
                    _make(name, at, 0o700 if left else mode)
            with contextlib.suppress(OSError):  # triggers an automount
                os.stat(f"{name}/.", dir_fd=at)
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
            seen = os.fstat(found)
            if not stat.S_ISLNK(seen.st_mode):
                at, before = found, at
                os.close(before)
                continue
            try:
                links += 1
                if (uid := seen.st_uid) not in (0, os.geteuid()):
                    raise strange_file_error(f"{name} is a link of another user (uid {uid})", path)
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


def _make(name: str, at: int, mode: int) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=at)
        if mode & 0o077:
            os.chmod(name, mode & 0o7777, dir_fd=at)


_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # never wait for a pipe
_WRITES = os.O_WRONLY | os.O_RDWR
_NOT_A_FILE = "it is a link or a folder, wanted a file"


def make_private_folder(path: str) -> None:
    """Create a folder (0700) with its parents; existing folders keep their modes."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_private_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def remove_own_folder(path: str, owner: int) -> None:
    """Remove a folder with its content; do nothing in any process except the owner."""
    if os.getpid() == owner:  # a forked child's exit must not remove its parent's files
        shutil.rmtree(path, ignore_errors=True)


class Folder:
    """An open folder, whose entries are accessed by name relative to its descriptor.

    path: the folder's path in messages. mode: the permission bits of new entries. With group bits
    the folder is shared: entries of the group's other members are trusted, too. Methods raise
    OSError, and StrangeFileError for entries that aren't trusted.
    """

    def __init__(self, fd: int, path: str, mode: int) -> None:
        """fd: a descriptor that this object then owns."""
        self.fd, self.path, self._mode = fd, path, mode
        self._owner = os.fstat(fd).st_uid

    @classmethod
    def at(
        cls, path: str, *, mode: int = 0o700, make: bool = False, reads_roots: bool = False
    ) -> Folder:
        """Open a folder by its path. make: create it and its parents if they are missing.
        reads_roots: also accept a folder of root to which only root may write."""
        folder = cls(descend(path, mode if make else None), path, mode)
        found = os.fstat(folder.fd)
        if not (reads_roots and found.st_uid == 0 and not found.st_mode & OTHERS_WRITE):
            check_owner(found, path, mode=mode)
        return folder

    def folder(self, name: str, *, make: bool = False) -> Folder:
        """Open a subfolder. make: create it if it is missing."""
        path = os.path.join(self.path, name)
        if make:
            _make(name, self.fd, self._mode)
        try:
            fd = os.open(name, FOLDER_FLAGS, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                reason = "it is a link or a file, wanted a folder of the cache"
                raise strange_file_error(reason, path) from None
            raise
        inside = Folder(fd, path, self._mode)
        self._check_owner(os.fstat(fd), path)
        return inside

    def beneath(self, name: str) -> str:
        """Return the path of a subfolder, which may be missing. Raises StrangeFileError if it
        exists and isn't trusted."""
        with contextlib.suppress(FileNotFoundError):
            self.folder(name)
        return os.path.join(self.path, name)

    @property
    def others_may_write(self) -> int | None:
        """The folder's permission bits if they let users write whom `mode` excludes; else None."""
        mode = stat.S_IMODE(os.fstat(self.fd).st_mode)
        return mode if mode & OTHERS_WRITE & ~self._mode else None

    # -- files

    def open(self, name: str, flags: int = os.O_RDONLY) -> int:
        """Open an existing file; return its descriptor."""
        try:
            fd = os.open(name, flags | _FILE, dir_fd=self.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise strange_file_error(_NOT_A_FILE, os.path.join(self.path, name)) from None
            raise
        try:
            self._check_file(os.fstat(fd), name, writes=bool(flags & _WRITES))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create(self, name: str, flags: int = os.O_RDWR) -> int:
        """Create a file; return its descriptor. Raises FileExistsError."""
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self.fd)
        if self._mode & 0o077:
            os.fchmod(fd, self._mode & 0o666)
        return fd

    def open_or_create(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open a file, creating an empty one if it is missing; return its descriptor."""
        for _ in range(100):  # other processes may create and remove it at the same time
            with contextlib.suppress(FileNotFoundError):
                return self.open(name, flags)
            with contextlib.suppress(FileExistsError):
                return self.create(name, flags)
        reason = "other processes create and remove it again and again"
        raise strange_file_error(reason, os.path.join(self.path, name))

    def check(self, name: str) -> None:
        """Raise StrangeFileError if the entry exists and isn't trusted. For files that other code
        opens."""
        with contextlib.suppress(FileNotFoundError):
            self._check_file(self.stat(name), name, writes=True)

    def _check_file(self, status: os.stat_result, name: str, *, writes: bool) -> None:
        """Raise StrangeFileError for an entry that is no regular file or belongs to another user,
        or, if writes is set, has another hard link."""
        path = os.path.join(self.path, name)
        if not stat.S_ISREG(status.st_mode):
            raise strange_file_error(_NOT_A_FILE, path)
        self._check_owner(status, path)
        if writes and status.st_nlink > 1:
            raise strange_file_error("it has another name (a hard link)", path)

    def _check_owner(self, status: os.stat_result, path: str) -> None:
        """Raise StrangeFileError for an entry that belongs neither to the folder's owner nor to
        another user who is trusted."""
        if status.st_uid != self._owner:
            check_owner(status, path, mode=self._mode)

    def stat(self, name: str) -> os.stat_result:
        """Return the status of an entry, never of a link's target. Raises FileNotFoundError."""
        return os.stat(name, dir_fd=self.fd, follow_symlinks=False)

    def has(self, name: str) -> bool:
        """Return True if a regular file of that name exists."""
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(self.stat(name).st_mode)
        return False

    def is_folder(self, name: str) -> bool:
        """Return True if a subfolder of that name exists."""
        with contextlib.suppress(FileNotFoundError):
            return stat.S_ISDIR(self.stat(name).st_mode)
        return False

    def names(self) -> list[str]:
        """Return the names of all entries."""
        return os.listdir(self.fd)

    def files(self) -> dict[str, os.stat_result]:
        """Return the names and statuses of all regular files."""
        found: dict[str, os.stat_result] = {}
        with os.scandir(self.fd) as entries:
            files = [entry for entry in entries if entry.is_file(follow_symlinks=False)]
            while files:
                with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                    while files:
                        entry = files.pop()
                        found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def read(self, name: str, most: int = 2**16) -> bytes:
        """Return the content of a small file."""
        with open(self.open(name), "rb", buffering=0) as file:
            return file.read(most)

    def write_whole(self, name: str, data: bytes | memoryview) -> None:
        """Write a file atomically: readers see the old content or the new."""
        temp = f"{name}.{os.getpid()}-{threading.get_ident()}"
        self.remove(temp)
        with open(self.create(temp), "wb") as file:
            file.write(data)
        os.replace(temp, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def rename(self, name: str, to: Folder, new: str) -> None:
        """Move an entry, replacing an existing one."""
        os.rename(name, new, src_dir_fd=self.fd, dst_dir_fd=to.fd)

    def remove(self, name: str) -> bool:
        """Remove an entry of any kind; of a link, not its target. Return False if it is missing."""
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
    """Return `$XDG_CACHE_HOME/penstock` or `~/.cache/penstock`; None for a user without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # the specification ignores relative paths
        return os.path.join(os.fsencode(folder), b"penstock")
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return os.path.join(os.fsencode(home), b".cache", b"penstock") if home.is_absolute() else None
