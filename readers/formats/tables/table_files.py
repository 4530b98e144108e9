"""Recognise the files of a table, choose its fields, and cut its units into shards.

Parquet and Arrow share this module; each of them reads its own metadata (`TableMetadata`). A shard
is contiguous units (row groups, record batches) of a large file, or a group of small files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from penstock.cache import DatasetError, DatasetNotFoundError
from penstock.readers.fieldtypes import Schema, array_form
from penstock.readers.files import extension, is_passed_over, printable
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, DatasetFiles
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.tables.column_choice import (
    SchemaDrift,
    choose_columns,
    kind_of,
    may_be_paths,
    no_field_error,
    warn_of_left_out,
    warn_of_partitions,
    warn_of_paths,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import FieldType
    from penstock.readers.formats.extents import ChunkedShard
    from penstock.readers.formats.tables.column_choice import FieldChoice
    from penstock.readers.formats.tables.column_types import ArrowColumn
    from penstock.readers.origin import Entry, Origin

    Ints = NDArray[np.int64]


class TableFormat(ChunkFormat, ABC):
    """The base of the formats of tables. kind: the format's name in messages."""

    kind: ClassVar[str]
    in_folders: ClassVar[bool] = True

    @abstractmethod
    def metadata(self, origin: Origin, files: Sequence[Entry], *, workers: int) -> TableMetadata:
        """Read the metadata of all files. Raises DatasetError with the file's name."""

    def recognises(self, origin: Origin) -> bool:
        """Return True if the root has such files but no folders or images, whose table these files
        may be; of a list of files, if all are such. Raises DatasetError for a Hudi table."""
        from penstock.readers.formats.file_kinds import IMAGES

        top = origin.top(self.is_file)
        if origin.selection is not None:
            return bool(top.entries) and not top.others
        if b".hoodie" in top.folders:
            raise DatasetError(
                f"{origin.url}: this is a Hudi table (.hoodie), whose folder holds files of older "
                "versions too. Give the Parquet files of its current version as a list."
            )
        folders = [name for name in top.folders if not is_passed_over(name)]
        images = [name for name in top.others if extension(name) in IMAGES]
        return bool(top.entries) and not folders and not images

    def files(self, origin: Origin) -> DatasetFiles:
        """List all files, those in folders too; of a list, all that the user names."""
        if origin.selection is not None:
            return DatasetFiles(entries=origin.top(bool).entries)
        return super().files(origin)

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Read the metadata of all files and return the table's shards. Raises DatasetError with
        the file's name."""
        table = self.metadata(origin, files.entries, workers=workers)
        choice, schema = table.choose({})
        refused = {
            column.name: reason
            for number, (name, column) in enumerate(choice.columns.items())
            if (reason := table.refusal(number, column, schema[name], workers=workers)) is not None
        }
        if refused:
            choice, schema = table.choose(refused)

        def announce() -> None:
            for number, (name, column) in enumerate(choice.columns.items()):
                if may_be_paths(name, schema[name]):
                    warn_of_paths(origin.url, column.name, table.first_values(number))
            warn_of_left_out(origin.url, choice)
            warn_of_partitions(origin.url, (entry.name for entry in files.entries), choice)

        shards = table.shards(schema)
        if not shards:
            announce()
            raise DatasetNotFoundError(
                f"{origin.url}: its {len(files.entries)} {self.kind} files have no rows."
            )
        return ChunkedDataset(
            schema=schema, shards=shards, left_out=choice.left_out, announce=announce
        )


class TableMetadata(ABC):
    """The columns of a table's files and the places of their chunks, read from the metadata.

    A field's number is its place among the columns of the last choice.
    """

    def __init__(self, origin: Origin, files: Sequence[Entry]) -> None:
        """A subclass also adds the columns of each file to `_drift`."""
        self._origin, self._files = origin, files
        self._drift = SchemaDrift(given=given_types(origin.arrangement), columns={}, files={})

    def choose(self, refused: Mapping[str, str]) -> tuple[FieldChoice, Schema]:
        """Choose the fields and settle their types, which may need the first values of binary
        columns. refused: see `choose_columns`. Raises ConfigError, DatasetError."""
        choice = choose_columns(
            list(self._drift.columns.values()),
            self._origin.arrangement,
            file=printable(self._files[0].name),
            refused=refused,
        )
        self._locate(choice)
        types = {
            name: type or kind_of(self.first_values(number))
            for number, (name, type) in enumerate(choice.types.items())
        }
        if not types:
            raise no_field_error(self._origin.url, choice)
        return choice, Schema(types)

    @abstractmethod
    def _locate(self, choice: FieldChoice) -> None:
        """Find the chosen columns in each file. Raises DatasetError with the file's name."""

    @abstractmethod
    def first_values(self, field: int) -> list[bytes]:
        """Return some of the first values of an encoded field, none if reading them costs too
        much."""

    @abstractmethod
    def refusal(
        self, field: int, column: ArrowColumn, type: FieldType, *, workers: int
    ) -> str | None:
        """Return why a column's values can't be a field although its type can, or None: lists that
        have nulls inside or aren't arrays; structs of paths without bytes.

        Reads up to MAX_CHECKED_BYTES of the column: the chunks whose metadata don't exclude such
        values, but only the first of them for nested lists and on a remote store.
        """

    @abstractmethod
    def shards(self, schema: Schema) -> list[ChunkedShard]:
        """Return all shards with rows, in the order of the files. Raises DatasetError."""


FileUnits = tuple[int, int, int]
"""A file's number, its first unit, and the unit after its last."""

MAX_CHECKED_BYTES = 2**28
"""The limit of bytes that are read of a column when a dataset is opened."""

_FREE_BYTES, _MAX_RATIO = 2**28, 1000
ROW_BYTES = PART_BYTES // (MAX_SHARD_SAMPLES // 2)
"""The least size that counts for a row, because units of few bytes may have many rows."""


def cut_units(rows: Sequence[Ints], sizes: Sequence[Ints]) -> Iterator[list[FileUnits]]:
    """Yield the units of each shard, in the order of the files.

    rows, sizes: the samples and the bytes of each file's units, int64, shape (units,).
    """
    shares = [np.maximum(each, ROW_BYTES * own) for each, own in zip(sizes, rows, strict=True)]
    totals = [int(each.sum()) for each in shares]

    def grouped(files: list[int]) -> Iterator[list[FileUnits]]:
        for a, b in pairwise(part_bounds([totals[number] for number in files]).tolist()):
            yield [(number, 0, len(rows[number])) for number in files[a:b]]

    small: list[int] = []
    for number, share in enumerate(shares):
        if totals[number] <= PART_BYTES:
            small.append(number)
            continue
        yield from grouped(small)
        small = []
        yield from ([(number, a, b)] for a, b in pairwise(part_bounds(share).tolist()))
    yield from grouped(small)


def max_decoded_bytes(size_bytes: int) -> int:
    """Return how many bytes of memory `size_bytes` of a file may decode to; more is damage."""
    return max(_FREE_BYTES, _MAX_RATIO * size_bytes)


def check_claim(type: FieldType, *, rows: int, size_bytes: int) -> None:
    """Raise ValueError if samples of a fixed shape need more memory than the size_bytes of their
    chunk may decode to."""
    form = array_form(type)
    if form is None or form.is_ragged:
        return
    claimed = math.prod(form.fixed_shape) * form.dtype.itemsize * rows
    if claimed > max_decoded_bytes(size_bytes):
        raise ValueError(
            f"its {rows:,} rows of {form.dtype} of shape {form.shape} would take {claimed:,} "
            f"bytes, and its chunk has {size_bytes:,}"
        )


def refused_file_error(entry: Entry, error: object) -> DatasetError:
    """Return the error for a file that can't be read."""
    return DatasetError(
        f"{printable(entry.name)}: {error}. Write or fetch it again, or take it out of the dataset."
    )
