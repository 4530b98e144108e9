"""List Arrow files as shards, from their footers and the heads of their record batches.

A shard is record batches of a large file, or a group of small files.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError, DatasetNotFoundError, PenstockError
from penstock.readers.fields import Bytes, Schema, array_form
from penstock.readers.files import printable
from penstock.readers.formats.arrow.ipc_chunks import (
    ArrowNotes,
    chunk_of,
    decode_chunk,
    form_of,
    form_of_text,
    form_to_text,
    storage_type,
)
from penstock.readers.formats.arrow.ipc_metadata import read_files, refused_file_error
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.shard_summary import FieldSummary
from penstock.readers.formats.tables import (
    NOT_THERE,
    PATHS_ALONE,
    EncodedRows,
    SchemaDrift,
    ShardUnits,
    TableListing,
    arrow_columns,
    check_claim,
    choose_columns,
    cut_units,
    features_in_metadata,
    kind_of,
    may_be_paths,
    no_field_error,
    refusal_of,
    warn_of_left_out,
    warn_of_partitions,
    warn_of_paths,
)
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.arrow.ipc_chunks import ChunkPlace, ColumnChunk
    from penstock.readers.formats.arrow.ipc_metadata import ArrowFile, BatchMetadata
    from penstock.readers.formats.tables import ArrowColumn, FieldChoice, FileUnits
    from penstock.readers.origin import Entry


class FileColumns:
    """The columns of one file as they lie, and its record batches.

    columns: of each field, None where the file has none.
    """

    def __init__(
        self, entry: Entry, file: ArrowFile, columns: Sequence[ArrowColumn | None]
    ) -> None:
        """Raises DatasetError with the file's name."""
        self.entry, self.columns, self.checksum = entry, columns, file.checksum
        self.batches = [each for each in file.batches if each.dictionary is None and each.rows]
        self.types = [storage_type(field.type) for field in file.contents.schema]
        self._numbers = file.contents.numbers
        self._names: list[str] = file.contents.schema.names
        self._dictionaries: dict[int, list[BatchMetadata]] = {}
        for batch in file.batches:
            if batch.dictionary is not None:
                known = self._dictionaries.setdefault(batch.dictionary, [])
                if known and not batch.is_delta:
                    raise DatasetError(
                        f"{printable(entry.name)}: a dictionary of it is replaced behind some "
                        "batches, which isn't read. Write it with one dictionary "
                        "(table.unify_dictionaries()) or with deltas (emit_dictionary_deltas=True)."
                    )
                known.append(batch)
        self.rows = np.array([batch.rows for batch in self.batches], np.int64)
        self.sizes = np.array([int(b.buffers[:, 1].sum()) for b in self.batches], np.int64)

    def chunk(
        self, field: int, batch: BatchMetadata, form: int
    ) -> tuple[ColumnChunk, ChunkPlace, int]:
        """The chunk of a field in a record batch, and the number of its innermost array among all
        of the file. Raises DatasetError."""
        column = self.columns[field]
        assert column is not None
        at = self.column(field)
        try:
            chunk, place, parts = chunk_of(batch, self.types, at, column.path[1:], form=form)
        except ValueError as error:
            raise refused_file_error(self.entry, error) from error
        if chunk.nodes[0][0] != batch.rows:
            raise refused_file_error(
                self.entry, f'its column "{column.name}" has other rows than it says'
            )
        return chunk, place, parts.nodes[len(column.path) - 1]

    def column(self, field: int) -> int:
        """The number of the column that a field lies in."""
        column = self.columns[field]
        assert column is not None
        return self._names.index(column.path[0])

    def form(self, field: int) -> bytes:
        """The type of a field's chunks."""
        column = self.columns[field]
        assert column is not None
        return form_of(self.types[self.column(field)], column.path[1:])

    def inside(self, field: int) -> Any:
        """The type of a field's innermost array, as it lies."""
        column = self.columns[field]
        assert column is not None
        arrow = self.types[self.column(field)]
        for part in column.path[1:]:
            arrow = arrow.field(arrow.get_field_index(part)).type
        return arrow

    def dictionary(self, node: int, field: int) -> list[BatchMetadata]:
        """The dictionary of an array. Raises DatasetError where it isn't there."""
        number = self._numbers[node] if node < len(self._numbers) else None
        found = self._dictionaries.get(number, []) if number is not None else []
        if not found:
            column = self.columns[field]
            name = "" if column is None else column.name
            raise refused_file_error(self.entry, f'its column "{name}" has no dictionary')
        return found


def cut_shards(files: Sequence[FileColumns], schema: Schema) -> list[ChunkedShard]:
    """All shards with rows, in the order of the files. Raises DatasetError."""
    groups = cut_units([file.rows for file in files], [file.sizes for file in files])
    found = (_shard(files, each, schema) for each in groups)
    return [shard for shard in found if shard is not None]


def _shard(
    files: Sequence[FileColumns], groups: Sequence[FileUnits], schema: Schema
) -> ChunkedShard | None:
    draft = _ArrowShardDraft(schema)
    for number, begin, end in groups:
        if end > begin:
            draft.add(files[number], begin, end)
    return draft.shard() if draft.units else None


class _ArrowShardDraft:
    """A shard that is being put together."""

    def __init__(self, schema: Schema) -> None:
        self._schema, self._types = schema, list(schema.values())
        self.units: list[int] = []
        self._files: list[FileColumns] = []
        self._unit_files: list[int] = []
        self._firsts: list[int] = []
        self._forms: dict[bytes, int] = {}
        self._chunks: list[ColumnChunk] = []
        self._extents: list[tuple[int, int, int, int]] = []
        self._units_chunks: list[list[int]] = []
        self._missing = np.zeros(len(schema), np.int64)
        self._checksum = 0

    def add(self, file: FileColumns, begin: int, end: int) -> None:
        """Record batches [begin, end) of a file."""
        number, known = len(self._files), dict[tuple[int, int], tuple[int, ...]]()
        self._files.append(file)
        told = f"{file.checksum}:{begin}:{end}:".encode() + file.entry.name
        self._checksum = crc32c(told, self._checksum)
        firsts = np.cumsum(file.rows) - file.rows
        for at in range(begin, end):
            batch = file.batches[at]
            self.units.append(batch.rows)
            self._unit_files.append(number)
            self._firsts.append(int(firsts[at]))
            self._units_chunks.append(
                [
                    self._field(file, number, field, batch, known)
                    for field in range(len(self._schema))
                ]
            )

    def _field(
        self,
        file: FileColumns,
        number: int,
        field: int,
        batch: BatchMetadata,
        known: dict[tuple[int, int], tuple[int, ...]],
    ) -> int:
        column = file.columns[field]
        if column is None:
            self._missing[field] += batch.rows
            return NOT_THERE
        form = self._forms.setdefault(file.form(field), len(self._forms))
        chunk, place, node = file.chunk(field, batch, form)
        type = self._types[field]
        try:
            check_claim(type, rows=batch.rows, size_bytes=place.size)
        except ValueError as error:
            raise refused_file_error(file.entry, f'its column "{column.name}": {error}') from error
        own = array_form(type)
        counts_nulls = own is None or not own.is_ragged
        if counts_nulls:
            # Of structs and what is in them: at least so many rows have nothing.
            depth = len(column.path)
            nulls = max(nulls for _, nulls in chunk.nodes[:depth])
            if pa.types.is_run_end_encoded(file.inside(field)):  # no more is known of its values
                nulls = min(batch.rows, nulls + chunk.nodes[depth + 1][1])
            self._missing[field] += nulls
        inside = file.inside(field)
        if pa.types.is_dictionary(inside):
            if (node, field) not in known:
                known[node, field] = self._dictionary(file, number, field, node, inside.value_type)
            chunk = _with_dictionaries(chunk, known[node, field])
            in_values = sum(self._chunks[each].nodes[0][1] for each in chunk.dictionaries)
            if counts_nulls and in_values:  # at least one, or nobody would have noted it
                self._missing[field] += not self._missing[field]
        return self._add(chunk, place, number, field)

    def _dictionary(
        self, file: FileColumns, number: int, field: int, node: int, arrow: Any
    ) -> tuple[int, ...]:
        form = self._forms.setdefault(form_of(arrow, ()), len(self._forms))
        found = []
        for batch in file.dictionary(node, field):
            try:
                chunk, place, _ = chunk_of(batch, [storage_type(arrow)], 0, (), form=form)
            except ValueError as error:
                raise refused_file_error(file.entry, error) from error
            found.append(self._add(chunk, place, number, field))
        return tuple(found)

    def _add(self, chunk: ColumnChunk, place: ChunkPlace, file: int, field: int) -> int:
        self._chunks.append(chunk)
        self._extents.append((file, place.start, place.size, field))
        return len(self._chunks) - 1

    def shard(self) -> ChunkedShard:
        """The shard; it has units."""
        extents = np.array(self._extents, np.int64).reshape(-1, 4)
        missing = dict(zip(self._schema, self._missing.tolist(), strict=True))
        columns = {
            field: file.columns[field].path[1:]  # type: ignore[union-attr]
            for file in self._files
            for field in range(len(self._schema))
            if file.columns[field] is not None
        }
        notes = ArrowNotes(
            units=ShardUnits(
                names=[printable(file.entry.name) for file in self._files],
                files=np.array(self._unit_files, np.int64),
                firsts=np.array(self._firsts, np.int64),
                chunks=np.array(self._units_chunks, np.int64),
                lacking=frozenset(name for name, count in missing.items() if count),
            ),
            parts=[columns.get(field, ()) for field in range(len(self._schema))],
            chunks=self._chunks,
            forms=[form_to_text(form) for form in self._forms],
            tensors={
                field: column.tensor
                for file in self._files
                for field, column in enumerate(file.columns)
                if column is not None and column.tensor is not None
            },
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
            notes=notes.to_bytes(),
        )


def _with_dictionaries(chunk: ColumnChunk, dictionaries: tuple[int, ...]) -> ColumnChunk:
    return replace(chunk, dictionaries=dictionaries)


_log = logging.getLogger("penstock")
_ROWS, _MOST_BYTES = 16, 2**28


class ArrowListing(TableListing):
    """The Arrow files of a dataset, by name; nothing of them was read."""

    def _candidates(self, *, workers: int, warns: bool) -> Candidates:
        if not self._files:
            raise DatasetNotFoundError(
                f"{self._origin.url}: no Arrow file. Wanted a folder that holds some, or the path "
                "of one."
            )
        files = list(read_files(self._origin, self._files, workers=workers))
        drift = SchemaDrift(given=given_types(self._origin.arrangement), columns={}, files={})
        own: list[dict[str, ArrowColumn]] = []
        for entry, file in zip(self._files, files, strict=True):
            schema = file.contents.schema
            try:
                columns = list(arrow_columns(schema, features_in_metadata(schema, entry)))
            except UnicodeDecodeError as error:
                raise refused_file_error(
                    entry, f"a column isn't named in UTF-8 ({error})"
                ) from error
            if len(set(schema.names)) < len(schema.names):
                raise refused_file_error(entry, "two of its columns have one name")
            drift.add(columns, entry)
            own.append({column.name: column for column in columns})
        choice = choose_columns(
            list(drift.columns.values()),
            self._origin.arrangement,
            file=printable(self._files[0].name),
        )
        made, schema = self._made(choice, files, own)
        no_fields = {
            column.name: why
            for number, (name, column) in enumerate(choice.columns.items())
            if (why := self._refused(number, column, schema[name], made, workers=workers))
        }
        if no_fields:
            choice = choose_columns(
                list(drift.columns.values()),
                self._origin.arrangement,
                file=printable(self._files[0].name),
                refused=no_fields,
            )
            made, schema = self._made(choice, files, own)
        if warns:
            for number, (name, column) in enumerate(choice.columns.items()):
                if may_be_paths(name, schema[name]):
                    warn_of_paths(self._origin.url, column.name, self._first_values(number, made))
            warn_of_left_out(self._origin.url, choice)
            warn_of_partitions(self._origin.url, (entry.name for entry in self._files), choice)
        found = cut_shards(made, schema)
        if not found:
            raise DatasetNotFoundError(
                f"{self._origin.url}: its {len(self._files)} Arrow files have no rows."
            )
        candidates = Candidates.of_chunks(schema, found, left_out=choice.left_out)
        return replace(candidates, quarantined=list(self._quarantined))

    def _made(
        self, choice: FieldChoice, files: list[ArrowFile], own: list[dict[str, ArrowColumn]]
    ) -> tuple[list[FileColumns], Schema]:
        """The columns of each file that are fields, and their settled types."""
        made = [
            self._columns(entry, file, columns, choice)
            for entry, file, columns in zip(self._files, files, own, strict=True)
        ]
        return made, self._schema(choice, made)

    def _columns(
        self, entry: Entry, file: ArrowFile, columns: dict[str, ArrowColumn], choice: FieldChoice
    ) -> FileColumns:
        there = [columns.get(column.name) for column in choice.columns.values()]
        there = [None if c is None or pa.types.is_null(c.arrow) else c for c in there]
        try:
            return FileColumns(entry, file, there)
        except DatasetError:
            raise
        except ValueError as error:
            raise refused_file_error(entry, error) from error

    def _schema(self, choice: FieldChoice, files: list[FileColumns]) -> Schema:
        types: dict[str, FieldType] = {}
        for number, (name, type) in enumerate(choice.types.items()):
            types[name] = type or kind_of(self._first_values(number, files))
        if not types:
            raise no_field_error(self._origin.url, choice)
        return Schema(types)

    def _first_values(self, field: int, files: list[FileColumns]) -> list[bytes]:
        """Some values of a binary column, of the first record batch."""
        for file in files:
            column = file.columns[field]
            if column is None or not file.batches or pa.types.is_dictionary(file.inside(field)):
                continue
            _, place, _ = file.chunk(field, file.batches[0], 0)
            if place.size > _MOST_BYTES:
                return []
            try:
                ((_, table),) = self._tables([(file, 0)], field, Bytes(), workers=1)
                count = min(len(table), _ROWS)
                values = EncodedRows(count)
                values.add(table, np.arange(count), range(count))
            except ValueError as error:
                raise refused_file_error(file.entry, error) from error
            return [sample.tobytes() for sample in values.samples]
        return []

    def _refused(
        self,
        field: int,
        column: ArrowColumn,
        type: FieldType,
        files: list[FileColumns],
        *,
        workers: int,
    ) -> str | None:
        """Why a column can't be a field although its type could, None where it can: lists with
        nulls inside, or that are no arrays; structs that hold paths alone. Lists are read where
        something inside of them is null, up to 256 MiB; of lists in lists, and of lists
        afar, the first batch."""
        form, depth = array_form(type), len(column.path)
        is_nested = form is not None and form.shape.count(None) > 1
        wanted: list[tuple[FileColumns, int]] = []
        rows = nulls = total = 0
        for file in files:
            own = file.columns[field]
            if own is None or pa.types.is_dictionary(file.inside(field)):
                continue
            for number, batch in enumerate(file.batches):
                chunk, place, _ = file.chunk(field, batch, 0)
                rows += batch.rows
                nulls += max(count for _, count in chunk.nodes[:depth])
                has_nulls = any(count for _, count in chunk.nodes[depth:])
                total += place.size
                is_enough = bool(wanted) and (not self._origin.is_local or not has_nulls)
                if (
                    form is not None
                    and total <= _MOST_BYTES
                    and (has_nulls or is_nested)
                    and not is_enough
                ):
                    wanted.append((file, number))
        try:
            for (file, number), table in self._tables(wanted, field, type, workers=workers):
                first = int(file.rows[:number].sum())
                name = printable(file.entry.name)
                if (why := refusal_of(table, file=name, first=first)) is not None:
                    return why
        except ValueError as error:
            if isinstance(error, PenstockError):
                raise
            return None  # its samples are bad ones
        return PATHS_ALONE if column.is_media and rows and nulls >= rows else None

    def _tables(
        self, places: list[tuple[FileColumns, int]], field: int, type: FieldType, *, workers: int
    ) -> Iterator[tuple[tuple[FileColumns, int], Any]]:
        """The tables of a field that no dictionary has, of some record batches of files. Raises
        ValueError for damage."""
        chunks = [file.chunk(field, file.batches[number], 0)[:2] for file, number in places]
        ranges = [
            (file.entry, at.start, at.start + at.size)
            for (file, _), (_, at) in zip(places, chunks, strict=True)
        ]
        read = read_file_parts(self._origin, ranges, workers=workers) if ranges else []
        for place, (chunk, _), data in zip(places, chunks, read, strict=True):
            file, column = place[0], place[0].columns[field]
            assert column is not None
            form = form_of(file.types[file.column(field)], column.path[1:])
            arrow, bytes_ = form_of_text(form_to_text(form)), np.frombuffer(data, np.uint8)
            parts = column.path[1:]
            yield place, decode_chunk(bytes_, chunk, arrow, type, parts, (), column.tensor)
