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
    Node,
    read_document,
    read_node,
    v2_consolidated,
    v3_consolidated,
)
from penstock.readers.origin import LocalFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from penstock.readers.formats.unindexed_files import Part
    from penstock.readers.origin import Entry, Origin

CONSOLIDATED = ".zmetadata"
ROOTS = frozenset((b"zarr.json", b".zmetadata", b".zgroup", b".zarray"))
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

    def walk(self, folder: bytes) -> Iterator[Entry]:
        """Yield all files below a folder; none if it doesn't exist."""
        for path, entry in self._origin.list_below(os.fsdecode(folder)):
            if entry is None:  # of a local folder
                entry = self._origin.entry(os.fsencode(path))
            elif unsafe_reason(entry.name) is not None:
                continue
            if entry is not None:
                yield entry

    # -- nodes

    def nodes(self) -> dict[str, Node]:
        """Read all nodes, by path below the root, sorted; the root's path is "".

        Raises DatasetNotFoundError if there is no hierarchy.
        """
        root = self._root()
        nodes = self._consolidated(root)
        if nodes is None:
            nodes, level = {"": root}, [root]
            while level:
                groups = [node for node in level if node.kind == "group"]
                paths = [path for found in in_parallel(self._folders, groups) for path in found]
                self._check_count(len(nodes) + len(paths))
                level = [node for node in in_parallel(self._node, paths) if node is not None]
                nodes |= {node.name: node for node in level}
        self._check_count(len(nodes))
        return dict(sorted(nodes.items()))

    def nodes_at(self, paths: Collection[str]) -> dict[str, Node]:
        """Read the root and those nodes at some paths that exist, without listing.

        Raises ConfigError for a path that leads out of the hierarchy.
        """
        for path in paths:
            name = encoded_name(path.strip("/"))
            if name is None or unsafe_reason(name) is not None:
                raise ConfigError(
                    f"fields: got {path!r}, expected the path of an array below {self._url}."
                )
        root, plain = self._root(), dict.fromkeys(path.strip("/") for path in paths)
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
        """Return all nodes if the root alone shows them."""
        if root.kind == "array":
            return {"": root}
        if root.version == 3:
            nodes = v3_consolidated(root)
        else:
            document = self._document("", CONSOLIDATED)
            name = f"{self._url}/{CONSOLIDATED}"
            nodes = None if document is None else v2_consolidated(document, name=name)
        return None if nodes is None else {"": root} | nodes

    def _folders(self, group: Node) -> list[str]:
        """Return the paths of the folders directly in a group, sorted."""
        _, found = self._origin.list_one(os.fsdecode(encoded_path(group.name)))
        names = sorted(each for each in map(os.fsencode, found) if not is_passed_over(each))
        above = f"{group.name}/" if group.name else ""
        return [above + os.fsdecode(name) for name in names if unsafe_reason(name) is None]

    def _node(self, path: str) -> Node | None:
        """Read the node at a path; None if it doesn't exist."""
        return read_node(path, lambda file: self._document(path, file))

    def _document(self, path: str, file: str) -> dict[str, Any] | None:
        """Read a document of a node; None if there is none."""
        entry = self._origin.entry(os.path.join(encoded_path(path), file.encode()))
        if entry is None:
            return None
        self.documents.append(entry)
        (data,) = self.read_parts([(entry, 0, min(entry.size_bytes, MAX_CONSOLIDATED_BYTES + 1))])
        # The root's document may contain those of all nodes.
        is_consolidated = not path and file in (CONSOLIDATED, "zarr.json")
        name = f"{self._url}/{printable(entry.name)}"
        return read_document(data, name=name, is_consolidated=is_consolidated)

    def _check_count(self, nodes: int) -> None:
        if nodes > MAX_NODES:
            raise DatasetError(
                f"{self._url}: there are more than {MAX_NODES:,} groups and arrays. Pass the path "
                "of a group in it."
            )


def encoded_path(path: str) -> bytes:
    """Return the path of a node as the name of its folder."""
    return path.encode("utf-8", "surrogateescape")
