"""Index and read the files of a table: choose its fields, cut its units into shards, read rows.

Parquet and Arrow differ in two things: `TableFormat.open_file` reads the metadata of a file
(`TableFile`), and a reader decodes a chunk, one column of one unit (row group, record batch). All
else is common. A shard is contiguous units of a large file, or a group of small files.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError, DatasetNotFoundError
from penstock.cache.base import machine_remedy
from penstock.readers.fieldtypes import ArrayForm, Bytes, FieldType, Schema
from penstock.readers.files import IMAGES, extension, is_passed_over, printable
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkedShardFacts, ChunkFormat
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.formats.shard_summary import FieldSummary
from penstock.readers.formats.tables.column_fields import (
    PATHS_ALONE,
    choose_columns,
    kind_of,
    union_of_columns,
    warn_of_columns,
)
from penstock.readers.formats.tables.column_values import NULL_INSIDE, RAGGED_INSIDE, TableValues
from penstock.readers.formats.unindexed_files import read_file_parts, refusing
from penstock.readers.formats.unit_reader import NO_CHUNK, ROW_BYTES, UnitReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.tables.column_fields import ArrowColumn
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded, Ints


_FIRST_ROWS = 16
MAX_CHECKED_BYTES = 2**28
"""The limit of bytes that are read of a column when a dataset is opened."""

_FREE_BYTES, _MAX_RATIO = 2**28, 1000


@dataclass(slots=True, kw_only=True, eq=False)
class StoredChunk:
    """A column of one unit, or a part of the values of a dictionary.

    start, size: its bytes in the file. form: what many chunks have in common, hashable; for JSON a
    text, or an object with `to_json`. note: what else the reader needs of it, for JSON. lacking:
    rows without the field; -1 if they have to be counted. nulls_inside: its lists may have nulls
    inside. dictionary: the chunks with the values of its dictionary, whose extents replace the last
    item of the note; it may have nulls if one of them lacks rows.
    """

    start: int
    size: int
    form: Any
    note: list[Any]
    lacking: int = 0
    nulls_inside: bool = False
    dictionary: Sequence[StoredChunk] = ()

    def count(self, nulls: int) -> None:
        """Record how many rows lack the field, also in a note that ends with this number."""
        if self.note[-1] == self.lacking:
            self.note[-1] = nulls
        self.lacking = nulls


class TableFile(ABC):
    """The metadata of one file of a table.

    columns: those that may be fields, by name. rows, sizes: of each unit, int64, shape (units,).
    checksum: CRC-32C of the metadata.
    """

    entry: Entry
    columns: Mapping[str, ArrowColumn]
    rows: Ints
    sizes: Ints
    checksum: int

    @abstractmethod
    def chunks(self, column: ArrowColumn, form: ArrayForm | None) -> list[StoredChunk]:
        """Return the chunks of a column of this file, one for each unit. form: of the field, None
        if its samples are encoded; a null list of a ragged one counts as an empty list. Raises
        ValueError or DatasetError."""

    def notes_of_fields(self, columns: Sequence[ArrowColumn]) -> dict[str, Any]:
        """Return what else the reader needs of the columns that are fields, for JSON."""
        return {}


class TableReader(UnitReader):
    """The base of readers of tables; a subclass decodes its format's chunks."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        """Read the notes of a shard. Raises ValueError, TypeError, LookupError or OverflowError if
        they are invalid."""
        notes = shard.note
        super().__init__(shard, lacking=notes["lacking"])
        self._numbers = {name: number for number, name in enumerate(shard.schema)}
        # The shard's files, for messages; of each unit, the number of its file and the unit's first
        # row in that file; and the extent of each field in each unit.
        self._names = [str(name) for name in notes["names"]]
        self._files, self._firsts = (np.array(notes[key], np.int64) for key in ("files", "firsts"))
        self._chunks = np.array(notes["extents"], np.int64).reshape(-1, len(shard.schema))
        counts = {len(shard.units), len(self._files), len(self._firsts), len(self._chunks)}
        if len(counts) > 1 or len(notes["chunks"]) != len(shard.extents):
            raise ValueError("the numbers of its units or chunks disagree")
        for numbers, least, end in (
            (self._chunks, NO_CHUNK, len(shard.extents)),
            (self._files, 0, len(self._names)),
            (self._firsts, 0, 2**63),
        ):
            if not least <= int(numbers.min()) <= int(numbers.max()) < end:
                raise ValueError("its units have chunks, files or rows that don't exist")
        self.read_notes(notes, shard)

    @abstractmethod
    def read_notes(self, notes: Any, shard: ChunkedShardFacts) -> None:
        """Read and check the notes on forms and chunks. Raises ValueError, TypeError, KeyError."""

    @abstractmethod
    def decode(
        self, extent: int, rows: int, type: FieldType, data: Encoded, others: Sequence[Encoded]
    ) -> Any:
        """Return the values of a chunk of some rows, as `values_table` does. others: the bytes of
        the extents that `dictionaries` names. Raises ValueError if the bytes are damaged."""

    def chunks(self, units: list[int], field: str) -> list[int]:
        """Return the extents of a field of some units."""
        number = self._numbers[field]
        return [int(self._chunks[unit, number]) for unit in units]

    def name(self, row: int) -> str:
        """Return a row's file and its number in that file."""
        unit, at = self.place_of(row)
        return f"{self._names[self._files[unit]]}, row {self._firsts[unit] + at}"

    def decoded(self, chunk: int, unit: int, field: str, data: ShardData) -> Any:
        """Return the table of a chunk's values."""
        view, dictionaries = data.view(chunk), self.dictionaries(chunk)
        read = data.read([*dictionaries] if view is not None else [chunk, *dictionaries])
        view = read.pop(0) if view is None else view
        count = self._counts[unit]
        table = self.decode(chunk, count, self._schema[field], view, read)
        if len(table) != count:
            raise ValueError(f"it has {len(table):,} rows, and the index has {count:,}")
        return table

    def values(self, decoded: Any, field: str) -> TableValues:
        """Return the values of a field."""
        return TableValues(decoded)


class TableFormat(ChunkFormat, ABC):
    """The base of the formats of tables. reader_class: of its reader."""

    reader_class: ClassVar[type[TableReader]]
    in_folders: ClassVar[bool] = True

    @abstractmethod
    def footer_bytes(self, tail: bytes, size_bytes: int) -> int:
        """Return how many bytes at the end of a file are its footer, given some of its last bytes
        and its size. Raises ValueError."""

    @abstractmethod
    def open_file(
        self, origin: Origin, entry: Entry, tail: bytes, *, known: dict[Any, Any], workers: int
    ) -> TableFile:
        """Read the metadata of a file. tail: its end, with the footer. known: the format's own,
        kept from file to file. Raises ValueError or DatasetError, and the errors of
        `read_file_parts`."""

    def reader(self, shard: ChunkedShardFacts) -> TableReader:
        """Open a shard."""
        return self.reader_class(shard)

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root has such files but no folders or images, whose table these files
        may be; of a list of files, if all are such. Raises DatasetError for a Hudi table."""
        names = origin.names()
        others = [name for name in names.files if not self.is_file(name)]
        if origin.selection is not None:
            return bool(names.files) and not others
        if b".hoodie" in names.folders:
            raise DatasetError(
                f"{origin.url}: this is a Hudi table (.hoodie), whose folder holds files of older "
                "versions too. Give the Parquet files of its current version as a list."
            )
        has_images = any(extension(name) in IMAGES for name in others)
        has_folders = not all(map(is_passed_over, names.folders))
        return len(others) < len(names.files) and not has_folders and not has_images

    def files(self, origin: Origin) -> DatasetFiles:
        """List all files, those in folders too; of a list, all that the user names."""
        if origin.selection is not None:
            return DatasetFiles(entries=origin.entries(bool))
        return super().files(origin)

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read the metadata of all files and return the table's shards. Raises DatasetError with
        the file's name."""
        found, known = list[TableFile](), dict[Any, Any]()
        for entry, tail in _read_ends(self, origin, files.entries, workers=workers):
            with refusing(entry):
                found.append(self.open_file(origin, entry, tail, known=known, workers=workers))
        table = _Table(self, origin, found, workers=workers)
        file = printable(found[0].entry.name)
        fields, left_out = choose_columns(
            table.columns, origin.arrangement, file=file, examine=table.examine
        )

        def announce() -> None:
            names = (entry.name for entry in files.entries)
            warn_of_columns(origin.url, fields, left_out, names, table.first_values)

        schema = Schema({name: type for name, (_, type) in fields.items()})
        shards = table.shards([column for column, _ in fields.values()], schema)
        if not shards:
            announce()
            raise DatasetNotFoundError(
                f"{origin.url}: its {len(files.entries)} {self.name} files have no rows."
            )
        return ChunkedDataset(schema=schema, shards=shards, left_out=left_out, announce=announce)


_ADVICE = {NULL_INSIDE: "replace the null", RAGGED_INSIDE: "pad or flatten the lists"}
"""The remedy for lists that can't become arrays, by the reason. A value that doesn't fit makes one
bad sample instead."""

FileUnits = tuple[int, int, int]
"""A file's number, its first unit, and the unit after its last."""


class _Place(NamedTuple):
    """A chunk of a column. file: its number; row: the first one of its unit in the file."""

    file: int
    unit: int
    row: int
    rows: int
    chunk: StoredChunk


class _Table:
    """The columns of a table's files, and their chunks."""

    def __init__(
        self, format: TableFormat, origin: Origin, files: Sequence[TableFile], *, workers: int
    ) -> None:
        """Raises DatasetError if files differ in the type of a column."""
        self._format, self._origin = format, origin
        self._files, self._workers = files, workers
        self.columns = union_of_columns(
            ((file.entry, file.columns) for file in files), origin.arrangement.schema
        )
        self._known: dict[tuple[int, str], list[StoredChunk]] = {}

    def _chunks(
        self, number: int, name: str, form: ArrayForm | None
    ) -> Sequence[StoredChunk] | None:
        """Return the chunks of a column in a file, None if the file lacks it."""
        file = self._files[number]
        column = file.columns.get(name)
        if column is None or pa.types.is_null(column.arrow):
            return None
        if (number, name) not in self._known:
            with refusing(file.entry):
                self._known[number, name] = file.chunks(column, form)
        return self._known[number, name]

    def _places(self, name: str, form: ArrayForm | None) -> Iterator[_Place]:
        """Yield the chunks of a column that have rows."""
        for number, file in enumerate(self._files):
            row = 0
            rows = file.rows.tolist()
            for unit, chunk in enumerate(self._chunks(number, name, form) or ()):
                if rows[unit]:
                    yield _Place(number, unit, row, rows[unit], chunk)
                row += rows[unit]

    def first_values(self, column: ArrowColumn) -> list[bytes]:
        """Return some of the first values of an encoded field, none if reading them costs too
        much."""
        first = next(self._places(column.name, None), None)
        if first is None or first.chunk.size > MAX_CHECKED_BYTES:
            return []
        ((_, values),) = self._values([first], column, Bytes())
        with refusing(self._files[first.file].entry):
            if isinstance(values, ValueError):
                raise values
        return [value or b"" for value in values.array[:_FIRST_ROWS].to_pylist()]

    def examine(self, column: ArrowColumn, type: FieldType | None) -> tuple[FieldType, str | None]:
        """Return the type of a column, None if its first values decide; and why its values can't be
        a field although its type can, or None: lists that have nulls inside or aren't arrays;
        structs of paths without bytes.

        Reads up to MAX_CHECKED_BYTES of the column: the chunks whose nulls nothing has counted (it
        notes their number), and those whose metadata don't exclude such lists, but only the first
        of them for nested lists and on a remote store.
        """
        type = type or kind_of(self.first_values(column))
        form = type.form
        is_nested = form is not None and form.shape.count(None) > 1
        wanted: list[_Place] = []
        places = [*self._places(column.name, form)]
        total = 0
        for place in places:
            inside = place.chunk.nulls_inside and form is not None
            is_uncounted = place.chunk.lacking < 0 and not inside
            if is_uncounted or inside or is_nested:
                total += place.chunk.size
                # On a remote store only one chunk of lists: each further one is a request.
                is_enough = not is_uncounted and (not self._origin.is_local or not inside)
                if total <= MAX_CHECKED_BYTES and not (wanted and is_enough):
                    wanted.append(place)
        for place, values in self._values(wanted, column, type):
            if isinstance(values, ValueError):  # a damaged chunk makes bad samples when it is read
                continue
            if form is None or not form.is_ragged:
                place.chunk.count(values.array.null_count)
            for row, reason in values.reasons(np.arange(place.rows)):
                if reason in _ADVICE:
                    file = printable(self._files[place.file].entry.name)
                    where = f"({file}, row {place.row + row})"
                    advice = f"{_ADVICE[reason]} when you write the file"
                    return type, f"{reason} {where}: {advice}"
        lacks_all = all(place.chunk.lacking == place.rows for place in places)
        return type, PATHS_ALONE if column.is_media and places and lacks_all else None

    def _values(
        self, places: Sequence[_Place], column: ArrowColumn, type: FieldType
    ) -> Iterator[tuple[_Place, TableValues | ValueError]]:
        """Read and decode some chunks of a column, in the order of the files, as those of a shard.
        Yield each with its values, or why these are damaged."""
        if not places:
            return
        schema = cast("Schema", {column.name: type})  # the type may refer to another field
        shard = self._shard([(p.file, p.unit, p.unit + 1) for p in places], [column], schema)
        extents = shard.extents
        facts = ChunkedShardFacts(
            schema=schema,
            samples=shard.samples,
            extents=extents,
            units=np.array(shard.units, np.int64),
            files=[entry.name for entry in shard.files],
            notes=shard.notes,
        )
        with refusing(shard.files[0]):
            reader = self._format.reader(facts)
        ranges = np.stack((extents.files, extents.starts, extents.sizes), axis=1).tolist()
        parts = [(shard.files[file], start, start + size) for file, start, size in ranges]
        read = read_file_parts(self._origin, parts, workers=self._workers)
        data = [np.frombuffer(part, np.uint8) for part in read]
        chunks = reader.chunks([*range(len(places))], column.name)
        for place, chunk in zip(places, chunks, strict=True):
            dictionaries = [data[other] for other in reader.dictionaries(chunk)]
            try:
                found = reader.decode(chunk, place.rows, type, data[chunk], dictionaries)
                yield place, TableValues(found)
            except ValueError as error:
                yield place, error

    def shards(self, columns: Sequence[ArrowColumn], schema: Schema) -> list[ChunkedShard]:
        """Return all shards with rows, in the order of the files. Raises DatasetError."""
        files = self._files
        cuts = cut_units([file.rows for file in files], [file.sizes for file in files])
        shards = ([(n, a, b) for n, a, b in cut if files[n].rows[a:b].any()] for cut in cuts)
        return [self._shard(units, columns, schema) for units in shards if units]

    def _shard(
        self, units: Sequence[FileUnits], columns: Sequence[ArrowColumn], schema: Schema
    ) -> ChunkedShard:
        """Return the shard of some units, of which each file has some with rows. Raises
        DatasetError."""
        files = [self._files[number] for number, _, _ in units]
        places: list[tuple[int, int, int]] = []  # of units: file, first row in it, rows
        found: list[tuple[int, int, StoredChunk]] = []  # file, field, chunk
        table: list[list[int]] = []  # of units: the place in `found` of each field's chunk
        dictionaries: dict[int, Sequence[int]] = {}  # of chunks, as their places in `found`
        forms: dict[Any, int] = {}
        missing = dict.fromkeys(schema, 0)
        checksum = 0

        def add(chunks: Sequence[StoredChunk]) -> range:
            found.extend((place, field, chunk) for chunk in chunks)
            for chunk in chunks:
                forms.setdefault(chunk.form, len(forms))
            return range(len(found) - len(chunks), len(found))

        for place, (file, (number, begin, end)) in enumerate(zip(files, units, strict=True)):
            identity = f"{file.checksum}:{begin}:{end}:".encode() + file.entry.name
            checksum = crc32c(identity, checksum)
            own = begin + np.flatnonzero(file.rows[begin:end])
            counts, firsts = file.rows[own].tolist(), (np.cumsum(file.rows) - file.rows)[own]
            places += ((place, *unit) for unit in zip(firsts.tolist(), counts, strict=True))
            by_field: list[Sequence[int]] = []
            for field, (name, type) in enumerate(schema.items()):
                every = self._chunks(number, columns[field].name, type.form)
                if every is None:
                    missing[name] += sum(counts)
                    by_field.append([NO_CHUNK] * len(own))
                    continue
                chunks = [every[unit] for unit in own.tolist()]
                with refusing(file.entry, f'its column "{columns[field].name}": '):
                    for chunk, rows in zip(chunks, counts, strict=True):
                        _check_claim(type.form, rows, chunk.size)
                missing[name] += sum(max(chunk.lacking, 0) for chunk in chunks)
                values = add(chunks[0].dictionary)  # of all chunks of the file
                if any(part.lacking for part in chunks[0].dictionary):
                    missing[name] = max(missing[name], 1)  # so that a reader expects nulls
                by_field.append(add(chunks))
                dictionaries.update(dict.fromkeys(by_field[-1], values) if values else {})
            table += ([*unit] for unit in zip(*by_field, strict=True))
        # As they are stored.
        keys = [(place, chunk.start, field) for place, field, chunk in found]
        order = sorted(range(len(found)), key=keys.__getitem__)
        numbers = {at: number for number, at in enumerate(order)} | {NO_CHUNK: NO_CHUNK}
        notes: list[list[Any]] = []
        for at in order:
            chunk = found[at][2]
            notes.append([forms[chunk.form], *chunk.note])
            if at in dictionaries:
                notes[-1][-1] = [numbers[part] for part in dictionaries[at]]
        stored = (found[at] for at in order)
        extents = Extents.of([(file, c.start, c.size, field) for file, field, c in stored])
        note = {
            "names": [printable(file.entry.name) for file in files],
            "files": [place for place, _, _ in places],
            "firsts": [first for _, first, _ in places],
            "extents": [[numbers[at] for at in unit] for unit in table],
            "lacking": sorted(name for name, count in missing.items() if count),
            **files[0].notes_of_fields(columns),
            "chunks": notes,
            "forms": list(forms),
        }
        return ChunkedShard(
            samples=sum(rows for _, _, rows in places),
            files=[file.entry for file in files],
            extents=extents,
            checksum=checksum,
            units=[rows for _, _, rows in places],
            fields={n: FieldSummary(storage="chunks", missing=c) for n, c in missing.items()},
            note=json.dumps(note, default=lambda form: form.to_json()).encode(),
        )


def cut_units(rows: Sequence[Ints], sizes: Sequence[Ints]) -> Iterator[list[FileUnits]]:
    """Yield the units of each shard, in the order of the files.

    rows, sizes: the samples and the bytes of each file's units, int64, shape (units,).
    """
    shares = [np.maximum(each, ROW_BYTES * own) for each, own in zip(sizes, rows, strict=True)]
    totals = [int(each.sum()) for each in shares]
    is_small = [total <= PART_BYTES for total in totals]
    for some_are_small, files in groupby(range(len(rows)), key=is_small.__getitem__):
        group = [*files]
        if some_are_small:
            for a, b in pairwise(part_bounds([totals[number] for number in group]).tolist()):
                yield [(number, 0, len(rows[number])) for number in group[a:b]]
            continue
        for number in group:
            yield from ([(number, a, b)] for a, b in pairwise(part_bounds(shares[number]).tolist()))


def max_decoded_bytes(size_bytes: int) -> int:
    """Return how many bytes of memory `size_bytes` of a file may decode to; more is damage."""
    return max(_FREE_BYTES, _MAX_RATIO * size_bytes)


def _check_claim(form: ArrayForm | None, rows: int, size_bytes: int) -> None:
    """Raise ValueError if samples of a fixed shape need more memory than the bytes of their chunk
    may decode to. rows: of the chunk."""
    if form is None or form.is_ragged:
        return
    claimed = math.prod(form.fixed_shape) * form.dtype.itemsize * rows
    if claimed > max_decoded_bytes(size_bytes):
        raise ValueError(
            f"its {rows:,} rows of {form.dtype} of shape {form.shape} would take {claimed:,} "
            f"bytes, and its chunk has {size_bytes:,}"
        )


@contextmanager
def arrow_errors(what: str) -> Iterator[None]:
    """Raise a ValueError that begins with `what` if pyarrow finds damage; its errors pass through
    if the machine is at fault, for example if it has no memory left."""
    try:
        yield
    except (pa.ArrowException, OSError, MemoryError) as error:
        if machine_remedy(error) is not None:
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"{what} ({reason})") from error


_TAIL_READ_BYTES = 2**16
"""The size of the end of a file that is read at first: most footers are smaller."""

_AT_ONCE = 1024


def _read_ends(
    format: TableFormat, origin: Origin, files: Sequence[Entry], *, workers: int
) -> Iterator[tuple[Entry, bytes]]:
    """Yield the end of each file, in their order: its footer and possibly bytes before it. Raises
    DatasetError with the file's name, and the errors of `read_file_parts`."""
    for first in range(0, len(files), _AT_ONCE):
        group = files[first : first + _AT_ONCE]
        starts = [max(0, entry.size_bytes - _TAIL_READ_BYTES) for entry in group]
        parts = [(e, start, e.size_bytes) for e, start in zip(group, starts, strict=True)]
        tails = read_file_parts(origin, parts, workers=workers)
        longer = []
        for number, (entry, tail) in enumerate(zip(group, tails, strict=True)):
            with refusing(entry):
                begin = entry.size_bytes - format.footer_bytes(tail, entry.size_bytes)
            if begin < starts[number]:
                longer.append((number, (entry, begin, starts[number])))
        heads = read_file_parts(origin, [part for _, part in longer], workers=workers)
        for (number, _), head in zip(longer, heads, strict=True):
            tails[number] = head + tails[number]
        yield from zip(group, tails, strict=True)
