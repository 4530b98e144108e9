"""The Arrow files of a dataset as shards, by their footers and the heads of record batches."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from penstock.cache.errors import DatasetError, DatasetNotFoundError
from penstock.readers.fields.field_types import Bytes
from penstock.readers.fields.schema import Schema
from penstock.readers.files.names import printable
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.arrow.choice import choose, kind_of, no_field, tell_left_out
from penstock.readers.formats.arrow.chunks import decode_chunk, form_of, form_of_text, form_to_text
from penstock.readers.formats.arrow.drift import Drift, told_features
from penstock.readers.formats.arrow.rows import EncodedRows
from penstock.readers.formats.arrow.shards import FileColumns, cut_shards
from penstock.readers.formats.arrow.tails import read_files, refused
from penstock.readers.formats.arrow.types import arrow_columns
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.file_parts import read_parts
from penstock.readers.formats.table_listing import TableListing

if TYPE_CHECKING:
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
        made = [
            self._columns(entry, file, columns, choice)
            for entry, file, columns in zip(self._files, files, own, strict=True)
        ]
        schema = self._schema(choice, made)
        if warns:
            tell_left_out(self._origin.url, choice)
        found = cut_shards(made, schema)
        if not found:
            raise DatasetNotFoundError(
                f"{self._origin.url}: its {len(self._files)} Arrow files have no rows."
            )
        candidates = Candidates.of_chunks(schema, found, left_out=choice.left_out)
        return replace(candidates, quarantined=list(self._quarantined))

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
            chunk, place, _ = file.chunk(field, file.batches[0], 0)
            if place.size > _MOST_BYTES:
                return []
            start, end = place.start, place.start + place.size
            (data,) = read_parts(self._origin, [(file.entry, start, end)], workers=1)
            at = file.types[file.column(field)]
            arrow = form_of_text(form_to_text(form_of(at, column.path[1:])))
            try:
                table = decode_chunk(
                    np.frombuffer(data, np.uint8), chunk, arrow, Bytes(), column.path[1:], ()
                )
                count = min(len(table), _ROWS)
                values = EncodedRows(count)
                values.add(table, np.arange(count), range(count))
            except ValueError as error:
                raise refused(file.entry, error) from error
            return [sample.tobytes() for sample in values.samples]
        return []
