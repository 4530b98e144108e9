"""Metadata documents of Zarr hierarchies: JSON within bounds, nodes, consolidated metadata.

Source: the specifications of Zarr version 2 and of Zarr core 3.0; consolidated metadata as
zarr-python writes them. Documents come from anybody, so nothing in them is believed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.cache.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_DOCUMENT_BYTES = 4 * 2**20
"""Of one node's metadata."""

MAX_CONSOLIDATED_BYTES = 24 * 2**20
"""Of the metadata of a whole hierarchy in one document: about 40,000 arrays. Python's values take
up to 24 times that."""

_MAX_DEPTH = 64
_MAX_NAME_LENGTH = 4096
_V2_FILES = {".zarray": "array", ".zgroup": "group"}

Kind = Literal["array", "group"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """An array or a group of a hierarchy, as its documents have it, unchecked but for being JSON.

    name: its path in the hierarchy, "" for the root. version: of Zarr, 2 or 3.
    """

    name: str
    kind: Kind
    version: Literal[2, 3]
    document: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def read_document(data: bytes, *, name: str, is_consolidated: bool = False) -> dict[str, Any]:
    """The JSON object that a metadata file holds. name: of the file, for people.

    Raises DatasetError.
    """
    limit = MAX_CONSOLIDATED_BYTES if is_consolidated else MAX_DOCUMENT_BYTES
    if len(data) > limit:
        raise _damaged(name, f"it has {len(data):,} bytes, and metadata have {limit:,} at most")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, f"it isn't JSON ({str(error)[:100] or 'nested too deep'})") from None
    if not isinstance(found, dict):
        raise _damaged(name, f"it holds a {type(found).__name__}, wanted an object")
    if _is_deep(found):
        raise _damaged(name, f"its values are nested deeper than {_MAX_DEPTH}")
    return found


def v2_node(
    name: str, document: Mapping[str, Any], attributes: Mapping[str, Any], kind: Kind
) -> Node:
    """A node of version 2. document: what .zarray or .zgroup holds; attributes: .zattrs."""
    return Node(name=name, kind=kind, version=2, document=document, attributes=attributes)


def v3_node(name: str, document: Mapping[str, Any]) -> Node:
    """A node of version 3. document: what zarr.json holds. Raises DatasetError."""
    kind, version = document.get("node_type"), document.get("zarr_format")
    if version != 3 or type(version) is not int:
        raise _damaged(name, f"its zarr.json says zarr_format {_short(version)}, wanted 3")
    if kind != "array" and kind != "group":
        raise _damaged(name, f"its zarr.json says node_type {_short(kind)}")
    attributes = document.get("attributes") or {}
    if not isinstance(attributes, dict):
        raise _damaged(name, "its attributes aren't an object")
    return Node(name=name, kind=kind, version=3, document=document, attributes=attributes)


def v2_consolidated(document: Mapping[str, Any], *, name: str) -> dict[str, Node]:
    """The nodes that a .zmetadata lists, the root among them, by name, sorted.

    Raises DatasetError.
    """
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise _damaged(name, 'it has no "metadata"')
    nodes: dict[str, Node] = {}
    for key, value in sorted(metadata.items()):
        place, _, file = key.rpartition("/")
        if file not in _V2_FILES:
            continue
        attributes = metadata.get(f"{place}/.zattrs" if place else ".zattrs", {})
        if not isinstance(value, dict) or not isinstance(attributes, dict):
            raise _damaged(name, f"{_short(key)} isn't an object")
        _check_name(place, within=name)
        kind: Kind = "array" if file == ".zarray" else "group"
        nodes[place] = v2_node(place, value, attributes, kind)
    return nodes


def v3_consolidated(root: Node) -> dict[str, Node] | None:
    """The nodes below a group whose document tells them all, by name, sorted; None where it
    doesn't, and they have to be listed.

    Raises DatasetError.
    """
    told = root.document.get("consolidated_metadata")
    if told is None:
        return None
    if not isinstance(told, dict) or told.get("kind") != "inline":
        return None  # another way of telling, which needn't be understood
    metadata = told.get("metadata")
    if not isinstance(metadata, dict):
        raise _damaged(root.name, 'its consolidated_metadata have no "metadata"')
    nodes = {}
    for name, value in sorted(metadata.items()):
        if not isinstance(value, dict):
            raise _damaged(root.name, f"its consolidated_metadata's {_short(name)} isn't an object")
        _check_name(name, within=root.name)
        nodes[name] = v3_node(name, value)
    return nodes


def _check_name(name: str, *, within: str) -> None:
    parts = name.split("/") if name else []
    if len(name) > _MAX_NAME_LENGTH or any(
        part in ("", ".", "..") or "\0" in part for part in parts
    ):
        raise _damaged(within, f"it names a node {_short(name)}")


def _is_deep(value: object) -> bool:
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        values = iter(value.values())
    elif isinstance(value, list):
        values = iter(value)
    else:
        return
    yield from (child for child in values if isinstance(child, dict | list))


def _short(value: object) -> str:
    return repr(value)[:80]


def _damaged(name: str, why: str) -> DatasetError:
    return DatasetError(
        f"{name or 'The root of the hierarchy'}: these aren't metadata of Zarr: {why}. Write them "
        "again, or leave the node out."
    )
