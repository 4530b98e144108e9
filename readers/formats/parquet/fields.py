"""The fields of a dataset's Parquet files: one schema for all, and where each file has them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.arrow.choice import choose
from penstock.readers.formats.arrow.features import features_of
from penstock.readers.formats.arrow.types import ArrowColumn, arrow_columns, misfit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.choice import FieldChoice
    from penstock.readers.formats.parquet.footer import Footer
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.origin import Entry

_log = logging.getLogger("penstock")


@dataclass(slots=True, kw_only=True)
class Drift:
    """Gathers the columns of files whose schemas should be one, in the order in which they come."""

    given: Mapping[str, FieldType]
    columns: dict[str, ArrowColumn]
    files: dict[str, Entry]

    def add(self, columns: Sequence[ArrowColumn], entry: Entry) -> None:
        """The columns of one more file. Raises DatasetError where one is of another type than in
        an earlier file."""
        for column in columns:
            first = self.columns.get(column.name)
            if first is None or pa.types.is_null(first.arrow):
                self.columns[column.name], self.files[column.name] = column, entry
            elif not _is_alike(first, column) and not self._is_meant(column):
                raise DatasetError(
                    f'{printable(entry.name)}: its column "{column.name}" holds {column.arrow}, '
                    f"and in {printable(self.files[column.name].name)} it holds {first.arrow}. "
                    "Write both alike, read them as two datasets, or say which is meant by "
                    f'schema={{"{column.name}": …}}, where one can become the other.'
                )

    def _is_meant(self, column: ArrowColumn) -> bool:
        type = self.given.get(column.name)
        return type is not None and misfit(type, column.arrow) is None


def _is_alike(first: ArrowColumn, other: ArrowColumn) -> bool:
    if pa.types.is_null(other.arrow):
        return True  # no row of that file has it
    if first.path != other.path:
        return False
    if first.refusal is not None or other.refusal is not None:
        return first.refusal is not None and other.refusal is not None
    return first.type == other.type


class FileFields:
    """The leaves of each file that are the dataset's fields."""

    def __init__(self, arrangement: Arrangement) -> None:
        self._arrangement = arrangement
        self._drift = Drift(given=given_types(arrangement), columns={}, files={})
        self._known: dict[tuple[bytes, bytes], list[ArrowColumn]] = {}
        self._leaves: dict[tuple[bytes, bytes], list[int]] = {}
        self._choice: FieldChoice | None = None

    def see(self, footer: Footer, entry: Entry) -> None:
        """Take in one more file. Raises DatasetError."""
        key = (footer.schema, footer.keys)
        if key in self._known:
            return
        schema = footer.arrow_schema()
        columns = list(arrow_columns(schema, _features(schema, entry)))
        self._drift.add(columns, entry)
        self._known[key] = columns

    def settle(self, entry: Entry) -> FieldChoice:
        """The fields, once all files were seen. Raises ConfigError, DatasetError."""
        columns = list(self._drift.columns.values())
        self._choice = choose(columns, self._arrangement, file=printable(entry.name))
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


def _features(schema: Any, entry: Entry) -> Any:
    try:
        return features_of(schema.metadata)
    except ValueError as error:
        _log.warning(
            "%s: Hugging Face's features in its metadata are passed over: %s",
            printable(entry.name),
            error,
        )
        return {}
