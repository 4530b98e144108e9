"""Where a dataset's bytes lie: a local folder, or a remote store behind the cache.

Names are bytes, below the dataset's root: they need not be UTF-8, and a name that a remote gave
never becomes a local path.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cache.blob import BlobSource, Part, blob_key
from cache.errors import ConfigError, DatasetError, DatasetNotFoundError
from cache.layout import is_network
from cache.secrets import redact
from readers.names import printable
from readers.tar_urls import Selection, select_tars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from cache.remote import Remote
    from cache.store import Answer
    from readers.scratch import Scratch
    from readers.types import Encoded

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")

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

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        """Local path of a file below the root; a small remote one is fetched whole. Raises
        FetchError."""

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        """Forget what was fetched of a small remote file; False where there is none."""

    def find(self, name: bytes) -> tuple[int, str] | None:
        """(bytes, version) of a file below the root, or None if it isn't there."""

    def entry(self, name: bytes) -> Entry | None:
        """A regular file below the root, or None if it isn't there. Raises FetchError."""

    def top(self, wanted: Callable[[bytes], bool]) -> Top:
        """What lies directly below the root, sorted by name; empty where there is no such folder.
        wanted: tells by its name whether a file is looked at. Raises FetchError, DatasetError."""

    def close(self) -> None:
        """Let connections go. Safe to call twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file. name: below the root; mtime_ns: 0 for remote ones; version: etag or the like."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str

    @property
    def identity(self) -> str:
        """Changes with anything that is told of the file: 32 hex digits."""
        told = f"{self.size_bytes}\0{self.mtime_ns}\0{self.version}\0".encode()
        return hashlib.sha256(told + self.name).hexdigest()[:32]


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

    def close(self) -> None:
        """Nothing is held."""


class RemoteFolder:
    """A folder of a remote store, read through `remote`. shown: its URL, without credentials.
    mount: its path, if it is a folder of a network file system."""

    is_local = False
    mount: bytes | None = None

    def __init__(self, remote: Remote, shown: str, selection: Selection | None = None) -> None:
        self.remote = remote
        self._root_url = self.url = shown.rstrip("/")
        self._scope = remote.fetcher.store.scope
        self.key = dataset_key(self._scope, self._root_url, selection)
        self.selection: tuple[bytes, ...] | None = None
        self.selection_key: str | None = None
        if selection is not None:
            self.selection, self.selection_key = selection.names, selection.key
            self.url = f"{self.url}/{selection.pattern}"

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        return self.remote.object(os.fsdecode(name), size_bytes=size_bytes, version=version)

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        self.remote.drop_object(os.fsdecode(name), size_bytes=size_bytes, version=version)
        return True

    def find(self, name: bytes) -> tuple[int, str] | None:
        found = self.remote.find(os.fsdecode(name))
        return None if found is None else (found.size_bytes, found.version)

    def entry(self, name: bytes) -> Entry | None:
        found = self.find(name)
        if found is None:
            return None
        return Entry(name=name, size_bytes=found[0], mtime_ns=0, version=found[1])

    def top(self, wanted: Callable[[bytes], bool]) -> Top:
        top = Top(entries=[], missing=[], others=[], folders=[])
        objects, folders = self.remote.fetcher.top()
        top.folders.extend(sorted(map(os.fsencode, folders)))
        for found in sorted(objects, key=lambda found: os.fsencode(found.path)):
            name = os.fsencode(found.path)
            if wanted(name):
                top.entries.append(
                    Entry(name=name, size_bytes=found.size_bytes, mtime_ns=0, version=found.version)
                )
            elif name:
                top.others.append(name)
        return top

    def walk(self) -> Iterator[Entry]:
        """Every object. Raises FetchError, DatasetNotFoundError, ConfigError (one file)."""
        is_empty = True
        for found in self.remote.fetcher.walk():
            is_empty = False
            yield Entry(
                name=os.fsencode(found.path),
                size_bytes=found.size_bytes,
                mtime_ns=0,
                version=found.version,
            )
        if is_empty:
            if self.remote.fetcher.info("") is not None:
                raise ConfigError(not_a_folder(self.url))
            raise DatasetNotFoundError(nothing_there(self.url))

    def read(self, wanted: Sequence[tuple[Entry, int]]) -> list[Encoded]:
        """The first bytes of some objects, as many of each as told, all at once and kept nowhere.
        Raises FetchError."""
        from cache.fetch import Span

        data = [np.empty(0, np.uint8)] * len(wanted)
        some = [i for i, (_, size_bytes) in enumerate(wanted) if size_bytes]
        spans = [
            Span(
                path=os.fsdecode(wanted[i][0].name),
                start=0,
                end=wanted[i][1],
                version=wanted[i][0].version or None,
            )
            for i in some
        ]

        def deliver(number: int, answer: Answer) -> None:
            data[some[number]] = np.frombuffer(answer.data, np.uint8)

        self.remote.fetcher.fetch(spans, deliver)
        return data

    def uri(self, name: bytes) -> str:
        """Of a file, for people."""
        return f"{self._root_url}/{printable(name)}"

    def blob(self, key: str, *, uri: str, parts: Sequence[Part], size_bytes: int) -> BlobSource:
        """A blob of this store."""
        return BlobSource(key=key, uri=uri, parts=parts, size_bytes=size_bytes)

    def blob_key(self, name: bytes, version: str) -> str:
        """See `cache.blob.blob_key`. name: below the root."""
        uri = f"{self._root_url}/{os.fsdecode(name)}"
        return blob_key(scope=self._scope, uri=uri, version=version)

    def archive_key(self, identity: str) -> str:
        """The key of an object that is a blob of its own. identity: Entry.identity."""
        return blob_key(scope=self._scope, uri=self._root_url, version=identity)

    def archive(self, entry: Entry) -> BlobSource:
        """An object as a blob of its own, named by what a listing told of it."""
        return self.blob(
            self.archive_key(entry.identity),
            uri=self.uri(entry.name),
            parts=(part(entry.name, entry.size_bytes, entry.version),),
            size_bytes=entry.size_bytes,
        )

    def upload(self, local: bytes, name: bytes) -> None:
        """Put a local file below the root. Raises FetchError."""
        self.remote.fetcher.put(os.fsdecode(local), os.fsdecode(name))

    def close(self) -> None:
        self.remote.close()


def part(name: bytes, size_bytes: int, version: str) -> Part:
    """A file below the root as a part of a blob. version: "" where none is known."""
    return Part(path=os.fsdecode(name), size_bytes=size_bytes, version=version or None)


def dataset_key(scope: str, url: str, selection: Selection | None) -> str:
    """Names a remote dataset in a cache."""
    chosen = "" if selection is None else f"\0{selection.key}"
    return f"{scope}\0{url}{chosen}"


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
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None,
    scratch: Scratch,
    filesystem: Any | None = None,
) -> Origin:
    """The origin behind a URL. filesystem: an fsspec file system, of which url is a path then.

    A local path on a network file system is read through the cache, if the user has given one.
    Raises ConfigError, MissingDependencyError, FetchError."""
    path = local_path(url) if filesystem is None else None
    if path is None:
        text = os.fsdecode(url) if filesystem is not None else str(url)
        root, selection = select_tars(text) or (text, None)
        return _open_remote(root, storage_options or {}, scratch, selection, filesystem)
    if not path or b"\0" in path:
        raise ConfigError(f"url: got {url!r}, wanted a folder or a URL such as s3://bucket/set.")
    root_path, picked = path, None
    if not os.path.isdir(path) and (found := select_tars(os.fsdecode(path))) is not None:
        root_path, picked = os.fsencode(found[0] or "."), found[1]
    if scratch.is_kept and is_network(os.fsdecode(os.path.abspath(root_path))):
        from fsspec.implementations.local import LocalFileSystem

        mount = os.path.abspath(root_path)
        mounted = _open_remote(os.fsdecode(mount), {}, scratch, picked, LocalFileSystem())
        mounted.mount = mount
        return mounted
    return LocalFolder(root_path, picked)


def _open_remote(
    url: str,
    options: Mapping[str, Any],
    scratch: Scratch,
    selection: Selection | None,
    filesystem: Any | None,
) -> RemoteFolder:
    from cache.fetch import Fetcher
    from cache.open_store import fetch_policy, open_store
    from cache.remote import Remote

    store = open_store(url, options, filesystem=filesystem)
    fetcher = Fetcher(store, policy=fetch_policy(options))
    shown = redact(url) if filesystem is None else store.url
    key = dataset_key(store.scope, shown.rstrip("/"), selection)
    label = shown if selection is None else f"{shown.rstrip('/')}/{selection.pattern}"
    remote = Remote(fetcher, scratch.disk_cache(), group=_group(key), label=label)
    return RemoteFolder(remote, shown, selection)


def _group(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
