"""Parse the columns of a pack's shard, field by field, strictly: the file may be forged. Report the
errors of shards."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache import CorruptShardError, IndexChangedError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.byte_source import FileErrors
from penstock.readers.fieldtypes import codec_number
from penstock.readers.files import BROKEN, only_batch, printable
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
from penstock.readers.formats.shard_summary import FieldNotes, Sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Schema
    from penstock.readers.formats.open_shard import SampleLayout
    from penstock.readers.formats.pack.pack_forms import PackForm

    Ints = NDArray[np.int64]

REMEDY = "Run the same `penstock pack` again into an empty folder, or fetch the shard again."


class PackErrors(FileErrors):
    """The errors of a pack's shard file."""

    def changed(self, path: bytes, name: bytes, *, had: int, now: int | None) -> Exception:
        """Return the error for a shard that is missing, or has another size."""
        del name
        shown = printable(path)
        if now is None:
            return CorruptShardError(
                f"{shown}: the shard is missing, though the manifest names it. {REMEDY}"
            )
        kind, what = (
            (IndexChangedError, "changed") if now > had else (CorruptShardError, "truncated")
        )
        return kind(f"{shown}: {what}: got {now} bytes, the manifest promises {had}. {REMEDY}")

    def unreadable(self, path: bytes, error: OSError) -> Exception:
        """Return the error for a shard that can't be read."""
        return read_error(printable(path), error)


@contextmanager
def shard_errors(shown: str, remedy: str = "") -> Iterator[None]:
    """Report errors of parsing as those of the shard. Nothing is fetched inside the context. shown:
    its name. remedy: what to do; "" means packing or fetching it again."""
    try:
        yield
    except BROKEN as error:
        if machine_remedy(error) is not None:
            raise read_error(shown, error) from error
        raise CorruptShardError(
            f"{shown}: not a shard that Penstock wrote, or changed since then ({error}). "
            f"{remedy or REMEDY}"
        ) from error


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
    dense: NDArray[Any] | None = None
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
            buffers = _side_buffers(array, self.forms[name]) if name in self.forms else None
            for each in array.buffers() if buffers is None else buffers:
                if each is not None and each.size:
                    start = self._inside(each)
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
                sides = [self._own(kind, name, np.int32) for kind in (HEIGHT, WIDTH, CHANNELS)]
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
        start, values = self._rows(array, form, n)
        if form.kind == "value":
            if form.is_bits:
                values = np.unpackbits(values, count=n, bitorder="little")
            return PackField(start=start, values=values.view(form.dtype).copy(), **shared)
        blocks = sums.get(name)
        if blocks is None or len(blocks) != len(block_bounds(form, n)) - 1:
            raise ValueError(f"{name!r} doesn't have a checksum for each block")
        if not form.is_bits:
            values = values.view(form.dtype).reshape(n, *form.row)
        return PackField(
            start=start, dense=values, blocks=blocks, shapes=dense_shapes(form, n), **shared
        )

    def _own(self, kind: str, field: str, dtype: Any) -> NDArray[Any]:
        """Return a copy of one of our own columns of numbers."""
        column = self._batch.column(own_name(kind, field))
        return self._numbers(column, np.dtype(dtype), len(self))[1].copy()

    def _spans(self, array: Any, form: PackForm) -> tuple[int, Ints, Ints | None]:
        """Return the first byte of the values in the file, the bounds of the samples' bytes, and
        the shapes of arrays."""
        n = len(self)
        if form.kind == "bytes":
            _, offsets, data = array.buffers()
            start = self._inside(data)
            return start, start + _offsets(offsets, n, most=data.size if data else 0), None
        lists = array.field(VALUES) if form.kind == "shaped" else array
        if form.kind == "shaped":
            _refuse_nulls(lists)
        child = lists.values
        _refuse_nulls(child)
        offsets = _offsets(lists.buffers()[1], n, most=len(child))
        start, _ = self._rows(child, form, len(child))
        if form.kind == "ragged":
            rest = np.broadcast_to(np.array(form.row, np.int64), (n, len(form.row)))
            shapes = np.concatenate((np.diff(offsets)[:, None], rest), axis=1)
        else:
            dimensions = array.field(SHAPES)
            _refuse_nulls(dimensions)
            count = n * len(form.row)
            _, flat = self._numbers(dimensions.values, np.dtype(np.int64), count)
            shapes = flat.reshape(n, len(form.row)).copy()
        return start, start + offsets * form.row_bytes, shapes

    def _rows(self, array: Any, form: PackForm, n: int) -> tuple[int, NDArray[Any]]:
        """Return the first byte of n rows in the file, and their numbers, flat (bits as bytes)."""
        count = n * form.numbers
        if array.type.num_fields:  # a fixed-size list
            array = array.values
            _refuse_nulls(array)
        if form.is_bits:
            return self._place(array, np.dtype(np.uint8), -(-count // 8))
        return self._numbers(array, form.stored, count)

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
        return start, self._data[start : start + size_bytes].view(dtype)

    def _inside(self, data: Any) -> int:
        """Return the offset of a buffer in the file. Raises ValueError if it lies outside."""
        if data is None or data.size == 0:
            return 0
        start = int(data.address - self._address)
        if start < 0 or start + data.size > self._size:
            raise ValueError("a column extends past the end of the file")
        return start


def dense_shapes(form: PackForm, n: int) -> Ints | None:
    """Return the shapes of n samples of one shape, int64, shape (n, dimensions).

    Returns None for single numbers.
    """
    return np.broadcast_to(np.array(form.row, np.int64), (n, len(form.row))) if form.row else None


def _present(array: Any) -> NDArray[np.bool_] | None:
    if not array.null_count:
        return None
    n = len(array)
    bits = np.frombuffer(array.buffers()[0], np.uint8, -(-n // 8))
    return np.unpackbits(bits, count=n, bitorder="little").astype(bool)


def _side_buffers(array: Any, form: PackForm) -> list[Any]:
    """Return the buffers of a field's column that don't hold its samples' bytes."""
    buffers: list[Any] = array.buffers()
    if form.kind == "value":
        return buffers
    if form.kind == "shaped":
        lists, shapes = array.field(VALUES).buffers(), array.field(SHAPES).buffers()
        return [buffers[0], *lists[:-1], *shapes]
    return buffers[:-1]


def _refuse_nulls(array: Any) -> None:
    if array.null_count or array.offset:
        raise ValueError("a list contains missing values")


def _offsets(buffer: Any, n: int, *, most: int) -> Ints:
    if buffer is None or buffer.size < 8 * (n + 1):
        raise ValueError("it has too few offsets")
    offsets: Ints = np.frombuffer(buffer, np.int64, n + 1).copy()
    if offsets[0] < 0 or (offsets[1:] < offsets[:-1]).any() or offsets[-1] > most:
        raise ValueError("its offsets decrease or point outside its data")
    return offsets
