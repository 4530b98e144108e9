"""Parse the metadata documents of Zarr hierarchies and arrays; every number is bounded before use.

Documents are JSON within bounds. They come from anybody, so nothing in them is believed. What can't
be a tensor is refused by name: NotImplementedError, with the reason. Damage is a ValueError. Codecs
are a name and a configuration each, not yet built. A shard of version 3 is many inner chunks in one
file, and an index of where each lies.

Source: the specifications of Zarr version 2 and of Zarr core 3.0 with its codecs, among them
sharding_indexed 1.0; consolidated metadata and extension types as zarr-python 3.1 writes them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

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


MAX_CODECS = 32
"""In one chain."""

_NUMCODECS = "numcodecs."

OBJECT_CODECS = {
    *("pickle", "json2", "msgpack2", "categorize", "vlen-utf8", "vlen-bytes", "vlen-array")
}
"""Of Python objects; pickles run code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec of a chain. name: as written, of version 2 its id. configuration: the rest of what is
    written, without it."""

    name: str
    configuration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain_name(self) -> str:
        """Its name without "numcodecs.", which version 3 writes before some."""
        return self.name.removeprefix(_NUMCODECS)

    @property
    def is_numcodecs(self) -> bool:
        """Whether version 3 names it as one of numcodecs' own."""
        return self.name.startswith(_NUMCODECS)


def v2_specs(filters: object, compressor: object) -> tuple[CodecSpec, ...]:
    """The chain of version 2, in the order of writing. Raises ValueError, NotImplementedError."""
    listed = filters if filters is not None else []
    if not isinstance(listed, list) or len(listed) >= MAX_CODECS:
        raise ValueError(f"its filters are {_short(filters)}")
    told = [*listed, *([] if compressor is None else [compressor])]
    found = []
    for codec in told:
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            raise ValueError(f"it names a codec {_short(codec)}")
        rest = {key: value for key, value in codec.items() if key != "id"}
        found.append(CodecSpec(name=codec["id"][:80], configuration=rest))
    return _checked(found)


def v3_specs(told: object) -> tuple[CodecSpec, ...]:
    """The chain of version 3, in the order of writing. Raises ValueError, NotImplementedError."""
    if not isinstance(told, list) or not 1 <= len(told) <= MAX_CODECS:
        raise ValueError(f"its codecs are {_short(told)}")
    found = []
    for codec in told:
        name: object = codec
        configuration: object = {}
        if isinstance(codec, dict):
            name, configuration = codec.get("name"), codec.get("configuration") or {}
        if not isinstance(name, str) or not isinstance(configuration, dict):
            raise ValueError(f"it names a codec {_short(codec)}")
        found.append(CodecSpec(name=name[:80], configuration=configuration))
    return _checked(found)


def _checked(codecs: list[CodecSpec]) -> tuple[CodecSpec, ...]:
    for codec in codecs:
        if codec.plain_name in OBJECT_CODECS:
            raise NotImplementedError(
                f"its codec {codec.name!r} makes Python objects or texts, which can't be a tensor"
            )
    return tuple(codecs)


SHARDING = "sharding_indexed"
MISSING = -1
"""In a parsed index: there is no such inner chunk, it is all fill value."""

MAX_INNER_CHUNKS = 2**22
"""Of one shard: an index of 64 MiB."""

_ENTRY_BYTES, _CRC_BYTES = 16, 4
_NOTHING = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How inner chunks lie in the file of a shard.

    chunk_shape: of an inner chunk. counts: how many there are along each axis. codecs: of an inner
    chunk, in the order of writing. is_at_end: whether the index stands at the file's end, else at
    its start. has_checksum: whether a CRC-32C follows the index. byte_order: of its numbers.
    """

    chunk_shape: tuple[int, ...]
    counts: tuple[int, ...]
    codecs: tuple[CodecSpec, ...]
    is_at_end: bool
    has_checksum: bool
    byte_order: str

    @property
    def index_bytes(self) -> int:
        """Bytes of the index in a file."""
        return math.prod(self.counts) * _ENTRY_BYTES + (_CRC_BYTES if self.has_checksum else 0)

    def index_range(self, file_bytes: int) -> tuple[int, int]:
        """Where the index stands in a file of that size: its first byte, and the one behind its
        last. Raises ValueError where the file is too short to have one."""
        size = self.index_bytes
        if file_bytes < size:
            raise ValueError(
                f"a shard's file has {file_bytes:,} bytes, and its index alone takes {size:,}"
            )
        return (file_bytes - size, file_bytes) if self.is_at_end else (0, size)

    def parse_index(self, data: Encoded, file_bytes: int) -> Ints:
        """Where the inner chunks lie: int64, shape (*counts, 2), first byte in the file and how
        many; both MISSING where there is none.

        data: the bytes of index_range(), uint8. Raises ValueError for an index that is damaged, or
        points outside of the file, into itself or to the same bytes twice.
        """
        begin, end = self.index_range(file_bytes)
        if len(data) != end - begin:
            raise ValueError(f"a shard's index has {len(data):,} bytes, wanted {end - begin:,}")
        entries = data
        if self.has_checksum:
            entries = data[:-_CRC_BYTES]
            told = int.from_bytes(data[-_CRC_BYTES:].tobytes(), "little")
            if crc32c(entries) != told:
                raise ValueError("a shard's index isn't what was written: its CRC-32C differs")
        # A copy: the bytes may stand at any address, and be a view of a file.
        pairs = np.frombuffer(entries.tobytes(), f"{self.byte_order}u8").reshape(-1, 2)
        starts, sizes = pairs.astype(np.uint64).T
        is_there = ~((starts == _NOTHING) & (sizes == _NOTHING))
        first, count = starts[is_there], sizes[is_there]
        limit = np.uint64(file_bytes)
        if bool(np.any((first > limit) | (count > limit - np.minimum(first, limit)))):
            raise ValueError(f"a shard's index points outside of its file of {file_bytes:,} bytes")
        self._check_overlaps(first.astype(np.int64), count.astype(np.int64), begin, end)
        found = np.full(pairs.shape, MISSING, np.int64)
        found[is_there, 0] = first
        found[is_there, 1] = count
        return found.reshape(*self.counts, 2)

    @staticmethod
    def _check_overlaps(first: Ints, count: Ints, begin: int, end: int) -> None:
        first, count = first[count > 0], count[count > 0]
        if bool(np.any((first < end) & (first + count > begin))):
            raise ValueError("a shard's index says that chunks lie where it lies itself")
        order = np.argsort(first, kind="stable")
        ends = (first + count)[order]
        if bool(np.any(ends[:-1] > first[order][1:])):
            raise ValueError("a shard's index says that several chunks lie in the same bytes")


def sharding_of(codecs: tuple[CodecSpec, ...], shape: tuple[int, ...]) -> Sharding | None:
    """How a shard of that shape is made up; None where these codecs make no shards whose inner
    chunks could be had alone: the whole is one chunk then.

    Raises ValueError.
    """
    if len(codecs) != 1 or codecs[0].name != SHARDING:
        return None
    told = codecs[0].configuration
    chunk = _inner_shape(told.get("chunk_shape"), shape)
    counts = tuple(length // part for length, part in zip(shape, chunk, strict=True))
    if math.prod(counts) > MAX_INNER_CHUNKS:
        raise ValueError(
            f"its shards hold {math.prod(counts):,} inner chunks each, at most "
            f"{MAX_INNER_CHUNKS:,} are read"
        )
    location = told.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"its shards' index_location is {_short(location)}")
    index = v3_specs(told.get("index_codecs"))
    names = [codec.name for codec in index]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        return None  # compressed, say: its size isn't known
    return Sharding(
        chunk_shape=chunk,
        counts=counts,
        codecs=v3_specs(told.get("codecs")),
        is_at_end=location == "end",
        has_checksum=len(index) > 1,
        byte_order=byte_order_of(index[0]),
    )


def byte_order_of(codec: CodecSpec) -> Literal["<", ">"]:
    """numpy's sign for the byte order that the codec `bytes` says. Raises ValueError."""
    endian: Any = codec.configuration.get("endian", sys.byteorder)
    if endian not in ("little", "big"):
        raise ValueError(f"its codec bytes says endian {_short(endian)}")
    return "<" if endian == "little" else ">"


def _inner_shape(told: object, shape: tuple[int, ...]) -> tuple[int, ...]:
    if (
        not isinstance(told, list)
        or len(told) != len(shape)
        or not all(type(part) is int and part > 0 for part in told)
        or any(length % part for length, part in zip(shape, told, strict=True))
    ):
        raise ValueError(f"its shards of shape {shape} hold inner chunks of shape {_short(told)}")
    return tuple(told)


NUMBERS = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""What a tensor can be made of, by numpy's name, which is version 3's name too."""

_V2 = re.compile(r"([<>|=]?)([biufcmMOSUV])(\d*)(?:\[(\d{0,9})([a-zA-Zμ]{1,7})\])?")
_TIMES = {"M": "datetime64", "m": "timedelta64"}
_V3_TIMES = {"numpy.datetime64": "datetime64", "numpy.timedelta64": "timedelta64"}
_TEXTS = {"string", "variable_length_utf8", "fixed_length_utf32"}
_RAW = {"bytes", "variable_length_bytes", "null_terminated_bytes", "raw_bytes"}
_KINDS = {"S": "byte strings", "U": "texts", "V": "raw bytes"}
_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}
_NOT_A_TIME = -(2**63)
_HEX = re.compile(r"0x[0-9a-fA-F]{4,16}")
_MAX_TEXT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DataType:
    """The numbers of an array. stored: dtype in its chunks, of that byte order; in memory they are
    of the machine's. unit: of points or lengths of time, such as "datetime64[ns]", which are handed
    out as int64, how many units it is; else None."""

    stored: np.dtype[Any]
    unit: str | None = None

    @property
    def native(self) -> np.dtype[Any]:
        """Of what is handed out."""
        return self.stored.newbyteorder("=")


def v2_data_type(told: object) -> DataType:
    """A dtype of version 2. Raises ValueError, NotImplementedError."""
    if isinstance(told, list):
        raise NotImplementedError("records of named fields (a structured dtype) can't be a tensor")
    match = _V2.fullmatch(told) if isinstance(told, str) else None
    if match is None:
        raise ValueError(f"its dtype is {_short(told)}")
    order, kind, size, scale, unit = match.groups()
    if kind == "O":
        raise NotImplementedError(
            "Python objects or texts of any length (dtype object) can't be a tensor"
        )
    if kind in _KINDS:
        raise NotImplementedError(f"{_KINDS[kind]} (dtype {told!r}) can't be a tensor")
    if kind in _TIMES:
        if size != "8":
            raise ValueError(f"its dtype is {told!r}")
        return _time(_TIMES[kind], unit or "generic", scale or "1", ">" if order == ">" else "<")
    if unit is not None or not size:
        raise ValueError(f"its dtype is {told!r}")
    try:
        dtype = np.dtype(f"{order.replace('|', '') or '='}{kind}{size}")
    except TypeError:
        raise ValueError(f"its dtype is {told!r}") from None
    return _number(dtype, str(told))


def v3_data_type(told: object) -> DataType:
    """A data type of version 3, of the machine's byte order: the codec `bytes` says the stored one.

    Raises ValueError, NotImplementedError.
    """
    name: object = told
    configuration: dict[str, Any] = {}
    if isinstance(told, dict):
        name, configuration = told.get("name"), told.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(f"its data_type is {_short(told)}")
    if name in NUMBERS:
        return DataType(stored=np.dtype(name))
    if name in _V3_TIMES:
        unit, scale = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or type(scale) is not int:
            raise ValueError(f"its data_type is {_short(told)}")
        return _time(_V3_TIMES[name], unit, str(scale), "=")
    if name in _TEXTS:
        raise NotImplementedError(f"texts (data type {name!r}) can't be a tensor")
    if name in _RAW or re.fullmatch(r"r\d+", name):
        raise NotImplementedError(f"raw bytes (data type {name!r}) can't be a tensor")
    if name in ("structured", "struct"):
        raise NotImplementedError(f"records of named fields (data type {name!r}) can't be a tensor")
    raise NotImplementedError(f"numbers of data type {_short(name)} are none of numpy's")


def fill_value(told: object, type: DataType) -> np.generic[Any]:
    """What a missing chunk holds, of the type that is handed out; zero where nothing is told.

    Raises ValueError.
    """
    dtype = type.native
    if told is None:
        return _scalar(0, dtype)
    if type.unit is not None:
        return _integer(_NOT_A_TIME if told == "NaT" else told, dtype)
    if dtype.kind == "b":
        if told in (0, 1, False, True) and not isinstance(told, str):
            return np.bool_(told)
    elif dtype.kind in "iu":
        return _integer(told, dtype)
    elif dtype.kind == "f":
        return _float(told, dtype)
    elif dtype.kind == "c":
        half = np.dtype(f"f{dtype.itemsize // 2}")
        pair = told if isinstance(told, list) else [told, 0]
        if len(pair) == 2:
            parts = np.array([_float(part, half) for part in pair], half)
            return _scalar(parts.view(dtype)[0], dtype)
    raise _wrong_fill(told, dtype)


def _scalar(value: Any, dtype: np.dtype[Any]) -> np.generic[Any]:
    return cast("np.generic[Any]", np.array(value, dtype)[()])


def _integer(told: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    value = told
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_fill(told, dtype)
    info = np.iinfo(dtype)
    if not info.min <= value <= info.max:
        raise _wrong_fill(told, dtype)
    return _scalar(value, dtype)


def _float(told: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    value = told
    if isinstance(value, str):
        if value in _FLOATS:
            value = _FLOATS[value]
        elif _HEX.fullmatch(value) and len(value) == 2 + 2 * dtype.itemsize:
            bits = np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"))
            return _scalar(bits.astype(dtype)[0], dtype)
        elif len(value) <= _MAX_TEXT:
            try:
                value = float(value)
            except ValueError:
                raise _wrong_fill(told, dtype) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_fill(told, dtype)
    try:
        with np.errstate(over="ignore"):
            return _scalar(float(value), dtype)
    except OverflowError:
        raise _wrong_fill(told, dtype) from None


def _number(dtype: np.dtype[Any], told: str) -> DataType:
    if dtype.name not in NUMBERS:
        raise NotImplementedError(f"numbers of dtype {told!r} can't be a tensor")
    return DataType(stored=dtype)


def _time(name: str, unit: str, scale: str, order: str) -> DataType:
    try:
        np.dtype(f"{name}[{scale}{unit.replace('μ', 'u')}]")
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its unit of time is {_short(scale + unit)}") from None
    factor = "" if scale == "1" else scale
    return DataType(stored=np.dtype(f"{order}i8"), unit=f"{name}[{factor}{unit}]")


def _wrong_fill(told: object, dtype: np.dtype[Any]) -> ValueError:
    return ValueError(f"its fill value is {_short(told)}, which {dtype.name} can't hold")


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
