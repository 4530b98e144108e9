"""Publish what process 0 has delivered, so that the job's other processes know how it ended.

In most jobs process 0 holds the job's store, so the store ends with it, and no process can ask for
the reason afterwards. Process 0 therefore publishes the epochs that it has delivered and that it
closes its loader. Each other process waits for these notices on a connection of its own, and so has
the last one when that connection breaks. If another process holds the store (torchrun's agent), the
store doesn't show whether process 0 has died: there the launcher ends the job.

Keys, below the loader's part of the store: first-says has the latest notice, first-listeners
counts the processes that wait, and first-L-N is the N-th notice to listener L, which waits for it
until the store is gone. A listener writes its own next key to end its thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from penstock.cache import JobStoreError, Workers, end_at_exit, is_exiting

if TYPE_CHECKING:
    from penstock.cache import JobStore, Outcome

_IN_USE, _CLOSED = "here", "left"
_OTHER_END_S = 10.0
"""Seconds that a process waits for its listening connection to end after a request has failed."""
_STATE, _LISTENERS = "first-says", "first-listeners"


def _notice_key(number: int, count: int) -> str:
    return f"first-{number}-{count}"


class FirstProcessNotices:
    """The notices of process 0 about one loader, and how many of them each listener has received.

    Publishes nothing in a forked child, and nothing once the store is gone. The notice that the
    loader is closed is also published when the owner is collected and when the process ends
    normally, multiprocessing's processes included.
    """

    def __init__(self, store: JobStore, *, owner: object) -> None:
        """store: the loader's part of the job's store. owner: lives as long as the loader."""
        self._store, self._pid = store, os.getpid()
        self._sent: dict[int, int] = {}  # notices per listener
        self._last = ""
        self._publish(_IN_USE)
        Finalize(owner, self.leave, exitpriority=10)

    def stay(self, *, begins: bool = False) -> None:
        """Publish that this loader is in use. begins: it begins again, from a state."""
        if begins or self._last == _CLOSED:
            self._publish(_IN_USE)

    def end_epoch(self, epoch: int) -> None:
        """Publish that all batches of an epoch are delivered."""
        self._publish(str(epoch))

    def leave(self) -> None:
        """Publish that this loader is closed, unless an error is being raised."""
        if not _is_failing():
            self._publish(_CLOSED)

    def _publish(self, notice: str) -> None:
        if os.getpid() != self._pid or notice == self._last:
            return
        self._last = notice
        with contextlib.suppress(JobStoreError):
            # A listener that registers later reads the state; earlier ones get a key of their own.
            self._store.set(_STATE, notice)
            listeners = range(1, self._store.add(_LISTENERS, 0) + 1)
            notices = {_notice_key(n, self._sent.get(n, 0)): notice for n in listeners}
            if notices:
                self._store.set_all(notices)
            self._sent.update({n: self._sent.get(n, 0) + 1 for n in listeners})
            self._store.get(_STATE)  # returns once the store has done all of that


def _is_failing() -> bool:
    """Return True if an error is ending the current block or the process."""
    error: Any = sys.exc_info()[1]
    if error is None and is_exiting():
        error = getattr(sys, "last_value", None)
    is_exit = isinstance(error, SystemExit) and not error.code
    return error is not None and not is_exit and not isinstance(error, GeneratorExit)


class FirstProcessWatch:
    """Another process's view of process 0: a thread (penstock-first) that waits for its notices
    until the store is gone."""

    def __init__(
        self, store: JobStore, connection: JobStore, *, owner: object, is_expected: bool
    ) -> None:
        """store, connection: the loader's part of the job's store, and a second connection to it.

        owner: lives as long as the loader. is_expected: process 0 must have this loader too;
        otherwise its end counts only if it had the loader.
        """
        self._store, self._connection = store, connection
        self._is_expected = is_expected
        self._pid, self._has_ended = os.getpid(), False
        self._number, self._count = store.add(_LISTENERS, 1), 0
        self._notice = store.get(_STATE) or ""
        self._workers = Workers(1, name="first")
        self._end: Outcome[None] = self._workers.submit(self._wait_for_notices, None)
        end_at_exit(self)
        weakref.finalize(owner, self.end).atexit = False

    def last_place(self) -> tuple[int, int] | None:
        """Return the epoch and the position up to which process 0 has delivered, as far as is
        known; call it once the store is gone.

        None if process 0 closed its loader, or never had it.
        """
        self._end.wait(_OTHER_END_S)
        notice = self._notice
        if notice == _CLOSED or (not notice and not self._is_expected):
            return None
        return (int(notice) + 1, 0) if notice.isdigit() else (-1, 0)

    def _wait_for_notices(self, _: None) -> None:
        with contextlib.suppress(JobStoreError):  # the store is gone: no more notices will come
            while not self._has_ended:
                key = _notice_key(self._number, self._count)
                self._connection.wait_forever(key)
                before, self._notice = self._notice, _CLOSED
                # A process that ends before its notice can be read has closed the loader.
                self._notice = self._connection.get(key) or before
                self._count += 1

    def end(self) -> None:
        """End the thread. Safe to call twice, and from any thread."""
        if self._has_ended or os.getpid() != self._pid:
            return
        self._has_ended = True
        with contextlib.suppress(JobStoreError):
            self._store.set(_notice_key(self._number, self._count), "")
        self._workers.close(timeout_s=0.0)
