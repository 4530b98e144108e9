"""A temporary folder of this process, for small objects that no cache keeps."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import weakref

from penstock.cache.base.folders import remove_own_folder


class ProcessFolder:
    """Keeps files by key in a folder of its own, made at the first use.

    It is removed at close() or at the process's end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: str | None = None
        self._finalizer: weakref.finalize[..., ProcessFolder] | None = None

    def path(self, key: str) -> str:
        """Where the file of a key lies, or would lie."""
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.mkdtemp(prefix="penstock-objects-")
                self._finalizer = weakref.finalize(
                    self, remove_own_folder, self._folder, os.getpid()
                )
            return os.path.join(self._folder, key)

    def write(self, key: str, data: memoryview) -> str:
        """Make or replace the file of a key; its path."""
        path = self.path(key)
        temp = f"{path}.{threading.get_ident()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(temp, flags, 0o600), "wb") as file:
            file.write(data)
        os.replace(temp, path)
        return path

    def remove(self, key: str) -> None:
        """Forget a file, if it is there."""
        if self._folder is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, key))

    def close(self) -> None:
        """Remove all. Safe to call twice."""
        if self._finalizer is not None:
            self._finalizer()
