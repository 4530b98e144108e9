"""List the files of a Zarr hierarchy, and read the documents of its groups and arrays.

A hierarchy with consolidated metadata takes one request. Otherwise its groups are listed level by
level, and the document of each node is read, on several threads.

Local folders are scanned; remote ones are listed by prefix, one array at a time. The listing of a
group never descends into its arrays, which may have a million chunks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, ordered
from penstock.readers.files import below, encoded_name, is_passed_over, printable, unsafe_reason
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.formats.zarr.zarr_metadata import (
    MAX_CONSOLIDATED_BYTES,
    MAX_DOCUMENT_BYTES,
    Node,
    read_document,
    v2_consolidated,
    v3_consolidated,
    v3_node,
)
from penstock.readers.origin import Entry, LocalFolder, RemoteFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from penstock.readers.formats.unindexed_files import Part
    from penstock.readers.formats.zarr.zarr_metadata import Kind
    from penstock.readers.origin import Origin


V3, CONSOLIDATED, GROUP, ARRAY, ATTRIBUTES = (
    b"zarr.json",
    b".zmetadata",
    b".zgroup",
    b".zarray",
    b".zattrs",
)
ROOTS = frozenset((V3, CONSOLIDATED, GROUP, ARRAY))
"""The root of a hierarchy has at least one of these files."""

MAX_NODES = 2**16
"""The most groups and arrays of one hierarchy."""

_WORKERS = 16
"""Threads that read documents; most of the time they wait for a store."""

_T = TypeVar("_T")
_U = TypeVar("_U")


def in_parallel(fn: Callable[[_T], _U], items: Iterable[_T]) -> list[_U]:
    """Call fn for each item on several threads, and return the results in order."""
    listed = list(items)
    if len(listed) < 2:
        return list(map(fn, listed))
    return list(ordered(fn, listed, workers=_WORKERS, ahead=2 * _WORKERS, name="zarr"))


class Hierarchy:
    """The files of one hierarchy, in a local folder or a remote store. Names are relative to its
    root. Methods raise FetchError or DatasetError.

    documents: the files with metadata that were read.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin, self._url = origin, origin.url
        self.documents: list[Entry] = []

    # -- files

    def read_parts(self, parts: Sequence[Part]) -> list[bytes]:
        """Read parts of files, remote ones all at once."""
        if isinstance(self._origin, LocalFolder):
            for entry, _, _ in parts:
                below(self._origin.root, entry.name)
        return read_file_parts(self._origin, parts, workers=1)

    def walk(self, name: bytes, depth: int) -> Iterator[Entry]:
        """Yield all files in a folder and in the folders below it, from a local folder down to
        `depth` levels; none if it doesn't exist."""
        folder = os.fsdecode(name)
        if isinstance(self._origin, RemoteFolder):
            for _, entry in self._origin.list_below(folder):
                if entry is not None and unsafe_reason(entry.name) is None:
                    yield entry
            return
        files, folders = self._origin.list_one(folder)
        for path in (os.fsencode(file) for file, _ in files):
            is_shown = not is_passed_over(path.rpartition(b"/")[2])
            if is_shown and (entry := self._origin.entry(path)) is not None:
                yield entry
        for each in map(os.fsencode, folders if depth > 0 else ()):
            if not is_passed_over(each):
                yield from self.walk(os.path.join(name, each), depth - 1)

    # -- nodes

    def nodes(self) -> dict[str, Node]:
        """Read all nodes, by path below the root, sorted; the root's path is "".

        Raises DatasetNotFoundError if there is no hierarchy.
        """
        root = self._root()
        nodes = self._consolidated(root)
        if nodes is None:
            nodes = {"": root}
            level = [root]
            while level := self._children([node for node in level if node.kind == "group"]):
                nodes |= {node.name: node for node in level}
                self._check_count(len(nodes))
        self._check_count(len(nodes))
        return dict(sorted(nodes.items()))

    def nodes_at(self, paths: Iterable[str]) -> dict[str, Node]:
        """Read the root and those nodes at some paths that exist, without listing.

        Raises ConfigError for a path that leads out of the hierarchy.
        """
        root = self._root()
        plain = list(dict.fromkeys(map(self._path, paths)))
        consolidated = self._consolidated(root)
        if consolidated is not None:
            return {path: consolidated[path] for path in ["", *plain] if path in consolidated}
        nodes = in_parallel(self._node, [path for path in plain if path])
        return {"": root} | {node.name: node for node in nodes if node is not None}

    def _root(self) -> Node:
        root = self._node("")
        if root is None:
            raise DatasetNotFoundError(
                f"{self._url}: there is no Zarr hierarchy: no zarr.json, .zgroup or .zarray at its "
                "root. Pass the folder that holds one of those. A hierarchy in one zip file can't "
                "be read: unpack it."
            )
        return root

    def _consolidated(self, root: Node) -> dict[str, Node] | None:
        if root.kind == "array":
            return {"": root}
        nodes = None
        if root.version == 3:
            nodes = v3_consolidated(root)
        elif (entry := self._origin.entry(CONSOLIDATED)) is not None:
            document = self._document(entry, is_consolidated=True)
            nodes = v2_consolidated(document, name=f"{self._url}/{printable(entry.name)}")
        return None if nodes is None else {"": root} | nodes

    def _children(self, groups: list[Node]) -> list[Node]:
        """Read the nodes directly in some groups."""
        children = [path for paths in in_parallel(self._folders, groups) for path in paths]
        self._check_count(len(children))
        return [node for node in in_parallel(self._node, children) if node is not None]

    def _folders(self, group: Node) -> list[str]:
        """Return the paths of the folders directly in a group, sorted."""
        name = encoded_path(group.name)
        _, found = self._origin.list_one(os.fsdecode(name))
        names = [each for each in map(os.fsencode, found) if not is_passed_over(each)]
        above = f"{group.name}/" if group.name else ""
        return [above + os.fsdecode(n) for n in sorted(names) if unsafe_reason(n) is None]

    def _node(self, path: str) -> Node | None:
        """Read the node at a path; None if it doesn't exist."""
        folder, entry = encoded_path(path), self._origin.entry
        v3 = entry(os.path.join(folder, V3))
        if v3 is not None:
            # The root's document may contain those of all nodes.
            return v3_node(path, self._document(v3, is_consolidated=not path))
        kinds: tuple[tuple[bytes, Kind], ...] = ((ARRAY, "array"), (GROUP, "group"))
        for file, kind in kinds:
            if (v2 := entry(os.path.join(folder, file))) is None:
                continue
            document, extra = self._document(v2), entry(os.path.join(folder, ATTRIBUTES))
            attributes = {} if extra is None else self._document(extra)
            return Node(name=path, kind=kind, version=2, document=document, attributes=attributes)
        return None

    def _document(self, entry: Entry, *, is_consolidated: bool = False) -> dict[str, Any]:
        limit = MAX_CONSOLIDATED_BYTES if is_consolidated else MAX_DOCUMENT_BYTES
        self.documents.append(entry)
        (data,) = self.read_parts([(entry, 0, min(entry.size_bytes, limit + 1))])
        name = f"{self._url}/{printable(entry.name)}"
        return read_document(data, name=name, is_consolidated=is_consolidated)

    def _path(self, path: str) -> str:
        plain = path.strip("/")
        name = encoded_name(plain)
        if name is None or unsafe_reason(name) is not None:
            raise ConfigError(
                f"fields: got {path!r}, expected the path of an array below {self._url}."
            )
        return plain

    def _check_count(self, nodes: int) -> None:
        if nodes > MAX_NODES:
            raise DatasetError(
                f"{self._url}: there are more than {MAX_NODES:,} groups and arrays. Pass the path "
                "of a group in it."
            )


def encoded_path(path: str) -> bytes:
    """Return the path of a node as the name of its folder."""
    return path.encode("utf-8", "surrogateescape")
