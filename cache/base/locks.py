"""Lock byte ranges of a file, with locks that the kernel releases when their holder dies.

Open-file-description locks (fcntl(2), F_OFD_SETLK) are what a node-wide cache needs: one file has
room for 2^63 locks, so that a blob needs no descriptor of its own; two opens of one process exclude
each other as two processes do; and a killed holder's locks are free at once.

None of them can be waited for with a time limit, so `wait_for` asks again, later each time: the
one place where this package polls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from penstock.cache.errors import StalledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02


class ByteLocks:
    """ByteLocks are locks on byte ranges of one file, held by one open of it. Nothing waits.

    A range that is locked twice through one object is locked once; another object is another
    holder, in the same process too.
    """

    def __init__(self, path: str | int, *, create: bool = True) -> None:
        """path: or a descriptor, which is taken over."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_NOFOLLOW if create else 0)
        self._fd = path if isinstance(path, int) else os.open(path, flags, 0o600)

    @classmethod
    def on_open_file(cls, fd: int) -> ByteLocks:
        """Locks on the file of an open descriptor, whatever became of its name."""
        return cls(f"/proc/self/fd/{fd}", create=False)

    def lock(self, start: int, length: int = 1, *, shared: bool = False) -> bool:
        """Lock [start, start + length); False if another holder is in the way."""
        return self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length)

    def unlock(self, start: int, length: int = 1) -> None:
        """Let [start, start + length) go."""
        self._set(fcntl.F_UNLCK, start, length)

    def is_held(self, start: int) -> bool:
        """Whether another holder has a byte, in either way; takes nothing."""
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, question)
        return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def _set(self, kind: int, start: int, length: int) -> bool:
        wanted = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise
        return True

    @property
    def is_open(self) -> bool:
        """Whether it can still be used: close() wasn't called."""
        return self._fd >= 0

    def close(self) -> None:
        """Let all go. Safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit modules may be gone, and the kernel closes everything.
        if getattr(self, "_fd", -1) >= 0 and not is_finalizing():
            self.close()

    @contextlib.contextmanager
    def holding(
        self, start: int, *, timeout_s: float, what: str, stop: threading.Event | None = None
    ) -> Iterator[None]:
        """Hold one byte inside. Raises StalledError when it isn't free in time."""
        wait_for(lambda: self.lock(start), timeout_s=timeout_s, what=what, stop=stop)
        try:
            yield
        finally:
            self.unlock(start)


def wait_for(
    got: Callable[[], bool], *, timeout_s: float, what: str, stop: threading.Event | None = None
) -> None:
    """Ask until got() is true. what: for the error. stop: ends the wait early, with the error.

    Raises StalledError.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not got():
        if time.monotonic() > deadline or stop.wait(pause_s):
            raise StalledError(
                f"{what}: another process of this node has held it for more than {timeout_s:.0f} s."
                " Look for one that is stopped or hangs (`penstock cache stat`), and end it: what "
                "it holds is free at once."
            )
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class ReaderLocks:
    """ReaderLocks hold the files that this process has mapped, by inode; counted, so one a file.

    Let go from finalizers, which may run inside any other call: what can't be done there and then
    is left to whoever is at work.
    """

    def __init__(self, path: str | int) -> None:
        """path: or a descriptor, which is taken over."""
        self._locks = ByteLocks(path)
        self._counts: dict[int, int] = {}
        self._mutex = threading.Lock()
        self._gone: deque[int] = deque()
        self._owner = os.getpid()

    def acquire(self, inode: int) -> bool:
        """Hold a file once more; False while an evictor is at it."""
        with self._mutex:
            count = self._counts.get(inode, 0)
            is_ours = count > 0 or self._locks.lock(inode, shared=True)
            if is_ours:
                self._counts[inode] = count + 1
        self._settle()
        return is_ours

    def release(self, inode: int) -> None:
        """Hold a file once less. A forked child's objects hold nothing."""
        if os.getpid() == self._owner:
            self._gone.append(inode)
            self._settle()

    @property
    def count(self) -> int:
        """How many files are held."""
        return len(self._counts)

    def _settle(self) -> None:
        while self._gone and self._mutex.acquire(blocking=False):
            try:
                while self._gone:
                    inode = self._gone.popleft()
                    count = self._counts.pop(inode, 0) - 1
                    if count > 0:
                        self._counts[inode] = count
                    elif count == 0 and self._locks.is_open:
                        self._locks.unlock(inode)
            finally:
                self._mutex.release()

    def close(self) -> None:
        """Let all go: maps that still live may lose their files' protection, not their bytes."""
        with self._mutex:
            self._counts.clear()
            self._locks.close()
