"""A dataset in a folder of a remote store, read through the cache."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from penstock.cache.base.blob import BlobSource, Segment, blob_key
from penstock.cache.errors import ConfigError, DatasetNotFoundError
from penstock.readers.files.names import printable
from penstock.readers.origin.absent import not_a_folder, nothing_there
from penstock.readers.origin.arrangement import AS_IT_LIES
from penstock.readers.origin.origin import Entry, RootNames, TopLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cache.base.store import Answer, ObjectInfo
    from penstock.cache.blobs.remote import Remote
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.url_patterns import Selection
    from penstock.readers.types import Encoded


class RemoteFolder:
    """A dataset in a folder of a remote store, which is read through `remote`.

    shown: its URL, without credentials. mount: its path, if it is a folder of a network file
    system. index_url: of the folder for its index, None where there is no such place. folder_at:
    opens another folder of the same store. is_known_by_url: a later process finds the same data
    under this URL.
    """

    is_local = False
    mount: bytes | None = None

    def __init__(
        self,
        remote: Remote,
        shown: str,
        selection: Selection | None = None,
        *,
        index_url: str | None = None,
        folder_at: Callable[[str], RemoteFolder] | None = None,
        is_known_by_url: bool = True,
        arrangement: Arrangement = AS_IT_LIES,
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
        self._seen: tuple[list[Entry], list[bytes]] | None = None
        if selection is not None:
            self.url = f"{self.url}/{selection.pattern}"

    def folder_at(self, url: str) -> RemoteFolder:
        """Another folder, opened with the same options and closed with this one. Raises
        ConfigError (of another store, which these options aren't for), FetchError."""
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
            self._seen = self._looked_up()  # and told by the next `top`, which comes at once
            files, folders = self._seen
            self._names = RootNames(files=tuple(e.name for e in files), folders=tuple(folders))
        return self._names

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        top = TopLevel(entries=[], missing=[], others=[], folders=[])
        seen, self._seen = self._seen, None
        files, folders = seen or self._looked_up()
        top.folders.extend(folders)
        for entry in files:
            if wanted(entry.name):
                top.entries.append(entry)
            elif entry.name:
                top.others.append(entry.name)
        return top

    def _looked_up(self) -> tuple[list[Entry], list[bytes]]:
        """The files at the root or of the selection, in order, and the folders at the root."""
        fetcher = self.remote.fetcher
        if self.selection is None:
            objects, folders = fetcher.top()
            entries = sorted(map(_entry, objects), key=lambda entry: entry.name)
            return entries, sorted(map(os.fsencode, folders))
        from penstock.readers.origin.wildcards import Tree, selected  # a folder needs none

        def top(folder: str) -> tuple[list[tuple[str, ObjectInfo]], list[str]]:
            objects, folders = fetcher.top(folder)
            return [(found.path, found) for found in objects], list(folders)

        def walk(folder: str) -> Iterator[tuple[str, ObjectInfo]]:
            return ((found.path, found) for found in fetcher.walk(folder))

        tree = Tree(top=top, walk=walk, find=self.remote.find)
        found = selected(tree, self.selection, url=self.url)
        return [_entry(info) for _, info in found], []

    def walk(self) -> Iterator[Entry]:
        """Walk every object below the root, or of the selection.

        Raises FetchError, DatasetNotFoundError, ConfigError (one file).
        """
        self._seen = None
        if self.selection is not None:
            yield from self._looked_up()[0]
            return
        is_empty = True
        for found in self.remote.fetcher.walk():
            is_empty = False
            yield _entry(found)
        if is_empty:
            if self.remote.fetcher.info("") is not None:
                raise ConfigError(not_a_folder(self.url))
            raise DatasetNotFoundError(nothing_there(self.url))

    def read(self, wanted: Sequence[tuple[Entry, int]]) -> list[Encoded]:
        """The first bytes of some objects, as many of each as wanted, all at once and kept nowhere.
        Raises FetchError."""
        return self.read_ranges([(entry, 0, size_bytes) for entry, size_bytes in wanted])

    def read_ranges(self, wanted: Sequence[tuple[Entry, int, int]]) -> list[Encoded]:
        """Bytes of some objects, first and end of each, all at once and kept nowhere. Raises
        FetchError."""
        from penstock.cache.fetch.object_range import ObjectRange

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
        """The URL of a file, for people."""
        return f"{self._root_url}/{printable(name)}"

    def blob(
        self, key: str, *, uri: str, segments: Sequence[Segment], size_bytes: int
    ) -> BlobSource:
        """A blob of this store."""
        return BlobSource(key=key, uri=uri, segments=segments, size_bytes=size_bytes)

    def blob_key(self, name: bytes, version: str) -> str:
        """See `cache.base.blob.blob_key`. name: below the root."""
        uri = f"{self._root_url}/{os.fsdecode(name)}"
        return blob_key(scope=self._scope, uri=uri, version=version)

    def archive_key(self, identity: str) -> str:
        """The key of an object that is a blob of its own. identity: Entry.identity."""
        return blob_key(scope=self._scope, uri=self._root_url, version=identity)

    def archive(self, entry: Entry) -> BlobSource:
        """An object as a blob of its own, named by what a listing says of it."""
        return self.blob(
            self.archive_key(entry.identity),
            uri=self.uri(entry.name),
            segments=(segment(entry.name, entry.size_bytes, entry.version),),
            size_bytes=entry.size_bytes,
        )

    def upload(self, local: bytes, name: bytes) -> None:
        """Put a local file below the root. Raises FetchError."""
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
    """A file below the root, or a range of one, as a segment of a blob. version: "" where none is
    known."""
    return Segment(
        path=os.fsdecode(name),
        size_bytes=size_bytes,
        version=version or None,
        start=start,
        object_bytes=object_bytes,
        may_lack=may_lack,
    )


def dataset_key(scope: str, url: str, selection: Selection | None, variant: str = "") -> str:
    """The name of a remote dataset in a cache. variant: its arrangement's key."""
    chosen = "" if selection is None else f"\0{selection.key}"
    return f"{scope}\0{url}{chosen}" + (f"\0{variant}" if variant else "")
