"""Lock byte ranges of a file, with locks that the kernel releases when their holder dies.

A node-wide cache needs open-file-description locks (fcntl(2), F_OFD_SETLK): one file supports 2^63
locks, so that a blob needs no descriptor of its own; two opens of one process exclude each other as
two processes do; and the kernel releases a killed holder's locks at once.

The kernel offers no wait with a time limit, so `wait_for` polls with growing pauses.
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
    """Locks on byte ranges of one file, acquired through one open of it. Only `holding` waits.

    Locking a range twice through one object locks it once. Another object is another holder, even
    in the same process.
    """

    def __init__(self, fd: int) -> None:
        """fd: a descriptor, which this object then owns."""
        self._fd = fd

    def lock(self, start: int, length: int = 1, *, shared: bool = False) -> bool:
        """Lock [start, start + length); return False if another holder has a conflicting lock."""
        return self._set(fcntl.F_RDLCK if shared else fcntl.F_WRLCK, start, length)

    def unlock(self, start: int, length: int = 1) -> None:
        """Release [start, start + length)."""
        self._set(fcntl.F_UNLCK, start, length)

    def is_held(self, start: int) -> bool:
        """Return True if another holder has locked a byte, shared or not. Locks nothing."""
        query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
        found = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, query)
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
        """True until close() is called."""
        return self._fd >= 0

    def close(self) -> None:
        """Release all locks. Safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit modules may be unloaded, and the kernel closes all descriptors.
        if self._fd >= 0 and not is_finalizing():
            self.close()

    @contextlib.contextmanager
    def holding(self, start: int, *, timeout_s: float, what: str) -> Iterator[None]:
        """Hold the lock of one byte in a with statement; see `wait_for`. Raises StalledError."""
        wait_for(lambda: self.lock(start), timeout_s=timeout_s, what=what)
        try:
            yield
        finally:
            self.unlock(start)


def wait_for(
    is_done: Callable[[], bool], *, timeout_s: float, what: str, stop: threading.Event | None = None
) -> None:
    """Call is_done() until it returns True.

    what: the subject of the error message. stop: ends the wait early when it is set. Raises
    StalledError if the time runs out or `stop` is set.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() > deadline or stop.wait(pause_s):
            raise StalledError(
                f"{what}: another process of this node has held it for more than {timeout_s:.0f} s."
                " Look for a process that is stopped or hangs (`penstock cache stat`), and end it, "
                "which releases its locks at once."
            )
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


_EVICTOR_S = 5.0


class ReaderLocks:
    """The shared locks, by inode, on the files that this process has mapped, with use counts.

    Finalizers release them and may run inside any other call. If such a call holds the mutex, it
    completes the release.
    """

    def __init__(self, fd: int) -> None:
        """fd: a descriptor of the lock file, which this object then owns."""
        self._locks = ByteLocks(fd)
        self._counts: dict[int, int] = {}
        self._mutex = threading.Lock()
        self._released: deque[int] = deque()
        self._owner = os.getpid()

    def acquire(self, inode: int) -> bool:
        """Add a use of a file; return False while a process evicts it."""
        with self._mutex:
            count = self._counts.get(inode, 0)
            is_ours = count > 0 or self._locks.lock(inode, shared=True)
            if is_ours:
                self._counts[inode] = count + 1
        self._settle()
        return is_ours

    def wait(self, inode: int, *, what: str) -> None:
        """Add a use of a file once no process evicts it. what: as for `wait_for`.

        An evictor holds the lock while it removes a file. Until then a new file may already have
        the removed file's inode number. Raises StalledError.
        """
        wait_for(lambda: self.acquire(inode), timeout_s=_EVICTOR_S, what=what)

    def release(self, inode: int) -> None:
        """Remove a use of a file. In a forked child it does nothing."""
        if os.getpid() == self._owner:
            self._released.append(inode)
            self._settle()

    @property
    def count(self) -> int:
        """The number of files in use."""
        return len(self._counts)

    def _settle(self) -> None:
        while self._released and self._mutex.acquire(blocking=False):
            try:
                while self._released:
                    inode = self._released.popleft()
                    count = self._counts.pop(inode, 0) - 1
                    if count > 0:
                        self._counts[inode] = count
                    elif count == 0 and self._locks.is_open:
                        self._locks.unlock(inode)
            finally:
                self._mutex.release()

    def close(self) -> None:
        """Release all locks. Mapped files may then be evicted, but their maps stay valid."""
        with self._mutex:
            self._counts.clear()
            self._locks.close()
