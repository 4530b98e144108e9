"""Implement simple formats in chunks: files of blocks, each of which is decoded as a whole into
records with all fields.

A format gives two functions: `blocks` describes the blocks of a file from its metadata, and
`decode` decodes one. docs/reference/formats.md has a complete example. A block may be a whole
file, so a folder of many small compressed files has this form too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import ConfigError, DatasetError, DatasetNotFoundError, PenstockError, ordered
from penstock.readers.fieldtypes import ArrayForm, FieldType, FieldTypes, Schema
from penstock.readers.files import printable
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkedShardFacts, ChunkFormat
from penstock.readers.formats.extents import ChunkedShard
from penstock.readers.formats.shard_summary import FieldSummary
from penstock.readers.formats.unindexed_files import DataFile, open_data_file, refusing
from penstock.readers.formats.unit_reader import ROW_BYTES, UnitReader, UnitValues

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.readers.formats.chunk_data import ShardData
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Bools, Encoded, Ints, Numbers

    Samples = Numbers | list[Numbers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The bytes [start, start + size_bytes) of a file that are decoded as a whole.

    rows: its records. missing: how many of them lack a field, by field. note: a JSON value that
    `BlockFormat.decode` receives.
    """

    start: int
    size_bytes: int
    rows: int
    missing: Mapping[str, int] = field(default_factory=dict)
    note: Any = None


class BlockFormat(ChunkFormat):
    """The base of formats whose files consist of blocks. Several threads may call its methods."""

    @abstractmethod
    def blocks(self, file: DataFile, entry: Entry) -> tuple[FieldTypes, Sequence[Block]]:
        """Return the fields of a file's records, the same for all files, and its blocks in order.

        Raises ValueError with the reason for a file that doesn't have this format.
        """

    @abstractmethod
    def decode(self, data: Encoded, block: Block) -> Mapping[str, Any] | Numbers:
        """Return the records of a block: values by field, or an array with a field of numpy for
        each.

        data: its bytes, uint8. The values of a field are an array of shape (rows, …), or a list of
        numbers, arrays, str or bytes, and of None for records that lack the field. Raises
        ValueError for damaged bytes; other errors count as damage too.
        """

    def has_default_names(self, origin: Origin) -> bool:
        """Return True: records have no other places of fields."""
        return True

    def stored_fields(self, schema: Schema, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Return the first field, for which the index records the bytes of all."""
        return tuple(schema)[:1] if fields else ()

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Describe the blocks of all files. A shard is a part of a large file, or several small
        files."""
        if origin.arrangement.manifest or origin.arrangement.sampling:
            raise ConfigError(f"{origin.url}: {self.name} files take no manifest= and no sample=.")
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
        sizes = [max(block.size_bytes, block.rows * ROW_BYTES) for _, _, block in found]
        bounds = pairwise(part_bounds(sizes, target_bytes=PART_BYTES).tolist())
        shards = [_shard(found[a:b]) for a, b in bounds]
        given = origin.arrangement.schema
        types = {name: given.get(name, type) for name, type in schema.items()}
        return ChunkedDataset(schema=Schema(types), shards=shards)

    def _blocks_of(
        self, origin: Origin, entry: Entry
    ) -> tuple[dict[str, FieldType], Sequence[Block]]:
        size, where = entry.size_bytes, f"isn't a valid {self.name} file: "
        with open_data_file(origin, entry) as file, refusing(entry, where):
            schema, blocks = self.blocks(file, entry)
            ends = [(b.start, b.start + b.size_bytes, b.rows) for b in blocks]
            if any(not 0 <= start <= end <= size or rows < 0 for start, end, rows in ends):
                raise ValueError("a block lies outside of the file: it is truncated")
        return dict(schema), blocks

    def reader(self, shard: ChunkedShardFacts) -> BlockReader:
        """Open a shard."""
        return BlockReader(self, shard)


def _shard(blocks: Sequence[tuple[Entry, int, Block]]) -> ChunkedShard:
    """Return the shard of some blocks, each given with its file and its first row in that file."""
    missing: Counter[str] = Counter()
    for _, _, block in blocks:
        missing.update(block.missing)
    firsts, notes = [first for _, first, _ in blocks], [block.note for _, _, block in blocks]
    rows = [block.rows for _, _, block in blocks]
    return ChunkedShard.of(
        [(entry, block.start, block.size_bytes, 0) for entry, _, block in blocks],
        samples=sum(rows),
        units=rows,
        fields={n: FieldSummary(storage="chunks", missing=count) for n, count in missing.items()},
        note=[firsts, notes, [name for name, count in missing.items() if count]],
    )


class BlockValues(UnitValues):
    """The samples of a field in a block, in an array or a list of arrays. has: which records have
    them; None if all have."""

    def __init__(self, samples: Samples, has: Bools | None) -> None:
        self._samples, self._has = samples, has
        arrays = [samples] if isinstance(samples, np.ndarray) else samples
        self.nbytes = sum(each.nbytes for each in arrays)

    def dense(self, form: ArrayForm) -> Numbers:
        """Return all samples as one array."""
        return np.asarray(self._samples)

    def put(self, samples: list[Numbers], here: Ints, rows: Ints, form: ArrayForm | None) -> None:
        """Put the samples of some records into a list."""
        for place, row in zip(here.tolist(), rows.tolist(), strict=True):
            samples[place] = self._samples[row]

    def present(self, rows: Ints) -> Bools | None:
        """Return which of some records have the field."""
        return None if self._has is None else self._has[rows]


class DecodedBlock(dict[str, BlockValues]):
    """The records of a block, by field."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of all fields."""
        return sum(values.nbytes for values in self.values())


class BlockReader(UnitReader):
    """Reads the records of one shard. Extents, units and chunks have the numbers of the blocks."""

    def __init__(self, format: BlockFormat, shard: ChunkedShardFacts) -> None:
        """Raises ValueError or TypeError for facts that contradict each other."""
        self._firsts, notes, lacking = shard.note
        super().__init__(shard, lacking=lacking)
        self._format, self._files = format, shard.files
        extents, rows = shard.extents, shard.units.tolist()
        places = zip(extents.starts.tolist(), extents.sizes.tolist(), rows, notes, strict=True)
        self._blocks = [Block(start=a, size_bytes=b, rows=c, note=d) for a, b, c, d in places]
        self._file_numbers = extents.files.tolist()
        if len(self._firsts) != len(rows):
            raise ValueError("the numbers of its blocks disagree")

    def name(self, row: int) -> str:
        """Return the file, and the record's number in it."""
        block, at = self.place_of(row)
        file = printable(self._files[self._file_numbers[block]])
        return f"{file}[{int(self._firsts[block]) + at}]"

    def uses(self, unit: int) -> int:
        """Return how often rows are taken of a block: once for each field."""
        return self._counts[unit] * len(self._schema)

    def values(self, decoded: DecodedBlock, field: str) -> BlockValues:
        """Return the values of a field."""
        return decoded[field]

    def decoded(self, chunk: int, unit: int, field: str, data: ShardData) -> DecodedBlock:
        """Decode a block."""
        block, view = self._blocks[chunk], data.view(chunk)
        encoded = data.read([chunk])[0] if view is None else view
        try:
            values: Any = self._format.decode(encoded, block)
            types = self._schema.items()
            return DecodedBlock({n: _checked(type, values[n], block.rows) for n, type in types})
        except Exception as error:  # another package's code may raise anything
            if isinstance(error, PenstockError | MemoryError):
                raise
            raise ValueError(f"its block is damaged ({_reason(error)})") from error


def _checked(type: FieldType, values: Any, rows: int) -> BlockValues:
    """Return the samples of a field. Raises ValueError if they don't fit the field."""
    if len(values) != rows:
        raise ValueError(f"{len(values):,} values, and the index has {rows:,} records")
    present, form = None, type.stored
    blank = np.empty(0, np.uint8) if form is None else form.empty
    if isinstance(values, list) and any(each is None for each in values):
        present = np.array([each is not None for each in values])
        values = [blank if each is None else each for each in values]
    if form is None:
        texts = [each.encode() if isinstance(each, str) else each for each in values]
        return BlockValues([np.frombuffer(each, np.uint8) for each in texts], present)
    if form.is_ragged:
        return BlockValues([_numbers(type, each, form, form.shape) for each in values], present)
    return BlockValues(_numbers(type, values, form, (rows, *form.shape)), present)


def _numbers(
    type: FieldType, values: Any, form: ArrayForm, shape: tuple[int | None, ...]
) -> Numbers:
    """Return numbers as an array of a shape. Raises ValueError if they don't fit the field."""
    array = np.asarray(values)
    if not array.size:
        return form.empty
    is_of_shape = replace(form, shape=shape).has(array.shape)
    if not is_of_shape or not type.can_hold(array.dtype, form.shape):
        raise ValueError(f"{array.dtype} of shape {array.shape} for {type!r}")
    if type.may_not_fit(array.dtype) and type.unfit(array, form.dtype).any():
        raise ValueError(f"a number {type.mismatch()}")
    return array.astype(form.dtype, copy=False)


def _reason(error: Exception) -> str:
    text = str(error)[:200]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
