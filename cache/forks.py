"""Make objects safe after os.fork(), whose child must neither use nor end what its parent owns.

A forked child has the objects of its parent and none of its threads: whatever waits for a thread
waits for ever, at interpreter exit too, and whatever ends processes or releases locks would do so
to the parent. So the owners of threads, processes and handles are notified of the fork in the
child, before anything else runs there.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any, Protocol

from penstock.cache.errors import ForkedError


class Owner(Protocol):
    """An object with threads, processes or handles that a forked child doesn't have."""

    def disown(self) -> None:
        """Forget, in a forked child, what it doesn't have: wait for nothing and end nothing."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(owner: Owner) -> None:
    """Let an owner hear of each fork, as long as it lives."""
    _owners.add(owner)


def keep_for_ever(thing: object) -> None:
    """Never destroy an object: its destructor would wait for threads that aren't here."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def leave_to_parent(child: Any) -> None:
    """Keep this process, a forked child, from ending one that its parent started: multiprocessing
    would by a signal to each of what it takes for its own children, at exit."""
    from multiprocessing import process

    process._children.discard(child)  # type: ignore[attr-defined]


def check_process(pid: int, what: str) -> None:
    """Raise ForkedError in any process but that of the pid."""
    if os.getpid() != pid:
        raise ForkedError(
            f"{what} was made in process {pid}, and this is {os.getpid()}, a forked child of it: "
            "its threads stayed behind. Make one in the child; start children that need none by "
            '"spawn" or "forkserver", or before it is made.'
        )


def _in_child() -> None:
    for owner in list(_owners):
        owner.disown()
    _owners.clear()


os.register_at_fork(after_in_child=_in_child)
