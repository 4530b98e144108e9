"""The file that names the bad samples that training met: JSON lines, one file a rank."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from typing import TYPE_CHECKING

from penstock.cache.base.folders import Folder
from penstock.cache.errors import PenstockWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FOLDER = "quarantine"
_TEMP = "penstock-quarantine-"


class QuarantineFile:
    """Append-only: lines of earlier runs stay. Made at the first bad sample.

    folder: the dataset's cache folder; None or one that can't be written: a temporary one that
    stays. A disk that takes nothing costs the report and one warning, not the job.
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
        problem = ""
        for place in self._places():
            try:
                self.path = place(data)
            except OSError as error:
                problem = f"{error.filename or self._name}: {error.strerror or error}"
            else:
                return
        self._given_up = True
        warnings.warn(
            f"The list of bad samples can't be written ({problem}); training goes on without it. "
            "Give the dataset a cache= folder on a disk with room.",
            PenstockWarning,
            stacklevel=2,
        )

    def _places(self) -> list[Callable[[bytes], str]]:
        """Ways to write, the best one first; each gives the file's path."""
        if self.path:
            return [lambda data: _append(self.path, data)]
        ways = [
            lambda data: _append(os.path.join(tempfile.mkdtemp(prefix=_TEMP), self._name), data)
        ]
        if self._folder is not None:
            kept = os.path.join(self._folder, _FOLDER, self._name)
            ways.insert(0, lambda data: _append(kept, data))
        return ways


def _append(path: str, data: bytes) -> str:
    above, name = os.path.split(path)
    # Never through another user's link: a cache folder may lie where others can write.
    fd = Folder.at(above, make=True).open_or_create(name, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(fd, data)  # whole lines in one call: processes that share the file don't mix
    finally:
        os.close(fd)
    return path
