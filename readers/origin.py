"""Where a dataset's bytes lie: a local folder, or any fsspec URL behind local copies.

Everything above this module asks for local files by the name that they have below the dataset's
root and gets paths as bytes: names need not be UTF-8.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Protocol

from cache.errors import ConfigError, DatasetNotFoundError, FetchError, MissingDependencyError
from cache.local_copy import (
    LocalCopies,
    RemoteObject,
    clean_message,
    find_secrets,
    redact,
    store_scope,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "checksum")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")

Url = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Origin(Protocol):
    """A dataset's root. url: for people, without credentials; key: names this root in a cache."""

    url: str
    key: str
    is_local: bool

    @property
    def bytes_fetched(self) -> int:
        """Bytes downloaded so far."""

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        """Local path of a file below the root; fetches a remote one. Raises FetchError."""

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        """Forget the local copy of a remote file; False where there is none to forget."""

    def find(self, name: bytes) -> tuple[int, str] | None:
        """(bytes, version) of a file below the root, or None if it isn't there."""


class LocalFolder:
    """A folder of this machine's file systems (NFS too)."""

    is_local = True
    bytes_fetched = 0

    def __init__(self, root: bytes) -> None:
        self.root = os.path.abspath(root)
        self.url = self.key = os.fsdecode(self.root)

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        del size_bytes, version
        return os.path.join(self.root, name)

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        del name, size_bytes, version
        return False

    def find(self, name: bytes) -> tuple[int, str] | None:
        try:
            found = os.stat(os.path.join(self.root, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size, str(found.st_mtime_ns)


class RemoteFolder:
    """A folder behind an fsspec URL; files are copied to `copies_folder` before they are read."""

    is_local = False

    def __init__(
        self, url: str, options: Mapping[str, Any], copies_folder: Callable[[], str]
    ) -> None:
        self._secrets = find_secrets(options)
        self.url = redact(url).rstrip("/")
        self.fs, root = _open_file_system(url, options, self._secrets)
        self.root = root.rstrip("/")
        scope = store_scope(options)
        self.key = f"{scope}\0{self.url}"
        self._copies = LocalCopies(copies_folder(), self.fs, scope=scope, secrets=self._secrets)

    def _object(self, name: bytes, size_bytes: int | None, version: str) -> RemoteObject:
        text = os.fsdecode(name)
        return RemoteObject(
            uri=f"{self.url}/{text}",
            path=f"{self.root}/{text}",
            size_bytes=size_bytes,
            version=version,
        )

    @property
    def bytes_fetched(self) -> int:
        return self._copies.bytes_fetched

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        return os.fsencode(self._copies.fetch(self._object(name, size_bytes, version)))

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        self._copies.drop(self._object(name, size_bytes, version))
        return True

    def find(self, name: bytes) -> tuple[int, str] | None:
        try:
            info = self.fs.info(f"{self.root}/{os.fsdecode(name)}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        # Each backend has its own exception tree; its text may hold credentials.
        except Exception as error:
            raise self._fetch_error(error) from None
        return int(info["size"] or 0), object_version(info)

    def walk(self) -> Iterator[tuple[bytes, int, str]]:
        """(name below the root, bytes, version) of every object. Raises FetchError."""
        try:
            if self.fs.isfile(self.root):
                raise ConfigError(not_a_folder(self.url))
            found = self.fs.find(self.root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise DatasetNotFoundError(nothing_there(self.url)) from None
        except ConfigError:
            raise
        # As above.
        except Exception as error:
            raise self._fetch_error(error) from None
        prefix = os.fsencode(self.root) + b"/"
        for path, info in found.items():
            name = os.fsencode(path)
            # A store that answers with something outside the root is shown as it answered.
            yield name.removeprefix(prefix), int(info.get("size") or 0), object_version(info)

    def upload(self, local: bytes, name: bytes) -> None:
        """Put a local file below the root. Raises FetchError."""
        try:
            path = f"{self.root}/{os.fsdecode(name)}"
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.fs.put_file(os.fsdecode(local), path)
        # As above.
        except Exception as error:
            raise self._fetch_error(error) from None

    def _fetch_error(self, error: Exception) -> FetchError:
        return FetchError(
            f"{self.url}: not reachable ({clean_message(error, self._secrets)}). Check the URL, "
            "the credentials in storage_options and the network.",
            uri=self.url,
        )


def nothing_there(url: str) -> str:
    """The message for a dataset that doesn't exist."""
    return (
        f"{url}: there is nothing. Wanted an image folder (<class>/<image>), or a pack made by "
        "`penstock pack`. Check the path for a typing error or a missing mount."
    )


def not_a_folder(url: str) -> str:
    """The message for a file where a folder should be."""
    return f"{url}: this is a file, wanted the folder that holds the dataset. Give its folder."


def object_version(info: Mapping[str, Any]) -> str:
    """What changes when an object does: its etag, else its size and time."""
    for key in _VERSION_KEYS:
        if info.get(key):
            return str(info[key]).strip('"')
    time = next((str(info[key]) for key in _TIME_KEYS if info.get(key)), "")
    return f"{info.get('size')}-{time}"


def local_path(url: Url) -> bytes | None:
    """The path, if `url` is one of this machine: no scheme, or file://."""
    if not isinstance(url, str):
        return os.fsencode(url)
    scheme = _SCHEME.match(url)
    if scheme is None and not ("::" in url and "://" in url):
        return os.fsencode(url)
    if scheme and scheme[1].lower() in ("file", "local") and "::" not in url:
        return os.fsencode(url[scheme.end() :])
    return None


def show(url: Url) -> str:
    """A URL for people, without credentials."""
    return redact(url) if isinstance(url, str) else os.fsdecode(os.fspath(url))


def locate(
    url: Url, *, storage_options: Mapping[str, Any] | None, copies_folder: Callable[[], str]
) -> Origin:
    """The origin behind a URL. copies_folder: asked for a remote one only. Raises ConfigError,
    MissingDependencyError, FetchError."""
    path = local_path(url)
    if path is not None:
        if not path or b"\0" in path:
            raise ConfigError(
                f"url: got {url!r}, wanted a folder or a URL such as s3://bucket/set."
            )
        return LocalFolder(path)
    return RemoteFolder(str(url), storage_options or {}, copies_folder)


def _open_file_system(
    url: str, options: Mapping[str, Any], secrets: tuple[str, ...]
) -> tuple[Any, str]:
    import fsspec

    shown = redact(url)
    try:
        fs, root = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        raise MissingDependencyError(
            f"{shown}: this kind of URL needs another package ({error}). Install it beside "
            "penstock."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{shown}: not a URL that can be opened ({clean_message(error, secrets)}). Wanted a "
            "local path, file://, s3://, gs://, https:// or another scheme that fsspec knows."
        ) from None
    # Opening may reach for credentials or the network; each backend has its own exception tree.
    except Exception as error:
        raise FetchError(
            f"{shown}: could not be opened ({clean_message(error, secrets)}). Check "
            "storage_options.",
            uri=shown,
        ) from None
    return fs, str(root)
