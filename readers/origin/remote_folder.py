"""Read the folders of a remote store through the cache."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from penstock.cache import ConfigError, DatasetError, redact
from penstock.cache.base import BlobSource, blob_key
from penstock.readers.files import printable
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT, Arrangement
from penstock.readers.origin.dataset_place import index_url, options_scope, parent_url
from penstock.readers.origin.origin import Entry, Listed, Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache.base import Answer, ObjectInfo
    from penstock.cache.blobs import Remote
    from penstock.readers.origin.file_selection import FileSelection
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.types import Encoded

T = TypeVar("T")

_MOST_FETCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """The means to open folders of one store. options: `storage_options=`. scratch: has the cache.
    filesystem: an fsspec file system; URLs are paths in it; None for any other store."""

    options: Mapping[str, Any]
    scratch: Scratch
    filesystem: Any | None


class RemoteFolder(Origin):
    """A dataset in a folder of a remote store, which is read through `remote`.

    index_url: the URL of the folder for its index; None if there is no such place.
    """

    is_local = False
    remote: Remote

    def __init__(
        self,
        url: str,
        access: StoreAccess,
        selection: FileSelection | None = None,
        arrangement: Arrangement = DEFAULT_ARRANGEMENT,
        *,
        of: Remote | None = None,
    ) -> None:
        """of: the dataset that this folder belongs to, if it isn't a dataset itself. Raises
        ConfigError, MissingDependencyError."""
        from penstock.cache.blobs import Remote
        from penstock.cache.fetch import Fetcher
        from penstock.cache.stores import fetch_policy, open_store

        is_path = access.filesystem is not None
        store = open_store(url, access.options, filesystem=access.filesystem)
        shown = store.url if is_path else redact(url)
        variant = arrangement.key_with_content()
        self._url, self._access, self._others = url, access, dict[str, RemoteFolder]()
        self._scope, self._root_url = store.scope, shown.rstrip("/")
        super().__init__(
            self._root_url,
            f"{self._scope}\0{self._root_url}",
            selection=selection,
            arrangement=arrangement,
            variant=variant,
        )
        self.index_url = index_url(url, selection, is_path=is_path, variant=variant)
        # memory: belongs to this process alone; a file system object may be of any kind.
        self.is_known_by_url = not is_path and not url.startswith("memory:")
        meter = None if of is None else of.fetcher.meter
        fetcher = Fetcher(store, policy=fetch_policy(access.options), meter=meter)
        digest = hashlib.sha256(self.key.encode("utf-8", "surrogateescape")).hexdigest()
        group, label = digest[:32], shown if selection is None else self.url
        if of is not None:
            group, label = of.group, of.label
        cache, upstream = access.scratch.disk_cache(), None
        if cache.peers is not None:
            from penstock.cache.peers import PeerUpstream

            upstream = PeerUpstream(fetcher)
        self.remote = Remote(fetcher, cache, group=group, label=label, upstream=upstream)
        if of is not None:
            self.remote.offline = of.offline

    def index_place(self, url: str | None) -> RemoteFolder | None:
        url = url or self.index_url
        if url is None:
            return None
        if self._access.filesystem is None and options_scope(url) != options_scope(self._url):
            raise ConfigError(
                f"index: {redact(url)} is in another store than the data, {redact(self._url)}, and "
                "storage_options apply to that one. Give a folder of the same store or a local one."
            )
        return self._other(url)

    def _other(self, url: str) -> RemoteFolder:
        """Return another folder of the same store, which is closed together with this one."""
        if url not in self._others:
            self._others[url] = RemoteFolder(url, self._access, of=self.remote)
        return self._others[url]

    def beside(self, name: bytes) -> tuple[RemoteFolder, bytes] | None:
        if self.folder is not None:  # a mounted file system
            url: str | None = os.path.dirname(os.fsdecode(self.folder))
        else:
            url = parent_url(self._url, is_path=self._access.filesystem is not None)
        return None if url is None else (self._other(url), name)

    def load(
        self, name: bytes, parse: Callable[[bytes], T], *, size_bytes: int | None, version: str
    ) -> T:
        remote, path = self.remote, os.fsdecode(name)
        for left in reversed(range(_MOST_FETCHES)):
            try:
                return parse(remote.object(path, size_bytes=size_bytes, version=version))
            except (DatasetError, FileNotFoundError):  # damaged, or removed since it was fetched
                if not left:
                    raise
                remote.drop_object(path, size_bytes=size_bytes, version=version)
        raise AssertionError

    def entry(self, name: bytes) -> Entry | None:
        found = self.remote.find(os.fsdecode(name))
        return None if found is None else _entry(found)

    def list_one(self, folder: str) -> tuple[list[Listed], list[str]]:
        objects, folders = self.remote.fetcher.list_folder(folder)
        return [(found.path, _entry(found)) for found in objects], list(folders)

    def list_below(
        self, folder: str, *, directories: dict[bytes, int] | None = None
    ) -> Iterator[Listed]:
        return ((found.path, _entry(found)) for found in self.remote.fetcher.walk(folder))

    def root_kind(self) -> Literal["file"] | None:
        return None if self.remote.fetcher.info("") is None else "file"

    def read(self, wanted: Sequence[tuple[Entry, int, int]]) -> list[Encoded]:
        """Fetch byte ranges of several objects at once, without caching them. wanted: (entry, first
        byte, end). Raises FetchError."""
        from penstock.cache.base import ObjectRange

        data = [np.empty(0, np.uint8)] * len(wanted)
        some = [i for i, (_, start, end) in enumerate(wanted) if start < end]
        facts = ((os.fsdecode(e.name), a, b, e.version or None) for e, a, b in wanted if a < b)
        spans = [ObjectRange(path=p, start=a, end=b, version=v) for p, a, b, v in facts]

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
        key, uri = self.archive_key(entry.identity), self.uri(entry.name)
        segments, size_bytes = (entry.segment,), entry.size_bytes
        return BlobSource(key=key, uri=uri, segments=segments, size_bytes=size_bytes)

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
