"""The folder for copies and indexes that have no better place: the user's cache folder, or our "
"own."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from cache.errors import ConfigError
from cache.local_copy import make_private_folder


class Scratch:
    """cache: the user's folder, kept; None: a temporary folder, made when it is first needed and
    removed with this object, at close() or at the interpreter's exit."""

    def __init__(self, cache: str | os.PathLike[str] | None = None) -> None:
        if cache is not None and not isinstance(cache, str | os.PathLike):
            raise ConfigError(
                f"cache: got {cache!r}, wanted the path of a local folder for downloads."
            )
        self.is_kept = cache is not None
        self._path = os.path.abspath(os.fspath(cache)) if cache is not None else None
        self._finalizer: weakref.finalize[..., Scratch] | None = None

    def folder(self) -> str:
        """The folder's path; makes it (0700)."""
        if self._path is None:
            self._path = tempfile.mkdtemp(prefix="penstock-")
            self._finalizer = weakref.finalize(self, _remove, self._path, os.getpid())
        if self.is_kept:
            make_private_folder(self._path)
        return self._path

    def close(self) -> None:
        """Remove a temporary folder. Safe to call twice."""
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer, self._path = None, None

    def index_folder(self, key: str) -> bytes:
        """Where the index of the dataset with this key is kept."""
        return os.fsencode(Path(self.folder()) / "indexes" / key)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child's exit must not take its parent's files away
        shutil.rmtree(path, ignore_errors=True)
