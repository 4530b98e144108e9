"""Decode one column of one Arrow record batch, from its own bytes.

A chunk is the nodes and buffers that make up a column in a record batch. An index notes them
(`ArrowNotes`), so that opening a shard needs no request.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import CorruptShardError
from penstock.cache.base import machine_remedy
from penstock.readers.formats.arrow.ipc_metadata import CODECS
from penstock.readers.formats.tables import ShardUnits, values_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.arrow.ipc_metadata import BatchMetadata
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.tables import Tensor
    from penstock.readers.types import Encoded

_MOST_TIMES, _FREE_BYTES = 1000, 2**28
_MAX_DEPTH = 32
_LISTS: tuple[tuple[Any, Any], ...] = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


@dataclass(slots=True)
class NodeCursor:
    """Where the next array's nodes, buffers and variadic counts begin."""

    node: int = 0
    buffer: int = 0
    view: int = 0


def storage_type(arrow: Any, depth: int = 0) -> Any:
    """A type without extensions, as it lies in a file. Raises ValueError for too deep a one."""
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
    """The types of the arrays inside of one."""
    if pa.types.is_dictionary(arrow):
        return []
    return [arrow.field(i).type for i in range(arrow.num_fields)]


def own_buffers(arrow: Any, variadic: Callable[[], int]) -> int:
    """How many buffers an array has itself. variadic: the next count of views' buffers."""
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
    """Go over an array and those inside of it: the node, first buffer and buffers of each, and of
    an array of views how many of these the views look into."""

    def views() -> int:
        if at.view >= len(variadic) or not 0 <= variadic[at.view] < 2**16:
            raise ValueError("it doesn't tell how many buffers its views have")
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
    """The nodes, buffers (by number) and counts of views' buffers that make up a column."""

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
    """Go over a column and note what its part at a path is made of, structs around it too. path:
    names below the column; into: None passes over it."""
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
    taken = False
    for i in range(arrow.num_fields):
        field = arrow.field(i)
        is_it = field.name == path[0] and not taken
        taken = taken or is_it
        pick_column(field.type, path[1:], at, variadic, into if is_it else None)


def pruned_type(arrow: Any, path: Sequence[str]) -> Any:
    """A column's type with nothing but what lies at a path in it."""
    if not path:
        return arrow
    inside = arrow.field(arrow.get_field_index(path[0]))
    return pa.struct([inside.with_type(pruned_type(inside.type, path[1:]))])


def make_array(
    arrow: Any, nodes: Iterator[tuple[int, int]], buffers: Iterator[Any], variadic: Iterator[int]
) -> Any:
    """The array of a storage type. nodes: length and nulls of it and those inside of it; buffers:
    of them. Of a dictionary its indices. Raises ValueError."""
    length, nulls = next(nodes)
    kind = arrow.index_type if pa.types.is_dictionary(arrow) else arrow
    count = own_buffers(kind, lambda: next(variadic))
    own = [next(buffers) for _ in range(count)]
    if count and not nulls:
        own[0] = None if not pa.types.is_union(kind) else own[0]
    inside = [make_array(each, nodes, buffers, variadic) for each in child_types(arrow)]
    if pa.types.is_null(kind):
        return pa.nulls(length)
    if pa.types.is_struct(kind):  # a dictionary inside is its places so far
        kind = pa.struct([kind.field(i).with_type(each.type) for i, each in enumerate(inside)])
    elif [each.type for each in inside] != child_types(kind):  # pyarrow would end the process
        raise ValueError(f"it holds {arrow}, and a dictionary there isn't read")
    if pa.types.is_run_end_encoded(kind):
        own = [None]
    return pa.Array.from_buffers(kind, length, own, -1 if nulls else 0, 0, inside)


def plain_buffer(data: Encoded, start: int, size: int, codec: int) -> Any:
    """A buffer of a record batch, decompressed. start: in data. Raises ValueError for damage."""
    part = data[start : start + size]
    if not codec or not size:
        return pa.py_buffer(part)
    told = int.from_bytes(part[:8].tobytes(), "little", signed=True)
    if told == -1:  # it didn't shrink
        return pa.py_buffer(part[8:])
    if size < 8 or not 0 <= told <= max(_FREE_BYTES, _MOST_TIMES * size):
        raise ValueError(f"a buffer of {size:,} bytes would take {told:,} decompressed")
    if not told:
        return pa.py_buffer(np.empty(0, np.uint8))
    try:
        return pa.Codec(CODECS[codec]).decompress(pa.py_buffer(part[8:]), told)
    except (pa.ArrowException, OSError) as error:
        if machine_remedy(error) is not None:
            raise
        raise ValueError(f"its bytes are damaged ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChunk:
    """How a chunk is decoded.

    form: number of its type; codec: in `messages.CODECS`. nodes: length and nulls of each array;
    buffers: place in the chunk, and size; views: buffers of each array of views. dictionaries: the
    chunks that hold the values of its dictionary, in order.
    """

    form: int
    codec: int
    nodes: tuple[tuple[int, int], ...]
    buffers: tuple[tuple[int, int], ...]
    views: tuple[int, ...]
    dictionaries: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """As `of_json` reads it."""
        told = (self.nodes, self.buffers, self.views, self.dictionaries)
        return [self.form, self.codec, *(list(each) for each in told)]

    @classmethod
    def of_json(cls, told: Any) -> ColumnChunk:
        """Raises ValueError, TypeError."""
        form, codec, nodes, buffers, views, dictionaries = told
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
    """Where a chunk lies: bytes [start, start + size) of its file."""

    start: int
    size: int


def chunk_of(
    batch: BatchMetadata, types: Sequence[Any], column: int, path: Sequence[str], *, form: int
) -> tuple[ColumnChunk, ChunkPlace, ColumnParts]:
    """The chunk of a column, or of what lies at a path below it. types: of the record batch's
    columns, as they lie. Raises ValueError where its nodes and buffers are too few."""
    at, parts = NodeCursor(), ColumnParts([], [], [])
    for number, arrow in enumerate(types[: column + 1]):
        is_it = number == column
        pick_column(arrow, path if is_it else (), at, batch.variadic, parts if is_it else None)
    if at.node > len(batch.nodes) or at.buffer > len(batch.buffers):
        raise ValueError("a record batch of it lacks columns that its schema has")
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


def form_of(column: Any, path: Sequence[str]) -> bytes:
    """The type of chunks of a column, or of what lies at a path below it, for notes."""
    arrow = pruned_type(storage_type(column), path)
    found: bytes = pa.schema([pa.field("", arrow)]).serialize().to_pybytes()
    return found


def form_to_text(form: bytes) -> str:
    """For JSON."""
    return base64.b64encode(form).decode()


def form_of_text(text: str) -> Any:
    """The Arrow type of a form. Raises ValueError."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field(0).type
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a type that can't be read ({error})") from error


def decode_chunk(
    data: Encoded,
    chunk: ColumnChunk,
    arrow: Any,
    type: FieldType,
    parts: Sequence[str],
    dictionary: Sequence[tuple[Encoded, ColumnChunk, Any]],
    tensor: Tensor | None = None,
) -> Any:
    """The table (`values.values_table`) of a chunk. arrow: its type; parts: names of the structs'
    parts inside of which the values lie; dictionary: chunks of its values; tensor: how its tensors
    are stored. Raises ValueError for
    damage."""
    array = _array(data, chunk, arrow)
    if dictionary:
        values = [_array(each, told, kind) for each, told, kind in dictionary]
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
    """An array whose innermost part are places in a dictionary, with the dictionary."""
    if parts:
        inside = arrow.field(0)
        # What stands below a null may be no place in the dictionary.
        (below,) = array.flatten()
        child = _with_dictionary(below, inside.type, values, parts[1:])
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(
            [child], fields=[pa.field(inside.name, child.type)], mask=mask
        )
    try:
        return pa.DictionaryArray.from_arrays(array, values, safe=True)
    except pa.ArrowException as error:
        raise ValueError(f"it has places beyond its dictionary ({str(error)[:200]})") from error


def units_to_json(units: ShardUnits) -> dict[str, Any]:
    """As `units_of_json` reads them."""
    return {
        "names": list(units.names),
        "files": units.files.tolist(),
        "firsts": units.firsts.tolist(),
        "extents": units.chunks.tolist(),
        "lacking": sorted(units.lacking),
    }


def units_of_json(told: Any, shard: ChunkedShardFacts) -> ShardUnits:
    """The units of a shard, checked. Raises ValueError, TypeError, KeyError."""
    units = ShardUnits(
        names=[str(name) for name in told["names"]],
        files=np.array(told["files"], np.int64),
        firsts=np.array(told["firsts"], np.int64),
        chunks=np.array(told["extents"], np.int64).reshape(-1, len(shard.schema)),
        lacking=frozenset(told["lacking"]),
    )
    counts = {len(shard.units), len(units.files), len(units.firsts), len(units.chunks)}
    if len(counts) > 1 or not len(shard.units) or int(shard.units.sum()) != shard.samples:
        raise ValueError("its units differ in number")
    if not units.chunks.min() >= -1 or int(units.chunks.max()) >= len(shard.extents):
        raise ValueError("its units have chunks that aren't there")
    if not (units.files.min() >= 0 and units.files.max() < len(units.names)):
        raise ValueError("its units lie in files that aren't there")
    if units.firsts.min() < 0:
        raise ValueError("its units begin before their files")
    return units


def tensor_of_json(told: Any) -> Tensor:
    """How tensors are stored, checked. Raises ValueError, TypeError."""
    shape, axes = (tuple(map(int, each)) for each in told)
    if sorted(axes) != list(range(len(shape))) or not shape or min(shape) < 0:
        raise ValueError("its tensors have axes that aren't there")
    return shape, axes


def torn_notes_error(error: Exception) -> CorruptShardError:
    """The error for notes that can't be so."""
    return CorruptShardError(
        f"What an index notes of a shard of tables can't be so ({error}). Run `penstock index` on "
        "the dataset again."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowNotes:
    """The units of a shard; of each field the names of structs' parts inside of which its values
    lie; how each extent is decoded, and the types of chunks, as `chunks.form_of` has them. tensors:
    how a field's tensors are stored, by its number, of those that have any."""

    units: ShardUnits
    parts: Sequence[Sequence[str]]
    chunks: Sequence[ColumnChunk]
    forms: Sequence[str]
    tensors: Mapping[int, Tensor] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As `read_notes` reads it."""
        told = {
            **units_to_json(self.units),
            "parts": [list(each) for each in self.parts],
            "chunks": [chunk.to_json() for chunk in self.chunks],
            "forms": list(self.forms),
        }
        if self.tensors:
            told["tensors"] = [[number, *tensor] for number, tensor in self.tensors.items()]
        return json.dumps(told).encode()


def read_notes(shard: ChunkedShardFacts) -> tuple[ArrowNotes, list[Any]]:
    """What was noted of a shard, and the types of its chunks. Raises CorruptShardError."""
    try:
        told = json.loads(shard.notes)
        notes = ArrowNotes(
            units=units_of_json(told, shard),
            parts=[[str(part) for part in each] for each in told["parts"]],
            chunks=[ColumnChunk.of_json(each) for each in told["chunks"]],
            forms=[str(form) for form in told["forms"]],
            tensors={
                int(number): tensor_of_json([shape, axes])
                for number, shape, axes in told.get("tensors", ())
            },
        )
        forms = [form_of_text(form) for form in notes.forms]
        _check(shard, notes)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise torn_notes_error(error) from error
    return notes, forms


def _check(shard: ChunkedShardFacts, notes: ArrowNotes) -> None:
    count = len(shard.extents)
    if len(notes.chunks) != count or len(notes.parts) != len(shard.schema):
        raise ValueError("its chunks or fields differ in number")
    for chunk, size in zip(notes.chunks, shard.extents.sizes.tolist(), strict=True):
        places = (start >= 0 and 0 <= length <= size - start for start, length in chunk.buffers)
        others = (0 <= other < count for other in chunk.dictionaries)
        if not (0 <= chunk.form < len(notes.forms) and all(places) and all(others)):
            raise ValueError("a chunk has parts that aren't there")
        if any(not 0 <= nulls <= length for length, nulls in chunk.nodes):
            raise ValueError("a chunk has arrays of no length")
