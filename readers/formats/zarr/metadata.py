"""What the metadata of a Zarr array say, checked: every number is bounded before it is used.

Source: the specification of Zarr version 2 and that of Zarr core 3.0 with its codecs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from penstock.cache.errors import DatasetError
from penstock.readers.formats.zarr.data_types import fill_value, v2_data_type, v3_data_type
from penstock.readers.formats.zarr.sharding import Sharding, sharding_of
from penstock.readers.formats.zarr.specs import CodecSpec, v2_specs, v3_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from penstock.readers.formats.zarr.data_types import DataType
    from penstock.readers.formats.zarr.documents import Node

MAX_CHUNK_BYTES = 2**31
"""Of one decoded chunk, an inner one where there are shards: as most codecs can't do more."""

MAX_ARRAY_BYTES = 2**62
"""Of one decoded array, so that every place in it is an int64."""

_MAX_DIMENSIONS = 32
_V3_KEYS = {
    *("zarr_format", "node_type", "data_type", "shape", "chunk_grid", "chunk_key_encoding"),
    *("fill_value", "codecs", "attributes", "storage_transformers", "dimension_names"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkKeys:
    """How a chunk's coordinates name the file that it lies in. prefix: "c" of version 3's default;
    separator: "." or "/"."""

    prefix: str
    separator: str

    def key(self, coordinates: Sequence[int]) -> str:
        """The name of a chunk's file, below the array's folder."""
        parts = [*([self.prefix] if self.prefix else []), *map(str, coordinates)]
        return self.separator.join(parts) or "0"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayMetadata:
    """What the metadata of an array say.

    name: its path in the hierarchy. type: of its numbers, stored and handed out. file_shape: of the
    part of the array whose bytes lie in one file (a chunk, or a shard of inner chunks). codecs: of
    a chunk, in the order of writing; of an inner one where there are shards. sharding: how the
    inner chunks lie in a shard's file; None where a file is a chunk. fill_value: of what has no
    file, or no inner chunk, as a numpy scalar. order: "F": version 2's chunks may lie so.
    dimension_names: None where none are told; version 2: as xarray writes them. document: as read.
    """

    name: str
    version: Literal[2, 3]
    shape: tuple[int, ...]
    type: DataType
    file_shape: tuple[int, ...]
    fill_value: np.generic[Any]
    codecs: tuple[CodecSpec, ...]
    sharding: Sharding | None
    order: Literal["C", "F"]
    keys: ChunkKeys
    dimension_names: tuple[str | None, ...] | None
    attributes: Mapping[str, Any]
    document: Mapping[str, Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of what is handed out: the machine's byte order; int64 for times."""
        return self.type.native

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """Of what is decoded as a whole: an inner chunk where there are shards."""
        return self.file_shape if self.sharding is None else self.sharding.chunk_shape

    @property
    def chunk_bytes(self) -> int:
        """Of a decoded chunk; all are of one size, those at the array's end too."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def files(self) -> tuple[int, ...]:
        """How many files there are along each axis; any of them may be missing."""
        return _counts(self.shape, self.file_shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """How many chunks there are along each axis; any of them may be missing."""
        return _counts(self.shape, self.chunk_shape)

    def chunk_key(self, coordinates: Sequence[int]) -> str:
        """The file of a chunk (of a shard, where there are shards), below the array's folder.

        coordinates: its number along each axis.
        """
        return self.keys.key(coordinates)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedArray:
    """An array that can't be handed out as tensors. why: for the error when it is asked for."""

    name: str
    why: str

    def error(self) -> DatasetError:
        """What to raise where it is asked for by name."""
        return DatasetError(
            f"{self.name or 'The array'}: {self.why}. Ask for other fields, or write it as numbers."
        )


def parse_array(node: Node) -> ArrayMetadata | RefusedArray:
    """What an array's documents say. Raises DatasetError where they are damaged."""
    try:
        return _v2(node) if node.version == 2 else _v3(node)
    except NotImplementedError as error:
        return RefusedArray(name=node.name, why=str(error))
    except ValueError as error:
        raise DatasetError(
            f"{node.name or 'The array'}: its metadata are damaged: {error}. Write the array again."
        ) from None


def _v2(node: Node) -> ArrayMetadata:
    told = node.document
    if told.get("zarr_format") != 2:
        raise ValueError(f"its zarr_format is {_short(told.get('zarr_format'))}, wanted 2")
    shape = _lengths("shape", told.get("shape"))
    chunks = _chunk_shape(shape, told.get("chunks"))
    type = v2_data_type(told.get("dtype"))
    order = told.get("order", "C")
    if order not in ("C", "F"):
        raise ValueError(f"its order is {_short(order)}")
    names = node.attributes.get("_ARRAY_DIMENSIONS")
    if not isinstance(names, list) or len(names) != len(shape):
        names = None
    _check_sizes(shape, chunks, type)
    return ArrayMetadata(
        name=node.name,
        version=2,
        shape=shape,
        type=type,
        file_shape=chunks,
        fill_value=fill_value(told.get("fill_value"), type),
        codecs=v2_specs(told.get("filters"), told.get("compressor")),
        sharding=None,
        order=cast('Literal["C", "F"]', order),
        keys=ChunkKeys(prefix="", separator=_separator(told.get("dimension_separator", "."))),
        dimension_names=_names(names, shape),
        attributes=node.attributes,
        document=told,
    )


def _v3(node: Node) -> ArrayMetadata:
    told = node.document
    _check_understood(told)
    shape = _lengths("shape", told.get("shape"))
    grid, configuration = _named("chunk_grid", told.get("chunk_grid"))
    if grid != "regular":
        raise NotImplementedError(f"its chunks differ in shape (chunk grid {_short(grid)})")
    chunks = _chunk_shape(shape, configuration.get("chunk_shape"))
    type = v3_data_type(told.get("data_type"))
    codecs = v3_specs(told.get("codecs"))
    sharding = sharding_of(codecs, chunks)
    _check_sizes(shape, chunks if sharding is None else sharding.chunk_shape, type)
    return ArrayMetadata(
        name=node.name,
        version=3,
        shape=shape,
        type=type,
        file_shape=chunks,
        fill_value=fill_value(told.get("fill_value"), type),
        codecs=codecs if sharding is None else sharding.codecs,
        sharding=sharding,
        order="C",
        keys=_v3_keys(told.get("chunk_key_encoding")),
        dimension_names=_names(told.get("dimension_names"), shape),
        attributes=node.attributes,
        document=told,
    )


def _check_understood(told: Mapping[str, Any]) -> None:
    for key in told.keys() - _V3_KEYS:
        value = told[key]
        if not isinstance(value, dict) or value.get("must_understand", True) is not False:
            raise NotImplementedError(f"its metadata say {_short(key)}, which isn't understood")
    if told.get("storage_transformers"):
        raise NotImplementedError("it lies behind storage transformers, which aren't understood")


def _check_sizes(shape: tuple[int, ...], chunk: tuple[int, ...], type: DataType) -> None:
    item = type.stored.itemsize
    if math.prod(shape) * item >= MAX_ARRAY_BYTES:
        raise ValueError(f"its shape {shape} makes more than 2^62 bytes")
    chunk_bytes = math.prod(chunk) * item
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(
            f"its chunks of shape {chunk} take {chunk_bytes:,} bytes each once decoded; at most "
            f"{MAX_CHUNK_BYTES:,} are decoded as a whole"
        )


def _chunk_shape(shape: tuple[int, ...], told: object) -> tuple[int, ...]:
    lengths = _lengths("chunk shape", told)
    if len(lengths) != len(shape):
        raise ValueError(f"its chunk shape {lengths} doesn't go with its shape {shape}")
    # Some write arrays that are empty along an axis with chunks of length 0 there.
    chunk = tuple(part or int(not whole) for part, whole in zip(lengths, shape, strict=True))
    if 0 in chunk:
        raise ValueError(f"its chunk shape is {chunk}")
    return chunk


def _lengths(what: str, told: object) -> tuple[int, ...]:
    if not isinstance(told, list) or len(told) > _MAX_DIMENSIONS:
        raise ValueError(f"its {what} is {_short(told)}")
    if not all(type(length) is int and 0 <= length < MAX_ARRAY_BYTES for length in told):
        raise ValueError(f"its {what} is {_short(told)}")
    return tuple(told)


def _v3_keys(told: object) -> ChunkKeys:
    name, configuration = _named("chunk_key_encoding", told)
    if name == "default":
        return ChunkKeys(prefix="c", separator=_separator(configuration.get("separator", "/")))
    if name == "v2":
        return ChunkKeys(prefix="", separator=_separator(configuration.get("separator", ".")))
    raise NotImplementedError(f"its chunks are named in a way that isn't understood ({name!r})")


def _separator(told: object) -> str:
    if told == "." or told == "/":
        return told
    raise ValueError(f"the separator in its chunks' names is {_short(told)}")


def _named(what: str, told: object) -> tuple[str, Mapping[str, Any]]:
    name: object = told
    configuration: object = {}
    if isinstance(told, dict):
        name, configuration = told.get("name"), told.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(f"its {what} is {_short(told)}")
    return name[:80], configuration


def _names(told: object, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
    if told is None:
        return None
    if not isinstance(told, list) or len(told) != len(shape):
        raise ValueError(f"its dimension names are {_short(told)} for the shape {shape}")
    if not all(name is None or isinstance(name, str) for name in told):
        raise ValueError(f"its dimension names are {_short(told)}")
    return tuple(told)


def _counts(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, part, strict=True))


def _short(value: object) -> str:
    return repr(value)[:80]
