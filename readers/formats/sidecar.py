"""Write and read the sidecar of a shard: the facts about its samples that are needed to read them.
Open the shard by its sidecar.

A sidecar is an Arrow file with one row of lists, because a shard has any number of files, and its
fields any number of bytes, lengths and values. For a field whose bytes lie in files, the sidecar
records the place and the properties of each sample's payload (`FieldNotes`). For a field whose
values were known when the dataset was listed, it records the values, and no file is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import IndexChangedError
from penstock.cache.base import Segment, read_error
from penstock.readers.byte_source import REINDEX, REOPEN, ByteSource
from penstock.readers.fieldtypes import DenseColumn, EncodedColumn, RaggedColumn, codec_number
from penstock.readers.files import (
    BROKEN,
    LazyColumn,
    are_unsafe,
    damaged_file_error,
    map_buffer,
    only_batch,
    printable,
    read_buffer,
    write_batch,
    write_whole,
)
from penstock.readers.formats.extents import BlobExtents, ChunkedShard, Extents, ShardFiles
from penstock.readers.formats.open_shard import MISSING, OpenShard
from penstock.readers.formats.shard_summary import (
    MAX_SHARD_BYTES,
    MAX_SHARD_SAMPLES,
    VERSION,
    FieldNotes,
    ShardSummary,
    sample_table,
)
from penstock.readers.types import Bools, Facts, Ints, Numbers, offsets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.readers.fieldtypes import ArrayForm, Column, FieldType
    from penstock.readers.formats.candidates import Candidates
    from penstock.readers.formats.open_shard import RowRequest, RowsOut, SampleLayout

    # The attribute of a value and the Arrow type, by the name of the list.
    _Table: TypeAlias = Mapping[str, tuple[str, Any]]

    # A source of the extents of a shard of chunks; the first byte of each, below 0 if the source
    # lacks it; and a function that opens a source of such extents, which aren't kept.
    Parts: TypeAlias = tuple[ByteSource, Ints, Callable[[BlobExtents], ByteSource] | None]

# A field's name has no slash, so these names can't be those of fields.
NAMES, ROWS, NOTES, UNITS = "/names", "/rows", "/notes", "/units"
FILES = {
    "/files/name": ("names", pa.large_binary()),
    "/files/bytes": ("sizes", pa.int64()),
    "/files/mtime_ns": ("mtimes_ns", pa.int64()),
    "/files/version": ("versions", pa.string()),
}
EXTENTS = {
    "/extents/file": ("files", pa.int32()),
    "/extents/start": ("starts", pa.int64()),
    "/extents/bytes": ("sizes", pa.int64()),
    "/extents/field": ("fields", pa.int16()),
}
SPAN = {
    "file": ("files", pa.int32()),
    "start": ("starts", pa.int64()),
    "bytes": ("sizes", pa.int64()),
    "crc32c": ("crcs", pa.uint32()),
    "shape": ("shapes", pa.int64()),
    "codec": ("codecs", pa.string()),
}
"""The lists of `ShardFiles`, of `Extents` and of a span's `FieldNotes`: the attribute that each
holds, and the Arrow type of its values."""


def list_types(layout: SampleLayout) -> dict[str, Any]:
    """Return the lists of a sidecar by name, in order, with the Arrow types of their values."""
    kinds: dict[str, Any] = {NAMES: pa.large_binary(), ROWS: pa.int64(), NOTES: pa.large_binary()}
    kinds |= {name: kind for name, (_, kind) in FILES.items()}
    if layout.is_of_chunks:
        kinds |= {name: kind for name, (_, kind) in EXTENTS.items()} | {UNITS: pa.int64()}
    for name, type in layout.schema.items():
        if layout.storage[name] == "span":
            kinds |= {f"{name}/{what}": kind for what, (_, kind) in SPAN.items()}
        elif layout.storage[name] != "chunks":
            kinds |= {f"{name}/{what}": kind for what, kind in _value_types(type).items()}
            kinds[f"{name}/present"] = pa.bool_()
    return kinds


def _value_types(type: FieldType) -> dict[str, Any]:
    """Return the lists of a field whose values are recorded."""
    if type.is_encoded:
        return {"values": pa.large_binary()}
    form = _stored(type)
    kinds = {"values": pa.from_numpy_dtype(_real(form.dtype))}
    if form.is_ragged:
        kinds["counts"] = pa.int64()
        if form.rest is None:
            kinds["shapes"] = pa.int64()
    return kinds


def _stored(type: FieldType) -> ArrayForm:
    form = type.stored
    if form is None:
        raise TypeError(f"values of {type!r} have no known dtype and shape")
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

    def numbers(self, name: str, *, length: int | None = None) -> Numbers:
        """Return a list of numbers."""
        found: Numbers = self.arrow(name, length=length).to_numpy(zero_copy_only=False)
        return found

    def attributes(self, table: _Table, *, of: str = "", length: int | None = None) -> Any:
        """Return the attributes of a table such as `FILES`: numpy arrays, and other values as
        columns. of: the field's name and a slash. length: of each list but shapes; None means that
        of the first."""
        length = len(self.arrow(of + next(iter(table)))) if length is None else length
        found: dict[str, Any] = {}
        for name, (attribute, kind) in table.items():
            values = self.arrow(of + name, length=None if attribute == "shapes" else length)
            is_number = pa.types.is_integer(kind)
            found[attribute] = values.to_numpy() if is_number else LazyColumn(values)
        return found


def _lists_of_attributes(table: _Table, value: Any, *, of: str = "") -> dict[str, Any]:
    """Return the attributes of a value as lists, by the names of a table such as `FILES`."""
    found = {of + name: getattr(value, attribute) for name, (attribute, _) in table.items()}
    return {
        name: each.reshape(-1) if isinstance(each, np.ndarray) else list(each or ())
        for name, each in found.items()
    }


def _lists_of(column: Column) -> dict[str, Any]:
    """Return recorded values as lists, by the names of `_value_types`."""
    if isinstance(column, EncodedColumn):
        return {"values": [bytes(each) for each in column.samples]}
    assert isinstance(column, DenseColumn | RaggedColumn)
    flat = np.ascontiguousarray(column.values).reshape(-1)
    lists = {"values": flat.view(_real(flat.dtype))}
    if isinstance(column, RaggedColumn):
        lists["counts"] = np.diff(column.offsets)
        if column.shapes is not None:
            lists["shapes"] = column.shapes.reshape(-1)
    return lists


def _recorded_column(lists: Lists, type: FieldType, name: str, *, samples: int) -> Column:
    """Return a field's recorded values. Raises ValueError for impossible values."""
    if type.is_encoded:
        payloads = lists.arrow(f"{name}/values", length=samples).to_pylist()
        return EncodedColumn([np.frombuffer(payload, np.uint8) for payload in payloads])
    form = _stored(type)
    values = lists.numbers(f"{name}/values").view(form.dtype)
    if not form.is_ragged:
        return DenseColumn(values.reshape(samples, *form.shape))
    counts, shapes = lists.numbers(f"{name}/counts", length=samples), None
    if counts.min() < 0 or float(counts.sum(dtype=np.float64)) > 2**62:
        raise ValueError(f"{name} has impossible counts")
    if form.rest is not None:
        values = values.reshape(-1 if all(form.rest) else 0, *form.rest)
    else:
        shapes = lists.numbers(f"{name}/shapes", length=samples * len(form.shape))
        shapes = shapes.reshape(samples, len(form.shape))
        if (shapes < 0).any() or (shapes.prod(axis=1) != counts).any():
            raise ValueError(f"{name} has shapes that don't fit its counts")
    offsets = offsets_of(counts)
    if offsets[-1] != len(values):
        raise ValueError(f"{name} has {len(values):,} values, but counts of {offsets[-1]:,}")
    return RaggedColumn(values, offsets, shapes)


def _sums(column: Column) -> dict[str, Any]:
    """Return the checksums and the shapes of recorded values, which a manifest summarises."""
    samples = [column.sample(row) for row in range(len(column))]
    if isinstance(column, EncodedColumn):
        return {"crcs": np.array(list(map(crc32c, samples)), np.uint32)}
    assert isinstance(column, DenseColumn | RaggedColumn)
    little = column.values.dtype.newbyteorder("<")
    flat = [np.ascontiguousarray(each, little).reshape(-1).view(np.uint8) for each in samples]
    lengths = np.array([each.shape for each in samples], np.int64)
    return {
        "crcs": np.array(list(map(crc32c, flat)), np.uint32),
        "shapes": lengths.reshape(len(samples), -1) if lengths.size else None,
    }


def _span_notes(
    type: FieldType, *, files: Any, shapes: Any, codecs: Sequence[str], **facts: Any
) -> FieldNotes:
    """Return the facts about a field of n samples whose bytes lie in files. shapes: the lengths of
    all, flat. facts: further attributes. Raises ValueError for lengths that no n shapes have, and
    for an unknown codec."""
    if shapes.size % len(files):
        raise ValueError(f"{shapes.size:,} lengths for {len(files):,} samples")
    numbers: Ints | int = 0
    if type.form is not None:
        known = {codec: codec_number(codec) if codec else 0 for codec in set(codecs)}
        numbers = np.array([known[codec] for codec in codecs], np.int64)
    return FieldNotes(
        storage="span",
        files=files,
        shapes=shapes.reshape(len(files), -1) if shapes.size else None,
        codecs=codecs,
        present=None if (files != MISSING).all() else files != MISSING,
        numbers=numbers,
        **facts,
    )


def _examined(
    type: FieldType, files: Ints, starts: Ints, facts: Sequence[Facts | None]
) -> FieldNotes:
    """Return the facts about a field of examined samples. starts: of the bytes that were examined,
    in the files."""
    dimensions = max((len(each.shape) for each in facts if each is not None), default=0)
    known = [Facts(0, 0, 0, (0,) * dimensions, "") if each is None else each for each in facts]
    headers = np.array([each.start for each in known], np.int64)
    return _span_notes(
        type,
        files=files.astype(np.int32),
        starts=np.where(files == MISSING, 0, starts + headers),
        sizes=np.array([each.size for each in known], np.int64),
        crcs=np.array([each.crc32c for each in known], np.uint32),
        shapes=np.array([each.shape for each in known], np.int64),
        codecs=[each.codec for each in known],
    )


class SpanShard(OpenShard):
    """A shard whose samples are byte spans of its files.

    names: of the samples. columns: values of recorded fields that aren't in the table.
    """

    def __init__(
        self, source: ByteSource, table: Ints, names: Sequence[bytes], columns: Mapping[str, Column]
    ) -> None:
        self.source, self.table = source, table
        self._names, self._columns = names, columns

    def name(self, row: int) -> str:
        """Return a sample's name for messages, such as "cat/17.jpg" or
        "train-000003.tar/dog.jpg"."""
        return printable(self._names[row])

    def read(self, request: RowRequest, out: RowsOut) -> None:
        """Copy recorded values."""
        rows = request.rows
        for name in request.dense:
            column, crop = self._columns[name], request.crops.get(name)
            assert isinstance(column, DenseColumn)
            if crop is None:
                out.arrays[name][out.places] = column.values[rows]
            else:
                from penstock.readers.fieldtypes import put_parts  # not needed for images

                put_parts(column.values[rows], crop.corners, out.arrays[name], out.places)
        out.columns.update({name: self._columns[name].take(rows) for name in request.others})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sidecar:
    """The facts that an index records about one shard's samples, of which there is at least one.

    layout: of the dataset. is_file_per_sample: as in its format. samples: their number. names: of
    the samples, for messages; empty if the format computes them. files: the files that spans lie
    in, in order. fields: the facts about each field that isn't stored in chunks, without checksums
    of recorded values. columns: the recorded values. extents, units, notes: of a shard of chunks,
    see `ChunkedShard`.
    """

    layout: SampleLayout
    is_file_per_sample: bool
    samples: int
    files: ShardFiles
    names: Sequence[bytes] = ()
    fields: Mapping[str, FieldNotes] = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=dict)
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

    def segments(self, fields: Sequence[str] = ()) -> Sequence[Segment]:
        """Return the objects of a remote dataset that make up the shard.

        fields: of a shard of chunks, the fields whose bytes are needed.
        """
        if self.extents is None:
            return self.files.segments()
        return self.blob_extents(fields).segments()

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
        schema, counts = self.layout.schema, progressive or {}
        notes = {n: replace(each, progressive=counts.get(n)) for n, each in self.fields.items()}
        for name in self.layout.stored("rows"):
            notes[name] = replace(notes[name], **_sums(self.columns[name]))
        size_bytes, files = self.size_bytes, len(self.files)
        return ShardSummary.of(
            schema, notes, samples=self.samples, size_bytes=size_bytes, files=files
        )

    def open(self, place: ShardPlace) -> OpenShard:
        """Open the shard at its place. Raises IndexChangedError, DatasetError."""
        files = self.files
        if self.is_file_per_sample or len(files) != 1:
            source = place.files(files)
        else:
            source = place.file(files.names[0], int(files.sizes[0]), is_below=False)
        table = sample_table(self.layout, self.fields, samples=self.samples, begins=files.starts)
        recorded = {name: self.columns[name] for name in self.layout.stored("rows")}
        return SpanShard(source, table, names=self.names, columns=recorded)

    def write(self, path: bytes) -> str:
        """Write the sidecar as a whole and return its etag, a checksum of the file. Raises
        WriteError."""
        lists: dict[str, Any] = {
            NAMES: list(self.names),
            ROWS: [self.samples],
            NOTES: [self.notes],
            UNITS: list(self.units),
            **_lists_of_attributes(FILES, self.files),
        }
        if self.extents is not None:
            lists |= _lists_of_attributes(EXTENTS, self.extents)
        for name, notes in self.fields.items():
            if notes.files is not None:
                lists |= _lists_of_attributes(SPAN, notes, of=f"{name}/")
            else:
                has = np.ones(self.samples, np.bool_) if notes.present is None else notes.present
                own = {**_lists_of(self.columns[name]), "present": has}
                lists |= {f"{name}/{what}": values for what, values in own.items()}
        kinds = list_types(self.layout)
        arrays = {name: pa.array(lists[name], kind) for name, kind in kinds.items()}
        row = {
            name: pa.LargeListArray.from_arrays(pa.array([0, len(values)], pa.int64()), values)
            for name, values in arrays.items()
        }
        batch = pa.record_batch(row).replace_schema_metadata({"penstock.sidecar": str(VERSION)})
        write_whole(path, lambda temp: write_batch(temp, batch))
        return sidecar_etag(path)


def make_sidecar(
    candidates: Candidates,
    positions: Ints,
    facts: Sequence[Mapping[str, Facts]],
    *,
    layout: SampleLayout,
    is_file_per_sample: bool,
) -> Sidecar:
    """Return the sidecar of a shard's good samples, of which there is at least one.

    positions: of those candidates, int64, shape (n,). facts: of each of them, by field.
    """
    spans = {name: candidates.spans[name] for name in layout.stored("span")}
    used, local = _renumber([each.files[positions] for each in spans.values()])
    fields = {
        name: _examined(
            layout.schema[name], files, span.starts[positions], [each.get(name) for each in facts]
        )
        for (name, span), files in zip(spans.items(), local, strict=True)
    }
    columns = {name: column.take(positions) for name, column in candidates.values.items()}
    for name, type in layout.schema.items():
        if type.is_measured and name in columns:
            sizes = [each[type.reference or ""].shape[:2] for each in facts]
            columns[name] = DenseColumn(np.array(sizes, np.int64))
    for name, column in columns.items():
        present = candidates.present.get(name)
        has = None if present is None else present[positions]
        fields[name] = _recorded(layout, name, column, has)
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        samples=len(positions),
        names=[candidates.names[i] for i in positions.tolist()],
        files=ShardFiles.of([candidates.files[number] for number in used]),
        fields=fields,
        columns=columns,
    )


def _recorded(layout: SampleLayout, name: str, column: Column, present: Bools | None) -> FieldNotes:
    """Return the facts about a field whose values are recorded."""
    storage = layout.storage[name]
    values = column.values if isinstance(column, DenseColumn) and storage == "value" else None
    return FieldNotes(storage=storage, values=values, present=present)


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


def _renumber(numbers: Sequence[Ints]) -> tuple[list[int], list[Ints]]:
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
    local = [places[np.where(n == MISSING, len(order), np.searchsorted(found, n))] for n in numbers]
    return found[order].tolist(), local


def read_sidecar(
    path: bytes, *, etag: str, layout: SampleLayout, is_file_per_sample: bool, url: str = ""
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
            f"dataset was open, or deleted. {REOPEN}"
        ) from None
    except BROKEN as error:
        what, shown = "this part of the index is damaged", printable(path)
        raise damaged_file_error(url or shown, what, error, remedy=REINDEX, path=shown) from error


def _content(lists: Lists, layout: SampleLayout, *, is_file_per_sample: bool) -> Sidecar:
    (rows,) = lists.numbers(ROWS, length=1).tolist()
    (notes,) = lists.arrow(NOTES, length=1).to_pylist()
    if not 1 <= rows <= MAX_SHARD_SAMPLES:
        raise ValueError(f"it has {rows:,} samples")
    is_chunked = layout.is_of_chunks
    # In memory of their own, so that keeping the names doesn't keep the whole sidecar.
    names = lists.arrow(NAMES, length=0 if is_chunked else rows).to_pylist()
    names = LazyColumn(pa.array(names, pa.large_binary()))
    files = _files(lists)
    extents, units = None, list[int]()
    if is_chunked:
        found = lists.attributes(EXTENTS)
        extents = Extents(**{name: each.astype(np.int64) for name, each in found.items()})
        extents.check(files.sizes, fields=len(layout.schema))
        units = lists.numbers(UNITS).tolist()
    fields: dict[str, FieldNotes] = {}
    columns: dict[str, Column] = {}
    for name, type in layout.schema.items():
        if layout.storage[name] == "span":
            fields[name] = _span_notes(type, **lists.attributes(SPAN, of=f"{name}/", length=rows))
            fields[name].check(type, files.sizes)
        elif layout.storage[name] != "chunks":
            columns[name] = _recorded_column(lists, type, name, samples=rows)
            has = lists.numbers(f"{name}/present", length=rows)
            fields[name] = _recorded(layout, name, columns[name], None if has.all() else has)
    return Sidecar(
        layout=layout,
        is_file_per_sample=is_file_per_sample,
        samples=rows,
        names=names,
        files=files,
        fields=fields,
        columns=columns,
        notes=notes,
        extents=extents,
        units=units,
    )


def _files(lists: Lists) -> ShardFiles:
    found = lists.attributes(FILES)
    names, sizes = list(found.pop("names")), found["sizes"]
    if names:
        if are_unsafe(names):
            raise ValueError("a file's name isn't a path below the dataset")
        if sizes.min() < 0 or float(sizes.sum(dtype=np.float64)) > MAX_SHARD_BYTES:
            raise ValueError("its files have impossible sizes")
    return ShardFiles(names=names, **found)


def sidecar_etag(path: bytes) -> str:
    """Return the checksum of a sidecar's file, as a manifest records it. Raises ReadError."""
    try:
        return _etag(map_buffer(path))
    except OSError as error:
        raise read_error(printable(path), error) from error


def _etag(buffer: Any) -> str:
    return f"crc32c-{crc32c(buffer):08x}"


class ShardPlace(Protocol):
    """The place of a shard: a local folder, or a blob of the cache."""

    def file(self, name: bytes, size_bytes: int, *, is_below: bool, remedy: str = "") -> ByteSource:
        """Open a shard that is one file. is_below: refuse links that lead out of the folder.
        remedy: for a local file of a pack, see `LocalFile`."""

    def files(self, files: ShardFiles) -> ByteSource:
        """Open a shard of several files."""

    def parts(self, sidecar: Sidecar, fields: Sequence[str]) -> Parts:
        """Open a shard of chunks. fields: those whose extents a blob has. Raises
        CorruptShardError."""
