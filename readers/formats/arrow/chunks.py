"""A column of a record batch as a chunk: which bytes it takes, and how it is decoded."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cache.base.machine import machine_remedy
from penstock.readers.formats.arrow.arrays import (
    Cursor,
    Parts,
    make_array,
    pick,
    plain_buffer,
    pruned,
    storage,
)
from penstock.readers.formats.arrow.values import values_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.messages import Batch
    from penstock.readers.formats.arrow.types import Tensor
    from penstock.readers.types import Encoded


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
    batch: Batch, types: Sequence[Any], column: int, path: Sequence[str], *, form: int
) -> tuple[ColumnChunk, ChunkPlace, Parts]:
    """The chunk of a column, or of what lies at a path below it. types: of the record batch's
    columns, as they lie. Raises ValueError where its nodes and buffers are too few."""
    at, parts = Cursor(), Parts([], [], [])
    for number, arrow in enumerate(types[: column + 1]):
        is_it = number == column
        pick(arrow, path if is_it else (), at, batch.variadic, parts if is_it else None)
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
    arrow = pruned(storage(column), path)
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
