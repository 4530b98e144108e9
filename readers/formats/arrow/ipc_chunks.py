"""Decode one column of one Arrow record batch, from its own bytes.

A chunk is the nodes and buffers of a column in a record batch. The index notes them (`ArrowNotes`),
so opening a shard needs no request.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache.base import machine_remedy
from penstock.readers.formats.arrow.ipc_metadata import CODECS
from penstock.readers.formats.tables import (
    ShardUnits,
    corrupt_notes_error,
    max_decoded_bytes,
    tensor_of_json,
    values_table,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.arrow.ipc_metadata import BatchMetadata
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.tables import Tensor
    from penstock.readers.types import Encoded

_MAX_DEPTH = 32
_LISTS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


@dataclass(slots=True)
class NodeCursor:
    """The numbers of the next array's node, first buffer and variadic count in a record batch."""

    node: int = 0
    buffer: int = 0
    view: int = 0


def storage_type(arrow: Any, depth: int = 0) -> Any:
    """Return a type without extensions, as a file stores it. Raises ValueError if it nests too
    deep."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its types nest deeper than {_MAX_DEPTH}")
    if isinstance(arrow, pa.BaseExtensionType):
        return storage_type(arrow.storage_type, depth + 1)
    types = pa.types
    if types.is_struct(arrow):
        fields = [arrow.field(i) for i in range(arrow.num_fields)]
        return pa.struct([field.with_type(storage_type(field.type, depth + 1)) for field in fields])
    if types.is_fixed_size_list(arrow):
        return pa.list_(storage_type(arrow.value_type, depth + 1), arrow.list_size)
    for is_kind, make in _LISTS:
        if is_kind(arrow):
            return make(storage_type(arrow.value_type, depth + 1))
    if types.is_run_end_encoded(arrow):
        return pa.run_end_encoded(arrow.run_end_type, storage_type(arrow.value_type, depth + 1))
    if types.is_dictionary(arrow):
        return pa.dictionary(arrow.index_type, storage_type(arrow.value_type, depth + 1))
    return arrow


def child_types(arrow: Any) -> list[Any]:
    """Return the types of the arrays that an array contains."""
    if pa.types.is_dictionary(arrow):
        return []
    return [arrow.field(i).type for i in range(arrow.num_fields)]


def own_buffers(arrow: Any, variadic: Callable[[], int]) -> int:
    """Return how many buffers an array has, without those of the arrays inside it.

    variadic: returns the next count of buffers of views.
    """
    types = pa.types
    if types.is_null(arrow) or types.is_run_end_encoded(arrow):
        return 0
    if arrow in (pa.string_view(), pa.binary_view()):
        return 2 + variadic()
    if types.is_struct(arrow) or types.is_fixed_size_list(arrow):
        return 1
    if types.is_union(arrow):
        return 1 if arrow.mode == "sparse" else 2
    is_bytes = types.is_binary(arrow) or types.is_string(arrow)
    is_large = types.is_large_binary(arrow) or types.is_large_string(arrow)
    is_viewed = types.is_list_view(arrow) or types.is_large_list_view(arrow)
    return 3 if is_bytes or is_large or is_viewed else 2


def skip_array(
    arrow: Any, at: NodeCursor, variadic: Sequence[int]
) -> Iterator[tuple[int, int, int, int | None]]:
    """Yield the node, first buffer and number of buffers of an array and of each array inside it,
    and of an array of views the number of data buffers. Moves the cursor behind them."""

    def views() -> int:
        if at.view >= len(variadic) or not 0 <= variadic[at.view] < 2**16:
            raise ValueError("it lacks the number of buffers of its views")
        at.view += 1
        return variadic[at.view - 1]

    stack = [arrow]
    while stack:
        here = stack.pop()
        first = at.view
        count = own_buffers(here, views)
        yield at.node, at.buffer, count, count - 2 if at.view > first else None
        at.node += 1
        at.buffer += count
        stack += reversed(child_types(here))


@dataclass(slots=True)
class ColumnParts:
    """The nodes and buffers of a column, by number, and the counts of its views' data buffers."""

    nodes: list[int]
    buffers: list[int]
    views: list[int]


def pick_column(
    arrow: Any,
    path: Sequence[str],
    at: NodeCursor,
    variadic: Sequence[int],
    into: ColumnParts | None,
) -> None:
    """Collect the nodes and buffers of the part of a column at a path, and of the structs around
    it. Moves the cursor behind the column.

    path: names below the column. into: None skips the column.
    """
    if into is None or not path:
        for node, buffer, count, views in skip_array(arrow, at, variadic):
            if into is not None:
                into.nodes.append(node)
                into.buffers += range(buffer, buffer + count)
                if views is not None:
                    into.views.append(views)
        return
    into.nodes.append(at.node)
    into.buffers.append(at.buffer)
    at.node, at.buffer = at.node + 1, at.buffer + 1
    names = [arrow.field(i).name for i in range(arrow.num_fields)]
    wanted = names.index(path[0]) if path[0] in names else -1
    for i in range(arrow.num_fields):
        pick_column(arrow.field(i).type, path[1:], at, variadic, into if i == wanted else None)


def pruned_type(arrow: Any, path: Sequence[str]) -> Any:
    """Return a column's type with only the part at a path and the structs around it."""
    if not path:
        return arrow
    inside = arrow.field(arrow.get_field_index(path[0]))
    return pa.struct([inside.with_type(pruned_type(inside.type, path[1:]))])


def make_array(
    arrow: Any, nodes: Iterator[tuple[int, int]], buffers: Iterator[Any], variadic: Iterator[int]
) -> Any:
    """Return an array of a storage type; of a dictionary array its indices.

    nodes: length and nulls of the array and of those inside it; buffers: theirs. Raises ValueError
    for a dictionary inside another type than a struct.
    """
    length, nulls = next(nodes)
    kind = arrow.index_type if pa.types.is_dictionary(arrow) else arrow
    count = own_buffers(kind, lambda: next(variadic))
    own = [next(buffers) for _ in range(count)]
    if count and not nulls:
        own[0] = None if not pa.types.is_union(kind) else own[0]
    inside = [make_array(each, nodes, buffers, variadic) for each in child_types(arrow)]
    if pa.types.is_null(kind):
        return pa.nulls(length)
    if pa.types.is_struct(kind):  # a dictionary inside is only its indices so far
        kind = pa.struct([kind.field(i).with_type(each.type) for i, each in enumerate(inside)])
    elif [each.type for each in inside] != child_types(kind):  # pyarrow would abort the process
        raise ValueError(f"it holds {arrow}, and a dictionary inside it isn't read")
    if pa.types.is_run_end_encoded(kind):
        own = [None]
    return pa.Array.from_buffers(kind, length, own, -1 if nulls else 0, 0, inside)


def plain_buffer(data: Encoded, start: int, size: int, codec: int) -> Any:
    """Return a buffer of a record batch, decompressed. start: its first byte in data. Raises
    ValueError for damage."""
    part = data[start : start + size]
    if not codec or not size:
        return pa.py_buffer(part)
    decoded = int.from_bytes(part[:8].tobytes(), "little", signed=True)
    if decoded == -1:  # stored without compression, because it didn't shrink
        return pa.py_buffer(part[8:])
    if size < 8 or not 0 <= decoded <= max_decoded_bytes(size):
        raise ValueError(f"a buffer of {size:,} bytes would take {decoded:,} decompressed")
    if not decoded:
        return pa.py_buffer(np.empty(0, np.uint8))
    try:
        return pa.Codec(CODECS[codec]).decompress(pa.py_buffer(part[8:]), decoded)
    except (pa.ArrowException, OSError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"its bytes are damaged ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChunk:
    """The metadata by which a chunk is decoded.

    form: the number of its type in ArrowNotes; codec: a number into CODECS. nodes: length and nulls
    of each array; buffers: first byte in the chunk, and size; views: data buffers of each array of
    views. dictionaries: the chunks that hold the values of its dictionary, in order.
    """

    form: int
    codec: int
    nodes: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[int, int], ...]
    views: tuple[int, ...]
    dictionaries: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """Return a list that `of_json` reads."""
        lists = (self.nodes, self.buffers, self.views, self.dictionaries)
        return [self.form, self.codec, *(list(each) for each in lists)]

    @classmethod
    def of_json(cls, notes: Any) -> ColumnChunk:
        """Read a chunk from a list. Raises ValueError, TypeError."""
        form, codec, nodes, buffers, views, dictionaries = notes
        return cls(
            form=int(form),
            codec=int(codec),
            nodes=tuple((int(a), int(b)) for a, b in nodes),
            buffers=tuple((int(a), int(b)) for a, b in buffers),
            views=tuple(map(int, views)),
            dictionaries=tuple(map(int, dictionaries)),
        )


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """The bytes [start, start + size) of a file that hold a chunk."""

    start: int
    size: int


def chunk_of(
    batch: BatchMetadata, types: Sequence[Any], column: int, path: Sequence[str], *, form: int
) -> tuple[ColumnChunk, ChunkPlace, ColumnParts]:
    """Return the chunk of a column, or of its part at a path; its place; and its parts.

    types: the storage types of the record batch's columns. Raises ValueError if the batch has too
    few nodes or buffers.
    """
    at, parts = NodeCursor(), ColumnParts([], [], [])
    for arrow in types[:column]:
        pick_column(arrow, (), at, batch.variadic, None)
    pick_column(types[column], path, at, batch.variadic, parts)
    if at.node > len(batch.nodes) or at.buffer > len(batch.buffers):
        raise ValueError("one of its record batches lacks columns of its schema")
    buffers = batch.buffers[parts.buffers]
    some = buffers[buffers[:, 1] > 0]
    start = int(some[:, 0].min()) if len(some) else 0
    end = int((some[:, 0] + some[:, 1]).max()) if len(some) else 0
    chunk = ColumnChunk(
        form=form,
        codec=batch.codec,
        nodes=tuple((int(a), int(b)) for a, b in batch.nodes[parts.nodes]),
        buffers=tuple((int(a) - start if b else 0, int(b)) for a, b in buffers),
        views=tuple(parts.views),
    )
    return chunk, ChunkPlace(start, end - start), parts


def type_to_text(arrow: Any) -> str:
    """Return an Arrow type as text that `type_of_text` reads."""
    return base64.b64encode(pa.schema([pa.field("", arrow)]).serialize()).decode()


def type_of_text(text: str) -> Any:
    """Read an Arrow type. Raises ValueError."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field(0).type
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a type can't be read ({error})") from error


def decode_chunk(
    data: Encoded,
    chunk: ColumnChunk,
    arrow: Any,
    type: FieldType,
    parts: Sequence[str],
    dictionary: Sequence[tuple[Encoded, ColumnChunk, Any]],
    tensor: Tensor | None = None,
) -> Any:
    """Decode a chunk, and return its values as `values_table` does.

    arrow: its type. parts: the names that lead through structs to the values. dictionary: bytes,
    chunk and type of each part of its dictionary. tensor: how its tensors are stored. Raises
    ValueError for damage.
    """
    array = _array(data, chunk, arrow)
    if dictionary:
        values = [_array(*each) for each in dictionary]
        array = _with_dictionary(array, arrow, pa.concat_arrays(values), parts)
    try:
        return values_table(type, array, parts, tensor)
    except pa.ArrowException as error:
        raise ValueError(f"its values can't be read ({str(error)[:200]})") from error


def _array(data: Encoded, chunk: ColumnChunk, arrow: Any) -> Any:
    buffers = (plain_buffer(data, start, size, chunk.codec) for start, size in chunk.buffers)
    try:
        array = make_array(arrow, iter(chunk.nodes), buffers, iter(chunk.views))
        array.validate(full=True)
    except (pa.ArrowException, OSError, StopIteration, TypeError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"its bytes are damaged ({str(error)[:200]})") from error
    return array


def _with_dictionary(array: Any, arrow: Any, values: Any, parts: Sequence[str]) -> Any:
    """Return an array whose innermost part is a dictionary array instead of its indices."""
    if parts:
        inside = arrow.field(0)
        # Without the nulls of the struct: an index under one may be outside of the dictionary.
        (below,) = array.flatten()
        child = _with_dictionary(below, inside.type, values, parts[1:])
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(
            [child], fields=[pa.field(inside.name, child.type)], mask=mask
        )
    try:
        return pa.DictionaryArray.from_arrays(array, values, safe=True)
    except pa.ArrowException as error:
        raise ValueError(f"it has indices beyond its dictionary ({str(error)[:200]})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowNotes:
    """The notes of a shard in an index, by which it is read without its files' metadata.

    parts: of each field, the names that lead through structs to its values. chunks: of each extent;
    types: of chunks, by `ColumnChunk.form`, as `type_to_text` returns them. tensors: how the
    tensors of a field are stored, by the field's number.
    """

    units: ShardUnits
    parts: Sequence[Sequence[str]]
    chunks: Sequence[ColumnChunk]
    types: Sequence[str]
    tensors: Mapping[int, Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return JSON that `read_notes` reads."""
        notes = {
            **self.units.to_json(),
            "parts": [list(each) for each in self.parts],
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "forms": list(self.types),
        }
        if self.tensors:
            notes["tensors"] = [[number, *tensor] for number, tensor in self.tensors.items()]
        return json.dumps(notes).encode()


def read_notes(shard: ChunkedShardFacts) -> tuple[ArrowNotes, list[Any]]:
    """Return the notes of a shard, checked, and the Arrow types of its chunks. Raises
    CorruptShardError."""
    try:
        found = json.loads(shard.notes)
        notes = ArrowNotes(
            units=ShardUnits.of_json(found, shard),
            parts=[[str(part) for part in each] for each in found["parts"]],
            chunks=[ColumnChunk.of_json(each) for each in found["chunks"]],
            types=[str(text) for text in found["forms"]],
            tensors={
                int(number): tensor_of_json([shape, axes])
                for number, shape, axes in found.get("tensors", ())
            },
        )
        types = [type_of_text(text) for text in notes.types]
        _check(shard, notes)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise corrupt_notes_error(error) from error
    return notes, types


def _check(shard: ChunkedShardFacts, notes: ArrowNotes) -> None:
    count = len(shard.extents)
    if len(notes.chunks) != count or len(notes.parts) != len(shard.schema):
        raise ValueError("the number of its chunks or fields is wrong")
    for chunk, size in zip(notes.chunks, shard.extents.sizes.tolist(), strict=True):
        places = (start >= 0 and 0 <= length <= size - start for start, length in chunk.buffers)
        others = (0 <= other < count for other in chunk.dictionaries)
        if not (0 <= chunk.form < len(notes.types) and all(places) and all(others)):
            raise ValueError("a chunk has parts that don't exist")
        if any(not 0 <= nulls <= length for length, nulls in chunk.nodes):
            raise ValueError("a chunk has arrays of invalid lengths")
