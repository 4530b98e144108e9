"""Define the place that holds a dataset's files: a local folder, or a folder of a remote store.

`Origin` is the base of both kinds: `LocalFolder` serves local file systems (NFS too),
`RemoteFolder` reads a store through the cache. Names are bytes relative to the dataset's root. They
need not be UTF-8, and a name that a remote store returned never becomes a local path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shlex
import stat
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

from penstock.cache import (
    ConfigError,
    DatasetNotFoundError,
    FetchError,
    ReadError,
    log,
    ordered,
    redact,
)
from penstock.cache.base import Segment, machine_remedy
from penstock.readers.files import INDEX_SUFFIX, is_passed_over, printable
from penstock.readers.origin.arrangement import DEFAULT_ARRANGEMENT, Arrangement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from penstock.cache.blobs import Remote
    from penstock.readers.origin.file_selection import FileSelection


OneUrl = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Url = OneUrl | list[OneUrl] | tuple[OneUrl, ...]
"""A folder, a file, a pattern of files, or a list of files and patterns of one store."""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def check_url(url: Url) -> None:
    """Raise ConfigError for a list that can't be a list of files, and for a program to run."""
    for each in url if isinstance(url, list | tuple) else [url]:
        if isinstance(each, str) and each.startswith("pipe:"):
            raise ConfigError(
                f"url: {each!r} runs a program, and Penstock reads files by their position. Pass "
                "what the program reads, such as s3://bucket/train/{000000..000099}.tar: s3://, "
                "gs://, https:// and other URLs are read directly. For a file of this name, pass "
                "'./pipe:…'."
            )
    if not isinstance(url, list | tuple):
        return
    from penstock.readers.origin.file_selection import MAX_NAMES

    if not 1 <= len(url) <= MAX_NAMES:
        raise ConfigError(f"url: got a list of {len(url):,}, wanted 1 to {MAX_NAMES:,} files.")
    for each in url:
        if not isinstance(each, str | bytes | os.PathLike):
            raise ConfigError(f"url: got {each!r} in a list, wanted paths or URLs of files.")


def local_path(url: OneUrl) -> bytes | None:
    """Return the path of a local URL (no scheme, or file://), None for any other."""
    if not isinstance(url, str):
        return os.fsencode(url)
    scheme = SCHEME.match(url)
    if scheme is None and not ("::" in url and "://" in url):
        return os.fsencode(url)
    if scheme and scheme[1].lower() in ("file", "local") and "::" not in url:
        return os.fsencode(url[scheme.end() :])
    return None


def show(url: Url) -> str:
    """Format a URL for messages, without credentials."""
    if isinstance(url, list | tuple):
        more = f" and {len(url) - 1:,} more" if len(url) > 1 else ""
        return f"{show(url[0])}{more}" if url else "[]"
    return redact(url) if isinstance(url, str) else os.fsdecode(os.fspath(url))


NOT_FOUND = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""The errors that mean that a path doesn't exist. Any other error (EIO, ESTALE, EACCES …) leaves
that unknown; ignoring it would change the dataset or its index."""


def status_of(path: bytes | str) -> os.stat_result | None:
    """Return the status of a path, or None if it doesn't exist. Raises ReadError if that is
    unknown; os.path.isfile and the like would return False."""
    try:
        return os.stat(path)
    except OSError as error:
        if error.errno in NOT_FOUND:
            return None
        raise cannot_examine(os.fsencode(path), error) from error


def cannot_examine(path: bytes, error: OSError, *, is_folder: bool = False) -> ReadError:
    """Return the error for a path that can't be examined, or for a folder that can't be listed."""
    problem = "the folder can't be listed" if is_folder else "can't be examined"
    remedy = machine_remedy(error) or (
        "Check that the mount works, and that this user may read the file and the folders above it."
    )
    return ReadError(
        f"{printable(path)}: {problem} ({error.strerror or error}). {remedy}", errno=error.errno
    )


_AT_ONCE = 16  # concurrent requests to a store

Answer = TypeVar("Answer")


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

    @property
    def segment(self) -> Segment:
        """Describe the file as an object of a blob."""
        path, version = os.fsdecode(self.name), self.version or None
        return Segment(path=path, size_bytes=self.size_bytes, version=version)


Listed = tuple[str, Entry | None]
"""The name of a file, and its entry if the listing contains it."""


class RootNames(NamedTuple):
    """The names of the files and folders at a dataset's root, or of the files its URL selects."""

    files: tuple[bytes, ...]
    folders: tuple[bytes, ...]


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

    @property
    def source(self) -> str:
        """Return the URL as an index records it: that of a list contains a hash of its files."""
        listed = self.selection if self.selection is not None and self.selection.is_list else None
        return self.url if listed is None else f"{self.url} ({listed.key})"

    @property
    def argument(self) -> str:
        """Return the URL as an argument of a command in messages."""
        is_list = self.selection is not None and self.selection.is_list
        return "URL…" if is_list else shlex.quote(self.url)

    def index_folders(self) -> list[bytes]:
        """Return the local folders next to the data that may hold its index, best first."""
        return []

    def index_place(self, url: str | None) -> Origin | None:
        """Return the remote folder at a URL of the same store, or next to the data, that may hold
        the index. Return None for local data, or if there is no such place. Raises ConfigError and
        FetchError."""
        return None

    def beside(self, name: bytes) -> tuple[Origin, bytes] | None:
        """Return the origin that reads a file next to the root, and the file's name there; None if
        nothing lies next to the root. name: below the folder that contains the root."""
        return None

    def upload(self, local: bytes, name: bytes) -> None:
        """Upload a local file to a name below a remote root. Raises FetchError."""
        raise TypeError(f"{self.url} is local")

    @abstractmethod
    def load(
        self, name: bytes, parse: Callable[[bytes], Answer], *, size_bytes: int | None, version: str
    ) -> Answer:
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
            self._names = RootNames(tuple(name for name, _ in files), tuple(folders))
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
            found = self._selected(self.selection)
            return [(os.fsencode(name), entry) for name, entry in found], []
        files, folders = self.list_one("")
        named = [(os.fsencode(name), entry) for name, entry in files if name]
        return sorted(named, key=lambda each: each[0]), sorted(map(os.fsencode, folders))

    def _selected(self, selection: FileSelection) -> list[Listed]:
        """List the files that a selection names, in its order. The files that match one pattern are
        sorted by name."""
        from penstock.readers.origin.file_selection import WILDCARD, has_wildcard

        is_listed = selection.is_listed
        # A name may contain brackets too.
        named = [part for part in selection.parts if not (is_listed and WILDCARD.search(part))]
        entries = self._each(lambda name: self.entry(os.fsencode(name)), named)
        existing = dict(zip(named, entries, strict=True))
        plain = [part for part in named if not (is_listed and has_wildcard(part))]
        missing = [part for part in plain if existing[part] is None]
        if missing:
            few = ", ".join(printable(os.fsencode(name)) for name in missing[:3])
            if self.remote is not None and self.remote.offline.is_set():
                raise FetchError(
                    f"{self.url}: the remote can't be reached, and {len(missing):,} of "
                    f"{len(plain):,} files didn't exist when it last answered ({few}"
                    f"{', …' if len(missing) > 3 else ''}). Start again once it answers.",
                    uri=self.url,
                )
            raise DatasetNotFoundError(
                f"{self.url}: {len(missing):,} of {len(plain):,} files don't exist "
                f"({few}{', …' if len(missing) > 3 else ''}). Fetch them, or list only files that "
                "exist. To join datasets that are folders, use concat([…])."
            )
        found: list[Listed] = []
        for part in selection.parts:
            file = existing.get(part)
            fitting = self._matching(part) if file is None else [(part, file)]
            if not fitting:
                raise DatasetNotFoundError(
                    f"{self.url}: no file matches {part!r}. Check the pattern: * stands for a part "
                    "of a name within one folder, ** for any number of folders. Folders don't "
                    "match."
                )
            found += fitting
        name, count = Counter(name for name, _ in found).most_common(1)[0]
        if count > 1:
            raise ConfigError(f"url: {self.url} names {name!r} twice. Give each file once.")
        return found

    def _matching(self, pattern: str) -> list[Listed]:
        """List the files that match a pattern, sorted by name."""
        from penstock.readers.origin.file_selection import EVERYTHING, MAX_NAMES, is_magic, is_match

        parts, folders = pattern.split("/"), [""]
        is_deep = EVERYTHING in parts
        for part in parts[: parts.index(EVERYTHING) if is_deep else -1]:
            if is_magic(part):
                names = zip(folders, self._each(self.list_one, folders), strict=True)
                found = [(_joined(above, name), name) for above, (_, n) in names for name in n]
                folders = [folder for folder, name in found if is_match(name, [part])]
            else:
                folders = [_joined(above, part) for above in folders]
        if is_deep:
            listed = (file for folder in folders for file in self.list_below(folder))
        else:
            listed = (file for files, _ in self._each(self.list_one, folders) for file in files)
        matching = [each for each in listed if is_match(each[0], parts)]
        if len(matching) > MAX_NAMES:
            raise ConfigError(
                f"url: {pattern!r} matches {len(matching):,} files, wanted {MAX_NAMES:,} at most."
            )
        return sorted(matching, key=lambda each: os.fsencode(each[0]))

    def _each(self, ask: Callable[[str], Answer], names: Sequence[str]) -> list[Answer]:
        """Return the answer about each name. A store answers several at the same time."""
        if self.is_local or len(names) < 2:
            return [ask(name) for name in names]
        return list(ordered(ask, names, workers=_AT_ONCE, ahead=2 * _AT_ONCE, name="list"))

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

    def beside(self, name: bytes) -> tuple[Origin, bytes]:
        return LocalFolder(b"/"), os.path.join(os.path.dirname(self.root), name)

    def load(
        self, name: bytes, parse: Callable[[bytes], Answer], *, size_bytes: int | None, version: str
    ) -> Answer:
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


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


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
    why = "this folder belongs to another user than the data, so it isn't used for the index"
    log.warning("%s: %s", printable(place), why)
    return False
