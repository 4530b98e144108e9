"""Implement simple formats in chunks: files of blocks, each of which is decoded as a whole into
records with all fields.

A format gives two functions: `blocks` describes the blocks of a file from its metadata, and
`decode` decodes one. docs/formats.md has a complete example. A block may be a whole file, so a
folder of many small compressed files has this form too.
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
from penstock.readers.fieldtypes import (
    PRESENT,
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    Schema,
    upright_sizes,
)
from penstock.readers.files import printable
from penstock.readers.formats.array_windows import place_numbers
from penstock.readers.formats.candidates import PART_BYTES, part_bounds
from penstock.readers.formats.chunked import ChunkedDataset, ChunkFormat, ChunkReader
from penstock.readers.formats.dataset_arguments import given_types
from penstock.readers.formats.extents import ChunkedShard
from penstock.readers.formats.shard_summary import MAX_SHARD_SAMPLES, FieldSummary
from penstock.readers.formats.unindexed_files import open_data_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, Crops, ShardData
    from penstock.readers.formats.format import DatasetFiles
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.unindexed_files import DataFile
    from penstock.readers.origin import Entry, Origin
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]
    Samples = NDArray[Any] | list[NDArray[Any]]

_ROW_BYTES = PART_BYTES // (MAX_SHARD_SAMPLES // 2)
"""The least size that counts for a record, because blocks of few bytes may hold many records."""


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
    def blocks(
        self, file: DataFile, entry: Entry
    ) -> tuple[Mapping[str, FieldType], Sequence[Block]]:
        """Return the fields of a file's records, the same for all files, and its blocks in order.

        Raises ValueError with the reason for a file that doesn't have this format.
        """

    @abstractmethod
    def decode(self, data: Encoded, block: Block) -> Mapping[str, Any] | NDArray[Any]:
        """Return the records of a block: values by field, or an array with a field of numpy for
        each.

        data: its bytes, uint8. The values of a field are an array of shape (rows, …), or a list of
        numbers, arrays, str or bytes, and of None for records that lack the field. Raises
        ValueError for damaged bytes; other errors count as damage too.
        """

    def has_default_names(self, origin: Origin) -> bool:
        """Return True: records have no other places of fields."""
        del origin
        return True

    def stored_fields(self, schema: Schema, fields: tuple[str, ...]) -> tuple[str, ...]:
        """Return the first field, for which the index records the bytes of all."""
        return tuple(schema)[:1] if fields else ()

    def index(self, origin: Origin, files: DatasetFiles, *, workers: int) -> ChunkedDataset:
        """Describe the blocks of all files. A shard is a part of a large file, or several small
        files."""
        if origin.arrangement.manifest or origin.arrangement.sampling:
            raise ConfigError(
                f"{origin.url}: {self.name} files accept neither manifest= nor sample=."
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
        shards = [_shard(found[a:b]) for a, b in bounds]
        given = given_types(origin.arrangement)
        types = {name: given.get(name, type) for name, type in schema.items()}
        return ChunkedDataset(schema=Schema(types), shards=shards)

    def _blocks_of(
        self, origin: Origin, entry: Entry
    ) -> tuple[dict[str, FieldType], Sequence[Block]]:
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
            return dict(schema), blocks

    def reader(self, shard: ChunkedShardFacts) -> ChunkReader:
        """Open a shard."""
        return BlockReader(self, shard)


def _shard(blocks: Sequence[tuple[Entry, int, Block]]) -> ChunkedShard:
    """Return the shard of some blocks, each given with its file and its first row in that file."""
    missing: Counter[str] = Counter()
    for _, _, block in blocks:
        missing.update(block.missing)
    return ChunkedShard.of(
        [(entry, block.start, block.size_bytes, 0) for entry, _, block in blocks],
        samples=sum(block.rows for _, _, block in blocks),
        units=[block.rows for _, _, block in blocks],
        fields={
            name: FieldSummary(storage="chunks", missing=count) for name, count in missing.items()
        },
        note=[
            [first for _, first, _ in blocks],
            [block.note for _, _, block in blocks],
            [name for name, count in missing.items() if count],
        ],
    )


class DecodedBlock:
    """The records of a block. fields: by name the samples, in an array or a list of arrays, and
    which records have them, bool; None if all have."""

    def __init__(self, fields: Mapping[str, tuple[Samples, NDArray[np.bool_] | None]]) -> None:
        self.fields = fields
        self.nbytes = sum(
            samples.nbytes if isinstance(samples, np.ndarray) else sum(s.nbytes for s in samples)
            for samples, _ in fields.values()
        )


class BlockReader(ChunkReader):
    """Reads the records of one shard. Extents, units and chunks have the numbers of the blocks."""

    def __init__(self, format: BlockFormat, shard: ChunkedShardFacts) -> None:
        """Raises ValueError or TypeError for facts that contradict each other."""
        self._format, self._schema, self._files = format, shard.schema, shard.files
        self._forms = {name: type.stored for name, type in shard.schema.items()}
        self._firsts, notes, self._lacking = shard.note
        extents, rows = shard.extents, shard.units.tolist()
        places = zip(extents.starts.tolist(), extents.sizes.tolist(), rows, notes, strict=True)
        self._blocks = [Block(start=a, size_bytes=b, rows=c, note=d) for a, b, c, d in places]
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
        slots, present = place_numbers(places, len(rows)), np.ones(len(rows), np.bool_)
        for here, local, samples in self._samples(field, rows, data, wrong, present):
            out[slots[here]] = 0 if samples is None else samples[local]

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of any fields, and `<name>.present` of those that some records lack."""
        found: dict[str, Column] = {}
        for name in fields:
            form, present = self._forms[name], np.ones(len(rows), np.bool_)
            chosen = [_blank(form)] * len(rows)
            for here, local, samples in self._samples(name, rows, data, wrong, present):
                if samples is not None:
                    for place, row in zip(here.tolist(), local.tolist(), strict=True):
                        chosen[place] = samples[row]
            if form is not None:
                found[name] = form.column(chosen)
            elif not self._schema[name].has_sides:
                found[name] = EncodedColumn(chosen)
            else:
                dims = upright_sizes(chosen)
                unknown = np.flatnonzero((dims[:, 0] == 0) & present)
                _mark(wrong, unknown, f"{name}: it doesn't begin as an image of a known format")
                found[name] = EncodedColumn(chosen, dims)
            if name in self._lacking:
                found[name + PRESENT] = DenseColumn(present)
        return found

    def name(self, row: int) -> str:
        """Return the file, and the record's number in it."""
        block = int(self._block_of(np.array([row]))[0])
        at = int(self._firsts[block]) + row - int(self._bounds[block])
        return f"{printable(self._files[self._file_numbers[block]])}[{at}]"

    def _samples(
        self,
        field: str,
        rows: Ints,
        data: ShardData,
        wrong: dict[int, str],
        present: NDArray[np.bool_],
    ) -> Iterator[tuple[Ints, Ints, Samples | None]]:
        """Yield for each block: which of the rows are in it, their places in it, and its samples;
        None if it is damaged. Rows that lack the field become False in `present`."""
        blocks = self._block_of(rows)
        for number in data.in_order(np.unique(blocks).tolist()):
            here = np.flatnonzero(blocks == number)
            local, decode = rows[here] - self._bounds[number], partial(self._decode, number, data)
            uses = self._blocks[number].rows * len(self._schema)
            try:
                decoded = data.decoded(number, decode, uses=uses, taken=len(here))
            except ValueError as error:
                if isinstance(error, PenstockError):
                    raise
                _mark(wrong, here, str(error))
                yield here, local, None
                continue
            samples, has_field = decoded.fields[field]
            if has_field is not None:
                lacking = here[~has_field[local]]
                present[lacking] = False
                if field not in self._lacking:
                    _mark(wrong, lacking, f"{field}: is missing, which the index doesn't record")
            yield here, local, samples

    def _decode(self, number: int, data: ShardData) -> DecodedBlock:
        block, view = self._blocks[number], data.view(number)
        encoded = data.read([number])[0] if view is None else view
        try:
            values: Any = self._format.decode(encoded, block)
            types = self._schema.items()
            return DecodedBlock({n: _checked(type, values[n], block.rows) for n, type in types})
        except Exception as error:  # another package's code may raise anything
            if isinstance(error, PenstockError | MemoryError):
                raise
            raise ValueError(f"its block is damaged ({_reason(error)})") from error

    def _block_of(self, rows: Ints) -> Ints:
        found: Ints = np.searchsorted(self._bounds, rows, side="right") - 1
        return found


def _blank(form: ArrayForm | None) -> NDArray[Any]:
    """Return what stands for a sample that doesn't exist."""
    return np.empty(0, np.uint8) if form is None else form.empty


def _checked(type: FieldType, values: Any, rows: int) -> tuple[Samples, NDArray[np.bool_] | None]:
    """Return the samples of a field, and which records have it. Raises ValueError if they don't fit
    the field."""
    if len(values) != rows:
        raise ValueError(f"{len(values):,} values, and the index has {rows:,} records")
    present, form = None, type.stored
    if isinstance(values, list) and any(each is None for each in values):
        present = np.array([each is not None for each in values])
        values = [_blank(form) if each is None else each for each in values]
    if form is None:
        texts = [each.encode() if isinstance(each, str) else each for each in values]
        return [np.frombuffer(each, np.uint8) for each in texts], present
    if form.is_ragged:
        return [_numbers(type, each, form, form.shape) for each in values], present
    return _numbers(type, values, form, (rows, *form.shape)), present


def _numbers(
    type: FieldType, values: Any, form: ArrayForm, shape: tuple[int | None, ...]
) -> NDArray[Any]:
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


def _mark(wrong: dict[int, str], rows: Ints, reason: str) -> None:
    for row in rows.tolist():
        wrong.setdefault(row, reason)


def _reason(error: Exception) -> str:
    text = str(error)[:200]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
