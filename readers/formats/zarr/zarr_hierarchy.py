"""List the files of a Zarr hierarchy, and read the documents of its groups and arrays.

A hierarchy that has them all in one document (consolidated) takes one request; else its groups are
listed, level by level, and each node's own document is read, on several threads.

Local folders are scanned, remote ones listed by prefix, an array at a time; a group's own listing
never goes down into its arrays, which may have a million chunks.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, ordered
from penstock.readers.files import below, encoded_name, is_passed_over, printable, unsafe_reason
from penstock.readers.formats.local_files import read_file_into
from penstock.readers.formats.zarr.zarr_metadata import (
    MAX_CONSOLIDATED_BYTES,
    MAX_DOCUMENT_BYTES,
    Node,
    read_document,
    v2_consolidated,
    v2_node,
    v3_consolidated,
    v3_node,
)
from penstock.readers.origin import (
    NOT_THERE,
    Entry,
    LocalFolder,
    RemoteFolder,
    leads_to_folder,
    not_seen,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.readers.origin import Origin
    from penstock.readers.types import Encoded

Range = tuple[Entry, int, int]
"""First byte and end in a file."""


class HierarchyFiles(Protocol):
    """The files of a hierarchy. Names are below its root. Raises FetchError, DatasetError."""

    def entry(self, name: bytes) -> Entry | None:
        """A file, or None if it isn't there."""

    def folders(self, name: bytes) -> list[bytes]:
        """Names of the folders directly in one, sorted."""

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """All files below a folder, at most so many folders deep; none if it isn't there."""

    def read(self, ranges: Sequence[Range]) -> list[Encoded]:
        """Parts of files, remote ones all at once."""


def hierarchy_files(origin: Origin) -> HierarchyFiles:
    """The files of a dataset."""
    if isinstance(origin, LocalFolder):
        return LocalHierarchyFiles(origin)
    if isinstance(origin, RemoteFolder):
        return RemoteHierarchyFiles(origin)
    raise TypeError(f"unknown origin {origin!r}")


class LocalHierarchyFiles:
    """A hierarchy in a local folder."""

    def __init__(self, origin: LocalFolder) -> None:
        self._origin = origin

    def entry(self, name: bytes) -> Entry | None:
        """A file, or None if it isn't there."""
        return self._origin.entry(name)

    def folders(self, name: bytes) -> list[bytes]:
        """Names of the folders directly in one, sorted."""
        return sorted(each.name for each in self._scan(name) if leads_to_folder(each))

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """All files below a folder."""
        for found in self._scan(name):
            path = os.path.join(name, found.name)
            if not leads_to_folder(found):
                if (entry := _file(path, found)) is not None:
                    yield entry
            elif depth > 0:
                yield from self.walk(path, depth - 1)

    def read(self, ranges: Sequence[Range]) -> list[Encoded]:
        """Parts of files."""
        found: list[Encoded] = []
        for entry, start, end in ranges:
            data = np.empty(end - start, np.uint8)
            path = below(self._origin.root, entry.name)
            read_file_into(path, data, name=entry.name, start=start, is_rest=False)
            found.append(data)
        return found

    def _scan(self, name: bytes) -> list[os.DirEntry[bytes]]:
        path = os.path.join(self._origin.root, name) if name else self._origin.root
        try:
            with os.scandir(path) as found:
                return [each for each in found if not is_passed_over(each.name)]
        except OSError as error:
            if error.errno in NOT_THERE:
                return []
            raise not_seen(path, error, is_folder=True) from error


def _file(name: bytes, found: os.DirEntry[bytes]) -> Entry | None:
    try:
        facts = found.stat()
    except OSError as error:
        if error.errno in NOT_THERE:
            return None
        raise not_seen(found.path, error) from error
    if not stat.S_ISREG(facts.st_mode):
        return None
    return Entry(name=name, size_bytes=facts.st_size, mtime_ns=facts.st_mtime_ns, version="")


class RemoteHierarchyFiles:
    """A hierarchy in a folder of a remote store."""

    def __init__(self, origin: RemoteFolder) -> None:
        self._origin = origin

    def entry(self, name: bytes) -> Entry | None:
        """An object, or None if it isn't there."""
        return self._origin.entry(name)

    def folders(self, name: bytes) -> list[bytes]:
        """Names of the folders directly in one, sorted."""
        _, folders = self._origin.remote.fetcher.list_folder(os.fsdecode(name))
        return sorted(each for each in map(os.fsencode, folders) if not is_passed_over(each))

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """All objects below a folder, however deep."""
        del depth
        for found in self._origin.remote.fetcher.walk(os.fsdecode(name)):
            path = os.fsencode(found.path)
            if unsafe_reason(path) is None:
                yield Entry(
                    name=path, size_bytes=found.size_bytes, mtime_ns=0, version=found.version
                )

    def read(self, ranges: Sequence[Range]) -> list[Encoded]:
        """Parts of objects, kept nowhere."""
        return self._origin.read_ranges(ranges)


V3, CONSOLIDATED, GROUP, ARRAY, ATTRIBUTES = (
    b"zarr.json",
    b".zmetadata",
    b".zgroup",
    b".zarray",
    b".zattrs",
)
ROOTS = frozenset((V3, CONSOLIDATED, GROUP, ARRAY))
"""What stands in the root of a hierarchy: one of them at least."""

MAX_NODES = 2**16
"""Groups and arrays of one hierarchy."""

WORKERS = 16
"""Threads that ask for documents; they wait, mostly."""

_T = TypeVar("_T")
_U = TypeVar("_U")


def in_parallel(fn: Callable[[_T], _U], items: Iterable[_T]) -> list[_U]:
    """fn of each item, on several threads, in order."""
    wanted = list(items)
    if len(wanted) < 2:
        return list(map(fn, wanted))
    workers = min(WORKERS, len(wanted))
    return list(ordered(fn, wanted, workers=workers, ahead=2 * workers, name="zarr"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """What the documents of a hierarchy say. nodes: by path below the root, "" for the root itself,
    sorted. documents: the files that say it."""

    nodes: dict[str, Node]
    documents: list[Entry]

    @property
    def arrays(self) -> list[Node]:
        """The arrays, sorted by path."""
        return [node for node in self.nodes.values() if node.kind == "array"]

    @property
    def groups(self) -> list[str]:
        """Paths of the groups below the root, sorted."""
        return [path for path, node in self.nodes.items() if node.kind == "group" and path]


class HierarchyReader:
    """Reads the documents of one hierarchy. url: for messages. Raises FetchError, DatasetError."""

    def __init__(self, store: HierarchyFiles, url: str) -> None:
        self._store, self._url = store, url
        self._documents: list[Entry] = []

    def read(self) -> Hierarchy:
        """All nodes. Raises DatasetNotFoundError where there is no hierarchy."""
        root = self._root()
        nodes = self._consolidated(root)
        if nodes is None:
            nodes = {"": root}
            level = [root]
            while level := self._children([node for node in level if node.kind == "group"]):
                nodes |= {node.name: node for node in level}
                if len(nodes) > MAX_NODES:
                    raise self._too_many()
        if len(nodes) > MAX_NODES:
            raise self._too_many()
        return self._hierarchy(nodes)

    def read_some(self, paths: Iterable[str]) -> Hierarchy:
        """The root, and the nodes at some paths, which are there or not; nothing is listed. Raises
        ConfigError for a path that leads out."""
        root = self._root()
        wanted = list(dict.fromkeys(map(self._path, paths)))
        told = self._consolidated(root)
        if told is not None:
            return self._hierarchy({path: told[path] for path in ["", *wanted] if path in told})
        found = in_parallel(self._node, [path for path in wanted if path])
        return self._hierarchy({"": root} | {node.name: node for node in found if node is not None})

    def _hierarchy(self, nodes: dict[str, Node]) -> Hierarchy:
        documents = sorted(self._documents, key=lambda entry: entry.name)
        return Hierarchy(nodes=dict(sorted(nodes.items())), documents=documents)

    def _root(self) -> Node:
        root = self._node("")
        if root is None:
            raise DatasetNotFoundError(
                f"{self._url}: there is no Zarr hierarchy: no zarr.json, .zgroup or .zarray at its "
                "root. Give the folder that holds one of those; a store in one zip file isn't "
                "read: unpack it."
            )
        return root

    def _consolidated(self, root: Node) -> dict[str, Node] | None:
        if root.kind == "array":
            return {"": root}
        if root.version == 3:
            told = v3_consolidated(root)
            return None if told is None else {"": root} | told
        entry = self._store.entry(CONSOLIDATED)
        if entry is None:
            return None
        document = read_document(
            self._bytes(entry, MAX_CONSOLIDATED_BYTES), name=self._name(entry), is_consolidated=True
        )
        return {"": root} | v2_consolidated(document, name=self._name(entry))

    def _children(self, groups: list[Node]) -> list[Node]:
        """The nodes directly in some groups."""

        def paths(group: Node) -> list[str]:
            folders = self._store.folders(_encoded(group.name))
            return [
                f"{group.name}/{os.fsdecode(name)}" if group.name else os.fsdecode(name)
                for name in folders
                if unsafe_reason(name) is None
            ]

        inside = [path for some in in_parallel(paths, groups) for path in some]
        if len(inside) > MAX_NODES:
            raise self._too_many()
        return [node for node in in_parallel(self._node, inside) if node is not None]

    def _node(self, path: str) -> Node | None:
        """The node at a path, or None."""
        v3 = self._entry(path, V3)
        if v3 is not None:
            # A group's may hold those of all below it.
            limit = MAX_DOCUMENT_BYTES if path else MAX_CONSOLIDATED_BYTES
            data = self._bytes(v3, limit)
            return v3_node(path, read_document(data, name=self._name(v3), is_consolidated=not path))
        for file, kind in ((ARRAY, "array"), (GROUP, "group")):
            entry = self._entry(path, file)
            if entry is None:
                continue
            document = read_document(self._bytes(entry), name=self._name(entry))
            told = self._entry(path, ATTRIBUTES)
            attributes = (
                {} if told is None else read_document(self._bytes(told), name=self._name(told))
            )
            return v2_node(path, document, attributes, "array" if kind == "array" else "group")
        return None

    def _entry(self, path: str, file: bytes) -> Entry | None:
        return self._store.entry(os.path.join(_encoded(path), file))

    def _bytes(self, entry: Entry, limit: int = MAX_DOCUMENT_BYTES) -> bytes:
        if entry.size_bytes > limit:
            raise DatasetError(
                f"{self._name(entry)}: has {entry.size_bytes:,} bytes; metadata have {limit:,} at "
                "most. Write them again."
            )
        self._documents.append(entry)
        (data,) = self._store.read([(entry, 0, entry.size_bytes)])
        return data.tobytes()

    def _name(self, entry: Entry) -> str:
        return f"{self._url}/{printable(entry.name)}"

    def _path(self, path: str) -> str:
        plain = path.strip("/")
        name = encoded_name(plain)
        if name is None or unsafe_reason(name) is not None:
            raise ConfigError(
                f"fields: got {path!r}, wanted the path of an array below {self._url}."
            )
        return plain

    def _too_many(self) -> DatasetError:
        return DatasetError(
            f"{self._url}: there are more than {MAX_NODES:,} groups and arrays. Give the path of a "
            "group in it."
        )


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
