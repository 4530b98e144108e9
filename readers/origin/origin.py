"""Where a dataset's bytes lie: a local folder, or a remote store behind the cache.

Names are bytes, below the dataset's root: they need not be UTF-8, and a name that a remote gave
never becomes a local path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache.base.blob import BlobSource, Part, blob_key
from penstock.cache.disk.layout import is_network
from penstock.cache.errors import ConfigError, DatasetError, DatasetNotFoundError
from penstock.cache.secrets import redact
from penstock.readers.files.names import INDEX_SUFFIX, printable
from penstock.readers.origin.tar_urls import Selection, select_tars
from penstock.readers.origin.unread import way_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache.base.store import Answer
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.types import Encoded

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")

Url = str | bytes | os.PathLike[str] | os.PathLike[bytes]


class Origin(Protocol):
    """A dataset's root. url: for people, without credentials; key: names this dataset in a cache.
    selection: names below the root that were asked for, in order, None for all that is there."""

    url: str
    key: str
    is_local: bool
    selection: tuple[bytes, ...] | None

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
        self._index_name: bytes | None = None
        if selection is not None:
            self.selection, self._index_name = selection.names, selection.index_name
            self.url = os.path.join(self.url, selection.pattern)
            self.key = f"{self.key}\0{selection.key}"

    def beside(self) -> list[bytes]:
        """Folders beside the data for their index, best first: beside the name that was given, and
        if that is a link, beside what it leads to."""
        roots = dict.fromkeys((self.root, os.path.realpath(self.root)))
        if self._index_name is not None:
            return [os.path.join(root, self._index_name) for root in roots]
        return [root + INDEX_SUFFIX for root in roots if os.path.basename(root)]

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        del size_bytes, version
        return os.path.join(self.root, name)

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        del name, size_bytes, version
        return False

    def find(self, name: bytes) -> tuple[int, str] | None:
        try:
            found = os.stat(os.path.join(self.root, name))
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise not_seen(os.path.join(self.root, name), error) from error
        return (found.st_size, str(found.st_mtime_ns)) if stat.S_ISREG(found.st_mode) else None

    def top(self, wanted: Callable[[bytes], bool]) -> Top:
        top = Top(entries=[], missing=[], others=[], folders=[])
        try:
            with os.scandir(self.root) as found:
                inside = sorted((entry.name, leads_to_folder(entry)) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return top
        except OSError as error:
            if error.errno == errno.ELOOP:
                return top
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
        except OSError as error:
            if error.errno in NOT_THERE:
                return None
            raise not_seen(os.path.join(self.root, name), error) from error
        if not stat.S_ISREG(found.st_mode):
            return None
        return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")

    def close(self) -> None:
        """Nothing is held."""


class RemoteFolder:
    """A folder of a remote store, read through `remote`. shown: its URL, without credentials.
    mount: its path, if it is a folder of a network file system. beside: URL of the folder for its
    index, None where there is no such place. at: opens another folder of the same store.
    is_known_by_url: a later process finds the same data under this URL."""

    is_local = False
    mount: bytes | None = None

    def __init__(
        self,
        remote: Remote,
        shown: str,
        selection: Selection | None = None,
        *,
        beside: str | None = None,
        at: Callable[[str], RemoteFolder] | None = None,
        is_known_by_url: bool = True,
    ) -> None:
        self.remote = remote
        self.beside, self.is_known_by_url, self._at = beside, is_known_by_url, at
        self._others: dict[str, RemoteFolder] = {}
        self._root_url = self.url = shown.rstrip("/")
        self._scope = remote.fetcher.store.scope
        self.key = dataset_key(self._scope, self._root_url, selection)
        self.selection: tuple[bytes, ...] | None = None
        if selection is not None:
            self.selection = selection.names
            self.url = f"{self.url}/{selection.pattern}"

    def at(self, url: str) -> RemoteFolder:
        """Another folder, opened with the same options and closed with this one. Raises
        ConfigError (of another store, which these options aren't for), FetchError."""
        if self._at is None:
            raise TypeError(f"{self.url} was opened without the way to others")
        if url not in self._others:
            self._others[url] = self._at(url)
        return self._others[url]

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
        from penstock.cache.fetch.fetcher import Span

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
        """See `cache.base.blob.blob_key`. name: below the root."""
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
        for other in self._others.values():
            other.close()
        self.remote.close()


def beside_url(url: str, selection: Selection | None, *, is_path: bool = False) -> str | None:
    """The URL of the folder for a remote dataset's index: `s3://bucket/photos.penstock`.

    None where no place lies beside the data: a bucket's, host's or repository's root (another
    bucket of that name may be anybody's), a chain of file systems. is_path: of a file system
    object, not a URL.
    """
    if selection is not None:
        return f"{url.rstrip('/')}/{os.fsdecode(selection.index_name)}"
    if "::" in url:
        return None
    scheme, mark, rest = ("", "", url) if is_path else url.partition("://")
    path, question, query = rest.partition("?") if scheme in ("http", "https") else (rest, "", "")
    path = path.rstrip("/")
    roots = 0 if scheme == "memory" else 1
    if scheme == "hf":
        roots = 3 if path.startswith(("datasets/", "spaces/", "buckets/")) else 2
    if not path or path.count("/") < roots:
        return None
    return f"{scheme}{mark}{path}{os.fsdecode(INDEX_SUFFIX)}{question}{query}"


def leads_to_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is a folder or leads to one; a link that loops leads to none."""
    try:
        return entry.is_dir()
    except OSError:  # whoever looks at it as a file says why it can't be
        return False


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
        "mount." + _way(url)
    )


NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""What says that a name leads to nothing. All else (EIO, ESTALE, EACCES …) says that it can't be
known: taken for nothing, it would change the dataset, or its index."""


def not_seen(path: bytes, error: OSError) -> DatasetError:
    """The error for a path of which the file system doesn't say whether it is there."""
    return DatasetError(
        f"{printable(path)}: can't be looked at ({error.strerror or error}). Look whether the "
        "mount is well, and whether this user may read it and the folders above it."
    )


def not_a_folder(url: str) -> str:
    """The message for a file where a folder should be."""
    return (
        f"{url}: this is a file, wanted the folder that holds the dataset. Give its folder."
        + _way(url)
    )


def _way(url: str) -> str:
    way = way_for(os.fsencode(url.partition("?")[0]))
    return f" {way}" if way else ""


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
    of: Remote | None = None,
) -> RemoteFolder:
    """of: the dataset that this folder belongs to, where it is none itself."""
    from penstock.cache.blobs.remote import Remote
    from penstock.cache.fetch.fetcher import Fetcher
    from penstock.cache.stores.opening import fetch_policy, open_store

    store = open_store(url, options, filesystem=filesystem)
    meter = None if of is None else of.fetcher.meter
    fetcher = Fetcher(store, policy=fetch_policy(options), meter=meter)
    shown = redact(url) if filesystem is None else store.url
    key = dataset_key(store.scope, shown.rstrip("/"), selection)
    label = shown if selection is None else f"{shown.rstrip('/')}/{selection.pattern}"
    remote = Remote(
        fetcher,
        scratch.disk_cache(),
        group=_group(key) if of is None else of.group,
        label=label if of is None else of.label,
    )

    def at(other: str) -> RemoteFolder:
        if filesystem is None and _store_of(other) != _store_of(url):
            raise ConfigError(
                f"index: {redact(other)} lies in another store than {redact(url)}, and "
                "storage_options are for that one. Give a folder of the same store or a local one."
            )
        return _open_remote(other, options, scratch, None, filesystem, remote)

    beside = beside_url(url, selection, is_path=filesystem is not None)
    return RemoteFolder(
        remote,
        shown,
        selection,
        beside=beside,
        at=at,
        # Memory is this process's own, and a file system object may be anything.
        is_known_by_url=filesystem is None and not url.startswith("memory:"),
    )


def _store_of(url: str) -> str:
    """What `storage_options` are for: a scheme, and with http the host too."""
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition("@")[2]
    return f"{scheme.lower()}://{host}" if scheme.lower() in ("http", "https") else scheme.lower()


def _group(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
