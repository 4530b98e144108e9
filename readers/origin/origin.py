"""Define the place that holds a dataset's files: a local folder, or a folder of a remote store.

`Origin` is the interface of both kinds: `LocalFolder` serves local file systems (NFS too),
`RemoteFolder` reads a store through the cache. Names are bytes relative to the dataset's root. They
need not be UTF-8, and a name that a remote store returned never becomes a local path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.readers.files import INDEX_SUFFIX, is_passed_over
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT
from penstock.readers.origin.urls import cannot_examine, local_path, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.cache.blobs import Remote
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.file_selection import FileSelection
    from penstock.readers.origin.urls import Url


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
    on how the files make up samples. is_known_by_url: True if a later process finds the same data
    under this URL. variant: identifies the arrangement among those of this place,
    "" for the default.
    """

    url: str
    key: str
    is_local: bool
    is_known_by_url: bool
    selection: FileSelection | None
    arrangement: Arrangement
    variant: str

    @property
    def remote(self) -> Remote | None:
        """Return the reader of a remote dataset, None for a local one."""

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
    is_known_by_url = True
    remote = None

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


def plain_folder(url: Url, arrangement: Arrangement = DEFAULT_ARRANGEMENT) -> LocalFolder | None:
    """Return the origin of a local folder that exists, or None for any other URL, which `locate`
    opens. Raises ReadError."""
    path = None if isinstance(url, list | tuple) else local_path(url)
    status = status_of(path) if path and b"\0" not in path else None
    if path is None or status is None or not stat.S_ISDIR(status.st_mode):
        return None
    return LocalFolder(path, arrangement=arrangement)
