"""Tell the other processes of a job when process 0 has delivered its epochs and closed its loader.

Process 0 holds the job's store in most jobs, so the store ends with it, and nobody could ask any
more why. So process 0 publishes the epochs that it has delivered and that it closes its loader, and
each other process waits for these notices on a connection of its own: what came before that
connection broke is known. Where the store lives elsewhere (torchrun's agent), it says as little of
process 0's death as of any other's: there the launcher ends the job.
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

_HERE, _LEFT = "here", "left"
_VERDICT_S = 2.0
"""How long a process whose question failed waits for the end of the other connection."""
_STATE, _LISTENERS = "first-says", "first-listeners"

Place = tuple[int, int]
"""An epoch, and a position in it."""


def _heard_by(number: int, count: int) -> str:
    return f"first-{number}-{count}"


class FirstProcessNotices:
    """Publishes for process 0, which has this loader. It says "left" by itself when the loader is
    collected and at the process's normal end, be it one of multiprocessing's."""

    def __init__(self, store: JobStore) -> None:
        self._words = _NoticePublisher(store)
        self._words.say(_HERE)
        self._at_end = Finalize(self, self._words.leave, exitpriority=10)

    def stay(self, *, begins: bool = False) -> None:
        """Publish that this loader is in use. begins: anew, from a state."""
        if begins or self._words.last == _LEFT:
            self._words.say(_HERE)

    def end_epoch(self, epoch: int) -> None:
        """Publish that all batches of an epoch are handed out."""
        self._words.say(str(epoch))

    def leave(self) -> None:
        """Publish that this loader is used no more, unless an error is on its way."""
        self._words.leave()


class _NoticePublisher:
    """What process 0 has said, and to how many. Says nothing in a forked child, and nothing once
    the store is gone."""

    def __init__(self, store: JobStore) -> None:
        self._store, self._pid = store, os.getpid()
        self._sent: dict[int, int] = {}  # words that each listener was sent
        self.last = ""

    def say(self, word: str) -> None:
        if os.getpid() != self._pid or word == self.last:
            return
        self.last = word
        with contextlib.suppress(JobStoreError):
            # Who registers behind this reads it; who was registered is sent it.
            self._store.set(_STATE, word)
            listeners = range(1, self._store.add(_LISTENERS, 0) + 1)
            words = {_heard_by(n, self._sent.get(n, 0)): word for n in listeners}
            if words:
                self._store.set_all(words)
            self._sent.update({n: self._sent.get(n, 0) + 1 for n in listeners})
            self._store.get(_STATE)  # answered when all of that is done

    def leave(self) -> None:
        if not _is_failing():
            self.say(_LEFT)


def _is_failing() -> bool:
    """Whether an error is ending the block, or the process."""
    error: Any = sys.exc_info()[1]
    if error is None and is_exiting():
        error = getattr(sys, "last_value", None)
    is_exit = isinstance(error, SystemExit) and not error.code
    return error is not None and not is_exit and not isinstance(error, GeneratorExit)


class FirstProcessWatch:
    """Another process's view of process 0. store: as `FirstProcess` has it. is_expected: process 0
    must have this loader too; else it may, and only one that was there is missed."""

    def __init__(self, store: JobStore, connection: JobStore, *, is_expected: bool) -> None:
        self._listener = _Listener(store, connection)
        self._is_expected = is_expected
        weakref.finalize(self, self._listener.end).atexit = False

    def missed_after(self) -> Place | None:
        """The store is gone: the place up to which process 0 handed out, as far as is known; None
        where it left in peace, or never had this loader."""
        word = self._listener.last_word()
        if word == _LEFT or (not word and not self._is_expected):
            return None
        return (int(word) + 1, 0) if word.isdigit() else (-1, 0)

    def close(self) -> None:
        """End its thread. Safe to call twice."""
        self._listener.end()


class _Listener:
    """A thread that waits for process 0's words (penstock-first), until the store is gone."""

    def __init__(self, store: JobStore, connection: JobStore) -> None:
        self._store, self._connection = store, connection
        self._pid, self._has_ended = os.getpid(), False
        self._number, self._count = store.add(_LISTENERS, 1), 0
        self._word = store.get(_STATE) or ""
        self._workers = Workers(1, name="first")
        self._end: Outcome[None] = self._workers.submit(self._listen, None)
        end_at_exit(self)

    def _listen(self, _: None) -> None:
        with contextlib.suppress(JobStoreError):  # the store is gone: nothing more will be heard
            while not self._has_ended:
                key = _heard_by(self._number, self._count)
                self._connection.wait_for_ever(key)
                before, self._word = self._word, _LEFT
                # Whoever says something and is gone before it can be read is at its end.
                self._word = self._connection.get(key) or before
                self._count += 1

    def last_word(self) -> str:
        self._end.wait(_VERDICT_S)
        return self._word

    def end(self) -> None:
        """Let the thread go. Safe to call twice, and from any thread."""
        if self._has_ended or os.getpid() != self._pid:
            return
        self._has_ended = True
        with contextlib.suppress(JobStoreError):
            self._store.set(_heard_by(self._number, self._count), "")
        self._workers.close(timeout_s=0.0)
