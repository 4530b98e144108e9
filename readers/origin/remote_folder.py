"""Open a dataset at any URL, and read the folders of a remote store through the cache.

`locate` turns a URL into an origin. No other code decides how a dataset is reached, except that
`plain_folder` opens local folders.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetNotFoundError, FetchError, redact
from penstock.cache.base import BlobSource, Segment, blob_key
from penstock.readers.files import printable
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT
from penstock.readers.origin.dataset_place import index_url, options_scope, place_of
from penstock.readers.origin.origin import Entry, LocalFolder, RootNames, TopLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache.base import Answer, ObjectInfo
    from penstock.cache.blobs import Remote
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.file_selection import FileSelection
    from penstock.readers.origin.origin import Origin
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.origin.urls import Url
    from penstock.readers.types import Encoded


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
