"""Choose the fields of a Zarr hierarchy, and which parts of their arrays are samples.

Samples run along the first axis, and all fields have the same number of them. If dimensions have
names (xarray), the largest array determines along which one samples run; other arrays are fields if
they follow it. An array of fewer axes repeats its value for each window along the others (the time
of an image's tiles).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import Schema, is_field_name
from penstock.readers.formats.array_fields import check_samples, field_type, matched_windows
from penstock.readers.formats.dataset_arguments import Sampling, given_types
from penstock.readers.formats.zarr.zarr_metadata import parse_array
from penstock.readers.types import Rejection

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats.array_windows import ArrayWindows
    from penstock.readers.formats.zarr.zarr_hierarchy import Hierarchy
    from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, Node
    from penstock.readers.origin import Origin

ROOT_FIELD = "array"
"""The field's name of an array that is the root of the hierarchy."""

IMAGE_FIELD = "image"
"""The field's name of the finest level of an OME-Zarr image."""

_MAX_NAMES = 8

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowedArray:
    """An array, the name of its field, and the windows that are its samples."""

    name: str
    array: ArrayMetadata
    windows: ArrayWindows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenFields:
    """The fields of a dataset, at least one, all with the same number of samples.

    left_out: other arrays, by field name, and the reason.
    """

    schema: Schema
    fields: list[WindowedArray]
    left_out: dict[str, str]


def choose_fields(origin: Origin, hierarchy: Hierarchy) -> ChosenFields:
    """Choose the fields of a dataset: those that the user names, else the finest level of an
    OME-Zarr image, else all arrays that can be tensors and follow the largest one.

    Raises ConfigError, DatasetError, DatasetNotFoundError or FetchError.
    """
    url, sampling = origin.url, Sampling.of(origin.arrangement)
    places, refused = dict(origin.arrangement.places), dict[str, str]()
    nodes = hierarchy.nodes_at(places.values()) if places else hierarchy.nodes()
    if not places and (level := finest_level(nodes[""])) is not None:
        places = {IMAGE_FIELD: level}
    if places:
        arrays = {name: _named(name, path, hierarchy, nodes, url) for name, path in places.items()}
    else:
        arrays = _candidates(nodes, refused)
    if not arrays:
        reasons = "; ".join(f"{name or ROOT_FIELD}: {why}" for name, why in refused.items())
        raise DatasetNotFoundError(
            f"{url}: there are no arrays that can be fields ({reasons[:500] or 'only groups'}). "
            "Pass the path of a hierarchy that has some: numbers with at least one axis, of which "
            "only the first may have length 0."
        )
    shapes = {name: array.shape for name, array in arrays.items()}
    types = given_types(origin.arrangement)
    sampling.check_arrays(shapes, types, url=url)
    lead = max(arrays, key=lambda name: (_is_variable(arrays[name]), _bytes(arrays[name])))
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
    for name, reason in refused.items():
        _log.info("%s: %s isn't a field: %s", url, name, reason)
    check_samples(windows[lead].samples, what=f"{url}: {lead!r} of shape {shapes[lead]}")
    if not windows[lead].samples:
        raise DatasetNotFoundError(f"{url}: {lead!r} has no samples: shape {shapes[lead]}.")
    schema = {
        name: field_type(types.get(name), arrays[name].dtype, own.sample_shape, name=name, url=url)
        for name, own in windows.items()
    }
    return ChosenFields(
        schema=Schema(schema),
        fields=[
            WindowedArray(name=name, array=arrays[name], windows=own)
            for name, own in windows.items()
        ],
        left_out={path.replace("/", ".") or ROOT_FIELD: why for path, why in refused.items()},
    )


def _named(
    name: str, path: str, hierarchy: Hierarchy, nodes: Mapping[str, Node], url: str
) -> ArrayMetadata:
    """Return the array at a path that the user names; at that of an image, its finest level."""
    plain = path.strip("/")
    node = nodes.get(plain)
    if node is not None and (level := finest_level(node)) is not None:
        plain = f"{plain}/{level}" if plain else level
        node = hierarchy.nodes_at([plain]).get(plain)
    if node is None or node.kind != "array":
        names = [node.name for node in hierarchy.nodes().values() if node.kind == "array"]
        raise ConfigError(
            f'fields: got {{"{name}": {path!r}}}, and {url} has no such array. '
            f"Its arrays: {_some(names)}."
        )
    found = _parsed(node)
    if isinstance(found, Rejection):
        raise DatasetError(
            f"{path or 'The array'}: {found.reason}. Choose other fields (fields=), or write it as "
            "numbers with at least one axis."
        )
    return found


def _candidates(nodes: Mapping[str, Node], refused: dict[str, str]) -> dict[str, ArrayMetadata]:
    """Return every array that can be a field, by field; add the reasons against others."""
    arrays: dict[str, ArrayMetadata] = {}
    for node in (each for each in nodes.values() if each.kind == "array"):
        name = node.name.replace("/", ".") or ROOT_FIELD
        if name in arrays:  # there are an array "a.b" and an array "b" in a group "a"
            group, *parts = node.name.split("/")
            name = "".join([group, *(f"[{part!r}]" for part in parts)])
        found = _parsed(node)
        if isinstance(found, Rejection):
            refused[node.name] = found.reason
        elif not is_field_name(name) or name in arrays:
            refused[node.name] = "no field can have its name: pass fields={name: path}"
        else:
            arrays[name] = found
    return arrays


def _parsed(node: Node) -> ArrayMetadata | Rejection:
    """Return the metadata of an array, or why it can't be a field. Raises DatasetError."""
    array = parse_array(node)
    if not isinstance(array, Rejection):
        if not array.shape:
            return Rejection("it is a single number")
        if 0 in array.shape[1:]:
            return Rejection(f"its samples are empty: its shape is {array.shape}")
    return array


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


def _bytes(array: ArrayMetadata) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _is_variable(array: ArrayMetadata) -> bool:
    """Return True unless an array is the coordinate of the dimension that has its name."""
    names = array.dimension_names
    return names is None or names != (array.name.rpartition("/")[2],)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return f"[{shown}{', …' if len(names) > _MAX_NAMES else ''}]"
