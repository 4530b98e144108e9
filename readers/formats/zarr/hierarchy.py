"""The groups and arrays of a hierarchy: what its documents say, read on several threads.

A hierarchy that has them all in one document (consolidated) takes one request; else its groups are
listed, level by level, and each node's own document is read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from penstock.cache.errors import ConfigError, DatasetError, DatasetNotFoundError
from penstock.cache.threads import ordered
from penstock.readers.files.names import encoded_name, printable, unsafe_reason
from penstock.readers.formats.zarr.documents import (
    MAX_CONSOLIDATED_BYTES,
    MAX_DOCUMENT_BYTES,
    Node,
    read_document,
    v2_consolidated,
    v2_node,
    v3_consolidated,
    v3_node,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.readers.formats.zarr.store import Store
    from penstock.readers.origin.origin import Entry

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

    def __init__(self, store: Store, url: str) -> None:
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
