"""Parse the metadata documents of Zarr hierarchies and arrays; every number is bounded before use.

Documents are JSON of bounded size. Their authors aren't trusted, so every value is checked. Damage
raises ValueError or DatasetError. An array that can't be a tensor raises NotImplementedError with
the reason. A codec is parsed to its name and configuration; `zarr_codecs` builds it. A shard of
version 3 is a file of many inner chunks, with an index of their locations.

zarr's own metadata classes were measured instead: importing them takes 0.23 s, in each process that
opens an index; they parse an array in 52 µs (this module: 13 µs); they accept 17 of the 98 hostile
documents of our tests (chunks of 2^43 bytes, shapes beyond 2^62, chunks of length 0); and as they
make the codecs at once, a codec that isn't installed hides its array.

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
from penstock.readers.formats.array_windows import ChunkGrid

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
    nodes: dict[str, Node] = {}
    metadata = _listed(document, name)
    for key, value in metadata.items():
        path, _, file = key.rpartition("/")
        if file in (".zarray", ".zgroup"):
            _check_name(path, within=name)
            attributes = metadata.get(f"{path}/.zattrs" if path else ".zattrs", {})
            kind: Kind = "array" if file == ".zarray" else "group"
            node = Node(name=path, kind=kind, version=2, document=value, attributes=attributes)
            nodes[path] = node
    return nodes


def v3_consolidated(root: Node) -> dict[str, Node] | None:
    """Return the nodes below a group whose document has the metadata of all of them, sorted by
    path; None if it hasn't, and the nodes must be listed.

    Raises DatasetError.
    """
    consolidated = root.document.get("consolidated_metadata")
    if not isinstance(consolidated, dict) or consolidated.get("kind") != "inline":
        return None  # missing, or of a kind that readers may ignore
    metadata = _listed(consolidated, f"{root.name} consolidated_metadata".strip())
    for name in metadata:
        _check_name(name, within=root.name)
    return {name: v3_node(name, value) for name, value in metadata.items()}


def _listed(document: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the documents that consolidated metadata hold, sorted by name."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise _damaged(name, 'it has no "metadata"')
    for key, value in metadata.items():
        if not isinstance(value, dict):
            raise _damaged(name, f"{_short(key)} isn't an object")
    return dict(sorted(metadata.items()))


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
    listed = [] if filters is None else filters
    if not isinstance(listed, list):
        raise ValueError(f"its filters are {_short(filters)}")
    return _specs([*listed, *([] if compressor is None else [compressor])], "id")


def v3_specs(codecs: object) -> tuple[CodecSpec, ...]:
    """Return the chain of version 3 in the order of encoding. Raises ValueError or
    NotImplementedError."""
    if not isinstance(codecs, list) or not codecs:
        raise ValueError(f"its codecs are {_short(codecs)}")
    return _specs(codecs, "name")


def _specs(codecs: list[Any], key: str) -> tuple[CodecSpec, ...]:
    """Parse codecs. key: of their names."""
    if len(codecs) > MAX_CODECS:
        raise ValueError(f"its codecs are {_short(codecs)}")
    specs = []
    for codec in codecs:
        if key == "name":
            name, rest = _named("codec", codec)
        elif isinstance(codec, dict) and isinstance(codec.get("id"), str):
            name, rest = codec["id"][:80], {k: v for k, v in codec.items() if k != "id"}
        else:
            raise ValueError(f"one of its codecs is {_short(codec)}")
        if name.removeprefix(NUMCODECS) in OBJECT_CODECS:
            raise NotImplementedError(
                f"its codec {name!r} decodes to Python objects or texts, which can't be a tensor"
            )
        specs.append(CodecSpec(name=name, configuration=rest))
    return tuple(specs)


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
        pairs = pairs.astype(np.uint64)
        is_stored = (pairs != _NO_CHUNK).any(axis=1)
        first, count = pairs[is_stored].T
        limit = np.uint64(file_bytes)
        if bool(np.any((first > limit) | (count > limit - np.minimum(first, limit)))):
            raise ValueError(
                f"the index of a shard points outside of its file of {file_bytes:,} bytes"
            )
        found = np.full(pairs.shape, MISSING, np.int64)
        found[is_stored] = pairs[is_stored]
        ranges = found[found[:, 1] > 0]
        if bool(np.any((ranges[:, 0] < end) & (ranges.sum(axis=1) > begin))):
            raise ValueError("the index of a shard places chunks where the index itself is")
        ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
        if bool(np.any(ranges.sum(axis=1)[:-1] > ranges[1:, 0])):
            raise ValueError("the index of a shard places several chunks in the same bytes")
        return found.reshape(*self.counts, 2)


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

_V2_DTYPE = re.compile(r"[<>|=]?([biufcmMOSUV])(\d*)(\[\d{0,9}[a-zA-Z]{1,7}\])?")
_TEXTS = {"string", "variable_length_utf8", "fixed_length_utf32"}
_RAW = {"bytes", "variable_length_bytes", "null_terminated_bytes", "raw_bytes"}
_KINDS = {"S": "byte strings", "U": "texts", "V": "raw bytes"}
_NOT_A_TIME = -(2**63)
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
    text = dtype.replace("μ", "u") if isinstance(dtype, str) else ""
    match = _V2_DTYPE.fullmatch(text)
    if match is None or (not match[2] and match[1] != "O"):
        raise ValueError(f"its dtype is {_short(dtype)}")
    if match[1] == "O":
        raise NotImplementedError(
            "Python objects or texts of any length (dtype object) can't be a tensor"
        )
    if match[1] in _KINDS:
        raise NotImplementedError(f"{_KINDS[match[1]]} (dtype {dtype!r}) can't be a tensor")
    return _numbers("dtype", dtype, text)


def v3_data_type(data_type: object) -> DataType:
    """Parse a data type of version 3 as one of the machine's byte order; the stored byte order is
    part of the codec `bytes`.

    Raises ValueError or NotImplementedError.
    """
    name, configuration = _named("data_type", data_type)
    if name in NUMBERS:
        return DataType(stored=np.dtype(name))
    if name in ("numpy.datetime64", "numpy.timedelta64"):
        unit, scale = configuration.get("unit"), configuration.get("scale_factor", 1)
        if not isinstance(unit, str) or type(scale) is not int:
            raise ValueError(f"its data_type is {_short(data_type)}")
        text = f"{name.removeprefix('numpy.')}[{scale}{unit.replace('μ', 'u')}]"
        return _numbers("data_type", data_type, text)
    what = "numbers that numpy lacks"
    if name in _TEXTS:
        what = "texts"
    elif name in _RAW or re.fullmatch(r"r\d+", name):
        what = "raw bytes"
    elif name in ("structured", "struct"):
        what = "records of named fields"
    raise NotImplementedError(f"{what} (data type {_short(name)}) can't be a tensor")


def _numbers(key: str, value: object, text: str) -> DataType:
    """Return the type of numbers, dates or durations. text: numpy's name of it."""
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"its {key} is {_short(value)}") from None
    if dtype.kind in "mM":
        return DataType(stored=np.dtype(f"{dtype.byteorder}i8"), unit=dtype.name)
    if dtype.name not in NUMBERS:
        raise NotImplementedError(f"numbers of dtype {value!r} can't be a tensor")
    return DataType(stored=dtype)


def fill_value(value: object, type: DataType) -> np.generic[Any]:
    """Return the value of missing chunks in the delivered type; zero if the metadata has none.

    Raises ValueError.
    """
    dtype = type.native
    try:
        if value is None:
            return _scalar(0, dtype)
        if type.unit is not None and value == "NaT":
            return _scalar(_NOT_A_TIME, dtype)
        if dtype.kind == "b" and not isinstance(value, str) and value in (0, 1):
            return np.bool_(value)
        if dtype.kind == "c":
            real, imaginary = value if isinstance(value, list) else (value, 0)
            half = np.dtype(f"f{dtype.itemsize // 2}")
            pair = [_number(real, half), _number(imaginary, half)]
            return _scalar(np.array(pair, half).view(dtype)[0], dtype)
        if dtype.kind != "b":
            return _number(value, dtype)
    except (ValueError, TypeError, OverflowError):
        pass
    raise ValueError(f"its fill value is {_short(value)}, which {dtype.name} can't represent")


def _number(value: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    """Return an integer or a float. Raises ValueError, TypeError or OverflowError."""
    is_integer = dtype.kind in "iu"
    if isinstance(value, str) and len(value) <= _MAX_TEXT:
        if value.startswith("0x") and len(value) == 2 + 2 * dtype.itemsize and not is_integer:
            bits = np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"))
            return _scalar(bits.astype(dtype)[0], dtype)
        value = int(value) if is_integer else float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{_short(value)} isn't a number")
    if is_integer:
        info = np.iinfo(dtype)
        if value != int(value) or not info.min <= value <= info.max:
            raise OverflowError(f"{_short(value)} isn't an integer in the range")
        return _scalar(int(value), dtype)
    with np.errstate(over="ignore"):
        return _scalar(float(value), dtype)


def _scalar(value: Any, dtype: np.dtype[Any]) -> np.generic[Any]:
    return cast("np.generic[Any]", np.array(value, dtype)[()])


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
    keys: ChunkKeys
    dimension_names: tuple[str | None, ...] | None
    attributes: Mapping[str, Any]
    document: Mapping[str, Any]
    sharding: Sharding | None
    order: str

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
        return ChunkGrid(shape=self.shape, chunk=self.file_shape).counts

    @property
    def grid(self) -> ChunkGrid:
        """The chunks that the array consists of; any of them may be missing."""
        return ChunkGrid(shape=self.shape, chunk=self.chunk_shape)


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
    _one_of("zarr_format", document.get("zarr_format"), (2,))
    names, shape = node.attributes.get("_ARRAY_DIMENSIONS"), document.get("shape")
    has_names = isinstance(names, list) and isinstance(shape, list) and len(names) == len(shape)
    separator = document.get("dimension_separator", ".")
    return _array(
        node,
        type=v2_data_type(document.get("dtype")),
        file_shape=document.get("chunks"),
        codecs=v2_specs(document.get("filters"), document.get("compressor")),
        order=_one_of("order", document.get("order", "C"), ("C", "F")),
        keys=ChunkKeys(prefix="", separator=_one_of("separator", separator, (".", "/"))),
        names=names if has_names else None,
    )


def _parse_v3(node: Node) -> ArrayMetadata:
    document = node.document
    for key in document.keys() - _V3_KEYS:
        value = document[key]
        if not isinstance(value, dict) or value.get("must_understand", True) is not False:
            raise NotImplementedError(f"its metadata has {_short(key)}, which isn't supported")
    if document.get("storage_transformers"):
        raise NotImplementedError("it has storage transformers, which aren't supported")
    grid, configuration = _named("chunk_grid", document.get("chunk_grid"))
    if grid != "regular":
        raise NotImplementedError(f"its chunks differ in shape (chunk grid {_short(grid)})")
    encoding, separators = _named("chunk_key_encoding", document.get("chunk_key_encoding"))
    if encoding not in ("default", "v2"):
        raise NotImplementedError(f"its chunk_key_encoding {encoding!r} isn't supported")
    prefix, usual = ("c", "/") if encoding == "default" else ("", ".")
    separator = _one_of("separator", separators.get("separator", usual), (".", "/"))
    return _array(
        node,
        type=v3_data_type(document.get("data_type")),
        file_shape=configuration.get("chunk_shape"),
        codecs=v3_specs(document.get("codecs")),
        order="C",
        keys=ChunkKeys(prefix=prefix, separator=separator),
        names=document.get("dimension_names"),
    )


def _array(
    node: Node,
    *,
    type: DataType,
    file_shape: object,
    codecs: tuple[CodecSpec, ...],
    order: str,
    keys: ChunkKeys,
    names: Any,
) -> ArrayMetadata:
    """Check what both versions have. Raises ValueError or NotImplementedError."""
    shape, part = _lengths("shape", node.document.get("shape")), _lengths("chunk shape", file_shape)
    if len(part) != len(shape):
        raise ValueError(
            f"its chunk shape {part} and its shape {shape} differ in their number of axes"
        )
    # Some writers give an axis of length 0 chunks of length 0.
    part = tuple(size or int(not length) for size, length in zip(part, shape, strict=True))
    if 0 in part:
        raise ValueError(f"its chunk shape is {part}")
    are_names = isinstance(names, list) and len(names) == len(shape)
    if names is not None and not (are_names and all(isinstance(n, str | None) for n in names)):
        raise ValueError(f"its dimension names are {_short(names)} for the shape {shape}")
    sharding = sharding_of(codecs, part)
    chunk = part if sharding is None else sharding.chunk_shape
    if math.prod(shape) * type.stored.itemsize >= MAX_ARRAY_BYTES:
        raise ValueError(f"an array of its shape {shape} takes more than 2^62 bytes")
    if (chunk_bytes := math.prod(chunk) * type.stored.itemsize) > MAX_CHUNK_BYTES:
        raise ValueError(
            f"its chunks of shape {chunk} take {chunk_bytes:,} bytes each when decoded, expected "
            f"at most {MAX_CHUNK_BYTES:,}"
        )
    return ArrayMetadata(
        name=node.name,
        version=node.version,
        shape=shape,
        type=type,
        file_shape=part,
        fill_value=fill_value(node.document.get("fill_value"), type),
        codecs=codecs if sharding is None else sharding.codecs,
        sharding=sharding,
        order=order,
        keys=keys,
        dimension_names=None if names is None else tuple(names),
        attributes=node.attributes,
        document=node.document,
    )


def _lengths(what: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        raise ValueError(f"its {what} is {_short(value)}")
    if not all(type(length) is int and 0 <= length < MAX_ARRAY_BYTES for length in value):
        raise ValueError(f"its {what} is {_short(value)}")
    return tuple(value)


def _one_of(what: str, value: object, allowed: tuple[Any, ...]) -> Any:
    if not any(type(value) is type(each) and value == each for each in allowed):
        raise ValueError(f"its {what} is {_short(value)}, expected one of {list(allowed)}")
    return value


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
