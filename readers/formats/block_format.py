"""Implement simple formats in chunks: files of blocks, each of which is decoded as a whole into
records with all fields.

A format gives two functions: `blocks` describes the blocks of a file from its metadata, and
`decode` decodes one. docs/formats.md has a complete example. A block may be a whole file, so a
folder of many small compressed files has this form too.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, PenstockError, ordered
from penstock.readers.fieldtypes import (
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    RaggedColumn,
    joined_columns,
    upright_sizes,
)
from penstock.readers.files import printable
from penstock.readers.formats.array_windows import place_numbers
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader
from penstock.readers.formats.extents import ChunkedShard
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES
from penstock.readers.formats.unindexed_files import open_data_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType, Schema
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops, ShardData
    from penstock.readers.formats.files_format import DatasetFiles
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

_ROW_BYTES = PART_BYTES // (MAX_SHARD_SAMPLES // 2)
"""The least size that counts for a record, because blocks of few bytes may hold many records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The bytes [start, start + size_bytes) of a file that are decoded as a whole.

    rows: its records. note: a JSON value that `BlockFormat.decode` receives.
    """

    start: int
    size_bytes: int
    rows: int
    note: Any = None


class BlockFormat(ChunkFormat):
    """The base of formats whose files consist of blocks. Several threads may call its methods."""

    @abstractmethod
    def blocks(self, file: DataFile, entry: Entry) -> tuple[Schema, Sequence[Block]]:
        """Return the fields of a file's records, the same for all files, and its blocks in order.

        Raises ValueError with the reason for a file that doesn't have this format.
        """

    @abstractmethod
    def decode(self, data: Encoded, block: Block) -> Mapping[str, Any] | NDArray[Any]:
        """Return the records of a block: values by field, or an array with a field of numpy for
        each.

        data: its bytes, uint8. The values of a field are an array of shape (rows, …), or a list of
        arrays whose shapes differ, of str, or of bytes. Raises ValueError for damaged bytes; other
        errors count as damage too.
        """

    def stored_fields(self, schema: Schema, fields: Sequence[str]) -> tuple[str, ...]:
        """Return the first field, for which the index records the bytes of all."""
        return tuple(schema)[:1] if fields else ()

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Describe the blocks of all files. A shard is a part of a large file, or several small
        files."""
        if origin.arrangement.key:
            raise ConfigError(
                f"{origin.url}: {self.name} files accept neither manifest= nor schema=."
            )
        read, entries = partial(self._blocks_of, origin), files.entries
        each = list(ordered(read, entries, workers=workers, ahead=workers + 2, name="list"))
        schema = each[0][0]
        found: list[tuple[Entry, int, Block]] = []  # the file, first row in it, block
        for entry, (own, blocks) in zip(entries, each, strict=True):
            if own != schema:
                raise DatasetError(
                    f"{printable(entry.name)}: its fields are {own!r}, and those of "
                    f"{printable(entries[0].name)} are {schema!r}. Put them into two folders."
                )
            first = 0
            for block in blocks:
                if block.rows:
                    found.append((entry, first, block))
                first += block.rows
        if not found:
            raise DatasetNotFoundError(f"{origin.url}: its {len(entries)} files have no records.")
        sizes = [max(block.size_bytes, block.rows * _ROW_BYTES) for _, _, block in found]
        bounds = pairwise(part_bounds(sizes, target_bytes=PART_BYTES).tolist())
        shards = [
            ChunkedShard.of(
                [(entry, block.start, block.size_bytes, 0) for entry, _, block in some],
                samples=sum(block.rows for _, _, block in some),
                units=[block.rows for _, _, block in some],
                note=[[first for _, first, _ in some], [block.note for _, _, block in some]],
            )
            for some in (found[a:b] for a, b in bounds)
        ]
        return ChunkedDataset(schema=schema, shards=shards)

    def _blocks_of(self, origin: Origin, entry: Entry) -> tuple[Schema, Sequence[Block]]:
        size = entry.size_bytes
        with open_data_file(origin, entry) as file:
            try:
                schema, blocks = self.blocks(file, entry)
                if any(
                    not 0 <= b.start <= b.start + b.size_bytes <= size or b.rows < 0 for b in blocks
                ):
                    raise ValueError("a block lies outside of the file: it is truncated")
            except Exception as error:  # another package's code may raise anything
                if isinstance(error, PenstockError | MemoryError):
                    raise
                raise DatasetError(
                    f"{printable(entry.name)}: isn't a valid {self.name} file "
                    f"({_reason(error)}). Write or fetch it again, or remove it from the folder."
                ) from error
            return schema, blocks

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        return BlockReader(self, shard)


class DecodedBlock:
    """The records of a block as columns."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = columns
        self.nbytes = sum(column.size_bytes for column in columns.values())


class BlockReader(ChunkReader):
    """Reads the records of one shard. Extents, units and chunks have the numbers of the blocks."""

    def __init__(self, format: BlockFormat, shard: ChunkedShardFacts) -> None:
        """Raises ValueError or TypeError for facts that contradict each other."""
        self._format, self._schema, self._files = format, shard.schema, shard.files
        self._firsts, notes = shard.note
        rows, extents = shard.units.tolist(), shard.extents
        starts, sizes = extents.starts.tolist(), extents.sizes.tolist()
        self._blocks = [
            Block(start=start, size_bytes=size, rows=count, note=note)
            for start, size, count, note in zip(starts, sizes, rows, notes, strict=True)
        ]
        self._bounds = np.cumsum([0, *rows])
        self._file_numbers = extents.files.tolist()
        if len(self._firsts) != len(rows) or int(self._bounds[-1]) != shard.samples:
            raise ValueError("the numbers of its blocks disagree")

    def needs(self, rows: Ints, fields: Sequence[str], crops: Crops) -> list[int]:
        """Return the blocks that hold these rows."""
        del crops
        found: list[int] = np.unique(self._block_of(rows)).tolist() if fields else []
        return found

    def gather(
        self,
        field: str,
        rows: Ints,
        out: NDArray[Any],
        places: Places,
        *,
        data: ShardData,
        wrong: dict[int, str],
        corners: Ints | None = None,
    ) -> None:
        """Copy rows of a dense field to their places."""
        assert corners is None, "a block's records have no parts"
        slots = place_numbers(places, len(rows))
        for here, local, column in self._columns(field, rows, data, wrong):
            if column is None:
                out[slots[here]] = 0
            else:
                assert isinstance(column, DenseColumn)
                out[slots[here]] = column.values[local]

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of any fields."""
        return {field: self._column(field, rows, data, wrong) for field in fields}

    def name(self, row: int) -> str:
        """Return the file, and the record's number in it."""
        block = int(self._block_of(np.array([row]))[0])
        at = int(self._firsts[block]) + row - int(self._bounds[block])
        return f"{printable(self._files[self._file_numbers[block]])}[{at}]"

    def _column(self, field: str, rows: Ints, data: ShardData, wrong: dict[int, str]) -> Column:
        type = self._schema[field]
        order, parts = [np.empty(0, np.int64)], [_empty_column(type, 0)]
        for here, local, column in self._columns(field, rows, data, wrong):
            order.append(here)
            parts.append(
                _empty_column(type, len(here)) if column is None else column.take(local.tolist())
            )
        found = joined_columns(parts).take(np.argsort(np.concatenate(order)))
        if isinstance(found, EncodedColumn) and found.dims is not None:
            for row in np.flatnonzero(found.dims[:, 0] == 0).tolist():
                wrong.setdefault(row, f"{field}: it doesn't begin as an image of a known format")
        return found

    def _columns(
        self, field: str, rows: Ints, data: ShardData, wrong: dict[int, str]
    ) -> Iterator[tuple[Ints, Ints, Column | None]]:
        """Yield for each block: which of the rows are in it, their places in it, and its column;
        None if it is damaged."""
        blocks = self._block_of(rows)
        for number in data.in_order(np.unique(blocks).tolist()):
            here = np.flatnonzero(blocks == number)
            column: Column | None = None
            try:
                decoded = data.decoded(
                    number,
                    partial(self._decode, number, data),
                    uses=self._blocks[number].rows * len(self._schema),
                    taken=len(here),
                )
                column = decoded.columns[field]
            except ValueError as error:
                if isinstance(error, PenstockError):
                    raise
                for row in here.tolist():
                    wrong.setdefault(row, str(error))
            yield here, rows[here] - self._bounds[number], column

    def _decode(self, number: int, data: ShardData) -> DecodedBlock:
        block, view = self._blocks[number], data.view(number)
        encoded = data.read([number])[0] if view is None else view
        try:
            values: Any = self._format.decode(encoded, block)
            return DecodedBlock(
                {name: _column(type, values[name], block) for name, type in self._schema.items()}
            )
        except Exception as error:  # another package's code may raise anything
            if isinstance(error, PenstockError | MemoryError):
                raise
            raise ValueError(f"its block is damaged ({_reason(error)})") from error

    def _block_of(self, rows: Ints) -> Ints:
        found: Ints = np.searchsorted(self._bounds, rows, side="right") - 1
        return found


def _column(type: FieldType, values: Any, block: Block) -> Column:
    """Return the values of a field as a column. Raises ValueError if they don't fit the field."""
    if len(values) != block.rows:
        raise ValueError(f"{len(values):,} values, and the index has {block.rows:,} records")
    form, number = type.form, type.number
    if number is not None:
        form = ArrayForm(number, ())
    if form is None:
        samples = [each.encode() if isinstance(each, str) else each for each in values]
        encoded = [np.frombuffer(each, np.uint8) for each in samples]
        return EncodedColumn(encoded, upright_sizes(encoded) if type.has_sides else None)
    if form.is_ragged:
        arrays = [np.asarray(each, form.dtype) for each in values]
        if any(not _is_of(each.shape, form.shape) for each in arrays):
            raise ValueError(f"values of other shapes than {form.shape}")
        return RaggedColumn.of(arrays, like=_ragged(form))
    array = np.asarray(values)
    if array.shape[1:] != form.fixed_shape or not np.can_cast(array.dtype, form.dtype, "same_kind"):
        raise ValueError(f"{array.dtype} of shape {array.shape[1:]}, and the field is {type!r}")
    return DenseColumn(array.astype(form.dtype, copy=False))


def _is_of(shape: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        length in (None, own) for own, length in zip(shape, wanted, strict=True)
    )


def _ragged(form: ArrayForm) -> RaggedColumn:
    """Return an empty column of arrays whose shapes differ."""
    shapes = None if form.rest is not None else np.empty((0, len(form.shape)), np.int64)
    return RaggedColumn(
        np.empty((0, *(form.rest or ())), form.dtype), np.zeros(1, np.int64), shapes
    )


def _empty_column(type: FieldType, rows: int) -> Column:
    """Return a column of zeros or of empty samples."""
    form, number = type.form, type.number
    if number is not None:
        return DenseColumn(np.zeros(rows, number))
    if form is None:
        dims = np.zeros((rows, 2), np.int32) if type.has_sides else None
        return EncodedColumn([np.empty(0, np.uint8)] * rows, dims)
    if form.is_ragged:
        like = _ragged(form)
        return RaggedColumn.of([like.nothing] * rows, like=like)
    return DenseColumn(np.zeros((rows, *form.fixed_shape), form.dtype))


def _reason(error: Exception) -> str:
    text = str(error)[:200]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
