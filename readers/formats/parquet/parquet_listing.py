"""List Parquet files as shards, with one schema for all, from their footers.

A shard is row groups of a large file, or a group of small files. Some values are decoded where
nothing else says what a column holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c

from penstock.cache import DatasetError, DatasetNotFoundError
from penstock.readers.fields import Bytes, Schema, array_form
from penstock.readers.files import printable
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.dataset_arguments import given_types
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
    refused_file_error,
)
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
    values_of,
    warn_of_left_out,
    warn_of_partitions,
    warn_of_paths,
    without_dictionaries,
)
from penstock.readers.formats.unindexed_files import read_file_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fields import FieldType
    from penstock.readers.formats.parquet.parquet_footer import Footer
    from penstock.readers.formats.tables import ArrowColumn, FieldChoice, FileUnits
    from penstock.readers.origin import Arrangement, Entry, Origin


class FileFields:
    """The leaves of each file that are the dataset's fields."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._drift = SchemaDrift(given=given_types(arrangement), columns={}, files={})
        self._known: dict[tuple[bytes, bytes], list[ArrowColumn]] = {}
        self._leaves: dict[tuple[bytes, bytes], list[int]] = {}
        self._choice: FieldChoice | None = None

    def see(self, footer: Footer, entry: Entry) -> None:
        """Take in one more file. Raises DatasetError."""
        key = (footer.schema, footer.keys)
        if key in self._known:
            return
        schema = footer.arrow_schema()
        plain = [field.with_type(without_dictionaries(field.type)) for field in schema]
        schema = pa.schema(plain, schema.metadata)
        columns = list(arrow_columns(schema, features_in_metadata(schema, entry)))
        self._drift.add(columns, entry)
        self._known[key] = columns

    def settle(self, entry: Entry, refused: Mapping[str, str] | None = None) -> FieldChoice:
        """The fields, once all files were seen. refused: as `choose` has it. Raises ConfigError,
        DatasetError."""
        columns, file = list(self._drift.columns.values()), printable(entry.name)
        self._choice = choose_columns(columns, self._arrangement, file=file, refused=refused)
        self._leaves.clear()
        return self._choice

    def leaves(self, footer: Footer, entry: Entry) -> list[int]:
        """The number of the leaf that each field is in a file, -1 where it has no such column.
        Raises DatasetError for one that is encrypted, or there twice."""
        assert self._choice is not None
        key = (footer.schema, footer.keys)
        if key not in self._leaves:
            own = {column.name: column for column in self._known[key]}
            paths: dict[tuple[str, ...], list[int]] = {}
            for number, leaf in enumerate(footer.leaves):
                for end in range(1, len(leaf.path) + 1):
                    paths.setdefault(leaf.path[:end], []).append(number)
            self._leaves[key] = [
                self._leaf(own.get(column.name), paths, entry)
                for column in self._choice.columns.values()
            ]
        found = self._leaves[key]
        if footer.encrypted:
            for number, name in zip(found, self._choice.columns, strict=True):
                if number >= 0 and ".".join(footer.leaves[number].path) in footer.encrypted:
                    raise DatasetError(
                        f'{printable(entry.name)}: its column "{name}" is encrypted, which isn\'t '
                        "read. Write it without encryption."
                    )
        return found

    def _leaf(
        self, column: ArrowColumn | None, paths: Mapping[tuple[str, ...], list[int]], entry: Entry
    ) -> int:
        if column is None or pa.types.is_null(column.arrow):
            return -1
        found = paths.get(column.path, [])
        if len(found) != 1:
            raise DatasetError(
                f'{printable(entry.name)}: its column "{column.name}" is there {len(found)} times '
                "in what is stored. Write the file again."
            )
        return found[0]


_ROWS = 16
_MOST_BYTES = 2**28

Stored = tuple["Entry", "Footer", int]
"""A file, what its footer says, and the number of the leaf that a field is there."""


def first_values(origin: Origin, entry: Entry, footer: Footer, leaf: int) -> list[bytes]:
    """Some values of the first row group that has rows; none where it is very large. Raises
    ValueError for damage, and what reading raises."""
    group = int(np.flatnonzero(footer.rows)[0])
    if footer.chunks[group, leaf, SIZE] > _MOST_BYTES:
        return []
    ((_, table),) = _tables(origin, [(entry, footer, leaf, group)], Bytes(), None, workers=1)
    if isinstance(table, ValueError):
        raise table
    count = min(int(footer.rows[group]), _ROWS)
    values = EncodedRows(count)
    values.add(table, np.arange(count), range(count))
    return [sample.tobytes() for sample in values.samples]


def refused_by_values(
    origin: Origin, column: ArrowColumn, type: FieldType, files: Sequence[Stored], *, workers: int
) -> str | None:
    """Why a column can't be a field although its type could, None where it can: lists with nulls
    inside, or that are no arrays; structs that hold paths alone.

    Reads what no statistics tell, up to 256 MiB of a column: nulls, which are noted in the footers
    then, and lists that may have nulls inside. Of lists in lists, and of lists afar, the first row
    group.
    """
    form = array_form(type)
    is_nested = form is not None and form.shape.count(None) > 1
    wanted: list[tuple[Entry, Footer, int, int]] = []
    total = 0
    for entry, footer, leaf in files:
        if footer.leaves[leaf].is_required:
            continue
        chunks = footer.chunks[:, leaf]
        is_flat = footer.leaves[leaf].is_flat
        # pyarrow's writer doesn't count the nulls of the structs around a dictionary.
        is_miscounted = column.in_dictionary and len(column.path) > 1
        untold = (chunks[:, NULLS] < 0) | is_miscounted
        unsure = untold if is_flat else (chunks[:, NULLS] != 0) | is_nested
        for group in np.flatnonzero(unsure & (footer.rows > 0)).tolist():
            total += int(chunks[group, SIZE])
            # Of lists afar one look: each further one is a request.
            is_enough = not is_flat and (not origin.is_local or not chunks[group, NULLS])
            if total <= _MOST_BYTES and not (wanted and is_enough):
                wanted.append((entry, footer, leaf, group))
    for (entry, footer, leaf, group), table in _tables(
        origin, wanted, type, column, workers=workers
    ):
        if isinstance(table, ValueError):  # its samples are bad ones, as are those of others
            continue
        if footer.leaves[leaf].is_flat or footer.chunks[group, leaf, NULLS] < 0:
            footer.chunks[group, leaf, NULLS] = values_of(table).null_count
        first = int(footer.rows[:group].sum())
        why = refusal_of(table, file=printable(entry.name), first=first)
        if why is not None:
            return why
    if column.is_media and files:
        nulls = sum(int(footer.chunks[:, leaf, NULLS].sum()) for _, footer, leaf in files)
        if nulls == sum(int(footer.rows.sum()) for _, footer, _ in files):
            return PATHS_ALONE
    return None


def _tables(
    origin: Origin,
    places: Sequence[tuple[Entry, Footer, int, int]],
    type: FieldType,
    column: ArrowColumn | None,
    *,
    workers: int,
) -> Iterator[tuple[tuple[Entry, Footer, int, int], Any]]:
    """The tables of some chunks: a leaf of a file in a row group; a ValueError for one that is
    damaged."""
    ranges = []
    for entry, footer, leaf, group in places:
        start = int(footer.chunks[group, leaf, START])
        ranges.append((entry, start, start + int(footer.chunks[group, leaf, SIZE])))
    read = read_file_parts(origin, ranges, workers=workers) if ranges else []
    for place, data in zip(places, read, strict=True):
        _, footer, leaf, group = place
        told, own = footer.chunks[group, leaf], footer.leaves[leaf]
        form = ChunkForm(
            path=own.path,
            elements=own.elements,
            physical=own.physical,
            parts=len(own.path if column is None else column.path),
            writer=footer.writer,
            codec=int(told[CODEC]),
            is_flat=own.is_flat,
            has_levels=not own.is_required,
            tensor=None if column is None else column.tensor,
        )
        try:
            yield (
                place,
                decode_chunk(
                    np.frombuffer(data, np.uint8),
                    form,
                    type,
                    rows=int(footer.rows[group]),
                    values=int(told[VALUES]),
                    decoded=int(told[DECODED]),
                    nulls=int(told[NULLS]),
                ),
            )
        except ValueError as error:
            yield place, error


class ParquetShards:
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
        draft = _ParquetShardDraft(self._schema, self._columns)
        for number, begin, end in groups:
            entry, footer = self._files[number], self._footers[number]
            if footer.rows[begin:end].any():
                draft.add(entry, footer, self._fields.leaves(footer, entry), begin, end)
        return draft.shard() if draft.units else None


class _ParquetShardDraft:
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
        self, entry: Entry, footer: Footer, leaves: Sequence[int], begin: int, end: int
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
            raise refused_file_error(entry, f'its column "{name}": {error}') from error

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


_MAX_FIELDS = 4096


class ParquetListing(TableListing):
    """The Parquet files of a dataset, by name; nothing of them was read."""

    def _candidates(self, *, workers: int, warns: bool) -> Candidates:
        if not self._files:
            raise DatasetNotFoundError(
                f"{self._origin.url}: no Parquet file. Wanted a folder that holds some, or the "
                "path of one."
            )
        footers: list[Footer] = []
        fields = FileFields(self._origin.arrangement)
        for entry, footer in zip(
            self._files, read_footers(self._origin, self._files, workers=workers), strict=True
        ):
            try:
                fields.see(footer, entry)
            except DatasetError:
                raise
            except ValueError as error:
                raise refused_file_error(entry, error) from error
            footers.append(footer)
        choice = fields.settle(self._files[0])
        schema = self._schema(choice, footers, fields)
        no_fields: dict[str, str] = {}
        for number, (name, column) in enumerate(choice.columns.items()):
            places = [
                (entry, footer, fields.leaves(footer, entry)[number])
                for entry, footer in zip(self._files, footers, strict=True)
            ]
            files = [place for place in places if place[2] >= 0]
            why = refused_by_values(self._origin, column, schema[name], files, workers=workers)
            if why is not None:
                no_fields[column.name] = why
        if no_fields:
            choice = fields.settle(self._files[0], no_fields)
            schema = self._schema(choice, footers, fields)
        if warns:
            for number, (name, column) in enumerate(choice.columns.items()):
                if may_be_paths(name, schema[name]):
                    some = self._first_values(number, footers, fields)
                    warn_of_paths(self._origin.url, column.name, some)
        shards = ParquetShards(self._files, footers, fields, choice, schema)
        if warns:
            warn_of_left_out(self._origin.url, choice)
            warn_of_partitions(self._origin.url, (entry.name for entry in self._files), choice)
        found = shards.told()
        if not found:
            raise DatasetNotFoundError(
                f"{self._origin.url}: its {len(self._files)} Parquet files have no rows."
            )
        candidates = Candidates.of_chunks(schema, found, left_out=choice.left_out)
        return replace(candidates, quarantined=list(self._quarantined))

    def _schema(self, choice: FieldChoice, footers: list[Footer], fields: FileFields) -> Schema:
        """The settled types. Of binary columns of which nothing is said the first values are looked
        at, the one look that is taken at data."""
        types: dict[str, FieldType] = {}
        for number, (name, type) in enumerate(choice.types.items()):
            types[name] = type or kind_of(self._first_values(number, footers, fields))
        if not types:
            raise no_field_error(self._origin.url, choice)
        if len(types) > _MAX_FIELDS:
            raise DatasetError(
                f"{printable(self._files[0].name)}: it has {len(types):,} columns that can be "
                f"fields, wanted at most {_MAX_FIELDS:,}. Write the wide ones as lists."
            )
        return Schema(types)

    def _first_values(self, field: int, footers: list[Footer], fields: FileFields) -> list[bytes]:
        for entry, footer in zip(self._files, footers, strict=True):
            leaf = fields.leaves(footer, entry)[field]
            if leaf >= 0 and len(footer.rows) and int(footer.rows.max()):
                try:
                    return first_values(self._origin, entry, footer, leaf)
                except ValueError as error:
                    if isinstance(error, DatasetError):
                        raise
                    raise refused_file_error(entry, error) from error
        return []
