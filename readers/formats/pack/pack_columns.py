"""Parse the columns of a pack's shard, field by field, strictly: the file may be forged."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import CorruptShardError
from penstock.readers.fieldtypes import as_bits, codec_number
from penstock.readers.files import only_batch
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

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.open_shard import SampleLayout, SpanPlace
    from penstock.readers.formats.pack.pack_forms import PackForm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackField:
    """One field of the samples of a shard. rows: number of samples.

    values: of "value" fields (copied) or "dense" ones (a view of the file): shape (n, *row), or the
    bytes of dense values that are stored as bits. start: first byte of the values in the file.
    bounds: of the samples' bytes in the file if they are spans, int64, shape (n + 1,). crcs:
    CRC-32C of each sample, uint32, shape (n,), None for single numbers. blocks: CRC-32C of each
    block of dense rows. shapes: int64, shape (n, dimensions), of pictures (height, width, channels)
    and arrays. present: bool, shape (n,), None if no sample lacks the field.
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
        """Return the facts from which the manifest's checksums are computed."""
        return FieldNotes(
            storage=self.form.storage,
            crcs=self.crcs,
            shapes=self.shapes,
            values=self.values if self.form.kind == "value" else None,
            present=self.present,
        )

    def fill(self, table: NDArray[np.int64], place: SpanPlace) -> None:
        """Write this field's spans into the table of an open shard."""
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
            # A missing array has length 0 whatever the file holds, so that it shifts no others.
            shapes = np.where(np.reshape(there, (-1, 1)), self.shapes, 0)
            table[:, place.lengths : place.lengths + shapes.shape[1]] = shapes


class PackColumns:
    """The columns of one shard. Checked numbers are copied: the file may change after the check."""

    def __init__(self, buffer: Any, schema: Schema) -> None:
        """Read the head and the tail of a shard.

        buffer: the whole file. The bytes between may arrive later, see `needed`. Raises one of
        BROKEN.
        """
        self.forms = pack_forms(schema)
        columns = {field.name: str(field.type) for field in arrow_schema(self.forms)}
        self._batch = only_batch(buffer, columns, is_full=False)
        self._address, self._size = buffer.address, buffer.size
        self.data = np.frombuffer(buffer, np.uint8)
        self._metadata = self._batch.schema.metadata or {}
        self._names: Any = None
        self._fields: dict[str, PackField] | None = None
        self._sums: Sums | None = None
        self._codecs: dict[str, list[str]] = {}
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
        """All fields, in order.

        Raises ValueError, TypeError; CorruptShardError if they differ from those that were dropped
        by `forget`.
        """
        if self._fields is None:
            sums = read_block_sums(self._metadata.get(BLOCK_SUMS, b"{}"))
            found = {name: self._field(name, form, sums) for name, form in self.forms.items()}
            if self._sums is not None and _sums_of(found) != self._sums:
                raise CorruptShardError(
                    "A pack's shard changed while it was open. Fetch or pack it again."
                )
            self._fields = found
        return self._fields

    def forget(self) -> None:
        """Drop the fields, which take as much memory as the table that was made of them.

        They are read from the file again when they are needed.
        """
        self._fields = None

    def table(self, layout: SampleLayout, *, samples: int, sums: Sums) -> NDArray[np.int64]:
        """Return the table of an open shard, whose spans count from the file's first byte.

        layout, samples, sums: as the manifest promises them. Raises one of BROKEN.
        """
        if len(self) != samples:
            raise ValueError(f"it has {len(self)} samples, the manifest promises {samples}")
        fields = self.fields
        for name, field in fields.items():
            if layout.storage[name] != field.form.storage:
                raise ValueError(f"{name!r} isn't stored as the manifest records it")
            if field.present is not None and name not in layout.lacking:
                raise ValueError(f"samples lack {name!r}, and the manifest promises that none does")
        if _sums_of(fields) != sums:
            raise ValueError("the checksums of its columns aren't those of the manifest")
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
        """Return the first byte of the column of source ids in the file."""
        return self._place(self._batch.column(SOURCE), np.dtype(np.int64), len(self._batch))[0]

    def source(self) -> NDArray[np.int64]:
        """Return each sample's id in the index of the pack's source, int64, shape (n,)."""
        return self._own(SOURCE, np.int64)

    def source_names(self) -> list[bytes] | None:
        """Return each sample's name in the pack's source, or None if the names are damaged."""
        column = self._batch.column(NAME)
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            return None
        names: list[bytes] = column.to_pylist()
        return names if self._metadata.get(NAMES_SUM) == sum_of_names(names) else None

    def names(self, rows: NDArray[np.int64]) -> list[bytes] | None:
        """Return the names of some rows as `source_names` does.

        All names are read and checked once, then kept in memory.
        """
        if self._names is None:
            found = self.source_names()
            self._names = pa.array(found or [], pa.large_binary())
        if not len(self._names):
            return None
        names: list[bytes] = self._names.take(pa.array(rows)).to_pylist()
        return names

    def codecs(self, field: str) -> list[str]:
        """Return the codec of each sample of an image or a mask, cached. Raises ValueError."""
        if field not in self._codecs:
            column = self._batch.column(own_name(CODEC, field))
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise ValueError(f"its codecs are damaged ({error})") from error
            self._codecs[field] = [sys.intern(codec) for codec in column.to_pylist()]
        return self._codecs[field]

    def _own(self, name: str, dtype: Any) -> NDArray[Any]:
        """Return a copy of one of our own columns of numbers."""
        n = len(self._batch)
        return self._numbers(self._batch.column(name), np.dtype(dtype), n)[1].copy()

    def _field(
        self, name: str, form: PackForm, sums: Mapping[str, NDArray[np.uint32]]
    ) -> PackField:
        array, n = self._batch.column(name), len(self._batch)
        present = self._present(array)
        crcs = self._own(own_name(CRC, name), np.uint32) if form.has_crcs else None
        if form.kind == "value":
            start, values = self._rows(array, form, n)
            if form.is_bits:
                values = np.unpackbits(values, count=n, bitorder="little")
            return PackField(
                form=form,
                rows=n,
                start=start,
                values=values.view(form.dtype).copy(),
                present=present,
            )
        if form.kind == "dense":
            start, values = self._rows(array, form, n)
            blocks = sums.get(name)
            if blocks is None or len(blocks) != len(block_bounds(form, n)) - 1:
                raise ValueError(f"{name!r} doesn't have a checksum for each block")
            if not form.is_bits:
                values = values.view(form.dtype).reshape(n, *form.row)
            return PackField(
                form=form,
                rows=n,
                start=start,
                values=values,
                crcs=crcs,
                blocks=blocks,
                shapes=dense_shapes(form, n),
                present=present,
            )
        start, bounds, shapes = self._spans(array, form)
        if form.is_picture:
            sides = [self._own(own_name(k, name), np.int32) for k in (HEIGHT, WIDTH, CHANNELS)]
            shapes = np.stack(sides, axis=1).astype(np.int64)
            _check_pictures(np.diff(bounds), shapes, present)
        return PackField(
            form=form, rows=n, start=start, bounds=bounds, crcs=crcs, shapes=shapes, present=present
        )

    @staticmethod
    def _present(array: Any) -> NDArray[np.bool_] | None:
        if not array.null_count:
            return None
        n = len(array)
        bits = np.frombuffer(array.buffers()[0], np.uint8, -(-n // 8))
        return np.unpackbits(bits, count=n, bitorder="little").astype(bool)

    def _spans(
        self, array: Any, form: PackForm
    ) -> tuple[int, NDArray[np.int64], NDArray[np.int64] | None]:
        """Return the first byte of the values in the file, the bounds of the samples' bytes, and
        the shapes of arrays."""
        n = len(array)
        if form.kind == "bytes":
            buffers = array.buffers()
            offsets = _offsets(buffers[1], n, most=buffers[2].size if buffers[2] else 0)
            start = self._inside(buffers[2])
            return start, start + offsets, None
        lists = array.field(VALUES) if form.kind == "shaped" else array
        if form.kind == "shaped":
            _refuse_nulls(lists)
        child = lists.values
        _refuse_nulls(child)
        offsets = _offsets(lists.buffers()[1], n, most=len(child))
        start, _ = self._rows(child, form, len(child))
        bounds = start + offsets * form.row_bytes
        if form.kind == "ragged":
            return start, bounds, ragged_shapes(form, offsets)
        shapes = array.field(SHAPES)
        _refuse_nulls(shapes)
        dimensions = len(form.row)
        _, flat = self._numbers(shapes.values, np.dtype(np.int64), n * dimensions)
        found = flat.reshape(n, dimensions).copy()
        _check_shapes(found, np.diff(offsets), form)
        return start, bounds, found

    def _rows(self, array: Any, form: PackForm, n: int) -> tuple[int, NDArray[Any]]:
        """Return the first byte of n rows in the file, and their numbers, flat (bits as bytes)."""
        count = n * form.numbers
        if array.type.num_fields:  # a fixed-size list
            array = array.values
            _refuse_nulls(array)
        if not form.is_bits:
            return self._numbers(array, form.stored, count)
        return self._place(array, np.dtype(np.uint8), -(-count // 8))

    def _numbers(self, array: Any, dtype: np.dtype[Any], count: int) -> tuple[int, NDArray[Any]]:
        if len(array) < count:
            raise ValueError(f"a column has {len(array)} numbers, wanted {count}")
        return self._place(array, dtype, count)

    def _place(self, array: Any, dtype: np.dtype[Any], count: int) -> tuple[int, NDArray[Any]]:
        """Return the first byte of an array's data in the file, and `count` numbers of them."""
        data = array.buffers()[-1]
        start = self._inside(data)
        size_bytes = count * dtype.itemsize
        if size_bytes > (data.size if data else 0):
            raise ValueError(
                f"a column has fewer than the {size_bytes} bytes that its numbers take"
            )
        return start, self.data[start : start + size_bytes].view(dtype)

    def _inside(self, data: Any) -> int:
        """Return the offset of a buffer in the file. Raises ValueError if it lies outside."""
        if data is None or data.size == 0:
            return 0
        start = int(data.address - self._address)
        if start < 0 or start + data.size > self._size:
            raise ValueError("a column extends past the end of the file")
        return start


def _sums_of(fields: Mapping[str, PackField]) -> Sums:
    return Sums.of({name: field.notes() for name, field in fields.items()})


def dense_shapes(form: PackForm, n: int) -> NDArray[np.int64] | None:
    """Return the shapes of n samples of one shape, int64, shape (n, dimensions).

    Returns None for single numbers.
    """
    return np.broadcast_to(np.array(form.row, np.int64), (n, len(form.row))) if form.row else None


def ragged_shapes(form: PackForm, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the shapes of samples whose first lengths differ, int64, shape (n, dimensions)."""
    rest = np.broadcast_to(np.array(form.row, np.int64), (len(offsets) - 1, len(form.row)))
    return np.concatenate((np.diff(offsets)[:, None], rest), axis=1)


def _side_buffers(array: Any, form: PackForm) -> list[Any]:
    """Return the buffers of a field's column that don't hold its samples' bytes."""
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
        raise ValueError("a list contains missing values")


def _offsets(buffer: Any, n: int, *, most: int) -> NDArray[np.int64]:
    if buffer is None or buffer.size < 8 * (n + 1):
        raise ValueError("it has too few offsets")
    offsets: NDArray[np.int64] = np.frombuffer(buffer, np.int64, n + 1).copy()
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > most:
        raise ValueError("its offsets decrease or point outside its data")
    return offsets


def _check_shapes(shapes: NDArray[np.int64], numbers: NDArray[np.int64], form: PackForm) -> None:
    """Check that arrays of these shapes have these counts of numbers. Raises ValueError."""
    if (shapes < 0).any() or shapes.max(initial=0) > MAX_SHARD_BYTES:
        raise ValueError("an array has an impossible length")
    for number, length in enumerate(form.row):
        if length is not None and (shapes[:, number] != length).any():
            raise ValueError(f"dimension {number} of an array isn't {length}")
    # In floats, because integers of that size may wrap around to the wanted ones. The second check
    # ignores zeros, because numpy refuses to reshape even an empty array to such a shape.
    most = np.where(shapes == 0, 1, shapes).astype(np.float64).prod(axis=1)
    total = shapes.astype(np.float64).prod(axis=1) * form.numbers
    if (total != numbers).any() or most.max(initial=0) > MAX_SHARD_BYTES:
        raise ValueError("an array's shape doesn't match its count of numbers")


def _check_pictures(
    sizes: NDArray[np.int64], shapes: NDArray[np.int64], present: NDArray[np.bool_] | None
) -> None:
    """Check the byte counts, heights and widths of pictures. Raises ValueError."""
    if present is not None:
        sizes, shapes = sizes[present], shapes[present]
    for what, column, most in (
        ("bytes", sizes, MAX_SHARD_BYTES),
        ("rows of pixels", shapes[:, 0], MAX_SIDE),
        ("columns of pixels", shapes[:, 1], MAX_SIDE),
    ):
        if len(column) and not (column.min() >= 1 and column.max() <= most):
            raise ValueError(f"a sample has {column.min():,} to {column.max():,} {what}")
