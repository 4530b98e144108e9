"""Write a pack's shard: an Arrow IPC file of one record batch, which any Arrow tool opens.

The file is uncompressed. All samples of a field lie in one flat buffer.
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

from penstock.readers.fieldtypes import DenseColumn, EncodedColumn, RaggedColumn
from penstock.readers.files import BROKEN, map_buffer, printable, write_batch, write_whole
from penstock.readers.formats.pack.pack_columns import PackColumns, dense_shapes, ragged_shapes
from penstock.readers.formats.pack.pack_errors import REMEDY, no_shard
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
from penstock.readers.formats.shard_summary import VERSION, FieldNotes, ShardSummary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, Schema
    from penstock.readers.formats.pack.pack_forms import PackForm

    _Present = NDArray[np.bool_] | None

# Of a longer schema, the shard omits the names of classes, which the manifest has too: Arrow writes
# the metadata twice, at the head and at the tail of every shard.
_MAX_SCHEMA_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureFacts:
    """The recorded facts of n images or masks.

    shapes: height, width and channels, int64, shape (n, 3); 0 if a sample lacks the field, whose
    codec is "" then. progressive: number of progressive JPEGs, None for masks.
    """

    shapes: NDArray[np.int64]
    codecs: Sequence[str]
    progressive: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """The content of a shard of n samples, at least one.

    columns: one for each field. crcs: CRC-32C of each sample's bytes, uint32, shape (n,), for
    fields whose checksums are known already. pictures: facts of each image and mask field. present:
    bool, shape (n,), for the fields that some samples lack. source: each sample's id in the
    source's index, int64, shape (n,). names: each sample's name in the source.
    """

    schema: Schema
    columns: Mapping[str, Column]
    crcs: Mapping[str, NDArray[np.uint32]] = field(default_factory=dict)
    pictures: Mapping[str, PictureFacts] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    source: NDArray[np.int64]
    names: Sequence[bytes]


def write_shard(path: bytes, content: ShardContent) -> ShardSummary:
    """Write a shard atomically and return its contribution to the manifest.

    Raises ConfigError for a field that packs can't hold, and WriteError.
    """
    batch, notes = shard_batch(content)
    write_whole(path, lambda temp: write_batch(temp, batch))
    size_bytes = os.stat(path).st_size
    # Opening a shard reads all its bytes but these.
    samples_bytes = sum(
        content.columns[name].size_bytes
        for name, form in pack_forms(content.schema).items()
        if form.kind != "value" and not form.is_bits
    )
    return ShardSummary.of(
        content.schema,
        notes,
        samples=len(batch),
        size_bytes=size_bytes,
        overhead_bytes=size_bytes - samples_bytes,
    )


def shard_batch(content: ShardContent) -> tuple[Any, dict[str, FieldNotes]]:
    """Return a shard's record batch, and the facts of each field for the manifest.

    Raises ConfigError.
    """
    fields = pack_forms(content.schema)
    columns: dict[str, Any] = {}
    own_columns: dict[str, Any] = {}
    blocks: dict[str, list[int]] = {}
    notes: dict[str, FieldNotes] = {}
    for name, form in fields.items():
        column, present = content.columns[name], content.present.get(name)
        if present is not None and present.all():
            present = None
        if present is not None and isinstance(column, DenseColumn):
            column = DenseColumn(column.values.copy())
            column.values[~present] = 0
        values = _flat(form, column)
        columns[name] = _array(form, column, values, present)
        if form.kind == "dense":
            bounds, data = block_bounds(form, len(column)).tolist(), values.view(np.uint8)
            blocks[name] = [crc32c(data[a:b]) for a, b in pairwise(bounds)]
        crcs = None
        if form.has_crcs:
            crcs = content.crcs.get(name)
            if crcs is None:
                crcs = np.array(
                    [crc32c(each) for each in _payloads(form, column, values)], np.uint32
                )
            own_columns[own_name(CRC, name)] = pa.array(crcs, pa.uint32())
        if form.is_picture:
            facts = content.pictures[name]
            for number, kind in enumerate((HEIGHT, WIDTH, CHANNELS)):
                own_columns[own_name(kind, name)] = pa.array(facts.shapes[:, number], pa.int32())
            own_columns[own_name(CODEC, name)] = pa.array(list(facts.codecs), pa.string())
        notes[name] = _notes(form, column, crcs, content.pictures.get(name), present)
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


def _notes(
    form: PackForm,
    column: Column,
    crcs: NDArray[np.uint32] | None,
    picture: PictureFacts | None,
    present: _Present,
) -> FieldNotes:
    """Return a field's facts for the manifest: those of `PackField.notes`, and codecs."""
    shapes = values = None
    if form.kind == "value" and isinstance(column, DenseColumn):
        values = column.values.astype(form.dtype)
    if picture is not None:
        shapes = picture.shapes
    elif form.kind == "dense":
        shapes = dense_shapes(form, len(column))
    elif isinstance(column, RaggedColumn):
        shapes = ragged_shapes(form, column.offsets) if column.shapes is None else column.shapes
    return FieldNotes(
        storage=form.storage,
        crcs=crcs,
        shapes=shapes,
        codecs=() if picture is None else picture.codecs,
        values=values,
        present=present,
        progressive=None if picture is None else picture.progressive,
    )


def _schema_text(schema: Schema) -> bytes:
    fields = schema.to_json()
    text = json.dumps(fields).encode()
    if len(text) <= _MAX_SCHEMA_BYTES:
        return text
    nameless = [{**each, "names": []} if "names" in each else each for each in fields]
    return json.dumps(nameless).encode()


def _flat(form: PackForm, column: Column) -> NDArray[Any]:
    """Return all numbers of a field as they are stored, or all its bytes; shape (numbers,)."""
    if isinstance(column, EncodedColumn):
        return np.concatenate(column.samples) if column.samples else np.empty(0, np.uint8)
    assert isinstance(column, DenseColumn | RaggedColumn)
    values = np.ascontiguousarray(column.values, form.dtype)
    if form.is_bits:
        return np.packbits((values != 0).reshape(-1), bitorder="little")
    flat = values.reshape(-1).view(form.stored)
    return flat.astype(flat.dtype.newbyteorder("<"), copy=False)


def _payloads(form: PackForm, column: Column, values: NDArray[Any]) -> Sequence[NDArray[np.uint8]]:
    """Return the bytes of each sample, with numbers in the dtype that is read back."""
    if isinstance(column, EncodedColumn):
        return column.samples
    if isinstance(column, RaggedColumn):
        bounds = column.offsets * form.row_bytes
    else:
        assert isinstance(column, DenseColumn)
        values = np.ascontiguousarray(column.values, form.dtype).reshape(-1)
        bounds = np.arange(len(column) + 1) * (values.nbytes // max(1, len(column)))
    data, ends = values.view(np.uint8), bounds.tolist()
    return [data[a:b] for a, b in pairwise(ends)]


def _array(form: PackForm, column: Column, values: NDArray[Any], present: _Present) -> Any:
    """Return a field's Arrow column over its flat values."""
    n, type = len(column), form.arrow
    validity = None
    if present is not None:
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    if isinstance(column, EncodedColumn):
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum([len(sample) for sample in column.samples], out=offsets[1:])
        buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(values)]
        return pa.Array.from_buffers(type, n, buffers)
    if isinstance(column, DenseColumn):
        return _rows(type, n, form.numbers, values, validity)
    assert isinstance(column, RaggedColumn)
    offsets = column.offsets * (1 if form.kind == "ragged" else form.numbers)
    if form.kind == "ragged":
        child = _rows(type.value_type, int(offsets[-1]), form.numbers, values, None)
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
    """Return an Arrow array of n numbers, or of n rows of `numbers` numbers each."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    if not pa.types.is_fixed_size_list(type):
        return pa.Array.from_buffers(type, n, [validity, data])
    child = pa.Array.from_buffers(type.value_type, n * numbers, [None, data])
    return pa.Array.from_buffers(type, n, [validity], children=[child])


def rewrite_source(path: bytes, schema: Schema, source: NDArray[np.int64]) -> None:
    """Replace the column of source ids in a shard's file, in place.

    Only the packer calls it, before the pack is read. Raises CorruptShardError.
    """
    try:
        at = PackColumns(map_buffer(path), schema).source_offset()
    except BROKEN as error:
        raise no_shard(printable(path), error, REMEDY) from error
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(np.ascontiguousarray(source, "<i8").tobytes())
        os.fsync(file.fileno())
