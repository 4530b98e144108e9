"""Parse the metadata documents of Zarr hierarchies and arrays; every number is bounded before use.

Documents are JSON of bounded size. Their authors aren't trusted, so every value is checked. Damage
raises ValueError or DatasetError. An array that can't be a tensor raises UnsupportedArrayError with
the reason. The document of an array of version 2 is translated to the form of version 3, so one
parser and one chain of codecs (`zarr_codecs`) serve both. A shard of version 3 is a file of many
inner chunks, with an index of their locations.

zarr's own metadata classes were measured instead: importing them takes 0.23 s, in each process that
opens an index; they parse an array in 52 µs (this module: 19 µs); they accept 17 of the 98 hostile
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
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.files import are_unsafe, encoded_name
from penstock.readers.formats.array_windows import ChunkGrid
from penstock.readers.types import Encoded, Ints, Rejection, array_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Document = Mapping[str, Any]

MAX_DOCUMENT_BYTES = 4 * 2**20
"""The largest metadata document of one node."""

MAX_CONSOLIDATED_BYTES = 24 * 2**20
"""The largest document with the metadata of a whole hierarchy: about 40,000 arrays. Parsed by
Python, it takes up to 24 times that size."""

_MAX_DEPTH = 64

# -- documents and nodes


class UnsupportedArrayError(Exception):
    """An intact array can't be delivered as tensors. The message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Node:
    """An array or a group of a hierarchy, with its documents as parsed JSON, otherwise unchecked.

    name: its path in the hierarchy, "" for the root. version: of Zarr. document: of version 2, the
    contents of .zarray or .zgroup; of version 3, of zarr.json.
    """

    name: str
    kind: Literal["array", "group"]
    version: int
    document: Document
    attributes: Document = field(default_factory=dict)


def read_document(data: bytes, *, name: str, is_consolidated: bool = False) -> dict[str, Any]:
    """Parse the JSON object in a metadata file. name: of the file, for messages. Raises
    DatasetError."""
    limit = MAX_CONSOLIDATED_BYTES if is_consolidated else MAX_DOCUMENT_BYTES
    try:
        if len(data) > limit:
            raise ValueError(f"it has {len(data):,} bytes, expected at most {limit:,}")
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError(f"it holds a {type(document).__name__}")
        if _depth(document) > _MAX_DEPTH:
            raise ValueError(f"its values are nested deeper than {_MAX_DEPTH} levels")
    except (ValueError, RecursionError) as error:
        raise _damaged(name, f"it isn't a JSON object ({str(error)[:100]})") from None
    return document


def _depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def read_node(name: str, read: Callable[[str], Document | None]) -> Node | None:
    """Make the node at a path; None if there is none. read: returns the document in one of the
    node's files, None if there is no such file. Raises DatasetError."""
    version, document = 3, read("zarr.json")
    kind: Any
    attributes: Any
    if document is not None:
        kind, attributes = document.get("node_type"), document.get("attributes")
    else:
        version, kind, document = 2, "array", read(".zarray")
        if document is None:
            kind, document = "group", read(".zgroup")
        if document is None:
            return None
        attributes = read(".zattrs")
    attributes = attributes or {}
    try:
        _one_of("zarr_format", document.get("zarr_format"), (version,))
        _one_of("node_type", kind, ("array", "group"))
        if not isinstance(attributes, dict):
            raise ValueError(f"its attributes are {_short(attributes)}, expected an object")
    except ValueError as error:
        raise _damaged(name, str(error)) from None
    return Node(name=name, kind=kind, version=version, document=document, attributes=attributes)


def is_path(path: str) -> bool:
    """Return True for the path of a node: names that are separated by slashes; "" for the root."""
    name = encoded_name(path)
    return not path or (name is not None and not are_unsafe([name]))


def consolidated_nodes(document: Document, *, version: int, name: str) -> dict[str, Node]:
    """Return the nodes that consolidated metadata list, sorted by path. name: of its file, for
    messages. Raises DatasetError."""
    metadata = document.get("metadata")
    if not isinstance(metadata, dict):
        raise _damaged(name, 'its consolidated metadata have no "metadata"')
    folders: dict[str, dict[str, Document]] = {}
    for key, value in sorted(metadata.items()):
        path, _, file = (key, "", "zarr.json") if version == 3 else key.rpartition("/")
        if not is_path(path):
            raise _damaged(name, f"it names a node {_short(path)}, which isn't a valid path")
        if not isinstance(value, dict):
            raise _damaged(name, f"{_short(key)} isn't an object")
        folders.setdefault(path, {})[file] = value
    nodes = [read_node(path, files.get) for path, files in folders.items()]
    return {node.name: node for node in nodes if node is not None}


def _short(value: object) -> str:
    return repr(value)[:80]


def _damaged(name: str, reason: str) -> DatasetError:
    return DatasetError(
        f"{name or 'The root of the hierarchy'}: this isn't valid Zarr metadata: {reason}. Write "
        "it again, or remove the node."
    )


# -- codecs and shards

MAX_CODECS = 32
"""The most codecs of one chain."""

NUMCODECS = "numcodecs."
"""The prefix in version 3 of the names of numcodecs' own codecs."""

OBJECT_CODECS = {
    *("pickle", "json2", "msgpack2", "categorize", "vlen-utf8", "vlen-bytes", "vlen-array")
}
"""Codecs of Python objects; unpickling could run any code."""


class CodecSpec(NamedTuple):
    """A codec of a chain, as it is named in version 3, and its configuration."""

    name: str
    configuration: Document


def _specs(codecs: object) -> tuple[CodecSpec, ...]:
    """Parse a chain in the order of encoding. Raises ValueError or UnsupportedArrayError."""
    if not isinstance(codecs, list) or not 0 < len(codecs) <= MAX_CODECS:
        raise ValueError(f"its codecs are {_short(codecs)}, expected a list of 1 to {MAX_CODECS}")
    specs = tuple(CodecSpec(*_named("codec", codec)) for codec in codecs)
    for name, _ in specs:
        if name.removeprefix(NUMCODECS) in OBJECT_CODECS:
            raise UnsupportedArrayError(
                f"its codec {name!r} decodes to Python objects or texts, which can't be a tensor"
            )
    return specs


MISSING = -1
"""Marks an inner chunk in a parsed index that isn't stored, so that all of it is fill values."""

MAX_INNER_CHUNKS = 2**22
"""The most inner chunks of one shard: an index of 64 MiB."""

_ENTRY_BYTES, _CRC_BYTES = 16, 4
_NO_CHUNK = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The layout of inner chunks in the file of a shard.

    counts: inner chunks along each axis. is_at_end: the index is at the end of the file instead of
    its start. has_checksum: a CRC-32C follows the index. byte_order: of the index's numbers.
    """

    counts: tuple[int, ...]
    is_at_end: bool
    has_checksum: bool
    byte_order: str

    @property
    def index_bytes(self) -> int:
        """The size of the index in a file."""
        return math.prod(self.counts) * _ENTRY_BYTES + _CRC_BYTES * self.has_checksum

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
        """Return the locations of the inner chunks: int64, shape (chunks, 2), the first byte in the
        file and the number of bytes; both are MISSING if a chunk isn't stored.

        data: the bytes of index_range(), uint8. Raises ValueError for an index that is damaged, or
        that points outside of the file, into itself, or to the same bytes twice.
        """
        begin, end = self.index_range(file_bytes)
        entries = data[: math.prod(self.counts) * _ENTRY_BYTES].tobytes()
        checksum = int.from_bytes(data[len(entries) :].tobytes(), "little")
        if self.has_checksum and crc32c(entries) != checksum:
            raise ValueError("the index of a shard is damaged: its CRC-32C differs")
        pairs = np.frombuffer(entries, f"{self.byte_order}u8").astype(np.uint64).reshape(-1, 2)
        is_stored = (pairs != _NO_CHUNK).any(axis=1)
        first, count = pairs[is_stored].T
        limit = np.uint64(file_bytes)
        if bool(np.any((first > limit) | (count > limit - np.minimum(first, limit)))):
            raise ValueError(f"a shard's index points outside of its file of {file_bytes:,} bytes")
        found = np.full(pairs.shape, MISSING, np.int64)
        found[is_stored] = pairs[is_stored]
        spans = np.append(found[found[:, 1] > 0], [[begin, end - begin]], axis=0)
        spans = spans[np.argsort(spans[:, 0], kind="stable")]
        if bool(np.any(spans.sum(axis=1)[:-1] > spans[1:, 0])):
            raise ValueError(
                "the index of a shard places several chunks, or a chunk and itself, in the same "
                "bytes"
            )
        return found


def _sharding(
    spec: CodecSpec, shape: tuple[int, ...]
) -> tuple[Sharding, tuple[int, ...], tuple[CodecSpec, ...]] | None:
    """Return the layout of a shard of this shape, and the shape and codecs of its inner chunks;
    None if its index has codecs of unknown size, so that a whole file is one chunk.

    Raises ValueError or UnsupportedArrayError.
    """
    given = spec.configuration
    chunk = _lengths("shape of inner chunks", given.get("chunk_shape"), axes=len(shape))
    if 0 in chunk or any(length % part for length, part in zip(shape, chunk, strict=True)):
        raise ValueError(
            f"its shards of shape {shape} have inner chunks of shape {chunk}, which don't divide "
            "them into whole chunks"
        )
    counts = tuple(length // part for length, part in zip(shape, chunk, strict=True))
    if math.prod(counts) > MAX_INNER_CHUNKS:
        raise ValueError(
            f"its shards have {math.prod(counts):,} inner chunks each, expected at most "
            f"{MAX_INNER_CHUNKS:,}"
        )
    place = _one_of("index_location", given.get("index_location", "end"), ("start", "end"))
    index = _specs(given.get("index_codecs"))
    if [name for name, _ in index] not in (["bytes"], ["bytes", "crc32c"]):
        return None
    is_at_end, order = place == "end", byte_order_of(index[0])
    layout = Sharding(
        counts=counts, is_at_end=is_at_end, has_checksum=len(index) > 1, byte_order=order
    )
    return layout, chunk, _specs(given.get("codecs"))


def byte_order_of(codec: CodecSpec) -> Literal["<", ">"]:
    """Return numpy's sign for the byte order of the codec `bytes`. Raises ValueError."""
    endian = codec.configuration.get("endian", sys.byteorder)
    return "<" if _one_of("endian", endian, ("little", "big")) == "little" else ">"


# -- data types and fill values

_DTYPE = re.compile(
    r"(bool|u?int\d+|float\d+|complex\d+|[<>|=]?[biufcmM]\d+|datetime64|timedelta64)"
    r"(\[\d{0,9}[a-zA-Z]{1,7}\])?"
)
"""The numbers, dates and durations of both versions, as numpy names them."""

_MAX_TEXT = 64


def data_type(given: object) -> np.dtype[Any]:
    """Parse the data type of either version: of version 2 with its byte order; int64 for dates and
    durations, which are delivered as a number of units.

    Raises ValueError, or UnsupportedArrayError for a type that can't be a tensor.
    """
    name, options = _named("data type", "records" if isinstance(given, list) else given)
    text = name
    if name in ("numpy.datetime64", "numpy.timedelta64"):
        text = f"{name[6:]}[{options.get('scale_factor', 1)}{options.get('unit')}]"
    text = text.replace("μ", "u")
    with suppress(TypeError, ValueError, OverflowError):
        dtype = np.dtype(text if _DTYPE.fullmatch(text) else object)
        if dtype.kind in "mM":
            return np.dtype(f"{dtype.byteorder}i8")
        if array_codec(dtype.str) is not None:
            return dtype
    raise UnsupportedArrayError(
        f"its data type {_short(given)} can't be a tensor: only booleans, integers, floats, "
        "complex numbers and times can"
    )


def fill_value(value: object, dtype: np.dtype[Any]) -> np.generic[Any]:
    """Return the value of missing chunks in a dtype; zero if the metadata has none.

    Raises ValueError.
    """
    is_pair = dtype.kind == "c" and isinstance(value, list) and len(value) == 2
    parts: Any = value if is_pair else [value]
    half = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    found = np.zeros(1, dtype)
    try:
        with np.errstate(over="ignore"):
            for place, part in enumerate(parts):
                found.view(half)[place] = _number(part, half)
    except (ValueError, TypeError, OverflowError):
        shown = f"{_short(value)}, which {dtype.name} can't represent"
        raise ValueError(f"its fill value is {shown}") from None
    return cast("np.generic[Any]", found[0])


def _number(value: Any, dtype: np.dtype[Any]) -> Any:
    """Parse a number that a dtype can hold. Raises ValueError, TypeError or OverflowError."""
    if value is None:
        return 0
    if value == "NaT" and dtype == np.int64:
        return np.iinfo(dtype).min
    if isinstance(value, str):
        if len(value) > _MAX_TEXT:
            raise ValueError("a text that is too long")
        if value.startswith("0x") and dtype.kind == "f":
            (number,) = np.frombuffer(bytes.fromhex(value[2:]), dtype.newbyteorder(">"))
            return number
        value = int(value) if dtype.kind in "iu" else float(value)
    if not isinstance(value, int | float) or (isinstance(value, bool) and dtype.kind != "b"):
        raise TypeError("not a number")
    if dtype.kind == "f":
        return float(value)
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if value != int(value) or not least <= value <= most:
        raise OverflowError("not an integer in the range")
    return int(value)


# -- arrays

MAX_CHUNK_BYTES = 2**31
"""The largest decoded chunk (inner chunk of a shard); most codecs can't decode more."""

MAX_ARRAY_BYTES = 2**62
"""The largest decoded array, so that every offset in it is an int64."""

_MAX_DIMENSIONS = 32
_V3_KEYS = {
    *("zarr_format", "node_type", "data_type", "shape", "chunk_grid", "chunk_key_encoding"),
    *("fill_value", "codecs", "attributes", "storage_transformers", "dimension_names"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayMetadata:
    """The checked metadata of an array.

    node: its documents. dtype: as it is delivered, of the machine's byte order; int64 for dates and
    durations. grid: what is decoded as a whole: chunks, or the inner chunks of shards. files: the
    same array in files, each a chunk or a shard. Any chunk or file may be missing. fill_value: the
    value of chunks that aren't stored. codecs: of a chunk of the grid, in the order of encoding.
    sharding: the layout of shards; None if a file is one chunk. prefix, separator: make the names
    of files: of the prefix and a file's coordinates, separated. dimension_names: None if there are
    none; of version 2, as xarray writes them.
    """

    node: Node
    dtype: np.dtype[Any]
    grid: ChunkGrid
    files: ChunkGrid
    fill_value: np.generic[Any]
    codecs: tuple[CodecSpec, ...]
    sharding: Sharding | None
    prefix: str
    separator: str
    dimension_names: tuple[str | None, ...] | None

    @property
    def name(self) -> str:
        """The path in the hierarchy."""
        return self.node.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.grid.shape


def parse_array(node: Node) -> ArrayMetadata | Rejection:
    """Parse the documents of an array; return a Rejection if it can't be delivered as tensors.
    Raises DatasetError if they are damaged."""
    try:
        return _parse(node, _translated(node) if node.version == 2 else node.document)
    except UnsupportedArrayError as error:
        return Rejection(str(error))
    except ValueError as error:
        raise DatasetError(
            f"{node.name or 'The array'}: its metadata is damaged: {error}. Write the array again."
        ) from None


def _translated(node: Node) -> Document:
    """Return the document of an array of version 2 in the form of version 3. Its dtype, which has
    the byte order, and its fill value are unchanged. Raises ValueError."""
    given, names = node.document, node.attributes.get("_ARRAY_DIMENSIONS")
    filters, compressor, shape = given.get("filters"), given.get("compressor"), given.get("shape")
    has_names = isinstance(names, list) and isinstance(shape, list) and len(names) == len(shape)
    filters = [] if filters is None else filters
    if not isinstance(filters, list):
        raise ValueError(f"its filters are {_short(filters)}, expected a list or null")
    codecs: list[Any] = []
    if _one_of("order", given.get("order", "C"), ("C", "F")) == "F":
        codecs.append({"name": "transpose", "configuration": {"order": "F"}})
    is_big = isinstance(given.get("dtype"), str) and given["dtype"].startswith(">")
    codecs.append({"name": "bytes", "configuration": {"endian": "big" if is_big else "little"}})
    for codec in [*filters, *([] if compressor is None else [compressor])]:
        if not isinstance(codec, dict) or not isinstance(codec.get("id"), str):
            raise ValueError(f'one of its codecs is {_short(codec)}, wanted an object with an "id"')
        options: dict[str, Any] = {"elementsize": 4} if codec["id"] == "shuffle" else {}
        options |= {key: value for key, value in codec.items() if key != "id"}
        codecs.append({"name": NUMCODECS + codec["id"], "configuration": options})
    separator = given.get("dimension_separator", ".")
    return {
        "shape": shape,
        "data_type": given.get("dtype"),
        "fill_value": given.get("fill_value"),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": given.get("chunks")}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": separator}},
        "codecs": codecs,
        "dimension_names": names if has_names else None,
    }


def _parse(node: Node, document: Document) -> ArrayMetadata:
    """Parse a document in the form of version 3. Raises ValueError or UnsupportedArrayError."""
    grid, configuration = _named("chunk_grid", document.get("chunk_grid"))
    encoding, separators = _named("chunk_key_encoding", document.get("chunk_key_encoding"))
    keys = [
        key
        for key in document.keys() - _V3_KEYS
        if not isinstance(document[key], dict) or document[key].get("must_understand") is not False
    ]
    if grid != "regular" or encoding not in ("default", "v2") or keys:
        raise UnsupportedArrayError(
            f"its chunk grid {grid!r}, its chunk keys {encoding!r} or the keys {keys[:5]!r:.80} of "
            "its metadata aren't supported"
        )
    if document.get("storage_transformers"):
        raise UnsupportedArrayError("it has storage transformers, which aren't supported")
    prefix, usual = ("c", "/") if encoding == "default" else ("", ".")
    dtype = data_type(document.get("data_type")).newbyteorder("=")
    shape = _lengths("shape", document.get("shape"))
    part = _lengths("chunk shape", configuration.get("chunk_shape"), axes=len(shape))
    # Some writers give an axis of length 0 chunks of length 0.
    part = tuple(size or int(not length) for size, length in zip(part, shape, strict=True))
    if 0 in part:
        raise ValueError(f"its chunk shape is {part}, expected lengths of at least 1")
    if not shape:
        raise UnsupportedArrayError("it is a single number, of shape ()")
    if 0 in shape[1:]:
        raise UnsupportedArrayError(f"its samples are empty: its shape is {shape}")
    names = document.get("dimension_names")
    are_names = isinstance(names, list) and all(isinstance(name, str | None) for name in names)
    if names is not None and not (are_names and len(names) == len(shape)):
        raise ValueError(
            f"its dimension names are {_short(names)}, expected a text or null for each axis of "
            f"its shape {shape}"
        )
    codecs = _specs(document.get("codecs"))
    is_sharded = len(codecs) == 1 and codecs[0].name == "sharding_indexed"
    layout = _sharding(codecs[0], part) if is_sharded else None
    sharding, chunk, codecs = (None, part, codecs) if layout is None else layout
    if math.prod(shape) * dtype.itemsize >= MAX_ARRAY_BYTES:
        raise ValueError(f"an array of its shape {shape} takes more than 2^62 bytes")
    if (chunk_bytes := math.prod(chunk) * dtype.itemsize) > MAX_CHUNK_BYTES:
        raise ValueError(
            f"its chunks of shape {chunk} take {chunk_bytes:,} bytes each when decoded, expected "
            f"at most {MAX_CHUNK_BYTES:,}"
        )
    return ArrayMetadata(
        node=node,
        dtype=dtype,
        grid=ChunkGrid(shape=shape, chunk=chunk),
        files=ChunkGrid(shape=shape, chunk=part),
        fill_value=fill_value(document.get("fill_value"), dtype),
        codecs=codecs,
        sharding=sharding,
        prefix=prefix,
        separator=_one_of("separator", separators.get("separator", usual), (".", "/")),
        dimension_names=None if names is None else tuple(names),
    )


def _lengths(what: str, value: object, *, axes: int | None = None) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_DIMENSIONS
        or axes not in (None, len(value))
        or not all(type(length) is int and 0 <= length < MAX_ARRAY_BYTES for length in value)
    ):
        count = f"at most {_MAX_DIMENSIONS}" if axes is None else f"{axes}, one for each axis"
        raise ValueError(f"its {what} is {_short(value)}, wanted lengths below 2^62: {count}")
    return tuple(value)


def _one_of(what: str, value: object, allowed: tuple[Any, ...]) -> Any:
    if not any(type(value) is type(each) and value == each for each in allowed):
        expected = " or ".join(map(repr, allowed))
        raise ValueError(f"its {what} is {_short(value)}, expected {expected}")
    return value


def _named(what: str, value: object) -> tuple[str, Document]:
    """Parse a value that is a name, or an object with a name and a configuration. Raises
    ValueError."""
    name: object = value
    configuration: object = {}
    if isinstance(value, dict):
        name, configuration = value.get("name"), value.get("configuration") or {}
    if not isinstance(name, str) or not isinstance(configuration, dict):
        raise ValueError(
            f"its {what} is {_short(value)}, expected a name, or an object with a name and a "
            "configuration"
        )
    return name[:80], configuration
