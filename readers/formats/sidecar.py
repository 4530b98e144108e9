"""Write and read the sidecar of a shard: what an index notes of its samples, enough to read them.

It is an Arrow file of one row of lists, because a shard has any number of files, and its fields any
number of bytes, lengths and values. Of a field whose bytes lie in files, it notes where each
sample's payload lies and what it is (`SpanNotes`); a field whose values were known at listing is
noted with its values, and no file is read for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import CorruptShardError, IndexChangedError, ReadError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.fields import (
    CODEC_ITEMSIZES,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    array_form,
    as_bits,
    codec_number,
    has_sides,
    is_encoded,
    number_dtype,
)
from penstock.readers.files import (
    BROKEN,
    Columns,
    LazyColumn,
    are_unsafe,
    map_buffer,
    only_batch,
    printable,
    read_buffer,
    write_batch,
    write_whole,
)
from penstock.readers.formats.candidates import MISSING
from penstock.readers.formats.extents import ShardFiles
from penstock.readers.formats.local_files import REINDEX
from penstock.readers.formats.open_shard import NO_SPAN
from penstock.readers.formats.shard_summary import (
    MAX_SHARD_BYTES,
    MAX_SHARD_SAMPLES,
    MAX_SIDE,
    VERSION,
    FieldNotes,
    summarise,
)
from penstock.readers.formats.span_shard import FilesShard, MappedShard, SpanBlob

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Blob, Segment
    from penstock.cache.blobs import Remote
    from penstock.readers.fields import ArrayForm, Column, FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.extents import ChunkedShard, Extents
    from penstock.readers.formats.open_shard import OpenShard, SampleLayout, SpanPlace, Storage
    from penstock.readers.formats.shard_summary import ShardSummary
    from penstock.readers.types import Encoded, Facts

# A field's name has no slash, so none of these is a field's.
NAMES, ROWS, NOTES = "/names", "/rows", "/notes"
FILES = {
    "/files/name": pa.large_binary(),
    "/files/bytes": pa.int64(),
    "/files/mtime_ns": pa.int64(),
    "/files/version": pa.string(),
}
EXTENTS = {
    "/extents/file": pa.int32(),
    "/extents/start": pa.int64(),
    "/extents/bytes": pa.int64(),
    "/extents/field": pa.int16(),
}
UNITS = "/units"
SPAN = {
    "file": pa.int32(),
    "start": pa.int64(),
    "bytes": pa.int64(),
    "crc32c": pa.uint32(),
    "shape": pa.int64(),
    "codec": pa.string(),
}
"""What is noted of a span: its payload in a file, one number a sample, and its shape's lengths."""


def kinds_of(layout: SampleLayout) -> dict[str, Any]:
    """The lists of a sidecar, by name and in order, with the Arrow types of their values."""
    kinds: dict[str, Any] = {
        NAMES: pa.large_binary(),
        ROWS: pa.int64(),
        NOTES: pa.large_binary(),
        **FILES,
    }
    if is_of_chunks(layout):
        kinds |= {**EXTENTS, UNITS: pa.int64()}
    for name in layout.schema:
        if layout.storage[name] == "chunks":
            continue
        if layout.storage[name] == "span":
            kinds |= {f"{name}/{what}": kind for what, kind in SPAN.items()}
        else:
            kinds |= {f"{name}/{what}": kind for what, kind in _noted_kinds(layout, name).items()}
            kinds[f"{name}/present"] = pa.bool_()
    return kinds


def is_of_chunks(layout: SampleLayout) -> bool:
    """Whether samples lie in chunks, which metadata tell of."""
    return "chunks" in layout.storage.values()


def columns_of(layout: SampleLayout) -> Columns:
    """The columns of a sidecar's one row, by name and in order."""
    return {name: str(pa.large_list(kind)) for name, kind in kinds_of(layout).items()}


def _noted_kinds(layout: SampleLayout, name: str) -> dict[str, Any]:
    type = layout.schema[name]
    if is_encoded(type):
        return {"values": pa.large_binary()}
    dtype = number_dtype(type)
    if dtype is not None:
        return {"values": _arrow_type(dtype)}
    form = form_of(layout, name)
    kinds = {"values": _arrow_type(form.dtype)}
    if form.is_ragged:
        kinds["counts"] = pa.int64()
        if form.rest is None:
            kinds["shapes"] = pa.int64()
    return kinds


def form_of(layout: SampleLayout, name: str) -> ArrayForm:
    """Dtype and shape of an array that is noted."""
    form = array_form(layout.schema[name])
    if form is None:
        raise TypeError(f"{name}: what is noted of {layout.schema[name]!r} isn't known")
    return form


def _arrow_type(dtype: np.dtype[Any]) -> Any:
    # Arrow has no complex numbers: two floats each.
    return pa.from_numpy_dtype(_real(dtype))


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


class Lists:
    """The lists of a sidecar that is read, by name. batch: its one row, checked to have the columns
    of `columns_of`. Raises ValueError for missing values inside."""

    def __init__(self, batch: Any) -> None:
        if batch.num_rows != 1:
            raise ValueError(f"{batch.num_rows} rows, wanted 1")
        self._batch = batch

    def arrow(self, name: str, *, length: int | None = None) -> Any:
        """A list as an Arrow array. length: what it must have."""
        lists = self._batch.column(name)
        # By hand: `flatten` imports pyarrow.compute, which takes longer than opening a dataset.
        start, end = lists.offsets.to_numpy().tolist()
        values = lists.values[start:end]
        if values.null_count:
            raise ValueError(f"{name} has missing values")
        if length is not None and len(values) != length:
            raise ValueError(f"{name} has {len(values):,} values, wanted {length:,}")
        return values

    def numbers(self, name: str, *, length: int | None = None) -> NDArray[Any]:
        """A list of numbers."""
        found: NDArray[Any] = self.arrow(name, length=length).to_numpy(zero_copy_only=False)
        return found


class ListsDraft:
    """The lists of a sidecar to be written."""

    def __init__(self, layout: SampleLayout) -> None:
        self._layout, self._kinds = layout, kinds_of(layout)
        self._arrays: dict[str, Any] = {}

    def add(self, lists: Mapping[str, Any]) -> None:
        """Add lists by name."""
        for name, values in lists.items():
            self._arrays[name] = pa.array(values, self._kinds[name])

    def add_noted(self, name: str, column: Column, present: NDArray[np.bool_]) -> None:
        """Add a field whose values are noted."""
        for what in _noted_kinds(self._layout, name):
            self.add({f"{name}/{what}": _PARTS[what](column)})
        self.add({f"{name}/present": present})

    def batch(self, metadata: Mapping[str, str]) -> Any:
        """The record batch of one row."""
        columns = {
            name: pa.LargeListArray.from_arrays(
                pa.array([0, len(self._arrays[name])], pa.int64()), self._arrays[name]
            )
            for name in self._kinds
        }
        return pa.record_batch(columns).replace_schema_metadata(dict(metadata))


def _values(column: Column) -> Any:
    if isinstance(column, DenseColumn | RaggedColumn):
        flat = np.ascontiguousarray(column.values).reshape(-1)
        return flat.view(_real(flat.dtype))
    return [bytes(each) if isinstance(each, np.ndarray) else each for each in column.samples]


def _counts(column: Column) -> NDArray[np.int64]:
    assert isinstance(column, RaggedColumn)
    return np.diff(column.offsets)


def _shapes(column: Column) -> NDArray[np.int64]:
    assert isinstance(column, RaggedColumn)
    assert column.shapes is not None
    return column.shapes.reshape(-1)


_PARTS = {"values": _values, "counts": _counts, "shapes": _shapes}


def noted_column(lists: Lists, layout: SampleLayout, name: str, *, samples: int) -> Column:
    """A field's values as they were noted. Raises ValueError for what can't be."""
    if is_encoded(layout.schema[name]):
        return _encoded(lists.arrow(f"{name}/values", length=samples))
    dtype = number_dtype(layout.schema[name])
    if dtype is not None:
        values = lists.numbers(f"{name}/values").view(dtype)
        if len(values) != samples:
            raise ValueError(f"{name} has {len(values):,} values, wanted {samples:,}")
        return DenseColumn(values)
    form = form_of(layout, name)
    flat = lists.numbers(f"{name}/values").view(form.dtype)
    if not form.is_ragged:
        return DenseColumn(flat.reshape(samples, *form.shape))
    counts = lists.numbers(f"{name}/counts", length=samples)
    offsets = _offsets(counts)
    if form.rest is not None:
        values = flat.reshape(-1, *form.rest) if all(form.rest) else flat.reshape(0, *form.rest)
        _check_end(name, offsets, len(values))
        return RaggedColumn(values, offsets)
    shapes = lists.numbers(f"{name}/shapes", length=samples * len(form.shape))
    shapes = shapes.reshape(samples, len(form.shape))
    if (shapes < 0).any() or (shapes.prod(axis=1) != counts).any():
        raise ValueError(f"{name} has shapes that don't fit its counts")
    _check_end(name, offsets, len(flat))
    return RaggedColumn(flat, offsets, shapes)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(counts) and (counts.min() < 0 or float(counts.sum(dtype=np.float64)) > 2**62):
        raise ValueError("counts that can't be")
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int64)


def _check_end(name: str, offsets: NDArray[np.int64], length: int) -> None:
    if offsets[-1] != length:
        raise ValueError(f"{name} has {length:,} values, and its counts say {offsets[-1]:,}")


def _encoded(values: Any) -> EncodedColumn:
    ends, data = _flat(values)
    return EncodedColumn([data[a:b] for a, b in pairwise(ends.tolist())])


def _flat(values: Any) -> tuple[NDArray[np.int64], Encoded]:
    """Where values of large_binary end, from the first one's start on, and all their bytes."""
    _, offsets, flat = values.buffers()
    if not len(values):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.empty(0, np.uint8) if flat is None else np.frombuffer(flat, np.uint8)
    return ends - ends[0], data[ends[0] : ends[-1]]


def own_copy(values: Any) -> Any:
    """Values of large_binary in memory of their own: who keeps them keeps no whole sidecar."""
    ends, data = _flat(values)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data.copy())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), buffers)


def notes_of_column(
    column: Column, storage: Storage, present: NDArray[np.bool_] | None
) -> FieldNotes:
    """What goes into a manifest. present: which samples have the field, None for all."""
    if storage == "value":
        assert isinstance(column, DenseColumn)
        return FieldNotes(storage=storage, values=column.values, present=present)
    if isinstance(column, EncodedColumn):
        crcs = [crc32c(each) for each in column.samples]
        return FieldNotes(storage=storage, crcs=np.array(crcs, np.uint32), present=present)
    assert isinstance(column, DenseColumn | RaggedColumn)
    samples = [
        column.values[row] if isinstance(column, DenseColumn) else column.sample(row)
        for row in range(len(column))
    ]
    little = column.values.dtype.newbyteorder("<")
    flat = [np.ascontiguousarray(each, little).reshape(-1).view(np.uint8) for each in samples]
    lengths = np.array([each.shape for each in samples], np.int64)
    return FieldNotes(
        storage=storage,
        crcs=np.array([crc32c(each) for each in flat], np.uint32),
        shapes=lengths.reshape(len(samples), -1) if lengths.size else None,
        present=present,
    )


def as_read_back(column: Column) -> Column:
    """A column as a sidecar that is read has it: texts are bytes."""
    if not isinstance(column, ListColumn):
        return column
    texts = [each.encode() if isinstance(each, str) else each for each in column.samples]
    return EncodedColumn([np.frombuffer(each, np.uint8) for each in texts])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanNotes:
    """Of one field of n samples, each of shape (n,).

    files: number of the shard's file, int32, MISSING where a sample lacks it; starts, sizes: bytes
    of the payload there, int64; crcs: CRC-32C of it, uint32. shapes: int64, shape (n, dimensions),
    None where there are none. codecs: as facts have them, "" where a sample lacks it.
    """

    files: NDArray[np.int32]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    shapes: NDArray[np.int64] | None
    codecs: Sequence[str]

    @classmethod
    def of(
        cls, files: NDArray[np.int64], starts: NDArray[np.int64], facts: Sequence[Facts | None]
    ) -> SpanNotes:
        """Of samples that were examined. files: as above; starts: of what was examined there."""
        dimensions = max((len(each.shape) for each in facts if each is not None), default=0)
        nothing = (0,) * dimensions
        begun = np.array([0 if each is None else each.start for each in facts], np.int64)
        lengths = [nothing if each is None else each.shape for each in facts]
        shapes = np.array(lengths, np.int64).reshape(len(facts), dimensions)
        return cls(
            files=files.astype(np.int32),
            starts=np.where(files == MISSING, 0, starts + begun),
            sizes=np.array([0 if each is None else each.size for each in facts], np.int64),
            crcs=np.array([0 if each is None else each.crc32c for each in facts], np.uint32),
            shapes=shapes if dimensions else None,
            codecs=["" if each is None else each.codec for each in facts],
        )

    @classmethod
    def read(cls, lists: Lists, name: str, *, samples: int) -> SpanNotes:
        """What a sidecar says of a field. Raises ValueError."""
        shapes = lists.numbers(f"{name}/shape")
        if len(shapes) % samples:
            raise ValueError(f"{name} has {len(shapes):,} lengths for {samples:,} samples")
        files, starts, sizes, crcs = (
            lists.numbers(f"{name}/{what}", length=samples)
            for what in ("file", "start", "bytes", "crc32c")
        )
        return cls(
            files=files,
            starts=starts,
            sizes=sizes,
            crcs=crcs,
            shapes=shapes.reshape(samples, -1) if len(shapes) else None,
            codecs=LazyColumn(lists.arrow(f"{name}/codec", length=samples)),
        )

    def lists(self) -> dict[str, Any]:
        """What goes into a sidecar, in the order of `SPAN`."""
        shapes = np.empty(0, np.int64) if self.shapes is None else self.shapes.reshape(-1)
        lists = (self.files, self.starts, self.sizes, self.crcs, shapes, list(self.codecs))
        return dict(zip(SPAN, lists, strict=True))

    @property
    def present(self) -> NDArray[np.bool_]:
        """Which samples have the field."""
        there: NDArray[np.bool_] = self.files != MISSING
        return there

    def notes(self, *, progressive: int | None) -> FieldNotes:
        """What goes into a manifest."""
        return FieldNotes(
            storage="span",
            crcs=self.crcs,
            shapes=self.shapes,
            codecs=self.codecs,
            present=None if self.present.all() else self.present,
            progressive=progressive,
        )

    def check(self, file_sizes: NDArray[np.int64], type: FieldType) -> None:
        """Whether samples can be so, as a sidecar may come from anybody. Raises ValueError."""
        there = self.present
        files, starts, sizes = self.files[there], self.starts[there], self.sizes[there]
        if len(self.files) and (self.files.min() < MISSING or self.files.max() >= len(file_sizes)):
            raise ValueError("a sample lies in a file that isn't there")
        if not len(files):
            return
        least = 1 if has_sides(type) else 0
        if not (sizes.min() >= least and sizes.max() <= MAX_SHARD_BYTES):
            raise ValueError(f"a sample has {sizes.min():,} to {sizes.max():,} bytes")
        # In this order: a sum of two may pass 2^63.
        if not (
            starts.min() >= 0
            and starts.max() <= MAX_SHARD_BYTES
            and (starts + sizes <= file_sizes[files]).all()
        ):
            raise ValueError("its offsets lead out of the file")
        if has_sides(type):
            self._check_sides(there)
        form = array_form(type)
        if form is not None:
            self._check_arrays(form, there)

    def _check_sides(self, there: NDArray[np.bool_]) -> None:
        if self.shapes is None or self.shapes.shape[1] != 3:
            raise ValueError("images without height, width and channels")
        sides = self.shapes[there, :2]
        if not (sides.min() >= 1 and sides.max() <= MAX_SIDE):
            raise ValueError(f"an image has {sides.min():,} to {sides.max():,} pixels a side")

    def _check_arrays(self, form: ArrayForm, there: NDArray[np.bool_]) -> None:
        """Whether each array has the bytes that its shape takes."""
        count = int(there.sum())
        shapes = np.empty((count, 0), np.int64) if self.shapes is None else self.shapes[there]
        if shapes.shape[1] != len(form.shape):
            raise ValueError(f"arrays of {shapes.shape[1]} dimensions, wanted {len(form.shape)}")
        for lengths, wanted in zip(shapes.T, form.shape, strict=True):
            if lengths.min() < 0 or (wanted is not None and (lengths != wanted).any()):
                raise ValueError(f"an array has a length of {lengths.min():,}, wanted {wanted}")
        itemsizes = CODEC_ITEMSIZES[self._codec_numbers()[there]]
        # As floats: products of lengths may pass 2^63, and sizes that can be are exact.
        if (shapes.prod(axis=1, dtype=np.float64) * itemsizes != self.sizes[there]).any():
            raise ValueError("an array hasn't the bytes that its shape takes")
        # Beside a length of 0 the others are held by no bytes, and numpy makes no such array.
        most = np.where(shapes == 0, 1, shapes).prod(axis=1, dtype=np.float64)
        if most.max() > MAX_SHARD_BYTES:
            raise ValueError("an array has a length that can't be")

    def fill(self, table: NDArray[np.int64], place: SpanPlace, begins: NDArray[np.int64]) -> None:
        """Fill a table's columns. begins: of each file in the shard's flat data."""
        there = self.present
        starts = begins[self.files] + self.starts
        table[:, place.start] = np.where(there, starts, NO_SPAN)
        table[:, place.end] = np.where(there, starts + self.sizes, NO_SPAN)
        table[:, place.crc] = self.crcs
        if place.height is not None and self.shapes is not None:
            table[:, place.height : place.height + 2] = self.shapes[:, :2]
        if place.codec is not None:
            table[:, place.codec] = self._codec_numbers()
        if place.lengths is not None and self.shapes is not None:
            # What a sample lacks has no length, whatever a sidecar says: others would shift by it.
            shapes = np.where(there[:, None], self.shapes, 0)
            table[:, place.lengths : place.lengths + shapes.shape[1]] = shapes

    def _codec_numbers(self) -> NDArray[np.int64]:
        numbers: dict[str, int] = {"": 0}
        for codec in set(self.codecs) - {""}:
            numbers[codec] = codec_number(codec)
        return np.array([numbers[codec] for codec in self.codecs], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecar:
    """What an index notes of one shard's n samples, at least one.

    layout: of the dataset. is_file_per_sample: as its format says. rows: n. names: of the samples,
    for people; none where the format tells them. files: those that spans lie in, in order. spans,
    values: of each field that is stored so or noted. present: of noted fields that some samples
    lack, bool, shape (n,). extents, units, notes: of a shard of chunks, see `ChunkedShard`.
    """

    layout: SampleLayout
    is_file_per_sample: bool
    rows: int
    names: Sequence[bytes]
    files: ShardFiles
    spans: Mapping[str, SpanNotes]
    values: Mapping[str, Column]
    present: Mapping[str, NDArray[np.bool_]]
    notes: bytes = b""
    extents: Extents | None = None
    units: Sequence[int] = ()

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return self.rows

    @property
    def size_bytes(self) -> int:
        """The bytes of the shard's files, or of a shard of chunks those that are its samples'."""
        return self.files.size_bytes if self.extents is None else self.extents.size_bytes

    @property
    def suffix(self) -> bytes:
        """What the stem of the sidecar's name ends in: the identity of a file that is the shard, so
        that processes agree on its blob by the manifest alone, and before there is one."""
        if self.is_file_per_sample or len(self.files) != 1:
            return b""
        (file,) = self.files.entries()
        return b"-" + file.identity.encode()

    def segments(self, fields: Sequence[str] = (), *, may_lack: bool = False) -> Sequence[Segment]:
        """The objects that the shard is made of, in a remote dataset. fields: of a shard of chunks,
        whose bytes alone are wanted; may_lack: an object of it that isn't there is no error."""
        if self.extents is None:
            return self.files.segments()
        from penstock.readers.formats.extents import BlobExtents  # spans need none of it

        return BlobExtents(self, fields).segments(may_lack=may_lack)

    def field_notes(self, progressive: Mapping[str, int]) -> dict[str, FieldNotes]:
        """What is noted of each field."""
        notes: dict[str, FieldNotes] = {}
        for name in self.layout.schema:
            if name in self.spans:
                notes[name] = self.spans[name].notes(progressive=progressive.get(name))
            else:
                storage, present = self.layout.storage[name], self.present.get(name)
                notes[name] = notes_of_column(self.values[name], storage, present)
        return notes

    def summary(self, *, progressive: Mapping[str, int] | None = None) -> ShardSummary:
        """The shard's contribution to the manifest. progressive: JPEGs of that kind, of each field
        where they were counted."""
        return summarise(
            self.layout.schema,
            self.field_notes(progressive or {}),
            samples=self.samples,
            size_bytes=self.size_bytes,
            files=len(self.files),
        )

    def open_local(self, root: bytes) -> OpenShard:
        """Open the shard below a local folder: a file that is a shard is mapped, others are read.
        Raises IndexChangedError, DatasetError."""
        files, table, rows = self.files, self._table(), self._rows()
        if not self.is_file_per_sample and len(files) == 1:
            return MappedShard(root, files, table, names=self.names, columns=rows)
        return FilesShard(
            root, files, table, names=self.names, columns=rows, are_samples=self._are_files()
        )

    def open_blob(self, remote: Remote, blob: Blob) -> OpenShard:
        """Open the shard in a blob of the cache, in which its files lie end to end."""
        return SpanBlob(remote, blob, self._table(), names=self.names, columns=self._rows())

    def _are_files(self) -> bool:
        """Whether each sample is a file, whole, and nothing else that is read."""
        if len(self.spans) != 1 or len(self.files) != self.samples:
            return False
        (notes,) = self.spans.values()
        return bool(
            np.array_equal(notes.files, np.arange(self.samples))
            and np.array_equal(notes.sizes, self.files.sizes)
        )

    def _rows(self) -> dict[str, Column]:
        return {name: self.values[name] for name in self.layout.stored("rows")}

    def _table(self) -> NDArray[np.int64]:
        columns = self.layout.table
        table = np.zeros((self.samples, columns.count), np.int64)
        begins = self.files.starts
        for name, place in columns.spans.items():
            self.spans[name].fill(table, place, begins)
        for name, at in columns.values.items():
            column = self.values[name]
            assert isinstance(column, DenseColumn)
            table[:, at] = as_bits(column.values)
        for name, at in columns.present.items():
            table[:, at] = self.present.get(name, 1)
        return table

    def write(self, path: bytes) -> str:
        """Write the sidecar whole; returns its etag (a checksum of the file). Raises WriteError."""
        draft, files = ListsDraft(self.layout), self.files
        draft.add({NAMES: list(self.names), ROWS: [self.rows], NOTES: [self.notes]})
        if self.extents is not None:
            told = self.extents
            columns = (told.files, told.starts, told.sizes, told.fields)
            draft.add(dict(zip(EXTENTS, columns, strict=True)))
            draft.add({UNITS: np.array(self.units, np.int64)})
        facts = (list(files.names), files.sizes, files.mtimes_ns, list(files.versions))
        draft.add(dict(zip(FILES, facts, strict=True)))
        for name in self.layout.schema:
            if self.layout.storage[name] == "chunks":
                continue
            if name in self.spans:
                draft.add({f"{name}/{k}": v for k, v in self.spans[name].lists().items()})
            else:
                everyone = np.ones(self.samples, np.bool_)
                draft.add_noted(name, self.values[name], self.present.get(name, everyone))
        batch = draft.batch({"penstock.sidecar": str(VERSION)})
        write_whole(path, lambda temp: write_batch(temp, batch))
        return sidecar_etag(path)


def make_sidecar(
    candidates: Candidates,
    positions: NDArray[np.int64],
    facts: Sequence[Mapping[str, Facts]],
    *,
    layout: SampleLayout,
    is_file_per_sample: bool,
) -> Sidecar:
    """The sidecar of a shard's good samples, at least one. positions: of those candidates, int64,
    shape (n,); facts: of each, by field."""
    spans = {name: candidates.spans[name] for name in layout.stored("span")}
    numbers = [each.files[positions] for each in spans.values()]
    used, local = _renumbered(numbers)
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        rows=len(positions),
        names=[candidates.names[i] for i in positions.tolist()],
        files=ShardFiles.of([candidates.files[number] for number in used]),
        spans={
            name: SpanNotes.of(files, each.starts[positions], [one.get(name) for one in facts])
            for (name, each), files in zip(spans.items(), local, strict=True)
        },
        values={
            name: as_read_back(column.take(positions)) for name, column in candidates.values.items()
        },
        present={name: there[positions] for name, there in candidates.present.items()},
    )


def make_chunked_sidecar(shard: ChunkedShard, *, layout: SampleLayout) -> Sidecar:
    """The sidecar of a shard of chunks, by its metadata alone."""
    return Sidecar(
        layout=layout,
        is_file_per_sample=False,
        rows=shard.samples,
        names=(),
        files=ShardFiles.of(shard.files),
        spans={},
        values={},
        present={},
        notes=shard.notes,
        extents=shard.extents,
        units=shard.units,
    )


def _renumbered(numbers: Sequence[NDArray[np.int64]]) -> tuple[list[int], list[NDArray[np.int64]]]:
    """The files that some samples lie in, sample by sample, so that what is read together lies
    together; and the samples' files by number among those. numbers: of each field, shape (n,)."""
    if not numbers:
        return [], []
    found, first = np.unique(np.stack(numbers, axis=1), return_index=True)
    found, first = found[found != MISSING], first[found != MISSING]
    order = np.argsort(first)
    places = np.append(np.empty(len(order), np.int64), MISSING)
    places[order] = np.arange(len(order))
    local = [
        places[np.where(each == MISSING, len(order), np.searchsorted(found, each))]
        for each in numbers
    ]
    return found[order].tolist(), local


def read_sidecar(
    path: bytes,
    *,
    etag: str,
    layout: SampleLayout,
    is_file_per_sample: bool,
    url: str | None = None,
) -> Sidecar:
    """Read a sidecar that was written. etag: what the manifest promises; url: the object that this
    file is a copy of, if it is one. Raises IndexChangedError (it is gone), CorruptShardError (torn,
    changed, or it says what can't be), ReadError."""
    batch = sidecar_batch(path, columns_of(layout), etag=etag, url=url)
    try:
        return _content(Lists(batch), layout, is_file_per_sample=is_file_per_sample)
    except BROKEN as error:
        raise torn_sidecar_error(path, error, url) from error


def _content(lists: Lists, layout: SampleLayout, *, is_file_per_sample: bool) -> Sidecar:
    (rows,) = lists.numbers(ROWS, length=1).tolist()
    (notes,) = lists.arrow(NOTES, length=1).to_pylist()
    if not 1 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(f"it has {rows:,} samples")
    is_chunked = is_of_chunks(layout)
    names = LazyColumn(own_copy(lists.arrow(NAMES, length=0 if is_chunked else rows)))
    files = _files(lists)
    extents, units = None, list[int]()
    if is_chunked:
        extents = _extents(lists, files, fields=len(layout.schema))
        units = lists.numbers(UNITS).tolist()
    spans, values, present = {}, {}, {}
    for name, type in layout.schema.items():
        if layout.storage[name] == "chunks":
            continue
        if layout.storage[name] == "span":
            spans[name] = SpanNotes.read(lists, name, samples=rows)
            spans[name].check(files.sizes, type)
            continue
        values[name] = noted_column(lists, layout, name, samples=rows)
        there = lists.numbers(f"{name}/present", length=rows)
        if not there.all():
            present[name] = there
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        rows=rows,
        names=names,
        files=files,
        spans=spans,
        values=values,
        present=present,
        notes=notes,
        extents=extents,
        units=units,
    )


def _extents(lists: Lists, files: ShardFiles, *, fields: int) -> Extents:
    """The extents of a shard of chunks, which lie in its files. Raises ValueError."""
    count = len(lists.arrow(next(iter(EXTENTS))))
    columns = [lists.numbers(name, length=count).astype(np.int64) for name in EXTENTS]
    from penstock.readers.formats.extents import Extents

    extents = Extents(**dict(zip(("files", "starts", "sizes", "fields"), columns, strict=True)))
    if not count:
        return extents
    if min(int(column.min()) for column in columns) < 0:
        raise ValueError("its extents have numbers below 0")
    if extents.files.max() >= len(files) or extents.fields.max() >= fields:
        raise ValueError("its extents are of files or fields that aren't there")
    if float(extents.sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
        raise ValueError("its extents have more bytes than a shard")
    if (extents.sizes > files.sizes[extents.files] - extents.starts).any():
        raise ValueError("its extents lie outside of their files")
    return extents


def _files(lists: Lists) -> ShardFiles:
    name, size, mtime, version = FILES
    names = lists.arrow(name).to_pylist()
    sizes = lists.numbers(size, length=len(names))
    if names:
        check_names(names)
        if sizes.min() < 0 or float(sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
            raise ValueError("its files have sizes that can't be")
    return ShardFiles(
        names=names,
        sizes=sizes,
        mtimes_ns=lists.numbers(mtime, length=len(names)),
        versions=LazyColumn(lists.arrow(version, length=len(names))),
    )


def sidecar_etag(path: bytes) -> str:
    """The checksum of a sidecar's file, as a manifest notes it. Raises ReadError."""
    try:
        return _etag(map_buffer(path))
    except OSError as error:
        raise read_error(printable(path), error) from error


def _etag(buffer: Any) -> str:
    return f"crc32c-{crc32c(buffer):08x}"


def is_sidecar(path: bytes, etag: str) -> bool:
    """Whether a file is what the manifest promises. Raises OSError."""
    try:
        return _etag(read_buffer(path)) == etag
    except ValueError:  # empty
        return False


def sidecar_batch(path: bytes, columns: Columns, *, etag: str, url: str | None = None) -> Any:
    """Read a sidecar's columns; raises as `read_sidecar` does."""
    try:
        buffer = read_buffer(path)  # not mapped: what is checked here is what is used
        if _etag(buffer) != etag:
            raise ValueError("its checksum isn't what the manifest promises")
        return only_batch(buffer, columns)
    except FileNotFoundError:
        raise IndexChangedError(
            f"{url or printable(path)}: part of the index is gone; it was rebuilt while this "
            f"dataset was open, or deleted. Open the dataset again. If that doesn't help: {REINDEX}"
        ) from None
    except BROKEN as error:
        raise torn_sidecar_error(path, error, url) from error


def torn_sidecar_error(
    path: bytes, error: Exception, url: str | None = None
) -> CorruptShardError | ReadError:
    """The error for a sidecar that can't be read."""
    if machine_remedy(error) is not None:
        return read_error(printable(path), error)
    return CorruptShardError(
        f"{url or printable(path)}: this part of the index is torn ({error}). {REINDEX}"
    )


def check_names(names: Sequence[bytes]) -> None:
    """Whether all are paths below the dataset's folder, at least one. Raises ValueError."""
    if not names or are_unsafe(names):
        raise ValueError("a file's name isn't a path below the dataset")
