"""Open the place that holds a dataset's files: a local folder, or a folder of a remote store.

`locate` turns a URL into an origin. No other code decides how a dataset is reached. `Origin` is the
interface of both kinds: `LocalFolder` serves local file systems (NFS too), `RemoteFolder` reads a
store through the cache. Names are bytes relative to the dataset's root. They need not be UTF-8, and
a name that a remote store returned never becomes a local path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.cache import ConfigError, DatasetNotFoundError, FetchError, redact
from penstock.cache.base import BlobSource, Segment, blob_key
from penstock.readers.files import INDEX_SUFFIX, is_passed_over, printable
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT
from penstock.readers.origin.urls import (
    cannot_examine,
    index_url,
    options_scope,
    place_of,
    status_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache.base import Answer, ObjectInfo
    from penstock.cache.blobs import Remote
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.file_selection import FileSelection
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.origin.urls import Url
    from penstock.readers.types import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file in a listing. name: relative to the root. mtime_ns: 0 for a remote file. version: an
    etag or the like, "" if unknown."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str

    @property
    def identity(self) -> str:
        """Return 32 hex digits that change with every fact of the entry."""
        facts = f"{self.size_bytes}\0{self.mtime_ns}\0{self.version}\0".encode()
        return hashlib.sha256(facts + self.name).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLevel:
    """The contents of a folder, without its subfolders' contents. entries: the wanted files.
    missing: names of wanted files that aren't regular files or are broken links. others, folders:
    names of the other files and of the subfolders."""

    entries: list[Entry]
    missing: list[bytes]
    others: list[bytes]
    folders: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNames:
    """The names of the files and folders at a dataset's root, or of the files its URL selects."""

    files: tuple[bytes, ...]
    folders: tuple[bytes, ...]


class Origin(Protocol):
    """The place that holds a dataset's files.

    url: for messages, without credentials. key: identifies this dataset in a cache. selection: the
    files below the root that the URL names; None means all files. arrangement: the user's arguments
    on how the files make up samples. variant: identifies the arrangement among those of this place,
    "" for the default.
    """

    url: str
    key: str
    is_local: bool
    selection: FileSelection | None
    arrangement: Arrangement
    variant: str

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        """Return the local path of a file below the root. A small remote file is fetched as a
        whole. Raises FetchError."""

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        """Delete the cached copy of a small remote file. Return False if the origin is local."""

    def find(self, name: bytes) -> tuple[int, str] | None:
        """Return (bytes, version) of a file below the root, or None if it doesn't exist."""

    def entry(self, name: bytes) -> Entry | None:
        """Return the entry of a regular file below the root, or None if it doesn't exist. Raises
        FetchError."""

    def names(self) -> RootNames:
        """Return the names that `top` lists. They are listed once, so that each format can check
        cheaply whether it recognises the dataset. Raises the same errors as `top`."""

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        """List the files directly below the root, sorted by name. The result is empty if the folder
        doesn't exist. With a selection, list its files in its order, wherever they lie below the
        root.

        wanted: returns True for the names of the files to examine. Raises FetchError and
        DatasetError. With a selection, raises DatasetNotFoundError if a file doesn't exist and
        ConfigError if one is named twice.
        """

    def close(self) -> None:
        """Close the connections. Safe to call twice."""


class LocalFolder:
    """A dataset in a folder of a local file system (NFS too)."""

    is_local = True

    def __init__(
        self,
        root: bytes,
        selection: FileSelection | None = None,
        arrangement: Arrangement = DEFAULT_ARRANGEMENT,
    ) -> None:
        self.root = os.path.abspath(root)
        self.url = self.key = os.fsdecode(self.root)
        self.selection = selection
        self._names: RootNames | None = None
        if selection is not None:
            self.url = os.path.join(self.url, selection.pattern)
            self.key = f"{self.key}\0{selection.key}"
        self.arrangement, self.variant = arrangement, arrangement.key
        if self.variant:
            self.key = f"{self.key}\0{self.variant}"

    def index_folders(self) -> list[bytes]:
        """Return the candidates for the index's folder next to the data, best first: next to the
        given path, and if that is a link, next to its target."""
        roots = dict.fromkeys((self.root, os.path.realpath(self.root)))
        if self.selection is not None:
            folders = [os.path.join(root, self.selection.index_name) for root in roots]
        else:
            folders = [root + INDEX_SUFFIX for root in roots if os.path.basename(root)]
        if not self.variant:
            return folders
        variant = os.fsencode(self.variant)
        return [b"%s-%s%s" % (f[: -len(INDEX_SUFFIX)], variant, INDEX_SUFFIX) for f in folders]

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        del size_bytes, version
        return os.path.join(self.root, name)

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        del name, size_bytes, version
        return False

    def find(self, name: bytes) -> tuple[int, str] | None:
        found = status_of(os.path.join(self.root, name))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return found.st_size, str(found.st_mtime_ns)

    def names(self) -> RootNames:
        if self._names is None:
            top = self.top(lambda _: False)
            self._names = RootNames(files=tuple(top.others), folders=tuple(top.folders))
        return self._names

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        top = TopLevel(entries=[], missing=[], others=[], folders=[])
        if self.selection is not None:
            inside = [(name, False) for name in self._selected()]
        else:
            inside = self._list_folder(b"")
        for name, is_folder in inside:
            if is_folder or not wanted(name):
                (top.folders if is_folder else top.others).append(name)
            elif (entry := self.entry(name)) is not None:
                top.entries.append(entry)
            else:
                top.missing.append(name)
        return top

    def _selected(self) -> list[bytes]:
        from penstock.readers.origin.file_selection import Tree, select_files

        def top(folder: str) -> tuple[list[tuple[str, bool]], list[str]]:
            prefix = os.path.join(os.fsencode(folder), b"")
            inside = self._list_folder(prefix)
            files = [
                (os.fsdecode(prefix + name), True) for name, is_folder in inside if not is_folder
            ]
            return files, [os.fsdecode(name) for name, is_folder in inside if is_folder]

        def find(name: str) -> bool | None:
            return None if self.find(os.fsencode(name)) is None else True

        def walk(folder: str) -> Iterator[tuple[str, bool]]:
            waiting = [(folder, frozenset[bytes]())]
            while waiting:
                folder, above = waiting.pop()
                real = os.path.realpath(os.path.join(self.root, os.fsencode(folder)))
                if real in above:  # a link to a folder above it
                    continue
                files, folders = top(folder)
                yield from files
                inside = (n for n in folders if not is_passed_over(os.fsencode(n)))
                waiting += [(os.path.join(folder, n), above | {real}) for n in inside]

        assert self.selection is not None
        tree = Tree(top=top, walk=walk, find=find, at_once=1)
        return [os.fsencode(name) for name, _ in select_files(tree, self.selection, url=self.url)]

    def _list_folder(self, folder: bytes) -> list[tuple[bytes, bool]]:
        """List a folder: sorted (name, is a folder or a link to one)."""
        try:
            with os.scandir(os.path.join(self.root, folder)) as found:
                return sorted((entry.name, leads_to_folder(entry)) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ELOOP:
                return []
            raise cannot_examine(os.path.join(self.root, folder), error, is_folder=True) from error

    def entry(self, name: bytes) -> Entry | None:
        found = status_of(os.path.join(self.root, name))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")

    def close(self) -> None:
        """Do nothing: a local folder holds no connections."""


def leads_to_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return True for a folder or a link to one, False for a link that loops."""
    try:
        return entry.is_dir()
    except OSError:  # opening it as a file raises the precise error
        return False


class RemoteFolder:
    """A dataset in a folder of a remote store, which is read through `remote`.

    shown: its URL, without credentials. mount: its path, if it is a folder of a network file
    system. index_url: the URL of the folder for its index; None if there is no such place.
    folder_at: opens another folder of the same store. is_known_by_url: True if a later process
    finds the same data under this URL.
    """

    is_local = False
    mount: bytes | None = None

    def __init__(
        self,
        remote: Remote,
        shown: str,
        selection: FileSelection | None = None,
        *,
        index_url: str | None = None,
        folder_at: Callable[[str], RemoteFolder] | None = None,
        is_known_by_url: bool = True,
        arrangement: Arrangement = DEFAULT_ARRANGEMENT,
    ) -> None:
        self.remote = remote
        self.index_url, self.is_known_by_url = index_url, is_known_by_url
        self._folder_at = folder_at
        self._others: dict[str, RemoteFolder] = {}
        self._root_url = self.url = shown.rstrip("/")
        self._scope = remote.fetcher.store.scope
        self.arrangement, self.variant = arrangement, arrangement.key_with_content()
        self.key = dataset_key(self._scope, self._root_url, selection, self.variant)
        self.selection = selection
        self._names: RootNames | None = None
        self._listed: tuple[list[Entry], list[bytes]] | None = None
        if selection is not None:
            self.url = f"{self.url}/{selection.pattern}"

    def folder_at(self, url: str) -> RemoteFolder:
        """Open another folder of the same store with the same options. It is closed together with
        this one. Raises ConfigError if the URL is in another store, and FetchError."""
        if self._folder_at is None:
            raise TypeError(f"{self.url} was opened without folder_at=")
        if url not in self._others:
            self._others[url] = self._folder_at(url)
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
        found = self.remote.find(os.fsdecode(name))
        return None if found is None else _entry(found)

    def names(self) -> RootNames:
        if self._names is None:
            self._listed = self._list()  # used once more, by the call of `top` that follows
            files, folders = self._listed
            self._names = RootNames(files=tuple(e.name for e in files), folders=tuple(folders))
        return self._names

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        top = TopLevel(entries=[], missing=[], others=[], folders=[])
        listed, self._listed = self._listed, None
        files, folders = listed or self._list()
        top.folders.extend(folders)
        for entry in files:
            if wanted(entry.name):
                top.entries.append(entry)
            elif entry.name:
                top.others.append(entry.name)
        return top

    def _list(self) -> tuple[list[Entry], list[bytes]]:
        """List the files of the root or of the selection, in order, and the folders at the root."""
        fetcher = self.remote.fetcher
        if self.selection is None:
            objects, folders = fetcher.list_folder()
            entries = sorted(map(_entry, objects), key=lambda entry: entry.name)
            return entries, sorted(map(os.fsencode, folders))
        from penstock.readers.origin.file_selection import Tree, select_files

        def top(folder: str) -> tuple[list[tuple[str, ObjectInfo]], list[str]]:
            objects, folders = fetcher.list_folder(folder)
            return [(found.path, found) for found in objects], list(folders)

        def walk(folder: str) -> Iterator[tuple[str, ObjectInfo]]:
            return ((found.path, found) for found in fetcher.walk(folder))

        tree = Tree(top=top, walk=walk, find=self.remote.find)
        found = select_files(tree, self.selection, url=self.url)
        return [_entry(info) for _, info in found], []

    def walk(self) -> Iterator[Entry]:
        """List every object below the root, or of the selection.

        Raises FetchError, DatasetNotFoundError, and ConfigError if the URL is a single file.
        """
        self._listed = None
        if self.selection is not None:
            yield from self._list()[0]
            return
        is_empty = True
        for found in self.remote.fetcher.walk():
            is_empty = False
            yield _entry(found)
        if is_empty:
            from penstock.readers.origin.unreadable import not_a_folder_message, not_found_message

            if self.remote.fetcher.info("") is not None:
                raise ConfigError(not_a_folder_message(self.url))
            raise DatasetNotFoundError(not_found_message(self.url))

    def read(self, wanted: Sequence[tuple[Entry, int]]) -> list[Encoded]:
        """Fetch the first bytes of several objects at once, without caching them. wanted: (entry,
        number of bytes). Raises FetchError."""
        return self.read_ranges([(entry, 0, size_bytes) for entry, size_bytes in wanted])

    def read_ranges(self, wanted: Sequence[tuple[Entry, int, int]]) -> list[Encoded]:
        """Fetch byte ranges of several objects at once, without caching them. wanted: (entry, first
        byte, end). Raises FetchError."""
        from penstock.cache.base import ObjectRange

        data = [np.empty(0, np.uint8)] * len(wanted)
        some = [i for i, (_, start, end) in enumerate(wanted) if start < end]
        spans = [
            ObjectRange(
                path=os.fsdecode(entry.name), start=start, end=end, version=entry.version or None
            )
            for entry, start, end in (wanted[i] for i in some)
        ]

        def deliver(number: int, answer: Answer) -> None:
            data[some[number]] = np.frombuffer(answer.data, np.uint8)

        self.remote.fetcher.fetch(spans, deliver)
        return data

    def uri(self, name: bytes) -> str:
        """Return the URL of a file for messages."""
        return f"{self._root_url}/{printable(name)}"

    def blob_key(self, name: bytes, version: str) -> str:
        """Return the cache key of a file below the root; see `cache.base.blob_key`."""
        uri = f"{self._root_url}/{os.fsdecode(name)}"
        return blob_key(scope=self._scope, uri=uri, version=version)

    def archive_key(self, identity: str) -> str:
        """Return the cache key of an object that is a blob of its own. identity: its
        Entry.identity."""
        return blob_key(scope=self._scope, uri=self._root_url, version=identity)

    def archive(self, entry: Entry) -> BlobSource:
        """Describe an object as a blob of its own. Its key contains the facts of its entry."""
        return BlobSource(
            key=self.archive_key(entry.identity),
            uri=self.uri(entry.name),
            segments=(segment(entry.name, entry.size_bytes, entry.version),),
            size_bytes=entry.size_bytes,
        )

    def upload(self, local: bytes, name: bytes) -> None:
        """Upload a local file to a name below the root. Raises FetchError."""
        self.remote.fetcher.put(os.fsdecode(local), os.fsdecode(name))

    def close(self) -> None:
        for other in self._others.values():
            other.close()
        self.remote.close()


def _entry(found: ObjectInfo) -> Entry:
    name = os.fsencode(found.path)
    return Entry(name=name, size_bytes=found.size_bytes, mtime_ns=0, version=found.version)


def segment(
    name: bytes,
    size_bytes: int,
    version: str,
    *,
    start: int = 0,
    object_bytes: int | None = None,
    may_lack: bool = False,
) -> Segment:
    """Describe a file below the root, or a range of one, as a segment of a blob. version: "" if
    unknown."""
    return Segment(
        path=os.fsdecode(name),
        size_bytes=size_bytes,
        version=version or None,
        start=start,
        object_bytes=object_bytes,
        may_lack=may_lack,
    )


def dataset_key(scope: str, url: str, selection: FileSelection | None, variant: str = "") -> str:
    """Return the name of a remote dataset in a cache. variant: the key of its arrangement."""
    chosen = "" if selection is None else f"\0{selection.key}"
    return f"{scope}\0{url}{chosen}" + (f"\0{variant}" if variant else "")


def locate(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None,
    scratch: Scratch,
    filesystem: Any | None = None,
    arrangement: Arrangement = DEFAULT_ARRANGEMENT,
) -> Origin:
    """Open the origin of a URL. filesystem: an fsspec file system; url is then a path in it.
    arrangement: the user's arguments on how the files make up samples.

    If a URL may name a file or a folder (x.parquet), the store is asked. A local path on a network
    file system is read through the cache if the user gave one.

    Raises ConfigError, MissingDependencyError, FetchError.
    """
    place = place_of(url, is_path=filesystem is not None)
    root, selection = place.root, place.selection
    if isinstance(root, str):
        options = storage_options or {}
        found = _open_remote(root, options, scratch, selection, filesystem, arrangement=arrangement)
        if place.folder is None or _is_file(found):
            return found
        found.close()
        return _open_remote(
            place.folder, options, scratch, None, filesystem, arrangement=arrangement
        )
    if scratch.is_kept:
        from penstock.cache.base import is_network

        mount = os.path.abspath(root)
        if is_network(os.fsdecode(mount)):
            from fsspec.implementations.local import LocalFileSystem

            files = LocalFileSystem()
            path = os.fsdecode(mount)
            mounted = _open_remote(path, {}, scratch, selection, files, arrangement=arrangement)
            mounted.mount = mount
            return mounted
    return LocalFolder(root, selection, arrangement)


def _is_file(origin: RemoteFolder) -> bool:
    """Return True if the single selected file exists. If the store can't answer, return True:
    reading the file then raises the precise error."""
    assert origin.selection is not None
    try:
        return origin.remote.find(origin.selection.parts[0]) is not None
    except FetchError:
        return True


def _open_remote(
    url: str,
    options: Mapping[str, Any],
    scratch: Scratch,
    selection: FileSelection | None,
    filesystem: Any | None,
    of: Remote | None = None,
    arrangement: Arrangement = DEFAULT_ARRANGEMENT,
) -> RemoteFolder:
    """Open a folder of a store. of: the dataset that this folder belongs to, if it isn't a dataset
    itself."""
    from penstock.cache.blobs import Remote
    from penstock.cache.fetch import Fetcher
    from penstock.cache.stores import fetch_policy, open_store

    store = open_store(url, options, filesystem=filesystem)
    meter = None if of is None else of.fetcher.meter
    fetcher = Fetcher(store, policy=fetch_policy(options), meter=meter)
    shown = redact(url) if filesystem is None else store.url
    variant = arrangement.key_with_content()
    key = dataset_key(store.scope, shown.rstrip("/"), selection, variant)
    label = shown if selection is None else f"{shown.rstrip('/')}/{selection.pattern}"
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    group = digest[:32] if of is None else of.group
    cache, upstream = scratch.disk_cache(), None
    if cache.peers is not None:
        from penstock.cache.blobs import StoreUpstream
        from penstock.cache.peers import PeerDirectory, PeerUpstream

        directory = PeerDirectory(group=group)
        upstream = PeerUpstream(StoreUpstream(fetcher), directory, meter=fetcher.meter)
    remote = Remote(
        fetcher, cache, group=group, label=label if of is None else of.label, upstream=upstream
    )

    def folder_at(other: str) -> RemoteFolder:
        if filesystem is None and options_scope(other) != options_scope(url):
            raise ConfigError(
                f"index: {redact(other)} is in another store than the data, {redact(url)}, and "
                "storage_options apply to that one. Give a folder of the same store or a local one."
            )
        return _open_remote(other, options, scratch, None, filesystem, remote)

    return RemoteFolder(
        remote,
        shown,
        selection,
        index_url=index_url(url, selection, is_path=filesystem is not None, variant=variant),
        folder_at=folder_at,
        # memory: belongs to this process alone; a file system object may be of any kind.
        is_known_by_url=filesystem is None and not url.startswith("memory:"),
        arrangement=arrangement,
    )
