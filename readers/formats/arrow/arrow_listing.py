"""List Arrow files as shards, from their footers and the heads of their record batches."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError, PenstockError
from penstock.readers.fieldtypes import Bytes, array_form
from penstock.readers.files import printable
from penstock.readers.formats.arrow.ipc_chunks import (
    ArrowNotes,
    chunk_of,
    decode_chunk,
    pruned_type,
    storage_type,
    type_to_text,
)
from penstock.readers.formats.arrow.ipc_metadata import read_files
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.shard_summary import FieldSummary
from penstock.readers.formats.tables import (
    MAX_CHECKED_BYTES,
    NO_CHUNK,
    PATHS_ALONE,
    EncodedRows,
    ShardUnits,
    TableMetadata,
    arrow_columns,
    check_claim,
    cut_units,
    features_in_metadata,
    refusal_of,
    refused_file_error,
)
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fieldtypes import FieldType, Schema
    from penstock.readers.formats.arrow.ipc_chunks import ChunkPlace, ColumnChunk
    from penstock.readers.formats.arrow.ipc_metadata import ArrowFile, BatchMetadata
    from penstock.readers.formats.tables import ArrowColumn, FieldChoice
    from penstock.readers.origin import Entry, Origin

_FIRST_ROWS = 16


class ArrowMetadata(TableMetadata):
    """The columns and record batches of a dataset's files."""

    def __init__(self, origin: Origin, files: Sequence[Entry], *, workers: int) -> None:
        """Raises DatasetError with the file's name."""
        super().__init__(origin, files)
        self._contents = list(read_files(origin, files, workers=workers))
        self._columns: list[dict[str, ArrowColumn]] = []
        self._fields: list[FileColumns] = []
        for entry, file in zip(files, self._contents, strict=True):
            schema = file.contents.schema
            try:
                columns = list(arrow_columns(schema, features_in_metadata(schema, entry)))
            except UnicodeDecodeError as error:
                raise refused_file_error(
                    entry, f"a column isn't named in UTF-8 ({error})"
                ) from error
            if len(set(schema.names)) < len(schema.names):
                raise refused_file_error(entry, "two of its columns have one name")
            self._drift.add(columns, entry)
            self._columns.append({column.name: column for column in columns})

    def _locate(self, choice: FieldChoice) -> None:
        self._fields = []
        for entry, file, own in zip(self._files, self._contents, self._columns, strict=True):
            columns = [own.get(column.name) for column in choice.columns.values()]
            columns = [None if c is None or pa.types.is_null(c.arrow) else c for c in columns]
            try:
                self._fields.append(FileColumns(entry, file, columns))
            except DatasetError:
                raise
            except ValueError as error:
                raise refused_file_error(entry, error) from error

    def first_values(self, field: int) -> list[bytes]:
        """Return some values of an encoded field from the first record batch that has it."""
        for file in self._fields:
            column = file.columns[field]
            if column is None or not file.batches or pa.types.is_dictionary(file.inside(field)):
                continue
            _, place, _ = file.chunk(field, file.batches[0])
            if place.size > MAX_CHECKED_BYTES:
                return []
            try:
                ((_, table),) = self._tables([(file, 0)], field, Bytes(), workers=1)
                count = min(len(table), _FIRST_ROWS)
                values = EncodedRows(count)
                values.add(table, np.arange(count), range(count))
            except ValueError as error:
                raise refused_file_error(file.entry, error) from error
            return [sample.tobytes() for sample in values.samples]
        return []

    def refusal(
        self, field: int, column: ArrowColumn, type: FieldType, *, workers: int
    ) -> str | None:
        """Return why a column's values can't be a field, or None. Reads lists only."""
        form, depth = array_form(type), len(column.path)
        is_nested = form is not None and form.shape.count(None) > 1
        wanted: list[tuple[FileColumns, int]] = []
        rows = nulls = total = 0
        for file in self._fields:
            own = file.columns[field]
            if own is None or pa.types.is_dictionary(file.inside(field)):
                continue
            for number, batch in enumerate(file.batches):
                chunk, place, _ = file.chunk(field, batch)
                rows += batch.rows
                nulls += max(count for _, count in chunk.nodes[:depth])
                has_nulls = any(count for _, count in chunk.nodes[depth:])
                total += place.size
                is_enough = bool(wanted) and (not self._origin.is_local or not has_nulls)
                if (
                    form is not None
                    and total <= MAX_CHECKED_BYTES
                    and (has_nulls or is_nested)
                    and not is_enough
                ):
                    wanted.append((file, number))
        try:
            for (file, number), table in self._tables(wanted, field, type, workers=workers):
                first = int(file.rows[:number].sum())
                reason = refusal_of(table, file=printable(file.entry.name), first=first)
                if reason is not None:
                    return reason
        except ValueError as error:
            if isinstance(error, PenstockError):
                raise
            return None  # damaged chunks make bad samples when they are read
        return PATHS_ALONE if column.is_media and rows and nulls >= rows else None

    def _tables(
        self, places: list[tuple[FileColumns, int]], field: int, type: FieldType, *, workers: int
    ) -> Iterator[tuple[tuple[FileColumns, int], Any]]:
        """Read and decode a field, which has no dictionary, in some record batches of files.
        Raises ValueError for damage."""
        chunks = [file.chunk(field, file.batches[number])[:2] for file, number in places]
        ranges = [
            (file.entry, at.start, at.start + at.size)
            for (file, _), (_, at) in zip(places, chunks, strict=True)
        ]
        read = read_file_parts(self._origin, ranges, workers=workers) if ranges else []
        for place, (chunk, _), data in zip(places, chunks, read, strict=True):
            file, column = place[0], place[0].column(field)
            yield (
                place,
                decode_chunk(
                    np.frombuffer(data, np.uint8),
                    chunk,
                    file.type(field),
                    type,
                    column.path[1:],
                    (),
                    column.tensor,
                ),
            )

    def shards(self, schema: Schema) -> list[ChunkedShard]:
        """Return all shards with rows, in the order of the files. Raises DatasetError."""
        files, found = self._fields, []
        for groups in cut_units([file.rows for file in files], [file.sizes for file in files]):
            draft = _ArrowShardDraft(schema)
            for number, begin, end in groups:
                if end > begin:
                    draft.add(files[number], begin, end)
            if draft.units:
                found.append(draft.shard())
        return found


class FileColumns:
    """The record batches of one file, and its columns that are fields.

    columns: of each field, None if the file lacks it. batches: those with rows; rows, sizes: their
    rows and bytes, int64, shape (batches,).
    """

    def __init__(
        self, entry: Entry, file: ArrowFile, columns: Sequence[ArrowColumn | None]
    ) -> None:
        """Raises DatasetError with the file's name, ValueError for types that nest too deep."""
        self.entry, self.columns, self.checksum = entry, columns, file.checksum
        self.batches = [each for each in file.batches if each.dictionary is None and each.rows]
        self._types = [storage_type(field.type) for field in file.contents.schema]
        self._numbers = file.contents.numbers
        self._names: list[str] = file.contents.schema.names
        self._dictionaries: dict[int, list[BatchMetadata]] = {}
        for batch in file.batches:
            if batch.dictionary is not None:
                known = self._dictionaries.setdefault(batch.dictionary, [])
                if known and not batch.is_delta:
                    raise DatasetError(
                        f"{printable(entry.name)}: one of its dictionaries is replaced after some "
                        "batches, which isn't read. Write it with one dictionary "
                        "(table.unify_dictionaries()) or with deltas (emit_dictionary_deltas=True)."
                    )
                known.append(batch)
        self.rows = np.array([batch.rows for batch in self.batches], np.int64)
        self.sizes = np.array([int(b.buffers[:, 1].sum()) for b in self.batches], np.int64)

    def column(self, field: int) -> ArrowColumn:
        """Return the column of a field that the file has."""
        found = self.columns[field]
        assert found is not None
        return found

    def chunk(
        self, field: int, batch: BatchMetadata, form: int = 0
    ) -> tuple[ColumnChunk, ChunkPlace, int]:
        """Return the chunk of a field in a record batch, its place in the file, and the number of
        its innermost array among all arrays of the batch. Raises DatasetError."""
        column = self.column(field)
        at = self._names.index(column.path[0])
        try:
            chunk, place, parts = chunk_of(batch, self._types, at, column.path[1:], form=form)
        except ValueError as error:
            raise refused_file_error(self.entry, error) from error
        if chunk.nodes[0][0] != batch.rows:
            raise refused_file_error(
                self.entry, f'its column "{column.name}" has another number of rows than its batch'
            )
        return chunk, place, parts.nodes[len(column.path) - 1]

    def type(self, field: int) -> Any:
        """Return the Arrow type of a field's chunks: of structs only what leads to the field."""
        path = self.column(field).path
        return pruned_type(self._types[self._names.index(path[0])], path[1:])

    def inside(self, field: int) -> Any:
        """Return the type of a field's innermost array."""
        arrow = self.type(field)
        for _ in self.column(field).path[1:]:
            arrow = arrow.field(0).type
        return arrow

    def dictionary(self, node: int, field: int) -> list[BatchMetadata]:
        """Return the parts of an array's dictionary. Raises DatasetError if the file lacks it."""
        number = self._numbers[node] if node < len(self._numbers) else None
        found = self._dictionaries.get(number, []) if number is not None else []
        if not found:
            name = self.column(field).name
            raise refused_file_error(self.entry, f'its column "{name}" has no dictionary')
        return found


class _ArrowShardDraft:
    """A shard to which the record batches of files are added one after the other."""

    def __init__(self, schema: Schema) -> None:
        self._schema, self._types = schema, list(schema.values())
        self.units: list[int] = []
        self._files: list[FileColumns] = []
        self._unit_files: list[int] = []
        self._firsts: list[int] = []
        self._forms: dict[str, int] = {}
        self._chunks: list[ColumnChunk] = []
        self._extents: list[tuple[int, int, int, int]] = []
        self._units_chunks: list[list[int]] = []
        self._missing = np.zeros(len(schema), np.int64)
        self._checksum = 0

    def add(self, file: FileColumns, begin: int, end: int) -> None:
        """Add record batches [begin, end) of a file. Raises DatasetError."""
        number, known = len(self._files), dict[tuple[int, int], tuple[int, ...]]()
        self._files.append(file)
        identity = f"{file.checksum}:{begin}:{end}:".encode() + file.entry.name
        self._checksum = crc32c(identity, self._checksum)
        firsts = np.cumsum(file.rows) - file.rows
        for at in range(begin, end):
            batch = file.batches[at]
            self.units.append(batch.rows)
            self._unit_files.append(number)
            self._firsts.append(int(firsts[at]))
            self._units_chunks.append(
                [
                    self._add_field(file, number, field, batch, known)
                    for field in range(len(self._schema))
                ]
            )

    def _add_field(
        self,
        file: FileColumns,
        number: int,
        field: int,
        batch: BatchMetadata,
        known: dict[tuple[int, int], tuple[int, ...]],
    ) -> int:
        """Add the chunk of a field in a record batch, and return its number. known: the chunks of
        dictionaries that were added, by node and field."""
        column = file.columns[field]
        if column is None:
            self._missing[field] += batch.rows
            return NO_CHUNK
        form = self._forms.setdefault(type_to_text(file.type(field)), len(self._forms))
        chunk, place, node = file.chunk(field, batch, form)
        type, inside = self._types[field], file.inside(field)
        try:
            check_claim(type, rows=batch.rows, size_bytes=place.size)
        except ValueError as error:
            raise refused_file_error(file.entry, f'its column "{column.name}": {error}') from error
        own = array_form(type)
        counts_nulls = own is None or not own.is_ragged
        if counts_nulls:
            # A struct and its part may be null in different rows: this is the least that lack it.
            depth = len(column.path)
            nulls = max(nulls for _, nulls in chunk.nodes[:depth])
            if pa.types.is_run_end_encoded(inside):  # its nulls are counted by run, not by row
                nulls = min(batch.rows, nulls + chunk.nodes[depth + 1][1])
            self._missing[field] += nulls
        if pa.types.is_dictionary(inside):
            if (node, field) not in known:
                known[node, field] = self._add_dictionary(
                    file, number, field, node, inside.value_type
                )
            chunk = replace(chunk, dictionaries=known[node, field])
            in_values = sum(self._chunks[each].nodes[0][1] for each in chunk.dictionaries)
            if counts_nulls and in_values:  # at least one row: a reader must expect nulls
                self._missing[field] += not self._missing[field]
        return self._add(chunk, place, number, field)

    def _add_dictionary(
        self, file: FileColumns, number: int, field: int, node: int, arrow: Any
    ) -> tuple[int, ...]:
        form = self._forms.setdefault(type_to_text(arrow), len(self._forms))
        found = []
        for batch in file.dictionary(node, field):
            try:
                chunk, place, _ = chunk_of(batch, [arrow], 0, (), form=form)
            except ValueError as error:
                raise refused_file_error(file.entry, error) from error
            found.append(self._add(chunk, place, number, field))
        return tuple(found)

    def _add(self, chunk: ColumnChunk, place: ChunkPlace, file: int, field: int) -> int:
        self._chunks.append(chunk)
        self._extents.append((file, place.start, place.size, field))
        return len(self._chunks) - 1

    def shard(self) -> ChunkedShard:
        """Return the shard, which has units."""
        extents = np.array(self._extents, np.int64).reshape(-1, 4)
        missing = dict(zip(self._schema, self._missing.tolist(), strict=True))
        columns = [
            (field, column)
            for file in self._files
            for field, column in enumerate(file.columns)
            if column is not None
        ]
        parts = {field: column.path[1:] for field, column in columns}
        notes = ArrowNotes(
            units=ShardUnits(
                names=[printable(file.entry.name) for file in self._files],
                files=np.array(self._unit_files, np.int64),
                firsts=np.array(self._firsts, np.int64),
                chunks=np.array(self._units_chunks, np.int64),
                lacking=frozenset(name for name, count in missing.items() if count),
            ),
            parts=[parts.get(field, ()) for field in range(len(self._schema))],
            chunks=self._chunks,
            types=list(self._forms),
            tensors={field: c.tensor for field, c in columns if c.tensor is not None},
        )
        return ChunkedShard(
            samples=sum(self.units),
            files=[file.entry for file in self._files],
            extents=Extents(
                files=extents[:, 0], starts=extents[:, 1], sizes=extents[:, 2], fields=extents[:, 3]
            ),
            checksum=self._checksum,
            units=self.units,
            fields={
                name: FieldSummary(storage="chunks", missing=count)
                for name, count in missing.items()
            },
            note=notes.to_bytes(),
        )
