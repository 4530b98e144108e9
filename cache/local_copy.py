"""Plain local copies of remote objects: one download each, whole or not there at all.

A copy is written to `<key>.part` beside its place, its size is checked, then it is renamed. The
part file is also the lock: whoever holds its flock downloads, the kernel frees it when a process
dies, and the next one starts over in the same file, so a killed job leaves at most one part an
object. The key hashes the object's URI and version (etag, or size and time), never its base name:
two buckets' `train-000.arrow` are two files. Folders are 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from dataclasses import dataclass
from typing import Any

from cache.errors import FetchError
from cache.folders import make_private_folder as make_private_folder
from cache.secrets import clean_message as clean_message
from cache.secrets import find_secrets as find_secrets
from cache.secrets import redact as redact
from cache.secrets import store_scope as store_scope


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteObject:
    """One object. uri: for people and for the key, without credentials; path: what its file system
    calls it; size_bytes: None where unknown; version: etag, or size and time."""

    uri: str
    path: str
    size_bytes: int | None
    version: str


class LocalCopies:
    """Copies of one file system's objects in `folder`; safe for several threads and processes."""

    def __init__(
        self, folder: str, fs: Any, *, scope: str = "", secrets: tuple[str, ...] = ()
    ) -> None:
        self.folder = folder
        self.bytes_fetched = 0
        self._fs = fs
        self._scope = scope
        self._secrets = secrets

    def path(self, wanted: RemoteObject) -> str:
        """Where the copy is or will be."""
        text = "\0".join((self._scope, wanted.uri, wanted.version))
        key = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]
        return os.path.join(self.folder, "objects", key[:2], key)

    def fetch(self, wanted: RemoteObject) -> str:
        """Path of a complete local copy; downloads it if there is none. Raises FetchError."""
        final = self.path(wanted)
        part = final + ".part"
        while not _is_complete(final, wanted.size_bytes):
            make_private_folder(os.path.dirname(final))
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                # The one who had the lock before may have renamed or removed this very file.
                if _is_file(fd, part) and not _is_complete(final, wanted.size_bytes):
                    self._download(wanted, part)
                    os.replace(part, final)
                elif _is_file(fd, part):
                    os.unlink(part)
            finally:
                os.close(fd)
        return final

    def drop(self, wanted: RemoteObject) -> None:
        """Forget a copy that turned out wrong; the next fetch downloads it again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(wanted))

    def _download(self, wanted: RemoteObject, part: str) -> None:
        try:
            self._fs.get_file(wanted.path, part)
        # Each backend has its own exception tree (botocore, aiohttp, …): all become FetchError.
        # `from None`, because the original's text may hold credentials.
        except Exception as error:
            _unlink(part)
            raise FetchError(
                f"{wanted.uri}: not fetched ({clean_message(error, self._secrets)}). Check that it "
                "is still there, the credentials in storage_options and the network.",
                uri=wanted.uri,
            ) from None
        except BaseException:  # Ctrl-C in the middle of a download leaves no part behind
            _unlink(part)
            raise
        got = os.stat(part).st_size
        self.bytes_fetched += got
        if wanted.size_bytes is not None and got != wanted.size_bytes:
            _unlink(part)
            raise FetchError(
                f"{wanted.uri}: got {got} bytes, wanted {wanted.size_bytes}. It changed after it "
                "was indexed, or the transfer was cut: try again, then run `penstock index` (a "
                "folder) or upload the pack again.",
                uri=wanted.uri,
            )


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _is_complete(path: str, size_bytes: int | None) -> bool:
    try:
        got = os.stat(path).st_size
    except FileNotFoundError:
        return False
    return size_bytes is None or got == size_bytes


def _is_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
