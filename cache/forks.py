"""Make objects safe after os.fork(), whose child must neither use nor end what its parent owns.

A forked child has the objects of its parent but none of its threads. Code that waits for a thread
would wait forever, also at interpreter exit, and code that ends processes or releases locks would
do so to the parent. So the child notifies the owners of threads, processes and handles of the fork
before it runs anything else.
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
        """Drop, in a forked child, all that the parent owns, without waiting for or ending it."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(owner: Owner) -> None:
    """Call the owner's disown() in each forked child, as long as the owner is alive."""
    _owners.add(owner)


def keep_forever(thing: object) -> None:
    """Never destroy an object, because its destructor would wait for threads that this process
    lacks."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def leave_to_parent(child: Any) -> None:
    """Prevent this process, a forked child, from ending a process that its parent started.

    At exit multiprocessing signals every process that it counts as its child.
    """
    from multiprocessing import process

    process._children.discard(child)  # type: ignore[attr-defined]


def check_process(pid: int, what: str) -> None:
    """Raise ForkedError in any process except the one with this pid."""
    if os.getpid() != pid:
        raise ForkedError(
            f"{what} was created in process {pid}, and this is {os.getpid()}, a forked child "
            "without its threads. Create one in the child; start children that don't need one by "
            '"spawn" or "forkserver", or before you create it.'
        )


def _in_child() -> None:
    for owner in list(_owners):
        owner.disown()
    _owners.clear()


os.register_at_fork(after_in_child=_in_child)
