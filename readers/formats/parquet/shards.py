"""Cutting Parquet files into shards: row groups of large ones, groups of small files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c

from penstock.readers.fields.arrays import array_form
from penstock.readers.files.names import printable
from penstock.readers.formats.arrow.cutting import check_claim, cut_units
from penstock.readers.formats.arrow.unit_reader import NOT_THERE, Units
from penstock.readers.formats.chunked_shard import ChunkedShard, Extents
from penstock.readers.formats.parquet.chunk import ChunkForm
from penstock.readers.formats.parquet.footer import CODEC, DECODED, NULLS, SIZE, START, VALUES
from penstock.readers.formats.parquet.footers import refused
from penstock.readers.formats.parquet.notes import ParquetNotes
from penstock.readers.formats.summary import FieldSummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields.schema import Schema
    from penstock.readers.formats.arrow.choice import FieldChoice
    from penstock.readers.formats.arrow.cutting import FileUnits
    from penstock.readers.formats.arrow.types import ArrowColumn
    from penstock.readers.formats.parquet.fields import FileFields
    from penstock.readers.formats.parquet.footer import Footer
    from penstock.readers.origin.origin import Entry


class Shards:
    """The shards of a dataset's files."""

    def __init__(
        self,
        files: Sequence[Entry],
        footers: Sequence[Footer],
        fields: FileFields,
        choice: FieldChoice,
        schema: Schema,
    ) -> None:
        self._files, self._footers, self._fields = files, footers, fields
        self._schema = schema
        self._columns = list(choice.columns.values())

    def told(self) -> list[ChunkedShard]:
        """All shards with rows, in the order of the files."""
        sizes = [footer.chunks[:, :, SIZE].sum(axis=1) for footer in self._footers]
        rows = [footer.rows for footer in self._footers]
        found = (self._shard(groups) for groups in cut_units(rows, sizes))
        return [shard for shard in found if shard is not None]

    def _shard(self, groups: Sequence[FileUnits]) -> ChunkedShard | None:
        draft = _Draft(self._schema, self._columns)
        for number, begin, end in groups:
            entry, footer = self._files[number], self._footers[number]
            if footer.rows[begin:end].any():
                draft.add(entry, footer, self._fields.leaves(footer, entry), begin, end)
        return draft.shard() if draft.units else None


class _Draft:
    """A shard that is being put together."""

    def __init__(self, schema: Schema, columns: Sequence[ArrowColumn]) -> None:
        self._schema, self._types, self._columns = schema, list(schema.values()), columns
        self.units: list[int] = []
        self._files: list[Entry] = []
        self._unit_files: list[int] = []
        self._firsts: list[int] = []
        self._forms: dict[ChunkForm, int] = {}
        self._missing = np.zeros(len(schema), np.int64)
        self._checksum = 0
        # Per column chunk: unit, field, file, start, size, form, values, bytes decompressed, nulls.
        self._chunks: list[NDArray[np.int64]] = []

    def add(
        self,
        entry: Entry,
        footer: Footer,
        leaves: Sequence[int],
        begin: int,
        end: int,
    ) -> None:
        """Row groups [begin, end) of a file."""
        kept = begin + np.flatnonzero(footer.rows[begin:end])
        rows = footer.rows[kept]
        first, file = len(self.units), len(self._files)
        self._files.append(entry)
        self.units += rows.tolist()
        self._unit_files += [file] * len(kept)
        self._firsts += (np.cumsum(footer.rows) - footer.rows)[kept].tolist()
        told = f"{footer.checksum}:{begin}:{end}:".encode() + entry.name
        self._checksum = crc32c(told, self._checksum)
        for field, leaf in enumerate(leaves):
            if leaf < 0:
                self._missing[field] += int(rows.sum())
                continue
            chunks = footer.chunks[kept, leaf]
            self._check(entry, field, chunks, rows)
            self._missing[field] += self._count(field, footer, leaf, chunks, rows)
            table = np.empty((len(kept), 9), np.int64)
            table[:, 0] = first + np.arange(len(kept))
            table[:, 1], table[:, 2] = field, file
            table[:, 3:5] = chunks[:, [START, SIZE]]
            table[:, 5] = [
                self._form(footer, leaf, field, codec) for codec in chunks[:, CODEC].tolist()
            ]
            table[:, 6:] = chunks[:, [VALUES, DECODED, NULLS]]
            self._chunks.append(table)

    def _check(self, entry: Entry, field: int, chunks: NDArray[Any], rows: NDArray[Any]) -> None:
        try:
            for size, count in zip(chunks[:, SIZE].tolist(), rows.tolist(), strict=True):
                check_claim(self._types[field], rows=count, size_bytes=size)
        except ValueError as error:
            name = list(self._schema)[field]
            raise refused(entry, f'its column "{name}": {error}') from error

    def _form(self, footer: Footer, leaf: int, field: int, codec: int) -> int:
        column, own = footer.leaves[leaf], self._columns[field]
        form = ChunkForm(
            path=column.path,
            elements=column.elements,
            physical=column.physical,
            parts=len(own.path),  # of its path, so many names lead through structs to its values
            writer=footer.writer,
            codec=codec,
            is_flat=column.is_flat,
            has_levels=not column.is_required,
            tensor=own.tensor,
        )
        return self._forms.setdefault(form, len(self._forms))

    def _count(
        self, field: int, footer: Footer, leaf: int, chunks: NDArray[Any], rows: NDArray[Any]
    ) -> int:
        """How many rows lack a field. A list that is null is an empty one; where statistics don't
        tell, none does."""
        column = footer.leaves[leaf]
        if column.is_required:
            return 0
        if column.is_flat:
            return int(np.maximum(chunks[:, NULLS], 0).sum())
        form = array_form(self._types[field])
        if form is None or form.is_ragged:
            return 0
        size = int(np.prod(form.fixed_shape, dtype=np.int64))
        if size < 2:  # a null list and a list of one null look the same
            return int(np.maximum(chunks[:, NULLS], 0).sum())
        lacking, rest = np.divmod(rows * size - chunks[:, VALUES], size - 1)
        # Lists of other lengths are no nulls, and bad samples.
        told = np.where(chunks[:, NULLS] < 0, lacking, np.minimum(lacking, chunks[:, NULLS]))
        return int(np.where((rest == 0) & (lacking > 0), told, 0).sum())

    def shard(self) -> ChunkedShard:
        """The shard; it has units."""
        names = list(self._schema)
        table = np.concatenate([np.empty((0, 9), np.int64), *self._chunks])
        table = table[np.lexsort((table[:, 1], table[:, 3], table[:, 2]))]  # as they lie
        extents = np.full((len(self.units), len(names)), NOT_THERE, np.int64)
        extents[table[:, 0], table[:, 1]] = np.arange(len(table))
        missing = dict(zip(names, self._missing.tolist(), strict=True))
        notes = ParquetNotes(
            units=Units(
                names=[printable(entry.name) for entry in self._files],
                files=np.array(self._unit_files, np.int64),
                firsts=np.array(self._firsts, np.int64),
                chunks=extents,
                lacking=frozenset(name for name, count in missing.items() if count),
            ),
            forms=list(self._forms),
            chunks=table[:, 5:],
        )
        fields = {
            name: FieldSummary(storage="chunks", missing=count) for name, count in missing.items()
        }
        return ChunkedShard(
            samples=sum(self.units),
            files=self._files,
            extents=Extents(
                files=table[:, 2], starts=table[:, 3], sizes=table[:, 4], fields=table[:, 1]
            ),
            checksum=self._checksum,
            units=self.units,
            fields=fields,
            notes=notes.to_bytes(),
        )
