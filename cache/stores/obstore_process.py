"""obstore in one process: it doesn't survive a fork, and its panics pass every handler.

obstore's own threads don't survive a fork: after it was used, a forked child would hang, so stores
refuse there.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from penstock.cache.base.store import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FORKED = (
    "obstore was used before this process was forked, and would hang here. Use "
    'multiprocessing_context="forkserver" (or "spawn"), and make the dataset inside the worker'
)


class _Process:
    """Whether obstore runs in this process, or ran in the one that this was forked from."""

    is_used = False
    is_forked = False

    @classmethod
    def forked(cls) -> None:
        cls.is_forked = cls.is_forked or cls.is_used
        cls.is_used = False


os.register_at_fork(after_in_child=_Process.forked)


def check_process(pid: int) -> None:
    """Raise RequestError where obstore would hang; from here on it is used.

    That is in any process but that of the pid, and in a forked child of one that used it.
    """
    if _Process.is_forked or os.getpid() != pid:
        raise RequestError("refused", _FORKED)
    _Process.is_used = True


class RustPanicError(RuntimeError):
    """obstore met something that its authors thought impossible: its panic as an Exception."""


@contextlib.contextmanager
def rust_errors() -> Iterator[None]:
    """Make an Exception of a panic of Rust's, a BaseException that would pass every handler."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RustPanicError(str(error)) from None
