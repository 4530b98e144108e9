"""Write and read the sidecar of a shard: the facts about its samples that are needed to read them.

A sidecar is an Arrow file with one row of lists, because a shard has any number of files, and its
fields any number of bytes, lengths and values. For a field whose bytes lie in files, the sidecar
records the place and the properties of each sample's payload (`SpanNotes`). For a field whose
values were known when the dataset was listed, it records the values, and no file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import CorruptShardError, IndexChangedError
from penstock.cache.base import machine_remedy, read_error
from penstock.readers.byte_source import REINDEX
from penstock.readers.fieldtypes import (
    CODEC_ITEMSIZES,
    DenseColumn,
    EncodedColumn,
    ListColumn,
    RaggedColumn,
    as_bits,
    codec_number,
)
from penstock.readers.files import (
    BROKEN,
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
from penstock.readers.formats.extents import BlobExtents, Extents, ShardFiles
from penstock.readers.formats.open_shard import NO_SPAN
from penstock.readers.formats.shard_summary import (
    MAX_SHARD_BYTES,
    MAX_SHARD_SAMPLES,
    MAX_SIDE,
    VERSION,
    FieldNotes,
    ShardSummary,
)
from penstock.readers.formats.span_shard import SpanShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.cache.base import Segment
    from penstock.readers.fieldtypes import ArrayForm, Column, FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.extents import ChunkedShard, ShardPlace
    from penstock.readers.formats.open_shard import OpenShard, SampleLayout, SpanPlace, Storage
    from penstock.readers.types import Encoded, Facts

# A field's name has no slash, so these names can't be those of fields.
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
"""The recorded facts about a span: one number per sample for its payload in a file, and the lengths
of its shape."""


def list_types(layout: SampleLayout) -> dict[str, Any]:
    """Return the lists of a sidecar by name, in order, with the Arrow types of their values."""
    kinds: dict[str, Any] = {
        NAMES: pa.large_binary(),
        ROWS: pa.int64(),
        NOTES: pa.large_binary(),
        **FILES,
    }
    if _is_of_chunks(layout):
        kinds |= {**EXTENTS, UNITS: pa.int64()}
    for name in layout.schema:
        if layout.storage[name] == "chunks":
            continue
        if layout.storage[name] == "span":
            kinds |= {f"{name}/{what}": kind for what, kind in SPAN.items()}
        else:
            kinds |= {f"{name}/{what}": kind for what, kind in _value_types(layout, name).items()}
            kinds[f"{name}/present"] = pa.bool_()
    return kinds


def _is_of_chunks(layout: SampleLayout) -> bool:
    """Return True if samples lie in chunks, which their metadata describe."""
    return "chunks" in layout.storage.values()


def _value_types(layout: SampleLayout, name: str) -> dict[str, Any]:
    type = layout.schema[name]
    if type.is_encoded:
        return {"values": pa.large_binary()}
    dtype = type.number
    if dtype is not None:
        return {"values": pa.from_numpy_dtype(_real(dtype))}
    form = _form(layout, name)
    kinds = {"values": pa.from_numpy_dtype(_real(form.dtype))}
    if form.is_ragged:
        kinds["counts"] = pa.int64()
        if form.rest is None:
            kinds["shapes"] = pa.int64()
    return kinds


def _form(layout: SampleLayout, name: str) -> ArrayForm:
    """Return the dtype and shape of an array whose values are recorded."""
    form = layout.schema[name].form
    if form is None:
        raise TypeError(f"{name}: values of {layout.schema[name]!r} have no known dtype and shape")
    return form


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that Arrow stores: it has no complex numbers, so each becomes two floats."""
    return np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype


class Lists:
    """The lists of a sidecar that is read, by name.

    batch: its one row, checked to have the columns of `list_types`. Raises ValueError for missing
    values inside.
    """

    def __init__(self, batch: Any) -> None:
        if batch.num_rows != 1:
            raise ValueError(f"{batch.num_rows} rows, wanted 1")
        self._batch = batch

    def arrow(self, name: str, *, length: int | None = None) -> Any:
        """Return a list as an Arrow array. Raises ValueError if it doesn't have `length` values."""
        lists = self._batch.column(name)
        # `flatten` would import pyarrow.compute, which takes longer than opening a dataset.
        start, end = lists.offsets.to_numpy().tolist()
        values = lists.values[start:end]
        if values.null_count:
            raise ValueError(f"{name} has missing values")
        if length is not None and len(values) != length:
            raise ValueError(f"{name} has {len(values):,} values, wanted {length:,}")
        return values

    def numbers(self, name: str, *, length: int | None = None) -> NDArray[Any]:
        """Return a list of numbers."""
        found: NDArray[Any] = self.arrow(name, length=length).to_numpy(zero_copy_only=False)
        return found


def _list_of(what: str, column: Column) -> Any:
    if what != "values":
        assert isinstance(column, RaggedColumn)
        found = np.diff(column.offsets) if what == "counts" else column.shapes
        assert found is not None
        return found.reshape(-1)
    if isinstance(column, DenseColumn | RaggedColumn):
        flat = np.ascontiguousarray(column.values).reshape(-1)
        return flat.view(_real(flat.dtype))
    return [bytes(each) if isinstance(each, np.ndarray) else each for each in column.samples]


def _recorded_column(lists: Lists, layout: SampleLayout, name: str, *, samples: int) -> Column:
    """Return a field's recorded values. Raises ValueError for impossible values."""
    if layout.schema[name].is_encoded:
        ends, data = _flat(lists.arrow(f"{name}/values", length=samples))
        return EncodedColumn([data[start:end] for start, end in pairwise(ends.tolist())])
    dtype = layout.schema[name].number
    if dtype is not None:
        values = lists.numbers(f"{name}/values").view(dtype)
        if len(values) != samples:
            raise ValueError(f"{name} has {len(values):,} values, wanted {samples:,}")
        return DenseColumn(values)
    form = _form(layout, name)
    flat = lists.numbers(f"{name}/values").view(form.dtype)
    if not form.is_ragged:
        return DenseColumn(flat.reshape(samples, *form.shape))
    counts = lists.numbers(f"{name}/counts", length=samples)
    if len(counts) and (counts.min() < 0 or float(counts.sum(dtype=np.float64)) > 2**62):
        raise ValueError(f"{name} has impossible counts")
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
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


def _check_end(name: str, offsets: NDArray[np.int64], length: int) -> None:
    if offsets[-1] != length:
        raise ValueError(f"{name} has {length:,} values, but its counts add up to {offsets[-1]:,}")


def _flat(values: Any) -> tuple[NDArray[np.int64], Encoded]:
    """Return the ends of large_binary values, counted from the start of the first, and all their
    bytes."""
    _, offsets, flat = values.buffers()
    if not len(values):
        return np.zeros(1, np.int64), np.empty(0, np.uint8)
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.empty(0, np.uint8) if flat is None else np.frombuffer(flat, np.uint8)
    return ends - ends[0], data[ends[0] : ends[-1]]


def _own_copy(values: Any) -> Any:
    """Copy large_binary values to memory of their own, so that keeping them doesn't keep the whole
    sidecar."""
    ends, data = _flat(values)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(data.copy())]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(values), buffers)


def _notes_of_column(
    column: Column, storage: Storage, present: NDArray[np.bool_] | None
) -> FieldNotes:
    """Return the facts that a manifest summarises. present: samples that have the field; None for
    all."""
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


def _as_read_back(column: Column) -> Column:
    """Return a column as a sidecar returns it when it is read: texts are bytes."""
    if not isinstance(column, ListColumn):
        return column
    texts = [each.encode() if isinstance(each, str) else each for each in column.samples]
    return EncodedColumn([np.frombuffer(each, np.uint8) for each in texts])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpanNotes:
    """The recorded spans of one field of n samples; all arrays have shape (n,) unless stated.

    files: number of the shard's file, int32, MISSING if a sample lacks the field. starts, sizes:
    bytes of the payload in the file, int64. crcs: CRC-32C of the payload, uint32. shapes: int64,
    shape (n, dimensions), None if samples have no shape. codecs: as in `Facts`, "" if a sample
    lacks the field.
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
        """Return the notes of examined samples. files: as above. starts: of the bytes that were
        examined, in the file."""
        dimensions = max((len(each.shape) for each in facts if each is not None), default=0)
        headers = np.array([0 if each is None else each.start for each in facts], np.int64)
        lengths = [(0,) * dimensions if each is None else each.shape for each in facts]
        shapes = np.array(lengths, np.int64).reshape(len(facts), dimensions)
        return cls(
            files=files.astype(np.int32),
            starts=np.where(files == MISSING, 0, starts + headers),
            sizes=np.array([0 if each is None else each.size for each in facts], np.int64),
            crcs=np.array([0 if each is None else each.crc32c for each in facts], np.uint32),
            shapes=shapes if dimensions else None,
            codecs=["" if each is None else each.codec for each in facts],
        )

    @classmethod
    def read(cls, lists: Lists, name: str, *, samples: int) -> SpanNotes:
        """Read the notes of a field from a sidecar. Raises ValueError."""
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
        """Return the lists to be written to a sidecar, in the order of `SPAN`."""
        shapes = np.empty(0, np.int64) if self.shapes is None else self.shapes.reshape(-1)
        lists = (self.files, self.starts, self.sizes, self.crcs, shapes, list(self.codecs))
        return dict(zip(SPAN, lists, strict=True))

    @property
    def present(self) -> NDArray[np.bool_]:
        """Return which samples have the field, bool, shape (n,)."""
        present: NDArray[np.bool_] = self.files != MISSING
        return present

    def notes(self, *, progressive: int | None) -> FieldNotes:
        """Return the facts that a manifest summarises."""
        return FieldNotes(
            storage="span",
            crcs=self.crcs,
            shapes=self.shapes,
            codecs=self.codecs,
            present=None if self.present.all() else self.present,
            progressive=progressive,
        )

    def check(self, file_sizes: NDArray[np.int64], type: FieldType) -> None:
        """Check that the spans are possible, because a sidecar's source isn't trusted. Raises
        ValueError."""
        present = self.present
        files, starts, sizes = self.files[present], self.starts[present], self.sizes[present]
        if len(self.files) and (self.files.min() < MISSING or self.files.max() >= len(file_sizes)):
            raise ValueError("a sample lies in a file that isn't listed")
        if not len(files):
            return
        least = 1 if type.has_sides else 0
        if not (sizes.min() >= least and sizes.max() <= MAX_SHARD_BYTES):
            raise ValueError(f"a sample has {sizes.min():,} to {sizes.max():,} bytes")
        # In this order, because a sum of two may exceed 2^63.
        if not (
            starts.min() >= 0
            and starts.max() <= MAX_SHARD_BYTES
            and (starts + sizes <= file_sizes[files]).all()
        ):
            raise ValueError("a sample lies outside of its file")
        if type.has_sides:
            self._check_sides(present)
        form = type.form
        if form is not None:
            self._check_arrays(form, present)

    def _check_sides(self, present: NDArray[np.bool_]) -> None:
        if self.shapes is None or self.shapes.shape[1] != 3:
            raise ValueError("images without height, width and channels")
        sides = self.shapes[present, :2]
        if not (sides.min() >= 1 and sides.max() <= MAX_SIDE):
            raise ValueError(f"an image has {sides.min():,} to {sides.max():,} pixels a side")

    def _check_arrays(self, form: ArrayForm, present: NDArray[np.bool_]) -> None:
        """Check that each array has as many bytes as its shape requires."""
        count = int(present.sum())
        shapes = np.empty((count, 0), np.int64) if self.shapes is None else self.shapes[present]
        if shapes.shape[1] != len(form.shape):
            raise ValueError(f"arrays of {shapes.shape[1]} dimensions, wanted {len(form.shape)}")
        for lengths, wanted in zip(shapes.T, form.shape, strict=True):
            if lengths.min() < 0 or (wanted is not None and (lengths != wanted).any()):
                raise ValueError(
                    f"arrays have lengths {lengths.min():,} to {lengths.max():,}, wanted {wanted}"
                )
        itemsizes = CODEC_ITEMSIZES[self._codec_numbers()[present]]
        # As floats, because products of lengths may exceed 2^63; possible sizes are exact.
        if (shapes.prod(axis=1, dtype=np.float64) * itemsizes != self.sizes[present]).any():
            raise ValueError("an array doesn't have as many bytes as its shape requires")
        # If one length is 0, the bytes don't bound the others, and numpy can't make such an array.
        most = np.where(shapes == 0, 1, shapes).prod(axis=1, dtype=np.float64)
        if most.max() > MAX_SHARD_BYTES:
            raise ValueError("an array has an impossible length")

    def fill(self, table: NDArray[np.int64], place: SpanPlace, begins: NDArray[np.int64]) -> None:
        """Fill a table's columns. begins: start of each file in the shard's flat data."""
        present = self.present
        starts = begins[self.files] + self.starts
        table[:, place.start] = np.where(present, starts, NO_SPAN)
        table[:, place.end] = np.where(present, starts + self.sizes, NO_SPAN)
        table[:, place.crc] = self.crcs
        if place.height is not None and self.shapes is not None:
            table[:, place.height : place.height + 2] = self.shapes[:, :2]
        if place.codec is not None:
            table[:, place.codec] = self._codec_numbers()
        if place.lengths is not None and self.shapes is not None:
            # A missing sample has length 0; another recorded length would shift the others.
            shapes = np.where(present[:, None], self.shapes, 0)
            table[:, place.lengths : place.lengths + shapes.shape[1]] = shapes

    def _codec_numbers(self) -> NDArray[np.int64]:
        numbers: dict[str, int] = {"": 0}
        for codec in set(self.codecs) - {""}:
            numbers[codec] = codec_number(codec)
        return np.array([numbers[codec] for codec in self.codecs], np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecar:
    """The facts that an index records about one shard's samples, of which there is at least one.

    layout: of the dataset. is_file_per_sample: as in its format. samples: their number. names: of
    the samples, for messages; empty if the format computes them. files: the files that spans lie
    in, in order. spans, values: of each field that is stored as spans or as values. present: which
    samples have a field with values, if some lack it, bool, shape (samples,). extents, units,
    notes: of a shard of chunks, see `ChunkedShard`.
    """

    layout: SampleLayout
    is_file_per_sample: bool
    samples: int
    files: ShardFiles
    names: Sequence[bytes] = ()
    spans: Mapping[str, SpanNotes] = field(default_factory=dict)
    values: Mapping[str, Column] = field(default_factory=dict)
    present: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)
    notes: bytes = b""
    extents: Extents | None = None
    units: Sequence[int] = ()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the shard's files; for a shard of chunks, only its samples' bytes."""
        return self.files.size_bytes if self.extents is None else self.extents.size_bytes

    @property
    def suffix(self) -> bytes:
        """Return the end of the stem of the sidecar's name: the identity of a file that is the
        shard.

        All processes can then derive the key of its blob from the manifest alone, and even before
        there is a manifest.
        """
        if self.is_file_per_sample or len(self.files) != 1:
            return b""
        (file,) = self.files.entries()
        return b"-" + file.identity.encode()

    def segments(self, fields: Sequence[str] = (), *, may_lack: bool = False) -> Sequence[Segment]:
        """Return the objects of a remote dataset that make up the shard.

        fields: of a shard of chunks, the fields whose bytes are needed. may_lack: True if a missing
        object is no error.
        """
        if self.extents is None:
            return self.files.segments()
        return self.blob_extents(fields).segments(may_lack=may_lack)

    def blob_extents(self, fields: Iterable[str]) -> BlobExtents:
        """Return the extents of some fields, placed in a blob. Requires a shard of chunks."""
        assert self.extents is not None
        selected = set(fields)
        numbers = [i for i, name in enumerate(self.layout.schema) if name in selected]
        chosen = np.flatnonzero(np.isin(self.extents.fields, numbers))
        return BlobExtents(self.files, self.extents, chosen)

    def summary(self, *, progressive: Mapping[str, int] | None = None) -> ShardSummary:
        """Return the shard's contribution to the manifest. progressive: number of progressive JPEGs
        by field, if they were counted."""
        notes: dict[str, FieldNotes] = {}
        for name in self.layout.schema:
            if name in self.spans:
                notes[name] = self.spans[name].notes(progressive=(progressive or {}).get(name))
            else:
                storage, present = self.layout.storage[name], self.present.get(name)
                notes[name] = _notes_of_column(self.values[name], storage, present)
        return ShardSummary.of(
            self.layout.schema,
            notes,
            samples=self.samples,
            size_bytes=self.size_bytes,
            files=len(self.files),
        )

    def open(self, place: ShardPlace) -> OpenShard:
        """Open the shard at its place. Raises IndexChangedError, DatasetError."""
        files = self.files
        if self.is_file_per_sample or len(files) != 1:
            source = place.files(files)
        else:
            source = place.file(files.names[0], int(files.sizes[0]), is_below=False)
        return SpanShard(source, self._table(), names=self.names, columns=self._rows())

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
        """Write the sidecar as a whole and return its etag, a checksum of the file. Raises
        WriteError."""
        files, kinds = self.files, list_types(self.layout)
        facts = (list(files.names), files.sizes, files.mtimes_ns, list(files.versions))
        lists: dict[str, Any] = dict(zip(FILES, facts, strict=True))
        lists |= {NAMES: list(self.names), ROWS: [self.samples], NOTES: [self.notes]}
        if self.extents is not None:
            extents = self.extents
            columns = (extents.files, extents.starts, extents.sizes, extents.fields)
            lists |= {**dict(zip(EXTENTS, columns, strict=True)), UNITS: list(self.units)}
        for name, notes in self.spans.items():
            lists |= {f"{name}/{what}": values for what, values in notes.lists().items()}
        for name, column in self.values.items():
            for what in _value_types(self.layout, name):
                lists[f"{name}/{what}"] = _list_of(what, column)
            lists[f"{name}/present"] = self.present.get(name, np.ones(self.samples, np.bool_))
        arrays = {name: pa.array(lists[name], kind) for name, kind in kinds.items()}
        row = {
            name: pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
            for name, values in arrays.items()
        }
        about = {"penstock.sidecar": str(VERSION)}
        batch = pa.record_batch(row).replace_schema_metadata(about)
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
    """Return the sidecar of a shard's good samples, of which there is at least one.

    positions: of those candidates, int64, shape (n,). facts: of each of them, by field.
    """
    spans = {name: candidates.spans[name] for name in layout.stored("span")}
    numbers = [each.files[positions] for each in spans.values()]
    used, local = _renumber(numbers)
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        samples=len(positions),
        names=[candidates.names[i] for i in positions.tolist()],
        files=ShardFiles.of([candidates.files[number] for number in used]),
        spans={
            name: SpanNotes.of(files, span.starts[positions], [each.get(name) for each in facts])
            for (name, span), files in zip(spans.items(), local, strict=True)
        },
        values={
            name: _as_read_back(column.take(positions))
            for name, column in candidates.values.items()
        },
        present={name: has[positions] for name, has in candidates.present.items()},
    )


def make_chunked_sidecar(shard: ChunkedShard, *, layout: SampleLayout) -> Sidecar:
    """Return the sidecar of a shard of chunks, made from its metadata alone."""
    return Sidecar(
        layout=layout,
        is_file_per_sample=False,
        samples=shard.samples,
        files=ShardFiles.of(shard.files),
        notes=shard.notes,
        extents=shard.extents,
        units=shard.units,
    )


def _renumber(numbers: Sequence[NDArray[np.int64]]) -> tuple[list[int], list[NDArray[np.int64]]]:
    """Return the files that some samples lie in, and each sample's file by its number among them.

    Files are in the order of the samples, so that bytes that are read together lie together.
    numbers: of each field, shape (n,).
    """
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
    """Read a sidecar.

    etag: as the manifest records it. url: the object of which this file is a copy, if it is one.
    Raises IndexChangedError if the file is gone, CorruptShardError if it is truncated, changed or
    has impossible values, and ReadError.
    """
    columns = {name: str(pa.large_list(kind)) for name, kind in list_types(layout).items()}
    try:
        buffer = read_buffer(path)  # not mapped, so that the bytes that are checked are used
        if _etag(buffer) != etag:
            raise ValueError("its checksum differs from the one in the manifest")
        batch = only_batch(buffer, columns)
        return _content(Lists(batch), layout, is_file_per_sample=is_file_per_sample)
    except FileNotFoundError:
        raise IndexChangedError(
            f"{url or printable(path)}: part of the index is gone; it was rebuilt while this "
            f"dataset was open, or deleted. Open the dataset again. If that doesn't help: {REINDEX}"
        ) from None
    except BROKEN as error:
        if machine_remedy(error) is not None:
            raise read_error(printable(path), error) from error
        raise CorruptShardError(
            f"{url or printable(path)}: this part of the index is damaged ({error}). {REINDEX}"
        ) from error


def _content(lists: Lists, layout: SampleLayout, *, is_file_per_sample: bool) -> Sidecar:
    (rows,) = lists.numbers(ROWS, length=1).tolist()
    (notes,) = lists.arrow(NOTES, length=1).to_pylist()
    if not 1 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(f"it has {rows:,} samples")
    is_chunked = _is_of_chunks(layout)
    names = LazyColumn(_own_copy(lists.arrow(NAMES, length=0 if is_chunked else rows)))
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
        values[name] = _recorded_column(lists, layout, name, samples=rows)
        has_field = lists.numbers(f"{name}/present", length=rows)
        if not has_field.all():
            present[name] = has_field
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        samples=rows,
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
    """Read the extents of a shard of chunks and check that they lie in its files. Raises
    ValueError."""
    count = len(lists.arrow(next(iter(EXTENTS))))
    columns = [lists.numbers(name, length=count).astype(np.int64) for name in EXTENTS]
    extents = Extents(**dict(zip(("files", "starts", "sizes", "fields"), columns, strict=True)))
    extents.check(files.sizes, fields=fields)
    return extents


def _files(lists: Lists) -> ShardFiles:
    name, size, mtime, version = FILES
    names = lists.arrow(name).to_pylist()
    sizes = lists.numbers(size, length=len(names))
    if names:
        if are_unsafe(names):
            raise ValueError("a file's name isn't a path below the dataset")
        if sizes.min() < 0 or float(sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
            raise ValueError("its files have impossible sizes")
    return ShardFiles(
        names=names,
        sizes=sizes,
        mtimes_ns=lists.numbers(mtime, length=len(names)),
        versions=LazyColumn(lists.arrow(version, length=len(names))),
    )


def sidecar_etag(path: bytes) -> str:
    """Return the checksum of a sidecar's file, as a manifest records it. Raises ReadError."""
    try:
        return _etag(map_buffer(path))
    except OSError as error:
        raise read_error(printable(path), error) from error


def _etag(buffer: Any) -> str:
    return f"crc32c-{crc32c(buffer):08x}"


def is_sidecar(path: bytes, etag: str) -> bool:
    """Return True if a file has the checksum that the manifest records. Raises OSError."""
    try:
        return _etag(read_buffer(path)) == etag
    except ValueError:  # empty
        return False
