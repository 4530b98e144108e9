"""Where a dataset's bytes lie: a local folder, or any fsspec URL behind local copies.

Everything above this module asks for local files by the name that they have below the dataset's
root and gets paths as bytes: names need not be UTF-8.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cache.errors import (
    ConfigError,
    DatasetError,
    DatasetNotFoundError,
    FetchError,
    MissingDependencyError,
)
from cache.local_copy import (
    LocalCopies,
    RemoteObject,
    clean_message,
    find_secrets,
    redact,
    store_scope,
)
from readers.tar_urls import Selection, select_tars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")
_VERSION_KEYS = ("ETag", "etag", "e_tag", "md5Hash", "content_md5", "checksum")
_TIME_KEYS = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")

Url = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Origin(Protocol):
    """A dataset's root. url: for people, without credentials; key: names this dataset in a cache.
    selection: names below the root that were asked for, in order, None for all that is there;
    selection_key: names these."""

    url: str
    key: str
    is_local: bool
    selection: tuple[bytes, ...] | None
    selection_key: str | None

    @property
    def bytes_fetched(self) -> int:
        """Bytes downloaded so far."""

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        """Local path of a file below the root; fetches a remote one. Raises FetchError."""

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        """Forget the local copy of a remote file; False where there is none to forget."""

    def find(self, name: bytes) -> tuple[int, str] | None:
        """(bytes, version) of a file below the root, or None if it isn't there."""

    def entry(self, name: bytes) -> Entry | None:
        """A regular file below the root, or None if it isn't there. Raises FetchError."""

    def top(self, wanted: Callable[[bytes], bool]) -> Top:
        """What lies directly below the root, sorted by name; empty where there is no such folder.
        wanted: tells by its name whether a file is looked at. Raises FetchError, DatasetError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file. name: below the root; mtime_ns: 0 for remote ones; version: etag or the like."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Top:
    """The first level of a folder. entries: of wanted files; missing: names of wanted ones that
    aren't files or lead nowhere; others, folders: names of other files and of folders."""

    entries: list[Entry]
    missing: list[bytes]
    others: list[bytes]
    folders: list[bytes]


class LocalFolder:
    """A folder of this machine's file systems (NFS too)."""

    is_local = True
    bytes_fetched = 0

    def __init__(self, root: bytes, selection: Selection | None = None) -> None:
        self.root = os.path.abspath(root)
        self.url = self.key = os.fsdecode(self.root)
        self.selection: tuple[bytes, ...] | None = None
        self.selection_key: str | None = None
        if selection is not None:
            self.selection, self.selection_key = selection.names, selection.key
            self.url = os.path.join(self.url, selection.pattern)
            self.key = f"{self.key}\0{selection.key}"

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

    def top(self, wanted: Callable[[bytes], bool]) -> Top:
        top = Top(entries=[], missing=[], others=[], folders=[])
        try:
            with os.scandir(self.root) as found:
                inside = sorted((entry.name, entry.is_dir()) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return top
        except OSError as error:
            raise DatasetError(
                f"{self.url}: the folder can't be listed ({error.strerror}). Give this user the "
                "right to read it."
            ) from error
        for name, is_folder in inside:
            if is_folder or not wanted(name):
                (top.folders if is_folder else top.others).append(name)
            elif (entry := self.entry(name)) is not None:
                top.entries.append(entry)
            else:
                top.missing.append(name)
        return top

    def entry(self, name: bytes) -> Entry | None:
        try:
            found = os.stat(os.path.join(self.root, name))
        except OSError:
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")


class RemoteFolder:
    """A folder behind an fsspec URL; files are copied to `copies_folder` before they are read."""

    is_local = False

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        copies_folder: Callable[[], str],
        selection: Selection | None = None,
    ) -> None:
        self._secrets = find_secrets(options)
        self._root_url = self.url = redact(url).rstrip("/")
        self.fs, root = _open_file_system(url, options, self._secrets)
        self.root = root.rstrip("/")
        scope = store_scope(options)
        self.key = f"{scope}\0{self.url}"
        self.selection: tuple[bytes, ...] | None = None
        self.selection_key: str | None = None
        if selection is not None:
            self.selection, self.selection_key = selection.names, selection.key
            self.url = f"{self.url}/{selection.pattern}"
            self.key = f"{self.key}\0{selection.key}"
        self._copies = LocalCopies(copies_folder(), self.fs, scope=scope, secrets=self._secrets)

    def _object(self, name: bytes, size_bytes: int | None, version: str) -> RemoteObject:
        text = os.fsdecode(name)
        return RemoteObject(
            uri=f"{self._root_url}/{text}",
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

    def top(self, wanted: Callable[[bytes], bool]) -> Top:
        top = Top(entries=[], missing=[], others=[], folders=[])
        try:
            inside = self.fs.ls(self.root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return top
        # As above.
        except Exception as error:
            raise self._fetch_error(error) from None
        for info in sorted(inside, key=lambda info: str(info["name"])):
            path = str(info["name"]).rstrip("/")
            name = os.fsencode(path.rpartition("/")[2])
            if path == self.root:  # a store lists the folder's own marker too
                continue
            if info.get("type") == "directory":
                top.folders.append(name)
            elif wanted(name):
                size_bytes, version = int(info.get("size") or 0), object_version(info)
                top.entries.append(
                    Entry(name=name, size_bytes=size_bytes, mtime_ns=0, version=version)
                )
            else:
                top.others.append(name)
        return top

    def entry(self, name: bytes) -> Entry | None:
        found = self.find(name)
        if found is None:
            return None
        return Entry(name=name, size_bytes=found[0], mtime_ns=0, version=found[1])

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
        f"{url}: there is nothing. Wanted an image folder (<class>/<image>), a folder of *.tar "
        "files, or a pack made by `penstock pack`. Check the path for a typing error or a missing "
        "mount."
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
        if not os.path.isdir(path) and (found := select_tars(os.fsdecode(path))) is not None:
            return LocalFolder(os.fsencode(found[0] or "."), found[1])
        return LocalFolder(path)
    root, selection = select_tars(str(url)) or (str(url), None)
    return RemoteFolder(root, storage_options or {}, copies_folder, selection)


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
