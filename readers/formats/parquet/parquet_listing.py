"""List Parquet files as shards, from their footers.

Some values are decoded if no metadata show what a column holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError
from penstock.readers.fieldtypes import Bytes, array_form
from penstock.readers.files import printable
from penstock.readers.formats.extents import ChunkedShard, Extents
from penstock.readers.formats.parquet.parquet_chunks import ChunkForm, ParquetNotes, decode_chunk
from penstock.readers.formats.parquet.parquet_footer import (
    CODEC,
    DECODED,
    NULLS,
    SIZE,
    START,
    VALUES,
    read_footers,
)
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
    values_of,
    without_dictionaries,
)
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType, Schema
    from penstock.readers.formats.parquet.parquet_footer import Footer
    from penstock.readers.formats.tables import ArrowColumn, FieldChoice
    from penstock.readers.origin import Entry, Origin

StoredChunk = tuple["Entry", "Footer", int, int]
"""A file, its footer, and the numbers of a leaf and of a row group in it."""

_FIRST_ROWS = 16
_MAX_FIELDS = 4096


class ParquetMetadata(TableMetadata):
    """The columns and row groups of a dataset's files."""

    def __init__(self, origin: Origin, files: Sequence[Entry], *, workers: int) -> None:
        """Raises DatasetError with the file's name."""
        super().__init__(origin, files)
        self._footers: list[Footer] = []
        # By the schema and its metadata as Thrift, which most files of a dataset share.
        self._columns: dict[tuple[bytes, bytes], list[ArrowColumn]] = {}
        self._chosen: list[ArrowColumn] = []
        self._leaves: list[list[int]] = []
        for entry, footer in zip(files, read_footers(origin, files, workers=workers), strict=True):
            try:
                self._add(footer, entry)
            except DatasetError:
                raise
            except ValueError as error:
                raise refused_file_error(entry, error) from error
            self._footers.append(footer)

    def _add(self, footer: Footer, entry: Entry) -> None:
        key = (footer.schema, footer.keys)
        if key in self._columns:
            return
        schema = footer.arrow_schema()
        plain = [field.with_type(without_dictionaries(field.type)) for field in schema]
        schema = pa.schema(plain, schema.metadata)
        self._columns[key] = list(arrow_columns(schema, features_in_metadata(schema, entry)))
        self._drift.add(self._columns[key], entry)

    def choose(self, refused: Mapping[str, str]) -> tuple[FieldChoice, Schema]:
        """Choose the fields and their types. Raises ConfigError, DatasetError."""
        choice, schema = super().choose(refused)
        if len(schema) > _MAX_FIELDS:
            raise DatasetError(
                f"{printable(self._files[0].name)}: it has {len(schema):,} columns that can be "
                f"fields, wanted at most {_MAX_FIELDS:,}. Write the wide ones as lists."
            )
        return choice, schema

    def _locate(self, choice: FieldChoice) -> None:
        """Find the leaf of each field in each file, -1 if the file lacks the column."""
        self._chosen, self._leaves = list(choice.columns.values()), []
        known: dict[tuple[bytes, bytes], list[int]] = {}
        for entry, footer in zip(self._files, self._footers, strict=True):
            key = (footer.schema, footer.keys)
            if key not in known:
                own = {column.name: column for column in self._columns[key]}
                paths: dict[tuple[str, ...], list[int]] = {}
                for number, leaf in enumerate(footer.leaves):
                    for end in range(1, len(leaf.path) + 1):
                        paths.setdefault(leaf.path[:end], []).append(number)
                known[key] = [_leaf(own.get(c.name), paths, entry) for c in self._chosen]
            self._leaves.append(known[key])
            if footer.encrypted:
                for number, name in zip(known[key], choice.columns, strict=True):
                    if number >= 0 and ".".join(footer.leaves[number].path) in footer.encrypted:
                        raise DatasetError(
                            f'{printable(entry.name)}: its column "{name}" is encrypted, which '
                            "isn't read. Write it without encryption."
                        )

    def _stored(self, field: int) -> Iterator[tuple[Entry, Footer, int]]:
        """Yield the files that have a field, each with its footer and the field's leaf."""
        for entry, footer, leaves in zip(self._files, self._footers, self._leaves, strict=True):
            if leaves[field] >= 0:
                yield entry, footer, leaves[field]

    def first_values(self, field: int) -> list[bytes]:
        """Return some values of an encoded field from the first row group that has it."""
        for entry, footer, leaf in self._stored(field):
            if not footer.rows.any():
                continue
            group = int(np.flatnonzero(footer.rows)[0])
            if footer.chunks[group, leaf, SIZE] > MAX_CHECKED_BYTES:
                return []
            try:
                places = [(entry, footer, leaf, group)]
                ((_, table),) = self._tables(places, Bytes(), None, workers=1)
                if isinstance(table, ValueError):
                    raise table
                count = min(int(footer.rows[group]), _FIRST_ROWS)
                values = EncodedRows(count)
                values.add(table, np.arange(count), range(count))
            except ValueError as error:
                if isinstance(error, DatasetError):
                    raise
                raise refused_file_error(entry, error) from error
            return [sample.tobytes() for sample in values.samples]
        return []

    def refusal(
        self, field: int, column: ArrowColumn, type: FieldType, *, workers: int
    ) -> str | None:
        """Return why a column's values can't be a field, or None.

        Reads lists that may have nulls inside, and columns whose nulls the statistics don't count:
        these nulls are then noted in the footers.
        """
        form = array_form(type)
        is_nested = form is not None and form.shape.count(None) > 1
        files = list(self._stored(field))
        wanted: list[StoredChunk] = []
        total = 0
        for entry, footer, leaf in files:
            if footer.leaves[leaf].is_required:
                continue
            chunks = footer.chunks[:, leaf]
            is_flat = footer.leaves[leaf].is_flat
            # pyarrow's writer doesn't count the nulls of the structs around a dictionary.
            is_miscounted = column.in_dictionary and len(column.path) > 1
            uncounted = (chunks[:, NULLS] < 0) | is_miscounted
            unsure = uncounted if is_flat else (chunks[:, NULLS] != 0) | is_nested
            for group in np.flatnonzero(unsure & (footer.rows > 0)).tolist():
                total += int(chunks[group, SIZE])
                # On a remote store only one chunk of lists: each further one is a request.
                is_enough = not is_flat and (not self._origin.is_local or not chunks[group, NULLS])
                if total <= MAX_CHECKED_BYTES and not (wanted and is_enough):
                    wanted.append((entry, footer, leaf, group))
        for (entry, footer, leaf, group), table in self._tables(
            wanted, type, column, workers=workers
        ):
            if isinstance(table, ValueError):  # damaged chunks make bad samples when they are read
                continue
            if footer.leaves[leaf].is_flat or footer.chunks[group, leaf, NULLS] < 0:
                footer.chunks[group, leaf, NULLS] = values_of(table).null_count
            first = int(footer.rows[:group].sum())
            reason = refusal_of(table, file=printable(entry.name), first=first)
            if reason is not None:
                return reason
        if column.is_media and files:
            nulls = sum(int(footer.chunks[:, leaf, NULLS].sum()) for _, footer, leaf in files)
            if nulls == sum(int(footer.rows.sum()) for _, footer, _ in files):
                return PATHS_ALONE
        return None

    def _tables(
        self,
        places: Sequence[StoredChunk],
        type: FieldType,
        column: ArrowColumn | None,
        *,
        workers: int,
    ) -> Iterator[tuple[StoredChunk, Any]]:
        """Read and decode some chunks; yield a ValueError instead of a table that is damaged."""
        ranges = []
        for entry, footer, leaf, group in places:
            start = int(footer.chunks[group, leaf, START])
            ranges.append((entry, start, start + int(footer.chunks[group, leaf, SIZE])))
        read = read_file_parts(self._origin, ranges, workers=workers) if ranges else []
        for place, data in zip(places, read, strict=True):
            _, footer, leaf, group = place
            chunk = footer.chunks[group, leaf].tolist()
            try:
                table = decode_chunk(
                    np.frombuffer(data, np.uint8),
                    _form(footer, leaf, chunk[CODEC], column),
                    type,
                    rows=int(footer.rows[group]),
                    values=chunk[VALUES],
                    decoded=chunk[DECODED],
                    nulls=chunk[NULLS],
                )
            except ValueError as error:
                yield place, error
            else:
                yield place, table

    def shards(self, schema: Schema) -> list[ChunkedShard]:
        """Return all shards with rows, in the order of the files. Raises DatasetError."""
        sizes = [footer.chunks[:, :, SIZE].sum(axis=1) for footer in self._footers]
        found = []
        for groups in cut_units([footer.rows for footer in self._footers], sizes):
            draft = _ParquetShardDraft(schema, self._chosen)
            for number, begin, end in groups:
                footer = self._footers[number]
                if footer.rows[begin:end].any():
                    draft.add(self._files[number], footer, self._leaves[number], begin, end)
            if draft.units:
                found.append(draft.shard())
        return found


def _leaf(
    column: ArrowColumn | None, paths: Mapping[tuple[str, ...], list[int]], entry: Entry
) -> int:
    """Return the leaf of a column, -1 if a file lacks it. Raises DatasetError if it has several."""
    if column is None or pa.types.is_null(column.arrow):
        return -1
    found = paths.get(column.path, [])
    if len(found) != 1:
        raise DatasetError(
            f'{printable(entry.name)}: its column "{column.name}" is stored {len(found)} times, '
            "wanted once. Write the file again."
        )
    return found[0]


def _form(footer: Footer, number: int, codec: int, column: ArrowColumn | None) -> ChunkForm:
    """Return how chunks of a leaf are decoded. column: None for a leaf that is read as bytes."""
    leaf = footer.leaves[number]
    return ChunkForm(
        path=leaf.path,
        elements=leaf.elements,
        physical=leaf.physical,
        parts=len(leaf.path if column is None else column.path),
        writer=footer.writer,
        codec=codec,
        is_flat=leaf.is_flat,
        has_levels=not leaf.is_required,
        tensor=None if column is None else column.tensor,
    )


class _ParquetShardDraft:
    """A shard to which the row groups of files are added one after the other."""

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
        self, entry: Entry, footer: Footer, leaves: Sequence[int], begin: int, end: int
    ) -> None:
        """Add row groups [begin, end) of a file. Raises DatasetError."""
        kept = begin + np.flatnonzero(footer.rows[begin:end])
        rows = footer.rows[kept]
        first, file = len(self.units), len(self._files)
        self._files.append(entry)
        self.units += rows.tolist()
        self._unit_files += [file] * len(kept)
        self._firsts += (np.cumsum(footer.rows) - footer.rows)[kept].tolist()
        identity = f"{footer.checksum}:{begin}:{end}:".encode() + entry.name
        self._checksum = crc32c(identity, self._checksum)
        for field, leaf in enumerate(leaves):
            if leaf < 0:
                self._missing[field] += int(rows.sum())
                continue
            chunks = footer.chunks[kept, leaf]
            try:
                for size, count in zip(chunks[:, SIZE].tolist(), rows.tolist(), strict=True):
                    check_claim(self._types[field], rows=count, size_bytes=size)
            except ValueError as error:
                name = list(self._schema)[field]
                raise refused_file_error(entry, f'its column "{name}": {error}') from error
            self._missing[field] += self._missing_rows(field, footer, leaf, chunks, rows)
            table = np.empty((len(kept), 9), np.int64)
            table[:, 0] = first + np.arange(len(kept))
            table[:, 1], table[:, 2] = field, file
            table[:, 3:5] = chunks[:, [START, SIZE]]
            forms = [
                _form(footer, leaf, codec, self._columns[field])
                for codec in chunks[:, CODEC].tolist()
            ]
            table[:, 5] = [self._forms.setdefault(form, len(self._forms)) for form in forms]
            table[:, 6:] = chunks[:, [VALUES, DECODED, NULLS]]
            self._chunks.append(table)

    def _missing_rows(
        self, field: int, footer: Footer, leaf: int, chunks: NDArray[Any], rows: NDArray[Any]
    ) -> int:
        """Return how many rows lack a field. A list that is null counts as an empty one; without
        statistics, no row lacks the field."""
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
        # Lists of other lengths aren't nulls: they are bad samples.
        known = np.where(chunks[:, NULLS] < 0, lacking, np.minimum(lacking, chunks[:, NULLS]))
        return int(np.where((rest == 0) & (lacking > 0), known, 0).sum())

    def shard(self) -> ChunkedShard:
        """Return the shard, which has units."""
        names = list(self._schema)
        table = np.concatenate([np.empty((0, 9), np.int64), *self._chunks])
        table = table[np.lexsort((table[:, 1], table[:, 3], table[:, 2]))]  # as they are stored
        extents = np.full((len(self.units), len(names)), NO_CHUNK, np.int64)
        extents[table[:, 0], table[:, 1]] = np.arange(len(table))
        missing = dict(zip(names, self._missing.tolist(), strict=True))
        notes = ParquetNotes(
            units=ShardUnits(
                names=[printable(entry.name) for entry in self._files],
                files=np.array(self._unit_files, np.int64),
                firsts=np.array(self._firsts, np.int64),
                chunks=extents,
                lacking=frozenset(name for name, count in missing.items() if count),
            ),
            forms=list(self._forms),
            chunks=table[:, 5:],
        )
        return ChunkedShard(
            samples=sum(self.units),
            files=self._files,
            extents=Extents(
                files=table[:, 2], starts=table[:, 3], sizes=table[:, 4], fields=table[:, 1]
            ),
            checksum=self._checksum,
            units=self.units,
            fields={
                name: FieldSummary(storage="chunks", missing=count)
                for name, count in missing.items()
            },
            note=notes.to_bytes(),
        )
