"""Write and read the columns of a pack's shard: an Arrow IPC file of one record batch.

The file is uncompressed, and any Arrow tool opens it. All samples of a field lie in one flat
buffer. It is read strictly, field by field, because it may be forged; of a remote shard, the bytes
that locate the samples are fetched first.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.readers.fieldtypes import codec_number
from penstock.readers.files import (
    BROKEN,
    batch_head_end,
    damaged_file_error,
    footer_start,
    map_buffer,
    only_batch,
    printable,
)
from penstock.readers.formats.pack.pack_forms import (
    BLOCK_SUMS,
    CODEC,
    CRC,
    NAME,
    NAMES_SUM,
    SCHEMA,
    SHAPES,
    SHARD,
    SIDES,
    SOURCE,
    VALUES,
    arrow_schema,
    block_bounds,
    own_name,
    pack_forms,
    read_block_sums,
    sum_of_names,
    write_block_sums,
)
from penstock.readers.formats.shard_summary import VERSION, FieldNotes, ShardSummary, Sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.byte_source import ByteSource
    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.format import ShardEntry
    from penstock.readers.formats.open_shard import SampleLayout
    from penstock.readers.formats.pack.pack_forms import PackForm
    from penstock.readers.types import Bools, Facts, Ints, Numbers

    Arrays = Sequence[Numbers] | Numbers

REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


@contextmanager
def shard_errors(shown: str, remedy: str = "") -> Iterator[None]:
    """Report errors of parsing as those of the shard. Nothing is fetched inside the context. shown:
    its name. remedy: what to do; "" means packing or fetching it again."""
    try:
        yield
    except BROKEN as error:
        what = "not a shard that Penstock wrote, or changed since then"
        raise damaged_file_error(shown, what, error, remedy=remedy or REMEDY) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackField(FieldNotes):
    """One field of the samples of a shard, whose spans count from the file's first byte.

    rows: number of samples. start: first byte of the values in the file. dense: of "dense" fields,
    a view of the file: shape (n, *row), or the bytes of values that are stored as bits. blocks:
    CRC-32C of each block of dense rows.
    """

    form: PackForm
    rows: int
    start: int
    dense: Numbers | None = None
    blocks: NDArray[np.uint32] | None = None


class PackColumns:
    """The columns of one shard. Checked numbers are copied: the file may change after the check."""

    def __init__(self, buffer: Any, schema: Schema) -> None:
        """Read the head and the tail of a shard.

        buffer: the whole file. The bytes between may arrive later, see `needed`. Raises one of
        BROKEN.
        """
        self._schema, self.forms = schema, pack_forms(schema)
        columns = {field.name: str(field.type) for field in arrow_schema(self.forms)}
        self._batch = only_batch(buffer, columns, is_full=False)
        self._address, self._size = buffer.address, buffer.size
        self._data = np.frombuffer(buffer, np.uint8)
        self._metadata = self._batch.schema.metadata or {}
        for number in range(len(schema), self._batch.num_columns):
            if self._batch.column(number).null_count:
                raise ValueError("one of Penstock's own columns has missing values")

    def __len__(self) -> int:
        return len(self._batch)

    def needed(self) -> list[tuple[int, int]]:
        """Return the byte ranges [start, end) that locate the samples in the file.

        These are all bytes except the samples' own. Raises ValueError.
        """
        found = []
        for name, array in zip(self._batch.schema.names, self._batch.columns, strict=True):
            form = self.forms.get(name)
            samples = None
            if form is not None and form.kind != "value":
                holder = array.field(VALUES) if form.kind == "shaped" else array
                samples = holder.buffers()[-1]
            for each in array.buffers():
                if each is None or not each.size:
                    continue
                start = self._inside(each)
                if samples is None or each.address != samples.address:
                    found.append((start, start + each.size))
        return found

    def promised(self, layout: SampleLayout, *, samples: int, sums: Sums) -> dict[str, PackField]:
        """Return all fields, in order, if they are those that the manifest promises. Raises one of
        BROKEN."""
        if len(self) != samples:
            raise ValueError(f"it has {len(self)} samples, the manifest promises {samples}")
        fields = self.fields()
        for name, field in fields.items():
            if layout.storage[name] != field.storage:
                raise ValueError(f"{name!r} isn't stored as the manifest records it")
            if field.present is not None and name not in layout.lacking:
                raise ValueError(f"samples lack {name!r}, and the manifest promises that none does")
        if Sums.of(fields) != sums:
            raise ValueError("the checksums of its columns aren't those of the manifest")
        return fields

    def fields(self) -> dict[str, PackField]:
        """Read and check all fields, in order. Raises ValueError, TypeError."""
        sums = read_block_sums(self._metadata.get(BLOCK_SUMS, b"{}"))
        return {name: self._field(name, form, sums) for name, form in self.forms.items()}

    def source_offset(self) -> int:
        """Return the first byte of the column of source ids in the file."""
        return self._numbers(self._batch.column(SOURCE), np.dtype(np.int64), len(self))[0]

    def source_names(self) -> list[bytes] | None:
        """Return each sample's name in the pack's source, or None if the names are damaged."""
        try:
            names: list[bytes] = self._texts(NAME)
        except ValueError:
            return None
        return names if self._metadata.get(NAMES_SUM) == sum_of_names(names) else None

    def codecs(self, field: str) -> list[str]:
        """Return the codec of each sample of an image or a mask. Raises ValueError."""
        return [sys.intern(codec) for codec in self._texts(own_name(CODEC, field))]

    def _texts(self, name: str) -> list[Any]:
        column = self._batch.column(name)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            raise ValueError(f"its column {name} is damaged ({error})") from error
        found: list[Any] = column.to_pylist()
        return found

    def _field(
        self, name: str, form: PackForm, sums: Mapping[str, NDArray[np.uint32]]
    ) -> PackField:
        array, n = self._batch.column(name), len(self)
        shared: dict[str, Any] = {
            "form": form,
            "rows": n,
            "storage": form.storage,
            "present": _present(array),
            "crcs": self._own(CRC, name, np.uint32) if form.has_crcs else None,
        }
        if form.is_span:
            start, bounds, shapes = self._spans(array, form)
            if form.is_picture:
                sides = [self._own(kind, name, np.int32) for kind in SIDES]
                shapes = np.stack(sides, axis=1).astype(np.int64)
            found = PackField(
                start=start,
                shapes=shapes,
                starts=bounds[:-1],
                sizes=np.diff(bounds),
                numbers=0 if form.kind == "bytes" else codec_number(form.codec),
                **shared,
            )
            found.check(self._schema[name])
            return found
        start, values = self._numbers(array, form.stored, n * form.numbers)
        if form.kind == "value":
            if form.is_bits:
                values = np.unpackbits(values, count=n, bitorder="little")
            return PackField(start=start, values=values.view(form.dtype).copy(), **shared)
        blocks = sums.get(name)
        if blocks is None or len(blocks) != len(block_bounds(form, n)) - 1:
            raise ValueError(f"{name!r} doesn't have a checksum for each block")
        if not form.is_bits:
            values = values.view(form.dtype).reshape(n, *form.row)
        # Single numbers have no shape.
        shapes = np.broadcast_to(np.array(form.row, np.int64), (n, len(form.row)))
        return PackField(
            start=start, dense=values, blocks=blocks, shapes=shapes if form.row else None, **shared
        )

    def _own(self, kind: str, field: str, dtype: Any) -> Numbers:
        """Return a copy of one of our own columns of numbers."""
        column = self._batch.column(own_name(kind, field))
        return self._numbers(column, np.dtype(dtype), len(self))[1].copy()

    def _spans(self, array: Any, form: PackForm) -> tuple[int, Ints, Ints | None]:
        """Return the first byte of the values in the file, the bounds of the samples' bytes, and
        the shapes of arrays."""
        n, shapes, numbers = len(self), None, form.numbers
        if form.kind == "shaped":
            array, dimensions = array.field(VALUES), array.field(SHAPES)
            _refuse_nulls(array, dimensions)
            _, flat = self._numbers(dimensions, np.dtype(np.int64), n * len(form.row))
            shapes, numbers = flat.reshape(n, len(form.row)).copy(), 1
        offsets = _offsets(array.buffers()[1], n)
        if form.kind == "ragged":
            rest = np.broadcast_to(np.array(form.row, np.int64), (n, len(form.row)))
            shapes = np.concatenate((np.diff(offsets)[:, None], rest), axis=1)
        if form.kind != "bytes":
            array = array.values
            _refuse_nulls(array)
        start, _ = self._numbers(array, form.stored, int(offsets[-1]) * numbers)
        return start, start + offsets * (numbers * form.stored.itemsize), shapes

    def _numbers(self, array: Any, dtype: np.dtype[Any], count: int) -> tuple[int, Numbers]:
        """Return the first byte in the file of an array's numbers, or of the rows of a fixed-size
        list, and `count` of them, flat (bits as bytes)."""
        if array.type.num_fields:
            array = array.values
            _refuse_nulls(array)
        data = array.buffers()[-1]
        start, is_bits = self._inside(data), dtype.kind == "b"
        size_bytes = -(-count // 8) if is_bits else count * dtype.itemsize
        if size_bytes > (data.size if data else 0):
            raise ValueError(f"a column has fewer bytes than its {count} numbers take")
        values = self._data[start : start + size_bytes]
        return start, values if is_bits else values.view(dtype)

    def _inside(self, data: Any) -> int:
        """Return the offset of a buffer in the file. Raises ValueError if it lies outside."""
        if data is None or data.size == 0:
            return 0
        start = int(data.address - self._address)
        if start < 0 or start + data.size > self._size:
            raise ValueError("a column extends past the end of the file")
        return start


def _present(array: Any) -> Bools | None:
    if not array.null_count:
        return None
    n = len(array)
    bits = np.frombuffer(array.buffers()[0], np.uint8, -(-n // 8))
    return np.unpackbits(bits, count=n, bitorder="little").astype(bool)


def _refuse_nulls(*arrays: Any) -> None:
    if any(array.null_count or array.offset for array in arrays):
        raise ValueError("a list contains missing values")


def _offsets(buffer: Any, n: int) -> Ints:
    """Return offsets into data, which must hold as many numbers as the last one says."""
    if buffer is None or buffer.size < 8 * (n + 1):
        raise ValueError("it has too few offsets")
    offsets: Ints = np.frombuffer(buffer, np.int64, n + 1).copy()
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any():
        raise ValueError("its offsets decrease")
    return offsets


# The schema, the metadata and an offset of 8 bytes for each sample precede the samples of a shard's
# first field. A few columns of numbers, each padded to 64 bytes, and the footer follow its last.
_HEAD_BYTES, _HEAD_SAMPLE_BYTES = 4096, 8
_TAIL_BYTES, _TAIL_SAMPLE_BYTES = 4096, 48


def fetch_columns(source: ByteSource, entry: ShardEntry) -> PackColumns:
    """Return a shard's columns, after fetching all bytes that locate its samples.

    The sizes of its head and tail are guessed from the number of samples. They contain the
    positions of the other bytes that locate the samples, and these are fetched at once.

    Raises CorruptShardError, FetchError.
    """
    size_bytes, samples = source.size_bytes, entry.samples
    head = min(size_bytes, _HEAD_BYTES + _HEAD_SAMPLE_BYTES * samples)
    behind = entry.overhead_bytes or _TAIL_BYTES + _TAIL_SAMPLE_BYTES * samples
    tail = max(head, size_bytes - behind)
    buffer = source.buffer([each for each in ((0, head), (tail, size_bytes)) if each[0] < each[1]])

    def fetch(spans: Sequence[tuple[int, int]]) -> None:
        """Fetch these spans [start, end), except what lies in the head and the tail."""
        between = [(max(start, head), min(end, tail)) for start, end in spans]
        if missing := [(start, end) for start, end in between if start < end]:
            source.buffer(missing)

    with shard_errors(source.shown, source.remedy):
        footer = footer_start(buffer)
    fetch([(footer, size_bytes)])
    with shard_errors(source.shown, source.remedy):
        end = batch_head_end(buffer)
    fetch([(0, end)])
    with shard_errors(source.shown, source.remedy):
        columns = PackColumns(buffer, entry.layout.schema)
        needed = columns.needed()
    fetch(needed)
    return columns


# Of a longer schema, the shard omits the names of classes, which the manifest has too: Arrow writes
# the metadata twice, at the head and at the tail of every shard.
_MAX_SCHEMA_BYTES = 16 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSample:
    """One good sample to pack, by field; a field that it lacks is absent.

    values: the bytes of encoded fields, and the values of all others in their own shape. facts: of
    the encoded fields; their bytes begin at 0.
    """

    values: Mapping[str, Numbers]
    facts: Mapping[str, Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContent:
    """The content of a shard of n samples, at least one. source: each sample's id in the source's
    index, int64, shape (n,). names: each sample's name in the source."""

    schema: Schema
    samples: Sequence[PackSample]
    source: Ints
    names: Sequence[bytes]


def write_shard(path: bytes, content: ShardContent) -> ShardSummary:
    """Write a shard atomically and return its contribution to the manifest.

    Raises ConfigError for a field that packs can't hold, and WriteError.
    """
    from penstock.readers.fieldtypes import is_progressive
    from penstock.readers.files import write_batch, write_whole

    batch, sample_bytes = shard_batch(content)
    write_whole(path, lambda temp: write_batch(temp, batch))
    columns = PackColumns(map_buffer(path), content.schema)
    notes: dict[str, FieldNotes] = {**columns.fields()}
    for name, type in content.schema.items():
        if type.has_sides:
            codecs, progressive = columns.codecs(name), None
            if type.is_image:
                images = (sample.values.get(name) for sample in content.samples)
                progressive = sum(is_progressive(each) for each in images if each is not None)
            notes[name] = replace(notes[name], codecs=codecs, progressive=progressive)
    size_bytes = os.stat(path).st_size
    schema, overhead_bytes = content.schema, size_bytes - sample_bytes
    return ShardSummary.of(
        schema, notes, samples=len(batch), size_bytes=size_bytes, overhead_bytes=overhead_bytes
    )


def shard_batch(content: ShardContent) -> tuple[Any, int]:
    """Return a shard's record batch, and the bytes that opening the shard doesn't read. Raises
    ConfigError."""
    forms = pack_forms(content.schema)
    columns: list[Any] = []
    own_columns: list[Any] = []
    blocks: dict[str, list[int]] = {}
    sample_bytes = 0
    for name, form in forms.items():
        given = [sample.values.get(name) for sample in content.samples]
        facts = [sample.facts.get(name) for sample in content.samples]
        has = np.array([each is not None for each in given], bool)
        values, flat = _flat(form, [form.empty if each is None else each for each in given])
        columns.append(_array(form, values, flat, None if has.all() else has))
        if form.kind == "dense":
            bounds, data = block_bounds(form, len(given)).tolist(), flat.view(np.uint8)
            blocks[name] = [crc32c(data[a:b]) for a, b in pairwise(bounds)]
        if form.kind != "value" and not form.is_bits:
            sample_bytes += flat.nbytes
        if form.kind == "bytes":
            crcs = [0 if each is None else each.crc32c for each in facts]
        else:
            crcs = [crc32c(each) for each in values] if form.has_crcs else []
        if form.has_crcs:
            own_columns.append(pa.array(crcs, pa.uint32()))
        if form.is_picture:
            shapes = [(0,) * len(SIDES) if each is None else each.shape for each in facts]
            own_columns += [pa.array(sides, pa.int32()) for sides in zip(*shapes, strict=True)]
            codecs = ["" if each is None else each.codec for each in facts]
            own_columns.append(pa.array(codecs, pa.string()))
    own_columns.append(pa.array(content.source, pa.int64()))
    own_columns.append(pa.array(list(content.names), pa.large_binary()))
    metadata = {
        SHARD: str(VERSION).encode(),
        SCHEMA: _schema_text(content.schema),
        NAMES_SUM: sum_of_names(content.names),
        BLOCK_SUMS: write_block_sums(blocks),
    }
    schema = arrow_schema(forms).with_metadata(metadata)
    return pa.record_batch([*columns, *own_columns], schema=schema), sample_bytes


def _flat(form: PackForm, given: Arrays) -> tuple[Arrays, Numbers]:
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


def _schema_text(schema: Schema) -> bytes:
    fields = schema.to_json()
    text = json.dumps(fields).encode()
    if len(text) <= _MAX_SCHEMA_BYTES:
        return text
    nameless = [{**each, "names": []} if "names" in each else each for each in fields]
    return json.dumps(nameless).encode()


def _array(form: PackForm, values: Arrays, flat: Numbers, present: Bools | None) -> Any:
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
        return pa.Array.from_buffers(type, n, [validity, pa.py_buffer(offsets), pa.py_buffer(flat)])
    if form.kind == "ragged":
        child = _rows(type.value_type, int(offsets[-1]), form.numbers, flat, None)
        return _list(type, n, offsets, child, validity)
    lists, shapes = type.field(VALUES).type, type.field(SHAPES).type
    sides = np.array([each.shape for each in values], np.int64).reshape(-1)
    child = _rows(lists.value_type, len(flat), 1, flat, None)
    dimensions = _rows(shapes, n, shapes.list_size, sides, None)
    children = [_list(lists, n, offsets, child, None), dimensions]
    return pa.Array.from_buffers(type, n, [validity], children=children)


def _list(type: Any, n: int, offsets: Ints, child: Any, validity: Any) -> Any:
    return pa.Array.from_buffers(type, n, [validity, pa.py_buffer(offsets)], children=[child])


def _rows(type: Any, n: int, numbers: int, values: Numbers, validity: Any) -> Any:
    """Return an Arrow array of n numbers, or of n rows of `numbers` numbers each."""
    data = pa.py_buffer(values)
    if not pa.types.is_fixed_size_list(type):
        return pa.Array.from_buffers(type, n, [validity, data])
    child = pa.Array.from_buffers(type.value_type, n * numbers, [None, data])
    return pa.Array.from_buffers(type, n, [validity], children=[child])


def rewrite_source(path: bytes, schema: Schema, source: Ints) -> None:
    """Replace the column of source ids in a shard's file, in place.

    Only the packer calls it, before the pack is read. Raises CorruptShardError.
    """
    with shard_errors(printable(path)):
        at = PackColumns(map_buffer(path), schema).source_offset()
    with open(path, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(np.ascontiguousarray(source, "<i8").tobytes())
        os.fsync(file.fileno())
