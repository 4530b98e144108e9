"""The Parquet files of a dataset as shards, by their footers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.cache.errors import DatasetError, DatasetNotFoundError
from penstock.readers.fields.schema import Schema
from penstock.readers.files.names import printable
from penstock.readers.formats.arrow.choice import (
    kind_of,
    may_be_paths,
    no_field,
    tell_left_out,
    tell_partitions,
    tell_paths,
)
from penstock.readers.formats.candidates import Candidates
from penstock.readers.formats.parquet.fields import FileFields
from penstock.readers.formats.parquet.first_values import first_values, refused_by_values
from penstock.readers.formats.parquet.footers import read_footers, refused
from penstock.readers.formats.parquet.shards import Shards
from penstock.readers.formats.table_listing import TableListing

if TYPE_CHECKING:
    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.choice import FieldChoice
    from penstock.readers.formats.parquet.footer import Footer

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
                raise refused(entry, error) from error
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
                    tell_paths(self._origin.url, column.name, some)
        shards = Shards(self._files, footers, fields, choice, schema)
        if warns:
            tell_left_out(self._origin.url, choice)
            tell_partitions(self._origin.url, (entry.name for entry in self._files), choice)
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
            raise no_field(self._origin.url, choice)
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
                    raise refused(entry, error) from error
        return []
