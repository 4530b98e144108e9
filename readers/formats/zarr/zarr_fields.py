"""Choose which arrays of a hierarchy are fields, and what of each is a sample.

Samples run along the first axis, and all fields have as many. Where dimensions have names (xarray),
the largest array says along which of them; others are fields as far as they follow it: an array of
fewer axes has its value for each window of the others (the time of an image's tiles).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError
from penstock.readers.fields import (
    MAX_FIELDS,
    Array,
    Value,
    array_form,
    is_field_name,
    number_dtype,
)
from penstock.readers.formats.array_windows import ArrayWindows, ChunkGrid, windows_of
from penstock.readers.formats.dataset_arguments import Sampling, given_types
from penstock.readers.formats.shard_summary import MAX_SAMPLES
from penstock.readers.formats.zarr.zarr_hierarchy import HierarchyReader
from penstock.readers.formats.zarr.zarr_metadata import ArrayMetadata, parse_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.zarr.zarr_hierarchy import Hierarchy, HierarchyFiles
    from penstock.readers.formats.zarr.zarr_metadata import Node
    from penstock.readers.origin import Origin

ROOT_FIELD = "array"
"""The field's name of an array that is the whole hierarchy."""

IMAGE_FIELD = "image"
"""The field's name of the finest level of an image of OME-Zarr."""

MAX_SAMPLE_BYTES = 2**36
"""Of one sample of a field."""

_SHOWN = 8

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayField:
    """An array that is a field. type: of a sample; windows: which parts of it are samples; grid:
    how it is cut in what is decoded as a whole."""

    name: str
    array: ArrayMetadata
    type: FieldType
    windows: ArrayWindows

    @property
    def grid(self) -> ChunkGrid:
        """How the array is cut."""
        return ChunkGrid(shape=self.array.shape, chunk=self.array.chunk_shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChosenFields:
    """The fields of a dataset, at least one, all with as many samples, and the documents that say
    so. left_out: other arrays, and why."""

    fields: list[ArrayField]
    hierarchy: Hierarchy
    left_out: dict[str, str]

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.fields[0].windows.samples


def choose_fields(origin: Origin, store: HierarchyFiles) -> ChosenFields:
    """The fields of a dataset: those that the user names, else all that can be tensors and follow
    the largest. Raises ConfigError, DatasetError, DatasetNotFoundError, FetchError."""
    places = dict(origin.arrangement.places)
    reader = HierarchyReader(store, origin.url)
    chooser = _Chooser(origin, reader, is_asked=bool(places))
    if places:
        hierarchy = reader.read_some(places.values())
        found = {name: chooser.named(name, path, hierarchy) for name, path in places.items()}
    else:
        hierarchy = reader.read()
        found = chooser.all(hierarchy)
    fields = chooser.fields(found, hierarchy)
    return ChosenFields(fields=fields, hierarchy=hierarchy, left_out=chooser.left_out)


class _Chooser:
    """Chooses the fields of one dataset. is_asked: the user names them."""

    def __init__(self, origin: Origin, reader: HierarchyReader, *, is_asked: bool) -> None:
        self._url, self._reader, self._is_asked = origin.url, reader, is_asked
        self._sampling = Sampling.of(origin.arrangement)
        self._types = given_types(origin.arrangement)
        self._left: dict[str, str] = {}

    @property
    def left_out(self) -> dict[str, str]:
        """Arrays that are no field, by the name that they would have, and why."""
        return {path.replace("/", ".") or ROOT_FIELD: why for path, why in self._left.items()}

    # -- arrays

    def named(self, name: str, path: str, hierarchy: Hierarchy) -> ArrayMetadata:
        """The array that a user means."""
        plain = path.strip("/")
        node = hierarchy.nodes.get(plain)
        if node is not None and node.kind == "group" and (level := finest_level(node)) is not None:
            plain = f"{plain}/{level}" if plain else level
            node = self._reader.read_some([plain]).nodes.get(plain)
        if node is None or node.kind != "array":
            there = [array.name for array in self._reader.read().arrays]
            raise ConfigError(
                f'fields: got {{"{name}": {path!r}}}, and no array is there in {self._url}. '
                f"Its arrays: {_some(there)}."
            )
        array = parse_array(node)
        if not isinstance(array, ArrayMetadata):
            raise array.error()
        if not array.shape:
            raise DatasetError(f"{self._url}: {path!r} is a single number, wanted an array.")
        if 0 in array.shape[1:]:
            raise DatasetError(
                f"{self._url}: the samples of {path!r} are empty: its shape is {array.shape}. Name "
                "other arrays: fields=."
            )
        return array

    def all(self, hierarchy: Hierarchy) -> dict[str, ArrayMetadata]:
        """Every array that can be a field, by field; an image of OME-Zarr alone where there is
        one."""
        root = hierarchy.nodes[""]
        level = finest_level(root) if root.kind == "group" else None
        if level is not None:
            return {IMAGE_FIELD: self.named(IMAGE_FIELD, level, hierarchy)}
        found: dict[str, ArrayMetadata] = {}
        for node in hierarchy.arrays:
            name = node.name.replace("/", ".") or ROOT_FIELD
            if name in found:  # the group a has an array b, and beside it one is called "a.b"
                group, *parts = node.name.split("/")
                name = "".join([group, *(f"[{part!r}]" for part in parts)])
            array = parse_array(node)
            if not isinstance(array, ArrayMetadata):
                self._left[node.name] = array.why
            elif not array.shape:
                self._left[node.name] = "it is a single number"
            elif 0 in array.shape[1:]:
                self._left[node.name] = f"its samples are empty: its shape is {array.shape}"
            elif not is_field_name(name) or name in found:
                self._left[node.name] = "no field can have its name; say fields={name: path}"
            else:
                found[name] = array
        return found

    # -- samples

    def fields(self, arrays: Mapping[str, ArrayMetadata], hierarchy: Hierarchy) -> list[ArrayField]:
        """The arrays that have samples in common, as fields."""
        if not arrays:
            raise self._nothing(hierarchy)
        if len(arrays) > MAX_FIELDS:
            raise DatasetError(
                f"{self._url}: it has {len(arrays):,} arrays that can be fields, wanted at most "
                f"{MAX_FIELDS:,}. Name those that you want: fields={{name: path}}."
            )
        self._check_names(arrays)
        axes = max(len(array.shape) for array in arrays.values())
        self._sampling.check_axes(axes, url=self._url)
        lead = max(arrays, key=lambda name: (_is_variable(arrays[name]), _bytes(arrays[name])))
        dimensions = arrays[lead].dimension_names
        along = dimensions[0] if dimensions else None
        followers = {
            name: array
            for name, array in arrays.items()
            if self._is_asked or along is None or self._follows(array, along)
        }
        windows = {name: self._windows(name, array) for name, array in followers.items()}
        fitted = {name: self._fitted(name, lead, followers, windows) for name in followers}
        for name, why in self._left.items():
            _log.info("%s: %s isn't a field: %s", self._url, name, why)
        self._check_count(lead, windows[lead])
        return [
            self._field(name, followers[name], window)
            for name, window in fitted.items()
            if window is not None
        ]

    def _check_names(self, arrays: Mapping[str, ArrayMetadata]) -> None:
        said = {*self._sampling.sample, *self._sampling.stride, *self._types} - {""}
        unknown = sorted(said - set(arrays))
        if unknown:
            raise ConfigError(
                f"{self._url}: sample=, stride= or schema= names {unknown[0]!r}, and its arrays "
                f"are {_some(list(arrays))}."
            )

    def _follows(self, array: ArrayMetadata, along: str) -> bool:
        names = array.dimension_names
        if names is None or names[0] in (along, None):
            return True
        self._left[array.name] = f"its first axis is {names[0]!r}, and samples run along {along!r}"
        return False

    def _windows(self, name: str, array: ArrayMetadata) -> ArrayWindows:
        return windows_of(
            array.shape,
            self._sampling.window(name),
            self._sampling.step(name),
            what=f"{name!r} of {self._url}",
            is_named=name in self._sampling.sample,
        )

    def _fitted(
        self,
        name: str,
        lead: str,
        arrays: Mapping[str, ArrayMetadata],
        windows: Mapping[str, ArrayWindows],
    ) -> ArrayWindows | None:
        """The windows of an array, as many as the leading one has; None where it is left out."""
        mine, theirs = windows[name], windows[lead]
        axes = len(mine.shape)
        if mine.counts == theirs.counts[:axes]:
            return replace(mine, repeat=math.prod(theirs.counts[axes:]))
        if mine.samples == theirs.samples:
            return mine
        path = arrays[name].name or name
        if (
            arrays[name].dimension_names is not None
            and not self._is_asked
            and not _is_variable(arrays[name])
        ):
            self._left[path] = "it has other windows than what it is a coordinate of"
            return None
        raise DatasetError(
            f"{self._url}: {lead!r} has {theirs.samples:,} samples and {name!r} {mine.samples:,} "
            f"(shapes {theirs.shape} and {mine.shape}). Fields of one dataset have as many: name "
            f'those that belong together, fields={{"{lead}": "{arrays[lead].name}"}}, or give the '
            "path of a group."
        )

    def _check_count(self, name: str, windows: ArrayWindows) -> None:
        if windows.samples > MAX_SAMPLES:
            raise DatasetError(
                f"{self._url}: {name!r} of shape {windows.shape} makes {windows.samples:,} "
                f"samples, wanted at most {MAX_SAMPLES:,}. Take longer strides (stride=)."
            )
        if not windows.samples:
            raise DatasetNotFoundError(
                f"{self._url}: {name!r} has no samples: its shape is {windows.shape}."
            )

    def _field(self, name: str, array: ArrayMetadata, windows: ArrayWindows) -> ArrayField:
        size_bytes = math.prod(windows.window) * array.dtype.itemsize
        if size_bytes > MAX_SAMPLE_BYTES:
            raise DatasetError(
                f"{self._url}: a sample of {name!r} takes {size_bytes:,} bytes, at most "
                f"{MAX_SAMPLE_BYTES:,} can be read. Take smaller windows (sample=)."
            )
        own = _type(array.dtype, windows.sample_shape)
        type = self._types.get(name, own)
        if not _takes(type, array.dtype, windows.sample_shape):
            raise ConfigError(
                f'schema["{name}"]: got {type!r}, and the samples of {self._url} are {own!r}.'
            )
        return ArrayField(name=name, array=array, type=_settled(type, own), windows=windows)

    def _nothing(self, hierarchy: Hierarchy) -> DatasetError:
        if self._left:
            told = "; ".join(f"{name or ROOT_FIELD}: {why}" for name, why in self._left.items())
            return DatasetError(
                f"{self._url}: none of its arrays can be a field ({told[:500]}). Write numbers "
                "with at least one axis, of which none but the first is of length 0."
            )
        return DatasetNotFoundError(
            f"{self._url}: there are no arrays, only groups: {_some(hierarchy.groups)}."
        )


def finest_level(group: Node) -> str | None:
    """The path of an image's finest level below its group, where OME-Zarr tells one."""
    ome = group.attributes.get("ome")
    told: Any = ome if isinstance(ome, dict) else group.attributes
    try:
        path = told["multiscales"][0]["datasets"][0]["path"]
    except (KeyError, IndexError, TypeError):
        return None
    return path.strip("/") if isinstance(path, str) else None


def _bytes(array: ArrayMetadata) -> int:
    return math.prod(array.shape) * array.dtype.itemsize


def _is_variable(array: ArrayMetadata) -> bool:
    """Whether an array isn't the coordinate of a dimension that has its name."""
    names = array.dimension_names
    return names is None or names != (array.name.rpartition("/")[2],)


def _type(dtype: np.dtype[Any], shape: tuple[int, ...]) -> FieldType:
    return Array(dtype.name, shape) if shape or dtype.itemsize > 8 else Value(dtype.name)


def _takes(type: FieldType, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bool:
    """Whether samples can be handed out as a type says."""
    number, form = number_dtype(type), array_form(type)
    if number is not None:
        return not shape and _can_be(dtype, number)
    if form is not None:
        return form.shape == shape and _can_be(dtype, form.dtype)
    if isinstance(type, Array):
        return type.shape in (None, shape) and (
            type.dtype == "auto" or _can_be(dtype, np.dtype(type.dtype))
        )
    return False


def _can_be(dtype: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    is_integer = dtype.kind in "iu" and wanted.kind in "iu"
    return is_integer or np.can_cast(dtype, wanted, "same_kind")


def _settled(type: FieldType, own: FieldType) -> FieldType:
    if isinstance(type, Array) and not type.is_settled and isinstance(own, Array):
        dtype = own.dtype if type.dtype == "auto" else type.dtype
        return replace(type, dtype=dtype, shape=own.shape)
    return type


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return f"[{shown}{', …' if len(names) > _SHOWN else ''}]"
