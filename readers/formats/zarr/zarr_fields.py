"""Choose the fields of a Zarr hierarchy, and which parts of their arrays are samples.

Samples run along the first axis, and all fields have the same number of them. If dimensions have
names (xarray), the largest array determines along which one samples run; other arrays are fields if
they follow it. An array of fewer axes repeats its value for each window along the others (the time
of an image's tiles).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import Array, Value, array_form, is_field_name, number_dtype
from penstock.readers.formats.array_windows import ArrayWindows, ChunkGrid, windows_of
from penstock.readers.formats.dataset_arguments import Sampling, given_types
from penstock.readers.formats.shard_summary import MAX_SAMPLES
from penstock.readers.formats.zarr.zarr_hierarchy import HierarchyReader
from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, parse_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.zarr.zarr_hierarchy import Hierarchy, HierarchyFiles
    from penstock.readers.formats.zarr.zarr_metadata import Node
    from penstock.readers.origin import Origin

ROOT_FIELD = "array"
"""The field's name of an array that is the root of the hierarchy."""

IMAGE_FIELD = "image"
"""The field's name of the finest level of an OME-Zarr image."""

MAX_SAMPLE_BYTES = 2**36
"""The largest sample of one field."""

_MAX_NAMES = 8

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowedArray:
    """An array, the name of its field, and the windows that are its samples."""

    name: str
    array: ArrayMetadata
    windows: ArrayWindows

    @property
    def grid(self) -> ChunkGrid:
        """The chunks that the array consists of."""
        return ChunkGrid(shape=self.array.shape, chunk=self.array.chunk_shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayField(WindowedArray):
    """An array that is a field. type: of one sample."""

    type: FieldType


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenFields:
    """The fields of a dataset, at least one, all with the same number of samples.

    hierarchy: the documents that describe them. left_out: other arrays, by field name, and the
    reason.
    """

    fields: list[ArrayField]
    hierarchy: Hierarchy
    left_out: dict[str, str]


def choose_fields(origin: Origin, store: HierarchyFiles) -> ChosenFields:
    """Choose the fields of a dataset: those that the user names, else all arrays that can be
    tensors and follow the largest one.

    Raises ConfigError, DatasetError, DatasetNotFoundError or FetchError.
    """
    places = dict(origin.arrangement.places)
    reader = HierarchyReader(store, origin.url)
    chooser = _Chooser(origin, reader, is_named=bool(places))
    if places:
        hierarchy = reader.read_some(places.values())
        arrays = {name: chooser.named(name, path, hierarchy) for name, path in places.items()}
    else:
        hierarchy = reader.read()
        arrays = chooser.candidates(hierarchy)
    fields = chooser.fields(arrays, hierarchy)
    return ChosenFields(fields=fields, hierarchy=hierarchy, left_out=chooser.left_out)


class _Chooser:
    """Chooses the fields of one dataset. is_named: the user names them."""

    def __init__(self, origin: Origin, reader: HierarchyReader, *, is_named: bool) -> None:
        self._url, self._reader, self._is_named = origin.url, reader, is_named
        self._sampling = Sampling.of(origin.arrangement)
        self._types = given_types(origin.arrangement)
        self._refused: dict[str, str] = {}

    @property
    def left_out(self) -> dict[str, str]:
        """The arrays that aren't fields, by the name that their field would have, and the
        reason."""
        return {
            path.replace("/", ".") or ROOT_FIELD: reason for path, reason in self._refused.items()
        }

    # -- arrays

    def named(self, name: str, path: str, hierarchy: Hierarchy) -> ArrayMetadata:
        """Return the array at a path that the user names."""
        plain = path.strip("/")
        node = hierarchy.nodes.get(plain)
        if node is not None and node.kind == "group" and (level := finest_level(node)) is not None:
            plain = f"{plain}/{level}" if plain else level
            node = self._reader.read_some([plain]).nodes.get(plain)
        if node is None or node.kind != "array":
            names = [array.name for array in self._reader.read().arrays]
            raise ConfigError(
                f'fields: got {{"{name}": {path!r}}}, and {self._url} has no such array. '
                f"Its arrays: {_some(names)}."
            )
        array = parse_array(node)
        if not isinstance(array, ArrayMetadata):
            raise array.error()
        if not array.shape:
            raise DatasetError(
                f"{self._url}: {path!r} is a single number, expected an array. Name other arrays: "
                "fields=."
            )
        if 0 in array.shape[1:]:
            raise DatasetError(
                f"{self._url}: the samples of {path!r} are empty: its shape is {array.shape}. Name "
                "other arrays: fields=."
            )
        return array

    def candidates(self, hierarchy: Hierarchy) -> dict[str, ArrayMetadata]:
        """Return every array that can be a field, by field; of an OME-Zarr image, only its finest
        level."""
        root = hierarchy.nodes[""]
        level = finest_level(root) if root.kind == "group" else None
        if level is not None:
            return {IMAGE_FIELD: self.named(IMAGE_FIELD, level, hierarchy)}
        arrays: dict[str, ArrayMetadata] = {}
        for node in hierarchy.arrays:
            name = node.name.replace("/", ".") or ROOT_FIELD
            if name in arrays:  # there are an array "a.b" and an array "b" in a group "a"
                group, *parts = node.name.split("/")
                name = "".join([group, *(f"[{part!r}]" for part in parts)])
            array = parse_array(node)
            if not isinstance(array, ArrayMetadata):
                self._refused[node.name] = array.reason
            elif not array.shape:
                self._refused[node.name] = "it is a single number"
            elif 0 in array.shape[1:]:
                self._refused[node.name] = f"its samples are empty: its shape is {array.shape}"
            elif not is_field_name(name) or name in arrays:
                self._refused[node.name] = "no field can have its name: pass fields={name: path}"
            else:
                arrays[name] = array
        return arrays

    # -- samples

    def fields(self, arrays: Mapping[str, ArrayMetadata], hierarchy: Hierarchy) -> list[ArrayField]:
        """Return the arrays whose samples belong together as fields."""
        if not arrays:
            raise self._no_arrays(hierarchy)
        sampling = self._sampling
        shapes = {name: array.shape for name, array in arrays.items()}
        sampling.check_arrays(shapes, self._types, url=self._url)
        lead = max(arrays, key=lambda name: (_is_variable(arrays[name]), _bytes(arrays[name])))
        dimensions = arrays[lead].dimension_names
        along = dimensions[0] if dimensions else None
        followers = {
            name: array
            for name, array in arrays.items()
            if self._is_named or along is None or self._follows(array, along)
        }
        windows = {
            name: windows_of(
                array.shape,
                sampling.window(name),
                sampling.step(name),
                what=f"{name!r} of {self._url}",
                is_named=name in sampling.sample,
            )
            for name, array in followers.items()
        }
        fitted = {name: self._fitted(name, lead, followers, windows) for name in followers}
        for name, reason in self._refused.items():
            _log.info("%s: %s isn't a field: %s", self._url, name, reason)
        self._check_count(lead, windows[lead])
        return [
            self._field(name, followers[name], window)
            for name, window in fitted.items()
            if window is not None
        ]

    def _follows(self, array: ArrayMetadata, along: str) -> bool:
        names = array.dimension_names
        if names is None or names[0] in (along, None):
            return True
        self._refused[array.name] = (
            f"its first axis is {names[0]!r}, and samples run along {along!r}"
        )
        return False

    def _fitted(
        self,
        name: str,
        lead: str,
        arrays: Mapping[str, ArrayMetadata],
        windows: Mapping[str, ArrayWindows],
    ) -> ArrayWindows | None:
        """Return the windows of an array, as many as those of the leading one; None if the array is
        left out."""
        own, leading = windows[name], windows[lead]
        if (following := own.following(leading)) is not None:
            return following
        if not self._is_named and not _is_variable(arrays[name]):
            path = arrays[name].name or name
            self._refused[path] = "it has other windows than the array whose coordinate it is"
            return None
        raise DatasetError(
            f"{self._url}: {lead!r} has {leading.samples:,} samples and {name!r} has "
            f"{own.samples:,} (shapes {leading.shape} and {own.shape}). All fields of a dataset "
            "have the same number of samples: name those that belong together, "
            f'fields={{"{lead}": "{arrays[lead].name}"}}, or pass the path of a group.'
        )

    def _check_count(self, name: str, windows: ArrayWindows) -> None:
        if windows.samples > MAX_SAMPLES:
            raise DatasetError(
                f"{self._url}: {name!r} of shape {windows.shape} has {windows.samples:,} "
                f"samples, expected at most {MAX_SAMPLES:,}. Use longer strides (stride=)."
            )
        if not windows.samples:
            raise DatasetNotFoundError(
                f"{self._url}: {name!r} has no samples: its shape is {windows.shape}."
            )

    def _field(self, name: str, array: ArrayMetadata, windows: ArrayWindows) -> ArrayField:
        size_bytes = math.prod(windows.window) * array.dtype.itemsize
        if size_bytes > MAX_SAMPLE_BYTES:
            raise DatasetError(
                f"{self._url}: a sample of {name!r} takes {size_bytes:,} bytes, expected at most "
                f"{MAX_SAMPLE_BYTES:,}. Use smaller windows (sample=)."
            )
        dtype, shape = array.dtype, windows.sample_shape
        is_array = shape or dtype.itemsize > 8
        own = Array(dtype.name, shape) if is_array else Value(dtype.name)
        type = self._types.get(name, own)
        if not _can_deliver(type, dtype, shape):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, and the samples of {self._url} are {own!r}.'
            )
        if isinstance(type, Array) and not type.is_settled and isinstance(own, Array):
            type = replace(
                type, dtype=own.dtype if type.dtype == "auto" else type.dtype, shape=own.shape
            )
        return ArrayField(name=name, array=array, type=type, windows=windows)

    def _no_arrays(self, hierarchy: Hierarchy) -> DatasetError:
        if self._refused:
            reasons = "; ".join(
                f"{name or ROOT_FIELD}: {reason}" for name, reason in self._refused.items()
            )
            return DatasetError(
                f"{self._url}: none of its arrays can be a field ({reasons[:500]}). Write numbers "
                "with at least one axis; only the first axis may have length 0."
            )
        return DatasetNotFoundError(
            f"{self._url}: there are no arrays, only groups: {_some(hierarchy.groups)}. Pass the "
            "path of a hierarchy that has arrays."
        )


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


def _can_deliver(type: FieldType, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Return True if samples of this dtype and shape can be delivered as a type."""
    number, form = number_dtype(type), array_form(type)
    if number is not None:
        return not shape and _can_cast(dtype, number)
    if form is not None:
        return form.shape == shape and _can_cast(dtype, form.dtype)
    if isinstance(type, Array):
        return type.shape in (None, shape) and (
            type.dtype == "auto" or _can_cast(dtype, np.dtype(type.dtype))
        )
    return False


def _can_cast(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    is_integer = dtype.kind in "iu" and wanted.kind in "iu"
    return is_integer or np.can_cast(dtype, wanted, "same_kind")


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_MAX_NAMES])
    return f"[{shown}{', …' if len(names) > _MAX_NAMES else ''}]"
