"""Read the nodes of a Zarr hierarchy, and choose the arrays that are fields and their samples.

A hierarchy with consolidated metadata takes one request. Otherwise its groups are listed level by
level, and the document of each node is read, on several threads. Local folders are scanned; remote
ones are listed by prefix, one array at a time. The listing of a group never descends into its
arrays, which may have a million chunks.

Samples run along the first axis, and all fields have the same number of them. If dimensions have
names (xarray), the largest array determines along which one samples run; other arrays are fields if
they follow it. An array of fewer axes repeats its value for each window along the others (the time
of an image's tiles).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, ordered
from penstock.readers.files import below, is_passed_over, printable, unsafe_reason
from penstock.readers.formats.array_fields import array_schema, chosen_arrays, matched_windows
from penstock.readers.formats.dataset_arguments import Sampling
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.formats.zarr.zarr_metadata import (
    MAX_CONSOLIDATED_BYTES,
    ArrayMetadata,
    Node,
    consolidated_nodes,
    is_path,
    parse_array,
    read_document,
    read_node,
)
from penstock.readers.origin import Entry, LocalFolder, Origin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.array_windows import ArrayWindows
    from penstock.readers.formats.unindexed_files import Part

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
            if not is_path(path.strip("/")):
                raise ConfigError(f"fields: got {path!r}, wanted an array's path in {self._url}.")
        root, plain = self._root(), dict.fromkeys(path.strip("/") for path in paths)
        consolidated = self._consolidated(root)
        if consolidated is not None:
            return {path: consolidated[path] for path in ["", *plain] if path in consolidated}
        nodes = in_parallel(self._node, [path for path in plain if path])
        return {"": root} | {node.name: node for node in nodes if node is not None}

    def _root(self) -> Node:
        if (root := self._node("")) is None:
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
            document = root.document.get("consolidated_metadata")
            if not isinstance(document, dict) or document.get("kind") != "inline":
                return None  # missing, or of a kind that readers may ignore
        elif (document := self._document("", CONSOLIDATED)) is None:
            return None
        return {"": root} | consolidated_nodes(document, version=root.version, name=self._url)

    def _folders(self, group: Node) -> list[str]:
        """Return the paths of the folders directly in a group, sorted."""
        _, found = self._origin.list_one(group.name)
        names = sorted(each for each in map(os.fsencode, found) if not is_passed_over(each))
        above = f"{group.name}/" if group.name else ""
        return [above + os.fsdecode(name) for name in names if unsafe_reason(name) is None]

    def _node(self, path: str) -> Node | None:
        """Read the node at a path; None if it doesn't exist."""
        return read_node(path, lambda file: self._document(path, file))

    def _document(self, path: str, file: str) -> dict[str, Any] | None:
        """Read a document of a node; None if there is none."""
        entry = self._origin.entry(os.path.join(os.fsencode(path), file.encode()))
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


ROOT_FIELD = "array"
"""The field's name of an array that is the root of the hierarchy."""

IMAGE_FIELD = "image"
"""The field's name of the finest level of an OME-Zarr image."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowedArray:
    """An array, the name of its field, and the windows that are its samples."""

    name: str
    array: ArrayMetadata
    windows: ArrayWindows


def choose_fields(
    origin: Origin, hierarchy: Hierarchy
) -> tuple[Schema, list[WindowedArray], dict[str, str]]:
    """Choose the fields of a dataset, all with the same number of samples: those that the user
    names, else the finest level of an OME-Zarr image, else all arrays that can be tensors and
    follow the largest one.

    Returns the schema, the fields, and the reasons against other arrays, by field name. Raises
    ConfigError, DatasetError, DatasetNotFoundError or FetchError.
    """
    url, sampling = origin.url, Sampling.of(origin.arrangement)
    places = dict(origin.arrangement.places)
    nodes = hierarchy.nodes_at(places.values()) if places else hierarchy.nodes()
    if not places and (level := finest_level(nodes[""])) is not None:
        places = {IMAGE_FIELD: level}
    for name, place in places.items():
        path = places[name] = place.strip("/")
        node = nodes.get(path)
        if node is not None and (level := finest_level(node)) is not None:
            path = places[name] = f"{path}/{level}" if path else level
            nodes |= hierarchy.nodes_at([path])
    if not all(path in nodes and nodes[path].kind == "array" for path in places.values()):
        nodes = hierarchy.nodes()  # for the message
    found = {node.name: parse_array(node) for node in nodes.values() if node.kind == "array"}
    arrays, refused = chosen_arrays(
        found,
        places,
        _field_names,
        where=url,
        hint="Pass the path of a hierarchy, or fields=, with numbers that have at least one axis, "
        "of which only the first may have length 0.",
    )
    shapes = {name: array.shape for name, array in arrays.items()}
    types = origin.arrangement.schema
    sampling.check_arrays(shapes, types, url=url)
    sizes = {name: math.prod(each.shape) * each.dtype.itemsize for name, each in arrays.items()}
    lead = max(arrays, key=lambda name: (_is_variable(arrays[name]), sizes[name]))
    along = (arrays[lead].dimension_names or (None,))[0]
    for name, array in list(arrays.items()):
        first = (array.dimension_names or (None,))[0]
        if not places and along is not None and first not in (along, None):
            refused[array.name] = f"its first axis is {first!r}, and samples run along {along!r}"
            del shapes[name]
    windows = matched_windows(
        shapes,
        sampling,
        where=url,
        hint=f'fields={{"{lead}": "{arrays[lead].name}"}}, or pass the path of a group',
        lead=lead,
        optional=[] if places else [name for name in arrays if not _is_variable(arrays[name])],
    )
    for name in (name for name in shapes if name not in windows):
        reason = "it has other windows than the array whose coordinate it is"
        refused[arrays[name].name or name] = reason
    stored = {name: (arrays[name].dtype, own.sample_shape) for name, own in windows.items()}
    samples, what = windows[lead].samples, f"{url}: {lead!r} of shape {shapes[lead]}"
    schema = array_schema(stored, types, samples, url=url, what=what)
    pairs = windows.items()
    fields = [WindowedArray(name=name, array=arrays[name], windows=own) for name, own in pairs]
    left_out = {path.replace("/", ".") or ROOT_FIELD: why for path, why in refused.items()}
    return schema, fields, left_out


def _field_names(path: str) -> tuple[str, str]:
    """Return the names that a field may have: with dots, or in brackets if there are an array "a.b"
    and an array "b" in a group "a"."""
    group, *parts = path.split("/")
    return path.replace("/", ".") or ROOT_FIELD, "".join([group, *(f"[{p!r}]" for p in parts)])


def finest_level(node: Node) -> str | None:
    """Return the path, below its group, of the finest level of an OME-Zarr image; None if the node
    isn't one."""
    ome = node.attributes.get("ome")
    attributes: Any = ome if isinstance(ome, dict) else node.attributes
    try:
        path = attributes["multiscales"][0]["datasets"][0]["path"]
    except (KeyError, IndexError, TypeError):
        return None
    return path.strip("/") if node.kind == "group" and isinstance(path, str) else None


def _is_variable(array: ArrayMetadata) -> bool:
    """Return True unless an array is the coordinate of the dimension that has its name."""
    names = array.dimension_names
    return names is None or names != (array.name.rpartition("/")[2],)
