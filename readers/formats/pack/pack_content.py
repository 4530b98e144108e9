"""Write a pack's shard: an Arrow IPC file of one record batch, which any Arrow tool opens.

It is uncompressed, and what a field's samples hold is one flat buffer.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.fields import DenseColumn, EncodedColumn, RaggedColumn
from penstock.readers.files import write_batch, write_whole
from penstock.readers.formats.pack.pack_columns import dense_shapes, ragged_shapes
from penstock.readers.formats.pack.pack_forms import (
    BLOCK_SUMS,
    CHANNELS,
    CODEC,
    CRC,
    HEIGHT,
    NAME,
    NAMES_SUM,
    SCHEMA,
    SHAPES,
    SHARD,
    SOURCE,
    VALUES,
    WIDTH,
    arrow_schema,
    block_bounds,
    own_name,
    pack_forms,
    sum_of_names,
    write_block_sums,
)
from penstock.readers.formats.shard_summary import VERSION, FieldNotes, summarise

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import Column, Schema
    from penstock.readers.formats.pack.pack_forms import PackForm
    from penstock.readers.formats.shard_summary import ShardSummary

    _Present = NDArray[np.bool_] | None

# A schema whose classes have more names than this takes leaves them to the manifest: the metadata
# stands at the head and at the tail of every shard.
_MAX_SCHEMA_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFacts:
    """What is noted of n images or masks.

    shapes: height, width and channels, int64, shape (n, 3), 0 where a sample has none, as its codec
    is "" then. progressive: JPEGs of that kind, None of masks.
    """

    shapes: NDArray[np.int64]
    codecs: Sequence[str]
    progressive: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """What goes into a shard; all of n samples, at least one.

    columns: of each field. crcs: CRC-32C of each sample's bytes, uint32, shape (n,), where they are
    known already. pictures: of each image and mask. present: bool, shape (n,), of the fields that
    some samples lack. source: the sample's id in the source's index, int64, shape (n,); names: of
    the samples in the source.
    """

    schema: Schema
    columns: Mapping[str, Column]
    crcs: Mapping[str, NDArray[np.uint32]] = field(default_factory=dict)
    pictures: Mapping[str, PictureFacts] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    source: NDArray[np.int64]
    names: Sequence[bytes]


def write_shard(path: bytes, content: ShardContent) -> ShardSummary:
    """Write a shard whole; returns its contribution to the manifest. Raises ConfigError (a field
    that packs can't hold), WriteError."""
    batch, notes = shard_batch(content)
    write_whole(path, lambda temp: write_batch(temp, batch))
    size_bytes = os.stat(path).st_size
    return summarise(
        content.schema,
        notes,
        samples=len(batch),
        size_bytes=size_bytes,
        overhead_bytes=size_bytes - sum(c.size_bytes for c in _apart(content)),
    )


def _apart(content: ShardContent) -> Iterator[Column]:
    """The columns whose bytes aren't read when a shard is opened."""
    for name, own in pack_forms(content.schema).items():
        if own.kind != "value" and not own.is_bits:
            yield content.columns[name]


def shard_batch(content: ShardContent) -> tuple[Any, dict[str, FieldNotes]]:
    """The record batch of a shard, and what is noted of each field. Raises ConfigError."""
    fields = pack_forms(content.schema)
    columns: dict[str, Any] = {}
    own_columns: dict[str, Any] = {}
    blocks: dict[str, list[int]] = {}
    notes: dict[str, FieldNotes] = {}
    for name, own in fields.items():
        column, present = content.columns[name], content.present.get(name)
        if present is not None and present.all():
            present = None
        if present is not None and isinstance(column, DenseColumn):
            gone = np.flatnonzero(~present)
            column = column.patched(gone, DenseColumn(np.zeros_like(column.values[gone])))
        values = _flat(own, column)
        columns[name] = _array(own, column, values, present)
        if own.kind == "dense":
            bounds, data = block_bounds(own, len(column)).tolist(), values.view(np.uint8)
            blocks[name] = [crc32c(data[a:b]) for a, b in pairwise(bounds)]
        crcs = _crcs(own, column, values, content.crcs.get(name)) if own.has_crcs else None
        if crcs is not None:
            own_columns[own_name(CRC, name)] = pa.array(crcs, pa.uint32())
        if own.is_picture:
            own_columns |= _noted(name, content.pictures[name])
        notes[name] = _notes(own, column, crcs, content.pictures.get(name), present)
    own_columns[SOURCE] = pa.array(content.source, pa.int64())
    own_columns[NAME] = pa.array(list(content.names), pa.large_binary())
    metadata = {
        SHARD: str(VERSION).encode(),
        SCHEMA: _schema_text(content.schema),
        NAMES_SUM: sum_of_names(content.names),
        BLOCK_SUMS: write_block_sums(blocks),
    }
    schema = arrow_schema(fields).with_metadata(metadata)
    batch = pa.record_batch([*columns.values(), *own_columns.values()], schema=schema)
    return batch, notes


def _crcs(
    own: PackForm, column: Column, values: NDArray[Any], known: NDArray[np.uint32] | None
) -> NDArray[np.uint32]:
    if known is not None:
        return known
    return np.array([crc32c(each) for each in _payloads(own, column, values)], np.uint32)


def _notes(
    own: PackForm,
    column: Column,
    crcs: NDArray[np.uint32] | None,
    picture: PictureFacts | None,
    present: _Present,
) -> FieldNotes:
    """As `PackField.notes` has them, and what else goes into a manifest."""
    shapes = values = None
    if own.kind == "value" and isinstance(column, DenseColumn):
        values = column.values.astype(own.dtype)
    if picture is not None:
        shapes = picture.shapes
    elif own.kind == "dense":
        shapes = dense_shapes(own, len(column))
    elif isinstance(column, RaggedColumn):
        shapes = ragged_shapes(own, column.offsets) if column.shapes is None else column.shapes
    return FieldNotes(
        storage=own.storage,
        crcs=crcs,
        shapes=shapes,
        codecs=() if picture is None else picture.codecs,
        values=values,
        present=present,
        progressive=None if picture is None else picture.progressive,
    )


def _noted(name: str, facts: PictureFacts) -> dict[str, Any]:
    return {
        own_name(HEIGHT, name): pa.array(facts.shapes[:, 0], pa.int32()),
        own_name(WIDTH, name): pa.array(facts.shapes[:, 1], pa.int32()),
        own_name(CHANNELS, name): pa.array(facts.shapes[:, 2], pa.int32()),
        own_name(CODEC, name): pa.array(list(facts.codecs), pa.string()),
    }


def _schema_text(schema: Schema) -> bytes:
    fields = schema.to_json()
    text = json.dumps(fields).encode()
    if len(text) <= _MAX_SCHEMA_BYTES:
        return text
    nameless = [{**each, "names": []} if "names" in each else each for each in fields]
    return json.dumps(nameless).encode()


def _flat(own: PackForm, column: Column) -> NDArray[Any]:
    """All numbers of a field as they lie in the file, or all bytes; shape (numbers,)."""
    if isinstance(column, EncodedColumn):
        return np.concatenate(column.samples) if column.samples else np.empty(0, np.uint8)
    assert isinstance(column, DenseColumn | RaggedColumn)
    values = np.ascontiguousarray(column.values, own.dtype)
    if own.is_bits:
        return np.packbits((values != 0).reshape(-1), bitorder="little")
    flat = values.reshape(-1).view(own.lies)
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False)


def _payloads(own: PackForm, column: Column, values: NDArray[Any]) -> Sequence[NDArray[np.uint8]]:
    """The bytes of each sample, as arrays of their own dtype have them."""
    if isinstance(column, EncodedColumn):
        return column.samples
    if isinstance(column, RaggedColumn):
        bounds = column.offsets * own.row_bytes
    else:
        assert isinstance(column, DenseColumn)
        values = np.ascontiguousarray(column.values, own.dtype).reshape(-1)
        bounds = np.arange(len(column) + 1) * (values.nbytes // max(1, len(column)))
    data, ends = values.view(np.uint8), bounds.tolist()
    return [data[a:b] for a, b in pairwise(ends)]


def _array(own: PackForm, column: Column, values: NDArray[Any], present: _Present) -> Any:
    """A field's Arrow column over its flat values."""
    n, type = len(column), own.arrow
    validity = None
    if present is not None:
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    if isinstance(column, EncodedColumn):
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum([len(sample) for sample in column.samples], out=offsets[1:])
        buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
        return pa.Array.from_buffers(type, n, buffers)
    if isinstance(column, DenseColumn):
        return _rows(type, n, own.numbers, values, validity)
    assert isinstance(column, RaggedColumn)
    offsets = column.offsets * (1 if own.kind == "ragged" else own.numbers)
    if own.kind == "ragged":
        child = _rows(type.value_type, int(offsets[-1]), own.numbers, values, None)
        return _list(type, n, offsets, child, validity)
    lists, shapes = type.field(VALUES).type, type.field(SHAPES).type
    assert column.shapes is not None
    child = _rows(lists.value_type, len(values), 1, values, None)
    dimensions = _rows(shapes, n, shapes.list_size, column.shapes.reshape(-1), None)
    children = [_list(lists, n, offsets, child, None), dimensions]
    return pa.Array.from_buffers(type, n, [validity], children=children)


def _list(type: Any, n: int, offsets: NDArray[np.int64], child: Any, validity: Any) -> Any:
    buffers = [validity, pa.py_buffer(np.ascontiguousarray(offsets))]
    return pa.Array.from_buffers(type, n, buffers, children=[child])


def _rows(type: Any, n: int, numbers: int, values: NDArray[Any], validity: Any) -> Any:
    """n numbers, or n rows of so many of them."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    if not pa.types.is_fixed_size_list(type):
        return pa.Array.from_buffers(type, n, [validity, data])
    child = pa.Array.from_buffers(type.value_type, n * numbers, [None, data])
    return pa.Array.from_buffers(type, n, [validity], children=[child])
