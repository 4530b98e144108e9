"""Write the bad samples of a training run to a quarantine file: JSON lines, one file per rank."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import tempfile
import warnings
from typing import TYPE_CHECKING

from penstock.cache import PenstockWarning
from penstock.cache.base import is_shortage, machine_remedy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_FOLDER = "quarantine"
_TEMP = "penstock-quarantine-"


class QuarantineFile:
    """An append-only list of bad samples, created with the first one.

    folder: the dataset's cache folder, in which the lines of earlier runs stay. If it is None or
    can't be written to, each job gets a new file in the user's cache directory, which keeps the
    latest `most_files`, or in a temporary folder if that can't be written to either. If no folder
    can be written to, the list is lost with one warning, and the job continues.
    """

    most_files = 200

    def __init__(self, folder: str | None, *, name: str) -> None:
        self.path = ""
        self._folder = folder
        self._name = name
        self._failed = False

    def append(self, lines: Sequence[dict[str, str | int]]) -> None:
        """Append one line per object. An error of the disk is never raised."""
        if self._failed or not lines:
            return
        data = b"".join(json.dumps(line).encode("ascii") + b"\n" for line in lines)
        problem, remedy = "", None
        for path in self._paths():
            try:
                _append(path, data)
            except OSError as error:
                problem = f"{error.filename or self._name}: {error.strerror or error}"
                remedy = machine_remedy(error) if is_shortage(error) else None
            else:
                self.path = path
                return
        self._failed = True
        warnings.warn(
            f"The list of bad samples can't be written ({problem}); training continues without it. "
            + (remedy or "Give the dataset a cache= folder on a disk with room."),
            PenstockWarning,
            stacklevel=2,
        )

    def _paths(self) -> Iterator[str]:
        """Yield the paths that the list may have, in order of preference."""
        if self.path:
            yield self.path
            return
        if self._folder is not None:
            yield os.path.join(self._folder, _FOLDER, self._name)
        from penstock.cache.base import Folder, user_cache

        if (home := user_cache()) is not None:
            parent = os.path.join(os.fsdecode(home), _FOLDER)
            with contextlib.suppress(OSError):  # remove the oldest files, so that one more fits
                folder = Folder.at(parent)
                oldest = sorted(folder.files().items(), key=lambda item: item[1].st_mtime_ns)
                for old, _ in oldest[: 1 - self.most_files]:
                    folder.remove(old)
            stem, extension = os.path.splitext(self._name)
            yield os.path.join(parent, f"{stem}-{secrets.token_hex(4)}{extension}")
        with contextlib.suppress(OSError):  # there is no folder for temporary files
            yield os.path.join(tempfile.mkdtemp(prefix=_TEMP), self._name)


def _append(path: str, data: bytes) -> None:
    """Append to a file. If that fails, neither an empty file nor an empty folder is left."""
    parent, name = os.path.split(path)
    from penstock.cache.base import Folder

    try:
        # Follows no link of another user: others may be able to write to the cache folder.
        folder = Folder.at(parent, make=True)
        fd = folder.open_or_create(name, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, data)  # one call, so that lines of several processes don't mix
        except OSError:
            if not os.fstat(fd).st_size:
                folder.remove(name)
            raise
        finally:
            os.close(fd)
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(parent)
        raise
