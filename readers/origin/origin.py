"""Define the place that holds a dataset's files: a local folder, or a folder of a remote store.

`Origin` is the base of both kinds: `LocalFolder` serves local file systems (NFS too),
`RemoteFolder` reads a store through the cache. Names are bytes relative to the dataset's root. They
need not be UTF-8, and a name that a remote store returned never becomes a local path.
"""

from __future__ import annotations

import logging
import os
import stat
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from penstock.cache import DatasetNotFoundError
from penstock.readers.files import INDEX_SUFFIX, is_passed_over, printable
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT
from penstock.readers.origin.listed_files import Entry, RootNames
from penstock.readers.origin.urls import NOT_FOUND, cannot_examine, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from penstock.cache.blobs import Remote
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.file_selection import FileSelection, Listed

T = TypeVar("T")

_log = logging.getLogger("penstock")


class Origin(ABC):
    """The place that holds a dataset's files.

    url: for messages, without credentials. key: identifies this dataset in a cache. selection: the
    files below the root that the URL names; None means all files. arrangement: the user's arguments
    on how the files make up samples. variant: identifies the arrangement among those of this place,
    "" for the default. is_known_by_url: True if a later process finds the same data under this URL.
    folder: the path of the root, if it is a folder of a local or mounted file system. remote: the
    reader of a remote dataset, None for a local one.
    """

    is_local: ClassVar[bool]
    is_known_by_url = True
    folder: bytes | None = None
    remote: Remote | None = None

    def __init__(
        self,
        url: str,
        key: str,
        *,
        selection: FileSelection | None,
        arrangement: Arrangement,
        variant: str,
    ) -> None:
        """url, key: of the root."""
        self.url = url
        if selection is not None:
            self.url, key = f"{url.rstrip('/')}/{selection.pattern}", f"{key}\0{selection.key}"
        self.key = f"{key}\0{variant}" if variant else key
        self.selection, self.arrangement, self.variant = selection, arrangement, variant
        self._names: RootNames | None = None
        self._kept: tuple[list[tuple[bytes, Entry | None]], list[bytes]] | None = None

    def index_folders(self) -> list[bytes]:
        """Return the local folders next to the data that may hold its index, best first."""
        return []

    def index_place(self, url: str | None) -> Origin | None:
        """Return the remote folder at a URL of the same store, or next to the data, that may hold
        the index. Return None for local data, or if there is no such place. Raises ConfigError and
        FetchError."""
        del url
        return None

    def upload(self, local: bytes, name: bytes) -> None:
        """Upload a local file to a name below a remote root. Raises FetchError."""
        del local, name
        raise TypeError(f"{self.url} is local")

    @abstractmethod
    def load(
        self, name: bytes, parse: Callable[[bytes], T], *, size_bytes: int | None, version: str
    ) -> T:
        """Parse a small file below the root. A remote one is fetched as a whole, and again if its
        copy in the cache is damaged. parse: gets the path of the local file. Raises FetchError, and
        the errors of parse."""

    @abstractmethod
    def entry(self, name: bytes) -> Entry | None:
        """Return the entry of a regular file below the root, or None if it doesn't exist. Raises
        FetchError."""

    def names(self) -> RootNames:
        """Return the names of the files directly below the root, sorted, and of its folders. Both
        are empty if the root doesn't exist. With a selection, return the names of its files in its
        order, wherever they lie below the root.

        They are listed once, so that each format can check cheaply whether it recognises the
        dataset. Raises FetchError and DatasetError; with a selection, DatasetNotFoundError if a
        file doesn't exist and ConfigError if one is named twice.
        """
        if self._names is None:
            files, folders = listed = self._list()
            self._names = RootNames(files=tuple(n for n, _ in files), folders=tuple(folders))
            # Stores list a page at a time, so the call of `entries` that follows uses this listing.
            self._kept = None if self.is_local else listed
        return self._names

    def entries(self, wanted: Callable[[bytes], bool]) -> list[Entry]:
        """Return the entries of the wanted files among those of `names`, listed again and in their
        order.

        wanted: returns True for the names of the files to examine. Raises the errors of `names`,
        and DatasetNotFoundError for a broken link and for what isn't a regular file.
        """
        listed, self._kept = self._kept, None
        found = list[Entry]()
        for name, known in (listed or self._list())[0]:
            if wanted(name):
                entry = known or self.entry(name)
                if entry is None:
                    raise DatasetNotFoundError(
                        f"{self.url}: there is no file {printable(name)}. It is listed, but it is "
                        "a broken link or isn't a regular file. Restore or remove it."
                    )
                found.append(entry)
        return found

    def _list(self) -> tuple[list[tuple[bytes, Entry | None]], list[bytes]]:
        """List the files of the root, sorted, or of the selection, in its order, and the folders at
        the root. An entry is None if the listing doesn't contain it."""
        if self.selection is not None:
            from penstock.readers.origin.file_selection import select_files

            found = select_files(self, self.selection)
            return [(os.fsencode(name), entry) for name, entry in found], []
        files, folders = self.list_one("")
        named = [(os.fsencode(name), entry) for name, entry in files if name]
        return sorted(named, key=lambda each: each[0]), sorted(map(os.fsencode, folders))

    @abstractmethod
    def list_one(self, folder: str) -> tuple[list[Listed], list[str]]:
        """List a folder below the root: its files, and the names of its subfolders. Both are empty
        if the folder doesn't exist. Raises ReadError and FetchError."""

    @abstractmethod
    def list_below(
        self, folder: str, *, directories: dict[bytes, int] | None = None
    ) -> Iterable[Listed]:
        """List all files below a folder, and links that lead back to a folder above them.

        directories: gets the modification time in ns of each local folder that is listed, by name.
        Raises the same errors as `list_one`.
        """

    @abstractmethod
    def root_kind(self) -> Literal["file", "folder"] | None:
        """Return what the root is, None if it doesn't exist, or if only its files could show that
        it does. Raises ReadError and FetchError."""

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self._kept = None


class LocalFolder(Origin):
    """A dataset in a folder of a local file system (NFS too)."""

    is_local = True

    def __init__(
        self,
        root: bytes,
        selection: FileSelection | None = None,
        arrangement: Arrangement = DEFAULT_ARRANGEMENT,
    ) -> None:
        self.root = self.folder = os.path.abspath(root)
        url, key = os.fsdecode(self.root), arrangement.key
        super().__init__(url, url, selection=selection, arrangement=arrangement, variant=key)

    def index_folders(self) -> list[bytes]:
        """Return the trusted folders for the index: next to the given path, and if that is a link,
        next to its target."""
        roots = dict.fromkeys((self.root, os.path.realpath(self.root)))
        names = [root for root in roots if os.path.basename(root)]
        if self.selection is not None:
            name = self.selection.index_name.removesuffix(INDEX_SUFFIX)
            names = [os.path.join(root, name) for root in roots]
        ending = os.fsencode(f"-{self.variant}" if self.variant else "") + INDEX_SUFFIX
        return [name + ending for name in names if is_trusted(name + ending, self.root)]

    def load(
        self, name: bytes, parse: Callable[[bytes], T], *, size_bytes: int | None, version: str
    ) -> T:
        del size_bytes, version
        return parse(os.path.join(self.root, name))

    def entry(self, name: bytes) -> Entry | None:
        found = status_of(os.path.join(self.root, name))
        if found is None or not stat.S_ISREG(found.st_mode):
            return None
        return Entry(name=name, size_bytes=found.st_size, mtime_ns=found.st_mtime_ns, version="")

    def list_one(self, folder: str) -> tuple[list[Listed], list[str]]:
        for name, _, files, folders in self._walk(os.fsencode(folder)):
            listed = [(os.fsdecode(os.path.join(name, file)), None) for file in files]
            return list(listed), list(map(os.fsdecode, folders))
        return [], []

    def list_below(
        self, folder: str, *, directories: dict[bytes, int] | None = None
    ) -> Iterator[Listed]:
        for name, mtime_ns, files, _ in self._walk(os.fsencode(folder), skip=is_passed_over):
            if mtime_ns is None:
                yield os.fsdecode(name), None
            elif directories is not None:
                directories[name] = mtime_ns
            for file in files:
                yield os.fsdecode(os.path.join(name, file)), None

    def root_kind(self) -> Literal["file", "folder"] | None:
        found = status_of(self.root)
        return None if found is None else "folder" if stat.S_ISDIR(found.st_mode) else "file"

    def changed_directories(self, directories: Mapping[bytes, int]) -> list[bytes]:
        """Return the folders whose modification time isn't the recorded one: files were added,
        removed or renamed there."""
        changed = []
        for name, mtime_ns in directories.items():
            try:
                is_same = os.stat(os.path.join(self.root, name)).st_mtime_ns == mtime_ns
            except OSError:  # removed, or no longer accessible
                is_same = False
            if not is_same:
                changed.append(name)
        return changed

    def _walk(
        self, start: bytes, *, skip: Callable[[bytes], bool] = lambda _: False
    ) -> Iterator[tuple[bytes, int | None, list[bytes], list[bytes]]]:
        """Yield a folder below the root, then the folders in it, following links: its name, its
        modification time in ns, and the names of the files and of the folders in it. The time is
        None, and no name is listed, for a link that leads back to a folder above it. Yield nothing
        if it doesn't exist.

        skip: returns True for the names of files and folders to leave out. Raises ReadError.
        """
        # Each folder is listed with the identities of those above it, so that links can't loop.
        waiting: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(start, frozenset())]
        while waiting:
            folder, above = waiting.pop()
            path = os.path.join(self.root, folder) if folder else self.root
            try:
                found = os.stat(path)
                identity = (found.st_dev, found.st_ino)
                if identity in above:
                    yield folder, None, [], []
                    continue
                # The time is from before the scan, so that a file added during the scan changes it.
                with os.scandir(path) as scanned:
                    inside = [each for each in scanned if not skip(each.name)]
            except OSError as error:
                if not above and error.errno in NOT_FOUND:
                    return
                raise cannot_examine(path, error, is_folder=True) from error
            files, folders = list[bytes](), list[bytes]()
            for each in inside:
                (folders if _leads_to_folder(each) else files).append(each.name)
            yield folder, found.st_mtime_ns, files, folders
            waiting += [(os.path.join(folder, name), above | {identity}) for name in folders]


def _leads_to_folder(entry: os.DirEntry[bytes]) -> bool:
    """Return True for a folder or a link to one, False for a link that loops."""
    try:
        return entry.is_dir()
    except OSError:  # opening it as a file raises the precise error
        return False


def is_trusted(place: bytes, root: bytes) -> bool:
    """Return True if an index in a place belongs to this user, the data's owner or root. In a
    folder that all users may write, such as /tmp, any user could have put one next to the data."""
    try:
        owners = {os.lstat(place).st_uid, os.stat(place).st_uid}
        trusted = {os.geteuid(), 0, os.stat(root).st_uid}
    except OSError:
        return True  # it doesn't exist
    if owners <= trusted:
        return True
    _log.warning(
        "%s: this folder belongs to another user than the data, so it isn't used for the index",
        printable(place),
    )
    return False
