"""Index and read the files of a table: choose its fields, cut its units into shards, read rows.

Parquet and Arrow differ in two things: `TableFormat.read_files` reads the metadata of each file
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
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError, DatasetNotFoundError, PenstockError
from penstock.cache.base import machine_remedy
from penstock.readers.fieldtypes import Bytes, Schema
from penstock.readers.files import extension, is_passed_over, printable
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkedShardFacts, ChunkFormat
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.format import DatasetFiles
from penstock.readers.formats.shard_summary import FieldSummary
from penstock.readers.formats.tables.column_choice import (
    choose_columns,
    kind_of,
    union_of_columns,
    warn_of_columns,
)
from penstock.readers.formats.tables.column_types import PATHS_ALONE
from penstock.readers.formats.tables.column_values import TableValues
from penstock.readers.formats.unindexed_files import read_file_parts
from penstock.readers.formats.unit_reader import NO_CHUNK, ROW_BYTES, UnitReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import ArrayForm, FieldType
    from penstock.readers.formats.chunked import ShardData
    from penstock.readers.formats.tables.column_choice import FieldChoice
    from penstock.readers.formats.tables.column_types import ArrowColumn
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

_FIRST_ROWS = 16
MAX_CHECKED_BYTES = 2**28
"""The limit of bytes that are read of a column when a dataset is opened."""

_FREE_BYTES, _MAX_RATIO = 2**28, 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ColumnChunks:
    """The chunks of one column in a file, one for each unit; arrays have the shape (units,).

    starts, sizes: bytes in the file, int64. forms: what many chunks have in common, hashable; for
    JSON a text, or an object with `to_json`. note: returns what else the reader needs of a unit's
    chunk, for JSON; the last item is replaced by the extents of dictionaries. lacking: rows without
    the field, int64; -1 if they have to be counted. nulls_inside: lists of the chunk may have nulls
    inside. dictionaries: the chunks of the dictionary that all units share; it may have nulls if
    some of its rows are lacking.
    """

    starts: Ints
    sizes: Ints
    forms: Sequence[Any]
    note: Callable[[int], list[Any]]
    lacking: Ints
    nulls_inside: NDArray[np.bool_]
    dictionaries: ColumnChunks | None = None


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
    def chunks(self, column: ArrowColumn, form: ArrayForm | None) -> ColumnChunks:
        """Return the chunks of a column of this file. form: of the field, None if its samples are
        encoded; a null list of a ragged one counts as an empty list. Raises ValueError or
        DatasetError."""

    def notes_of_fields(self, columns: Sequence[ArrowColumn]) -> dict[str, Any]:
        """Return what else the reader needs of the columns that are fields, for JSON."""
        del columns
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
        self.read_notes(notes, shard, self._chunks)

    @abstractmethod
    def read_notes(self, notes: Any, shard: ChunkedShardFacts, chunks: Ints) -> None:
        """Read and check the notes on forms and chunks. chunks: the extent of each field in each
        unit, or NO_CHUNK, int64, shape (units, fields). Raises ValueError, TypeError, KeyError."""

    @abstractmethod
    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a chunk's values, as `values_table` does. dictionaries: the bytes of the extents
        that `dictionaries` names. Raises ValueError if the bytes are damaged."""

    def is_plain(self, extent: int) -> bool:
        """Return True if a chunk's table consists of views of its bytes when these are mapped."""
        del extent
        return False

    def chunks(self, units: list[int], field: str) -> list[int]:
        """Return the extents of a field of some units."""
        number = self._numbers[field]
        return [int(self._chunks[unit, number]) for unit in units]

    def name(self, row: int) -> str:
        """Return a row's file and its number in that file."""
        unit, at = self.place_of(row)
        return f"{self._names[self._files[unit]]}, row {self._firsts[unit] + at}"

    def values(self, chunk: int, unit: int, field: str, data: ShardData, taken: int) -> TableValues:
        """Return the values of a chunk. Raises ValueError if it can't be decoded."""
        count = self._counts[unit]

        def decode() -> Any:
            view, dictionaries = data.view(chunk), self.dictionaries(chunk)
            read = data.read([*dictionaries] if view is not None else [chunk, *dictionaries])
            view = read.pop(0) if view is None else view
            table = self.decode(chunk, self._schema[field], view, read)
            if len(table) != count:
                raise ValueError(f"it has {len(table):,} rows, and the index has {count:,}")
            return table

        is_view = self.is_plain(chunk) and data.view(chunk, size_bytes=0) is not None
        found = data.decoded(chunk, decode, uses=count, taken=taken, is_view=is_view)
        return TableValues(found)


class TableFormat(ChunkFormat, ABC):
    """The base of the formats of tables. kind: the format's name in messages."""

    kind: ClassVar[str]
    in_folders: ClassVar[bool] = True

    @abstractmethod
    def read_files(
        self, origin: Origin, files: Sequence[Entry], *, workers: int
    ) -> Iterator[TableFile]:
        """Yield the metadata of files, in their order. Raises DatasetError with the file's name,
        and the errors of `read_file_parts`."""

    @abstractmethod
    def reader(self, shard: ChunkedShardFacts) -> TableReader:
        """Open a shard."""

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root has such files but no folders or images, whose table these files
        may be; of a list of files, if all are such. Raises DatasetError for a Hudi table."""
        from penstock.readers.files import IMAGES

        top = origin.top(self.is_file)
        if origin.selection is not None:
            return bool(top.entries) and not top.others
        if b".hoodie" in top.folders:
            raise DatasetError(
                f"{origin.url}: this is a Hudi table (.hoodie), whose folder holds files of older "
                "versions too. Give the Parquet files of its current version as a list."
            )
        folders = [name for name in top.folders if not is_passed_over(name)]
        images = [name for name in top.others if extension(name) in IMAGES]
        return bool(top.entries) and not folders and not images

    def files(self, origin: Origin) -> DatasetFiles:
        """List all files, those in folders too; of a list, all that the user names."""
        if origin.selection is not None:
            return DatasetFiles(entries=origin.top(bool).entries)
        return super().files(origin)

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read the metadata of all files and return the table's shards. Raises DatasetError with
        the file's name."""
        found = list(self.read_files(origin, files.entries, workers=workers))
        table = _Table(self, origin, found, workers=workers)
        choice = table.choose()
        schema = Schema(choice.types)

        def announce() -> None:
            names = (entry.name for entry in files.entries)
            warn_of_columns(origin.url, choice, names, table.first_values)

        shards = table.shards([*choice.columns.values()], schema)
        if not shards:
            announce()
            raise DatasetNotFoundError(
                f"{origin.url}: its {len(files.entries)} {self.kind} files have no rows."
            )
        return ChunkedDataset(
            schema=schema, shards=shards, left_out=choice.left_out, announce=announce
        )


FileUnits = tuple[int, int, int]
"""A file's number, its first unit, and the unit after its last."""


class _Table:
    """The columns of a table's files, and their chunks."""

    def __init__(
        self, format: TableFormat, origin: Origin, files: Sequence[TableFile], *, workers: int
    ) -> None:
        """Raises DatasetError if files differ in the type of a column."""
        self._format, self._origin = format, origin
        self._files, self._workers = files, workers
        self._columns = union_of_columns(
            ((file.entry, file.columns) for file in files), origin.arrangement.schema
        )
        self._known: dict[tuple[int, str], ColumnChunks] = {}

    def choose(self) -> FieldChoice:
        """Choose the fields, which may need some values of columns. Raises ConfigError,
        DatasetError."""

        def examine(column: ArrowColumn, type: FieldType | None) -> tuple[FieldType, str | None]:
            type = type or kind_of(self.first_values(column))
            return type, self._refusal(column, type)

        name = printable(self._files[0].entry.name)
        arrangement = self._origin.arrangement
        choice = choose_columns(self._columns, arrangement, file=name, examine=examine)
        if not choice.columns:
            raise DatasetError(f"{self._origin.url}: no column can be a field: {choice.reasons}.")
        return choice

    def _chunks(self, number: int, name: str, form: ArrayForm | None) -> ColumnChunks | None:
        """Return the chunks of a column in a file, None if the file lacks it."""
        file = self._files[number]
        column = file.columns.get(name)
        if column is None or pa.types.is_null(column.arrow):
            return None
        if (number, name) not in self._known:
            with refusing(file.entry):
                self._known[number, name] = file.chunks(column, form)
        return self._known[number, name]

    def first_values(self, column: ArrowColumn) -> list[bytes]:
        """Return some of the first values of an encoded field, none if reading them costs too
        much."""
        for number, file in enumerate(self._files):
            units = np.flatnonzero(file.rows)
            chunks = self._chunks(number, column.name, None) if len(units) else None
            if chunks is None:
                continue
            if chunks.sizes[units[0]] > MAX_CHECKED_BYTES:
                return []
            rows = np.arange(min(int(file.rows[units[0]]), _FIRST_ROWS))
            with refusing(file.entry):
                ((_, _, values),) = self._values([(number, int(units[0]))], column, Bytes())
                if isinstance(values, ValueError):
                    raise values
                found = [np.empty(0, np.uint8)] * len(rows)
                values.put(found, rows, rows, None)
                return [sample.tobytes() for sample in found]
        return []

    def _refusal(self, column: ArrowColumn, type: FieldType) -> str | None:
        """Return why a column's values can't be a field although its type can, or None: lists that
        have nulls inside or aren't arrays; structs of paths without bytes.

        Reads up to MAX_CHECKED_BYTES of the column: the chunks whose nulls nothing has counted (it
        notes their number), and those whose metadata don't exclude such lists, but only the first
        of them for nested lists and on a remote store.
        """
        form = type.form
        is_nested = form is not None and form.shape.count(None) > 1
        wanted: list[tuple[int, int]] = []
        rows = total = 0
        stored: list[ColumnChunks] = []
        for number, file in enumerate(self._files):
            chunks = self._chunks(number, column.name, form)
            if chunks is None:
                continue
            stored.append(chunks)
            rows += int(file.rows.sum())
            inside = chunks.nulls_inside & (form is not None)
            uncounted = (chunks.lacking < 0) & ~inside
            for unit in np.flatnonzero((uncounted | inside | is_nested) & (file.rows > 0)).tolist():
                total += int(chunks.sizes[unit])
                # On a remote store only one chunk of lists: each further one is a request.
                is_enough = not uncounted[unit] and (not self._origin.is_local or not inside[unit])
                if total <= MAX_CHECKED_BYTES and not (wanted and is_enough):
                    wanted.append((number, unit))
        for number, unit, values in self._values(wanted, column, type):
            if isinstance(values, ValueError):  # a damaged chunk makes bad samples when it is read
                continue
            lacking, file = self._known[number, column.name].lacking, self._files[number]
            if form is None or not form.is_ragged:
                lacking[unit] = values.array.null_count
            if (found := values.not_an_array()) is not None:
                row, reason, advice = found
                row += int(file.rows[:unit].sum())
                where = f"{printable(file.entry.name)}, row {row}"
                return f"{reason} ({where}): {advice} when you write the file"
        nulls = sum(int(chunks.lacking.sum()) for chunks in stored)
        return PATHS_ALONE if column.is_media and stored and nulls == rows else None

    def _values(
        self, places: Sequence[tuple[int, int]], column: ArrowColumn, type: FieldType
    ) -> Iterator[tuple[int, int, TableValues | ValueError]]:
        """Read and decode a column in some units, given by file and unit in ascending order, as the
        chunks of a shard. Yield the file, the unit, and its values or why they are damaged."""
        if not places:
            return
        schema = cast("Schema", {column.name: type})  # the type may refer to another field
        shard = self._shard([(file, unit, unit + 1) for file, unit in places], [column], schema)
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
        ranges = zip(
            extents.files.tolist(), extents.starts.tolist(), extents.sizes.tolist(), strict=True
        )
        parts = [(shard.files[file], start, start + size) for file, start, size in ranges]
        read = read_file_parts(self._origin, parts, workers=self._workers)
        data = [np.frombuffer(part, np.uint8) for part in read]
        chunks = reader.chunks([*range(len(places))], column.name)
        for (number, unit), chunk in zip(places, chunks, strict=True):
            dictionaries = [data[other] for other in reader.dictionaries(chunk)]
            try:
                table = reader.decode(chunk, type, data[chunk], dictionaries)
                yield number, unit, TableValues(table)
            except ValueError as error:
                yield number, unit, error

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
        places: list[tuple[int, int]] = []  # of units: file, first row
        rows: list[int] = []
        table: list[Ints] = []  # of units: the number of each field's chunk
        notes: list[list[Any]] = []
        extents: list[tuple[int, int, int, int]] = []
        forms: dict[Any, int] = {}
        dictionaries: list[list[int]] = []
        missing = dict.fromkeys(schema, 0)
        checksum = 0

        def add(chunks: ColumnChunks, own: Sequence[int], field: int) -> range:
            """Add chunks of the last file; return their numbers."""
            for unit in own:
                form = forms.setdefault(chunks.forms[unit], len(forms))
                notes.append([form, *chunks.note(unit)])
                size = int(chunks.sizes[unit])
                extents.append((place, int(chunks.starts[unit]), size, field))
            return range(len(notes) - len(own), len(notes))

        for place, (file, (number, begin, end)) in enumerate(zip(files, units, strict=True)):
            own = begin + np.flatnonzero(file.rows[begin:end])
            counts, firsts = file.rows[own].tolist(), (np.cumsum(file.rows) - file.rows)[own]
            places += [(place, first) for first in firsts.tolist()]
            rows += counts
            identity = f"{file.checksum}:{begin}:{end}:".encode() + file.entry.name
            checksum = crc32c(identity, checksum)
            numbers = np.full((len(own), len(columns)), NO_CHUNK, np.int64)
            table.append(numbers)
            for field, (name, type) in enumerate(schema.items()):
                column = columns[field]
                chunks = self._chunks(number, column.name, type.form)
                if chunks is None:
                    missing[name] += sum(counts)
                    continue
                with refusing(file.entry, f'its column "{column.name}": '):
                    _check_claim(type.form, counts, chunks.sizes[own].tolist())
                missing[name] += int(np.maximum(chunks.lacking[own], 0).sum())
                values: list[int] = []
                if (others := chunks.dictionaries) is not None:
                    values += add(others, range(len(others.sizes)), field)
                    dictionaries.append(values)
                    if others.lacking.any():  # at least one row, so that a reader expects nulls
                        missing[name] = max(missing[name], 1)
                numbers[:, field] = added = add(chunks, own.tolist(), field)
                for chunk in added if values else ():
                    notes[chunk][-1] = values
        found = np.array(extents, np.int64).reshape(-1, 4)
        order = np.lexsort((found[:, 3], found[:, 1], found[:, 0]))  # as they are stored
        new_numbers = np.append(np.argsort(order), NO_CHUNK)  # the last one is that of NO_CHUNK
        for values in dictionaries:
            values[:] = new_numbers[values].tolist()
        note = {
            "names": [printable(file.entry.name) for file in files],
            "files": [place for place, _ in places],
            "firsts": [first for _, first in places],
            "extents": new_numbers[np.concatenate(table)].tolist(),
            "lacking": sorted(name for name, count in missing.items() if count),
            **files[0].notes_of_fields(columns),
            "chunks": [notes[number] for number in order.tolist()],
            "forms": list(forms),
        }
        return ChunkedShard(
            samples=sum(rows),
            files=[file.entry for file in files],
            extents=Extents.of(found[order]),
            checksum=checksum,
            units=rows,
            fields={
                name: FieldSummary(storage="chunks", missing=count)
                for name, count in missing.items()
            },
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


def _check_claim(form: ArrayForm | None, rows: Sequence[int], sizes: Sequence[int]) -> None:
    """Raise ValueError if samples of a fixed shape need more memory than the bytes of their chunks
    may decode to. rows, sizes: of the chunks."""
    if form is None or form.is_ragged:
        return
    for count, size_bytes in zip(rows, sizes, strict=True):
        claimed = math.prod(form.fixed_shape) * form.dtype.itemsize * count
        if claimed > max_decoded_bytes(size_bytes):
            raise ValueError(
                f"its {count:,} rows of {form.dtype} of shape {form.shape} would take {claimed:,} "
                f"bytes, and its chunk has {size_bytes:,}"
            )


@contextmanager
def refusing(entry: Entry, where: str = "") -> Iterator[None]:
    """Raise a DatasetError with the file's name instead of a ValueError. where: begins the
    reason."""
    try:
        yield
    except PenstockError:
        raise
    except ValueError as error:
        raise DatasetError(
            f"{printable(entry.name)}: {where}{error}. Write or fetch it again, or take it out of "
            "the dataset."
        ) from error


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


def read_ends(
    origin: Origin,
    files: Sequence[Entry],
    footer_bytes: Callable[[bytes, int], int],
    *,
    workers: int,
) -> Iterator[tuple[Entry, bytes]]:
    """Yield the end of each file, in their order: its footer and possibly bytes before it.

    footer_bytes: returns how many bytes at the end of a file are its footer, given some of its last
    bytes and its size; raises ValueError. Raises DatasetError with the file's name, and the errors
    of `read_file_parts`.
    """
    for first in range(0, len(files), _AT_ONCE):
        group = files[first : first + _AT_ONCE]
        starts = [max(0, entry.size_bytes - _TAIL_READ_BYTES) for entry in group]
        parts = [(e, start, e.size_bytes) for e, start in zip(group, starts, strict=True)]
        tails = read_file_parts(origin, parts, workers=workers)
        longer = []
        for number, (entry, tail) in enumerate(zip(group, tails, strict=True)):
            with refusing(entry):
                begin = entry.size_bytes - footer_bytes(tail, entry.size_bytes)
            if begin < starts[number]:
                longer.append((number, (entry, begin, starts[number])))
        heads = read_file_parts(origin, [part for _, part in longer], workers=workers)
        for (number, _), head in zip(longer, heads, strict=True):
            tails[number] = head + tails[number]
        yield from zip(group, tails, strict=True)
