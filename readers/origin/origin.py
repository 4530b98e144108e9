"""Open the place where a dataset's files lie: a folder on this machine, or one in a remote store.

`locate` turns a URL into an origin, and is the only code that decides how a dataset is reached.
`Origin` is what both kinds have in common: `LocalFolder` serves this machine's file systems (NFS
too), `RemoteFolder` reads a store through the cache. Names are bytes, below the dataset's root:
they need not be UTF-8, and a name that a remote gave never becomes a local path.
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
from penstock.readers.origin.arrangement import AS_IT_LIES
from penstock.readers.origin.file_status import not_seen, status_of
from penstock.readers.origin.urls import index_url, options_scope, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.cache.base import Answer, ObjectInfo
    from penstock.cache.blobs import Remote, Upstream
    from penstock.cache.fetch import Fetcher
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.file_selection import FileSelection
    from penstock.readers.origin.scratch import Scratch
    from penstock.readers.origin.urls import Url
    from penstock.readers.types import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a listing says of a file. name: below the root; mtime_ns: 0 for remote ones; version:
    etag or the like."""

    name: bytes
    size_bytes: int
    mtime_ns: int
    version: str

    @property
    def identity(self) -> str:
        """Changes with anything that the listing says of the file: 32 hex digits."""
        facts = f"{self.size_bytes}\0{self.mtime_ns}\0{self.version}\0".encode()
        return hashlib.sha256(facts + self.name).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLevel:
    """What lies directly in a folder. entries: of wanted files; missing: names of wanted ones that
    aren't files or lead nowhere; others, folders: names of other files and of folders."""

    entries: list[Entry]
    missing: list[bytes]
    others: list[bytes]
    folders: list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNames:
    """Names of what lies directly in a dataset's folder, or of the files that its URL selects."""

    files: tuple[bytes, ...]
    folders: tuple[bytes, ...]


class Origin(Protocol):
    """Where a dataset lies, and what can be asked of that place.

    url: for people, without credentials; key: names this dataset in a cache.
    selection: the files below the root that the URL names, None for all that is there.
    arrangement: what the user says of how the files make up samples; variant: names it in this
    place, "" where nothing is said.
    """

    url: str
    key: str
    is_local: bool
    selection: FileSelection | None
    arrangement: Arrangement
    variant: str

    def file(self, name: bytes, *, size_bytes: int | None, version: str) -> bytes:
        """Local path of a file below the root; a small remote one is fetched whole. Raises
        FetchError."""

    def drop(self, name: bytes, *, size_bytes: int | None, version: str) -> bool:
        """Forget what was fetched of a small remote file; False where there is none."""

    def find(self, name: bytes) -> tuple[int, str] | None:
        """(bytes, version) of a file below the root, or None if it isn't there."""

    def entry(self, name: bytes) -> Entry | None:
        """A regular file below the root, or None if it isn't there. Raises FetchError."""

    def names(self) -> RootNames:
        """The names of what `top` tells of, looked up once: so that each format can be asked
        whether the dataset is its own. Raises what `top` raises."""

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        """What lies directly below the root, sorted by name; empty where there is no such folder.
        Of a selection its files, in its order, wherever they lie below the root.

        wanted: tells by its name whether a file is looked at. Raises FetchError, DatasetError; of a
        selection DatasetNotFoundError (one isn't there) and ConfigError (one is named twice)."""

    def close(self) -> None:
        """Let connections go. Safe to call twice."""


class LocalFolder:
    """A dataset in a folder of this machine's file systems (NFS too)."""

    is_local = True

    def __init__(
        self,
        root: bytes,
        selection: FileSelection | None = None,
        arrangement: Arrangement = AS_IT_LIES,
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
        """Folders beside the data for their index, best first: beside the name that was given, and
        if that is a link, beside what it leads to."""
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
            if self.selection is not None:
                names, folders = self._selected(), list[bytes]()
            else:
                inside = self._inside(b"")
                names = [name for name, is_folder in inside if not is_folder]
                folders = [name for name, is_folder in inside if is_folder]
            self._names = RootNames(files=tuple(names), folders=tuple(folders))
        return self._names

    def top(self, wanted: Callable[[bytes], bool]) -> TopLevel:
        top = TopLevel(entries=[], missing=[], others=[], folders=[])
        if self.selection is not None:
            inside = [(name, False) for name in self._selected()]
        else:
            inside = self._inside(b"")
        for name, is_folder in inside:
            if is_folder or not wanted(name):
                (top.folders if is_folder else top.others).append(name)
            elif (entry := self.entry(name)) is not None:
                top.entries.append(entry)
            else:
                top.missing.append(name)
        return top

    def _selected(self) -> list[bytes]:
        from penstock.readers.origin.wildcards import (
            Tree,
            selected,  # a folder needs none
        )

        def top(folder: str) -> tuple[list[tuple[str, bool]], list[str]]:
            here = os.path.join(os.fsencode(folder), b"")
            inside = self._inside(here)
            files = [
                (os.fsdecode(here + name), True) for name, is_folder in inside if not is_folder
            ]
            return files, [os.fsdecode(name) for name, is_folder in inside if is_folder]

        def find(name: str) -> bool | None:
            return None if self.find(os.fsencode(name)) is None else True

        def walk(folder: str) -> Iterator[tuple[str, bool]]:
            waiting = [(folder, frozenset[bytes]())]
            while waiting:
                folder, above = waiting.pop()
                real = os.path.realpath(os.path.join(self.root, os.fsencode(folder)))
                if real in above:  # a link back to a folder above it
                    continue
                files, folders = top(folder)
                yield from files
                here = os.path.join(folder, "")
                inside = (n for n in folders if not is_passed_over(os.fsencode(n)))
                waiting += [(f"{here}{name}", above | {real}) for name in inside]

        assert self.selection is not None
        tree = Tree(top=top, walk=walk, find=find, at_once=1)
        return [os.fsencode(name) for name, _ in selected(tree, self.selection, url=self.url)]

    def _inside(self, folder: bytes) -> list[tuple[bytes, bool]]:
        """Names in a folder, sorted, and whether each is a folder or leads to one."""
        try:
            with os.scandir(os.path.join(self.root, folder)) as found:
                return sorted((entry.name, leads_to_folder(entry)) for entry in found)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if error.errno == errno.ELOOP:
                return []
            raise not_seen(os.path.join(self.root, folder), error, is_folder=True) from error

    def entry(self, name: bytes) -> Entry | None:
        found = status_of(os.path.join(self.root, name))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")

    def close(self) -> None:
        """There is nothing to let go."""


def leads_to_folder(entry: os.DirEntry[bytes]) -> bool:
    """Whether it is a folder or leads to one; a link that loops leads to none."""
    try:
        return entry.is_dir()
    except OSError:  # whoever looks at it as a file says why it can't be
        return False


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
        selection: FileSelection | None = None,
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
            objects, folders = fetcher.list_folder()
            entries = sorted(map(_entry, objects), key=lambda entry: entry.name)
            return entries, sorted(map(os.fsencode, folders))
        from penstock.readers.origin.wildcards import (
            Tree,
            selected,  # a folder needs none
        )

        def top(folder: str) -> tuple[list[tuple[str, ObjectInfo]], list[str]]:
            objects, folders = fetcher.list_folder(folder)
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
            from penstock.readers.origin.unreadable import not_a_folder, nothing_there

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


def dataset_key(scope: str, url: str, selection: FileSelection | None, variant: str = "") -> str:
    """The name of a remote dataset in a cache. variant: its arrangement's key."""
    chosen = "" if selection is None else f"\0{selection.key}"
    return f"{scope}\0{url}{chosen}" + (f"\0{variant}" if variant else "")


def locate(
    url: Url,
    *,
    storage_options: Mapping[str, Any] | None,
    scratch: Scratch,
    filesystem: Any | None = None,
    arrangement: Arrangement = AS_IT_LIES,
) -> Origin:
    """The origin behind a URL. filesystem: an fsspec file system, of which url is a path then.
    arrangement: how its files make up samples, where the user says so.

    A URL that may be a file's or a folder's (x.parquet) is looked up in its store. A local path on
    a network file system is read through the cache, if the user has given one.

    Raises ConfigError, MissingDependencyError, FetchError."""
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
    if scratch.is_kept and _is_network(root):
        from fsspec.implementations.local import LocalFileSystem

        mount = os.path.abspath(root)
        mounted = _open_remote(
            os.fsdecode(mount), {}, scratch, selection, LocalFileSystem(), arrangement=arrangement
        )
        mounted.mount = mount
        return mounted
    return LocalFolder(root, selection, arrangement)


def _is_network(root: bytes) -> bool:
    from penstock.cache.base import is_network

    return is_network(os.fsdecode(os.path.abspath(root)))


def _is_file(origin: RemoteFolder) -> bool:
    """Whether the one file that was selected is there. Where nobody can say, it is taken to be:
    what reads it says what is wrong."""
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
    arrangement: Arrangement = AS_IT_LIES,
) -> RemoteFolder:
    """of: the dataset that this folder belongs to, where it is none itself."""
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
    group = _group(key) if of is None else of.group
    cache = scratch.disk_cache()
    remote = Remote(
        fetcher,
        cache,
        group=group,
        label=label if of is None else of.label,
        upstream=None if cache.peers is None else _asking_peers(fetcher, group),
    )

    def folder_at(other: str) -> RemoteFolder:
        if filesystem is None and options_scope(other) != options_scope(url):
            raise ConfigError(
                f"index: {redact(other)} lies in another store than {redact(url)} does, and "
                "storage_options are for that one. Give a folder of the same store or a local one."
            )
        return _open_remote(other, options, scratch, None, filesystem, remote)

    place = index_url(url, selection, is_path=filesystem is not None, variant=variant)
    return RemoteFolder(
        remote,
        shown,
        selection,
        index_url=place,
        folder_at=folder_at,
        # Memory is this process's own, and a file system object may be anything.
        is_known_by_url=filesystem is None and not url.startswith("memory:"),
        arrangement=arrangement,
    )


def _asking_peers(fetcher: Fetcher, group: str) -> Upstream:
    """An upstream that asks other nodes' caches, once it is told of them."""
    from penstock.cache.blobs import StoreUpstream
    from penstock.cache.peers import PeerDirectory, PeerUpstream

    directory = PeerDirectory(group=group)
    return PeerUpstream(StoreUpstream(fetcher), directory, meter=fetcher.meter)


def _group(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
