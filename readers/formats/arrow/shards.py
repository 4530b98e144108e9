"""Cutting Arrow files into shards: record batches of large ones, groups of small files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache.errors import DatasetError
from penstock.readers.fields.arrays import array_form
from penstock.readers.files.names import printable
from penstock.readers.formats.arrow.arrays import storage
from penstock.readers.formats.arrow.chunks import chunk_of, form_of, form_to_text
from penstock.readers.formats.arrow.cutting import check_claim, cut_units
from penstock.readers.formats.arrow.notes import ArrowNotes
from penstock.readers.formats.arrow.tails import refused
from penstock.readers.formats.arrow.unit_reader import NOT_THERE, Units
from penstock.readers.formats.chunked_shard import ChunkedShard, Extents
from penstock.readers.formats.summary import FieldSummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.arrow.chunks import ChunkPlace, ColumnChunk
    from penstock.readers.formats.arrow.cutting import FileUnits
    from penstock.readers.formats.arrow.messages import Batch
    from penstock.readers.formats.arrow.tails import ArrowFile
    from penstock.readers.formats.arrow.types import ArrowColumn
    from penstock.readers.origin.origin import Entry


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
        self.types = [storage(field.type) for field in file.contents.schema]
        self._numbers = file.contents.numbers
        self._names: list[str] = file.contents.schema.names
        self._dictionaries: dict[int, list[Batch]] = {}
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

    def chunk(self, field: int, batch: Batch, form: int) -> tuple[ColumnChunk, ChunkPlace, int]:
        """The chunk of a field in a record batch, and the number of its innermost array among all
        of the file. Raises DatasetError."""
        column = self.columns[field]
        assert column is not None
        at = self.column(field)
        try:
            chunk, place, parts = chunk_of(batch, self.types, at, column.path[1:], form=form)
        except ValueError as error:
            raise refused(self.entry, error) from error
        if chunk.nodes[0][0] != batch.rows:
            raise refused(self.entry, f'its column "{column.name}" has other rows than it says')
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

    def dictionary(self, node: int, field: int) -> list[Batch]:
        """The dictionary of an array. Raises DatasetError where it isn't there."""
        number = self._numbers[node] if node < len(self._numbers) else None
        found = self._dictionaries.get(number, []) if number is not None else []
        if not found:
            column = self.columns[field]
            name = "" if column is None else column.name
            raise refused(self.entry, f'its column "{name}" has no dictionary')
        return found


def cut_shards(files: Sequence[FileColumns], schema: Schema) -> list[ChunkedShard]:
    """All shards with rows, in the order of the files. Raises DatasetError."""
    groups = cut_units([file.rows for file in files], [file.sizes for file in files])
    found = (_shard(files, each, schema) for each in groups)
    return [shard for shard in found if shard is not None]


def _shard(
    files: Sequence[FileColumns], groups: Sequence[FileUnits], schema: Schema
) -> ChunkedShard | None:
    draft = _Draft(schema)
    for number, begin, end in groups:
        if end > begin:
            draft.add(files[number], begin, end)
    return draft.shard() if draft.units else None


class _Draft:
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
        batch: Batch,
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
            raise refused(file.entry, f'its column "{column.name}": {error}') from error
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
                chunk, place, _ = chunk_of(batch, [storage(arrow)], 0, (), form=form)
            except ValueError as error:
                raise refused(file.entry, error) from error
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
            units=Units(
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
