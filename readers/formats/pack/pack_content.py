"""Write a pack's shard: an Arrow IPC file of one record batch, which any Arrow tool opens.

The file is uncompressed. All samples of a field lie in one flat buffer.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.fieldtypes import is_progressive
from penstock.readers.files import map_buffer, printable, write_batch, write_whole
from penstock.readers.formats.pack.pack_columns import PackColumns, dense_shapes, shard_errors
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

    from penstock.readers.fieldtypes import FieldType, Schema
    from penstock.readers.formats.pack.pack_forms import PackForm
    from penstock.readers.types import Facts

    Arrays = Sequence[NDArray[Any]] | NDArray[Any]

# Of a longer schema, the shard omits the names of classes, which the manifest has too: Arrow writes
# the metadata twice, at the head and at the tail of every shard.
_MAX_SCHEMA_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSample:
    """One good sample to pack, by field; a field that it lacks is absent.

    values: the bytes of encoded fields, and the values of all others in their own shape. facts: of
    the encoded fields; their bytes begin at 0.
    """

    values: Mapping[str, NDArray[Any]]
    facts: Mapping[str, Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """The content of a shard of n samples, at least one. source: each sample's id in the source's
    index, int64, shape (n,). names: each sample's name in the source."""

    schema: Schema
    samples: Sequence[PackSample]
    source: NDArray[np.int64]
    names: Sequence[bytes]


def write_shard(path: bytes, content: ShardContent) -> ShardSummary:
    """Write a shard atomically and return its contribution to the manifest.

    Raises ConfigError for a field that packs can't hold, and WriteError.
    """
    batch, notes, sample_bytes = shard_batch(content)
    write_whole(path, lambda temp: write_batch(temp, batch))
    size_bytes = os.stat(path).st_size
    return ShardSummary.of(
        content.schema,
        notes,
        samples=len(batch),
        size_bytes=size_bytes,
        overhead_bytes=size_bytes - sample_bytes,
    )


def shard_batch(content: ShardContent) -> tuple[Any, dict[str, FieldNotes], int]:
    """Return a shard's record batch, the facts of each field for the manifest, and the bytes that
    opening the shard doesn't read.

    Raises ConfigError.
    """
    forms = pack_forms(content.schema)
    columns: dict[str, Any] = {}
    own_columns: dict[str, Any] = {}
    blocks: dict[str, list[int]] = {}
    notes: dict[str, FieldNotes] = {}
    sample_bytes = 0
    for name, form in forms.items():
        given = [sample.values.get(name) for sample in content.samples]
        facts = [sample.facts.get(name) for sample in content.samples]
        has = np.array([each is not None for each in given], bool)
        present = None if has.all() else has
        values, flat = _flat(form, [form.empty if each is None else each for each in given])
        columns[name] = _array(form, values, flat, present)
        notes[name] = each = _notes(content.schema[name], form, values, facts, present)
        if form.kind == "dense":
            bounds, data = block_bounds(form, len(given)).tolist(), flat.view(np.uint8)
            blocks[name] = [crc32c(data[a:b]) for a, b in pairwise(bounds)]
        if form.kind != "value" and not form.is_bits:
            sample_bytes += flat.nbytes
        if form.has_crcs:
            own_columns[own_name(CRC, name)] = pa.array(each.crcs, pa.uint32())
        if form.is_picture and each.shapes is not None:
            for number, kind in enumerate((HEIGHT, WIDTH, CHANNELS)):
                own_columns[own_name(kind, name)] = pa.array(each.shapes[:, number], pa.int32())
            own_columns[own_name(CODEC, name)] = pa.array(each.codecs, pa.string())
    own_columns[SOURCE] = pa.array(content.source, pa.int64())
    own_columns[NAME] = pa.array(list(content.names), pa.large_binary())
    metadata = {
        SHARD: str(VERSION).encode(),
        SCHEMA: _schema_text(content.schema),
        NAMES_SUM: sum_of_names(content.names),
        BLOCK_SUMS: write_block_sums(blocks),
    }
    schema = arrow_schema(forms).with_metadata(metadata)
    batch = pa.record_batch([*columns.values(), *own_columns.values()], schema=schema)
    return batch, notes, sample_bytes


def _flat(form: PackForm, given: Arrays) -> tuple[Arrays, NDArray[Any]]:
    """Return each sample in the dtype that is read back, and all of them end to end as they are
    stored: numbers, bits or bytes, shape (numbers,)."""
    if form.is_span:
        values: Arrays = [np.ascontiguousarray(each, form.dtype) for each in given]
        flat = np.concatenate([each.reshape(-1) for each in values])
    else:
        values = dense = np.empty((len(given), *form.empty.shape), form.dtype)
        for row, each in enumerate(given):
            dense[row] = each
        flat = dense.reshape(-1)
    if form.is_bits:
        return values, np.packbits(flat != 0, bitorder="little")
    flat = flat.view(form.stored)
    return values, flat.astype(flat.dtype.newbyteorder("<"), copy=False)


def _notes(
    type: FieldType,
    form: PackForm,
    values: Arrays,
    facts: Sequence[Facts | None],
    present: NDArray[np.bool_] | None,
) -> FieldNotes:
    """Return a field's facts for the manifest: those of `PackField`, and codecs."""
    crcs = shapes = progressive = None
    codecs: Sequence[str] = ()
    if form.kind == "bytes":
        sums = [0 if each is None else each.crc32c for each in facts]
    elif form.has_crcs:
        sums = [crc32c(each) for each in values]
    if form.has_crcs:
        crcs = np.array(sums, np.uint32)
    if form.is_picture:
        shapes = np.array([(0, 0, 0) if each is None else each.shape for each in facts], np.int64)
        codecs = ["" if each is None else each.codec for each in facts]
        progressive = sum(map(is_progressive, values)) if type.is_image else None
    elif form.kind == "dense":
        shapes = dense_shapes(form, len(values))
    elif form.kind in ("ragged", "shaped"):
        shapes = np.array([each.shape for each in values], np.int64)
    return FieldNotes(
        storage=form.storage,
        crcs=crcs,
        shapes=shapes,
        codecs=codecs,
        values=np.asarray(values) if form.kind == "value" else None,
        present=present,
        progressive=progressive,
    )


def _schema_text(schema: Schema) -> bytes:
    fields = schema.to_json()
    text = json.dumps(fields).encode()
    if len(text) <= _MAX_SCHEMA_BYTES:
        return text
    nameless = [{**each, "names": []} if "names" in each else each for each in fields]
    return json.dumps(nameless).encode()


def _array(
    form: PackForm, values: Arrays, flat: NDArray[Any], present: NDArray[np.bool_] | None
) -> Any:
    """Return a field's Arrow column over its flat values."""
    n, type = len(values), form.arrow
    validity = None
    if present is not None:
        validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    if not form.is_span:
        return _rows(type, n, form.numbers, flat, validity)
    lengths = [each.size * form.numbers if form.kind == "shaped" else len(each) for each in values]
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if form.kind == "bytes":
        buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(flat)]
        return pa.Array.from_buffers(type, n, buffers)
    if form.kind == "ragged":
        child = _rows(type.value_type, int(offsets[-1]), form.numbers, flat, None)
        return _list(type, n, offsets, child, validity)
    lists, shapes = type.field(VALUES).type, type.field(SHAPES).type
    sides = np.array([each.shape for each in values], np.int64).reshape(-1)
    child = _rows(lists.value_type, len(flat), 1, flat, None)
    dimensions = _rows(shapes, n, shapes.list_size, sides, None)
    children = [_list(lists, n, offsets, child, None), dimensions]
    return pa.Array.from_buffers(type, n, [validity], children=children)


def _list(type: Any, n: int, offsets: NDArray[np.int64], child: Any, validity: Any) -> Any:
    return pa.Array.from_buffers(type, n, [validity, pa.py_buffer(offsets)], children=[child])


def _rows(type: Any, n: int, numbers: int, values: NDArray[Any], validity: Any) -> Any:
    """Return an Arrow array of n numbers, or of n rows of `numbers` numbers each."""
    data = pa.py_buffer(values)
    if not pa.types.is_fixed_size_list(type):
        return pa.Array.from_buffers(type, n, [validity, data])
    child = pa.Array.from_buffers(type.value_type, n * numbers, [None, data])
    return pa.Array.from_buffers(type, n, [validity], children=[child])


def rewrite_source(path: bytes, schema: Schema, source: NDArray[np.int64]) -> None:
    """Replace the column of source ids in a shard's file, in place.

    Only the packer calls it, before the pack is read. Raises CorruptShardError.
    """
    with shard_errors(printable(path)):
        at = PackColumns(map_buffer(path), schema).source_offset()
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(np.ascontiguousarray(source, "<i8").tobytes())
        os.fsync(file.fileno())
