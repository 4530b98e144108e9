"""Recognise, index and read datasets of Arrow IPC files: a folder of them, or those that a URL
names.

Their footers, and the heads of their record batches, show where each column of each batch is. A
chunk is the nodes and buffers of a column in a record batch, and is decoded from its bytes alone.
"""

from __future__ import annotations

import base64
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.cache import DatasetError
from penstock.readers.files import printable
from penstock.readers.formats.arrow.ipc_metadata import (
    CODECS,
    MAGIC,
    MAX_METADATA_BYTES,
    TAIL_BYTES,
    read_contents,
)
from penstock.readers.formats.tables import (
    StoredChunk,
    TableFile,
    TableFormat,
    TableReader,
    arrow_errors,
    columns_of,
    inside_structs,
    is_listed,
    max_decoded_bytes,
    tensor_of_json,
    values_table,
    with_types_inside,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fieldtypes import ArrayForm, FieldType
    from penstock.readers.formats.arrow.ipc_metadata import BatchMetadata, Contents
    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.chunked import ChunkedShardFacts
    from penstock.readers.formats.tables import ArrowColumn
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded


_FEATHER_V1 = b"FEA1"
_MAX_DEPTH = 32
_VIEWS = (pa.lib.Type_STRING_VIEW, pa.lib.Type_BINARY_VIEW)
_BUFFERS = {
    pa.lib.Type_NA: 0,
    pa.lib.Type_RUN_END_ENCODED: 0,
    pa.lib.Type_STRUCT: 1,
    pa.lib.Type_FIXED_SIZE_LIST: 1,
    pa.lib.Type_SPARSE_UNION: 1,
    pa.lib.Type_STRING: 3,
    pa.lib.Type_BINARY: 3,
    pa.lib.Type_LARGE_STRING: 3,
    pa.lib.Type_LARGE_BINARY: 3,
    pa.lib.Type_LIST_VIEW: 3,
    pa.lib.Type_LARGE_LIST_VIEW: 3,
}
"""The buffers of an array without those of the arrays inside it; 2 for other types. Views also have
a variable number of buffers of data."""


def storage_type(arrow: Any, depth: int = 0) -> Any:
    """Return a type without extensions, as a file stores it. Raises ValueError if it nests too
    deep."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"its types nest deeper than {_MAX_DEPTH}")
    inside = partial(storage_type, depth=depth + 1)
    if isinstance(arrow, pa.BaseExtensionType):
        return inside(arrow.storage_type)
    return with_types_inside(arrow, inside)


def _fields_inside(arrow: Any) -> list[Any]:
    """Return the fields of the arrays that an array contains. The values of a dictionary are in a
    batch of their own."""
    if pa.types.is_dictionary(arrow):
        return []
    return [arrow.field(i) for i in range(arrow.num_fields)]


ArrayType = tuple[tuple[str, ...], Any]
"""The names that lead to an array of a record batch, from its column on, and its storage type."""


def array_types(path: tuple[str, ...], arrow: Any) -> Iterator[ArrayType]:
    """Yield the arrays of a column of a storage type in the order of a record batch."""
    yield path, arrow
    for field in _fields_inside(arrow):
        yield from array_types((*path, field.name), field.type)


class IpcArray(NamedTuple):
    """An array in a record batch, from the batch's metadata.

    shape: length and nulls. buffers: first byte in the file and size of each. views: the number of
    data buffers of an array of views.
    """

    shape: list[int]
    buffers: list[list[int]]
    views: list[int]


def stored_arrays(batch: BatchMetadata, types: Sequence[ArrayType]) -> list[IpcArray]:
    """Return the arrays of a record batch. Raises ValueError if it has too few nodes or buffers."""
    found: list[IpcArray] = []
    variadic, buffers = iter(batch.variadic), iter(batch.buffers.tolist())
    try:
        for (_, arrow), shape in zip(types, batch.nodes.tolist(), strict=False):
            views = [next(variadic)] if arrow.id in _VIEWS else []
            if views and not 0 <= views[0] < 2**16:
                raise ValueError("it has an invalid number of buffers of views")
            own = [next(buffers) for _ in range(_BUFFERS.get(arrow.id, 2) + sum(views))]
            found.append(IpcArray(shape, own, views))
    except StopIteration:
        pass
    if len(found) < len(types):
        raise ValueError("one of its record batches lacks columns of its schema")
    return found


def _type_to_text(arrow: Any) -> str:
    """Return an Arrow type as text that `_type_of_text` reads."""
    return base64.b64encode(pa.schema([pa.field("", arrow)]).serialize()).decode()


def _type_of_text(text: str) -> Any:
    """Read an Arrow type. Raises ValueError."""
    with arrow_errors("a type can't be read"):
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field(0).type


def _stored_chunk(text: str, arrays: Sequence[IpcArray], codec: int, depth: int = 1) -> StoredChunk:
    """Return a chunk. text: its type; arrays: its own, of which `depth` lead to the values; codec:
    of their buffers."""
    buffers = [buffer for array in arrays for buffer in array.buffers]
    start = min((start for start, size in buffers if size), default=0)
    end = max((start + size for start, size in buffers if size), default=0)
    places = [[at - start if size else 0, size] for at, size in buffers]
    views = [count for array in arrays for count in array.views]
    nulls = [array.shape[1] for array in arrays]
    return StoredChunk(
        start=start,
        size=end - start,
        form=text,
        note=[codec, [array.shape for array in arrays], places, views, []],
        # A struct and its part may be null in different rows: this is the least that lack it.
        lacking=max(nulls[:depth]),
        nulls_inside=any(nulls[depth:]),
    )


class ArrowFile(TableFile):
    """The metadata of a file or stream. A unit is a record batch that has rows."""

    def __init__(self, entry: Entry, contents: Contents) -> None:
        """Raises DatasetError with the file's name, ValueError for types that nest too deep."""
        schema, numbers, batches, self.checksum = contents
        self.entry, self.columns = entry, columns_of(schema, printable(entry.name))
        self._batches = [each for each in batches if each.dictionary is None and each.rows]
        columns = (array_types((field.name,), storage_type(field.type)) for field in schema)
        self._types = [*chain.from_iterable(columns)]
        self._numbers = dict(enumerate(numbers))
        self._dictionaries: dict[int | None, list[BatchMetadata]] = {}
        for batch in batches:
            if batch.dictionary is not None:
                known = self._dictionaries.setdefault(batch.dictionary, [])
                if known and not batch.is_delta:
                    raise DatasetError(
                        f"{printable(entry.name)}: one of its dictionaries is replaced after some "
                        "batches, which isn't read. Write it with one dictionary "
                        "(table.unify_dictionaries()) or with deltas (emit_dictionary_deltas=True)."
                    )
                known.append(batch)
        self.rows = np.array([batch.rows for batch in self._batches], np.int64)
        self.sizes = np.array([int(b.buffers[:, 1].sum()) for b in self._batches], np.int64)

    @cached_property
    def _arrays(self) -> list[list[IpcArray]]:
        """The arrays of each unit."""
        return [stored_arrays(batch, self._types) for batch in self._batches]

    def chunks(self, column: ArrowColumn, form: ArrayForm | None) -> list[StoredChunk]:
        """Return the chunks of a column of this file."""
        path, depth = column.path, len(column.path)
        # The arrays along the path through structs, and all those inside the last one.
        chosen = [n for n, (own, _) in enumerate(self._types) if own[:depth] == path[: len(own)]]
        inside = arrow = self._types[chosen[depth - 1]][1]
        for part in reversed(path[1:]):
            arrow = pa.struct([(part, arrow)])
        is_ragged = is_listed(inside) if form is None else form.is_ragged
        text = _type_to_text(arrow)
        dictionary: list[StoredChunk] = []
        if pa.types.is_dictionary(inside) and self._batches:
            parts = self._dictionaries.get(self._numbers.get(chosen[depth - 1]), [])
            if not parts:
                raise ValueError(f'its column "{column.name}" has no dictionary')
            values = inside.value_type
            types, text_of_values = [*array_types((), values)], _type_to_text(values)
            for batch in parts:
                chunk = _stored_chunk(text_of_values, stored_arrays(batch, types), batch.codec)
                chunk.lacking *= not is_ragged
                dictionary.append(chunk)
        found: list[StoredChunk] = []
        for batch, every in zip(self._batches, self._arrays, strict=True):
            arrays = [every[number] for number in chosen]
            if arrays[0].shape[0] != batch.rows:
                raise ValueError(f'its column "{column.name}" and its batch differ in rows')
            chunk = _stored_chunk(text, arrays, batch.codec, depth)
            if pa.types.is_run_end_encoded(inside):  # its nulls are counted by run, not by row
                chunk.lacking = min(batch.rows, chunk.lacking + arrays[depth + 1].shape[1])
            chunk.lacking *= not is_ragged
            chunk.dictionary = dictionary
            found.append(chunk)
        return found

    def notes_of_fields(self, columns: Sequence[ArrowColumn]) -> dict[str, Any]:
        """Return where the values of fields are in structs, and how their tensors are stored."""
        tensors = [[n, *column.tensor] for n, column in enumerate(columns) if column.tensor]
        parts = {"parts": [column.path[1:] for column in columns]}
        return {**parts, "tensors": tensors} if tensors else parts


def make_array(
    arrow: Any, nodes: Iterator[tuple[int, int]], buffers: Iterator[Any], variadic: Iterator[int]
) -> Any:
    """Return an array of a storage type; of a dictionary array its indices.

    nodes: length and nulls of the array and of those inside it; buffers: theirs. Raises ValueError
    for a dictionary inside another type than a struct.
    """
    length, nulls = next(nodes)
    kind = arrow.index_type if pa.types.is_dictionary(arrow) else arrow
    count = _BUFFERS.get(kind.id, 2) + (next(variadic) if kind.id in _VIEWS else 0)
    own = [next(buffers) for _ in range(count)]
    if count and not nulls and not pa.types.is_union(kind):
        own[0] = None
    children = [field.type for field in _fields_inside(arrow)]
    inside = [make_array(each, nodes, buffers, variadic) for each in children]
    if pa.types.is_null(kind):
        return pa.nulls(length)
    if pa.types.is_struct(kind):  # a dictionary inside is only its indices so far
        kind = pa.struct([kind.field(i).with_type(each.type) for i, each in enumerate(inside)])
    elif [each.type for each in inside] != children:  # pyarrow would abort the process
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
    with arrow_errors("its bytes are damaged"):
        return pa.Codec(CODECS[codec]).decompress(pa.py_buffer(part[8:]), decoded)


class ColumnChunk(NamedTuple):
    """The metadata by which a chunk is decoded.

    form: the number of its type in the shard's notes; codec: a number into CODECS. nodes: length
    and nulls of each array; buffers: first byte in the chunk, and size; views: data buffers of each
    array of views. dictionaries: the chunks that hold the values of its dictionary, in order.
    """

    form: int
    codec: int
    nodes: list[tuple[int, int]]
    buffers: list[tuple[int, int]]
    views: list[int]
    dictionaries: list[int]

    @classmethod
    def of_json(cls, note: Any, size: int, *, forms: int, chunks: int) -> ColumnChunk:
        """Read and check the note of a chunk of `size` bytes. forms, chunks: how many there are.
        Raises ValueError, TypeError."""
        form, codec, nodes, buffers, *lists = note
        views, dictionaries = (list(map(int, each)) for each in lists)
        nodes, buffers = ([(int(a), int(b)) for a, b in each] for each in (nodes, buffers))
        found = cls(int(form), int(codec), nodes, buffers, views, dictionaries)
        places = (start >= 0 and 0 <= length <= size - start for start, length in buffers)
        others = (0 <= other < chunks for other in dictionaries)
        if not (0 <= found.form < forms and all(places) and all(others)):
            raise ValueError("a chunk has parts that don't exist")
        if not all(0 <= nulls <= length for length, nulls in nodes):
            raise ValueError("a chunk has arrays of invalid lengths")
        return found


class ArrowReader(TableReader):
    """Reads rows of a shard; buffers that aren't compressed become arrays without a copy."""

    def read_notes(self, notes: Any, shard: ChunkedShardFacts) -> None:
        """Read the types and the buffers of chunks, and of each field the names that lead through
        structs to its values."""
        self._fields = np.asarray(shard.extents.fields).tolist()
        self._types = [_type_of_text(str(text)) for text in notes["forms"]]
        sizes, forms = shard.extents.sizes.tolist(), len(self._types)
        self._decoding = [
            ColumnChunk.of_json(note, size, forms=forms, chunks=len(sizes))
            for note, size in zip(notes["chunks"], sizes, strict=True)
        ]
        self._parts = [[str(part) for part in each] for each in notes["parts"]]
        tensors = notes.get("tensors", ())
        self._tensors = {int(number): tensor_of_json(tensor) for number, *tensor in tensors}
        if len(self._parts) != len(shard.schema):
            raise ValueError("the number of its fields is wrong")

    def is_view(self, chunk: int, data: ShardData) -> bool:
        """Return True if the chunk is in a mapped file, isn't compressed, and has neither a
        dictionary nor views."""
        own = self._decoding[chunk]
        is_plain = not (own.codec or own.dictionaries or own.views)
        return is_plain and data.view(chunk, size_bytes=0) is not None

    def dictionaries(self, extent: int) -> Sequence[int]:
        """Return the extents that hold the values of a chunk's dictionary."""
        return self._decoding[extent].dictionaries

    def decode(
        self, extent: int, rows: int, type: FieldType, data: Encoded, others: Sequence[Encoded]
    ) -> Any:
        """Return a chunk's table. Raises ValueError if its bytes are damaged."""
        array, field = self._array(extent, data), self._fields[extent]
        parts_of_dictionary = zip(self.dictionaries(extent), others, strict=True)
        values = [self._array(*part) for part in parts_of_dictionary]
        parts, tensor = self._parts[field], self._tensors.get(field)
        with arrow_errors("its values can't be read"):
            if values:
                # Rows whose struct is null may have an index outside of the dictionary.
                indices, parts = inside_structs(array, parts), []
                array = pa.DictionaryArray.from_arrays(indices, pa.concat_arrays(values), safe=True)
            return values_table(type, array, parts, tensor)

    def _array(self, extent: int, data: Encoded) -> Any:
        chunk = self._decoding[extent]
        buffers = (plain_buffer(data, start, size, chunk.codec) for start, size in chunk.buffers)
        nodes, views = iter(chunk.nodes), iter(chunk.views)
        try:
            with arrow_errors("its bytes are damaged"):
                array = make_array(self._types[chunk.form], nodes, buffers, views)
                array.validate(full=True)
                return array
        except (StopIteration, TypeError, RuntimeError) as error:
            raise ValueError(f"its bytes are damaged ({str(error)[:200]})") from error


class ArrowFormat(TableFormat):
    """Arrow IPC files and streams. Packs consist of such files too, but are recognised first."""

    name: ClassVar[str] = "arrow"
    reader_class = ArrowReader
    extensions: ClassVar[frozenset[str]] = frozenset(("arrow", "feather", "ipc", "arrows"))

    def footer_bytes(self, tail: bytes, size_bytes: int) -> int:
        """Return the length of a file's footer with what follows it; 0 for a stream."""
        if tail[-len(_FEATHER_V1) :] == _FEATHER_V1:
            raise ValueError("it is a Feather file of version 1: write it with version 2")
        if tail[-len(MAGIC) :] != MAGIC:
            return 0
        found = int.from_bytes(tail[-TAIL_BYTES : -len(MAGIC)], "little", signed=True)
        if not 0 < found <= min(MAX_METADATA_BYTES, size_bytes - TAIL_BYTES - 8):
            raise ValueError(f"its footer would have {found:,} bytes: it is truncated or damaged")
        return found + TAIL_BYTES

    def open_file(
        self, origin: Origin, entry: Entry, tail: bytes, *, known: dict[Any, Any], workers: int
    ) -> ArrowFile:
        """Read the metadata of a file."""
        size = self.footer_bytes(tail, entry.size_bytes)
        return ArrowFile(entry, read_contents(origin, entry, tail, size, workers=workers))


FORMAT = ArrowFormat()
