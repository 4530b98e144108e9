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
from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, parse_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats.array_windows import ArrayWindows
    from penstock.readers.formats.zarr.zarr_hierarchy import Hierarchy
    from penstock.readers.formats.zarr.zarr_metadata import Node
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
    """Choose the fields of a dataset: those that the user names, else all arrays that can be
    tensors and follow the largest one.

    Raises ConfigError, DatasetError, DatasetNotFoundError or FetchError.
    """
    places = dict(origin.arrangement.places)
    chooser = _Chooser(origin, hierarchy, is_named=bool(places))
    if places:
        nodes = hierarchy.nodes_at(places.values())
        arrays = {name: chooser.named(name, path, nodes) for name, path in places.items()}
    else:
        nodes = hierarchy.nodes()
        arrays = chooser.candidates(nodes)
    if not arrays:
        raise chooser.no_arrays(nodes)
    return chooser.choose(arrays)


class _Chooser:
    """Chooses the fields of one dataset. is_named: the user names them."""

    def __init__(self, origin: Origin, hierarchy: Hierarchy, *, is_named: bool) -> None:
        self._url, self._hierarchy, self._is_named = origin.url, hierarchy, is_named
        self._sampling = Sampling.of(origin.arrangement)
        self._types = given_types(origin.arrangement)
        self._refused: dict[str, str] = {}

    # -- arrays

    def named(self, name: str, path: str, nodes: Mapping[str, Node]) -> ArrayMetadata:
        """Return the array at a path that the user names."""
        plain = path.strip("/")
        node = nodes.get(plain)
        if node is not None and node.kind == "group" and (level := finest_level(node)) is not None:
            plain = f"{plain}/{level}" if plain else level
            node = self._hierarchy.nodes_at([plain]).get(plain)
        if node is None or node.kind != "array":
            every = self._hierarchy.nodes().values()
            names = [node.name for node in every if node.kind == "array"]
            raise ConfigError(
                f'fields: got {{"{name}": {path!r}}}, and {self._url} has no such array. '
                f"Its arrays: {_some(names)}."
            )
        found = _parsed(node)
        if isinstance(found, str):
            raise DatasetError(
                f"{path or 'The array'}: {found}. Choose other fields (fields=), or write it as "
                "numbers with at least one axis."
            )
        return found

    def candidates(self, nodes: Mapping[str, Node]) -> dict[str, ArrayMetadata]:
        """Return every array that can be a field, by field; of an OME-Zarr image, only its finest
        level."""
        root = nodes[""]
        level = finest_level(root) if root.kind == "group" else None
        if level is not None:
            return {IMAGE_FIELD: self.named(IMAGE_FIELD, level, nodes)}
        arrays: dict[str, ArrayMetadata] = {}
        for node in (each for each in nodes.values() if each.kind == "array"):
            name = node.name.replace("/", ".") or ROOT_FIELD
            if name in arrays:  # there are an array "a.b" and an array "b" in a group "a"
                group, *parts = node.name.split("/")
                name = "".join([group, *(f"[{part!r}]" for part in parts)])
            found = _parsed(node)
            if isinstance(found, str):
                self._refused[node.name] = found
            elif not is_field_name(name) or name in arrays:
                self._refused[node.name] = "no field can have its name: pass fields={name: path}"
            else:
                arrays[name] = found
        return arrays

    # -- samples

    def choose(self, arrays: Mapping[str, ArrayMetadata]) -> ChosenFields:
        """Choose the arrays whose samples belong together."""
        sampling, url = self._sampling, self._url
        shapes = {name: array.shape for name, array in arrays.items()}
        sampling.check_arrays(shapes, self._types, url=url)
        lead = max(arrays, key=lambda name: (_is_variable(arrays[name]), _bytes(arrays[name])))
        followers = [name for name in arrays if self._follows(arrays[name], arrays[lead])]
        coordinates = [name for name in arrays if not _is_variable(arrays[name])]
        windows = matched_windows(
            {name: shapes[name] for name in followers},
            sampling,
            where=url,
            hint=f'fields={{"{lead}": "{arrays[lead].name}"}}, or pass the path of a group',
            lead=lead,
            optional=() if self._is_named else coordinates,
        )
        for name in followers:
            if name not in windows:
                reason = "it has other windows than the array whose coordinate it is"
                self._refused[arrays[name].name or name] = reason
        fields = [
            WindowedArray(name=name, array=arrays[name], windows=own)
            for name, own in windows.items()
        ]
        for name, reason in self._refused.items():
            _log.info("%s: %s isn't a field: %s", url, name, reason)
        check_samples(windows[lead].samples, what=f"{url}: {lead!r} of shape {shapes[lead]}")
        if not windows[lead].samples:
            raise DatasetNotFoundError(f"{url}: {lead!r} has no samples: shape {shapes[lead]}.")
        schema = {
            each.name: field_type(
                self._types.get(each.name),
                each.array.dtype,
                each.windows.sample_shape,
                name=each.name,
                url=url,
            )
            for each in fields
        }
        return ChosenFields(
            schema=Schema(schema),
            fields=fields,
            left_out={
                path.replace("/", ".") or ROOT_FIELD: why for path, why in self._refused.items()
            },
        )

    def _follows(self, array: ArrayMetadata, lead: ArrayMetadata) -> bool:
        """Return True unless the names of dimensions say that an array has other samples."""
        names, along = array.dimension_names, (lead.dimension_names or (None,))[0]
        if self._is_named or along is None or names is None or names[0] in (along, None):
            return True
        self._refused[array.name] = (
            f"its first axis is {names[0]!r}, and samples run along {along!r}"
        )
        return False

    def no_arrays(self, nodes: Mapping[str, Node]) -> DatasetError:
        """Return the error for a hierarchy without any array that can be a field."""
        if self._refused:
            reasons = "; ".join(
                f"{name or ROOT_FIELD}: {reason}" for name, reason in self._refused.items()
            )
            return DatasetError(
                f"{self._url}: none of its arrays can be a field ({reasons[:500]}). Write numbers "
                "with at least one axis; only the first axis may have length 0."
            )
        return DatasetNotFoundError(
            f"{self._url}: there are no arrays, only groups: {_some(list(nodes)[1:])}. Pass the "
            "path of a hierarchy that has arrays."
        )


def _parsed(node: Node) -> ArrayMetadata | str:
    """Return the metadata of an array, or why it can't be a field. Raises DatasetError."""
    array = parse_array(node)
    if not isinstance(array, ArrayMetadata):
        return array.reason
    if not array.shape:
        return "it is a single number"
    if 0 in array.shape[1:]:
        return f"its samples are empty: its shape is {array.shape}"
    return array


def finest_level(group: Node) -> str | None:
    """Return the path, below its group, of the finest level of an OME-Zarr image; None if the group
    isn't one."""
    ome = group.attributes.get("ome")
    attributes: Any = ome if isinstance(ome, dict) else group.attributes
    try:
        path = attributes["multiscales"][0]["datasets"][0]["path"]
    except (KeyError, IndexError, TypeError):
        return None
    return path.strip("/") if isinstance(path, str) else None


def _bytes(array: ArrayMetadata) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _is_variable(array: ArrayMetadata) -> bool:
    """Return True unless an array is the coordinate of the dimension that has its name."""
    names = array.dimension_names
    return names is None or names != (array.name.rpartition("/")[2],)


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return f"[{shown}{', …' if len(names) > _MAX_NAMES else ''}]"
