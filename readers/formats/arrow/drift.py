"""The columns of a dataset's files, which should be the same in all of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.formats.arrow.features import features_of
from penstock.readers.formats.arrow.types import ArrowColumn, misfit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.fields.field_types import FieldType
    from penstock.readers.formats.arrow.features import Feature
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
            elif first.path != column.path and not pa.types.is_null(column.arrow):
                raise DatasetError(
                    f'{printable(entry.name)}: its column "{column.name}" lies at '
                    f"{list(column.path)}, and in {printable(self.files[column.name].name)} at "
                    f"{list(first.path)}. Write both alike, or read them as two datasets."
                )
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
    if first.tensor != other.tensor:
        return False
    if first.refusal is not None or other.refusal is not None:
        return first.refusal is not None and other.refusal is not None
    return first.type == other.type


def told_features(schema: Any, entry: Entry) -> Mapping[str, Feature]:
    """What features in a file's metadata say; nothing, with a warning, where they are broken."""
    try:
        return features_of(schema.metadata)
    except ValueError as error:
        _log.warning(
            "%s: Hugging Face's features in its metadata are passed over: %s",
            printable(entry.name),
            error,
        )
        return {}
