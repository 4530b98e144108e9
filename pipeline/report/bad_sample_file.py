"""Write the bad samples that training met to a quarantine file: JSON lines, one file a rank."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import tempfile
import warnings
from typing import TYPE_CHECKING

from penstock.cache import PenstockWarning
from penstock.cache.base import is_shortage, machine_remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FOLDER = "quarantine"
_TEMP = "penstock-quarantine-"
_KEPT = 200  # of jobs without a cache


class QuarantineFile:
    """Append-only. Made at the first bad sample.

    folder: the dataset's cache folder, where lines of earlier runs stay; None or one that can't be
    written: a file of its own in the user's cache directory, which keeps the last 200, and where
    that fails in a temporary folder. A disk that takes nothing costs the report and one warning,
    not the job.
    """

    def __init__(self, folder: str | None, *, name: str) -> None:
        self.path = ""
        self._folder = folder
        self._name = name
        self._given_up = False

    def append(self, lines: Sequence[dict[str, str | int]]) -> None:
        """Write these objects. Never raises for the disk's sake."""
        if self._given_up or not lines:
            return
        data = b"".join(json.dumps(line).encode("ascii") + b"\n" for line in lines)
        problem, remedy = "", None
        for place in self._places():
            try:
                self.path = place(data)
            except OSError as error:
                problem = f"{error.filename or self._name}: {error.strerror or error}"
                remedy = machine_remedy(error) if is_shortage(error) else None
            else:
                return
        self._given_up = True
        warnings.warn(
            f"The list of bad samples can't be written ({problem}); training goes on without it. "
            + (remedy or "Give the dataset a cache= folder on a disk with room."),
            PenstockWarning,
            stacklevel=2,
        )

    def _places(self) -> list[Callable[[bytes], str]]:
        """Ways to write, the best one first; each gives the file's path."""
        if self.path:
            return [lambda data: _append(self.path, data)]
        ways: list[Callable[[bytes], str]] = [
            lambda data: _append_once(self._name, data),
            self._in_temporary,
        ]
        if self._folder is not None:
            kept = os.path.join(self._folder, _FOLDER, self._name)
            ways.insert(0, lambda data: _append(kept, data))
        return ways

    def _in_temporary(self, data: bytes) -> str:
        return _append(os.path.join(tempfile.mkdtemp(prefix=_TEMP), self._name), data)


def _append_once(name: str, data: bytes) -> str:
    """Write a new file of the user's cache directory, and remove the oldest ones."""
    from penstock.cache.base import Folder, user_cache

    home = user_cache()
    if home is None:
        raise FileNotFoundError(errno.ENOENT, "no home directory", name)
    above = os.path.join(os.fsdecode(home), _FOLDER)
    stem, extension = os.path.splitext(name)
    path = _append(os.path.join(above, f"{stem}-{secrets.token_hex(4)}{extension}"), data)
    with contextlib.suppress(OSError):
        folder = Folder.at(above)
        oldest = sorted(folder.files().items(), key=lambda item: item[1].st_mtime_ns)
        for old, _ in oldest[:-_KEPT]:
            folder.remove(old)
    return path


def _append(path: str, data: bytes) -> str:
    """Append to a file. Nothing empty is left where that fails."""
    above, name = os.path.split(path)
    from penstock.cache.base import Folder

    try:
        # Never through another user's link: a cache folder may lie where others can write.
        folder = Folder.at(above, make=True)
        fd = folder.open_or_create(name, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)  # whole lines in one call: processes that share the file don't mix
        except OSError:
            if not os.fstat(fd).st_size:
                folder.remove(name)
            raise
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(above)
        raise
    return path
