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
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_USER_INFO = re.compile(r"(?<=://)[^/@\s]*@")
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"<>]*")
_SECRET_NAME = re.compile(r"key|secret|token|password|passwd|credential|sas|auth|sign", re.I)


def redact(text: str) -> str:
    """`text` with user names, passwords and query strings (signatures) of its URLs left out."""
    return _QUERY.sub(r"\1", _USER_INFO.sub("", text))


def find_secrets(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Values of storage options that must not be shown, at any depth; longest first."""
    return tuple(sorted(set(_secrets(options, secret=False)), key=len, reverse=True))


def _secrets(value: Any, *, secret: bool) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _secrets(inner, secret=secret or bool(_SECRET_NAME.search(str(name))))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secrets(inner, secret=secret)
    elif isinstance(value, str) and secret and value:
        yield value


def store_scope(options: Mapping[str, Any]) -> str:
    """What tells two stores of one URL apart (an endpoint, an account): hex, without secrets."""
    plain = repr(sorted((k, repr(v)) for k, v in _plain(options).items()))
    return hashlib.sha256(plain.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in options.items() if not _SECRET_NAME.search(str(k))}
    return {k: _plain(v) if isinstance(v, dict) else v for k, v in kept.items()}


def clean_message(error: BaseException, secrets: tuple[str, ...]) -> str:
    """An exception's type and text without credentials."""
    text = redact(str(error))
    for secret in secrets:
        text = text.replace(secret, "…")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def make_private_folder(path: str) -> None:
    """Make a folder (0700) with its parents; one that is there keeps its mode."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_private_folder(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


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
