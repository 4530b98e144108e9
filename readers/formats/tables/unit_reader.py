"""Read rows of a shard whose units (row groups, record batches) hold each field as one chunk.

The index notes where the units' chunks are and how each is decoded, so opening a shard needs no
metadata of its files.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cache import PenstockError
from penstock.readers.fieldtypes import (
    PRESENT,
    ArrayForm,
    DenseColumn,
    EncodedColumn,
    upright_sizes,
)
from penstock.readers.formats.chunked import ChunkReader
from penstock.readers.formats.tables.column_values import (
    DenseRows,
    EncodedRows,
    RaggedRows,
    present_rows,
    reasons,
    values_of,
)
from penstock.readers.types import UNFIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers.fieldtypes import Column, ColumnCrop, FieldType
    from penstock.readers.formats.chunked import ChunkedShardFacts, ShardData
    from penstock.readers.formats.open_shard import Places
    from penstock.readers.formats.tables.column_types import Tensor
    from penstock.readers.types import Encoded

    Ints = NDArray[np.int64]

NO_CHUNK = -1
"""The number of the chunk if a unit's file lacks the column."""

_NULL = (
    "it is null, which the file's statistics don't record: write the file with statistics, and "
    "don't write parts of structs as dictionaries"
)


def tensor_of_json(notes: Any) -> Tensor:
    """Read how a column stores its tensors, and check it. Raises ValueError, TypeError."""
    shape, axes = (tuple(map(int, each)) for each in notes)
    if sorted(axes) != list(range(len(shape))) or not shape or min(shape) < 0:
        raise ValueError("its tensors have axes that don't exist")
    return shape, axes


class UnitReader(ChunkReader):
    """The base of readers of tables; a subclass decodes its format's chunks. Several threads may
    call it."""

    def __init__(self, shard: ChunkedShardFacts) -> None:
        """Read the notes of a shard. Raises ValueError, TypeError, LookupError or OverflowError if
        they are invalid."""
        notes = shard.note
        self._schema = shard.schema
        self._numbers = {name: number for number, name in enumerate(shard.schema)}
        self._bounds = np.concatenate(([0], np.cumsum(shard.units))).astype(np.int64)
        # The shard's files, for messages; of each unit, the number of its file and the unit's first
        # row in that file; and the extent of each field in each unit.
        self._names = [str(name) for name in notes["names"]]
        self._files, self._firsts = (np.array(notes[key], np.int64) for key in ("files", "firsts"))
        self._chunks = np.array(notes["extents"], np.int64).reshape(-1, len(shard.schema))
        self._lacking = frozenset(notes["lacking"])
        counts = {len(shard.units), len(self._files), len(self._firsts), len(self._chunks)}
        if len(counts) > 1 or not len(shard.units) or int(self._bounds[-1]) != shard.samples:
            raise ValueError("the numbers of its units disagree")
        if not self._chunks.min() >= NO_CHUNK or int(self._chunks.max()) >= len(shard.extents):
            raise ValueError("its units have chunks that don't exist")
        if not (self._files.min() >= 0 and self._files.max() < len(self._names)):
            raise ValueError("its units are in files that don't exist")
        if self._firsts.min() < 0:
            raise ValueError("its units begin before their files")
        if len(notes["chunks"]) != len(shard.extents):
            raise ValueError("the number of its chunks is wrong")
        self._last: tuple[bytes, Mapping[int, tuple[Ints, Ints]]] = (b"", {})
        self.read_notes(notes, shard, self._chunks)

    @abstractmethod
    def read_notes(self, notes: Any, shard: ChunkedShardFacts, chunks: Ints) -> None:
        """Read and check the notes on forms and chunks. chunks: the extent of each field in each
        unit, or NO_CHUNK, int64, shape (units, fields). Raises ValueError, TypeError, KeyError."""

    @abstractmethod
    def decode(
        self, extent: int, type: FieldType, data: Encoded, dictionaries: Sequence[Encoded]
    ) -> Any:
        """Return a chunk's values, as `values_table` does. dictionaries: the bytes of the extents
        that `dictionaries` names. Raises ValueError if the bytes are damaged."""

    def is_plain(self, extent: int) -> bool:
        """Return True if a chunk's table consists of views of its bytes when these are mapped."""
        del extent
        return False

    def dictionaries(self, extent: int) -> Sequence[int]:
        """Return the extents of the dictionaries that a chunk is decoded with."""
        del extent
        return ()

    def extents(self, unit: int, field: str) -> list[int]:
        """Return the extents of a chunk and of its dictionaries."""
        chunk = int(self._chunks[unit, self._numbers[field]])
        return [chunk, *self.dictionaries(chunk)]

    def needs(
        self, rows: Ints, fields: Sequence[str], crops: Mapping[str, ColumnCrop]
    ) -> list[int]:
        """Return the extents that these rows need, in the order of the file."""
        del crops
        units = np.unique(self._unit_of(rows))
        columns = [self._numbers[name] for name in fields]
        chunks = self._chunks[units][:, columns]
        found = set(chunks[chunks != NO_CHUNK].tolist())
        return sorted(found.union(*map(self.dictionaries, found)))

    def name(self, row: int) -> str:
        """Return a row's file and its number in that file."""
        unit = int(self._unit_of(np.array([row], np.int64))[0])
        at = int(self._firsts[unit]) + row - int(self._bounds[unit])
        return f"{self._names[int(self._files[unit])]}, row {at}"

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
        """Read rows of a dense field into their places."""
        assert corners is None, "a table's rows have no windows"
        form = self._form(field)
        assert form is not None
        self._collect(field, rows, DenseRows(out, places, form), data, wrong)

    def read_rows(
        self, rows: Ints, fields: Sequence[str], *, data: ShardData, wrong: dict[int, str]
    ) -> Mapping[str, Column]:
        """Read rows of other fields, and `<name>.present` of those that some samples lack."""
        found: dict[str, Column] = {}
        for field in fields:
            form = self._form(field)
            samples: DenseRows | EncodedRows | RaggedRows
            if form is None:
                samples = EncodedRows(len(rows))
            elif form.is_ragged:
                samples = RaggedRows(len(rows), form)
            else:
                out = np.empty((len(rows), *form.fixed_shape), form.dtype)
                samples = DenseRows(out, slice(0, len(rows)), form)
            present = self._collect(field, rows, samples, data, wrong)
            column = samples.column()
            if self._schema[field].has_sides:
                assert isinstance(column, EncodedColumn)
                dims = upright_sizes(column.samples)
                unknown = np.flatnonzero((dims[:, 0] == 0) & present)
                _mark(wrong, unknown, f"{field}: it doesn't begin as an image of a known format")
                column = EncodedColumn(column.samples, dims)
            found[field] = column
            if field in self._lacking:
                found[field + PRESENT] = DenseColumn(present)
        return found

    def _form(self, field: str) -> ArrayForm | None:
        """Return the form of a field's samples, None if they are encoded."""
        type = self._schema[field]
        dtype = type.number
        return type.form if dtype is None else ArrayForm(dtype, ())

    def _collect(
        self,
        field: str,
        rows: Ints,
        samples: DenseRows | EncodedRows | RaggedRows,
        data: ShardData,
        wrong: dict[int, str],
    ) -> NDArray[np.bool_]:
        """Add rows of a field to `samples`; return which of them have it."""
        present = np.ones(len(rows), np.bool_)
        number, may_lack = self._numbers[field], field in self._lacking
        groups = self._groups_of(rows)
        chunks = {int(self._chunks[unit, number]): unit for unit in groups}
        order = [*data.in_order([chunk for chunk in chunks if chunk != NO_CHUNK])]
        for unit in [unit for unit in groups if self._chunks[unit, number] == NO_CHUNK]:
            here, _ = groups[unit]
            present[here] = False
            samples.blank(here)
        for chunk in order:
            unit = chunks[chunk]
            here, local = groups[unit]
            try:
                table = self._table(chunk, field, data, unit, len(here))
                array = values_of(table)
                samples.add(table, array, local, here)
            except ValueError as error:
                if isinstance(error, PenstockError):
                    raise
                _mark(wrong, here, f"{field}: {error}")
                samples.blank(here)
                continue
            for place, reason in reasons(table, local):
                _mark(wrong, here[place : place + 1], f"{field}: {reason}. {UNFIT}")
            has_field = present_rows(array, local)
            if has_field is not None:
                lacking = here[~has_field]
                present[lacking] = False
                samples.blank(lacking)
                if not may_lack:
                    _mark(wrong, lacking, f"{field}: {_NULL}")
        return present

    def _groups_of(self, rows: Ints) -> Mapping[int, tuple[Ints, Ints]]:
        """Return the units of rows, each with the places of its rows among them, and these rows'
        numbers in the unit. A batch reads the same rows of several fields one after the other."""
        key, (known, groups) = rows.tobytes(), self._last
        if known != key:
            units, groups = self._unit_of(rows), {}
            for unit in np.unique(units).tolist():
                here = np.flatnonzero(units == unit)
                groups[unit] = here, rows[here] - self._bounds[unit]
            self._last = key, groups
        return groups

    def _table(self, chunk: int, field: str, data: ShardData, unit: int, taken: int) -> Any:
        """Return a chunk's table. Raises ValueError if it can't be decoded."""
        count = int(self._bounds[unit + 1] - self._bounds[unit])

        def decode() -> Any:
            view, dictionaries = data.view(chunk), self.dictionaries(chunk)
            read = data.read([*dictionaries] if view is not None else [chunk, *dictionaries])
            view = read.pop(0) if view is None else view
            table = self.decode(chunk, self._schema[field], view, read)
            if len(table) != count:
                raise ValueError(f"it has {len(table):,} rows, and the index has {count:,}")
            return table

        is_view = self.is_plain(chunk) and data.view(chunk, size_bytes=0) is not None
        return data.decoded(chunk, decode, uses=count, taken=taken, is_view=is_view)

    def _unit_of(self, rows: Ints) -> Ints:
        found: Ints = np.searchsorted(self._bounds, rows, side="right") - 1
        return found


def _mark(wrong: dict[int, str], places: Ints, reason: str) -> None:
    for place in places.tolist():
        wrong.setdefault(place, reason)
