"""Parse the columns of a pack's shard, field by field, strictly: it may come from anybody."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import CorruptShardError
from penstock.readers.fields import as_bits, codec_number
from penstock.readers.files import typed_batch
from penstock.readers.formats.open_shard import NO_SPAN
from penstock.readers.formats.pack.pack_forms import (
    BLOCK_SUMS,
    CHANNELS,
    CODEC,
    CRC,
    HEIGHT,
    NAME,
    NAMES_SUM,
    SHAPES,
    SOURCE,
    VALUES,
    WIDTH,
    arrow_schema,
    block_bounds,
    own_name,
    pack_forms,
    read_block_sums,
    sum_of_names,
)
from penstock.readers.formats.shard_summary import MAX_SHARD_BYTES, MAX_SIDE, FieldNotes, Sums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from penstock.readers.fields import Schema
    from penstock.readers.formats.open_shard import SampleLayout, SpanPlace
    from penstock.readers.formats.pack.pack_forms import PackForm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackField:
    """One field of the samples of a shard. rows: how many there are.

    values: of what is "value" (copied) or "dense" (a view of the file): shape (n, *row), or the
    bytes in which dense ones lie as bits. start: where that begins in the file. bounds: of the
    samples' bytes in the file where they are spans, int64, shape (n + 1,). crcs: CRC-32C of each
    sample, uint32, shape (n,), None of single numbers; blocks: of each block of dense rows. shapes:
    int64, shape (n, dimensions), of pictures (height, width, channels) and arrays. present: bool,
    shape (n,), None where no sample lacks the field.
    """

    form: PackForm
    rows: int
    start: int
    values: NDArray[Any] | None = None
    bounds: NDArray[np.int64] | None = None
    crcs: NDArray[np.uint32] | None = None
    blocks: NDArray[np.uint32] | None = None
    shapes: NDArray[np.int64] | None = None
    present: NDArray[np.bool_] | None = None

    def notes(self) -> FieldNotes:
        """What a manifest's sums are made of."""
        return FieldNotes(
            storage=self.form.storage,
            crcs=self.crcs,
            shapes=self.shapes,
            values=self.values if self.form.kind == "value" else None,
            present=self.present,
        )

    def fill(self, table: NDArray[np.int64], place: SpanPlace) -> None:
        """Fill the columns of a table that tell of spans."""
        assert self.bounds is not None
        assert self.crcs is not None
        there = self.present if self.present is not None else np.True_
        table[:, place.start] = np.where(there, self.bounds[:-1], NO_SPAN)
        table[:, place.end] = np.where(there, self.bounds[1:], NO_SPAN)
        table[:, place.crc] = self.crcs
        if place.height is not None and self.shapes is not None:
            table[:, place.height : place.height + 2] = self.shapes[:, :2]
        if place.codec is not None:
            table[:, place.codec] = codec_number(self.form.dtype.newbyteorder("<").str)
        if place.lengths is not None and self.shapes is not None:
            # What a sample lacks has no length, whatever lies there: others would shift by it.
            shapes = np.where(np.reshape(there, (-1, 1)), self.shapes, 0)
            table[:, place.lengths : place.lengths + shapes.shape[1]] = shapes


class PackColumns:
    """The columns of one shard. What is checked in numbers is copied: the file may change behind
    the check."""

    def __init__(self, buffer: Any, schema: Schema) -> None:
        """buffer: of the whole file. Nothing is looked at yet but head and tail: what stands
        between may come later, see `needed`. Raises one of BROKEN."""
        self.forms = pack_forms(schema)
        self._batch = typed_batch(buffer, arrow_schema(self.forms))
        self._address, self._size = buffer.address, buffer.size
        self.data = np.frombuffer(buffer, np.uint8)
        self._metadata = self._batch.schema.metadata or {}
        self._names: Any = None
        self._fields: dict[str, PackField] | None = None
        self._sums: Sums | None = None
        self._codecs: dict[str, list[str]] = {}
        for number in range(len(schema), self._batch.num_columns):
            if self._batch.column(number).null_count:
                raise ValueError("a column of Penstock's own has missing values")

    def __len__(self) -> int:
        return len(self._batch)

    def needed(self) -> list[tuple[int, int]]:
        """Where in the file that stands which tells where the samples are, [start, end) each: all
        but the bytes of samples, and arrays. Raises ValueError."""
        found = []
        for number, array in enumerate(self._batch.columns):
            buffers = array.buffers()
            if number < len(self.forms):
                form = self.forms[self._batch.schema.names[number]]
                buffers = _side_buffers(array, form)
            for each in buffers:
                if each is not None and each.size:
                    start = self._inside(each)
                    found.append((start, start + each.size))
        return found

    @property
    def fields(self) -> dict[str, PackField]:
        """All fields, in order. Raises ValueError, TypeError; CorruptShardError where they are no
        longer those that were forgotten."""
        if self._fields is None:
            sums = read_block_sums(self._metadata.get(BLOCK_SUMS, b"{}"))
            found = {name: self._field(name, own, sums) for name, own in self.forms.items()}
            if self._sums is not None and _sums_of(found) != self._sums:
                raise CorruptShardError(
                    "A pack's shard was changed while it was open. Fetch or pack it again."
                )
            self._fields = found
        return self._fields

    def forget(self) -> None:
        """Drop the fields, which take as much memory as the table that was made of them: who asks
        for them looks into the file again."""
        self._fields = None

    def table(self, layout: SampleLayout, *, samples: int, sums: Sums) -> NDArray[np.int64]:
        """The table of an open shard, whose spans count from the file's first byte. layout,
        samples, sums: what the manifest promises. Raises one of BROKEN."""
        if len(self) != samples:
            raise ValueError(f"{len(self)} samples, the manifest says {samples}")
        fields = self.fields
        for name, field in fields.items():
            if layout.storage[name] != field.form.storage:
                raise ValueError(f"{name!r} isn't stored as the manifest says")
            if field.present is not None and name not in layout.lacking:
                raise ValueError(f"samples lack {name!r}, and the manifest says that none does")
        if _sums_of(fields) != sums:
            raise ValueError("its columns aren't what the manifest promises")
        self._sums = sums
        columns = layout.table
        table = np.zeros((samples, columns.count), np.int64)
        for name, place in columns.spans.items():
            fields[name].fill(table, place)
        for name, at in columns.values.items():
            values = fields[name].values
            assert values is not None
            table[:, at] = as_bits(values)
        for name, at in columns.present.items():
            present = fields[name].present
            table[:, at] = 1 if present is None else present
        return table

    def source_offset(self) -> int:
        """Where the column of source ids begins in the file."""
        return self._place(self._batch.column(SOURCE), np.dtype(np.int64), len(self._batch))[0]

    def source(self) -> NDArray[np.int64]:
        """Each sample's id in the index that the pack was made from, int64, shape (n,)."""
        return self._own(SOURCE, np.int64)

    def source_names(self) -> list[bytes] | None:
        """Each sample's name in what the pack was made from; None where they were damaged."""
        column = self._batch.column(NAME)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return None
        names: list[bytes] = column.to_pylist()
        return names if self._metadata.get(NAMES_SUM) == sum_of_names(names) else None

    def names(self, rows: NDArray[np.int64]) -> list[bytes] | None:
        """As `source_names` has them, of some rows; they are checked once and then in memory."""
        if self._names is None:
            found = self.source_names()
            self._names = pa.array(found or [], pa.large_binary())
        if not len(self._names):
            return None
        names: list[bytes] = self._names.take(pa.array(rows)).to_pylist()
        return names

    def codecs(self, field: str) -> list[str]:
        """The codec of each sample of an image or a mask, in memory. Raises ValueError."""
        if field not in self._codecs:
            column = self._batch.column(own_name(CODEC, field))
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise ValueError(f"its codecs are damaged ({error})") from error
            self._codecs[field] = [sys.intern(codec) for codec in column.to_pylist()]
        return self._codecs[field]

    def _own(self, name: str, dtype: Any) -> NDArray[Any]:
        """A column of numbers of our own, copied."""
        n = len(self._batch)
        return self._numbers(self._batch.column(name), np.dtype(dtype), n)[1].copy()

    def _field(self, name: str, own: PackForm, sums: Mapping[str, NDArray[np.uint32]]) -> PackField:
        array, n = self._batch.column(name), len(self._batch)
        present = self._present(array)
        crcs = self._own(own_name(CRC, name), np.uint32) if own.has_crcs else None
        if own.kind == "value":
            start, values = self._rows(array, own, n)
            if own.is_bits:
                values = np.unpackbits(values, count=n, bitorder="little")
            return PackField(
                form=own, rows=n, start=start, values=values.view(own.dtype).copy(), present=present
            )
        if own.kind == "dense":
            start, values = self._rows(array, own, n)
            blocks = sums.get(name)
            if blocks is None or len(blocks) != len(block_bounds(own, n)) - 1:
                raise ValueError(f"{name!r} hasn't a checksum for each block")
            if not own.is_bits:
                values = values.view(own.dtype).reshape(n, *own.row)
            return PackField(
                form=own,
                rows=n,
                start=start,
                values=values,
                crcs=crcs,
                blocks=blocks,
                shapes=dense_shapes(own, n),
                present=present,
            )
        start, bounds, shapes = self._spans(array, own)
        if own.is_picture:
            sides = [self._own(own_name(k, name), np.int32) for k in (HEIGHT, WIDTH, CHANNELS)]
            shapes = np.stack(sides, axis=1).astype(np.int64)
            _check_pictures(np.diff(bounds), shapes, present)
        return PackField(
            form=own, rows=n, start=start, bounds=bounds, crcs=crcs, shapes=shapes, present=present
        )

    @staticmethod
    def _present(array: Any) -> NDArray[np.bool_] | None:
        if not array.null_count:
            return None
        n = len(array)
        bits = np.frombuffer(array.buffers()[0], np.uint8, -(-n // 8))
        return np.unpackbits(bits, count=n, bitorder="little").astype(bool)

    def _spans(
        self, array: Any, own: PackForm
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64] | None]:
        """Where the values begin in the file, the bounds of the samples' bytes there, and the
        shapes of what is ragged."""
        n = len(array)
        if own.kind == "bytes":
            buffers = array.buffers()
            offsets = _offsets(buffers[1], n, most=buffers[2].size if buffers[2] else 0)
            start = self._inside(buffers[2])
            return start, start + offsets, None
        lists = array.field(VALUES) if own.kind == "shaped" else array
        if own.kind == "shaped":
            _refuse_nulls(lists)
        child = lists.values
        _refuse_nulls(child)
        offsets = _offsets(lists.buffers()[1], n, most=len(child))
        start, _ = self._rows(child, own, len(child))
        bounds = start + offsets * own.row_bytes
        if own.kind == "ragged":
            return start, bounds, ragged_shapes(own, offsets)
        shapes = array.field(SHAPES)
        _refuse_nulls(shapes)
        dimensions = len(own.row)
        _, flat = self._numbers(shapes.values, np.dtype(np.int64), n * dimensions)
        found = flat.reshape(n, dimensions).copy()
        _check_shapes(found, np.diff(offsets), own)
        return start, bounds, found

    def _rows(self, array: Any, own: PackForm, n: int) -> tuple[int, NDArray[Any]]:
        """Where n rows begin in the file, and their numbers, flat (bits: bytes)."""
        count = n * own.numbers
        if array.type.num_fields:  # a list of one size
            array = array.values
            _refuse_nulls(array)
        if not own.is_bits:
            return self._numbers(array, own.lies, count)
        return self._place(array, np.dtype(np.uint8), -(-count // 8))

    def _numbers(self, array: Any, dtype: np.dtype[Any], count: int) -> tuple[int, NDArray[Any]]:
        if len(array) < count:
            raise ValueError(f"{len(array)} numbers, wanted {count}")
        return self._place(array, dtype, count)

    def _place(self, array: Any, dtype: np.dtype[Any], count: int) -> tuple[int, NDArray[Any]]:
        """Where an array's data begin in the file, and so many numbers of them."""
        data = array.buffers()[-1]
        start = self._inside(data)
        size_bytes = count * dtype.itemsize
        if size_bytes > (data.size if data else 0):
            raise ValueError(f"{size_bytes} bytes of numbers, wanted no more than there are")
        return start, self.data[start : start + size_bytes].view(dtype)

    def _inside(self, data: Any) -> int:
        """Where a buffer of the file begins in it."""
        if data is None or data.size == 0:
            return 0
        start = int(data.address - self._address)
        if start < 0 or start + data.size > self._size:
            raise ValueError("a column lies outside of the file")
        return start


def _sums_of(fields: Mapping[str, PackField]) -> Sums:
    return Sums.of({name: field.notes() for name, field in fields.items()})


def dense_shapes(own: PackForm, n: int) -> NDArray[np.int64] | None:
    """The shapes of n samples of one shape, int64, shape (n, dimensions); None of single numbers,
    as facts have it."""
    return np.broadcast_to(np.array(own.row, np.int64), (n, len(own.row))) if own.row else None


def ragged_shapes(own: PackForm, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The shapes of samples that differ in their first length, int64, shape (n, dimensions)."""
    rest = np.broadcast_to(np.array(own.row, np.int64), (len(offsets) - 1, len(own.row)))
    return np.concatenate((np.diff(offsets)[:, None], rest), axis=1)


def _side_buffers(array: Any, form: PackForm) -> list[Any]:
    """The buffers of a field's column that aren't its samples' bytes."""
    buffers = array.buffers()
    if form.kind == "value":
        return list(buffers)
    if form.kind == "dense":
        return [buffers[0]]
    if form.kind == "shaped":
        lists, shapes = array.field(VALUES), array.field(SHAPES)
        return [buffers[0], lists.buffers()[1], *shapes.buffers()]
    return [buffers[0], buffers[1]]


def _refuse_nulls(array: Any) -> None:
    if array.null_count or array.offset:
        raise ValueError("a list has missing values inside")


def _offsets(buffer: Any, n: int, *, most: int) -> NDArray[np.int64]:
    if buffer is None or buffer.size < 8 * (n + 1):
        raise ValueError("its offsets are too few")
    offsets: NDArray[np.int64] = np.frombuffer(buffer, np.int64, n + 1).copy()
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > most:
        raise ValueError("its offsets lead out of the file")
    return offsets


def _check_shapes(shapes: NDArray[np.int64], numbers: NDArray[np.int64], own: PackForm) -> None:
    """Whether arrays of these shapes have so many numbers. Raises ValueError."""
    if (shapes < 0).any() or shapes.max(initial=0) > MAX_SHARD_BYTES:
        raise ValueError("an array has a length that can't be")
    for number, length in enumerate(own.row):
        if length is not None and (shapes[:, number] != length).any():
            raise ValueError(f"an array's length {number} isn't {length}")
    # In floats, as whole numbers of that size may wrap around to the wanted ones; and without the
    # zeros, as nobody can reshape nothing to such a shape.
    most = np.where(shapes == 0, 1, shapes).astype(np.float64).prod(axis=1)
    total = shapes.astype(np.float64).prod(axis=1) * own.numbers
    if (total != numbers).any() or most.max(initial=0) > MAX_SHARD_BYTES:
        raise ValueError("an array's shape isn't that of its numbers")


def _check_pictures(
    sizes: NDArray[np.int64], shapes: NDArray[np.int64], present: NDArray[np.bool_] | None
) -> None:
    """Whether pictures can have these bytes, heights and widths. Raises ValueError."""
    if present is not None:
        sizes, shapes = sizes[present], shapes[present]
    for what, column, most in (
        ("bytes", sizes, MAX_SHARD_BYTES),
        ("rows of pixels", shapes[:, 0], MAX_SIDE),
        ("columns of pixels", shapes[:, 1], MAX_SIDE),
    ):
        if len(column) and not (column.min() >= 1 and column.max() <= most):
            raise ValueError(f"a sample has {column.min():,} to {column.max():,} {what}")
