"""The Arrow files of a dataset as shards, by their footers and the heads of record batches."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.cache.errors import DatasetError, DatasetNotFoundError, PenstockError
from penstock.readers.fields.arrays import array_form
from penstock.readers.fields.field_types import Bytes
from penstock.readers.fields.schema import Schema
from penstock.readers.files.names import printable
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.arrow.choice import (
    choose,
    kind_of,
    may_be_paths,
    no_field,
    refusal_of,
    tell_left_out,
    tell_partitions,
    tell_paths,
)
from penstock.readers.formats.arrow.chunks import decode_chunk, form_of, form_of_text, form_to_text
from penstock.readers.formats.arrow.drift import Drift, told_features
from penstock.readers.formats.arrow.rows import EncodedRows
from penstock.readers.formats.arrow.shards import FileColumns, cut_shards
from penstock.readers.formats.arrow.tails import read_files, refused
from penstock.readers.formats.arrow.types import PATHS_ALONE, arrow_columns
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.file_parts import read_parts
from penstock.readers.formats.table_listing import TableListing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.choice import FieldChoice
    from penstock.readers.formats.arrow.tails import ArrowFile
    from penstock.readers.formats.arrow.types import ArrowColumn
    from penstock.readers.origin.origin import Entry

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
        drift = Drift(given=given_types(self._origin.arrangement), columns={}, files={})
        own: list[dict[str, ArrowColumn]] = []
        for entry, file in zip(self._files, files, strict=True):
            schema = file.contents.schema
            try:
                columns = list(arrow_columns(schema, told_features(schema, entry)))
            except UnicodeDecodeError as error:
                raise refused(entry, f"a column isn't named in UTF-8 ({error})") from error
            if len(set(schema.names)) < len(schema.names):
                raise refused(entry, "two of its columns have one name")
            drift.add(columns, entry)
            own.append({column.name: column for column in columns})
        choice = choose(
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
            choice = choose(
                list(drift.columns.values()),
                self._origin.arrangement,
                file=printable(self._files[0].name),
                refused=no_fields,
            )
            made, schema = self._made(choice, files, own)
        if warns:
            for number, (name, column) in enumerate(choice.columns.items()):
                if may_be_paths(name, schema[name]):
                    tell_paths(self._origin.url, column.name, self._first_values(number, made))
            tell_left_out(self._origin.url, choice)
            tell_partitions(self._origin.url, (entry.name for entry in self._files), choice)
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
            raise refused(entry, error) from error

    def _schema(self, choice: FieldChoice, files: list[FileColumns]) -> Schema:
        types: dict[str, FieldType] = {}
        for number, (name, type) in enumerate(choice.types.items()):
            types[name] = type or kind_of(self._first_values(number, files))
        if not types:
            raise no_field(self._origin.url, choice)
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
                raise refused(file.entry, error) from error
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
        read = read_parts(self._origin, ranges, workers=workers) if ranges else []
        for place, (chunk, _), data in zip(places, chunks, read, strict=True):
            file, column = place[0], place[0].columns[field]
            assert column is not None
            form = form_of(file.types[file.column(field)], column.path[1:])
            arrow, bytes_ = form_of_text(form_to_text(form)), np.frombuffer(data, np.uint8)
            parts = column.path[1:]
            yield place, decode_chunk(bytes_, chunk, arrow, type, parts, (), column.tensor)
