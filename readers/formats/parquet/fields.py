"""The fields of a dataset's Parquet files: one schema for all, and where each file has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.cache.errors import DatasetError
from penstock.readers.files.names import printable
from penstock.readers.formats.arranging import given_types
from penstock.readers.formats.arrow.choice import choose
from penstock.readers.formats.arrow.drift import Drift, told_features
from penstock.readers.formats.arrow.types import arrow_columns, without_dictionaries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.readers.formats.arrow.choice import FieldChoice
    from penstock.readers.formats.arrow.types import ArrowColumn
    from penstock.readers.formats.parquet.footer import Footer
    from penstock.readers.origin.arrangement import Arrangement
    from penstock.readers.origin.origin import Entry


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
        plain = [field.with_type(without_dictionaries(field.type)) for field in schema]
        schema = pa.schema(plain, schema.metadata)
        columns = list(arrow_columns(schema, told_features(schema, entry)))
        self._drift.add(columns, entry)
        self._known[key] = columns

    def settle(self, entry: Entry, refused: Mapping[str, str] | None = None) -> FieldChoice:
        """The fields, once all files were seen. refused: as `choose` has it. Raises ConfigError,
        DatasetError."""
        columns, file = list(self._drift.columns.values()), printable(entry.name)
        self._choice = choose(columns, self._arrangement, file=file, refused=refused)
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
