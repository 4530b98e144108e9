"""Decode one column of one Arrow record batch, from its own bytes.

A chunk is the nodes and buffers of a column in a record batch, which the index notes.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.readers.formats.arrow.ipc_metadata import CODECS
from penstock.readers.formats.tables import (
    arrow_errors,
    inside_structs,
    max_decoded_bytes,
    values_table,
    with_types_inside,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.arrow.ipc_metadata import BatchMetadata
    from penstock.readers.formats.tables import Tensor
    from penstock.readers.types import Encoded

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


def note_of(arrays: Sequence[IpcArray], codec: int) -> tuple[list[Any], int, int]:
    """Return the note of a chunk, without the number of its form; its first byte in the file; and
    its size. arrays: of the chunk; codec: of their buffers."""
    buffers = [buffer for array in arrays for buffer in array.buffers]
    start = min((start for start, size in buffers if size), default=0)
    end = max((start + size for start, size in buffers if size), default=0)
    places = [[at - start if size else 0, size] for at, size in buffers]
    views = [count for array in arrays for count in array.views]
    return [codec, [array.shape for array in arrays], places, views, []], start, end - start


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


def type_to_text(arrow: Any) -> str:
    """Return an Arrow type as text that `type_of_text` reads."""
    return base64.b64encode(pa.schema([pa.field("", arrow)]).serialize()).decode()


def type_of_text(text: str) -> Any:
    """Read an Arrow type. Raises ValueError."""
    with arrow_errors("a type can't be read"):
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text))).field(0).type


Stored = tuple["Encoded", "ColumnChunk", Any]
"""The bytes of a chunk, how they are decoded, and their Arrow type."""


def decode_chunk(
    chunk: Stored,
    dictionary: Sequence[Stored],
    type: FieldType,
    parts: Sequence[str],
    tensor: Tensor | None,
) -> Any:
    """Decode a chunk, and return its values as `values_table` does.

    dictionary: the parts of its dictionary. parts: the names that lead through structs to the
    values. tensor: how its tensors are stored. Raises ValueError for damage.
    """
    array, *values = (_array(*each) for each in (chunk, *dictionary))
    with arrow_errors("its values can't be read"):
        if values:
            # Rows whose struct is null may have an index outside of the dictionary.
            indices, parts = inside_structs(array, parts), ()
            array = pa.DictionaryArray.from_arrays(indices, pa.concat_arrays(values), safe=True)
        return values_table(type, array, parts, tensor)


def _array(data: Encoded, chunk: ColumnChunk, arrow: Any) -> Any:
    buffers = (plain_buffer(data, start, size, chunk.codec) for start, size in chunk.buffers)
    try:
        with arrow_errors("its bytes are damaged"):
            array = make_array(arrow, iter(chunk.nodes), buffers, iter(chunk.views))
            array.validate(full=True)
            return array
    except (StopIteration, TypeError, RuntimeError) as error:
        raise ValueError(f"its bytes are damaged ({str(error)[:200]})") from error
