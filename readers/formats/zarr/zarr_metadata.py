"""Parse the metadata documents of Zarr hierarchies and arrays; every number is bounded before use.

Documents are JSON of bounded size. Their authors aren't trusted, so every value is checked. Damage
raises ValueError or DatasetError. An array that can't be a tensor raises NotImplementedError with
the reason. A codec is parsed to its name and configuration; `zarr_decoder` builds it. A shard of
version 3 is a file of many inner chunks, with an index of their locations.

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
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

MAX_DOCUMENT_BYTES = 4 * 2**20
"""The largest metadata document of one node."""

MAX_CONSOLIDATED_BYTES = 24 * 2**20
"""The largest document with the metadata of a whole hierarchy: about 40,000 arrays. Parsed by
Python, it takes up to 24 times that size."""

_MAX_DEPTH = 64
_MAX_NAME_LENGTH = 4096


Kind = Literal["array", "group"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """An array or a group of a hierarchy, with its documents as parsed JSON, otherwise unchecked.

    name: its path in the hierarchy, "" for the root. version: of Zarr. document: of version 2, the
    contents of .zarray or .zgroup; of version 3, of zarr.json.
    """

    name: str
    kind: Kind
    version: Literal[2, 3]
    document: Mapping[str, Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)


def read_document(data: bytes, *, name: str, is_consolidated: bool = False) -> dict[str, Any]:
    """Parse the JSON object in a metadata file. name: of the file, for messages. Raises
    DatasetError."""
    limit = MAX_CONSOLIDATED_BYTES if is_consolidated else MAX_DOCUMENT_BYTES
    if len(data) > limit:
        raise _damaged(name, f"it has {len(data):,} bytes, expected at most {limit:,}")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, f"it isn't JSON ({str(error)[:100] or 'nested too deep'})") from None
    if not isinstance(document, dict):
        raise _damaged(name, f"it holds a {type(document).__name__}, expected an object")
    if _is_deep(document):
        raise _damaged(name, f"its values are nested deeper than {_MAX_DEPTH} levels")
    return document


def v3_node(name: str, document: Mapping[str, Any]) -> Node:
    """Make a node of version 3 from its zarr.json. Raises DatasetError."""
    kind, version = document.get("node_type"), document.get("zarr_format")
    if version != 3 or type(version) is not int:
        raise _damaged(name, f"its zarr.json has zarr_format {_short(version)}, expected 3")
    if kind != "array" and kind != "group":
        raise _damaged(name, f"its zarr.json has node_type {_short(kind)}")
    attributes = document.get("attributes") or {}
    if not isinstance(attributes, dict):
        raise _damaged(name, "its attributes aren't an object")
    return Node(name=name, kind=kind, version=3, document=document, attributes=attributes)


def v2_consolidated(document: Mapping[str, Any], *, name: str) -> dict[str, Node]:
    """Return the nodes that a .zmetadata file lists, including the root, sorted by path. Raises
    DatasetError."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise _damaged(name, 'it has no "metadata"')
    nodes: dict[str, Node] = {}
    for key, value in sorted(metadata.items()):
        path, _, file = key.rpartition("/")
        if file not in (".zarray", ".zgroup"):
            continue
        attributes = metadata.get(f"{path}/.zattrs" if path else ".zattrs", {})
        if not isinstance(value, dict) or not isinstance(attributes, dict):
            raise _damaged(name, f"{_short(key)} isn't an object")
        _check_name(path, within=name)
        kind: Kind = "array" if file == ".zarray" else "group"
        nodes[path] = Node(name=path, kind=kind, version=2, document=value, attributes=attributes)
    return nodes


def v3_consolidated(root: Node) -> dict[str, Node] | None:
    """Return the nodes below a group whose document has the metadata of all of them, sorted by
    path; None if it hasn't, and the nodes must be listed.

    Raises DatasetError.
    """
    consolidated = root.document.get("consolidated_metadata")
    if not isinstance(consolidated, dict) or consolidated.get("kind") != "inline":
        return None  # missing, or of a kind that readers may ignore
    metadata = consolidated.get("metadata")
    if not isinstance(metadata, dict):
        raise _damaged(root.name, 'its consolidated_metadata has no "metadata"')
    nodes = {}
    for name, value in sorted(metadata.items()):
        if not isinstance(value, dict):
            raise _damaged(root.name, f"{_short(name)} in consolidated_metadata isn't an object")
        _check_name(name, within=root.name)
        nodes[name] = v3_node(name, value)
    return nodes


def _check_name(name: str, *, within: str) -> None:
    parts = name.split("/") if name else []
    if len(name) > _MAX_NAME_LENGTH or any(
        part in ("", ".", "..") or "\0" in part for part in parts
    ):
        raise _damaged(within, f"it names a node {_short(name)}, which isn't a valid path")


def _is_deep(document: dict[str, Any]) -> bool:
    level: list[dict[str, Any] | list[Any]] = [document]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _short(value: object) -> str:
    return repr(value)[:80]


def _damaged(name: str, reason: str) -> DatasetError:
    return DatasetError(
        f"{name or 'The root of the hierarchy'}: this isn't valid Zarr metadata: {reason}. Write "
        "it again, or remove the node."
    )


MAX_CODECS = 32
"""The most codecs of one chain."""

NUMCODECS = "numcodecs."
"""The prefix in version 3 of the names of numcodecs' own codecs."""

OBJECT_CODECS = {
    *("pickle", "json2", "msgpack2", "categorize", "vlen-utf8", "vlen-bytes", "vlen-array")
}
"""Codecs of Python objects; unpickling could run any code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec of a chain: its name as written (its id in version 2), and the rest of its
    configuration."""

    name: str
    configuration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def plain_name(self) -> str:
        """The name without "numcodecs."."""
        return self.name.removeprefix(NUMCODECS)


def v2_specs(filters: object, compressor: object) -> tuple[CodecSpec, ...]:
    """Return the chain of version 2 in the order of encoding. Raises ValueError or
    NotImplementedError."""
    listed = filters if filters is not None else []
    if not isinstance(listed, list) or len(listed) >= MAX_CODECS:
        raise ValueError(f"its filters are {_short(filters)}")
    specs = []
    for codec in [*listed, *([] if compressor is None else [compressor])]:
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            raise ValueError(f"one of its codecs is {_short(codec)}")
        rest = {key: value for key, value in codec.items() if key != "id"}
        specs.append(CodecSpec(name=codec["id"][:80], configuration=rest))
    return _checked(specs)


def v3_specs(codecs: object) -> tuple[CodecSpec, ...]:
    """Return the chain of version 3 in the order of encoding. Raises ValueError or
    NotImplementedError."""
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= MAX_CODECS:
        raise ValueError(f"its codecs are {_short(codecs)}")
    named = [_named("codec", codec) for codec in codecs]
    return _checked([CodecSpec(name=name, configuration=rest) for name, rest in named])


def _checked(codecs: list[CodecSpec]) -> tuple[CodecSpec, ...]:
    for codec in codecs:
        if codec.plain_name in OBJECT_CODECS:
            raise NotImplementedError(
                f"its codec {codec.name!r} decodes to Python objects or texts, which can't be a "
                "tensor"
            )
    return tuple(codecs)


SHARDING = "sharding_indexed"
MISSING = -1
"""Marks an inner chunk in a parsed index that isn't stored, so that all of it is fill values."""

MAX_INNER_CHUNKS = 2**22
"""The most inner chunks of one shard: an index of 64 MiB."""

_ENTRY_BYTES, _CRC_BYTES = 16, 4
_NO_CHUNK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The layout of inner chunks in the file of a shard.

    chunk_shape: of an inner chunk. counts: inner chunks along each axis. codecs: of an inner chunk,
    in the order of encoding. is_at_end: the index is at the end of the file instead of its start.
    has_checksum: a CRC-32C follows the index. byte_order: of the index's numbers.
    """

    chunk_shape: tuple[int, ...]
    counts: tuple[int, ...]
    codecs: tuple[CodecSpec, ...]
    is_at_end: bool
    has_checksum: bool
    byte_order: str

    @property
    def index_bytes(self) -> int:
        """The size of the index in a file."""
        return math.prod(self.counts) * _ENTRY_BYTES + (_CRC_BYTES if self.has_checksum else 0)

    def index_range(self, file_bytes: int) -> tuple[int, int]:
        """Return the first and end byte of the index in a file of this size.

        Raises ValueError if the file is too short to have an index.
        """
        size = self.index_bytes
        if file_bytes < size:
            raise ValueError(
                f"the file of a shard has {file_bytes:,} bytes, and its index alone takes {size:,}"
            )
        return (file_bytes - size, file_bytes) if self.is_at_end else (0, size)

    def parse_index(self, data: Encoded, file_bytes: int) -> Ints:
        """Return the locations of the inner chunks: int64, shape (*counts, 2), the first byte in
        the file and the number of bytes; both are MISSING if a chunk isn't stored.

        data: the bytes of index_range(), uint8. Raises ValueError for an index that is damaged, or
        that points outside of the file, into itself, or to the same bytes twice.
        """
        begin, end = self.index_range(file_bytes)
        if len(data) != end - begin:
            raise ValueError(
                f"the index of a shard has {len(data):,} bytes, expected {end - begin:,}"
            )
        entries = data
        if self.has_checksum:
            entries = data[:-_CRC_BYTES]
            checksum = int.from_bytes(data[-_CRC_BYTES:].tobytes(), "little")
            if crc32c(entries) != checksum:
                raise ValueError("the index of a shard is damaged: its CRC-32C differs")
        # Copy the bytes: they may be unaligned, and they may be a view of a file.
        pairs = np.frombuffer(entries.tobytes(), f"{self.byte_order}u8").reshape(-1, 2)
        starts, sizes = pairs.astype(np.uint64).T
        is_stored = ~((starts == _NO_CHUNK) & (sizes == _NO_CHUNK))
        first, count = starts[is_stored], sizes[is_stored]
        limit = np.uint64(file_bytes)
        if bool(np.any((first > limit) | (count > limit - np.minimum(first, limit)))):
            raise ValueError(
                f"the index of a shard points outside of its file of {file_bytes:,} bytes"
            )
        self._check_overlaps(first.astype(np.int64), count.astype(np.int64), begin, end)
        index = np.full(pairs.shape, MISSING, np.int64)
        index[is_stored, 0] = first
        index[is_stored, 1] = count
        return index.reshape(*self.counts, 2)

    @staticmethod
    def _check_overlaps(first: Ints, count: Ints, begin: int, end: int) -> None:
        first, count = first[count > 0], count[count > 0]
        if bool(np.any((first < end) & (first + count > begin))):
            raise ValueError("the index of a shard places chunks where the index itself is")
        order = np.argsort(first, kind="stable")
        ends = (first + count)[order]
        if bool(np.any(ends[:-1] > first[order][1:])):
            raise ValueError("the index of a shard places several chunks in the same bytes")


def sharding_of(codecs: tuple[CodecSpec, ...], shape: tuple[int, ...]) -> Sharding | None:
    """Return the layout of a shard of this shape; None if the codecs make no shards with inner
    chunks that can be read one by one, so that a whole file is one chunk.

    Raises ValueError.
    """
    if len(codecs) != 1 or codecs[0].name != SHARDING:
        return None
    configuration = codecs[0].configuration
    chunk = configuration.get("chunk_shape")
    if (
        not isinstance(chunk, list)
        or len(chunk) != len(shape)
        or not all(type(part) is int and part > 0 for part in chunk)
        or any(length % part for length, part in zip(shape, chunk, strict=True))
    ):
        raise ValueError(f"its shards of shape {shape} have inner chunks of shape {_short(chunk)}")
    counts = tuple(length // part for length, part in zip(shape, chunk, strict=True))
    if math.prod(counts) > MAX_INNER_CHUNKS:
        raise ValueError(
            f"its shards have {math.prod(counts):,} inner chunks each, expected at most "
            f"{MAX_INNER_CHUNKS:,}"
        )
    location = configuration.get("index_location", "end")
    if location not in ("start", "end"):
        raise ValueError(f"the index_location of its shards is {_short(location)}")
    index = v3_specs(configuration.get("index_codecs"))
    names = [codec.name for codec in index]
    if names not in (["bytes"], ["bytes", "crc32c"]):
        return None  # the size of an index of other codecs is unknown
    return Sharding(
        chunk_shape=tuple(chunk),
        counts=counts,
        codecs=v3_specs(configuration.get("codecs")),
        is_at_end=location == "end",
        has_checksum=len(index) > 1,
        byte_order=byte_order_of(index[0]),
    )


def byte_order_of(codec: CodecSpec) -> Literal["<", ">"]:
    """Return numpy's sign for the byte order of the codec `bytes`. Raises ValueError."""
    endian: Any = codec.configuration.get("endian", sys.byteorder)
    if endian not in ("little", "big"):
        raise ValueError(f"the endian of its codec bytes is {_short(endian)}")
    return "<" if endian == "little" else ">"


NUMBERS = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""The dtypes that a tensor can have, by numpy's names, which are also version 3's."""

_V2_DTYPE = re.compile(r"([<>|=]?)([biufcmMOSUV])(\d*)(?:\[(\d{0,9})([a-zA-Zμ]{1,7})\])?")
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
    """The type of an array's numbers.

    stored: the dtype in chunks, with its byte order; in memory, numbers have the machine's. unit:
    of dates and durations, such as "datetime64[ns]", which are delivered as an int64 number of
    units; None for others.
    """

    stored: np.dtype[Any]
    unit: str | None = None

    @property
    def native(self) -> np.dtype[Any]:
        """The dtype that is delivered."""
        return self.stored.newbyteorder("=")


def v2_data_type(dtype: object) -> DataType:
    """Parse a dtype of version 2. Raises ValueError or NotImplementedError."""
    if isinstance(dtype, list):
        raise NotImplementedError("records of named fields (a structured dtype) can't be a tensor")
    match = _V2_DTYPE.fullmatch(dtype) if isinstance(dtype, str) else None
    if match is None:
        raise ValueError(f"its dtype is {_short(dtype)}")
    order, kind, size, scale, unit = match.groups()
    if kind == "O":
        raise NotImplementedError(
            "Python objects or texts of any length (dtype object) can't be a tensor"
        )
    if kind in _KINDS:
        raise NotImplementedError(f"{_KINDS[kind]} (dtype {dtype!r}) can't be a tensor")
    if kind in _TIMES:
        if size != "8":
            raise ValueError(f"its dtype is {dtype!r}")
        return _time(_TIMES[kind], unit or "generic", scale or "1", ">" if order == ">" else "<")
    if unit is not None or not size:
        raise ValueError(f"its dtype is {dtype!r}")
    try:
        stored = np.dtype(f"{order.replace('|', '') or '='}{kind}{size}")
    except TypeError:
        raise ValueError(f"its dtype is {dtype!r}") from None
    if stored.name not in NUMBERS:
        raise NotImplementedError(f"numbers of dtype {dtype!r} can't be a tensor")
    return DataType(stored=stored)


def v3_data_type(data_type: object) -> DataType:
    """Parse a data type of version 3 as one of the machine's byte order; the stored byte order is
    part of the codec `bytes`.

    Raises ValueError or NotImplementedError.
    """
    name, configuration = _named("data_type", data_type)
    if name in NUMBERS:
        return DataType(stored=np.dtype(name))
    if name in _V3_TIMES:
        unit, scale = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or type(scale) is not int:
            raise ValueError(f"its data_type is {_short(data_type)}")
        return _time(_V3_TIMES[name], unit, str(scale), "=")
    if name in _TEXTS:
        raise NotImplementedError(f"texts (data type {name!r}) can't be a tensor")
    if name in _RAW or re.fullmatch(r"r\d+", name):
        raise NotImplementedError(f"raw bytes (data type {name!r}) can't be a tensor")
    if name in ("structured", "struct"):
        raise NotImplementedError(f"records of named fields (data type {name!r}) can't be a tensor")
    raise NotImplementedError(f"numpy has no numbers of data type {_short(name)}")


def fill_value(value: object, type: DataType) -> np.generic[Any]:
    """Return the value of missing chunks in the delivered type; zero if the metadata has none.

    Raises ValueError.
    """
    dtype = type.native
    if value is None:
        return _scalar(0, dtype)
    if type.unit is not None:
        return _integer(_NOT_A_TIME if value == "NaT" else value, dtype)
    if dtype.kind == "b":
        if value in (0, 1, False, True) and not isinstance(value, str):
            return np.bool_(value)
    elif dtype.kind in "iu":
        return _integer(value, dtype)
    elif dtype.kind == "f":
        return _float(value, dtype)
    elif dtype.kind == "c":
        half = np.dtype(f"f{dtype.itemsize // 2}")
        pair = value if isinstance(value, list) else [value, 0]
        if len(pair) == 2:
            parts = np.array([_float(part, half) for part in pair], half)
            return _scalar(parts.view(dtype)[0], dtype)
    raise _wrong_fill(value, dtype)


def _scalar(value: Any, dtype: np.dtype[Any]) -> np.generic[Any]:
    return cast("np.generic[Any]", np.array(value, dtype)[()])


def _integer(written: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    value = written
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,20}", value):
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong_fill(written, dtype)
    info = np.iinfo(dtype)
    if not info.min <= value <= info.max:
        raise _wrong_fill(written, dtype)
    return _scalar(value, dtype)


def _float(written: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    value = written
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
                raise _wrong_fill(written, dtype) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_fill(written, dtype)
    try:
        with np.errstate(over="ignore"):
            return _scalar(float(value), dtype)
    except OverflowError:
        raise _wrong_fill(written, dtype) from None


def _time(name: str, unit: str, scale: str, order: str) -> DataType:
    try:
        np.dtype(f"{name}[{scale}{unit.replace('μ', 'u')}]")
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its unit of time is {_short(scale + unit)}") from None
    factor = "" if scale == "1" else scale
    return DataType(stored=np.dtype(f"{order}i8"), unit=f"{name}[{factor}{unit}]")


def _wrong_fill(value: object, dtype: np.dtype[Any]) -> ValueError:
    return ValueError(f"its fill value is {_short(value)}, which {dtype.name} can't represent")


MAX_CHUNK_BYTES = 2**31
"""The largest decoded chunk (inner chunk of a shard); most codecs can't decode more."""

MAX_ARRAY_BYTES = 2**62
"""The largest decoded array, so that every offset in it is an int64."""

_MAX_DIMENSIONS = 32
_V3_KEYS = {
    *("zarr_format", "node_type", "data_type", "shape", "chunk_grid", "chunk_key_encoding"),
    *("fill_value", "codecs", "attributes", "storage_transformers", "dimension_names"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkKeys:
    """The rule that turns a chunk's coordinates into the name of its file.

    prefix: "c" for version 3's default. separator: "." or "/".
    """

    prefix: str
    separator: str

    def key(self, coordinates: Sequence[int]) -> str:
        """Return the name of a chunk's file, or of its shard's file, below the array's folder."""
        parts = [*([self.prefix] if self.prefix else []), *map(str, coordinates)]
        return self.separator.join(parts) or "0"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayMetadata:
    """The checked metadata of an array.

    name: its path in the hierarchy. file_shape: the part of the array that is stored in one file (a
    chunk, or a shard of inner chunks). fill_value: the value of chunks that aren't stored, as a
    numpy scalar. codecs: of a chunk (of an inner chunk if there are shards), in the order of
    encoding. sharding: the layout of shards; None if a file is one chunk. order: "F" if chunks of
    version 2 are stored column by column. dimension_names: None if there are none; of version 2, as
    xarray writes them. document: as read.
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
        """The delivered dtype, of the machine's byte order; int64 for dates and durations."""
        return self.type.native

    @property
    def chunk_shape(self) -> tuple[int, ...]:
        """The shape of what is decoded as a whole: a chunk, or an inner chunk of a shard."""
        return self.file_shape if self.sharding is None else self.sharding.chunk_shape

    @property
    def chunk_bytes(self) -> int:
        """The size of a decoded chunk; the chunks at the end of an array have the same size."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def files(self) -> tuple[int, ...]:
        """The number of files along each axis; any of them may be missing."""
        return _counts(self.shape, self.file_shape)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The number of chunks along each axis; any of them may be missing."""
        return _counts(self.shape, self.chunk_shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedArray:
    """An array that can't be delivered as tensors, and the reason."""

    name: str
    reason: str

    def error(self) -> DatasetError:
        """Return the error to raise if a user asks for this array by name."""
        return DatasetError(
            f"{self.name or 'The array'}: {self.reason}. Choose other fields, or write it as "
            "numbers."
        )


def parse_array(node: Node) -> ArrayMetadata | RefusedArray:
    """Parse the documents of an array. Raises DatasetError if they are damaged."""
    try:
        return _parse_v2(node) if node.version == 2 else _parse_v3(node)
    except NotImplementedError as error:
        return RefusedArray(name=node.name, reason=str(error))
    except ValueError as error:
        raise DatasetError(
            f"{node.name or 'The array'}: its metadata is damaged: {error}. Write the array again."
        ) from None


def _parse_v2(node: Node) -> ArrayMetadata:
    document = node.document
    if document.get("zarr_format") != 2:
        raise ValueError(f"its zarr_format is {_short(document.get('zarr_format'))}, expected 2")
    shape = _lengths("shape", document.get("shape"))
    chunks = _chunk_shape(shape, document.get("chunks"))
    type = v2_data_type(document.get("dtype"))
    order = document.get("order", "C")
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
        fill_value=fill_value(document.get("fill_value"), type),
        codecs=v2_specs(document.get("filters"), document.get("compressor")),
        sharding=None,
        order=cast('Literal["C", "F"]', order),
        keys=ChunkKeys(prefix="", separator=_separator(document.get("dimension_separator", "."))),
        dimension_names=_names(names, shape),
        attributes=node.attributes,
        document=document,
    )


def _parse_v3(node: Node) -> ArrayMetadata:
    document = node.document
    for key in document.keys() - _V3_KEYS:
        value = document[key]
        if not isinstance(value, dict) or value.get("must_understand", True) is not False:
            raise NotImplementedError(f"its metadata has {_short(key)}, which isn't supported")
    if document.get("storage_transformers"):
        raise NotImplementedError("it has storage transformers, which aren't supported")
    shape = _lengths("shape", document.get("shape"))
    grid, configuration = _named("chunk_grid", document.get("chunk_grid"))
    if grid != "regular":
        raise NotImplementedError(f"its chunks differ in shape (chunk grid {_short(grid)})")
    chunks = _chunk_shape(shape, configuration.get("chunk_shape"))
    type = v3_data_type(document.get("data_type"))
    codecs = v3_specs(document.get("codecs"))
    sharding = sharding_of(codecs, chunks)
    _check_sizes(shape, chunks if sharding is None else sharding.chunk_shape, type)
    return ArrayMetadata(
        name=node.name,
        version=3,
        shape=shape,
        type=type,
        file_shape=chunks,
        fill_value=fill_value(document.get("fill_value"), type),
        codecs=codecs if sharding is None else sharding.codecs,
        sharding=sharding,
        order="C",
        keys=_v3_keys(document.get("chunk_key_encoding")),
        dimension_names=_names(document.get("dimension_names"), shape),
        attributes=node.attributes,
        document=document,
    )


def _check_sizes(shape: tuple[int, ...], chunk: tuple[int, ...], type: DataType) -> None:
    item = type.stored.itemsize
    if math.prod(shape) * item >= MAX_ARRAY_BYTES:
        raise ValueError(f"an array of its shape {shape} takes more than 2^62 bytes")
    chunk_bytes = math.prod(chunk) * item
    if chunk_bytes > MAX_CHUNK_BYTES:
        raise ValueError(
            f"its chunks of shape {chunk} take {chunk_bytes:,} bytes each when decoded, expected "
            f"at most {MAX_CHUNK_BYTES:,}"
        )


def _chunk_shape(shape: tuple[int, ...], value: object) -> tuple[int, ...]:
    lengths = _lengths("chunk shape", value)
    if len(lengths) != len(shape):
        raise ValueError(
            f"its chunk shape {lengths} and its shape {shape} differ in their number of axes"
        )
    # Some writers give an axis of length 0 chunks of length 0.
    chunk = tuple(part or int(not length) for part, length in zip(lengths, shape, strict=True))
    if 0 in chunk:
        raise ValueError(f"its chunk shape is {chunk}")
    return chunk


def _lengths(what: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"its {what} is {_short(value)}")
    if not all(type(length) is int and 0 <= length < MAX_ARRAY_BYTES for length in value):
        raise ValueError(f"its {what} is {_short(value)}")
    return tuple(value)


def _v3_keys(encoding: object) -> ChunkKeys:
    name, configuration = _named("chunk_key_encoding", encoding)
    if name == "default":
        return ChunkKeys(prefix="c", separator=_separator(configuration.get("separator", "/")))
    if name == "v2":
        return ChunkKeys(prefix="", separator=_separator(configuration.get("separator", ".")))
    raise NotImplementedError(f"its chunk_key_encoding {name!r} isn't supported")


def _separator(value: object) -> str:
    if value == "." or value == "/":
        return value
    raise ValueError(f"the separator in the names of its chunks is {_short(value)}")


def _named(what: str, value: object) -> tuple[str, Mapping[str, Any]]:
    """Parse a value that is a name, or an object with a name and a configuration. Raises
    ValueError."""
    name: object = value
    configuration: object = {}
    if isinstance(value, dict):
        name, configuration = value.get("name"), value.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(f"its {what} is {_short(value)}")
    return name[:80], configuration


def _names(value: object, shape: tuple[int, ...]) -> tuple[str | None, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != len(shape):
        raise ValueError(f"its dimension names are {_short(value)} for the shape {shape}")
    if not all(name is None or isinstance(name, str) for name in value):
        raise ValueError(f"its dimension names are {_short(value)}")
    return tuple(value)


def _counts(shape: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-length // size) for length, size in zip(shape, part, strict=True))
